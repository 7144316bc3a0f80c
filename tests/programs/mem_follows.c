// Private mappings of files without a name, a memfd and a deleted file: pages that have not been written show what is
// written to the file, also in a forked process, and where the file has grown; those that have been written, zeros too,
// are the program's own.
#include "check.h"
enum { PAGE = 4096, LENGTH = 12, MAPPED = 14, FIRST = 1, OWN = 4 };
struct board { _Atomic uint64_t turn; uint64_t seed[2][LENGTH]; };
static struct { const char *name; int fd; char *map, *only_read; uint64_t own; } all[2];
static struct board *board;

static void put(int k, int page, uint64_t seed) {
    char b[PAGE];
    fill(b, PAGE, seed);
    EQ(pwrite(all[k].fd, b, PAGE, page * PAGE), PAGE);
    board->seed[k][page] = seed;
}
static void make(int k, const char *name, int fd) {
    all[k].name = name;
    all[k].fd = fd;
    OK(ftruncate(fd, LENGTH * PAGE));
    for (int i = 0; i < LENGTH; i++) put(k, i, (uint64_t)(100 * k + i));
    all[k].map = mmap(NULL, MAPPED * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, FIRST * PAGE);
    all[k].only_read = mmap(NULL, LENGTH * PAGE, PROT_READ, MAP_PRIVATE, fd, 0);
    CHECK(all[k].map != MAP_FAILED && all[k].only_read != MAP_FAILED);
}
static void take(int k, uint64_t seed) {
    all[k].own = seed;
    for (int i = 0; i < OWN; i++) fill(all[k].map + i * PAGE, PAGE, seed + (uint64_t)i);
    memset(all[k].map + OWN * PAGE, 0, PAGE);
}
static void look(int k, const char *who) {
    char what[64];
    snprintf(what, sizeof what, "a page of its own of %s, %s", all[k].name, who);
    for (int i = 0; i < OWN; i++) verify(all[k].map + i * PAGE, PAGE, all[k].own + (uint64_t)i, what);
    for (int i = 0; i < PAGE; i++) EQ(all[k].map[OWN * PAGE + i], 0);
    snprintf(what, sizeof what, "a page of %s, %s", all[k].name, who);
    for (int i = OWN + 1; i + FIRST < LENGTH; i++) verify(all[k].map + i * PAGE, PAGE, board->seed[k][i + FIRST], what);
    for (int i = 0; i < LENGTH; i++) verify(all[k].only_read + i * PAGE, PAGE, board->seed[k][i], what);
}

static void await_turn(uint64_t odd) {
    for (int64_t t0 = now_ns(); board->turn % 2 != odd; nap_us(200))
        if (now_ns() - t0 > 10000000000LL) fail("the other process does not answer");
}
int main(void) {
    begin("mem_follows");
    char path[64];
    snprintf(path, sizeof path, "follows.%d", getpid());
    board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(board != MAP_FAILED);
    make(0, "a memfd", (int)OK(memfd_create("follows", 0)));
    make(1, "a deleted file", (int)OK(open(path, O_RDWR | O_CREAT | O_EXCL, 0600)));
    OK(unlink(path));
    for (int k = 0; k < 2; k++) take(k, (uint64_t)(1000 * (k + 1)));
    pid_t c = (pid_t)OK(fork());
    if (c == 0) {
        begin_child();
        // The maker has them open.
        for (int k = 0; k < 2; k++) OK(close(all[k].fd));
        for (;;) {
            await_turn(1);
            if (board->turn == UINT64_MAX) _exit(0);
            for (int k = 0; k < 2; k++) look(k, "in the child");
            board->turn++;
        }
    }
    for (uint64_t r = 10000; running(); r += 100) {
        await_turn(0);
        for (int k = 0; k < 2; k++) {
            look(k, "as it was");
            put(k, (int)(r / 100 % LENGTH), r + (uint64_t)k);
            // Behind the old end.
            OK(ftruncate(all[k].fd, (LENGTH + 1) * PAGE));
            EQ(all[k].map[(LENGTH - FIRST) * PAGE], 0);
            EQ(pwrite(all[k].fd, "more", 4, LENGTH * PAGE), 4);
            CHECK(!memcmp(all[k].map + (LENGTH - FIRST) * PAGE, "more", 4));
            OK(ftruncate(all[k].fd, LENGTH * PAGE));
            look(k, "with what was written");
            if (r % 700 == 0) take(k, r);
        }
        board->turn++;
        nap_us(300);
    }
    await_turn(0);
    board->turn = UINT64_MAX;
    reap(c, 0);
    return finish();
}
