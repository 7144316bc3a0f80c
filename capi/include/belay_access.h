/* Belay: declared accesses. Link with -lbelay. See access.md.
 *
 * A program says what each of its loops does to its large arrays. Belay then leaves out of a checkpoint what the
 * program overwrites before it reads it again, and takes the checkpoint where little is alive. Without Belay, and
 * before the first checkpoint, the calls do next to nothing.
 */
#ifndef BELAY_ACCESS_H
#define BELAY_ACCESS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A dataset, and a place in the program. 0 is none: the call that should have made it has failed (belay_error() says
 * why), and what is said of it is not heard. */
typedef uint32_t belay_ds;
typedef uint32_t belay_site;

enum {
    BELAY_R = 1, /* read */
    BELAY_W = 2, /* the whole part is overwritten, and nothing of it is read before */
    BELAY_RW = 3 /* both, or only some of it is overwritten */
};

/* Declares an array: `elem` bytes an element, `dims` dimensions (1 to 5), of which the first changes fastest; `stride`
 * is in bytes, NULL where all lies side by side. Whoever declares a name again says where that dataset is now. At most
 * 1024. */
belay_ds belay_dataset(const char *name, void *at, size_t elem, int dims, const size_t extent[], const size_t stride[]);
/* The same array lies elsewhere from now on: buffers were exchanged, or it was allocated anew. */
int belay_dataset_move(belay_ds dataset, void *at);
/* It is none any more. Before its memory is given back. */
int belay_dataset_forget(belay_ds dataset);
/* How many dimensions it has; 0 where there is no such dataset. */
int belay_dataset_dims(belay_ds dataset);
/* With 1 it is kept in every checkpoint, whatever loops say of it, also when its name is declared again; with 0 no
 * more. */
int belay_live(belay_ds dataset, int always);

/* The dataset is a part of a global array, which all processes have together: `global` elements in each dimension, of
 * which the dataset's first element is number `lower`, counted from 0; below 0 where that is a ghost beyond the rim. The
 * process's own are the elements of the dataset from `lo` up to, but without, `hi`; NULL, both of them, for all. Those
 * around it are ghosts: copies of what others own, or beyond the rim. Each element of the global array is one process's
 * own. It has the dataset's name, which is the same in all of them. Said again after the dataset has got another shape. */
int belay_dataset_part(belay_ds dataset, const size_t global[], const int64_t lower[], const int64_t lo[], const int64_t hi[]);

/* The program's own point, between two steps, where global arrays are whole: all that the rest of the computation needs
 * is in them, and in `payload`, at most 4096 bytes, the same in all processes. All processes come to it equally often, not
 * in a loop. Where a checkpoint is wanted it waits for it, with the others, for up to some seconds. */
int belay_point(uint64_t payload_bytes, const void *payload);
/* Where the program is started with belay launch --from, or BELAY_FROM names what belay export has written: fills what is
 * declared as parts of global arrays, ghosts too, and the payload of the point, which has `payload_bytes` bytes; 1 then, and
 * 0 where there is nothing to start from. The number of processes may be another one. A negative errno, and a line on
 * standard error, where that cannot be: some of it may be filled. */
int belay_fastforward(void *payload, size_t payload_bytes);

/* What a loop does to the part of a dataset from `lo` up to, but without, `hi` in each dimension; NULL, both of them,
 * for all of it. Bounds that can be none (`lo` below 0, or `hi` below `lo`) are heard as BELAY_RW of all of it. */
typedef struct belay_use {
    belay_ds dataset;
    int mode;
    const int64_t *lo, *hi;
} belay_use;

/* A place in the program, by its name: once each. At most 1024. */
belay_site belay_site_id(const char *name);

/* Before a loop, with all that it uses of the datasets, at most 64; and after it. Loops are not begun in others. Where
 * `uses` is NULL and `n` is not 0, or `n` is below 0, nothing that loops say counts any more.
 * Between loops the program does not touch its datasets. Where a checkpoint is wanted, and this is a good place for
 * it, belay_enter waits for it, for some milliseconds. */
void belay_enter(belay_site site, const belay_use *uses, int n);
void belay_leave(belay_site site);
/* Instead of belay_leave where a loop ends before it has overwritten all that it said, and the program goes on with what
 * was there, as after an exception. */
void belay_abandon(belay_site site);

#ifdef __cplusplus
}

#if __cplusplus >= 201103L
#include <exception>
#include <initializer_list>
#include <type_traits>

namespace belay {

/* belay_point and belay_fastforward, with a value that can be copied as bytes. */
template <class T> int point(const T &payload) {
    static_assert(std::is_trivially_copyable<T>::value, "what points in it is not there in another process");
    return belay_point(sizeof payload, &payload);
}
template <class T> int fastforward(T &payload) {
    static_assert(std::is_trivially_copyable<T>::value, "what points in it is not there in another process");
    return belay_fastforward(&payload, sizeof payload);
}

/* How many exceptions are on their way; before C++17, whether one is. */
inline int exceptions() {
#if __cplusplus >= 201703L
    return std::uncaught_exceptions();
#else
    return std::uncaught_exception();
#endif
}

/* The end of a loop that began when so many were. */
inline void end(belay_site site, int before) {
    if (exceptions() > before) belay_abandon(site);
    else belay_leave(site);
}

/* A loop, for as long as it lives. One that ends by an exception may not have overwritten what it said. */
class loop {
public:
    loop(belay_site site, std::initializer_list<belay_use> uses) : site(site), before(exceptions()) {
        belay_enter(site, uses.begin(), static_cast<int>(uses.size()));
    }
    ~loop() { end(site, before); }
    loop(const loop &) = delete;
    loop &operator=(const loop &) = delete;

private:
    belay_site site;
    int before;
};

/* That a loop reads a dataset, overwrites it as a whole, or does anything else to it: all of it, or the part from `lo`
 * up to, but without, `hi`, which live until the loop has begun. */
inline belay_use reads(belay_ds dataset, const int64_t *lo = nullptr, const int64_t *hi = nullptr) {
    return belay_use{dataset, BELAY_R, lo, hi};
}
inline belay_use overwrites(belay_ds dataset, const int64_t *lo = nullptr, const int64_t *hi = nullptr) {
    return belay_use{dataset, BELAY_W, lo, hi};
}
inline belay_use changes(belay_ds dataset, const int64_t *lo = nullptr, const int64_t *hi = nullptr) {
    return belay_use{dataset, BELAY_RW, lo, hi};
}

}
#endif
#endif

#endif
