// A handler runs on the alternate stack while the checkpoint comes; a nested handler on top of it; both return properly.
#include "check.h"
static char *stk;
static _Atomic int depth_seen;
static int on_stack(void *p) { return (char *)p >= stk && (char *)p < stk + 65536; }
static void inner(int s) {
    (void)s;
    uint64_t local[32];
    fill(local, sizeof local, 9);
    CHECK(on_stack(local));
    nap_us(6000);
    verify(local, sizeof local, 9, "the nested handler's frame");
    depth_seen++;
}
static void outer(int s) {
    (void)s;
    uint64_t local[64];
    fill(local, sizeof local, 5);
    CHECK(on_stack(local));
    stack_t ss;
    OK(sigaltstack(NULL, &ss));
    EQ(ss.ss_flags, SS_ONSTACK);
    nap_us(6000);
    raise(SIGUSR2);
    nap_us(3000);
    OK(sigaltstack(NULL, &ss));
    EQ(ss.ss_flags, SS_ONSTACK);
    verify(local, sizeof local, 5, "the handler's frame");
    depth_seen++;
}
int main(void) {
    begin("sig_altstack");
    stk = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    stack_t ss = {.ss_sp = stk, .ss_size = 65536}, now;
    OK(sigaltstack(&ss, NULL));
    struct sigaction a = {.sa_handler = outer, .sa_flags = SA_ONSTACK}, b = {.sa_handler = inner, .sa_flags = SA_ONSTACK};
    sigaction(SIGUSR1, &a, NULL);
    sigaction(SIGUSR2, &b, NULL);
    while (running()) {
        depth_seen = 0;
        double x = 1.0 / (double)check_round;
        register double live __asm__("xmm9") = x;
        __asm__ volatile("" : "+x"(live));
        raise(SIGUSR1);
        EQ(depth_seen, 2);
        OK(sigaltstack(NULL, &now));
        CHECK(now.ss_sp == stk && now.ss_size == 65536 && now.ss_flags == 0);
    }
    return finish();
}
