/* Puts versions that last until it is killed, and says which are in files. When it is started again, all those must be there, and every byte of every version that is.
 *
 * steps DIRECTORY FIRST: versions from FIRST on are new; prints "safe N" when all before N are in files, and "read N" before it discards version N.
 * steps DIRECTORY LOW HIGH: versions from LOW to before HIGH must be there. Prints the first number that is free.
 * steps DIRECTORY full: puts until there is no room; what has been put must come back. What is dropped makes room at once.
 */
#include <belay.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WORDS = 40000 };
static uint64_t words[WORDS];
static belay_history *h;

static void must(const char *what, int answer) {
    if (answer < 0) {
        printf("wrong: %s: %s\n", what, belay_error());
        exit(1);
    }
}

static size_t length(uint64_t v) { return 1 + (v * 7919) % WORDS; }

static uint64_t word(uint64_t v, size_t i) { return (v + 1) * 0x9e3779b97f4a7c15u + i * 0x2545f4914f6cdd1du; }

static int put(uint64_t v) {
    for (size_t i = 0; i < length(v); i++)
        words[i] = word(v, i);
    must("region", belay_history_region(h, 1, words, length(v) * sizeof *words));
    return belay_history_put(h, v);
}

static void get(uint64_t v, uint32_t flags) {
    memset(words, 0, sizeof words);
    must("region", belay_history_region(h, 1, words, length(v) * sizeof *words));
    must("get", belay_history_get(h, v, flags));
    for (size_t i = 0; i < length(v); i++)
        if (words[i] != word(v, i)) {
            printf("wrong: version %llu, word %zu\n", (unsigned long long)v, i);
            exit(1);
        }
}

static void steps(uint64_t v) {
    for (uint64_t oldest = v;; v++) {
        must("put", put(v));
        if (v % 8 == 7) {
            must("wait", belay_history_wait(h, BELAY_H_LOCAL));
            printf("safe %llu\n", (unsigned long long)v + 1);
            fflush(stdout);
        }
        if (v % 3 == 0) {
            printf("read %llu\n", (unsigned long long)oldest);
            fflush(stdout);
            get(oldest++, BELAY_H_DISCARD);
        }
    }
}

static void check(uint64_t low, uint64_t high) {
    size_t n;
    must("versions", belay_history_versions(h, NULL, 0, &n));
    uint64_t *all = malloc((n + 1) * sizeof *all), next = high;
    must("versions", belay_history_versions(h, all, n, &n));
    for (size_t i = 0; i < n; i++) {
        get(all[i], BELAY_H_KEEP);
        low += all[i] == low;
        next = all[i] >= next ? all[i] + 1 : next;
    }
    if (low < high) {
        printf("wrong: version %llu of those before %llu is lost\n", (unsigned long long)low, (unsigned long long)high);
        exit(1);
    }
    /* What was being written is whole or not there. */
    for (uint64_t v = next; v < next + 100; v++) {
        int answer = belay_history_get(h, v, BELAY_H_KEEP);
        if (answer != -ENODATA) {
            printf("wrong: version %llu: %d: %s\n", (unsigned long long)v, answer, belay_error());
            exit(1);
        }
    }
    for (size_t i = 0; i < n; i++)
        if (all[i] < low)
            must("drop", belay_history_drop(h, all[i]));
    printf("next %llu\n", (unsigned long long)next);
    free(all);
}

static void full(void) {
    uint64_t n = 0;
    int answer;
    while (!(answer = put(n)))
        n++;
    if (answer != -ENOSPC) {
        printf("wrong: the answer of a full disk is %d: %s\n", answer, belay_error());
        exit(1);
    }
    if ((answer = belay_history_wait(h, BELAY_H_LOCAL)) != -ENOSPC) {
        printf("wrong: the answer of a wait is %d: %s\n", answer, belay_error());
        exit(1);
    }
    /* Each that is read makes room for another. */
    for (uint64_t v = 0; v < n; v++)
        get(v, BELAY_H_DISCARD);
    must("put", put(n));
    must("wait", belay_history_wait(h, BELAY_H_DURABLE));
    printf("put %llu\n", (unsigned long long)n);
}

/* Versions that go past memory: each put after a drop finds the room of what was dropped. */
static void in_its_place(const char *dir) {
    static char large[2 << 20];
    belay_history_opts opts = {.name = "large", .dir = dir, .host_bytes = 1 << 20};
    belay_history *l;
    uint64_t first = 0, next = 0;
    int answer;
    memset(large, 'x', sizeof large);
    must("open", belay_history_open(&opts, &l));
    must("region", belay_history_region(l, 1, large, sizeof large));
    while (!(answer = belay_history_put(l, next)))
        next++;
    if (answer != -ENOSPC || next < 2) {
        printf("wrong: version %llu on a full disk: %d\n", (unsigned long long)next, answer);
        exit(1);
    }
    for (int i = 0; i < 300; i++) {
        must("drop", belay_history_drop(l, first++));
        must("put in its place", belay_history_put(l, next++));
    }
    must("close", belay_history_close(l));
}

int main(int argc, char **argv) {
    if (argc < 3)
        return 2;
    belay_history_opts opts = {.name = "steps", .dir = argv[1], .host_bytes = 2 << 20};
    must("open", belay_history_open(&opts, &h));
    if (argc > 3)
        check(strtoull(argv[2], NULL, 0), strtoull(argv[3], NULL, 0));
    else if (!strcmp(argv[2], "full"))
        full(), in_its_place(argv[1]);
    else
        steps(strtoull(argv[2], NULL, 0));
    must("close", belay_history_close(h));
    return 0;
}
