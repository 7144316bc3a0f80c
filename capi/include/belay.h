/* Belay: interface for programs. Link with -lbelay.
 *
 * All functions return 0 (one that answers a question also 1), or a negative errno value; belay_error() says in words
 * why the last one failed. See histories.md.
 */
#ifndef BELAY_H
#define BELAY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Why the last call of this thread that failed did. Valid until the next call of this thread; never NULL. */
const char *belay_error(void);

/* ---- Histories of checkpoints ----
 *
 * A history holds versions of the program's data: written once, whole, and read back in any order. It keeps in memory
 * what fits, and the rest in files. Who tells the order of the reads beforehand waits least.
 *
 * Calls of one history may come from several threads, and take turns. A child that was forked may use none of the
 * parent's histories (-ECHILD). In a handler of a signal that has come in the middle of a call of the same thread all are
 * refused (-EDEADLK); no handler jumps out of one (longjmp), which would keep the turn for ever. A thread that is to be
 * cancelled ends after its call.
 */
typedef struct belay_history belay_history;

enum { /* policy: what makes room, and what is written; all but the first are for comparison */
    BELAY_H_OURS = 0,
    BELAY_H_SCORE = 1,
    BELAY_H_LRU = 2,
    BELAY_H_BELADY = 3
};
enum { /* layout of memory */
    BELAY_H_PAGED = 0,
    BELAY_H_CONTIGUOUS = 1
};
enum { /* keep */
    BELAY_H_LASTING = 0,   /* every version is written to files as soon as may be; a history that is opened again has them */
    BELAY_H_UNTIL_READ = 1 /* until they are read; only what does not fit is written, and nothing outlives the history */
};
enum { /* device */
    BELAY_H_HOST = 0 /* memory of the host only; there are no others yet (-ENODEV) */
};

typedef struct belay_history_opts {
    const char *name;      /* 1 to 200 bytes, no slash, no dot first; one process at a time has a name open */
    const char *dir;       /* an existing directory; the files lie in dir/name, which others must not reach */
    uint64_t host_bytes;   /* memory for versions; 0: 1 GiB. Only what is used is taken */
    uint64_t device_bytes; /* 0 */
    uint64_t extent_bytes; /* a version takes a multiple of so many bytes; 0: 64 KiB */
    int32_t device;
    uint32_t policy;
    uint32_t layout;
    uint32_t keep;
    uint64_t reserved[8]; /* 0 */
} belay_history_opts;

/* -EBUSY: the name is open already. -EPERM: others can reach the directory. -ENOTEMPTY: it has versions of a history
 * with another `keep`, which stay as they are. -EINVAL: an option makes no sense. */
int belay_history_open(const belay_history_opts *opts, belay_history **history);

/* A part of what the next versions are made of, and where the next get writes to. Again with other memory or size at
 * any time; with NULL and 0 bytes it is a part no more. What other threads have begun to put or get is waited for: when
 * this returns, nobody is at the memory that the part had. */
int belay_history_region(belay_history *history, uint32_t id, void *at, size_t bytes);

/* Writes a version. On return the memory may be changed. -EEXIST: the version is there; one that belay_history_versions
 * does not list, as its file was damaged when the history was opened, is not, and is replaced. -ENOSPC: memory and disk
 * are full; nothing that is there is lost. -EFBIG: memory is full, and the process may not write such a large file
 * (RLIMIT_FSIZE); there is no SIGXFSZ. */
int belay_history_put(belay_history *history, uint64_t version);

/* Begins to write a version, and returns while that goes on: the memory may be read, and is changed only after
 * belay_history_put_wait. One is written at a time: what puts, reads, drops or lists versions, or waits for them, waits
 * for that first, and so does a belay_history_region that takes its memory away. `cu_stream` and `cu_event` are for
 * memory of a device, and NULL without one (-ENODEV). -EEXIST: the version is there. */
int belay_history_put_async(belay_history *history, uint64_t version, void *cu_stream, void *cu_event);

/* Waits until that version is written, and the memory may be changed. The errors are those of belay_history_put, once
 * for each version that was not written; those that nobody has asked for come from the next belay_history_wait, one each
 * time, or from belay_history_close. -ENODATA: it was never put. */
