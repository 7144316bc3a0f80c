/* What others do to a history: its lock, its directory, its calls. An error each, or nothing. harm DIRECTORY */
#define _GNU_SOURCE
#include <belay.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

static void is(const char *what, int answer, int expected) {
    if (answer != expected) {
        fprintf(stderr, "%s: %d (%s), expected %d\n", what, answer, belay_error(), expected);
        exit(1);
    }
}

static const char *dir;

static int opened(const char *name, uint32_t keep, belay_history **h) {
    belay_history_opts opts = {.name = name, .dir = dir, .host_bytes = 1 << 20, .keep = keep};
    return belay_history_open(&opts, h);
}

static void at(char *path, size_t room, const char *history, const char *name) {
    snprintf(path, room, "%s/%s/%s", dir, history, name);
}

/* A lock does not go with another descriptor of its file, and does not stay with a child. */
static void of_locks(void) {
    belay_history *h;
    char path[4096];
    int status, lines[2];
    pid_t child, left;
    is("open", opened("locked", 0, &h), 0);
    at(path, sizeof path, "locked", "lock");
    int fd = open(path, O_RDONLY);
    is("the lock", fd >= 0 && close(fd) == 0, 1);
    child = fork();
    if (!child) _exit(opened("locked", 0, &h) == -EBUSY ? 0 : 1);
    is("wait", waitpid(child, &status, 0), child);
    is("open by another process", status, 0);
    is("close", belay_history_close(h), 0);

    is("pipe", pipe(lines), 0);
    child = fork();
    if (!child) {
        is("open", opened("locked", 0, &h), 0);
        left = fork();
        if (!left) {
            alarm(60);
            pause();
            _exit(0);
        }
        is("write", write(lines[1], &left, sizeof left) == sizeof left, 1);
        _exit(0);
    }
    is("read", read(lines[0], &left, sizeof left) == sizeof left, 1);
    is("wait", waitpid(child, &status, 0), child);
    is("the first one", status, 0);
    is("open while its child lives", opened("locked", 0, &h), 0);
    is("the child lives", kill(left, SIGKILL), 0);
    is("close", belay_history_close(h), 0);
}

/* What one life has left is not emptied by another; what is closed, or was killed, is. */
static void of_lives(void) {
    belay_history *h;
    static char bytes[1 << 20];
    size_t n;
    int status;
    is("open", opened("lives", BELAY_H_LASTING, &h), 0);
    is("region", belay_history_region(h, 0, bytes, 100), 0);
    is("put", belay_history_put(h, 1), 0);
    is("wait", belay_history_wait(h, BELAY_H_DURABLE), 0);
    is("close", belay_history_close(h), 0);
    is("open for another life", opened("lives", BELAY_H_UNTIL_READ, &h), -ENOTEMPTY);
    is("open", opened("lives", BELAY_H_LASTING, &h), 0);
    is("versions", belay_history_versions(h, NULL, 0, &n), 0);
    is("how many", (int)n, 1);
    is("drop", belay_history_drop(h, 1), 0);
    is("close", belay_history_close(h), 0);

    pid_t child = fork();
    if (!child) {
        is("open an empty one for another life", opened("lives", BELAY_H_UNTIL_READ, &h), 0);
        is("region", belay_history_region(h, 0, bytes, sizeof bytes), 0);
        for (uint64_t v = 0; v < 4; v++) is("put", belay_history_put(h, v), 0);
        is("wait", belay_history_wait(h, BELAY_H_LOCAL), 0);
        _exit(0);
    }
    is("wait", waitpid(child, &status, 0), child);
    is("one that does not close", status, 0);
    is("open for another life", opened("lives", BELAY_H_LASTING, &h), -ENOTEMPTY);
    is("open what was left", opened("lives", BELAY_H_UNTIL_READ, &h), 0);
    is("versions", belay_history_versions(h, NULL, 0, &n), 0);
    is("how many", (int)n, 0);
    is("close", belay_history_close(h), 0);
    is("open an empty one for another life", opened("lives", BELAY_H_LASTING, &h), 0);
    is("close", belay_history_close(h), 0);
}

