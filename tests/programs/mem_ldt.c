// Segments of the program's own (modify_ldt, as Wine makes them): read through, also by a second thread, in use while
// it sleeps, and listed by the kernel.
#include "check.h"
#include <asm/ldt.h>
#define SELECTOR(entry) ((entry) << 3 | 7)
static uint32_t *page;
static _Atomic int ending;
static uint32_t through(int entry, uint32_t at) {
    uint32_t value;
    unsigned short before, selector = (unsigned short)SELECTOR(entry);
    __asm__ volatile("mov %%gs, %1; mov %2, %%gs; movl %%gs:(%3), %0; mov %1, %%gs" : "=&r"(value), "=&r"(before) : "r"(selector), "r"((uint64_t)at) : "memory");
    return value;
}
static void *work(void *arg) {
    (void)arg;
    unsigned short selector = SELECTOR(3), now;
    __asm__ volatile("mov %0, %%gs" : : "r"(selector));
    while (!ending) {
        OK(syscall(SYS_nanosleep, &(struct timespec){0, 3000000}, NULL));
        __asm__ volatile("mov %%gs, %0" : "=r"(now));
        EQ(now, selector);
        uint32_t value;
        __asm__ volatile("movl %%gs:4, %0" : "=r"(value) : : "memory");
        EQ(value, 0xbe1a);
    }
    return NULL;
}
int main(void) {
    begin("mem_ldt");
    page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
    CHECK(page != MAP_FAILED);
    page[0] = 0x1234;
    page[1] = 0xbe1a;
    struct user_desc d = {.entry_number = 3, .base_addr = (unsigned)(uintptr_t)page, .limit = 0xfff, .seg_32bit = 1, .useable = 1};
    OK(syscall(SYS_modify_ldt, 0x11, &d, sizeof d));
    d.entry_number = 700;
    d.base_addr += 4;
    d.limit = 0xfffff;
    d.limit_in_pages = 1;
    d.read_exec_only = 1;
    OK(syscall(SYS_modify_ldt, 0x11, &d, sizeof d));
    // Code of 16 bits, which is not present.
    struct user_desc code = {.entry_number = 8191, .base_addr = 0x12345678, .limit = 0x4321, .contents = MODIFY_LDT_CONTENTS_CODE, .seg_not_present = 1};
    int refused = syscall(SYS_modify_ldt, 0x11, &code, sizeof code) != 0; // by some hardened kernels
    static char was[65536], is[65536];
    long bytes = OK(syscall(SYS_modify_ldt, 0, was, sizeof was));
    EQ(bytes, refused ? 701 * 8 : 8192 * 8);
    pthread_t t;
    CHECK(pthread_create(&t, NULL, work, NULL) == 0);
    pid_t child = fork();
    if (child == 0) begin_child();
    while (running()) {
        nap_us(3000);
        EQ(through(3, 0), 0x1234);
        EQ(through(3, 4), 0xbe1a);
        EQ(through(700, 0), 0xbe1a);
        EQ(syscall(SYS_modify_ldt, 0, is, sizeof is), bytes);
        CHECK(!memcmp(was, is, sizeof was));
    }
    if (child == 0) _exit(0);
    reap(child, 0);
    ending = 1;
    pthread_join(t, NULL);
    return finish();
}
