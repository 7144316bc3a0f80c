// Marks that the kernel keeps for a mapping or for all of them: memory that may be dropped (MAP_DROPPABLE) and is empty
// in children, sealed mappings (mseal), advice about the order of access, and the promise to make nothing executable
// that is or was writable (PR_SET_MDWE). usage: mem_marked droppable|sealed|random|mdwe|mdwe-own
#include "check.h"
#define P 4096
#ifndef PR_SET_MDWE
#define PR_SET_MDWE 65
#define PR_GET_MDWE 66
#endif
static void *mapped;
static char *flags_of(void *p) {
    static char out[512];
    FILE *s = fopen("/proc/self/smaps", "r");
    CHECK(s);
    char l[1024];
    int in = 0;
    out[0] = 0;
    while (fgets(l, sizeof l, s)) {
        unsigned long a, b;
        if (sscanf(l, "%lx-%lx ", &a, &b) == 2 && strchr(l, '-') - l < 17) in = a <= (unsigned long)p && (unsigned long)p < b;
        if (in && !strncmp(l, "VmFlags:", 8)) strcpy(out, l + 8);
    }
    fclose(s);
    return out;
}
static int has(void *p, const char *flag) {
    char word[8];
    snprintf(word, sizeof word, " %s ", flag);
    // A restart between two reads of the file shifts its text.
    for (int i = 0; i < 3; i++)
        if (strstr(flags_of(p), word)) return 1;
    return 0;
}
static void droppable(void) {
    char *m = mmap(NULL, 16 * P, PROT_READ | PROT_WRITE, 8 | MAP_ANONYMOUS, -1, 0);
    CHECK(m != MAP_FAILED);
    fill(m, 8 * P, 1);
    while (running()) {
        nap_us(2000);
        verify(m, 8 * P, 1, "droppable memory");
        CHECK(has(m, "dp") && has(m, "wf") && has(m, "dd"));
    }
    pid_t c = fork();
    if (c == 0) _exit(m[0] == 0 && m[8 * P - 1] == 0 ? 0 : 1);
    reap(c, 0);
    EQ(mlock(m, P), 0); // does nothing
    CHECK(!has(m, "lo"));
}
static void refused(long r) {
    int e = errno;
    if (r != -1 || e != EPERM) fail("a sealed mapping was changed: %ld, %s", r, strerror(e));
}
static void sealed(void) {
    int prot[] = {PROT_READ | PROT_WRITE, PROT_READ, PROT_NONE, PROT_READ | PROT_WRITE};
    char *m[4];
    int fd = (int)OK(memfd_create("sealed", 0));
    OK(ftruncate(fd, 4 * P));
    for (int i = 0; i < 4; i++) {
        m[i] = mmap(NULL, 4 * P, PROT_READ | PROT_WRITE, i == 3 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, i == 3 ? fd : -1, 0);
        CHECK(m[i] != MAP_FAILED);
        fill(m[i], 4 * P, (uint64_t)i);
        OK(mprotect(m[i], 4 * P, prot[i]));
        OK(syscall(462, m[i], 4 * P, 0));
    }
    int mem = (int)OK(open("/proc/self/mem", O_RDONLY | O_CLOEXEC));
    while (running()) {
        nap_us(2000);
        for (int i = 0; i < 4; i++) {
            char now[4 * P];
            if (prot[i] & PROT_READ) verify(m[i], 4 * P, (uint64_t)i, "sealed memory");
            refused(mprotect(m[i], P, PROT_READ | PROT_EXEC));
            refused(munmap(m[i], P));
            refused((long)mmap(m[i], P, PROT_READ, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
            CHECK(has(m[i], "sl"));
            if (prot[i] & PROT_READ || !told_to_end()) continue;
            close(mem);
            mem = (int)OK(open("/proc/self/mem", O_RDONLY | O_CLOEXEC));
            EQ(pread(mem, now, sizeof now, (off_t)(uintptr_t)m[i]), sizeof now);
            verify(now, sizeof now, (uint64_t)i, "sealed memory that cannot be read");
        }
    }
}
static void orders(void) {
    char *m[3];
    int self = (int)OK(open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
    m[0] = mmap(NULL, 2 * P, PROT_READ, MAP_PRIVATE, self, 0);
    m[1] = mmap(NULL, 2 * P, PROT_READ, MAP_PRIVATE, self, 0);
    m[2] = mmap(NULL, 64 * P, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    OK(madvise(m[0], 2 * P, MADV_RANDOM));
    OK(madvise(m[1], 2 * P, MADV_SEQUENTIAL));
    OK(madvise(m[2] + P, P, MADV_RANDOM));
    while (running()) {
        nap_us(2000);
        CHECK(has(m[0], "rr") && !has(m[0], "sr"));
        CHECK(has(m[1], "sr") && !has(m[1], "rr"));
        CHECK(has(m[2] + P, "rr") && !has(m[2], "rr"));
    }
}
static void no_new_code(unsigned long bits) {
    OK(prctl(PR_SET_MDWE, bits, 0L, 0L, 0L));
    while (running()) {
        nap_us(2000);
        EQ(prctl(PR_GET_MDWE, 0L, 0L, 0L, 0L), bits);
        mapped = mmap(NULL, P, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(mapped == MAP_FAILED && errno == EACCES);
        pid_t c = fork();
        if (c == 0) {
            long want = bits & 2 ? 0 : (long)bits;
            _exit(prctl(PR_GET_MDWE, 0L, 0L, 0L, 0L) == want ? 0 : 1);
        }
        reap(c, 0);
    }
}
int main(int argc, char **argv) {
    begin("mem_marked");
    const char *what = argc > 1 ? argv[1] : "";
    if (!strcmp(what, "droppable")) droppable();
    else if (!strcmp(what, "sealed")) sealed();
    else if (!strcmp(what, "random")) orders();
    else if (!strcmp(what, "mdwe")) no_new_code(1);
    else if (!strcmp(what, "mdwe-own")) no_new_code(3);
    else fail("what?");
    return finish();
}