/* Regions that have bytes in common are not given memory before it is known that they have the sizes of the version. */
static void of_sizes(void) {
    belay_history *h;
    static char bytes[100];
    is("open", opened("sizes", 0, &h), 0);
    is("region", belay_history_region(h, 0, bytes, sizeof bytes), 0);
    is("put", belay_history_put(h, 1), 0);
    is("region", belay_history_region(h, 0, bytes, (size_t)1 << 45), 0);
    is("region", belay_history_region(h, 1, bytes, (size_t)1 << 45), 0);
    is("get", belay_history_get(h, 1, 0), -EMSGSIZE);
    is("get of none", belay_history_get(h, 2, 0), -ENODATA);
    is("close", belay_history_close(h), 0);
}

/* Names in the directory that are not belay's. */
static void of_names(void) {
    struct {
        char magic[8];
        uint64_t version, bytes;
        uint32_t parts, block;
        uint64_t sum;
    } fixed = {"BLYVERS1", 2, (uint64_t)1 << 40, 0, 1, 0};
    belay_history *h;
    char path[4096], *room = malloc(100);
    size_t n;
    is("memory", !room, 0);
    is("open", opened("names", 0, &h), 0);
    is("close", belay_history_close(h), 0);
    at(path, sizeof path, "names", "0000000000000001-1.version");
    is("pipe", mkfifo(path, 0600), 0);
    at(path, sizeof path, "names", "0000000000000002-1.version");
    int fd = open(path, O_RDWR | O_CREAT, 0600);
    /* All holes, with an end that has a checksum for each byte. */
    is("write", pwrite(fd, &fixed, sizeof fixed, (off_t)(9 * fixed.bytes)) == sizeof fixed, 1);
    close(fd);
    at(path, sizeof path, "names", "0000000000000003-1.version");
    is("directory", mkdir(path, 0700), 0);
    at(path, sizeof path, "names", "x.new");
    is("directory", mkdir(path, 0700), 0);
    alarm(60);
    is("open", opened("names", 0, &h), 0);
    is("region", belay_history_region(h, 0, room, 100), 0);
    is("versions", belay_history_versions(h, NULL, 0, &n), 0);
    is("how many", (int)n, 0);
    for (uint64_t v = 1; v <= 3; v++) is("get", belay_history_get(h, v, 0), -EBADMSG);
    is("put", belay_history_put(h, 4), 0);
    is("wait", belay_history_wait(h, BELAY_H_DURABLE), 0);
    is("close", belay_history_close(h), 0);
    alarm(0);
    free(room);
}

static belay_history *shared;
static volatile sig_atomic_t refused, others;

static void on_alarm(int number) {
    (void)number;
    int answers[] = {belay_history_put(shared, 999), belay_history_region(shared, 5, NULL, 0), belay_history_is_at(shared, 0)};
    for (int i = 0; i < 3; i++)
        if (answers[i] == -EDEADLK && *belay_error()) refused++;
        else if (answers[i] != 0 && answers[i] != -EEXIST && answers[i] != 1) others++;
}

static void *puts_for_ever(void *unused) {
    for (uint64_t v = 1000;; v++) {
        is("put", belay_history_put(shared, v), 0);
        is("drop", belay_history_drop(shared, v), 0);
        pthread_testcancel();
    }
    return unused;
}

