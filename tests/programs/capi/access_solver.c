// A solver that declares what its loops do: two temporaries, one with a rim that is written once, and two buffers that
// change places. Every element is checked wherever it is read. access_solver one-site: all loops have one site, so that
// none is better to stop at than another. access_solver [declared|undeclared|handled FILE]: once the file is there, it goes
// another way, and reads what it would have overwritten; "handled" has a handler of SIGSEGV of its own, which must be called as
// it has asked for.
#include "../check.h"
#include <belay.h>
#include <belay_access.h>

enum { NX = 1024, NY = 256, RIM = 2 };
typedef uint64_t grid[NY][NX];
static grid *field, *next, *inner, *whole;
static belay_ds d_field, d_next, d_inner, d_whole;
static const size_t extent[] = {NX, NY};
static const int64_t lo[] = {RIM, RIM}, hi[] = {NX - RIM, NY - RIM};

static uint64_t word(uint64_t step, uint64_t at) { return (at + 1) * 0x9e3779b97f4a7c15u + step * 0x2545f4914f6cdd1du; }

static uint64_t rim(size_t x, size_t y) { return ~(uint64_t)(y * NX + x); }

static int is_inside(size_t x, size_t y) { return x >= RIM && x < NX - RIM && y >= RIM && y < NY - RIM; }

static grid *array(const char *name, belay_ds *dataset) {
    grid *at = mmap(NULL, sizeof(grid) + 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    // Not at the beginning of a page, as malloc would give it.
    at = (grid *)((char *)at + 16);
    *dataset = belay_dataset(name, at, sizeof(uint64_t), 2, extent, NULL);
    if (!*dataset) fail("dataset %s: %s", name, belay_error());
    return at;
}

static void first_values(uint64_t step) {
    for (size_t y = 0; y < NY; y++)
        for (size_t x = 0; x < NX; x++) {
            (*field)[y][x] = word(step, y * NX + x);
            if (!is_inside(x, y)) (*inner)[y][x] = rim(x, y);
        }
}

// Reads temporaries where they are about to be overwritten, with or without saying so.
static void go_astray(const char *how, belay_site site) {
    belay_use uses[] = {{d_inner, BELAY_R, NULL, NULL}, {d_whole, BELAY_R, NULL, NULL}, {d_next, BELAY_R, NULL, NULL}};
    if (!strcmp(how, "declared")) belay_enter(site, uses, 3);
    volatile uint64_t sum = 0;
    for (size_t y = 0; y < NY; y++)
        for (size_t x = 0; x < NX; x++) sum += (*whole)[y][x] + (*next)[y][x];
    fail("what was left out was read: %lu", sum);
}

static void on_segv(int signal, siginfo_t *info, void *context) {
    (void)context;
    sigset_t blocked;
    int is_blocked = !pthread_sigmask(SIG_BLOCK, NULL, &blocked) && sigismember(&blocked, SIGUSR2);
    const char *said = is_blocked && info->si_code == SEGV_ACCERR ? "handled by its own\n" : "handled in another way\n";
    if (write(2, said, strlen(said)) < 0) _exit(1);
    // SA_RESETHAND: the touch comes again, and ends it.
    struct sigaction now;
    if (sigaction(signal, NULL, &now) || now.sa_handler != SIG_DFL) _exit(1);
}

// Before each loop: the next one may bring back what is missing.
static void look(int argc, char **argv, belay_site site) {
    if (argc > 2 && access(argv[2], F_OK) == 0) go_astray(argv[1], site);
}

int main(int argc, char **argv) {
    begin("access_solver");
    if (argc > 2 && !strcmp(argv[1], "handled")) {
        struct sigaction own = {.sa_sigaction = on_segv, .sa_flags = SA_SIGINFO | SA_RESETHAND};
        sigaddset(&own.sa_mask, SIGUSR2);
        CHECK(!sigaction(SIGSEGV, &own, NULL));
    }
    field = array("field", &d_field), next = array("next", &d_next);
    inner = array("inner", &d_inner), whole = array("whole", &d_whole);
    belay_site first = belay_site_id("first"), second = belay_site_id("second"), third = belay_site_id("third");
    CHECK(first && second && third);
    if (argc == 2 && !strcmp(argv[1], "one-site")) second = third = first;
    uint64_t step = 0;
    first_values(step);
    while (running()) {
        look(argc, argv, third);
        belay_use in_first[] = {{d_field, BELAY_R, NULL, NULL}, {d_whole, BELAY_W, NULL, NULL}};
        belay_enter(first, in_first, 2);
        for (size_t y = 0; y < NY; y++)
            for (size_t x = 0; x < NX; x++) {
                EQ((*field)[y][x], word(step, y * NX + x));
                (*whole)[y][x] = (*field)[y][x] ^ x;
            }
        belay_leave(first);
        look(argc, argv, third);
        belay_use in_second[] = {{d_whole, BELAY_R, NULL, NULL}, {d_inner, BELAY_W, lo, hi}};
        belay_enter(second, in_second, 2);
        for (size_t y = RIM; y < NY - RIM; y++)
            for (size_t x = RIM; x < NX - RIM; x++) (*inner)[y][x] = (*whole)[y][x] ^ x;
        belay_leave(second);
        look(argc, argv, third);
        belay_use in_third[] = {{d_inner, BELAY_R, NULL, NULL}, {d_whole, BELAY_R, NULL, NULL}, {d_next, BELAY_W, NULL, NULL}};
        belay_enter(third, in_third, 3);
        for (size_t y = 0; y < NY; y++)
            for (size_t x = 0; x < NX; x++) {
                uint64_t old = word(step, y * NX + x);
                EQ((*whole)[y][x], old ^ x);
                EQ((*inner)[y][x], is_inside(x, y) ? old : rim(x, y));
                (*next)[y][x] = word(step + 1, y * NX + x);
            }
        belay_leave(third);
        grid *swap = field;
        field = next, next = swap;
        CHECK(!belay_dataset_move(d_field, field) && !belay_dataset_move(d_next, next));
        step++;
        if (step % 8 == 0) nap_us(1000);
    }
    finish();
}
