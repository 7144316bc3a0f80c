// A daemon made by double fork and setsid: its own session, reparented, talks to the main program through a FIFO-less
// file of counters.
#include "check.h"
struct shared { _Atomic uint64_t asked, answered; _Atomic int pid, ppid, sid, ending; };
int main(void) {
    begin("proc_daemon");
    struct shared *s = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(s != MAP_FAILED);
    pid_t middle = fork();
    if (middle == 0) {
        setsid();
        pid_t leader = getpid();
        if (fork()) _exit(0);
        begin_child();
        while (getppid() == leader) usleep(500);  // until reparented
        check_ppid = getppid();
        int nul = open("/dev/null", O_RDWR);
        dup2(nul, 0);
        OK(chdir("/"));
        s->sid = getsid(0);
        s->ppid = getppid();
        s->pid = getpid();
        EQ(s->sid, leader);
        while (!s->ending) {
            nap_us(1000);
            EQ(getpid(), s->pid);
            EQ(getsid(0), leader);
            EQ(getpgrp(), leader);
            EQ(getppid(), s->ppid);
            if (s->answered != s->asked) s->answered++;
        }
        s->pid = 0;
        _exit(0);
    }
    reap(middle, 0);
    while (!s->pid) nap_us(500);
    pid_t d = s->pid;
    while (running()) {
        s->asked++;
        int64_t t0 = now_ns();
        while (s->answered != s->asked) {
            if (now_ns() - t0 > 10000000000LL) fail("the daemon does not answer");
            nap_us(500);
        }
        EQ(getsid(d), s->sid);
        no_children();
    }
    s->ending = 1;
    while (s->pid) nap_us(500);
    return finish();
}