/* What comes in the middle of a call: a handler of a signal that calls, and the end of the thread. */
static void of_calls(void) {
    size_t bytes = 32 << 20;
    char *memory = calloc(1, bytes);
    struct itimerval soon = {.it_value = {.tv_usec = 3000}}, never = {0};
    pthread_t thread;
    is("open", opened("calls", BELAY_H_UNTIL_READ, &shared), 0);
    is("region", belay_history_region(shared, 0, memory, bytes), 0);
    signal(SIGALRM, on_alarm);
    for (uint64_t v = 0; v < 200 && !refused; v++) {
        setitimer(ITIMER_REAL, &soon, NULL);
        is("put", belay_history_put(shared, v), 0);
        setitimer(ITIMER_REAL, &never, NULL);
        is("drop", belay_history_drop(shared, v), 0);
        belay_history_drop(shared, 999);
    }
    is("a call in a call", refused > 0 && !others, 1);
    signal(SIGALRM, SIG_DFL);
    alarm(60);
    for (int i = 0; i < 10; i++) {
        is("thread", pthread_create(&thread, NULL, puts_for_ever, NULL), 0);
        usleep(20000);
        is("cancel", pthread_cancel(thread), 0);
        is("join", pthread_join(thread, NULL), 0);
        is("put after the end of another thread", belay_history_put(shared, 1), 0);
        is("drop", belay_history_drop(shared, 1), 0);
    }
    alarm(0);
    is("close", belay_history_close(shared), 0);
    free(memory);
}

/* The first process of a namespace has a child with the same number. */
static void of_namespaces(void) {
    belay_history *h;
    double x = 1;
    int status;
    pid_t child = fork();
    if (!child) {
        int made = unshare(CLONE_NEWPID | (geteuid() ? CLONE_NEWUSER : 0));
        /* Not every host lets users have namespaces. */
        if (made < 0 && errno == EPERM && geteuid()) _exit(0);
        is("unshare", made, 0);
        child = fork();
        if (!child) {
            is("number", getpid(), 1);
            is("open", opened("namespaces", 0, &h), 0);
            is("region", belay_history_region(h, 0, &x, sizeof x), 0);
            is("put", belay_history_put(h, 1), 0);
            is("unshare", unshare(CLONE_NEWPID), 0);
            child = fork();
            if (!child) {
                /* The first of a namespace ignores signals that it does not handle. */
                signal(SIGALRM, _exit);
                alarm(20);
                is("number", getpid(), 1);
                is("get in a child", belay_history_get(h, 1, 0), -ECHILD);
                is("close in a child", belay_history_close(h), -ECHILD);
                _exit(0);
            }
            is("wait", waitpid(child, &status, 0), child);
            is("a child of the same number", status, 0);
            is("close", belay_history_close(h), 0);
            _exit(0);
        }
        is("wait", waitpid(child, &status, 0), child);
        _exit(status != 0);
    }
    is("wait", waitpid(child, &status, 0), child);
    is("namespaces", status, 0);
}

/* A file that is larger than the process may write is an error, not the end of the program. */
static void of_limits(void) {
    static char memory[300000];
    struct rlimit before, small;
    belay_history_opts opts = {.name = "limits", .dir = dir, .host_bytes = 1 << 16};
    belay_history *h;
    is("getrlimit", getrlimit(RLIMIT_FSIZE, &before), 0);
    small = before;
    small.rlim_cur = sizeof memory;
    is("open", belay_history_open(&opts, &h), 0);
    is("region", belay_history_region(h, 0, memory, sizeof memory), 0);
    is("setrlimit", setrlimit(RLIMIT_FSIZE, &small), 0);
    /* With its end it is larger. */
    is("put", belay_history_put(h, 1), -EFBIG);
    is("region", belay_history_region(h, 0, memory, 1000), 0);
    is("put", belay_history_put(h, 1), 0);
    is("wait", belay_history_wait(h, BELAY_H_DURABLE), 0);
    small.rlim_cur = 500;
    is("setrlimit", setrlimit(RLIMIT_FSIZE, &small), 0);
    is("put", belay_history_put(h, 2), 0);
    is("wait", belay_history_wait(h, BELAY_H_DURABLE), -EFBIG);
    is("setrlimit", setrlimit(RLIMIT_FSIZE, &before), 0);
    is("region", belay_history_region(h, 0, memory, sizeof memory), 0);
    is("put", belay_history_put(h, 3), 0);
    is("close", belay_history_close(h), 0);
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    dir = argv[1];
    of_locks();
    of_lives();
    of_sizes();
    of_names();
    of_namespaces();
    of_limits();
    of_calls();
    return 0;
}
