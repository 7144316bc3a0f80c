// A subreaper collects orphaned grandchildren; a parent-death signal stays armed.
#include "check.h"
int main(void) {
    begin("proc_subreaper");
    OK(prctl(PR_SET_CHILD_SUBREAPER, 1));
    while (running()) {
        int p[2];
        OK(pipe(p));
        pid_t mid = fork();
        if (mid == 0) {
            pid_t g = fork();
            if (g == 0) {
                begin_child();
                OK(prctl(PR_SET_PDEATHSIG, SIGUSR1));
                sigset_t s;
                sigemptyset(&s);
                sigaddset(&s, SIGUSR1);
                sigprocmask(SIG_BLOCK, &s, NULL);
                full_write(p[1], "rr", 2);  // one for each ancestor
                siginfo_t si;
                int r = sigwaitinfo(&s, &si);
                if (r != SIGUSR1) fail("sigwaitinfo returned %d", r);
                _exit(getppid() == check_ppid ? 1 : 44);
            }
            // Not before the signal is armed, however long a checkpoint stops the two.
            full_read(p[0], &(char){0}, 1);
            nap_us(25000);
            _exit(5);
        }
        char b;
        full_read(p[0], &b, 1);
        int on = 0;
        OK(prctl(PR_GET_CHILD_SUBREAPER, &on));
        EQ(on, 1);
        reap(mid, 5 << 8);
        int st;
        pid_t g = waitpid(-1, &st, 0);
        CHECK(g > 0 && g != mid);
        EQ(st, 44 << 8);
        close(p[0]);
        close(p[1]);
        no_children();
    }
    return finish();
}
