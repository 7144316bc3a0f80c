// A fork tree three levels deep: data, PIDs, parents, and exit statuses of all.
#include "check.h"
static uint64_t heap_words = 4096;
static int node(int depth, uint64_t id, int ctl) {
    begin_child();
    uint64_t *mine = malloc(heap_words * 8);
    fill(mine, heap_words * 8, id);
    pid_t kid[3];
    for (int i = 0; depth < 2 && i < 3; i++) {
        kid[i] = fork();
        if (kid[i] == 0) _exit(node(depth + 1, id * 4 + (uint64_t)i + 1, ctl));
        CHECK(kid[i] > 0);
    }
    struct pollfd p = {ctl, POLLIN, 0};
    for (;;) {
        int r = poll(&p, 1, 10);
        if (r < 0) fail("poll: %s", strerror(errno));
        check_identity();
        verify(mine, heap_words * 8, id, "a child's heap");
        if (r == 1) break;
        siginfo_t si = {0};
        if (depth == 2) continue;
        OK(waitid(P_ALL, 0, &si, WEXITED | WNOHANG | WNOWAIT));
        // A child may have been told to end since this one looked.
        if (si.si_pid && poll(&p, 1, 0) != 1) fail("a child ended early: %d has status %d", si.si_pid, si.si_status);
    }
    for (int i = 0; depth < 2 && i < 3; i++) reap(kid[i], ((int)((id * 4 + (uint64_t)i + 1) % 200)) << 8);
    no_children();
    return (int)(id % 200);
}
int main(void) {
    begin("proc_tree");
    while (running()) {
        int p[2];
        OK(pipe(p));
        pid_t c[3];
        for (int i = 0; i < 3; i++) {
            c[i] = fork();
            if (c[i] == 0) {
                close(p[1]);
                _exit(node(1, (uint64_t)i + 1, p[0]));
            }
        }
        close(p[0]);
        for (int r = 0; r < 60 && !told_to_end(); r++) {
            nap_us(8000);
            running();
            int st;
            if (waitpid(-1, &st, WNOHANG) != 0) fail("a child ended early: %x", st);
        }
        close(p[1]);
        for (int i = 0; i < 3; i++) reap(c[i], (i + 1) << 8);
        no_children();
    }
    return finish();
}
