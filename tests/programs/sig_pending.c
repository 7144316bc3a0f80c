// Pending signals: real-time queue with values in order, standard signals with their sender, thread-directed ones; none
// lost, none added.
#include "check.h"
int main(void) {
    begin("sig_pending");
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, NULL);
    int rt = SIGRTMIN + 3;
    for (int seed = 0; running(); seed += 10) {
        for (int i = 0; i < 5; i++) {
            union sigval v = {.sival_ptr = (void *)mix((uint64_t)(seed + i))};
            OK(sigqueue(getpid(), rt, v));
        }
        OK(kill(getpid(), SIGUSR1));
        CHECK(pthread_kill(pthread_self(), SIGUSR2) == 0);
        OK(kill(getpid(), SIGUSR1));  // merged with the first
        for (int i = 0; i < 4; i++) {
            struct timespec t = {0, 4000000};
            if (nanosleep(&t, NULL)) fail("nanosleep with all signals blocked: %s", strerror(errno));
            running();
        }
        sigset_t p;
        sigpending(&p);
        for (int s = 1; s < 65; s++) {
            int want = s == rt || s == SIGUSR1 || s == SIGUSR2;
            if (s >= 32 && s < SIGRTMIN) continue;
            if (sigismember(&p, s) != want) fail("signal %d pending: %d", s, sigismember(&p, s));
        }
        siginfo_t si;
        struct timespec zero = {0, 0};
        sigset_t one;
        for (int i = 0; i < 5; i++) {
            sigemptyset(&one);
            sigaddset(&one, rt);
            EQ(sigtimedwait(&one, &si, &zero), rt);
            EQ(si.si_value.sival_ptr, mix((uint64_t)(seed + i)));
            EQ(si.si_pid, getpid());
            EQ(si.si_uid, getuid());
            EQ(si.si_code, SI_QUEUE);
        }
        sigemptyset(&one);
        sigaddset(&one, SIGUSR1);
        EQ(sigtimedwait(&one, &si, &zero), SIGUSR1);
        EQ(si.si_code, SI_USER);
        EQ(si.si_pid, getpid());
        sigemptyset(&one);
        sigaddset(&one, SIGUSR2);
        EQ(syscall(SYS_rt_sigtimedwait, &one, &si, &zero, 8), SIGUSR2);  // libc would hide the code
        EQ(si.si_code, SI_TKILL);
        if (sigtimedwait(&all, &si, &zero) != -1 || errno != EAGAIN) fail("an unexpected signal %d", si.si_signo);
    }
    return finish();
}
