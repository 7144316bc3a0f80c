// The main thread has ended with pthread_exit (a zombie leader); the other threads carry the process on, with its
// descriptors, memory and children. So has that of a child. (Which thread's status is the child's in the end depends on
// the kernel: both have the same.)
#include "check.h"
static pthread_t main_thread;
static int to_echo[2], to_child[2];
static _Atomic uint64_t echoed;
static pid_t child;

static void *echo(void *arg) {
    (void)arg;
    uint64_t v;
    for (;;) {
        full_read(to_echo[0], &v, 8);
        EQ(getpid(), check_pid);
        echoed = v;
    }
}
// Ends when the pipe ends, and without ending the process for others, of which there are none any more.
static void *last(void *arg) {
    (void)arg;
    char b;
    for (;;) {
        ssize_t n = read(to_child[0], &b, 1);
        if (n == 0) syscall(SYS_exit, 7);
        if (n != 1) fail("read returned %zd: %s", n, strerror(errno));
        EQ(getpid(), check_pid);
        EQ(getppid(), check_ppid);
    }
}
static void *work(void *arg) {
    (void)arg;
    struct stat st;
    uint64_t *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pthread_join(main_thread, NULL) == 0);
    while (running()) {
        uint64_t v = mix(check_round);
        full_write(to_echo[1], &v, 8);
        full_write(to_child[1], "x", 1);
        fill(page, 4096, check_round);
        nap_us(2000);
        verify(page, 4096, check_round, "memory");
        for (int i = 0; echoed != v; i++) {
            if (i > 5000) fail("the other thread does not answer");
            nap_us(1000);
        }
        EQ(fstat(to_echo[0], &st), 0);
        int status;  // nothing to wait for
        EQ(waitpid(child, &status, WNOHANG), 0);
        // The main threads are zombies still.
        char path[64], text[256] = "";
        snprintf(path, sizeof path, "/proc/%d/task/%d/stat", check_round % 2 ? check_pid : child, check_round % 2 ? check_pid : child);
        int fd = (int)OK(open(path, O_RDONLY));
        CHECK(read(fd, text, sizeof text - 1) > 0);
        close(fd);
        if (!strstr(text, ") Z ")) fail("%s: %s", path, text);
    }
    close(to_child[1]);
    reap(child, 7 << 8);
    no_children();
    exit(finish());
}
int main(void) {
    begin("thr_leader_gone");
    pthread_t t;
    OK(pipe(to_echo));
    OK(pipe(to_child));
    main_thread = pthread_self();
    child = fork();
    if (child == 0) {
        begin_child();
        close(to_child[1]);
        CHECK(pthread_create(&t, NULL, last, NULL) == 0);
        syscall(SYS_exit, 7);
    }
    for (int i = 0; i < 200; i++) {  // until the child's main thread has ended
        char path[64], text[256] = "";
        snprintf(path, sizeof path, "/proc/%d/stat", child);
        int fd = (int)OK(open(path, O_RDONLY));
        CHECK(read(fd, text, sizeof text - 1) > 0);
        close(fd);
        if (strstr(text, ") Z ")) break;
        nap_us(1000);
    }
    CHECK(pthread_create(&t, NULL, echo, NULL) == 0);
    CHECK(pthread_create(&t, NULL, work, NULL) == 0);
    pthread_exit(NULL);
}
