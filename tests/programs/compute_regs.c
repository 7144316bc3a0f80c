// Vector registers, x87 state and control words stay live across a checkpoint inside a loop without system calls.
// compute_regs threads: in several threads. compute_regs aio, compute_regs notify: the same, and the process has a
// context of native asynchronous I/O or is registered with mq_notify, for which its threads run more code at a
// checkpoint.
#include "check.h"
#include <immintrin.h>
#include <linux/aio_abi.h>
#include <mqueue.h>

static void avx2_spin(uint64_t n) {
    uint64_t in[16][4], out[16][4];
    for (int i = 0; i < 16; i++) for (int j = 0; j < 4; j++) in[i][j] = mix((uint64_t)(i * 4 + j) + n);
    uint64_t count = n;
    __asm__ volatile(
        "vmovdqu (%1),%%ymm0\n vmovdqu 32(%1),%%ymm1\n vmovdqu 64(%1),%%ymm2\n vmovdqu 96(%1),%%ymm3\n"
        "vmovdqu 128(%1),%%ymm4\n vmovdqu 160(%1),%%ymm5\n vmovdqu 192(%1),%%ymm6\n vmovdqu 224(%1),%%ymm7\n"
        "vmovdqu 256(%1),%%ymm8\n vmovdqu 288(%1),%%ymm9\n vmovdqu 320(%1),%%ymm10\n vmovdqu 352(%1),%%ymm11\n"
        "vmovdqu 384(%1),%%ymm12\n vmovdqu 416(%1),%%ymm13\n vmovdqu 448(%1),%%ymm14\n vmovdqu 480(%1),%%ymm15\n"
        "1: dec %0\n jnz 1b\n"
        "vmovdqu %%ymm0,(%2)\n vmovdqu %%ymm1,32(%2)\n vmovdqu %%ymm2,64(%2)\n vmovdqu %%ymm3,96(%2)\n"
        "vmovdqu %%ymm4,128(%2)\n vmovdqu %%ymm5,160(%2)\n vmovdqu %%ymm6,192(%2)\n vmovdqu %%ymm7,224(%2)\n"
        "vmovdqu %%ymm8,256(%2)\n vmovdqu %%ymm9,288(%2)\n vmovdqu %%ymm10,320(%2)\n vmovdqu %%ymm11,352(%2)\n"
        "vmovdqu %%ymm12,384(%2)\n vmovdqu %%ymm13,416(%2)\n vmovdqu %%ymm14,448(%2)\n vmovdqu %%ymm15,480(%2)\n"
        : "+r"(count) : "r"(in), "r"(out)
        : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
    if (memcmp(in, out, sizeof in)) fail("a ymm register changed");
}

__attribute__((target("avx512f"))) static void avx512_spin(uint64_t n) {
    uint64_t in[4][8], out[4][8], k_in = mix(n) & 0xffff, k_out = 0, count = n;
    for (int i = 0; i < 4; i++) for (int j = 0; j < 8; j++) in[i][j] = mix((uint64_t)(i * 8 + j) ^ n);
    __asm__ volatile(
        "vmovdqu64 (%2),%%zmm0\n vmovdqu64 64(%2),%%zmm15\n vmovdqu64 128(%2),%%zmm16\n vmovdqu64 192(%2),%%zmm31\n kmovw %k4,%%k1\n"
        "1: dec %0\n jnz 1b\n"
        "vmovdqu64 %%zmm0,(%3)\n vmovdqu64 %%zmm15,64(%3)\n vmovdqu64 %%zmm16,128(%3)\n vmovdqu64 %%zmm31,192(%3)\n kmovw %%k1,%k1\n"
        : "+r"(count), "=&r"(k_out) : "r"(in), "r"(out), "r"(k_in)
        : "memory", "cc", "xmm0", "xmm15", "xmm16", "xmm31", "k1");
    if (memcmp(in, out, sizeof in)) fail("a zmm register changed");
    if (k_in != k_out) fail("mask register k1 is %llx, was %llx", (unsigned long long)k_out, (unsigned long long)k_in);
}

static void x87_spin(uint64_t n) {
    long double a = 1.0L / 3, b = (long double)n / 7, ra, rb;
    uint64_t count = n;
    unsigned short cw = 0x0e7f, cw_out;  // round towards zero, extended precision, one exception unmasked at most
    unsigned mx = 0x7f80 | 0x8000, mx_out, mx_old;
    __asm__ volatile("stmxcsr %0" : "=m"(mx_old));
    __asm__ volatile("ldmxcsr %0" ::"m"(mx));
    __asm__ volatile("fldcw %5\n fldt %3\n fldt %4\n 1: dec %2\n jnz 1b\n fstpt %1\n fstpt %0\n"
                     : "=m"(ra), "=m"(rb), "+r"(count) : "m"(a), "m"(b), "m"(cw) : "cc", "memory");
    __asm__ volatile("fnstcw %0\n stmxcsr %1" : "=m"(cw_out), "=m"(mx_out));
    __asm__ volatile("fninit\n ldmxcsr %0" ::"m"(mx_old));
    if (memcmp(&ra, &a, 10) || memcmp(&rb, &b, 10)) fail("the x87 stack changed");
    if (cw_out != cw) fail("x87 control word %x, was %x", cw_out, cw);
    if ((mx_out & ~0x3fu) != (mx & ~0x3fu)) fail("mxcsr %x, was %x", mx_out, mx);
}

static void gpr_spin(uint64_t n) {
    uint64_t v[8], o[8];
    for (int i = 0; i < 8; i++) v[i] = mix(n + (uint64_t)i);
    memset(o, 0, sizeof o);
    __asm__ volatile(
        "movq (%1),%%r8\n movq 8(%1),%%r9\n movq 16(%1),%%r10\n movq 24(%1),%%r11\n movq 32(%1),%%r12\n movq 40(%1),%%r13\n movq 48(%1),%%r14\n movq 56(%1),%%r15\n"
        "std\n 1: dec %0\n jnz 1b\n pushfq\n cld\n popq %%rcx\n"
        "movq %%r8,(%2)\n movq %%r9,8(%2)\n movq %%r10,16(%2)\n movq %%r11,24(%2)\n movq %%r12,32(%2)\n movq %%r13,40(%2)\n movq %%r14,48(%2)\n movq %%r15,56(%2)\n"
        "andq $0x400,%%rcx\n movq %%rcx,%0\n"
        : "+r"(n) : "S"(v), "D"(o) : "rcx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "memory", "cc");
    if (memcmp(v, o, sizeof v)) fail("a general register changed");
    if (n != 0x400) fail("the direction flag was lost");
}

static void spin(void) {
    gpr_spin(4000000);
    avx2_spin(4000000);
    if (__builtin_cpu_supports("avx512f")) avx512_spin(4000000);
    x87_spin(4000000);
}

static _Atomic int ending;
static void *thread(void *unused) {
    while (!ending) spin();
    return unused;
}

static void ring(void) {
    aio_context_t c = 0;
    OK(syscall(SYS_io_setup, 8, &c));
}

static void notification(void) {
    struct mq_attr a = {.mq_maxmsg = 4, .mq_msgsize = 64};
    struct sigevent e = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
    char name[64];
    snprintf(name, sizeof name, "/belay-regs-%d-%d", getuid(), getpid());
    mq_unlink(name);  // a job that was killed
    mqd_t q = (mqd_t)OK(mq_open(name, O_RDWR | O_CREAT | O_EXCL, 0600, &a));
    OK(mq_unlink(name));
    OK(mq_notify(q, &e));
}

int main(int argc, char **argv) {
    const char *kind = argc > 1 ? argv[1] : "";
    char label[32];
    snprintf(label, sizeof label, "compute_regs%s%s", *kind ? "-" : "", kind);
    begin(label);
    if (!strcmp(kind, "aio")) ring();
    if (!strcmp(kind, "notify")) notification();
    pthread_t t[2];
    int threads = *kind ? 2 : 0;
    for (int i = 0; i < threads; i++) CHECK(pthread_create(&t[i], NULL, thread, NULL) == 0);
    while (running()) spin();
    ending = 1;
    for (int i = 0; i < threads; i++) CHECK(pthread_join(t[i], NULL) == 0);
    return finish();
}
