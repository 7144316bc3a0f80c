/* Wrong use of histories: an error each, never a crash, and what is there stays. misuse DIRECTORY */
#include <belay.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static void is(const char *what, int answer, int expected) {
    if (answer != expected) {
        fprintf(stderr, "%s: %d (%s), expected %d\n", what, answer, belay_error(), expected);
        exit(1);
    }
    if (answer < 0 && !*belay_error()) {
        fprintf(stderr, "%s: no words\n", what);
        exit(1);
    }
}

static belay_history *h;
static char part[1000];

static void of_nothing(const char *dir) {
    belay_history *none = (void *)1;
    size_t n;
    uint64_t v = 1;
    belay_history_opts opts = {.name = "misuse", .dir = dir, .host_bytes = 1 << 20};
    is("open without a place", belay_history_open(&opts, NULL), -EINVAL);
    is("open without options", belay_history_open(NULL, &none), -EINVAL);
    if (none)
        exit(2);
    belay_history_opts bad[] = {
        {.dir = dir},
        {.name = "a"},
        {.name = "", .dir = dir},
        {.name = "a/b", .dir = dir},
        {.name = "\xff\xfe", .dir = dir},
        {.name = "a", .dir = dir, .host_bytes = 1},
        {.name = "a", .dir = dir, .host_bytes = UINT64_MAX, .extent_bytes = UINT64_MAX},
        {.name = "a", .dir = dir, .device_bytes = 1},
        {.name = "a", .dir = dir, .policy = 9},
        {.name = "a", .dir = dir, .layout = 9},
        {.name = "a", .dir = dir, .keep = 9},
        {.name = "a", .dir = dir, .reserved = {[7] = 1}},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        is("open with a bad option", belay_history_open(&bad[i], &none), -EINVAL);
    opts.device = 1;
    is("open with a device", belay_history_open(&opts, &none), -ENODEV);
    opts.device = 0;
    opts.dir = "/nowhere/at/all";
    is("open nowhere", belay_history_open(&opts, &none), -ENOENT);

    is("put", belay_history_put(NULL, 1), -EINVAL);
    is("get", belay_history_get(NULL, 1, 0), -EINVAL);
    is("region", belay_history_region(NULL, 1, part, 1), -EINVAL);
    is("hint", belay_history_hint(NULL, &v, 1), -EINVAL);
    is("size", belay_history_size(NULL, 1, 0, &n), -EINVAL);
    is("regions", belay_history_regions(NULL, 1, NULL, 0, &n), -EINVAL);
    is("drop", belay_history_drop(NULL, 1), -EINVAL);
    is("wait", belay_history_wait(NULL, 0), -EINVAL);
    is("question", belay_history_is_at(NULL, 0), -EINVAL);
    is("close", belay_history_close(NULL), -EINVAL);
}

static void of_versions(void) {
    size_t n = 0;
    uint64_t all[2];
    is("region without memory", belay_history_region(h, 0, NULL, 1), -EINVAL);
    is("region", belay_history_region(h, 7, part, sizeof part), 0);
    is("put", belay_history_put(h, 1), 0);
    is("put", belay_history_put(h, 2), 0);
    is("put again", belay_history_put(h, 1), -EEXIST);
    is("get what was never put", belay_history_get(h, 3, 0), -ENODATA);
    is("get with other flags", belay_history_get(h, 1, 3), -EINVAL);
    is("discard", belay_history_get(h, 2, BELAY_H_DISCARD), 0);
    is("get what was discarded", belay_history_get(h, 2, 0), -ESTALE);
    is("drop what was discarded", belay_history_drop(h, 2), -ESTALE);
    is("drop what was never put", belay_history_drop(h, 3), -ENODATA);
    is("size", belay_history_size(h, 1, 7, &n), 0);
    is("size without a place", belay_history_size(h, 1, 7, NULL), -EINVAL);
    is("size of no region", belay_history_size(h, 1, 8, &n), -ENOENT);
    is("size of no version", belay_history_size(h, 3, 7, &n), -ENODATA);
    is("bytes", (int)n, sizeof part);
    uint32_t ids[2] = {0, 5};
    is("regions without a place", belay_history_regions(h, 1, NULL, 1, &n), -EINVAL);
    is("regions of no version", belay_history_regions(h, 3, ids, 2, &n), -ENODATA);
    is("regions", belay_history_regions(h, 1, ids, 2, &n), 0);
    is("how many", (int)n, 1);
    is("the first", (int)ids[0], 7);
    is("no more", (int)ids[1], 5);
    is("hint without a list", belay_history_hint(h, NULL, 1), -EINVAL);
    is("hint of nothing", belay_history_hint(h, NULL, 0), 0);
    is("hint of more than there is", belay_history_hint(h, all, SIZE_MAX), -EINVAL);
    is("region of more than there is", belay_history_region(h, 9, part, SIZE_MAX), -EINVAL);
    is("hint without sizes", belay_history_hint_sized(h, all, NULL, 1), -EINVAL);
    is("replace far behind", belay_history_hint_replace(h, 1000, NULL, 0), 0);
    is("wait for no level", belay_history_wait(h, 9), -EINVAL);
    is("question for no level", belay_history_is_at(h, 9), -EINVAL);
    is("versions without a place", belay_history_versions(h, NULL, 1, &n), -EINVAL);
    is("versions", belay_history_versions(h, all, 2, &n), 0);
    is("how many", (int)n, 1);

    is("a size that has changed", belay_history_region(h, 7, part, sizeof part - 1), 0);
    is("get with it", belay_history_get(h, 1, 0), -EMSGSIZE);
    is("a region more", belay_history_region(h, 7, part, sizeof part), 0);
    is("a region more", belay_history_region(h, 8, part, 0), 0);
    is("get with it", belay_history_get(h, 1, 0), -EMSGSIZE);
    is("and less", belay_history_region(h, 8, NULL, 0), 0);
    memset(part, 0, sizeof part);
    is("get", belay_history_get(h, 1, 0), 0);
    for (size_t i = 0; i < sizeof part; i++)
        is("byte", part[i], 'x');
}

static int ends(pid_t child) {
    int status;
    if (child < 0 || waitpid(child, &status, 0) != child)
        return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void of_processes(const char *program, const char *dir) {
    belay_history_opts opts = {.name = "misuse", .dir = dir, .host_bytes = 1 << 20};
    belay_history *other;
    is("open twice", belay_history_open(&opts, &other), -EBUSY);
    pid_t child = fork();
    if (!child) {
        size_t n;
        is("region in a child", belay_history_region(h, 7, part, sizeof part), -ECHILD);
        is("put in a child", belay_history_put(h, 9), -ECHILD);
        is("get in a child", belay_history_get(h, 1, 0), -ECHILD);
        is("wait in a child", belay_history_wait(h, 1), -ECHILD);
        is("question in a child", belay_history_is_at(h, 1), -ECHILD);
        is("versions in a child", belay_history_versions(h, NULL, 0, &n), -ECHILD);
        is("open in a child", belay_history_open(&opts, &other), -EBUSY);
        is("close in a child", belay_history_close(h), -ECHILD);
        execl(program, program, dir, "executed", NULL);
        _exit(3);
    }
    is("child", ends(child), 0);
    is("get after that", belay_history_get(h, 1, 0), 0);
    is("open after that", belay_history_open(&opts, &other), -EBUSY);
}

static volatile int enough;
static char large[1 << 20];

static void *large_puts(void *unused) {
    for (uint64_t v = 5000; !enough; v++) {
        is("put", belay_history_put(h, v), 0);
        is("drop", belay_history_drop(h, v), 0);
    }
    return unused;
}

/* A child of a moment in which a thread of the parent holds whatever a call holds. */
static void of_busy_processes(void) {
    pthread_t thread;
    is("region", belay_history_region(h, 8, large, sizeof large), 0);
    is("thread", pthread_create(&thread, NULL, large_puts, NULL), 0);
    for (int i = 0; i < 200; i++) {
        pid_t child = fork();
        if (!child) {
            alarm(20);
            is("region in a child", belay_history_region(h, 7, part, 1), -ECHILD);
            is("put in a child", belay_history_put(h, 9), -ECHILD);
            is("get in a child", belay_history_get(h, 1, 0), -ECHILD);
            is("drop in a child", belay_history_drop(h, 1), -ECHILD);
            _exit(0);
        }
        is("child", ends(child), 0);
    }
    enough = 1;
    pthread_join(thread, NULL);
    is("region", belay_history_region(h, 8, NULL, 0), 0);
}

static void *one_put(void *version) {
    is("put of what is given up", belay_history_put(h, (uintptr_t)version), 0);
    return NULL;
}

/* Memory that a region has had is not touched any more, whatever another thread has begun. */
static void of_memory(void) {
    size_t bytes = 64 << 20;
    for (uintptr_t v = 3000; v < 3010; v++) {
        pthread_t thread;
        char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        is("mapped", memory == MAP_FAILED, 0);
        memset(memory, (int)v, bytes);
        is("region", belay_history_region(h, 9, memory, bytes), 0);
        is("thread", pthread_create(&thread, NULL, one_put, (void *)v), 0);
        usleep(1000 * (v % 10));
        is("no region", belay_history_region(h, 9, NULL, 0), 0);
        is("unmapped", munmap(memory, bytes), 0);
        pthread_join(thread, NULL);
        is("drop", belay_history_drop(h, v), 0);
    }
}

static void *puts_of(void *from) {
    for (uint64_t v = (uintptr_t)from; v < (uintptr_t)from + 100; v++) {
        is("put in a thread", belay_history_put(h, v), 0);
        is("drop in a thread", v % 2 ? belay_history_drop(h, v) : 0, 0);
    }
    return NULL;
}

static void of_threads(void) {
    pthread_t threads[4];
    size_t n;
    for (uintptr_t t = 0; t < 4; t++)
        is("thread", pthread_create(&threads[t], NULL, puts_of, (void *)(1000 + 100 * t)), 0);
    for (int t = 0; t < 4; t++)
        pthread_join(threads[t], NULL);
    is("versions", belay_history_versions(h, NULL, 0, &n), 0);
    is("how many", (int)n, 201);
}

int main(int argc, char **argv) {
    if (argc < 2)
        return 2;
    belay_history_opts opts = {.name = "misuse", .dir = argv[1], .host_bytes = 1 << 20};
    if (argc > 2) {
        /* The program that a child of a process with the history open has become. */
        is("open while another has it", belay_history_open(&opts, &h), -EBUSY);
        return 0;
    }
    memset(part, 'x', sizeof part);
    of_nothing(argv[1]);
    is("open", belay_history_open(&opts, &h), 0);
    of_versions();
    of_processes(argv[0], argv[1]);
    of_busy_processes();
    of_threads();
    of_memory();
    is("close", belay_history_close(h), 0);
    is("open again", belay_history_open(&opts, &h), 0);
    is("region", belay_history_region(h, 7, part, sizeof part), 0);
    is("get", belay_history_get(h, 1, BELAY_H_DISCARD), 0);
    is("close", belay_history_close(h), 0);
    return 0;
}
