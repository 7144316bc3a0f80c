// Restartable sequences: a thread that is stopped in the middle of one begins it anew, since others may have run on its
// processor meanwhile. Threads that share a processor count in a word of that processor, each in a sequence that is
// long enough to be stopped in; a sequence that were carried on after a stop would undo what others have counted.
#include "check.h"
#include <sys/rseq.h>
#define THREADS 8
static _Alignas(64) volatile long counters[1024];
static long done[THREADS];
static _Atomic int ending;
// Adds one to the word of the processor that the thread runs on; false when the sequence was begun but not carried out.
static int count(struct rseq *r) {
#ifdef __x86_64__
    asm goto(
        ".pushsection __rseq_cs, \"aw\"\n .balign 32\n 3: .long 0, 0\n .quad 1f, 2f - 1f, 4f\n .popsection\n"
        "leaq 3b(%%rip), %%rax\n movq %%rax, 8(%[r])\n"
        "1: movl 4(%[r]), %%eax\n"
        "movq (%[base], %%rax, 8), %%rcx\n"
        "movl $20000, %%edx\n 5: decl %%edx\n jnz 5b\n"
        "incq %%rcx\n"
        "movq %%rcx, (%[base], %%rax, 8)\n"
        "2: .pushsection __rseq_failure, \"ax\"\n .byte 0x0f, 0xb9, 0x3d\n .long 0x53053053\n 4: jmp %l[aborted]\n .popsection\n"
        : : [r] "r"(r), [base] "r"(counters) : "rax", "rcx", "rdx", "cc", "memory" : aborted);
    return 1;
aborted:
    return 0;
#else
#error "x86-64 only"
#endif
}
static void *work(void *at) {
    struct rseq *r = (struct rseq *)((char *)__builtin_thread_pointer() + __rseq_offset);
    while (!ending) done[(long)at] += count(r);
    return NULL;
}
int main(void) {
    begin("thr_rseq_sections");
    CHECK(__rseq_size != 0);
    pthread_t t[THREADS];
    for (long i = 0; i < THREADS; i++) CHECK(pthread_create(&t[i], NULL, work, (void *)i) == 0);
    while (running()) nap_us(2000);
    ending = 1;
    for (int i = 0; i < THREADS; i++) pthread_join(t[i], NULL);
    long counted = 0, wanted = 0;
    for (int i = 0; i < 1024; i++) counted += counters[i];
    for (int i = 0; i < THREADS; i++) wanted += done[i];
    EQ(counted, wanted);
    return finish();
}
