// Memory protection keys (pkeys(7)): which are allocated, which memory has them, what each thread may do, also after
// a key has been freed, beside memory that may only be executed, and in a child.
#define _GNU_SOURCE
#include "check.h"
#include <setjmp.h>

enum { PAGE = 4096, FREE = -1, KEYS = 16 };
static __thread sigjmp_buf back;
static __thread siginfo_t told;
static char *memory[KEYS];
static int key[4];
static atomic_int over;

static void denied(int signo, siginfo_t *info, void *context) {
    (void)signo, (void)context;
    told = *info;
    siglongjmp(back, 1);
}

// Whether the thread may write to `at`; where not, whose key said so.
static int denied_by(volatile char *at, char value) {
    int rights[KEYS];
    for (int k = 0; k < KEYS; k++) rights[k] = pkey_get(k);
    if (sigsetjmp(back, 1)) {
        // A handler begins with the rights of a new program.
        for (int k = 0; k < KEYS; k++) pkey_set(k, (unsigned)rights[k]);
        EQ(told.si_code, SEGV_PKUERR);
        return (int)told.si_pkey;
    }
    *at = value;
    return 0;
}

// The same of reading.
static int denied_by_key(volatile char *at) {
    int rights[KEYS];
    for (int k = 0; k < KEYS; k++) rights[k] = pkey_get(k);
    if (sigsetjmp(back, 1)) {
        for (int k = 0; k < KEYS; k++) pkey_set(k, (unsigned)rights[k]);
        return told.si_code == SEGV_PKUERR ? (int)told.si_pkey : -1;
    }
    char read = *at;
    (void)read;
    return 0;
}

// Whether a key is allocated: asked of memory where there is none.
static int is_allocated(int k) {
    int failed = pkey_mprotect((void *)0xffffffffffff0000, PAGE, 0, k);
    CHECK(failed == -1 && (errno == ENOMEM || errno == EINVAL));
    return errno == ENOMEM;
}

static int key_in_smaps(void *at) {
    char line[512];
    unsigned long from, to, k = 99;
    FILE *f = fopen("/proc/self/smaps", "r");
    CHECK(f);
    for (int here = 0; fgets(line, sizeof line, f);) {
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2) here = from <= (unsigned long)at && (unsigned long)at < to;
        if (here && sscanf(line, "ProtectionKey: %lu", &k) == 1) break;
    }
    fclose(f);
    return (int)k;
}

static void look(int first, int second) {
    EQ(pkey_get(key[0]), first);
    EQ(pkey_get(key[2]), second);
    EQ(denied_by(memory[0], 'x'), first & PKEY_DISABLE_WRITE ? key[0] : 0);
    EQ(denied_by(memory[2], 'y'), second & PKEY_DISABLE_WRITE ? key[2] : 0);
}

static void *other(void *unused) {
    pkey_set(key[0], PKEY_DISABLE_WRITE);
    pkey_set(key[2], 0);
    while (!over) {
        look(PKEY_DISABLE_WRITE, 0);
        nap_us(900);
    }
    return unused;
}

static void *mapped(int prot) {
    void *at = mmap(NULL, 2 * PAGE, prot, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    return (char *)at + PAGE;
}

static int execute_only(char **executed) {
    *executed = mapped(PROT_READ | PROT_WRITE);
    memset(*executed, 0xc3, PAGE);
    OK(mprotect(*executed, PAGE, PROT_EXEC));
    return key_in_smaps(*executed);
}

int main(int argc, char **argv) {
    begin("mem_keys");
    int later = argc > 1 && !strcmp(argv[1], "later"), kernels = 0;
    char *executed;
    if (!later) kernels = execute_only(&executed);
    struct sigaction act = {.sa_sigaction = denied, .sa_flags = SA_SIGINFO};
    OK(sigaction(SIGSEGV, &act, NULL));
    for (int i = 0; i < 4; i++) key[i] = (int)OK(pkey_alloc(0, 0));
    for (int i = 0; i < 4; i++) {
        memory[i] = mapped(PROT_READ | PROT_WRITE);
        memset(memory[i], 'a' + i, PAGE);
    }
    if (later) kernels = execute_only(&executed);
    CHECK(kernels > 0 && !is_allocated(kernels));
    OK(pkey_mprotect(memory[0], PAGE, PROT_READ | PROT_WRITE, key[0]));
    OK(pkey_mprotect(memory[1], PAGE, PROT_READ | PROT_WRITE, key[1]));
    OK(pkey_mprotect(memory[2], PAGE, PROT_READ | PROT_WRITE, key[2]));
    OK(madvise(memory[2], PAGE, MADV_DONTFORK));
    char *only = mapped(PROT_NONE);
    OK(pkey_mprotect(only, PAGE, PROT_EXEC, key[3]));
    OK(pkey_free(key[1]));  // its memory has it still
    pkey_set(key[1], 0);
    pthread_t thread;
    OK(pthread_create(&thread, NULL, other, NULL));
    pkey_set(key[2], PKEY_DISABLE_ACCESS | PKEY_DISABLE_WRITE);
    uint64_t round = 0;
    do {
        look(0, PKEY_DISABLE_ACCESS | PKEY_DISABLE_WRITE);
        for (int i = 0; i < 3; i++) EQ(key_in_smaps(memory[i]), key[i]);
        EQ(key_in_smaps(only), key[3]);
        EQ(key_in_smaps(executed), kernels);
        EQ(denied_by_key(executed), kernels);
        for (int k = 1; k < KEYS; k++) EQ(is_allocated(k), k == key[0] || k == key[2] || k == key[3]);
        EQ(memory[1][PAGE - 1], 'b');
        EQ(memory[0][PAGE - 1], 'a');
        ((void (*)(void))executed)();
        if (++round % 8 == 0) {  // what is free is given again, and a child has all of it
            EQ(pkey_alloc(0, 0), key[1]);
            OK(pkey_free(key[1]));
            pid_t child = (pid_t)OK(fork());
            if (child == 0) {
                CHECK(is_allocated(key[0]) && !is_allocated(key[1]));
                EQ(key_in_smaps(memory[0]), key[0]);
                _exit(0);
            }
            reap(child, 0);
        }
        nap_us(1000);
    } while (running());
    over = 1;
    OK(pthread_join(thread, NULL));
    return finish();
}