int belay_history_put_wait(belay_history *history, uint64_t version);

/* Appends to the order of reads. Versions need not have been put yet. Reads in another order cost time, never
 * correctness. */
int belay_history_hint(belay_history *history, const uint64_t *versions, size_t n);
/* The same with the bytes of all regions that each version will have, where the program knows them. */
int belay_history_hint_sized(belay_history *history, const uint64_t *versions, const uint64_t *bytes, size_t n);
/* Replaces the hints from position `from` on, counted from the first that was ever given. */
int belay_history_hint_replace(belay_history *history, size_t from, const uint64_t *versions, size_t n);

/* Versions are fetched ahead from the first get on, or when all that is hinted has been put; with 1 from now on, with
 * 0 not at all. */
int belay_history_prefetch(belay_history *history, int on);

/* Bytes that a region had when the version was put. -ENOENT: the version has no such region. */
int belay_history_size(belay_history *history, uint64_t version, uint32_t id, size_t *bytes);

/* How many regions a version has, and the first `room` of their numbers, in their order. `ids` may be NULL where
 * `room` is 0. */
int belay_history_regions(belay_history *history, uint64_t version, uint32_t *ids, size_t room, size_t *n);

enum { /* flags of a get; 0: as `keep` says, the first for BELAY_H_UNTIL_READ, otherwise the second */
    BELAY_H_DISCARD = 1, /* the version is not needed any more */
    BELAY_H_KEEP = 2     /* it may be read again */
};

/* Reads a version into the regions, which must have the numbers and sizes that they had at its put.
 * -ENODATA: it was never put. -ESTALE: it was dropped or discarded. -EMSGSIZE: other regions; nothing is read. -ENOMEM:
 * there is no memory to read regions into that have bytes in common.
 * -EBADMSG: its file is damaged; the regions may hold anything. */
int belay_history_get(belay_history *history, uint64_t version, uint32_t flags);

/* The version is not needed any more. Its number may be put again. */
int belay_history_drop(belay_history *history, uint64_t version);

enum { /* levels: what may be lost without loss of a version */
    BELAY_H_IN_HOST = 0, /* the device */
    BELAY_H_LOCAL = 1,   /* the process: all is in files */
    BELAY_H_DURABLE = 2  /* the node, but not its disks: the files are synced */
};

/* Waits until all that has been put is at this level, and, but for BELAY_H_IN_HOST, until what has been dropped or
 * discarded cannot be there again. -ENOSPC and others: why a file could not be written or removed; it is tried again.
 * -EIO: also where somebody else has removed the file of a version; belay_error() has its number. */
int belay_history_wait(belay_history *history, uint32_t level);

/* Whether all that has been put is at this level, without waiting: 1 or 0. Files are synced by belay_history_wait
 * only. After a restart by belay the files are made those of the checkpoint first; -ENOSPC and others: why not. */
int belay_history_is_at(belay_history *history, uint32_t level);

/* How many versions there are, and the first `room` of them in the order of their numbers. `versions` may be NULL
 * where `room` is 0. */
int belay_history_versions(belay_history *history, uint64_t *versions, size_t room, size_t *n);

typedef struct belay_history_stats {
    uint64_t puts, gets;           /* calls that have succeeded */
    uint64_t put_ns, get_ns;       /* nanoseconds in puts and gets, from call to return; also of those in the background */
    uint64_t put_bytes, get_bytes; /* bytes of the program */
    uint64_t hits;                 /* gets from the fastest memory */
    uint64_t from_files;           /* gets that waited for a file */
    uint64_t down, up;             /* bytes written to files, and read from them */
    uint64_t cancelled;            /* copies that nobody needed any more */
    uint64_t failed;               /* copies to files that have failed and are tried again */
    uint64_t versions;             /* that there are */
    uint64_t held;                 /* bytes of memory that they take */
    uint64_t reserved[16];
} belay_history_stats;

int belay_history_get_stats(belay_history *history, belay_history_stats *stats);

/* Ends a history, which may not be used any more whatever is returned: versions that are to last are written first,
 * the others are removed. */
int belay_history_close(belay_history *history);

#ifdef __cplusplus
}
#endif

#endif
