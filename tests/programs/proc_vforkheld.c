// A parent suspended in vfork while its child still runs on the parent's memory.
#include "check.h"
int main(void) {
    begin("proc_vforkheld");
    while (running()) {
        volatile int shared = 1;
        pid_t p = vfork();
        if (p == 0) {
            struct timespec t = {0, 40000000};
            if (syscall(SYS_nanosleep, &t, NULL)) _exit(97);
            shared = 2;
            _exit(11);
        }
        EQ(shared, 2);
        reap(p, 11 << 8);
        no_children();
    }
    return finish();
}
