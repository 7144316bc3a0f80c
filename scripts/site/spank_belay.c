/* Options of srun, sbatch and salloc that run a job's tasks under Belay, as a SPANK plugin. See docs/slurm.md.
 *
 *     srun --ckpt-interval=10m -n 64 ./simulate         becomes   belay run --across-hosts --ckpt-interval 10m --ckpt-dir DIR -- srun -n 64 ./simulate
 *     sbatch --ckpt-interval=10m script                 every srun in the script does that, and `belay run` in it knows the interval and the directory
 *
 * All happens in the command that the user calls, before it has asked Slurm for anything; on the nodes the plugin only knows the options' names. BELAY_SPANK says "on" in
 * the environment of a batch job with these options, and "off" to whatever belay starts: its own srun must not become another belay.
 */

#include <errno.h>
#include <fcntl.h>
#include <slurm/spank.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

SPANK_PLUGIN(belay, 1)

#define MOST_BYTES (4 << 20)

enum { INTERVAL, DIRECTORY, OPTIONS };

/* What the user has said, the last word counting, and how often. */
static struct {
    const char *name, *variable;
    char *value;
    int said;
} options[OPTIONS] = {
    [INTERVAL] = {"ckpt-interval", "BELAY_CKPT_INTERVAL", NULL, 0},
    [DIRECTORY] = {"ckpt-dir", "BELAY_DIR", NULL, 0},
};

static int say(int option, const char *value, int remote) {
    if (remote)
        return 0;
    char *copy = value ? strdup(value) : NULL;
    if (!copy)
        return -1;
    free(options[option].value);
    options[option].value = copy;
    options[option].said++;
    return 0;
}

int slurm_spank_init(spank_t spank, int count, char **words) {
    (void)count, (void)words;
    struct spank_option table[OPTIONS] = {
        {(char *)options[INTERVAL].name, "time", "run under Belay with a checkpoint this often: 90s, 10m, auto", 1, INTERVAL, say},
        {(char *)options[DIRECTORY].name, "directory", "run under Belay with its job directory there", 1, DIRECTORY, say},
    };
    spank_context_t where = spank_context();
    if (where != S_CTX_LOCAL && where != S_CTX_ALLOCATOR && where != S_CTX_REMOTE)
        return 0;
    for (int i = 0; i < OPTIONS; i++)
        if (spank_option_register(spank, &table[i]) != ESPANK_SUCCESS)
            return -1;
    return 0;
}

/* The words of this process, each with its NUL; how many bytes. */
static char text[MOST_BYTES];

static size_t read_words(void) {
    size_t bytes = 0;
    int file = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    for (ssize_t n = 1; file >= 0 && n > 0 && bytes < sizeof text - 1; bytes += n > 0 ? (size_t)n : 0)
        n = read(file, text + bytes, sizeof text - 1 - bytes);
    if (file >= 0)
        close(file);
    return bytes;
}

/* Whether it is the one by which salloc starts a shell in the allocation: what is called there is to be saved, not the shell. */
static bool is_shell(size_t bytes) {
    for (const char *word = text + strlen(text) + 1; word < text + bytes && *word == '-'; word += strlen(word) + 1)
        if (!strcmp(word, "--interactive"))
            return true;
    return false;
}

/* Executes belay with the words of this process behind it; it leaves our options out. Returns only to say that it cannot. */
static void become(const char *belay, size_t bytes) {
    size_t count = 0;
    unsigned hash = 2166136261u;
    for (size_t i = 0; i < bytes; i++) {
        count += !text[i];
        hash = (hash ^ (unsigned char)text[i]) * 16777619u;
    }
    static char directory[80];
    if (!options[DIRECTORY].value && !getenv("BELAY_DIR")) {
        const char *job = getenv("SLURM_JOB_ID");
        if (!job) {
            slurm_error("belay: --ckpt-interval outside of an allocation needs --ckpt-dir");
            return;
        }
        /* Of each command of a script its own, and the same after a requeue. */
        snprintf(directory, sizeof directory, "belay-%s-%08x", job, hash);
        options[DIRECTORY].value = directory;
    }
    const char **words = calloc(count + 10, sizeof *words);
    if (!words || !count || bytes == sizeof text - 1) {
        slurm_error("belay: the command line cannot be read");
        return;
    }
    size_t at = 0;
    words[at++] = belay;
    words[at++] = "run";
    words[at++] = "--across-hosts";
    for (int i = 0; i < OPTIONS; i++)
        if (options[i].value) {
            words[at++] = i == INTERVAL ? "--ckpt-interval" : "--ckpt-dir";
            words[at++] = options[i].value;
        }
    words[at++] = "--";
    /* Not by the path with which it may have been called: belay follows it by its name. */
    words[at++] = "srun";
    for (const char *word = text + strlen(text) + 1; word < text + bytes; word += strlen(word) + 1)
        words[at++] = word;
    setenv("BELAY_SPANK", "off", 1);
    execvp(belay, (char *const *)words);
    slurm_error("belay: execute %s: %s", belay, strerror(errno));
}

int slurm_spank_init_post_opt(spank_t spank, int count, char **words) {
    (void)spank;
    bool said = options[INTERVAL].said || options[DIRECTORY].said;
    const char *state = getenv("BELAY_SPANK"), *belay = "belay";
    spank_context_t where = spank_context();
    for (int i = 0; i < count; i++)
        if (!strncmp(words[i], "belay=", 6))
            belay = words[i] + 6;
    if (where == S_CTX_ALLOCATOR && said) {
        for (int i = 0; i < OPTIONS; i++)
            if (options[i].value)
                setenv(options[i].variable, options[i].value, 1);
        setenv("BELAY_SPANK", "on", 1);
    } else if (where == S_CTX_ALLOCATOR && state && !strcmp(state, "off")) {
        /* Submitted by a program that runs under belay: a job of its own. */
        unsetenv("BELAY_SPANK");
    }
    /* Slurm passes what was said to sbatch on to each srun of the job, also to belay's own. */
    if (where != S_CTX_LOCAL || (state && !strcmp(state, "off")) || !(said || (state && !strcmp(state, "on"))))
        return 0;
    size_t bytes = read_words();
    if (is_shell(bytes))
        return 0;
    become(belay, bytes);
    /* A job that was to be saved must not run unsaved. */
    exit(127);
}
