/* Puts in the background: what they promise, and wrong use of them. background DIRECTORY */
#include <belay.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LARGE = 64 << 20 };
static const char *dir;
static belay_history *h;
static char *memory;

static void is(const char *what, long answer, long expected) {
    if (answer == expected)
        return;
    fprintf(stderr, "%s: %ld (%s), expected %ld\n", what, answer, belay_error(), expected);
    exit(1);
}

static void open_with(const char *name, uint64_t host_bytes, uint32_t keep) {
    belay_history_opts opts = {.name = name, .dir = dir, .host_bytes = host_bytes, .keep = keep};
    is("open", belay_history_open(&opts, &h), 0);
}

static int begin(uint64_t version) { return belay_history_put_async(h, version, NULL, NULL); }

static char *mapped(size_t bytes) {
    char *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    is("mapped", at == MAP_FAILED, 0);
    return at;
}

/* The version has this byte everywhere. */
static void holds(uint64_t version, char byte, size_t bytes) {
    memset(memory, ~byte, bytes);
    is("get", belay_history_get(h, version, BELAY_H_KEEP), 0);
    for (size_t i = 0; i < bytes; i++)
        is("byte", memory[i], byte);
}

/* A call returns while its version is being written, at least once of many times: a busy machine may be slow to go on. */
static void returns_early(void) {
    int early = 0;
    uint64_t v;
    for (v = 1; v <= 50 && !early; v++) {
        belay_history_stats before, after;
        memset(memory, (int)v, LARGE);
        is("stats", belay_history_get_stats(h, &before), 0);
        is("put_async", begin(v), 0);
        int there = belay_history_is_at(h, BELAY_H_IN_HOST);
        is("stats", belay_history_get_stats(h, &after), 0);
        early = after.puts == before.puts && !there;
        is("put_wait", belay_history_put_wait(h, v), 0);
        is("stats", belay_history_get_stats(h, &after), 0);
        is("puts after a wait", (long)(after.puts - before.puts), 1);
        is("put_wait again", belay_history_put_wait(h, v), 0);
        if (!early)
            is("drop", belay_history_drop(h, v), 0);
    }
    is("returned before the copy", early, 1);
    holds(v - 1, (char)(v - 1), LARGE);
    is("drop", belay_history_drop(h, v - 1), 0);
}

/* What comes next finds the version there. */
static void next_calls(void) {
    size_t n;
    uint32_t id;
    uint64_t all[3];
    memset(memory, 'a', LARGE);
    is("put_async", begin(100), 0);
    is("size", belay_history_size(h, 100, 0, &n), 0);
    is("bytes", (long)n, LARGE);
    is("put_async", begin(101), 0);
    is("put of the same", belay_history_put(h, 101), -EEXIST);
    is("put_async of the same", begin(101), -EEXIST);
    is("drop", belay_history_drop(h, 100), 0);
    is("put_async", begin(100), 0);
    is("put_async of the same", begin(100), -EEXIST);
    is("drop of what goes on", belay_history_drop(h, 100), 0);
    is("get of what was dropped", belay_history_get(h, 100, 0), -ESTALE);
    is("put_wait of what was dropped", belay_history_put_wait(h, 100), -ESTALE);
    is("put_async", begin(102), 0);
    is("versions", belay_history_versions(h, all, 3, &n), 0);
    is("how many", (long)n, 2);
    is("drop", belay_history_drop(h, 102), 0);
    is("put_async", begin(103), 0);
    is("regions", belay_history_regions(h, 103, &id, 1, &n), 0);
    is("drop", belay_history_drop(h, 103), 0);
    is("put_async", begin(104), 0);
    is("get of what goes on", belay_history_get(h, 104, BELAY_H_DISCARD), 0);
    is("a byte", memory[LARGE - 1], 'a');
    holds(101, 'a', LARGE);
    is("drop", belay_history_drop(h, 101), 0);
}

/* Small ones, of which many have not been begun when the next call comes. */
static void many(void) {
    is("region", belay_history_region(h, 0, memory, 4096), 0);
    for (uint64_t v = 1000; v < 2000; v++) {
        belay_history_stats before, after;
        is("stats", belay_history_get_stats(h, &before), 0);
        is("put_async", begin(v), 0);
        int there = belay_history_is_at(h, BELAY_H_IN_HOST);
        is("stats", belay_history_get_stats(h, &after), 0);
        is("there before it was put", there && after.puts == before.puts, 0);
        is("drop", belay_history_drop(h, v), 0);
    }
    is("region", belay_history_region(h, 0, memory, LARGE), 0);
}

/* Memory that a region has had is not touched any more. */
static void memory_goes(void) {
    for (uint64_t v = 200; v < 205; v++) {
        char *other = mapped(LARGE);
        memset(other, (int)v, LARGE);
        is("region", belay_history_region(h, 0, other, LARGE), 0);
        is("put_async", begin(v), 0);
        is("another region", belay_history_region(h, 0, memory, LARGE), 0);
        is("unmapped", munmap(other, LARGE), 0);
        is("put_wait", belay_history_put_wait(h, v), 0);
        holds(v, (char)v, LARGE);
        is("drop", belay_history_drop(h, v), 0);
    }
}

