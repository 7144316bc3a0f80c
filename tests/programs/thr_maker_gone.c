// A child that is told when its maker ends (PR_SET_PDEATHSIG), of a process whose first thread has ended before it was
// made by another: that thread lives, and so must the child.
#include "check.h"
#include <pthread.h>
#include <sys/prctl.h>
static pthread_t first;

static void answer(int from, int to) {
    begin_child();
    OK(prctl(PR_SET_PDEATHSIG, SIGTERM));
    for (;;) {
        char b;
        ssize_t n = read(from, &b, 1);
        if (n == 0) _exit(7);
        EQ(n, 1);
        int signal = 0;
        OK(prctl(PR_GET_PDEATHSIG, &signal));
        EQ(signal, SIGTERM);
        EQ(write(to, &b, 1), 1);
    }
}

static void *work(void *unused) {
    int there[2], back[2];
    EQ(pthread_join(first, NULL), 0);
    OK(pipe(there));
    OK(pipe(back));
    pid_t child = (pid_t)OK(fork());
    if (child == 0) {
        close(there[1]);
        close(back[0]);
        answer(there[0], back[1]);
    }
    close(there[0]);
    close(back[1]);
    while (running()) {
        char b = 'x';
        full_write(there[1], &b, 1);
        full_read(back[0], &b, 1);
        nap_us(1000);
    }
    close(there[1]);
    reap(child, 7 << 8);
    no_children();
    exit(finish());
    return unused;
}

int main(void) {
    begin("thr_maker_gone");
    first = pthread_self();
    pthread_t thread;
    EQ(pthread_create(&thread, NULL, work, NULL), 0);
    pthread_exit(NULL);
}
