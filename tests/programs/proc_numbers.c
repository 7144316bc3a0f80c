// Numbers of children that have ended belong to nobody, and are not given to others soon: whoever remembers one must not
// meet somebody else behind it.
#include "check.h"
#define N 8
static pid_t ended(void) {
    pid_t pid = fork();
    OK(pid);
    if (pid == 0) _exit(0);
    EQ(waitpid(pid, NULL, 0), pid);
    return pid;
}
int main(void) {
    begin("proc_numbers");
    pid_t before[N] = {0};
    int64_t since = 0;
    while (running()) {
        // Not for so long that the kernel may have begun anew.
        if (!before[0] || now_ns() - since > 500 * 1000000LL) {
            for (int i = 0; i < N; i++) before[i] = ended();
            since = now_ns();
        }
        nap_us(5000);
        pid_t next = ended();
        for (int i = 0; i < N; i++) {
            EQ(kill(before[i], 0), -1);
            EQ(errno, ESRCH);
            if (next == before[i]) fail("a child has number %d, which another one had a moment ago", next);
        }
    }
    no_children();
    return finish();
}
