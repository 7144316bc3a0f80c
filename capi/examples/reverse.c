/* A history of 1,000 versions, larger than its memory, read back in reverse order, as an adjoint solver does. Every byte is checked.
 *
 * cc reverse.c -lbelay -o reverse && ./reverse DIRECTORY [VERSIONS [FLOATS [MEMORY IN BYTES]]]
 */
#include <belay.h>
#include <stdio.h>
#include <stdlib.h>

static void must(const char *what, int answer) {
    if (answer < 0) {
        fprintf(stderr, "%s: %s\n", what, belay_error());
        exit(1);
    }
}

/* The state after a step: something that no other step has. */
static void step(float *state, size_t n, uint64_t number) {
    for (size_t i = 0; i < n; i++)
        state[i] = (float)((number * 2654435761u + i * 40503u) & 0xffffff);
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: reverse DIRECTORY [VERSIONS [FLOATS [MEMORY]]]\n");
        return 2;
    }
    uint64_t versions = argc > 2 ? strtoull(argv[2], NULL, 0) : 1000;
    size_t n = argc > 3 ? strtoull(argv[3], NULL, 0) : 50000;
    float *state = malloc(n * sizeof *state), *expected = malloc(n * sizeof *expected);
    uint64_t number, *order = malloc(versions * sizeof *order);
    if (!state || !expected || !order)
        return 1;

    belay_history_opts opts = {.name = "reverse", .dir = argv[1], .host_bytes = 32 << 20, .keep = BELAY_H_UNTIL_READ};
    if (argc > 4)
        opts.host_bytes = strtoull(argv[4], NULL, 0);
    belay_history *history;
    must("open", belay_history_open(&opts, &history));
    must("region", belay_history_region(history, 0, &number, sizeof number));
    must("region", belay_history_region(history, 1, state, n * sizeof *state));

    for (uint64_t v = 0; v < versions; v++)
        order[v] = versions - 1 - v;
    must("hint", belay_history_hint(history, order, versions));

    for (uint64_t v = 0; v < versions; v++) {
        number = v;
        step(state, n, v);
        must("put", belay_history_put(history, v));
    }
    for (uint64_t v = versions; v-- > 0;) {
        must("get", belay_history_get(history, v, 0));
        step(expected, n, v);
        for (size_t i = 0; i < n; i++)
            if (number != v || state[i] != expected[i]) {
                fprintf(stderr, "version %llu: float %zu is wrong\n", (unsigned long long)v, i);
                return 1;
            }
    }

    belay_history_stats s;
    must("stats", belay_history_get_stats(history, &s));
    printf("%llu versions of %zu bytes: blocked %.3f s in puts, %.3f s in gets; %llu MiB to files, %llu MiB back, %llu gets from memory\n",
           (unsigned long long)versions, n * sizeof *state, s.put_ns / 1e9, s.get_ns / 1e9, (unsigned long long)(s.down >> 20),
           (unsigned long long)(s.up >> 20), (unsigned long long)s.hits);
    must("close", belay_history_close(history));
    free(state);
    free(expected);
    free(order);
    return 0;
}
