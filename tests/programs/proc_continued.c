// A child that has been stopped and continued is told to its parent as continued, once, whenever its parent asks.
#include "check.h"
int main(void) {
    begin("proc_continued");
    pid_t p = fork();
    if (p == 0) for (;;) pause();
    sigset_t chld;
    sigemptyset(&chld);
    sigaddset(&chld, SIGCHLD);
    OK(sigprocmask(SIG_BLOCK, &chld, NULL));
    siginfo_t info;
    int st;
    for (int odd = 0; running(); odd = !odd) {
        OK(kill(p, SIGSTOP));
        EQ(waitpid(p, &st, WUNTRACED), p);
        CHECK(WIFSTOPPED(st) && WSTOPSIG(st) == SIGSTOP);
        EQ(waitpid(p, &st, WCONTINUED | WNOHANG), 0);
        OK(kill(p, SIGCONT));
        // It is looked at, but not taken notice of for a while; every other time it is not even looked at.
        for (int i = 0; i < 20; i++) {
            memset(&info, 0, sizeof info);
            if (odd) {
                OK(waitid(P_PID, (id_t)p, &info, WCONTINUED | WNOHANG | WNOWAIT));
                EQ(info.si_pid, p);
                EQ(info.si_code, CLD_CONTINUED);
            }
            nap_us(4000);
            running();
        }
        // The signal that tells of it waits too, and is the last of its kind.
        EQ(sigtimedwait(&chld, &info, &(struct timespec){0}), SIGCHLD);
        EQ(info.si_pid, p);
        EQ(sigtimedwait(&chld, &info, &(struct timespec){0}), -1);
        EQ(waitpid(p, &st, WCONTINUED | WUNTRACED | WNOHANG), p);
        CHECK(WIFCONTINUED(st));
        for (int i = 0; i < 5; i++) {
            EQ(waitpid(p, &st, WCONTINUED | WUNTRACED | WNOHANG), 0);
            EQ(sigtimedwait(&chld, &info, &(struct timespec){0}), -1);
            nap_us(4000);
            running();
        }
    }
    kill(p, SIGKILL);
    reap(p, SIGKILL);
    return finish();
}
