// Two processes with parts of a global array, each with ghosts around it and padded rows, which come to their points
// together. portable save KIND: the parts belong together (right), or do not in one way. portable start KIND: one process
// fills its part from what those have left, another part than theirs; KIND says which, or what it does wrong.
#include "../check.h"
#include <belay.h>
#include <belay_access.h>
#include <setjmp.h>

enum { NX = 60, NY = 48, PADDED = NX + 7 };
typedef uint64_t element;
struct payload {
    uint64_t step;
    char note[32];
};
static belay_ds dataset;
static element *own;
// Rows of this process, and the first of them.
static int first, rows;

static int is(const char *kind, const char *name) { return !strcmp(kind, name); }
static element value(uint64_t step, int x, int y) { return step * 1000003 + (uint64_t)y * NX + x; }
// Row 0 and column 0 are ghosts.
static element *at(int x, int y) { return own + (size_t)(y - first + 1) * PADDED + x + 1; }

static void allocate(const char *name, size_t elem) {
    const size_t extent[] = {NX + 2, rows + 2}, stride[] = {sizeof(element), PADDED * sizeof(element)};
    size_t bytes = (size_t)(rows + 2) * PADDED * sizeof(element);
    own = mmap(NULL, bytes + 64, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(own != MAP_FAILED);
    own += 3;
    memset(own, 0xee, bytes);
    dataset = belay_dataset(name, own, elem, 2, extent, stride);
    CHECK(dataset);
}

static int part(int more, int lo, int hi) {
    const size_t global[] = {NX, NY + more};
    const int64_t lower[] = {-1, first - 1}, from[] = {1, 1 + lo - first}, to[] = {NX + 1, 1 + hi - first};
    return belay_dataset_part(dataset, global, lower, from, to);
}

// What cannot be a part is refused when it is said.
static void wrong_parts(void) {
    const size_t global[] = {NX, NY}, none[] = {0, NY}, many[] = {(size_t)1 << 40, (size_t)1 << 40};
    const int64_t lower[] = {-1, first - 1}, far[] = {-1, 1 << 20}, below[] = {-1, 0}, lo[] = {1, 1}, hi[] = {NX + 1, rows + 1};
    EQ(belay_dataset_part(dataset, none, lower, lo, hi), -EINVAL);
    EQ(belay_dataset_part(dataset, many, lower, lo, hi), -EINVAL);
    EQ(belay_dataset_part(dataset, global, far, lo, hi), -EINVAL);
    EQ(belay_dataset_part(dataset, global, lower, below, hi), -EINVAL);
    EQ(belay_dataset_part(dataset, global, lower, hi, lo), -EINVAL);
    EQ(belay_dataset_part(dataset, global, lower, lo, NULL), -EINVAL);
    EQ(belay_dataset_part(dataset, global, lower, NULL, NULL), -EINVAL); // the ghosts lie outside
    EQ(belay_dataset_part(dataset, NULL, lower, lo, hi), -EINVAL);
    EQ(belay_dataset_part(77, global, lower, lo, hi), -ENOENT);
    EQ(belay_point(4097, own), -EINVAL);
    EQ(belay_point(8, NULL), -EINVAL);
}

static void overwrite(uint64_t step, int lo, int hi) {
    for (int y = lo; y < hi; y++)
        for (int x = 0; x < NX; x++) *at(x, y) = value(step, x, y);
}

// One step of both: `go` brings a byte of the other, `told` takes one there.
static void together(int go, int told) {
    char byte = 0;
    full_write(told, &byte, 1);
    full_read(go, &byte, 1);
}

static sigjmp_buf outside;
static volatile sig_atomic_t is_inside;
static void jump(int signal) {
    (void)signal;
    if (is_inside) siglongjmp(outside, 1);
}

static void come(const char *kind, int second, uint64_t step) {
    struct payload payload = {.step = step};
    snprintf(payload.note, sizeof payload.note, "step %lu of %s", step, second && is(kind, "payload") ? "another" : kind);
    if (second && is(kind, "late")) return;
    int jumps = second && is(kind, "jump");
    if (jumps && sigsetjmp(outside, 1) == 0) {
        is_inside = 1;
        CHECK(signal(SIGALRM, jump) != SIG_ERR);
        ualarm(200, 0);
        EQ(belay_point(sizeof payload, &payload), 0);
    }
    if (!jumps) EQ(belay_point(sizeof payload, &payload), 0);
    is_inside = 0;
    if (jumps) ualarm(0, 0);
}

static void save(const char *kind) {
    int up[2], down[2];
    OK(pipe(up)), OK(pipe(down));
    pid_t child = OK(fork());
    int second = child == 0, go = second ? down[0] : up[0], told = second ? up[1] : down[1];
    if (second) begin_child(), OK(prctl(PR_SET_PDEATHSIG, SIGKILL));
    int lo = second ? NY / 2 : 0, hi = second ? NY : NY / 2, more = 0;
    if (second && is(kind, "gap")) lo++;
    if (second && is(kind, "overlap")) lo--;
    if (second && is(kind, "extent")) more = 1;
    first = lo, rows = hi - lo;
    allocate("field", second && is(kind, "elem") ? 4 : sizeof(element));
    wrong_parts();
    if (!is(kind, "single")) EQ(part(more, lo, hi), 0);
    if (!second) {
        const size_t extent[] = {100};
        element *alone = calloc(extent[0], sizeof *alone);
        CHECK(alone);
        fill(alone, extent[0] * sizeof *alone, 5);
        CHECK(belay_dataset("alone", alone, sizeof(element), 1, extent, NULL));
    }
    struct payload none = {.step = 1};
    EQ(belay_fastforward(&none, sizeof none), 0);
    if (second && is(kind, "number")) come("right", 0, 0);
    for (uint64_t step = 1;; step++) {
        // Between the points what there is belongs to no step, and the two are in different ones.
        overwrite(step, lo, (lo + hi) / 2);
        // Who has jumped out of its wait is here, long after.
        nap_us(second ? is(kind, "jump") ? 20000 : 300 : 900);
        overwrite(step, (lo + hi) / 2, hi);
        together(go, told);
        come(kind, second, step);
        if (!second && !running()) break;
    }
    OK(kill(child, SIGKILL));
    reap(child, SIGKILL);
    finish();
}

static void start(const char *kind) {
    // Another division: the middle, or all of it.
    int some = is(kind, "some");
    first = some ? 7 : 0, rows = some ? 30 : NY;
    allocate(is(kind, "missing") ? "other" : "field", is(kind, "elem") ? 4 : sizeof(element));
    EQ(part(is(kind, "extent"), first, first + rows), 0);
    struct payload payload = {0};
    int found = belay_fastforward(&payload, sizeof payload - is(kind, "payload"));
    if (found < 0) {
        printf("not started: %d\n", -found);
        return;
    }
    EQ(found, 1);
    CHECK(payload.step > 0);
    int bottom = some ? first - 1 : 0, top = some ? first + rows + 1 : NY;
    for (int y = first - 1; y <= first + rows; y++)
        for (int x = -1; x <= NX; x++) {
            int is_there = x >= 0 && x < NX && y >= bottom && y < top;
            element expected = is_there ? value(payload.step, x, y) : 0xeeeeeeeeeeeeeeee;
            if (*at(x, y) != expected) fail("element %d, %d is %lx instead of %lx", x, y, *at(x, y), expected);
        }
    // What lies between the rows is nobody's.
    EQ(own[PADDED - 1], 0xeeeeeeeeeeeeeeee);
    printf("started: %s\n", payload.note);
}

int main(int argc, char **argv) {
    begin("portable");
    CHECK(argc == 3);
    if (is(argv[1], "save")) save(argv[2]);
    else start(argv[2]);
    return 0;
}
