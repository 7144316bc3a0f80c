// What a program may do between its loops, in turns: fork a child that reads what is overwritten meanwhile, read a part
// of an array before the rest is overwritten, declare an array again with fewer elements, keep it for a while, use it
// through another declaration. Every element is checked wherever it is read.
#include "../check.h"
#include <belay.h>
#include <belay_access.h>

enum { NX = 16384, NY = 32, ALL = NX * NY, EDGE = 16 };
static uint64_t (*a)[NX], (*spare)[NX];
static belay_ds data;
static belay_site site;
static uint64_t turn;

static uint64_t word(uint64_t t, size_t i) { return (i + 1) * 0x9e3779b97f4a7c15u + t * 0x2545f4914f6cdd1du; }

static belay_ds declare(const char *name, size_t ny) {
    const size_t extent[] = {NX, ny};
    belay_ds d = belay_dataset(name, a, sizeof(uint64_t), 2, extent, NULL);
    if (!d) fail("declare %s: %s", name, belay_error());
    return d;
}

static void check(size_t x0, size_t x1) {
    for (size_t y = 0; y < NY; y++)
        for (size_t x = x0; x < x1; x++) EQ(a[y][x], word(turn, y * NX + x));
}

static void store(size_t x0, size_t x1, size_t y0) {
    for (size_t y = y0; y < NY; y++)
        for (size_t x = x0; x < x1; x++) a[y][x] = word(turn, y * NX + x);
}

static void loop(belay_ds d, int mode, const int64_t *lo, const int64_t *hi) {
    belay_use use = {d, mode, lo, hi};
    belay_enter(site, &use, 1);
}

static void overwrite(void) {
    turn++;
    loop(data, BELAY_W, NULL, NULL);
    store(0, NX, 0);
    belay_leave(site);
}

static void look(belay_ds d) {
    loop(d, BELAY_R, NULL, NULL);
    check(0, NX);
    belay_leave(site);
}

// The child reads what there was, while it is overwritten here.
static void with_child(void) {
    int go[2];
    CHECK(pipe(go) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        char c;
        close(go[1]);
        while (read(go[0], &c, 1) < 0) {}
        check(0, NX);
        _exit(0);
    }
    overwrite();
    close(go[0]), close(go[1]);
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    if (status) fail("the child has ended with status %x", status);
}

// As programs do that become daemons.
static void close_all(void) {
    int closed = 0;
    for (int fd = 3; fd < 1024; fd++) {
        char link[32], name[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t n = readlink(link, name, sizeof name - 1);
        if (n < 0) continue;
        name[n] = 0;
        if (strstr(name, "belay-access")) closed += !close(fd);
    }
    CHECK(closed > 0);
}

// access_turns [closed|unlisted]
int main(int argc, char **argv) {
    begin("access_turns");
    a = mmap(NULL, sizeof(uint64_t) * ALL, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    spare = mmap(NULL, sizeof(uint64_t) * ALL, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(a != MAP_FAILED && spare != MAP_FAILED);
    data = declare("data", NY);
    if (argc > 1 && !strcmp(argv[1], "closed")) close_all();
    // One for all loops: none is better to stop at than another.
    site = belay_site_id("loop");
    // A loop that does not say what it uses: nothing counts any more.
    if (argc > 1 && !strcmp(argv[1], "unlisted")) belay_enter(site, NULL, 1), belay_leave(site);
    const int64_t edge_lo[] = {0, 0}, edge_hi[] = {EDGE, NY}, rest_lo[] = {EDGE, 0}, rest_hi[] = {NX, NY};
    store(0, NX, 0);
    while (running()) {
        // Where a stop is likely, here and below.
        nap_us(4000);
        // A part of each row is read, and then the rest of all rows is overwritten.
        loop(data, BELAY_R, edge_lo, edge_hi);
        check(0, EDGE);
        belay_leave(site);
        turn++;
        loop(data, BELAY_W, rest_lo, rest_hi);
        store(EDGE, NX, 0);
        belay_leave(site);
        loop(data, BELAY_W, edge_lo, edge_hi);
        store(0, EDGE, 0);
        belay_leave(site);
        nap_us(4000);
        with_child();
        nap_us(4000);
        // Fewer rows are overwritten than there were.
        data = declare("data", 1);
        loop(data, BELAY_W, NULL, NULL);
        for (size_t x = 0; x < NX; x++) a[0][x] = word(turn, x);
        belay_leave(site);
        data = declare("data", NY);
        look(data);
        nap_us(4000);
        // Another declaration of the same memory reads it before it is overwritten.
        belay_ds other = declare("other", NY);
        look(other);
        CHECK(!belay_dataset_forget(other));
        overwrite();
        nap_us(4000);
        // What is no dataset for a while may be read by anybody.
        CHECK(!belay_dataset_forget(data));
        check(0, NX);
        data = declare("data", NY);
        overwrite();
        // Another declaration that is kept reads it, too.
        other = declare("other", NY);
        CHECK(!belay_live(other, 1));
        nap_us(4000);
        look(other);
        overwrite();
        CHECK(!belay_live(other, 0) && !belay_dataset_forget(other));
        // Datasets change places in a loop that goes on reading.
        const size_t extent[] = {NX, NY};
        belay_ds next = belay_dataset("next", spare, sizeof(uint64_t), 2, extent, NULL);
        loop(data, BELAY_R, NULL, NULL);
        CHECK(!belay_dataset_move(data, spare) && !belay_dataset_move(next, a));
        nap_us(4000);
        check(0, NX);
        belay_leave(site);
        turn++;
        loop(next, BELAY_W, NULL, NULL);
        store(0, NX, 0);
        belay_leave(site);
        CHECK(!belay_dataset_move(next, spare) && !belay_dataset_move(data, a) && !belay_dataset_forget(next));
    }
    finish();
}
