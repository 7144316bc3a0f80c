/* Belay: declared accesses of programs that use OPS, or a library of its shape. C++11. Link with -lbelay.
 *
 * OPS knows what each loop does to which dataset, and so nobody has to declare anything: one line in its launcher of loops
 * (ops_par_loop, or what its translator makes of it), before halos are exchanged, says it all:
 *
 *     belay::ops::loop declared(name, ndim, start, end, args, N);
 *
 * `start` and `end` are the points that this process goes through, from `start` up to, but without, `end`, and `args` the
 * loop's `ops_arg`s. The loop ends with the object. Nothing of OPS is included here: any type will do that has the members of
 * ops_arg which are used below, with datasets as arrays of structures.
 *
 * What is written in other places than loops is said there, before it is touched:
 *
 *     belay::ops::loop declared("halo transfer", {from, to});       // anything may happen to these datasets
 *     belay::ops::forget(dat);                                       // before a dataset's memory is given back
 */
#ifndef BELAY_OPS_H
#define BELAY_OPS_H

#include <belay_access.h>
#include <cstdio>
#include <initializer_list>
#include <list>
#include <string>
#include <unordered_map>
#include <vector>

namespace belay {
namespace ops {

/* The numbers that OPS has for accesses and kinds of arguments. */
enum { READ = 0, WRITE = 1, RW = 2, INC = 3 };
enum { ARG_DAT = 1 };
enum { MOST_DIMS = 5 };

/* Which element of a dataset's memory, in dimension `k`, the block's point 0 is. Libraries that have it elsewhere, as with
 * halos inside of a block that is distributed, declare a better match of their own before they use `loop`. */
template <class Dat> int64_t origin(const Dat &dat, int k) { return -static_cast<int64_t>(dat.base[k]) - dat.d_m[k]; }

/* What has been said of a dataset. */
struct known {
    belay_ds dataset;
    const void *data;
    std::vector<size_t> extent;
};

/* By the address of the library's own object. One thread begins loops. */
inline std::unordered_map<const void *, known> &datasets() {
    static std::unordered_map<const void *, known> all;
    return all;
}

inline belay_site site(const char *name) {
    static std::unordered_map<std::string, belay_site> all;
    const std::string key(name);
    const auto found = all.find(key);
    if (found != all.end()) return found->second;
    return all[key] = belay_site_id(name);
}

/* The dataset of `dat`, which has `dims` dimensions; declared when it is first seen, and when it has become another. */
template <class Dat> belay_ds dataset(const Dat &dat, int dims) {
    const std::vector<size_t> extent(dat.size, dat.size + dims);
    known &one = datasets()[&dat];
    if (one.data == dat.data && one.extent == extent) return one.dataset;
    char name[32];
    // Datasets of several blocks may have the same name.
    std::snprintf(name, sizeof name, "%.20s.%d", dat.name, dat.index);
    one.dataset = belay_dataset(name, dat.data, static_cast<size_t>(dat.elem_size), dims, extent.data(), nullptr);
    one.data = dat.data;
    one.extent = extent;
    return one.dataset;
}

template <class Dat> void forget(const Dat *dat) {
    const auto found = datasets().find(dat);
    if (found == datasets().end()) return;
    belay_dataset_forget(found->second.dataset);
    datasets().erase(found);
}

/* A loop of the library, for as long as it lives. */
class loop {
public:
    template <class Arg>
    loop(const char *name, int dims, const int *start, const int *end, const Arg *args, int n)
        : id(site(name)), before(belay::exceptions()) {
        bool is_empty = false;
        for (int k = 0; k < dims; k++) is_empty = is_empty || end[k] <= start[k];
        for (int i = 0; i < n; i++) {
            if (args[i].argtype != ARG_DAT || !args[i].opt) continue;
            // Where there are no points, halos may be exchanged all the same.
            if (!is_empty || !at_the_point(args[i], dims)) add(args[i], dims, start, end);
        }
        belay_enter(id, uses.data(), static_cast<int>(uses.size()));
    }
    template <class Dat>
    loop(const char *name, std::initializer_list<Dat *> dats) : id(site(name)), before(belay::exceptions()) {
        for (const Dat *dat : dats) uses.push_back(belay_use{dataset(*dat, dat->block->dims), BELAY_RW, nullptr, nullptr});
        belay_enter(id, uses.data(), static_cast<int>(uses.size()));
    }
    ~loop() { belay::end(id, before); }
    loop(const loop &) = delete;
    loop &operator=(const loop &) = delete;

private:
    struct bounds {
        int64_t lo[MOST_DIMS], hi[MOST_DIMS];
    };

    template <class Arg> void add(const Arg &arg, int dims, const int *start, const int *end) {
        const belay_ds one = dataset(*arg.dat, dims);
        if (!at_the_point(arg, dims)) {
            // Halos that a loop reads are filled before, in the same call, where other processes have them.
            uses.push_back(belay_use{one, BELAY_RW, nullptr, nullptr});
            return;
        }
        boxes.push_back(bounds());
        for (int k = 0; k < dims; k++) {
            boxes.back().lo[k] = start[k] + origin(*arg.dat, k);
            boxes.back().hi[k] = end[k] + origin(*arg.dat, k);
        }
        const int mode = arg.acc == READ ? BELAY_R : arg.acc == WRITE ? BELAY_W : BELAY_RW;
        uses.push_back(belay_use{one, mode, boxes.back().lo, boxes.back().hi});
    }

    /* Whether a loop uses nothing of a dataset at each point but the element there. */
    template <class Arg> static bool at_the_point(const Arg &arg, int dims) {
        bool is = arg.stencil->points == 1 && arg.stencil->type == 0;
        for (int k = 0; k < dims; k++)
            is = is && arg.stencil->stencil[k] == 0 && arg.stencil->stride[k] == 1 && arg.dat->stride[k] == 1;
        return is;
    }

    belay_site id;
    int before;
    std::vector<belay_use> uses;
    std::list<bounds> boxes;
};

}
}

#endif
