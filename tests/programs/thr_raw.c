// Threads made with raw clone, as the Go runtime makes them: no libc thread structures, own FS base, no robust list, no rseq.
#include "check.h"
#include <asm/prctl.h>
#include <linux/futex.h>
#define N 6
#define STACK 262144
struct thread { uint64_t self, seed; int index; _Atomic int word; _Atomic uint64_t rounds; pid_t tid; int ctid; uint64_t data[64]; };
static struct thread t[N];
static _Atomic int ending;
static long raw(long nr, long a, long b, long c, long d) {
    long r;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = 0;
    __asm__ volatile("syscall" : "=a"(r) : "a"(nr), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8) : "rcx", "r11", "memory");
    return r;
}
static void die(int code) { raw(SYS_exit_group, code, 0, 0, 0); }
__attribute__((noinline, optimize("no-stack-protector"))) static int body(struct thread *x) {
    raw(SYS_arch_prctl, ARCH_SET_FS, (long)x, 0, 0);
    raw(SYS_arch_prctl, ARCH_SET_GS, (long)(x->data), 0, 0);
    x->tid = (pid_t)raw(SYS_gettid, 0, 0, 0, 0);
    while (!ending) {
        uint64_t fs, gs;
        __asm__ volatile("movq %%fs:0,%0" : "=r"(fs));
        __asm__ volatile("movq %%gs:8,%0" : "=r"(gs));
        if (fs != (uint64_t)x) die(41);
        if (gs != x->data[1]) die(42);
        if (raw(SYS_gettid, 0, 0, 0, 0) != x->tid) die(43);
        struct timespec ts = {0, 10000000};
        long r = raw(SYS_futex, (long)&x->word, FUTEX_WAIT_PRIVATE, 0, (long)&ts);
        if (r != -ETIMEDOUT && r != -EAGAIN && r != 0) die(44);
        x->rounds++;
    }
    raw(SYS_exit, 0, 0, 0, 0);
    return 0;
}
static int start(void *arg) { return body(arg); }
int main(void) {
    begin("thr_raw");
    for (int i = 0; i < N; i++) {
        t[i].self = (uint64_t)&t[i];
        t[i].index = i;
        fill(t[i].data, sizeof t[i].data, (uint64_t)i);
        char *stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(stack != MAP_FAILED);
        t[i].ctid = 1;
        OK(clone(start, stack + STACK, CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_SYSVSEM | CLONE_THREAD | CLONE_CHILD_CLEARTID, &t[i], NULL, NULL, &t[i].ctid));
    }
    while (running()) {
        for (int i = 0; i < N; i++) {
            uint64_t r = t[i].rounds;
            int64_t t0 = now_ns();
            while (t[i].rounds == r) {
                if (now_ns() - t0 > 20000000000LL) fail("raw thread %d stopped running", i);
                nap_us(2000);
            }
        }
    }
    ending = 1;
    for (int i = 0; i < N; i++)
        while (*(volatile int *)&t[i].ctid) syscall(SYS_futex, &t[i].ctid, FUTEX_WAIT, 1, NULL, NULL, 0);
    return finish();
}