static void wrong_use(void) {
    static char one;
    is("without a history", belay_history_put_async(NULL, 1, NULL, NULL), -EINVAL);
    is("wait without a history", belay_history_put_wait(NULL, 1), -EINVAL);
    is("with a stream", belay_history_put_async(h, 300, &one, NULL), -ENODEV);
    is("with an event", belay_history_put_async(h, 300, NULL, &one), -ENODEV);
    is("wait for what was never put", belay_history_put_wait(h, 300), -ENODATA);
}

/* A child of a moment in which a put goes on. */
static void forked(void) {
    int status;
    is("put_async", begin(400), 0);
    pid_t child = fork();
    if (!child) {
        alarm(20);
        is("put_async in a child", begin(401), -ECHILD);
        is("put_wait in a child", belay_history_put_wait(h, 400), -ECHILD);
        is("get in a child", belay_history_get(h, 400, 0), -ECHILD);
        is("close in a child", belay_history_close(h), -ECHILD);
        _exit(0);
    }
    is("child", waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : -1, 0);
    is("put_wait", belay_history_put_wait(h, 400), 0);
    is("drop", belay_history_drop(h, 400), 0);
}

static void *puts_of(void *from) {
    for (uint64_t v = (uintptr_t)from; v < (uintptr_t)from + 5; v++) {
        is("put_async in a thread", begin(v), 0);
        is("put_wait in a thread", v % 2 ? belay_history_put_wait(h, v) : 0, 0);
    }
    return NULL;
}

static void threads(void) {
    pthread_t all[4];
    size_t n;
    is("region", belay_history_region(h, 0, memory, 1 << 20), 0);
    for (uintptr_t t = 0; t < 4; t++)
        is("thread", pthread_create(&all[t], NULL, puts_of, (void *)(500 + 5 * t)), 0);
    for (int t = 0; t < 4; t++)
        pthread_join(all[t], NULL);
    is("versions", belay_history_versions(h, NULL, 0, &n), 0);
    is("how many", (long)n, 20);
}

/* Files may not become as large as a version: none of these can be written, and each is said once. */
static void failures(void) {
    struct rlimit limit;
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &limit);
    rlim_t before = limit.rlim_cur;
    open_with("failures", 1 << 20, BELAY_H_LASTING);
    is("region", belay_history_region(h, 0, memory, LARGE), 0);
    limit.rlim_cur = 1 << 20;
    setrlimit(RLIMIT_FSIZE, &limit);
    is("put_async", begin(1), 0);
    is("put_wait", belay_history_put_wait(h, 1), -EFBIG);
    is("put_wait again", belay_history_put_wait(h, 1), -ENODATA);
    is("wait", belay_history_wait(h, BELAY_H_LOCAL), 0);
    is("put_async", begin(2), 0);
    is("put_async", begin(3), 0);
    is("wait", belay_history_wait(h, BELAY_H_LOCAL), -EFBIG);
    is("wait", belay_history_wait(h, BELAY_H_LOCAL), -EFBIG);
    is("wait", belay_history_wait(h, BELAY_H_LOCAL), 0);
    is("put_async", begin(4), 0);
    is("put_wait", belay_history_put_wait(h, 4), -EFBIG);
    limit.rlim_cur = before;
    setrlimit(RLIMIT_FSIZE, &limit);
    is("put_async of the same", begin(4), 0);
    is("put_wait", belay_history_put_wait(h, 4), 0);
    limit.rlim_cur = 1 << 20;
    setrlimit(RLIMIT_FSIZE, &limit);
    is("put_async", begin(5), 0);
    is("close", belay_history_close(h), -EFBIG);
    limit.rlim_cur = before;
    setrlimit(RLIMIT_FSIZE, &limit);
}

/* What goes on when a history is closed is there when it is opened again. */
static void closed(void) {
    open_with("closed", 2 * (uint64_t)LARGE, BELAY_H_LASTING);
    is("region", belay_history_region(h, 0, memory, LARGE), 0);
    memset(memory, 'c', LARGE);
    is("put_async", begin(1), 0);
    is("close", belay_history_close(h), 0);
    open_with("closed", 2 * (uint64_t)LARGE, BELAY_H_LASTING);
    is("region", belay_history_region(h, 0, memory, LARGE), 0);
    holds(1, 'c', LARGE);
    is("put_async", begin(2), 0);
    is("wait", belay_history_wait(h, BELAY_H_LOCAL), 0);
    is("all is there", belay_history_is_at(h, BELAY_H_LOCAL), 1);
    is("drop", belay_history_drop(h, 1), 0);
    is("drop", belay_history_drop(h, 2), 0);
    is("close", belay_history_close(h), 0);
}

int main(int argc, char **argv) {
    if (argc < 2)
        return 2;
    dir = argv[1];
    memory = mapped(LARGE);
    open_with("background", 4 * (uint64_t)LARGE, BELAY_H_UNTIL_READ);
    is("region", belay_history_region(h, 0, memory, LARGE), 0);
    returns_early();
    next_calls();
    many();
    memory_goes();
    wrong_use();
    forked();
    threads();
    is("close", belay_history_close(h), 0);
    failures();
    closed();
    return 0;
}
