// Heat with fluxes, in a library of OPS's shape: the program declares nothing, the launcher of loops does. ops_shape POINTS
// STEPS; with "wrong" as the third word a loop says that it overwrites points that it leaves out.
#include <belay_ops.h>
#include <cinttypes>
#include <cstdlib>
#include <cstring>

enum { DIMS = 2, ALL_DIMS = 5, HALO = 2 };

struct block_of {
    int index, dims;
};

struct dat_of {
    int index;
    block_of *block;
    int dim, type_size, elem_size;
    int size[ALL_DIMS], base[ALL_DIMS], d_m[ALL_DIMS], d_p[ALL_DIMS];
    char *data;
    const char *name;
    int stride[ALL_DIMS];
};

struct stencil_of {
    int dims, points;
    const int *stencil, *stride;
    int type;
};

struct arg_of {
    dat_of *dat;
    const stencil_of *stencil;
    int dim, acc, argtype, opt;
};

static const int ones[] = {1, 1}, at_point[] = {0, 0}, cross[] = {0, 0, 1, 0, -1, 0, 0, 1, 0, -1};
static const stencil_of point = {DIMS, 1, at_point, ones, 0}, star = {DIMS, 5, cross, ones, 0};
static block_of plate = {0, DIMS};

// As OPS has it: the block's point 0 lies behind the halo.
static dat_of dat(int index, const char *name, int points) {
    dat_of one = {};
    one.index = index, one.block = &plate, one.name = name, one.dim = 1, one.type_size = one.elem_size = sizeof(double);
    for (int k = 0; k < ALL_DIMS; k++) {
        one.size[k] = k < DIMS ? points + 2 * HALO : 1;
        one.d_m[k] = k < DIMS ? -HALO : 0;
        one.d_p[k] = k < DIMS ? HALO : 0;
        one.stride[k] = 1;
    }
    one.data = static_cast<char *>(calloc(static_cast<size_t>(one.size[0]) * one.size[1], sizeof(double)));
    if (!one.data) exit(2);
    return one;
}

static arg_of arg(dat_of &dat, const stencil_of &stencil, int acc) { return {&dat, &stencil, 1, acc, belay::ops::ARG_DAT, 1}; }

static double &at(const arg_of &a, int x, int y) {
    const dat_of &d = *a.dat;
    return reinterpret_cast<double *>(d.data)[(y - d.base[1] - d.d_m[1]) * d.size[0] + x - d.base[0] - d.d_m[0]];
}

// The launcher. A kernel gets the arguments and the point.
template <class Kernel, size_t N>
static void par_loop(Kernel kernel, const char *name, const int (&range)[2 * DIMS], const arg_of (&args)[N]) {
    const int start[] = {range[0], range[2]}, end[] = {range[1], range[3]};
    belay::ops::loop declared(name, DIMS, start, end, args, static_cast<int>(N));
    for (int y = start[1]; y < end[1]; y++)
        for (int x = start[0]; x < end[0]; x++) kernel(args, x, y);
}

int main(int argc, char **argv) {
    const int points = argc > 1 ? atoi(argv[1]) : 100, steps = argc > 2 ? atoi(argv[2]) : 20;
    const bool is_wrong = argc > 3 && !strcmp(argv[3], "wrong");
    dat_of u = dat(0, "u", points), flux = dat(1, "flux", points), change = dat(2, "flux", points);
    dat_of unused = dat(3, "unused", points);
    const int inside[] = {0, points, 0, points}, nothing[] = {0, 0, 0, points};
    const int all[] = {-HALO, points + HALO, -HALO, points + HALO};
    const arg_of first[] = {arg(u, point, belay::ops::WRITE)};
    par_loop([](const arg_of *a, int x, int y) { at(a[0], x, y) = (x * 7 + y * 3) % 11; }, "first values", all, first);
    for (int step = 1; step <= steps; step++) {
        arg_of fluxes[] = {arg(u, star, belay::ops::READ), arg(flux, point, belay::ops::WRITE),
                           arg(unused, point, belay::ops::WRITE)};
        fluxes[2].opt = 0;
        par_loop(
            [](const arg_of *a, int x, int y) {
                const double beside = at(a[0], x - 1, y) + at(a[0], x + 1, y) + at(a[0], x, y - 1) + at(a[0], x, y + 1);
                at(a[1], x, y) = beside - 4 * at(a[0], x, y);
            },
            "fluxes", inside, fluxes);
        const arg_of changes[] = {arg(flux, point, belay::ops::READ), arg(change, point, belay::ops::WRITE)};
        par_loop(
            [=](const arg_of *a, int x, int y) {
                if (!is_wrong || x) at(a[1], x, y) = 0.1 * at(a[0], x, y);
            },
            "changes", inside, changes);
        const arg_of update[] = {arg(change, point, belay::ops::READ), arg(u, point, belay::ops::INC)};
        par_loop([](const arg_of *a, int x, int y) { at(a[1], x, y) += at(a[0], x, y); }, "update", inside, update);
        const arg_of none[] = {arg(u, point, belay::ops::WRITE)};
        par_loop([](const arg_of *, int, int) { abort(); }, "nothing", nothing, none);
        if (step % 10 == 0) printf("step %d\n", step), fflush(stdout);
    }
    uint64_t sum = 0;
    {
        belay::ops::loop declared("sum", {&u});
        for (int y = 0; y < points; y++)
            for (int x = 0; x < points; x++) {
                uint64_t bits;
                memcpy(&bits, &at(first[0], x, y), sizeof bits);
                sum = (sum << 1 | sum >> 63) ^ bits;
            }
    }
    for (const dat_of *d : {&u, &flux, &change, &unused}) {
        belay::ops::forget(d);
        free(d->data);
    }
    printf("checksum %016" PRIx64 "\n", sum);
}
