/* What veloc.h and fti.h have in common: the versions of one rank on two levels, as histories of belay.h.
 *
 * A version of the program is a version of the history with the life in its lower bits. A run of the program begins a
 * life, and so does each checkpoint of a version that is not above the last one: what has been put under one number at
 * two times is never taken for one checkpoint, whatever moment the program was killed at. All ranks begin the same
 * checkpoints in the same order; a rank that tries one again is ahead of the others until they agree at its end.
 *
 * The near level is a directory of the node: a version that has been written there outlives the process. The far level
 * is a directory of a file system that all nodes see, and is written in the background. Functions are weak, so that a
 * program of several files has each of them once.
 */
#ifndef BELAY_LEVELS_H
#define BELAY_LEVELS_H

#include <belay.h>

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <mpi.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#define BELAY_LEVELS_WEAK __attribute__((weak))

#ifdef __cplusplus
extern "C" {
#endif

/* Memory that the program has named. */
typedef struct belay_levels_region {
    int id;
    void *at;
    size_t bytes;
    char group[64]; /* checkpoints of this name only; "": of any that has no group */
} belay_levels_region;

/* The versions that one rank has of one name. */
typedef struct belay_levels {
    struct belay_levels *next;
    const char *interface;   /* whom errors are from */
    char name[256];          /* of the histories */
    belay_history *near_by;  /* NULL: there is no such level */
    belay_history *far_away; /* NULL: the same */
    MPI_Comm comm;           /* of those who take part; MPI_COMM_NULL: this rank alone */
    long first, life; /* of this run: the first, and that of now */
    long last, key;   /* the version of the last checkpoint that was begun, -1: there is none; and where it lies */
    long begun;       /* the life of its first try */
    int ranks;        /* of those who take part */
    void *size;       /* as many bytes */
} belay_levels;

/* The number of the region that has a byte for each rank that took part; versions of before have none. */
#define BELAY_LEVELS_RANKS (INT_MIN + 1)

/* What a read is of. */
enum {
    BELAY_LEVELS_WHOLE, /* all that the version has, which must have a region; into one without memory it is not read */
    BELAY_LEVELS_ASKED, /* the regions that are given, which the version must have */
    BELAY_LEVELS_EXACT  /* both: the version has these regions and no others, in these sizes */
};

/* Lives are below this. */
#define BELAY_LEVELS_LIVES (1L << 31)

/* The version of a history, which is above those of all other lives of a lower version. */
static inline long belay_levels_key(long version, long life) { return version * BELAY_LEVELS_LIVES + life; }
static inline long belay_levels_version(long key) { return key < 0 ? -1 : key / BELAY_LEVELS_LIVES; }

/* Says what went wrong, and in which words of belay's if it was one of its calls. -1 */
BELAY_LEVELS_WEAK __attribute__((format(printf, 3, 4))) int belay_levels_say(const char *interface, int call, const char *format,
                                                                             ...) {
    char what[PATH_MAX + 256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    fprintf(stderr, "belay (%s): %s%s%s\n", interface, what, call ? ": " : "", call ? belay_error() : "");
    return -1;
}

/* The value of `key` in a file of lines `key = value`, some under [section]; 0 if it is not there, -1 without the
 * file. */
BELAY_LEVELS_WEAK int belay_levels_setting(const char *file, const char *section, const char *key, char *value, size_t room) {
    char line[PATH_MAX + 256], now[64] = "";
    int found = 0;
    FILE *f = fopen(file, "r");
    if (!f) return -1;
    while (!found && fgets(line, sizeof line, f)) {
        char *comment = line;
        line[strcspn(line, "\n")] = 0;
        /* One begins a line, or comes after a blank. */
        while (*comment && !(strchr("#;", *comment) && (comment == line || isspace((unsigned char)comment[-1])))) comment++;
        *comment = 0;
        char *at = line + strspn(line, " \t");
        if (*at == '[') {
            snprintf(now, sizeof now, "%.*s", (int)strcspn(at + 1, "]"), at + 1);
            continue;
        }
        char *equals = strchr(at, '=');
        if (!equals || (section && strcasecmp(now, section))) continue;
        char *end = equals;
        while (end > at && isspace((unsigned char)end[-1])) end--;
        if ((size_t)(end - at) != strlen(key) || strncasecmp(at, key, strlen(key))) continue;
        char *from = equals + 1 + strspn(equals + 1, " \t");
        for (end = from + strlen(from); end > from && isspace((unsigned char)end[-1]); end--) end[-1] = 0;
        snprintf(value, room, "%s", from);
        found = 1;
    }
    fclose(f);
    return found;
}

/* The same for a number. */
BELAY_LEVELS_WEAK double belay_levels_number(const char *file, const char *section, const char *key, double otherwise) {
    char value[64];
    return belay_levels_setting(file, section, key, value, sizeof value) == 1 ? strtod(value, NULL) : otherwise;
}

/* Whether all who take part say so. */
BELAY_LEVELS_WEAK int belay_levels_all(MPI_Comm comm, int yes) {
    int all = yes;
    if (comm != MPI_COMM_NULL) MPI_Allreduce(&yes, &all, 1, MPI_INT, MPI_LAND, comm);
    return all;
}

/* Memory of the near level: its versions are in files when a checkpoint returns. */
#define BELAY_LEVELS_NEAR_BYTES ((uint64_t)64 << 20)

/* Makes the directory of a level. 0 or -1 */
static inline int belay_levels_make(const char *interface, const char *dir) {
    if (mkdir(dir, 0777) == 0 || errno == EEXIST) return 0;
    return belay_levels_say(interface, 0, "cannot make the directory %s: %s", dir, strerror(errno));
}

static inline belay_history *belay_levels_history(const char *interface, const char *dir, const char *name, uint64_t host_bytes) {
    belay_history *history = NULL;
    belay_history_opts opts;
    memset(&opts, 0, sizeof opts);
    opts.host_bytes = host_bytes;
    opts.name = name;
    opts.dir = dir;
    opts.keep = BELAY_H_LASTING;
    if (belay_levels_make(interface, dir) < 0) return NULL;
    if (belay_history_open(&opts, &history) < 0) belay_levels_say(interface, 1, "cannot open checkpoints in %s", dir);
    return history;
}

/* All versions of a level, in their order; to be freed. */
static inline uint64_t *belay_levels_list(belay_history *history, size_t *n) {
    uint64_t *all = NULL;
    *n = 0;
    if (!history || belay_history_versions(history, NULL, 0, n) < 0 || !*n) return NULL;
    all = (uint64_t *)malloc(*n * sizeof *all);
    if (!all || belay_history_versions(history, all, *n, n) < 0) *n = 0;
    return all;
}

/* The newest life that has left something on a level. */
static inline long belay_levels_last_life(belay_history *history) {
    long last = 0;
    size_t n, i;
    uint64_t *all = belay_levels_list(history, &n);
    for (i = 0; i < n; i++)
        if ((long)(all[i] % BELAY_LEVELS_LIVES) > last) last = (long)(all[i] % BELAY_LEVELS_LIVES);
    free(all);
    return last;
}

/* Opens the versions of a name. Without `far`, or with the same directory twice, there is one level. Collective. 0 or
 * -1 */
BELAY_LEVELS_WEAK int belay_levels_open(belay_levels *levels, const char *interface, const char *near_dir, const char *far_dir,
                                        const char *name, int rank, MPI_Comm comm) {
    long last, most;
    int two = far_dir && *far_dir && strcmp(near_dir, far_dir) != 0, ready;
    memset(levels, 0, sizeof *levels);
    levels->interface = interface;
    levels->comm = comm;
    snprintf(levels->name, sizeof levels->name, "%.200s.%d", name, rank);
    levels->ranks = 1;
    if (comm != MPI_COMM_NULL) MPI_Comm_size(comm, &levels->ranks);
    levels->size = calloc((size_t)levels->ranks, 1);
    levels->near_by = belay_levels_history(interface, near_dir, levels->name, BELAY_LEVELS_NEAR_BYTES);
    if (levels->near_by && two) levels->far_away = belay_levels_history(interface, far_dir, levels->name, 0);
    ready = levels->size && levels->near_by && (levels->far_away || !two);
    if (!belay_levels_all(comm, ready)) {
        if (levels->near_by) belay_history_close(levels->near_by);
        if (levels->far_away) belay_history_close(levels->far_away);
        free(levels->size);
        levels->near_by = levels->far_away = NULL;
        return -1;
    }
    last = belay_levels_last_life(levels->near_by);
    most = belay_levels_last_life(levels->far_away);
    if (last < most) last = most;
    most = last;
    if (comm != MPI_COMM_NULL) MPI_Allreduce(&last, &most, 1, MPI_LONG, MPI_MAX, comm);
    levels->first = levels->life = most + 1;
    levels->last = -1;
    return 0;
}

/* Whether a version is of so many ranks, as far as it says. */
static inline int belay_levels_is_of(belay_history *history, uint64_t key, int ranks) {
    size_t its;
    return belay_history_size(history, key, (uint32_t)BELAY_LEVELS_RANKS, &its) != 0 || its == (size_t)ranks;
}

/* The newest key of a level that is not above `limit`, of as many ranks; -1: there is none. */
static inline long belay_levels_below(belay_history *history, long limit, int ranks) {
    long newest = -1;
    size_t n, i;
    uint64_t *all = belay_levels_list(history, &n);
    for (i = 0; i < n; i++)
        if (all[i] <= (uint64_t)limit && belay_levels_is_of(history, all[i], ranks)) newest = (long)all[i];
    free(all);
    return newest;
}

/* The newest key, not above `limit`, that everybody has in one of two histories, of which one may be NULL; -1: there
 * is none. */
BELAY_LEVELS_WEAK long belay_levels_agreed(MPI_Comm comm, belay_history *one, belay_history *other, long limit) {
    int ranks = 1;
    if (comm != MPI_COMM_NULL) MPI_Comm_size(comm, &ranks);
    for (;;) {
        long first = belay_levels_below(one, limit, ranks), second = belay_levels_below(other, limit, ranks);
        long mine = first > second ? first : second, least = mine, most = mine;
        if (comm == MPI_COMM_NULL) return mine;
        MPI_Allreduce(&mine, &least, 1, MPI_LONG, MPI_MIN, comm);
        MPI_Allreduce(&mine, &most, 1, MPI_LONG, MPI_MAX, comm);
        if (least == most || least < 0) return least;
        limit = least;
    }
}

/* The key of the newest version, not above `version`, that everybody has on one level or the other; -1: there is none. */
BELAY_LEVELS_WEAK long belay_levels_newest(belay_levels *levels, long version) {
    return belay_levels_agreed(levels->comm, levels->near_by, levels->far_away, belay_levels_key(version + 1, 0) - 1);
}

/* Tries a checkpoint, for the first time or again, under a key that this run has not used. 0 or -1 */
BELAY_LEVELS_WEAK int belay_levels_try(belay_levels *levels, long version) {
    if (version <= levels->last && levels->life + 1 == BELAY_LEVELS_LIVES)
        return belay_levels_say(levels->interface, 0, "%s has been written too often: remove its checkpoints", levels->name);
    if (version <= levels->last) levels->life++;
    levels->last = version;
    levels->key = belay_levels_key(version, levels->life);
    return 0;
}

/* Begins a checkpoint. All ranks do, whatever comes of it. 0 or -1 */
BELAY_LEVELS_WEAK int belay_levels_begin(belay_levels *levels, long version) {
    int answer = belay_levels_try(levels, version);
    levels->begun = levels->life;
    return answer;
}

/* Takes all regions away from a history that it may have. */
static inline void belay_levels_forget(belay_history *history, const belay_levels_region *regions, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) belay_history_region(history, (uint32_t)regions[i].id, NULL, 0);
}

static inline int belay_levels_put_one(belay_levels *levels, belay_history *history, const belay_levels_region *regions, size_t n) {
    size_t i;
    int answer = belay_history_region(history, (uint32_t)BELAY_LEVELS_RANKS, levels->size, (size_t)levels->ranks);
    for (i = 0; i < n && answer == 0; i++)
        answer = belay_history_region(history, (uint32_t)regions[i].id, regions[i].at, regions[i].bytes);
    if (answer == 0) answer = belay_history_put(history, (uint64_t)levels->key);
    belay_levels_forget(history, regions, n);
    belay_history_region(history, (uint32_t)BELAY_LEVELS_RANKS, NULL, 0);
    return answer;
}

/* Writes the checkpoint that was begun: on return it is in a file of the near level, and on its way to the far one if that is
 * wanted too. 0 or -1 */
BELAY_LEVELS_WEAK int belay_levels_put(belay_levels *levels, const belay_levels_region *regions, size_t n, int far_too) {
    int answer = belay_levels_put_one(levels, levels->near_by, regions, n);
    if (answer == 0 && far_too && levels->far_away) answer = belay_levels_put_one(levels, levels->far_away, regions, n);
    if (answer == 0) answer = belay_history_wait(levels->near_by, BELAY_H_LOCAL);
    if (answer == 0) return 0;
    return belay_levels_say(levels->interface, 1, "cannot write version %ld of %s", levels->last, levels->name);
}

/* Waits until all that was written is synced on the far level, or where there is none on the near one. 0 or -1 */
BELAY_LEVELS_WEAK int belay_levels_wait(belay_levels *levels) {
    belay_history *last = levels->far_away ? levels->far_away : levels->near_by;
    if (belay_history_wait(last, BELAY_H_DURABLE) == 0) return 0;
    return belay_levels_say(levels->interface, 1, "checkpoints of %s are not safe yet", levels->name);
}

/* 1: all that was written has come to files of the last level; 0: something is on its way. -1 */
BELAY_LEVELS_WEAK int belay_levels_arrived(belay_levels *levels) {
    belay_history *last = levels->far_away ? levels->far_away : levels->near_by;
    int answer = belay_history_is_at(last, BELAY_H_LOCAL);
    return answer < 0 ? belay_levels_say(levels->interface, 1, "checkpoints of %s", levels->name) : answer;
}

/* Drops tries of the checkpoint that was begun, from its first to that of a life. */
static inline void belay_levels_drop_tries(belay_levels *levels, long last) {
    long life;
    for (life = levels->begun; life <= last; life++) {
        uint64_t key = (uint64_t)belay_levels_key(levels->last, life);
        belay_history_drop(levels->near_by, key);
        if (levels->far_away) belay_history_drop(levels->far_away, key);
    }
}

/* Puts a version of a level under another key as well. 0, or as calls of belay.h */
static inline int belay_levels_copy(belay_history *history, uint64_t from, uint64_t to) {
    belay_levels_region *all = NULL;
    size_t n, i;
    int answer = belay_history_regions(history, from, NULL, 0, &n);
    uint32_t *ids = (uint32_t *)calloc(answer == 0 ? n + 1 : 1, sizeof *ids);
    if (answer < 0) n = 0;
    all = (belay_levels_region *)calloc(n + 1, sizeof *all);
    if (answer == 0) answer = ids && all ? belay_history_regions(history, from, ids, n, &n) : -ENOMEM;
    for (i = 0; i < n && answer == 0; i++) {
        all[i].id = (int)ids[i];
        answer = belay_history_size(history, from, ids[i], &all[i].bytes);
        if (answer == 0 && !(all[i].at = malloc(all[i].bytes + 1))) answer = -ENOMEM;
        if (answer == 0) answer = belay_history_region(history, ids[i], all[i].at, all[i].bytes);
    }
    if (answer == 0) answer = belay_history_get(history, from, BELAY_H_KEEP);
    if (answer == 0) answer = belay_history_put(history, to);
    if (all) belay_levels_forget(history, all, n);
    for (i = 0; all && i < n; i++) free(all[i].at);
    free(all);
    free(ids);
    return answer;
}

/* The checkpoint that was begun is that of a later life, because another rank has tried it more often. 0 or -1 */
static inline int belay_levels_move(belay_levels *levels, long life) {
    uint64_t from = (uint64_t)levels->key, to = (uint64_t)belay_levels_key(levels->last, life);
    size_t n;
    int answer = belay_levels_copy(levels->near_by, from, to);
    if (answer == 0 && levels->far_away && belay_history_regions(levels->far_away, from, NULL, 0, &n) == 0)
        answer = belay_levels_copy(levels->far_away, from, to);
    if (answer == 0) answer = belay_history_wait(levels->near_by, BELAY_H_LOCAL);
    if (answer == 0) return 0;
    return belay_levels_say(levels->interface, 1, "cannot write version %ld of %s again, as another rank has", levels->last,
                            levels->name);
}

/* Ends the checkpoint that was begun: what not everybody has is none, and of several tries the last one counts.
 * Collective. Whether everybody has it. */
BELAY_LEVELS_WEAK int belay_levels_end(belay_levels *levels, int written) {
    /* Whether all have it, the least life, and the most. */
    long least[3] = {written != 0, levels->life, -levels->life}, own[3];
    memcpy(own, least, sizeof own);
    if (levels->comm != MPI_COMM_NULL) MPI_Allreduce(own, least, 3, MPI_LONG, MPI_MIN, levels->comm);
    if (least[1] < -least[2]) {
        if (least[0] && levels->life < -least[2]) written = belay_levels_move(levels, -least[2]) == 0;
        levels->life = -least[2];
        levels->key = belay_levels_key(levels->last, levels->life);
        if (least[0]) least[0] = belay_levels_all(levels->comm, written);
    }
    belay_levels_drop_tries(levels, levels->life - (least[0] != 0));
    return least[0] != 0;
}

static inline int belay_levels_by_age(const void *one, const void *other) {
    uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;
    uint64_t life_a = a % BELAY_LEVELS_LIVES, life_b = b % BELAY_LEVELS_LIVES;
    if (life_a != life_b) return life_a < life_b ? -1 : 1;
    return a < b ? -1 : a > b;
}

/* Drops all but the `keep` versions that this run has put last from a level, and what was put before under the number of
 * any that it has put. Other versions of other runs go once this one has so many. When everybody has the last one
 * there. */
BELAY_LEVELS_WEAK void belay_levels_trim(belay_levels *levels, belay_history *history, long keep) {
    size_t n, i, left;
    long own = 0, version = -1;
    uint64_t *all = belay_levels_list(history, &n);
    int again = 0, enough;
    for (i = left = n; i-- > 0;) { /* of each version the last life is first */
        int is_own = (long)(all[i] % BELAY_LEVELS_LIVES) >= levels->first;
        if (belay_levels_version((long)all[i]) != version) again = 0;
        version = belay_levels_version((long)all[i]);
        if (again) belay_history_drop(history, all[i]);
        else own += is_own, all[--left] = all[i];
        again |= is_own;
    }
    if (left < n) qsort(all + left, n - left, sizeof *all, belay_levels_by_age);
    enough = own >= keep;
    for (i = left; i < n; i++) {
        int is_own = (long)(all[i] % BELAY_LEVELS_LIVES) >= levels->first;
        if (is_own ? own > keep : enough) belay_history_drop(history, all[i]);
        own -= is_own && own > keep;
    }
    free(all);
}

/* Drops from the far level what is older than the newest version that everybody has safe there. Collective. */
BELAY_LEVELS_WEAK void belay_levels_trim_far(belay_levels *levels) {
    size_t n, i;
    uint64_t *all;
    long newest;
    int safe = levels->far_away && belay_levels_arrived(levels) == 1 && belay_levels_wait(levels) == 0;
    if (!belay_levels_all(levels->comm, safe)) return;
    newest = belay_levels_agreed(levels->comm, levels->far_away, NULL, LONG_MAX);
    all = belay_levels_list(levels->far_away, &n);
    for (i = 0; i < n; i++)
        if ((long)all[i] < newest) belay_history_drop(levels->far_away, all[i]);
    free(all);
}

/* The key of a version that this run has put; what the next checkpoint of it would have if there is none. */
static inline long belay_levels_own(belay_levels *levels, long version) {
    long key = belay_levels_below(levels->near_by, belay_levels_key(version + 1, 0) - 1, levels->ranks);
    if (key >= belay_levels_key(version, levels->first)) return key;
    return belay_levels_key(version, levels->life + (version <= levels->last));
}

static inline const belay_levels_region *belay_levels_find(const belay_levels_region *regions, size_t n, uint32_t id) {
    size_t i;
    for (i = 0; i < n; i++)
        if ((uint32_t)regions[i].id == id) return &regions[i];
    return NULL;
}

static inline int belay_levels_get_one(belay_history *history, uint64_t key, const belay_levels_region *regions, size_t n,
                                       int what) {
    uint32_t *ids = NULL;
    void **spare = NULL; /* for what is in the version and not wanted: it is read whole */
    size_t of, i;
    int answer = belay_history_regions(history, key, NULL, 0, &of);
    if (answer < 0) return answer;
    ids = (uint32_t *)calloc(of + 1, sizeof *ids);
    spare = (void **)calloc(of + 1, sizeof *spare);
    answer = ids && spare ? belay_history_regions(history, key, ids, of, &of) : -ENOMEM;
    for (i = 0; i < of && answer == 0; i++) {
        const belay_levels_region *wanted = belay_levels_find(regions, n, ids[i]);
        size_t bytes = 0;
        answer = belay_history_size(history, key, ids[i], &bytes);
        if (answer < 0) break;
        if (!wanted && what != BELAY_LEVELS_ASKED && ids[i] != (uint32_t)BELAY_LEVELS_RANKS) answer = -EMSGSIZE;
        if (wanted && !wanted->at) wanted = NULL;
        if (wanted && (what == BELAY_LEVELS_EXACT ? wanted->bytes != bytes : wanted->bytes < bytes)) answer = -EMSGSIZE;
        if (!wanted && !(spare[i] = malloc(bytes + 1))) answer = -ENOMEM;
        if (answer == 0) answer = belay_history_region(history, ids[i], wanted ? wanted->at : spare[i], bytes);
    }
    for (i = 0; i < n && answer == 0 && what != BELAY_LEVELS_WHOLE; i++) {
        size_t bytes;
        answer = belay_history_size(history, key, (uint32_t)regions[i].id, &bytes);
        if (answer == -ENOENT && what == BELAY_LEVELS_EXACT) answer = -EMSGSIZE;
    }
    if (answer == 0) answer = belay_history_get(history, key, BELAY_H_KEEP);
    for (i = 0; ids && i < of; i++) belay_history_region(history, ids[i], NULL, 0);
    for (i = 0; spare && i < of; i++) free(spare[i]);
    free(spare);
    free(ids);
    return answer;
}

/* Reads regions of a version, from the near level if it is whole there; they may be larger than they were. 0 or -1 */
BELAY_LEVELS_WEAK int belay_levels_get(belay_levels *levels, long key, const belay_levels_region *regions, size_t n, int what) {
    int answer = belay_levels_get_one(levels->near_by, (uint64_t)key, regions, n, what);
    if (answer < 0 && levels->far_away) answer = belay_levels_get_one(levels->far_away, (uint64_t)key, regions, n, what);
    if (answer == 0) return 0;
    if (answer == -EMSGSIZE)
        return belay_levels_say(levels->interface, 0, "version %ld of %s: one of its regions %s now, or is not there",
                                belay_levels_version(key), levels->name,
                                what == BELAY_LEVELS_EXACT ? "has another size" : "is smaller");
    return belay_levels_say(levels->interface, 1, "cannot read version %ld of %s", belay_levels_version(key), levels->name);
}

/* Bytes that a region has in a version; -1: it has none. */
BELAY_LEVELS_WEAK long belay_levels_size(belay_levels *levels, long key, int id) {
    size_t bytes;
    if (belay_history_size(levels->near_by, (uint64_t)key, (uint32_t)id, &bytes) == 0) return (long)bytes;
    if (!levels->far_away) return -1;
    return belay_history_size(levels->far_away, (uint64_t)key, (uint32_t)id, &bytes) == 0 ? (long)bytes : -1;
}

/* Writes what is still on its way, and ends. 0 or -1 */
BELAY_LEVELS_WEAK int belay_levels_close(belay_levels *levels) {
    int answer = 0;
    if (levels->near_by) answer = belay_history_close(levels->near_by);
    if (levels->far_away && belay_history_close(levels->far_away) < 0) answer = -1;
    free(levels->size);
    levels->size = NULL;
    levels->near_by = levels->far_away = NULL;
    return answer < 0 ? belay_levels_say(levels->interface, 1, "checkpoints of %s are not all written", levels->name) : 0;
}

/* A list of regions that grows. */
typedef struct belay_levels_table {
    belay_levels_region *all;
    size_t n, room;
} belay_levels_table;

/* Names memory, or names it anew. 0 or -1 */
BELAY_LEVELS_WEAK int belay_levels_protect(belay_levels_table *table, const char *interface, int id, void *at, size_t count,
                                           size_t size, const char *group) {
    size_t i;
    if (size && count > SIZE_MAX / size) return belay_levels_say(interface, 0, "region %d has too many bytes", id);
    if (id == BELAY_LEVELS_RANKS) return belay_levels_say(interface, 0, "region %d has a number that is taken", id);
    if (!at && count && size) return belay_levels_say(interface, 0, "region %d has no memory", id);
    if (!at) at = table; /* no byte of it is used */
    for (i = 0; i < table->n; i++)
        if (table->all[i].id == id && !strcmp(table->all[i].group, group)) break;
    if (i == table->room) {
        size_t room = table->room ? 2 * table->room : 16;
        belay_levels_region *more = (belay_levels_region *)realloc(table->all, room * sizeof *more);
        if (!more) return belay_levels_say(interface, 0, "no memory for a region");
        table->all = more;
        table->room = room;
    }
    if (i == table->n) table->n++;
    table->all[i].id = id;
    table->all[i].at = at;
    table->all[i].bytes = count * size;
    snprintf(table->all[i].group, sizeof table->all[i].group, "%s", group);
    return 0;
}

/* The place in memory is no part of checkpoints any more. Whether it was. */
BELAY_LEVELS_WEAK int belay_levels_unprotect(belay_levels_table *table, int id, const char *group) {
    size_t i;
    for (i = 0; i < table->n; i++) {
        if (table->all[i].id != id || strcmp(table->all[i].group, group)) continue;
        table->all[i] = table->all[--table->n];
        return 1;
    }
    return 0;
}

#ifdef __cplusplus
}
#endif

#endif
