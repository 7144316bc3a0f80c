/* VELOC's interface for programs in C (https://veloc.readthedocs.io), on belay's histories: a program that was written for
 * VELOC is compiled against this header, and linked with -lbelay. What is the same and what is not: docs/histories.md.
 */
#ifndef VELOC_H
#define VELOC_H

#include "belay_levels.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#define VELOC_SUCCESS (0)
#define VELOC_FAILURE (-1)
#define VELOC_MAX_NAME (1024)
#define VELOC_RECOVER_ALL (0)
#define VELOC_RECOVER_SOME (1)
#define VELOC_RECOVER_REST (2)
#define VELOC_CKPT_ALL (0)
#define VELOC_CKPT_SOME (1)
#define VELOC_CKPT_REST (2)

#ifdef __cplusplus
extern "C" {
#endif

/* The number of the region that is the file of a checkpoint. */
#define BELAY_VELOC_FILE INT_MIN

/* What is between VELOC_Init and VELOC_Finalize. */
typedef struct belay_veloc {
    int started, rank;
    MPI_Comm comm;
    char scratch[PATH_MAX], persistent[PATH_MAX];
    long scratch_versions, max_versions;         /* 0: all */
    double persistent_interval, last_persistent; /* in seconds; 0: each */
    int sync;
    belay_levels *names;
    belay_levels_table regions;
    /* Between _begin and _end. */
    belay_levels *now;
    int restarting, tried, written, persists;
    long version, key;
    char group[256], file[VELOC_MAX_NAME];
} belay_veloc;

BELAY_LEVELS_WEAK belay_veloc belay_veloc_state;

static inline int belay_veloc_refuse(const char *why) { return belay_levels_say("VELOC", 0, "%s", why); }

static inline int belay_veloc_init(const char *cfg_file) {
    belay_veloc *v = &belay_veloc_state;
    char mode[16] = "";
    if (belay_levels_setting(cfg_file, NULL, "scratch", v->scratch, sizeof v->scratch) != 1)
        return belay_levels_say("VELOC", 0, "%s cannot be read, or has no line `scratch = DIRECTORY`", cfg_file);
    v->persistent[0] = 0;
    belay_levels_setting(cfg_file, NULL, "persistent", v->persistent, sizeof v->persistent);
    if (belay_levels_make("VELOC", v->scratch) < 0) return VELOC_FAILURE;
    if (*v->persistent && belay_levels_make("VELOC", v->persistent) < 0) return VELOC_FAILURE;
    v->scratch_versions = (long)belay_levels_number(cfg_file, NULL, "scratch_versions", 0);
    v->max_versions = (long)belay_levels_number(cfg_file, NULL, "max_versions", 0);
    v->persistent_interval = belay_levels_number(cfg_file, NULL, "persistent_interval", 0);
    belay_levels_setting(cfg_file, NULL, "mode", mode, sizeof mode);
    v->sync = !strcmp(mode, "sync");
    v->last_persistent = -1e300;
    v->started = 1;
    return VELOC_SUCCESS;
}

/* Collective. */
BELAY_LEVELS_WEAK int VELOC_Init(MPI_Comm comm, const char *cfg_file) {
    if (belay_veloc_state.started) return belay_veloc_refuse("it is initialized already");
    MPI_Comm_dup(comm, &belay_veloc_state.comm);
    MPI_Comm_rank(comm, &belay_veloc_state.rank);
    if (belay_levels_all(comm, belay_veloc_init(cfg_file) == 0)) return VELOC_SUCCESS;
    MPI_Comm_free(&belay_veloc_state.comm);
    belay_veloc_state.started = 0;
    return VELOC_FAILURE;
}

/* One process for itself, with a number that no other has. */
BELAY_LEVELS_WEAK int VELOC_Init_single(unsigned int id, const char *cfg_file) {
    if (belay_veloc_state.started) return belay_veloc_refuse("it is initialized already");
    belay_veloc_state.comm = MPI_COMM_NULL;
    belay_veloc_state.rank = (int)id;
    return belay_veloc_init(cfg_file);
}

/* What is on its way is written, whatever `cleanup` is. */
BELAY_LEVELS_WEAK int VELOC_Finalize(int cleanup) {
    belay_veloc *v = &belay_veloc_state;
    int answer = VELOC_SUCCESS;
    (void)cleanup;
    if (!v->started) return belay_veloc_refuse("it is not initialized");
    while (v->names) {
        belay_levels *next = v->names->next;
        if (belay_levels_close(v->names) < 0) answer = VELOC_FAILURE;
        free(v->names);
        v->names = next;
    }
    free(v->regions.all);
    if (v->comm != MPI_COMM_NULL) MPI_Comm_free(&v->comm);
    memset(v, 0, sizeof *v);
    return answer;
}

BELAY_LEVELS_WEAK int VELOC_Region_protect(int id, void *ptr, size_t count, size_t base_size, const char *name) {
    if (id == BELAY_VELOC_FILE || strlen(name) > 63) return belay_veloc_refuse("the number or the name of a region makes no sense");
    return belay_levels_protect(&belay_veloc_state.regions, "VELOC", id, ptr, count, base_size, name);
}

BELAY_LEVELS_WEAK int VELOC_Mem_protect(int id, void *ptr, size_t count, size_t base_size) {
    return VELOC_Region_protect(id, ptr, count, base_size, "");
}

BELAY_LEVELS_WEAK int VELOC_Region_unprotect(int id, const char *name) {
    return belay_levels_unprotect(&belay_veloc_state.regions, id, name) ? VELOC_SUCCESS : VELOC_FAILURE;
}

BELAY_LEVELS_WEAK int VELOC_Mem_unprotect(int id) { return VELOC_Region_unprotect(id, ""); }

BELAY_LEVELS_WEAK int VELOC_Region_clear(const char *name) {
    belay_levels_table *t = &belay_veloc_state.regions;
    size_t i = t->n;
    while (i-- > 0)
        if (!strcmp(t->all[i].group, name)) t->all[i] = t->all[--t->n];
    return VELOC_SUCCESS;
}

BELAY_LEVELS_WEAK int VELOC_Mem_clear(void) { return VELOC_Region_clear(""); }

/* The versions of a name, which are opened when they are first asked for. The first time is collective if VELOC_Init
 * was. */
static inline belay_levels *belay_veloc_named(const char *name) {
    belay_veloc *v = &belay_veloc_state;
    belay_levels *l;
    char full[256];
    if (!v->started) return belay_veloc_refuse("it is not initialized"), (belay_levels *)NULL;
    if (!*name || strlen(name) > 150 || name[strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.")])
        return belay_veloc_refuse("the name of a checkpoint is of letters, digits, dots and underscores"), (belay_levels *)NULL;
    snprintf(full, sizeof full, "veloc.%s.%d", name, v->rank);
    for (l = v->names; l; l = l->next)
        if (!strcmp(l->name, full)) return l;
    l = (belay_levels *)malloc(sizeof *l);
    snprintf(full, sizeof full, "veloc.%s", name);
    if (!l || belay_levels_open(l, "VELOC", v->scratch, v->persistent, full, v->rank, v->comm) < 0) {
        free(l);
        return NULL;
    }
    l->next = v->names;
    v->names = l;
    return l;
}

/* The regions of the checkpoint that is under way, of which `ids` says which, with room for as many more. To be freed. */
static inline belay_levels_region *belay_veloc_chosen(int mode, const int *ids, int count, size_t *n) {
    belay_veloc *v = &belay_veloc_state;
    belay_levels_region *chosen = (belay_levels_region *)calloc(v->regions.n + (size_t)(count > 0 ? count : 0) + 1, sizeof *chosen);
    const char *group = "";
    size_t i;
    int k;
    *n = 0;
    for (i = 0; i < v->regions.n; i++)
        if (*v->regions.all[i].group && !strcmp(v->regions.all[i].group, v->group)) group = v->group;
    for (i = 0; chosen && i < v->regions.n; i++) {
        int listed = 0;
        if (strcmp(v->regions.all[i].group, group)) continue;
        for (k = 0; k < count; k++) listed |= ids[k] == v->regions.all[i].id;
        if (mode == VELOC_CKPT_ALL || listed == (mode == VELOC_CKPT_SOME)) chosen[(*n)++] = v->regions.all[i];
    }
    return chosen;
}

static inline int belay_veloc_begin(const char *name, int version, int restarting) {
    belay_veloc *v = &belay_veloc_state;
    belay_levels *l;
    if (v->now) return belay_veloc_refuse("another checkpoint or restart has not been ended");
    if (version < 0) return belay_veloc_refuse("a version is not below 0");
    l = belay_veloc_named(name);
    if (!l) return VELOC_FAILURE;
    v->now = l;
    v->restarting = restarting;
    v->tried = v->written = 0;
    v->version = version;
    v->file[0] = 0;
    snprintf(v->group, sizeof v->group, "%s", name);
    return VELOC_SUCCESS;
}

/* Whether this checkpoint goes to the persistent directory: all ranks have the same answer. */
static inline int belay_veloc_persists(void) {
    belay_veloc *v = &belay_veloc_state;
    int yes = MPI_Wtime() - v->last_persistent >= v->persistent_interval;
    if (v->persistent_interval <= 0) return 1;
    if (v->comm != MPI_COMM_NULL) MPI_Bcast(&yes, 1, MPI_INT, 0, v->comm);
    if (yes) v->last_persistent = MPI_Wtime();
    return yes;
}

/* Collective if VELOC_Init was. */
BELAY_LEVELS_WEAK int VELOC_Checkpoint_begin(const char *name, int version) {
    belay_veloc *v = &belay_veloc_state;
    if (belay_veloc_begin(name, version, 0) < 0) return VELOC_FAILURE;
    v->persists = belay_veloc_persists();
    if (belay_levels_begin(v->now, version) == 0) return VELOC_SUCCESS;
    v->now = NULL;
    return VELOC_FAILURE;
}

/* What is written once more between _begin and _end is another version. */
static inline int belay_veloc_try(void) {
    belay_veloc *v = &belay_veloc_state;
    return v->tried++ ? belay_levels_try(v->now, v->version) : 0;
}

BELAY_LEVELS_WEAK int VELOC_Checkpoint_selective(int mode, int *ids, int id_count) {
    belay_veloc *v = &belay_veloc_state;
    belay_levels_region *chosen;
    size_t n;
    int answer;
    if (!v->now || v->restarting) return belay_veloc_refuse("VELOC_Checkpoint_begin comes first");
    v->written = 0;
    if (belay_veloc_try() < 0) return VELOC_FAILURE;
    chosen = belay_veloc_chosen(mode, ids, id_count, &n);
    answer = n ? belay_levels_put(v->now, chosen, n, v->persists)
               : belay_veloc_refuse("a checkpoint of no regions: VELOC_Mem_protect comes first");
    free(chosen);
    v->written = answer == 0;
    return answer;
}

BELAY_LEVELS_WEAK int VELOC_Checkpoint_mem(void) { return VELOC_Checkpoint_selective(VELOC_CKPT_ALL, NULL, 0); }

/* The file that the program has written becomes the version, and goes. */
static inline int belay_veloc_put_file(void) {
    belay_veloc *v = &belay_veloc_state;
    belay_levels_region region;
    struct stat s;
    int answer = VELOC_FAILURE, fd = open(v->file, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    memset(&region, 0, sizeof region);
    region.id = BELAY_VELOC_FILE;
    if (fd < 0 || fstat(fd, &s) < 0) {
        belay_levels_say("VELOC", 0, "cannot read %s: %s", v->file, strerror(errno));
    } else if (!S_ISREG(s.st_mode) || s.st_uid != geteuid()) {
        belay_levels_say("VELOC", 0, "%s is not a file of the program's user", v->file);
    } else {
        region.bytes = (size_t)s.st_size;
        region.at = region.bytes ? mmap(NULL, region.bytes, PROT_READ, MAP_PRIVATE, fd, 0) : v->file;
        if (region.at == MAP_FAILED) belay_levels_say("VELOC", 0, "cannot read %s: %s", v->file, strerror(errno));
        else answer = belay_levels_put(v->now, &region, 1, v->persists);
        if (region.bytes && region.at != MAP_FAILED) munmap(region.at, region.bytes);
    }
    if (fd >= 0) close(fd);
    return answer;
}

/* Older versions go, and what has been written again since, from a level where everybody has the last one. */
static inline void belay_veloc_trim(belay_levels *l, belay_history *history, long keep) {
    if (history) belay_levels_trim(l, history, keep > 0 ? keep : LONG_MAX);
}

/* Collective if VELOC_Init was. */
BELAY_LEVELS_WEAK int VELOC_Checkpoint_end(int success) {
    belay_veloc *v = &belay_veloc_state;
    belay_levels *l = v->now;
    int answer = v->written ? VELOC_SUCCESS : VELOC_FAILURE, all;
    if (!l || v->restarting) return belay_veloc_refuse("VELOC_Checkpoint_begin comes first");
    if (v->file[0]) {
        answer = belay_veloc_try();
        if (answer == VELOC_SUCCESS && success) answer = belay_veloc_put_file();
        unlink(v->file);
    }
    if (!success) answer = VELOC_FAILURE;
    if (answer == VELOC_SUCCESS && v->sync) answer = belay_levels_wait(l);
    v->now = NULL;
    all = belay_levels_end(l, answer == VELOC_SUCCESS);
    if (all) belay_veloc_trim(l, l->near_by, v->scratch_versions);
    if (all && v->sync) belay_veloc_trim(l, l->far_away, v->max_versions);
    if (answer == VELOC_SUCCESS && !all)
        belay_levels_say("VELOC", 0, "version %ld of %s is dropped: another rank has none", v->version, l->name);
    return all || !success ? VELOC_SUCCESS : VELOC_FAILURE;
}

/* Until all checkpoints are on the persistent directory. Collective if VELOC_Init was. */
BELAY_LEVELS_WEAK int VELOC_Checkpoint_wait(void) {
    belay_veloc *v = &belay_veloc_state;
    belay_levels *l;
    int trims = v->max_versions > 0, answer = VELOC_SUCCESS;
    if (!v->started) return belay_veloc_refuse("it is not initialized");
    if (v->now) return belay_veloc_refuse("the checkpoint has not been ended");
    for (l = v->names; l; l = l->next) {
        if (belay_levels_wait(l) < 0) answer = VELOC_FAILURE;
        trims |= l->life > l->first;
    }
    if (!trims || !belay_levels_all(v->comm, answer == VELOC_SUCCESS)) return answer;
    for (l = v->names; l; l = l->next) belay_veloc_trim(l, l->far_away, v->max_versions);
    return answer;
}

/* 1: nothing is on its way any more. */
BELAY_LEVELS_WEAK int VELOC_Checkpoint_finished(void) {
    belay_levels *l;
    if (!belay_veloc_state.started) return VELOC_FAILURE;
    for (l = belay_veloc_state.names; l; l = l->next) {
        int arrived = belay_levels_arrived(l);
        if (arrived <= 0) return arrived;
    }
    return 1;
}

BELAY_LEVELS_WEAK int VELOC_Checkpoint(const char *name, int version) {
    int written;
    if (!belay_veloc_state.started) return belay_veloc_refuse("it is not initialized");
    written = VELOC_Checkpoint_wait() == VELOC_SUCCESS;
    if (!belay_levels_all(belay_veloc_state.comm, written) || VELOC_Checkpoint_begin(name, version) < 0) return VELOC_FAILURE;
    written = VELOC_Checkpoint_mem() == VELOC_SUCCESS;
    return VELOC_Checkpoint_end(written) == VELOC_SUCCESS && written ? VELOC_SUCCESS : VELOC_FAILURE;
}

/* The newest version that every rank has, below `version` if that is not 0. Collective if VELOC_Init was. */
BELAY_LEVELS_WEAK int VELOC_Restart_test(const char *name, int version) {
    belay_levels *l = belay_veloc_named(name);
    if (!l) return VELOC_FAILURE;
    return (int)belay_levels_version(belay_levels_newest(l, version > 0 ? version - 1 : INT_MAX));
}

/* Collective if VELOC_Init was. */
BELAY_LEVELS_WEAK int VELOC_Restart_begin(const char *name, int version) {
    belay_veloc *v = &belay_veloc_state;
    if (belay_veloc_begin(name, version, 1) < 0) return VELOC_FAILURE;
    v->key = belay_levels_newest(v->now, version);
    if (belay_levels_version(v->key) == version) return VELOC_SUCCESS;
    belay_levels_say("VELOC", 0, "there is no version %d of %s, or not every rank of as many has it", version, name);
    v->now = NULL;
    return VELOC_FAILURE;
}

BELAY_LEVELS_WEAK int VELOC_Recover_selective(int mode, int *ids, int id_count) {
    belay_veloc *v = &belay_veloc_state;
    belay_levels_region *chosen;
    size_t n;
    int k, answer, some = mode == VELOC_RECOVER_SOME;
    if (!v->now || !v->restarting) return belay_veloc_refuse("VELOC_Restart_begin comes first");
    chosen = belay_veloc_chosen(mode, ids, id_count, &n);
    if (!chosen) return belay_veloc_refuse("no memory for a list of regions");
    for (k = 0; k < id_count && mode != VELOC_RECOVER_ALL; k++) {
        if (!some) {
            /* Not read, whether it has memory or not. */
            chosen[n++].id = ids[k];
        } else if (!belay_levels_find(chosen, n, (uint32_t)ids[k])) {
            free(chosen);
            return belay_levels_say("VELOC", 0, "region %d is to be read, and no memory is protected by that number", ids[k]);
        }
    }
    answer = belay_levels_get(v->now, v->key, chosen, n, some ? BELAY_LEVELS_ASKED : BELAY_LEVELS_WHOLE);
    free(chosen);
    return answer;
}

BELAY_LEVELS_WEAK int VELOC_Recover_size(int id) {
    belay_veloc *v = &belay_veloc_state;
    if (!v->now || !v->restarting) return belay_veloc_refuse("VELOC_Restart_begin comes first");
    return (int)belay_levels_size(v->now, v->key, id);
}

BELAY_LEVELS_WEAK int VELOC_Recover_mem(void) { return VELOC_Recover_selective(VELOC_RECOVER_ALL, NULL, 0); }

/* Whether all ranks have read what they wanted. Collective if VELOC_Init was. */
BELAY_LEVELS_WEAK int VELOC_Restart_end(int success) {
    belay_veloc *v = &belay_veloc_state;
    int all;
    if (!v->now || !v->restarting) return belay_veloc_refuse("VELOC_Restart_begin comes first");
    if (v->file[0]) unlink(v->file);
    all = belay_levels_all(v->comm, success != 0);
    if (success && !all) belay_levels_say("VELOC", 0, "another rank cannot read version %ld of %s", v->version, v->now->name);
    v->now = NULL;
    return all ? VELOC_SUCCESS : VELOC_FAILURE;
}

BELAY_LEVELS_WEAK int VELOC_Restart(const char *name, int version) {
    int read;
    if (VELOC_Restart_begin(name, version) < 0) return VELOC_FAILURE;
    read = VELOC_Recover_mem();
    return VELOC_Restart_end(read == VELOC_SUCCESS);
}

/* Where the program writes the file of this checkpoint, or reads it from; there is one file for each. */
BELAY_LEVELS_WEAK int VELOC_Route_file(const char *original, char *routed) {
    belay_veloc *v = &belay_veloc_state;
    belay_levels_region region;
    long bytes;
    int fd, answer = VELOC_FAILURE;
    (void)original;
    if (!v->now) return belay_veloc_refuse("VELOC_Checkpoint_begin or VELOC_Restart_begin comes first");
    if ((size_t)snprintf(v->file, sizeof v->file, "%s/%s-%ld.file", v->scratch, v->now->name, v->version) >= sizeof v->file) {
        v->file[0] = 0;
        return belay_levels_say("VELOC", 0, "the name of the scratch directory %s is too long", v->scratch);
    }
    if (unlink(v->file) < 0 && errno != ENOENT) {
        belay_levels_say("VELOC", 0, "cannot remove %s: %s", v->file, strerror(errno));
        v->file[0] = 0;
        return VELOC_FAILURE;
    }
    strcpy(routed, v->file);
    if (!v->restarting) return VELOC_SUCCESS;
    bytes = belay_levels_size(v->now, v->key, BELAY_VELOC_FILE);
    if (bytes < 0) return belay_levels_say("VELOC", 0, "version %ld of %s has no file", v->version, v->now->name);
    memset(&region, 0, sizeof region);
    region.id = BELAY_VELOC_FILE;
    region.bytes = (size_t)bytes;
    fd = open(v->file, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, bytes) < 0) {
        belay_levels_say("VELOC", 0, "cannot write %s: %s", v->file, strerror(errno));
    } else {
        region.at = bytes ? mmap(NULL, region.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : v->file;
        if (region.at == MAP_FAILED) belay_levels_say("VELOC", 0, "cannot write %s: %s", v->file, strerror(errno));
        else answer = belay_levels_get(v->now, v->key, &region, 1, BELAY_LEVELS_ASKED);
        if (bytes && region.at != MAP_FAILED) munmap(region.at, region.bytes);
    }
    if (fd >= 0) close(fd);
    return answer;
}

/* Removes all checkpoints of a name from the scratch directory. */
BELAY_LEVELS_WEAK int VELOC_Cleanup(const char *name) {
    belay_levels *l = belay_veloc_named(name);
    if (!l) return VELOC_FAILURE;
    belay_levels_trim(l, l->near_by, 0);
    return VELOC_SUCCESS;
}

/* The order in which versions of this run will be read, and that it is time to fetch them. */
BELAY_LEVELS_WEAK int VELOC_Prefetch_enqueue(const char *name, int version) {
    belay_levels *l = belay_veloc_named(name);
    uint64_t key;
    if (!l || version < 0) return VELOC_FAILURE;
    key = (uint64_t)belay_levels_own(l, version);
    return belay_history_hint(l->near_by, &key, 1) == 0 ? VELOC_SUCCESS : VELOC_FAILURE;
}

BELAY_LEVELS_WEAK int VELOC_Prefetch_start(void) {
    belay_levels *l;
    int answer = VELOC_SUCCESS;
    for (l = belay_veloc_state.names; l; l = l->next)
        if (belay_history_prefetch(l->near_by, 1) < 0) answer = VELOC_FAILURE;
    return answer;
}

#ifdef __cplusplus
}
#endif

#endif
