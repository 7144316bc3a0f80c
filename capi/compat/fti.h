/* FTI's interface for programs in C (https://fault-tolerance-interface.readthedocs.io), on belay's histories: a program that
 * was written for FTI is compiled against this header, and linked with -lbelay. What is the same and what is not:
 * docs/histories.md.
 */
#ifndef FTI_H
#define FTI_H

#include "belay_levels.h"

#define FTI_BUFS 256
#define FTI_DONE 1
#define FTI_SCES 0
#define FTI_NSCS -1
#define FTI_NREC -2

typedef int fti_id_t;
#define FTIT_type fti_id_t

#ifdef __cplusplus
extern "C" {
#endif

/* All ranks: belay has no need of ranks of its own, whatever `Head` says. */
BELAY_LEVELS_WEAK MPI_Comm FTI_COMM_WORLD = MPI_COMM_NULL;

BELAY_LEVELS_WEAK fti_id_t FTI_CHAR = 0;
BELAY_LEVELS_WEAK fti_id_t FTI_SHRT = 1;
BELAY_LEVELS_WEAK fti_id_t FTI_INTG = 2;
BELAY_LEVELS_WEAK fti_id_t FTI_LONG = 3;
BELAY_LEVELS_WEAK fti_id_t FTI_UCHR = 4;
BELAY_LEVELS_WEAK fti_id_t FTI_USHT = 5;
BELAY_LEVELS_WEAK fti_id_t FTI_UINT = 6;
BELAY_LEVELS_WEAK fti_id_t FTI_ULNG = 7;
BELAY_LEVELS_WEAK fti_id_t FTI_SFLT = 8;
BELAY_LEVELS_WEAK fti_id_t FTI_DBLE = 9;
BELAY_LEVELS_WEAK fti_id_t FTI_LDBE = 10;

/* The number of the region that says what a version is. */
#define BELAY_FTI_HEAD INT_MIN

/* What is between FTI_Init and FTI_Finalize. */
typedef struct belay_fti {
    int started;
    belay_levels levels;
    belay_levels_table regions;
    size_t sizes[512]; /* of types */
    int types;
    int keep_last, inline_levels;        /* of the configuration */
    double interval[5];                  /* seconds between checkpoints of a level in FTI_Snapshot; 0: none */
    double pace, begun;                  /* seconds between looks at the clock */
    long taken[5], calls, next, snapshot; /* intervals that are over; calls of FTI_Snapshot; the number of its next checkpoint */
    long version, key;                   /* the newest checkpoint, 0: there is none; and where it lies */
    int status;                          /* of FTI_Status */
    struct { int id, level; } head;      /* of the version that is being written or read */
} belay_fti;

BELAY_LEVELS_WEAK belay_fti belay_fti_state;

static inline int belay_fti_refuse(const char *why) { return belay_levels_say("FTI", 0, "%s", why); }

static inline int belay_fti_configure(const char *file, char *near_dir, char *far_dir, size_t room) {
    belay_fti *f = &belay_fti_state;
    static const char *const intervals[] = {"", "ckpt_l1", "ckpt_l2", "ckpt_l3", "ckpt_l4"};
    static const char *const inlines[] = {"", "", "inline_l2", "inline_l3", "inline_l4"};
    int level;
    f->pace = 1;
    if (belay_levels_setting(file, "basic", "ckpt_dir", near_dir, room) != 1)
        return belay_levels_say("FTI", 0, "%s cannot be read, or has no line `ckpt_dir = DIRECTORY` under [basic]", file);
    if (belay_levels_setting(file, "basic", "glbl_dir", far_dir, room) != 1)
        return belay_levels_say("FTI", 0, "%s has no line `glbl_dir = DIRECTORY` under [basic]", file);
    for (level = 1; level <= 4; level++) {
        f->interval[level] = 60.0 * belay_levels_number(file, "basic", intervals[level], 0);
        if (f->interval[level] > 0 && f->interval[level] / 10 < f->pace) f->pace = f->interval[level] / 10;
        if (level == 1 || belay_levels_number(file, "basic", inlines[level], 1) != 0) f->inline_levels |= 1 << level;
    }
    f->keep_last = (int)belay_levels_number(file, "basic", "keep_last_ckpt", 0);
    return 0;
}

/* The regions with what says what they are. To be freed. */
static inline belay_levels_region *belay_fti_with_head(void) {
    belay_fti *f = &belay_fti_state;
    belay_levels_region *all = (belay_levels_region *)calloc(f->regions.n + 1, sizeof *all);
    if (!all) return NULL;
    if (f->regions.n) memcpy(all, f->regions.all, f->regions.n * sizeof *all);
    all[f->regions.n].id = BELAY_FTI_HEAD;
    all[f->regions.n].at = &f->head;
    all[f->regions.n].bytes = sizeof f->head;
    return all;
}

/* Collective. */
BELAY_LEVELS_WEAK int FTI_Init(const char *configFile, MPI_Comm globalComm) {
    belay_fti *f = &belay_fti_state;
    static const size_t sizes[] = {sizeof(char),          sizeof(short),        sizeof(int),           sizeof(long),
                                   sizeof(unsigned char), sizeof(unsigned short), sizeof(unsigned int), sizeof(unsigned long),
                                   sizeof(float),         sizeof(double),       sizeof(long double)};
    char near_dir[PATH_MAX], far_dir[PATH_MAX];
    int rank;
    if (f->started) return belay_fti_refuse("it is initialized already");
    memcpy(f->sizes, sizes, sizeof sizes);
    f->types = (int)(sizeof sizes / sizeof *sizes);
    MPI_Comm_dup(globalComm, &FTI_COMM_WORLD);
    MPI_Comm_rank(FTI_COMM_WORLD, &rank);
    /* Opening is collective too: nobody begins it without the others. */
    if (!belay_levels_all(FTI_COMM_WORLD, belay_fti_configure(configFile, near_dir, far_dir, PATH_MAX) == 0) ||
        belay_levels_open(&f->levels, "FTI", near_dir, far_dir, "fti", rank, FTI_COMM_WORLD) < 0) {
        MPI_Comm_free(&FTI_COMM_WORLD);
        return FTI_NSCS;
    }
    f->started = 1;
    f->begun = MPI_Wtime();
    f->next = 1;
    f->snapshot = 1;
    f->key = belay_levels_newest(&f->levels, INT_MAX);
    f->version = f->key < 0 ? 0 : belay_levels_version(f->key);
    f->status = f->version > 0;
    return FTI_SCES;
}

/* 1: there is a checkpoint, and FTI_Recover has not been called yet; 0 otherwise */
BELAY_LEVELS_WEAK int FTI_Status(void) { return belay_fti_state.status; }

BELAY_LEVELS_WEAK int FTI_InitType(fti_id_t *type, int size) {
    belay_fti *f = &belay_fti_state;
    if (!f->started || size <= 0 || f->types == (int)(sizeof f->sizes / sizeof *f->sizes))
        return belay_fti_refuse("it is not initialized, or the type has no size, or there are too many types");
    f->sizes[f->types] = (size_t)size;
    *type = f->types++;
    return FTI_SCES;
}

/* Names memory that checkpoints have, or says where and how large it is now. */
BELAY_LEVELS_WEAK int FTI_Protect(int id, void *ptr, int64_t count, fti_id_t tid) {
    belay_fti *f = &belay_fti_state;
    if (!f->started || id == BELAY_FTI_HEAD || count < 0 || tid < 0 || tid >= f->types)
        return belay_fti_refuse("it is not initialized, or the number, count or type of the memory makes no sense");
    return belay_levels_protect(&f->regions, "FTI", id, ptr, (size_t)count, f->sizes[tid], "");
}

/* Bytes that the memory has in the newest checkpoint; 0: it has none */
BELAY_LEVELS_WEAK int64_t FTI_GetStoredSize(int id) {
    belay_fti *f = &belay_fti_state;
    long bytes = f->started && f->version > 0 ? belay_levels_size(&f->levels, f->key, id) : -1;
    return bytes < 0 ? 0 : bytes;
}

/* Memory of the size that it has in the newest checkpoint; `ptr` as it is if that cannot be. */
BELAY_LEVELS_WEAK void *FTI_Realloc(int id, void *ptr) {
    size_t bytes = (size_t)FTI_GetStoredSize(id), i;
    belay_levels_table *t = &belay_fti_state.regions;
    void *now = bytes && FTI_Status() ? realloc(ptr, bytes) : NULL;
    if (!now) return ptr;
    for (i = 0; i < t->n; i++) {
        if (t->all[i].id != id) continue;
        t->all[i].at = now;
        t->all[i].bytes = bytes;
    }
    return now;
}

/* Reads the newest checkpoint into all memory that is named, which must be what it was, in the same sizes. Collective. */
BELAY_LEVELS_WEAK int FTI_Recover(void) {
    belay_fti *f = &belay_fti_state;
    belay_levels_region *all;
    int answer;
    if (!f->started || f->version <= 0) return belay_fti_refuse("there is no checkpoint to recover from"), FTI_NREC;
    all = belay_fti_with_head();
    answer = all ? belay_levels_get(&f->levels, f->key, all, f->regions.n + 1, BELAY_LEVELS_EXACT) : -1;
    free(all);
    if (!belay_levels_all(FTI_COMM_WORLD, answer == 0)) return FTI_NREC;
    f->status = 0;
    if (f->head.id >= f->snapshot) f->snapshot = (long)f->head.id + 1;
    return FTI_SCES;
}

/* For the memory of one number alone, between RecoverVarInit and RecoverVarFinalize. */
BELAY_LEVELS_WEAK int FTI_RecoverVarInit(void) { return belay_fti_state.version > 0 ? FTI_SCES : FTI_NSCS; }

BELAY_LEVELS_WEAK int FTI_RecoverVar(int id) {
    belay_fti *f = &belay_fti_state;
    const belay_levels_region *region = belay_levels_find(f->regions.all, f->regions.n, (uint32_t)id);
    if (!f->started || f->version <= 0 || !region)
        return belay_fti_refuse("there is no checkpoint, or memory of that number is not protected");
    return belay_levels_get(&f->levels, f->key, region, 1, BELAY_LEVELS_ASKED) == 0 ? FTI_SCES : FTI_NSCS;
}

BELAY_LEVELS_WEAK int FTI_RecoverVarFinalize(void) {
    belay_fti_state.status = 0;
    return FTI_SCES;
}

/* Level 1: on the node. Levels 2, 3 and 4: in the global directory as well. Collective; FTI_DONE, or FTI_NSCS. */
BELAY_LEVELS_WEAK int FTI_Checkpoint(int id, int level) {
    belay_fti *f = &belay_fti_state;
    belay_levels_region *all;
    int answer;
    if (!f->started || level < 1 || level > 4) return belay_fti_refuse("it is not initialized, or the level is not 1 to 4");
    f->head.id = id;
    f->head.level = level;
    belay_levels_trim_far(&f->levels);
    /* Not the number of one that has failed. */
    answer = belay_levels_begin(&f->levels, (f->version > f->levels.last ? f->version : f->levels.last) + 1);
    all = belay_fti_with_head();
    if (answer == 0) answer = all ? belay_levels_put(&f->levels, all, f->regions.n + 1, level > 1) : -1;
    free(all);
    if (answer == 0 && level > 1 && f->inline_levels & 1 << level) answer = belay_levels_wait(&f->levels);
    if (!belay_levels_end(&f->levels, answer == 0)) return FTI_NSCS;
    /* Everybody has this one: older ones go, on the far level once this one is safe there, which may be seen later. */
    f->key = f->levels.key;
    f->version = f->levels.last;
    belay_levels_trim(&f->levels, f->levels.near_by, 1);
    if (level > 1 && f->inline_levels & 1 << level && f->levels.far_away) belay_levels_trim(&f->levels, f->levels.far_away, 1);
    return FTI_DONE;
}

/* The level whose time has come, by the slowest rank's clock; 0: none. It is collective after so many calls as take about a
 * second, which are the same for all, and not more than have been before. */
static inline int belay_fti_due(void) {
    belay_fti *f = &belay_fti_state;
    double passed = MPI_Wtime() - f->begun, slowest, each;
    int level, due = 0;
    if (++f->calls < f->next) return 0;
    MPI_Allreduce(&passed, &slowest, 1, MPI_DOUBLE, MPI_MAX, FTI_COMM_WORLD);
    each = slowest / (double)f->calls;
    f->next = f->pace > each * (double)f->calls ? 2 * f->calls : f->calls + 1 + (long)(f->pace / each);
    for (level = 1; level <= 4; level++) {
        long over = f->interval[level] > 0 ? (long)(slowest / f->interval[level]) : 0;
        if (over <= f->taken[level]) continue;
        f->taken[level] = over;
        due = level;
    }
    return due;
}

/* Recovers if there is a checkpoint, and takes one when it is time. Collective. */
BELAY_LEVELS_WEAK int FTI_Snapshot(void) {
    belay_fti *f = &belay_fti_state;
    int level, answer;
    if (!f->started) return belay_fti_refuse("it is not initialized");
    if (f->status) return FTI_Recover();
    level = belay_fti_due();
    if (level == 0) return FTI_SCES;
    answer = FTI_Checkpoint((int)f->snapshot, level);
    if (answer == FTI_DONE) f->snapshot++;
    return answer;
}

/* Removes all checkpoints, unless the configuration keeps the last. Collective. */
BELAY_LEVELS_WEAK int FTI_Finalize(void) {
    belay_fti *f = &belay_fti_state;
    int answer;
    if (!f->started) return belay_fti_refuse("it is not initialized");
    MPI_Barrier(FTI_COMM_WORLD);
    if (!f->keep_last) {
        belay_levels_trim(&f->levels, f->levels.near_by, 0);
        if (f->levels.far_away) belay_levels_trim(&f->levels, f->levels.far_away, 0);
    }
    answer = belay_levels_close(&f->levels);
    free(f->regions.all);
    memset(f, 0, sizeof *f);
    MPI_Comm_free(&FTI_COMM_WORLD);
    return answer < 0 ? FTI_NSCS : FTI_SCES;
}

#ifdef __cplusplus
}
#endif

#endif
