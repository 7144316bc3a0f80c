// Capabilities that can be kept and not be had again: inheritable ones outside of the bounding set (bounded), ambient ones
// of a process that may raise no more (ambient).
#include "check.h"
#include <linux/capability.h>
#include <linux/securebits.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
enum { BIT = 1 << CAP_NET_RAW };
static struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
static int ambient(int how) { return prctl(PR_CAP_AMBIENT, how, CAP_NET_RAW, 0, 0); }
int main(int argc, char **argv) {
    int bounded = argc > 1 && !strcmp(argv[1], "bounded");
    struct __user_cap_data_struct now[2], want[2];
    begin(bounded ? "attr_capabilities-bounded" : "attr_capabilities-ambient");
    OK(syscall(SYS_capget, &header, want));
    want[0].inheritable |= BIT;
    OK(syscall(SYS_capset, &header, want));
    if (bounded) {
        OK(prctl(PR_CAPBSET_DROP, CAP_NET_RAW));
    } else {
        OK(ambient(PR_CAP_AMBIENT_RAISE));
        OK(prctl(PR_SET_SECUREBITS, SECBIT_NO_CAP_AMBIENT_RAISE));
    }
    while (running()) {
        nap_us(3000);
        OK(syscall(SYS_capget, &header, now));
        CHECK(!memcmp(now, want, sizeof now));
        EQ(prctl(PR_CAPBSET_READ, CAP_NET_RAW), !bounded);
        EQ(ambient(PR_CAP_AMBIENT_IS_SET), !bounded);
        EQ(prctl(PR_GET_SECUREBITS), bounded ? 0 : SECBIT_NO_CAP_AMBIENT_RAISE);
    }
    return finish();
}
