// A parent suspended in vfork while its child still runs on the parent's memory. proc_vforkheld [HELD_MS PAUSE_MS]
#include "check.h"
static void nap(long ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000};
    if (syscall(SYS_nanosleep, &t, NULL)) _exit(97);
}
int main(int argc, char **argv) {
    long held = argc > 1 ? atol(argv[1]) : 40, pause = argc > 2 ? atol(argv[2]) : 0;
    begin("proc_vforkheld");
    while (running()) {
        volatile int shared = 1;
        pid_t p = vfork();
        if (p == 0) {
            nap(held);
            shared = 2;
            _exit(11);
        }
        EQ(shared, 2);
        reap(p, 11 << 8);
        no_children();
        nap(pause);
    }
    return finish();
}
