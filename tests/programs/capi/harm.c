/* What others do to a history: its lock, its directory, its calls. An error each, or nothing. harm DIRECTORY */
#include <belay.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    dir = argv[1];
    of_locks();
    return 0;
}
