// A history under belay: new versions in each round, every second one in the background, and old ones read again; all are kept. history_rounds DIRECTORY
#include "../check.h"
#include <belay.h>

enum { WORDS = 60000 };
static uint64_t words[WORDS];
static belay_history *h;

static uint64_t word(uint64_t v, size_t i) { return (v + 1) * 0x9e3779b97f4a7c15u + i * 0x2545f4914f6cdd1du; }

static void must(const char *what, int answer) {
    if (answer < 0) fail("%s: %s", what, belay_error());
}

static void read_again(uint64_t v) {
    memset(words, 0, sizeof words);
    must("get", belay_history_get(h, v, BELAY_H_KEEP));
    for (size_t i = 0; i < WORDS; i++) EQ(words[i], word(v, i));
}

int main(int argc, char **argv) {
    begin("history_rounds");
    CHECK(argc > 1);
    belay_history_opts opts = {.name = "rounds", .dir = argv[1], .host_bytes = 4 << 20};
    must("open", belay_history_open(&opts, &h));
    must("region", belay_history_region(h, 0, words, sizeof words));
    uint64_t v = 0;
    while (running()) {
        // Enough to be larger than memory, not than the disk.
        if (v < 200) {
            for (size_t i = 0; i < WORDS; i++) words[i] = word(v, i);
            if (v % 2) {
                must("put_async", belay_history_put_async(h, v, NULL, NULL));
                nap_us(v * 7919 % 1000);
                must("put_wait", belay_history_put_wait(h, v++));
            } else {
                must("put", belay_history_put(h, v++));
            }
        }
        read_again((v * 7919) % v);
        nap_us(500);
    }
    for (uint64_t i = 0; i < v; i++) read_again(i);
    must("close", belay_history_close(h));
    finish();
}
