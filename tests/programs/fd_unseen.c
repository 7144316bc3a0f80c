// What the program has open is not opened or read in a way that can be seen: leases are not broken, nobody who watches
// the files is told of anything, and offsets, flags and leases stay as they are.
#include "check.h"
#include <sys/inotify.h>

static void broken(int sig) {
    (void)sig;
    fail("a lease is being broken");
}
static void nothing(int fd) {
    char b[4096] __attribute__((aligned(8)));
    long n = read(fd, b, sizeof b);
    if (n < 0 && errno == EAGAIN) return;
    struct inotify_event *e = (void *)b;
    fail("read %ld bytes of events, the first: watch %d, mask %#x, name %s", n, e->wd, e->mask, e->len ? e->name : "");
}
static int file(const char *kind, int flags, char *path) {
    snprintf(path, 64, "unseen.%s.%d", kind, getpid());
    int fd = (int)OK(open(path, O_RDWR | O_CREAT | O_EXCL, 0600));
    full_write(fd, "twenty bytes of text", 20);
    // A hole, and data behind it.
    if (!strcmp(kind, "sparse")) EQ(pwrite(fd, "end", 3, 1 << 20), 3);
    OK(close(fd));
    fd = (int)OK(open(path, flags));
    EQ(lseek(fd, 7, SEEK_SET), 7);
    return fd;
}
int main(void) {
    begin("fd_unseen");
    char path[5][64];
    int fd[5], flags[5];
    char empty[64];
    fd[0] = file("leased", O_RDWR, path[0]);
    fd[1] = file("input", O_RDONLY, path[1]);
    fd[2] = file("both", O_RDWR | O_APPEND, path[2]);
    fd[3] = file("sparse", O_RDWR, path[3]);
    fd[4] = file("shared", O_RDONLY, path[4]);
    struct sigaction a = {.sa_handler = broken};
    OK(sigaction(SIGUSR2, &a, NULL));
    OK(sigaction(SIGIO, &a, NULL));
    OK(fcntl(fd[0], F_SETSIG, SIGUSR2));
    OK(fcntl(fd[0], F_SETLEASE, F_WRLCK));
    OK(fcntl(fd[4], F_SETLEASE, F_RDLCK));
    for (int i = 0; i < 5; i++) flags[i] = (int)OK(fcntl(fd[i], F_GETFL));
    int watch = (int)OK(inotify_init1(IN_NONBLOCK));
    for (int i = 0; i < 5; i++) OK(inotify_add_watch(watch, path[i], IN_ALL_EVENTS));
    // Of an empty file that is open for writing only there is nothing to be read.
    snprintf(empty, sizeof empty, "unseen.empty.%d", getpid());
    int new = (int)OK(open(empty, O_WRONLY | O_CREAT | O_EXCL, 0600));
    OK(fcntl(new, F_SETLEASE, F_WRLCK));
    OK(inotify_add_watch(watch, empty, IN_ALL_EVENTS));
    while (running()) {
        EQ(fcntl(fd[0], F_GETLEASE), F_WRLCK);
        EQ(fcntl(fd[4], F_GETLEASE), F_RDLCK);
        EQ(fcntl(fd[0], F_GETSIG), SIGUSR2);
        EQ(fcntl(fd[0], F_GETOWN), getpid());
        EQ(fcntl(fd[4], F_GETSIG), 0);
        EQ(fcntl(fd[4], F_GETOWN), getpid());
        for (int i = 0; i < 5; i++) {
            EQ(lseek(fd[i], 0, SEEK_CUR), 7);
            EQ(fcntl(fd[i], F_GETFL), flags[i]);
        }
        EQ(fcntl(new, F_GETLEASE), F_WRLCK);
        nothing(watch);
        nap_us(1000);
    }
    for (int i = 0; i < 5; i++) OK(unlink(path[i]));
    OK(unlink(empty));
    return finish();
}
