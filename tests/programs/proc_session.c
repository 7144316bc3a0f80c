// Sessions and process groups: children in own sessions and groups; killpg and waitpid(-group) reach exactly the right ones.
#include "check.h"
static _Atomic int *count;
static void hup(int s) { (void)s; (*count)++; }
int main(void) {
    begin("proc_session");
    count = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    signal(SIGHUP, hup);
    int ctl[2], up[2];
    OK(pipe(ctl));
    OK(pipe(up));
    pid_t lead = fork();  // a session leader with two groups of two processes each
    if (lead == 0) {
        begin_child();
        close(ctl[1]);
        OK(setsid());
        pid_t kid[4];
        for (int i = 0; i < 4; i++) {
            pid_t group = i % 2 ? kid[i - 1] : 0;
            kid[i] = fork();
            if (kid[i] == 0) {
                begin_child();
                pid_t sid = getsid(0);
                OK(setpgid(0, group));
                pid_t g = getpgrp();
                EQ(g, group ? group : getpid());
                full_write(up[1], "k", 1);
                struct pollfd p = {ctl[0], 0, 0};
                for (;;) {
                    int r = poll(&p, 1, 5);
                    if (r < 0 && errno != EINTR) fail("poll: %s", strerror(errno));
                    if (r == 1) break;
                    EQ(getpgrp(), g);
                    EQ(getsid(0), sid);
                    check_identity();
                }
                _exit(i + 1);
            }
            setpgid(kid[i], group ? group : kid[i]);
        }
        full_write(up[1], (char *)kid, sizeof kid);
        struct pollfd p = {ctl[0], 0, 0};
        while (poll(&p, 1, 5) == 0) {
            EQ(getsid(0), getpid());
            EQ(getpgrp(), getpid());
            for (int i = 0; i < 4; i++) EQ(getpgid(kid[i]), kid[i & ~1]);
        }
        int st, n = 0;
        while (waitpid(-kid[2], &st, 0) > 0) n++;
        EQ(n, 2);
        while (waitpid(-kid[0], &st, 0) > 0) n++;
        EQ(n, 4);
        no_children();
        _exit(33);
    }
    char b[4];
    pid_t kid[4];
    close(ctl[0]);
    // Four 'k' and the PIDs come in any order: read all, pick the bytes apart.
    char all[4 + sizeof kid];
    full_read(up[0], all, sizeof all);
    size_t at = 0;
    while (at < 4 && all[at] == 'k') at++;
    (void)b;
    // The PIDs are written by the leader in one piece after its children were made; the children's bytes may surround it.
    int found = 0;
    for (size_t o = 0; o <= 4 && !found; o++) {
        memcpy(kid, all + o, sizeof kid);
        found = 1;
        for (int i = 0; i < 4; i++) if (kid[i] <= 0 || kid[i] > 4194304 || getsid(kid[i]) != lead) found = 0;
    }
    CHECK(found);
    while (running()) {
        nap_us(4000);
        int before = *count;
        OK(killpg(kid[0], SIGHUP));
        int64_t t0 = now_ns();
        while (*count != before + 2) {
            if (now_ns() - t0 > 10000000000LL) fail("killpg reached %d processes, expected 2", *count - before);
            nap_us(300);
        }
        EQ(getpgid(kid[3]), kid[2]);
        EQ(getsid(kid[3]), lead);
    }
    close(ctl[1]);
    reap(lead, 33 << 8);
    no_children();
    return finish();
}
