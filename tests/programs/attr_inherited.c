// What processes inherit, and this one has as the kernel gives it to everybody: a restart has it otherwise (under which
// `attr_inherited under COMMAND...` runs it), and that is not for the job.
#include "check.h"
#include <linux/capability.h>
#include <sys/personality.h>
enum { THP_SET = 41, THP_GET, FLUSHER_SET = 57, FLUSHER_GET, MERGE_SET = 67, MERGE_GET, MCE_SET = 33, MCE_GET };
struct state { int personality, policy, thp, flusher, merge, machine_checks, inheritable, ambient; };
static void capabilities(struct __user_cap_data_struct caps[2], int number) {
    struct __user_cap_header_struct h = {_LINUX_CAPABILITY_VERSION_3, 0};
    OK(syscall(number, &h, caps));
}
static struct state look(void) {
    struct state s = {personality(0xffffffff), sched_getscheduler(0), prctl(THP_GET, 0, 0, 0, 0), prctl(FLUSHER_GET, 0, 0, 0, 0), prctl(MERGE_GET, 0, 0, 0, 0), prctl(MCE_GET, 0, 0, 0, 0), 0, 0};
    struct __user_cap_data_struct caps[2];
    capabilities(caps, SYS_capget);
    s.inheritable = (int)caps[0].inheritable;
    s.ambient = prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_IS_SET, CAP_NET_RAW, 0, 0);
    return s;
}
static void run_under(char **command) {
    struct sched_param none = {0};
    OK(personality(ADDR_NO_RANDOMIZE));
    OK(sched_setscheduler(0, SCHED_BATCH, &none));
    OK(prctl(THP_SET, 1, 0, 0, 0));
    OK(prctl(MCE_SET, 1, 1, 0, 0));
    if (geteuid() == 0) {
        struct __user_cap_data_struct caps[2];
        capabilities(caps, SYS_capget);
        caps[0].inheritable = 1u << CAP_NET_RAW | 1u << CAP_CHOWN;
        capabilities(caps, SYS_capset);
        OK(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_NET_RAW, 0, 0));
    }
    // These are for root, and not of every kernel.
    prctl(FLUSHER_SET, 1, 0, 0, 0);
    prctl(MERGE_SET, 1, 0, 0, 0);
    execv(command[0], command);
    fail("execute %s", command[0]);
}
int main(int argc, char **argv) {
    begin("attr_inherited");
    if (argc > 2 && !strcmp(argv[1], "under")) run_under(argv + 2);
    struct state want = look();
    while (running()) {
        nap_us(3000);
        struct state now = look();
        EQ(now.personality, want.personality);
        EQ(now.policy, want.policy);
        EQ(now.thp, want.thp);
        EQ(now.flusher, want.flusher);
        EQ(now.merge, want.merge);
        EQ(now.machine_checks, want.machine_checks);
        EQ(now.inheritable, want.inheritable);
        EQ(now.ambient, want.ambient);
    }
    return finish();
}
