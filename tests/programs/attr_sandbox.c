// A job within a system call filter that belay was launched or restarted in: by `attr_sandbox under COMMAND...` in one
// that denies what nobody here calls, by `attr_sandbox blind COMMAND...` in one that denies what belay needs. A restart
// does not bring the filter along: it holds where belay was started in it.
// attr_sandbox [WHAT]; own: a thread enters a filter of its own too.
#include "check.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
static void enter_filter(unsigned denied) {
    struct sock_filter deny_one[] = {
        {BPF_LD | BPF_W | BPF_ABS, 0, 0, offsetof(struct seccomp_data, nr)},
        {BPF_JMP | BPF_JEQ | BPF_K, 0, 1, denied},
        {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ERRNO | EPERM},
        {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW},
    };
    struct sock_fprog filter = {4, deny_one};
    // Root's programs may still gain privileges, as in a container.
    if (geteuid() != 0) OK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    OK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter));
}
static int go[2];
static void *live(void *own) {
    char byte;
    if (own) enter_filter(SYS_acct);
    full_read(go[0], &byte, 1);
    return NULL;
}
int main(int argc, char **argv) {
    begin("attr_sandbox");
    if (argc > 2 && (!strcmp(argv[1], "under") || !strcmp(argv[1], "blind"))) {
        enter_filter(argv[1][0] == 'u' ? SYS_acct : SYS_kcmp);
        execv(argv[2], argv + 2);
        fail("execute %s", argv[2]);
    }
    pthread_t thread;
    OK(pipe(go));
    CHECK(pthread_create(&thread, NULL, live, argc > 1 && !strcmp(argv[1], "own") ? argv : NULL) == 0);
    pid_t child = (pid_t)OK(fork());
    if (child == 0) {
        live(NULL);
        _exit(0);
    }
    while (running()) {
        nap_us(3000);
        // Programs of the job that are started now are in whatever the job is in.
        pid_t started = (pid_t)OK(fork());
        if (started == 0) {
            execl("/bin/true", "true", NULL);
            _exit(127);
        }
        reap(started, 0);
    }
    full_write(go[1], "ab", 2);
    CHECK(pthread_join(thread, NULL) == 0);
    reap(child, 0);
    return finish();
}
