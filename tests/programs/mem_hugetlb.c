// Explicit huge pages (MAP_HUGETLB): private ones with a gap of untouched and one of forbidden pages, shared ones with
// a child, a memory file that is mapped but no longer open. They must still be huge pages after a restart. Without a
// single huge page on the machine there is nothing to check.
#include "check.h"
#include <linux/mman.h>
#include <linux/memfd.h>
#define HUGE (2UL << 20)
static unsigned long kernel_page(void *p, const char *flag) {
    FILE *s = fopen("/proc/self/smaps", "r");
    CHECK(s);
    char l[1024];
    int in = 0, flagged = 0;
    unsigned long a, b, kb = 0, v;
    while (fgets(l, sizeof l, s)) {
        if (sscanf(l, "%lx-%lx ", &a, &b) == 2 && strchr(l, '-') - l < 17) in = a <= (unsigned long)p && (unsigned long)p < b;
        if (in && sscanf(l, "KernelPageSize: %lu kB", &v) == 1) kb = v;
        if (in && !strncmp(l, "VmFlags:", 8) && strstr(l, flag)) flagged = 1;
    }
    fclose(s);
    return flagged ? kb : 0;
}
static char *huge(size_t pages, int flags, int fd) {
    char *p = mmap(NULL, pages * HUGE, PROT_READ | PROT_WRITE, flags | (fd < 0 ? MAP_ANONYMOUS | MAP_HUGETLB | MAP_HUGE_2MB : 0), fd, 0);
    return p == MAP_FAILED ? NULL : p;
}
int main(void) {
    begin("mem_hugetlb");
    int fd = memfd_create("hugefile", MFD_HUGETLB | MFD_HUGE_2MB);
    if (fd >= 0) OK(ftruncate(fd, HUGE));
    char *own = huge(5, MAP_PRIVATE, -1), *kept = huge(1, MAP_PRIVATE, -1), *shared = huge(1, MAP_SHARED, -1), *file = fd < 0 ? NULL : huge(1, MAP_SHARED, fd);
    if (!own || !kept || !shared || !file) {
        printf("no huge pages here (%s)\n", strerror(errno));
        while (running()) nap_us(2000);
        return finish();
    }
    close(fd);
    OK(madvise(kept, HUGE, MADV_DONTFORK));
    uint64_t seed[5] = {1, 2, 3, 4, 5};
    for (int i = 0; i < 5; i++)
        if (i != 2) fill(own + (size_t)i * HUGE, HUGE, seed[i]);
    OK(mprotect(own + 3 * HUGE, HUGE, PROT_NONE));
    fill(kept, HUGE, 77);
    _Atomic uint64_t *turn = (_Atomic uint64_t *)shared;
    *turn = 0;
    pid_t c = fork();
    if (c == 0) {
        begin_child();
        for (;;) {  // odd turns are the child's; its own copy of the private pages is written, too
            uint64_t t = *turn;
            if (t % 2 == 0) {
                nap_us(500);
                continue;
            }
            verify(shared + 4096, 65536, t, "shared huge pages");
            verify(file + 4096, 65536, t, "a memory file in huge pages");
            fill(own + HUGE, 8192, t);
            verify(own + HUGE, 8192, t, "the child's private huge pages");
            fill(shared + 4096, 65536, t + 1);
            *turn = t + 1;
        }
    }
    while (running()) {
        int i = (int)(check_round % 2);
        verify(own + (size_t)i * HUGE, HUGE, seed[i], "private huge pages");
        fill(own + (size_t)i * HUGE, HUGE, seed[i] = check_round * 10);
        for (size_t k = 0; k < HUGE; k += 4096) EQ(own[2 * HUGE + k], 0);
        verify(own + 4 * HUGE, HUGE, 5, "private huge pages");
        verify(kept, HUGE, 77, "huge pages that children do not get");
        OK(mprotect(own + 3 * HUGE, HUGE, PROT_READ));
        verify(own + 3 * HUGE, HUGE, 4, "forbidden huge pages");
        OK(mprotect(own + 3 * HUGE, HUGE, PROT_NONE));
        uint64_t t = *turn;
        if (t % 2 == 0) {
            if (t) verify(shared + 4096, 65536, t, "shared huge pages");
            fill(shared + 4096, 65536, t + 1);
            fill(file + 4096, 65536, t + 1);
            *turn = t + 1;
        }
        // A restart between two reads of the file shifts its text.
        if (kernel_page(own, " ht") != 2048 && kernel_page(own, " ht") != 2048) fail("private memory is not in huge pages any more");
        if (kernel_page(kept, " dc") != 2048 && kernel_page(kept, " dc") != 2048) fail("memory has lost its MADV_DONTFORK");
        if (kernel_page(own, " dc") && kernel_page(own, " dc")) fail("memory got a MADV_DONTFORK");
        if (kernel_page(shared, " ht") != 2048 && kernel_page(shared, " ht") != 2048) fail("shared memory is not in huge pages any more");
        if (kernel_page(file, " ht") != 2048 && kernel_page(file, " ht") != 2048) fail("the memory file is not in huge pages any more");
        nap_us(1000);
    }
    kill(c, SIGKILL);
    reap(c, SIGKILL);
    return finish();
}
