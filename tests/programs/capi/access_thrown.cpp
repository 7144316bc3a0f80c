// Loops that end by an exception before they have overwritten what they said: the program goes on with what was there.
#include <belay_access.h>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <stdexcept>
#include <time.h>
#include <unistd.h>

// Fewer than 16 pages each: what is missing of them is zeros after a restart.
enum { N = 6000, ARRAYS = 8 };
static uint64_t *all[ARRAYS];
static uint64_t rest[1 << 21];

static void fail(const char *what, uint64_t step) {
    printf("FAIL access_thrown: %s at step %" PRIu64 "\n", what, step);
    fflush(stdout);
    exit(1);
}

static void beat(uint64_t step) {
    const char *name = getenv("BELAY_TEST_BEAT");
    if (!name) return;
    int fd = open(name, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    char line[32];
    snprintf(line, sizeof line, "%019" PRIu64 "\n", step);
    if (fd < 0 || pwrite(fd, line, 20, 0) != 20 || close(fd)) fail("no heartbeat", step);
}

// One of three steps ends at once.
static void overwrite(belay_site site, const belay_ds *data, uint64_t step) {
    using belay::overwrites;
    const belay::loop loop(site, {overwrites(data[0]), overwrites(data[1]), overwrites(data[2]), overwrites(data[3]),
                                  overwrites(data[4]), overwrites(data[5]), overwrites(data[6]), overwrites(data[7])});
    (void)loop;
    if (step % 3 == 1) throw std::runtime_error("no convergence");
    for (int i = 0; i < ARRAYS; i++)
        for (int j = 0; j < N; j++) all[i][j] = step;
}

static void check(belay_site site, const belay_ds *data, belay_ds other, uint64_t right, uint64_t step) {
    using belay::reads;
    const belay::loop loop(site, {reads(data[0]), reads(data[1]), reads(data[2]), reads(data[3]), reads(data[4]),
                                 reads(data[5]), reads(data[6]), reads(data[7]), belay::changes(other)});
    (void)loop;
    for (int i = 0; i < ARRAYS; i++)
        for (int j = 0; j < N; j++)
            if (all[i][j] != right) fail("other values", step);
    for (int j = 0; j < 1 << 21; j++) rest[j] = step;
}

int main() {
    belay_ds data[ARRAYS];
    for (int i = 0; i < ARRAYS; i++) {
        char name[16];
        const size_t extent[] = {N};
        all[i] = static_cast<uint64_t *>(calloc(N, sizeof(uint64_t)));
        snprintf(name, sizeof name, "a%d", i);
        data[i] = belay_dataset(name, all[i], sizeof(uint64_t), 1, extent, nullptr);
        if (!data[i]) fail("no dataset", 0);
    }
    const size_t extent[] = {1 << 21};
    const belay_ds other = belay_dataset("rest", rest, sizeof(uint64_t), 1, extent, nullptr);
    const belay_site writing = belay_site_id("writing"), reading = belay_site_id("reading");
    const char *end = getenv("BELAY_TEST_GO");
    uint64_t right = 0;
    for (uint64_t step = 1; end ? access(end, F_OK) != 0 : step < 300; step++) {
        try {
            overwrite(writing, data, step);
            right = step;
        } catch (const std::runtime_error &) {
        }
        check(reading, data, other, right, step);
        // Where a stop is likely.
        const struct timespec nap = {0, 10000000};
        nanosleep(&nap, nullptr);
        beat(step);
    }
    puts("PASS access_thrown");
    return 0;
}
