// A history under belay whose versions come and go: put, read, discarded, dropped, put again with other bytes. What
// there must be is in memory only, so after a restart it is what was there at the checkpoint; what is done next depends
// on the time of day, so that it is not what was done then. history_rollback DIRECTORY [until-read]
#include "../check.h"
#include <belay.h>

enum { NUMBERS = 60, WORDS = 20000 };
static uint64_t words[WORDS], salt[NUMBERS];
static size_t length[NUMBERS]; // 0: there is no such version
static belay_history *h;
static belay_history_opts opts = {.name = "rollback", .host_bytes = 2 << 20};

static void must(const char *what, int answer) {
    if (answer < 0) fail("%s: %s", what, belay_error());
}

static void open_it(void) {
    must("open", belay_history_open(&opts, &h));
    must("region", belay_history_region(h, 0, words, sizeof words));
}

static uint64_t chance(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return mix(t.tv_sec * 1000000000ULL + t.tv_nsec);
}

static void put(uint64_t v) {
    salt[v] = chance();
    size_t n = 1 + salt[v] % WORDS;
    fill(words, n * 8, salt[v]);
    must("region", belay_history_region(h, 0, words, n * 8));
    must("put", belay_history_put(h, v));
    length[v] = n;
}

static void get(uint64_t v, uint32_t flags) {
    memset(words, 0, sizeof words);
    must("region", belay_history_region(h, 0, words, length[v] * 8));
    int answer = belay_history_get(h, v, flags);
    if (answer < 0) fail("get of version %llu: %s", (unsigned long long)v, belay_error());
    verify(words, length[v] * 8, salt[v], "version");
    if (flags == BELAY_H_DISCARD) length[v] = 0;
}

// Exactly the versions that there must be, with every byte.
static void check_all(void) {
    uint64_t all[NUMBERS];
    size_t n, at = 0;
    must("versions", belay_history_versions(h, all, NUMBERS, &n));
    for (uint64_t v = 0; v < NUMBERS; v++) {
        if (!length[v]) continue;
        CHECK(at < n);
        EQ(all[at++], v);
        get(v, BELAY_H_KEEP);
    }
    EQ(at, n);
}

static void step(void) {
    uint64_t v = chance() % NUMBERS, what = chance() % 8;
    if (!length[v]) {
        put(v);
    } else if (what < 2) {
        get(v, BELAY_H_DISCARD);
    } else if (what < 3) {
        must("drop", belay_history_drop(h, v));
        length[v] = 0;
    } else {
        get(v, BELAY_H_KEEP);
    }
}

int main(int argc, char **argv) {
    begin("history_rollback");
    CHECK(argc > 1);
    opts.dir = argv[1];
    opts.keep = argc > 2 ? BELAY_H_UNTIL_READ : BELAY_H_LASTING;
    open_it();
    for (unsigned n = 0; running(); n++) {
        step();
        if (n % 256 == 255) check_all();
        nap_us(200);
    }
    check_all();
    if (opts.keep == BELAY_H_LASTING) {
        must("close", belay_history_close(h));
        open_it();
        check_all();
        for (uint64_t v = 0; v < NUMBERS; v++)
            if (length[v]) get(v, BELAY_H_DISCARD);
    }
    must("close", belay_history_close(h));
    finish();
}
