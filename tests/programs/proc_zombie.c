// Zombies keep their PID, user, wait status (exit code, signal, core flag aside) and resource usage until they are waited
// for. As root one is another user's.
#include "check.h"
#include <sys/resource.h>
#define N 6
#define OTHER 12345
static int others(int i) { return i == 3 && !getuid(); }
int main(void) {
    begin("proc_zombie");
    struct { pid_t pid; int status; } z[N];
    for (int i = 0; i < N; i++) {
        z[i].pid = fork();
        if (z[i].pid == 0) {
            if (others(i)) {
                OK(setgid(OTHER));
                OK(setuid(OTHER));
            }
            if (i % 3 == 0) _exit(i + 20);
            // Nobody is told of what would leave a core file.
            setrlimit(RLIMIT_CORE, &(struct rlimit){1, 1});
            kill(getpid(), i % 3 == 1 ? SIGKILL : i == 5 ? SIGSEGV : SIGTERM);
            _exit(1);
        }
        z[i].status = i % 3 == 0 ? (i + 20) << 8 : i % 3 == 1 ? SIGKILL : i == 5 ? SIGSEGV : SIGTERM;
    }
    for (int i = 0; i < N; i++) {
        siginfo_t si;
        OK(waitid(P_PID, (id_t)z[i].pid, &si, WEXITED | WNOWAIT));
    }
    while (running()) {
        nap_us(5000);
        for (int i = 0; i < N; i++) {
            siginfo_t si = {0};
            OK(waitid(P_PID, (id_t)z[i].pid, &si, WEXITED | WNOWAIT | WNOHANG));
            EQ(si.si_pid, z[i].pid);
            EQ(si.si_code, WIFEXITED(z[i].status) ? CLD_EXITED : CLD_KILLED);
            EQ(si.si_status, WIFEXITED(z[i].status) ? WEXITSTATUS(z[i].status) : WTERMSIG(z[i].status));
            EQ(si.si_uid, others(i) ? OTHER : getuid());
            OK(kill(z[i].pid, 0));
        }
    }
    for (int i = N - 1; i >= 0; i--) {
        struct rusage ru;
        int st;
        EQ(wait4(z[i].pid, &st, 0, &ru), z[i].pid);
        EQ(st, z[i].status);
    }
    no_children();
    return finish();
}
