// What can be set of a mapping: how it is made (mmap), advice, locks, names. Each mapping of a table stands alone, and
// what the kernel says about it (access, a name of its own, VmFlags) is compared as long as the program runs, but for
// marks of written pages. What this kernel or this user may not have is left out and named.
#include "check.h"
#include <sys/resource.h>
#include <sys/shm.h>
enum { P = 4096, LEN = 8 * P, MOST = 64, TEXT = 512 };
static struct { const char *name; char *at; char want[TEXT]; } all[MOST];
static int n;

// The line of maps without offset, device and inode, and VmFlags.
static void describe(void) {
    static char now[MOST][TEXT];
    FILE *f = fopen("/proc/self/smaps", "re");
    CHECK(f);
    char l[1024];
    int at = -1;
    for (int i = 0; i < n; i++) now[i][0] = 0;
    while (fgets(l, sizeof l, f)) {
        unsigned long a, b;
        char access[8], name[512] = "";
        if (sscanf(l, "%lx-%lx %7s %*s %*s %*s %511[^\n]", &a, &b, access, name) >= 3 && strchr(l, '-') - l < 17) {
            at = -1;
            for (int i = 0; i < n; i++)
                if (a <= (unsigned long)all[i].at && (unsigned long)all[i].at < b) at = i;
            // Files that are made again have names of their own.
            if (at >= 0) snprintf(now[at], TEXT, "%ld %s %.300s", (long)(b - a), access, name[0] == '[' ? name : "");
        } else if (at >= 0 && !strncmp(l, "VmFlags:", 8)) {
            size_t end = strlen(now[at]);
            snprintf(now[at] + end, TEXT - end, "%.*s", (int)strcspn(l, "\n"), l);
            char *mark = strstr(now[at], " sd");
            if (mark) memmove(mark, mark + 3, strlen(mark + 3) + 1);
        }
    }
    fclose(f);
    static int wrong;
    char what[1800] = "";
    for (int i = 0; i < n; i++) {
        if (!all[i].want[0]) strcpy(all[i].want, now[i]);
        size_t end = strlen(what);
        if (strcmp(all[i].want, now[i])) snprintf(what + end, sizeof what - end, "%s is\n%.511s\nwas\n%.511s\n", all[i].name, now[i], all[i].want);
    }
    // A restart between two reads of the file shifts its text.
    wrong = what[0] ? wrong + 1 : 0;
    if (wrong > 2) fail("%s", what);
}
static void add(const char *name, void *at) {
    CHECK(n < MOST);
    all[n].name = name;
    all[n++].at = at;
}
// A mapping of 8 pages with pages without access around it.
static char *apart(int prot, int flags, int fd) {
    char *room = mmap(NULL, LEN + 2 * P, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(room != MAP_FAILED);
    char *m = mmap(room + P, LEN, prot, flags | MAP_FIXED, fd, 0);
    if (m == MAP_FAILED) munmap(room, LEN + 2 * P);
    return m;
}
static void made(const char *name, int prot, int flags, int fd, int needed) {
    char *m = apart(prot, flags, fd);
    if (m == MAP_FAILED) {
        if (needed) fail("%s: %s", name, strerror(errno));
        printf("not here: %s\n", name);
        return;
    }
    if (prot & PROT_WRITE) fill(m, LEN, 1);
    add(name, m);
}
static void advised(const char *name, int advice, int flags, int fd, int needed) {
    char *m = apart(PROT_READ | PROT_WRITE, flags, fd);
    CHECK(m != MAP_FAILED);
    fill(m, LEN, 1);
    if (madvise(m, LEN, advice)) {
        if (needed) fail("%s: %s", name, strerror(errno));
        printf("not here: %s\n", name);
        return;
    }
    add(name, m);
}

int main(void) {
    begin("mem_settings");
    enum { OWN = MAP_PRIVATE | MAP_ANONYMOUS, COMMON = MAP_SHARED | MAP_ANONYMOUS, RW = PROT_READ | PROT_WRITE };
    int memory = (int)OK(memfd_create("a file", MFD_ALLOW_SEALING)), self = (int)OK(open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
    OK(ftruncate(memory, LEN));
    char path[64];
    snprintf(path, sizeof path, "settings.%d", getpid());
    int file = (int)OK(open(path, O_CREAT | O_RDWR, 0600));
    OK(ftruncate(file, LEN));
    made("PROT_NONE", PROT_NONE, OWN, -1, 1);
    made("PROT_READ", PROT_READ, OWN, -1, 1);
    made("PROT_WRITE", PROT_WRITE, OWN, -1, 1);
    made("PROT_EXEC", PROT_EXEC, OWN, -1, 1);
    made("PROT_READ|PROT_EXEC", PROT_READ | PROT_EXEC, OWN, -1, 1);
    made("all access", RW | PROT_EXEC, OWN, -1, 1);
    made("PROT_SEM", RW | 8, OWN, -1, 1);
    made("MAP_SHARED", RW, COMMON, -1, 1);
    made("MAP_SHARED, read", PROT_READ, COMMON, -1, 1);
    made("MAP_SHARED_VALIDATE", RW, MAP_SHARED_VALIDATE, file, 1);
    made("MAP_SHARED of a memfd", RW, MAP_SHARED, memory, 1);
    made("MAP_PRIVATE of a memfd", RW, MAP_PRIVATE, memory, 1);
    made("MAP_PRIVATE of a file", RW, MAP_PRIVATE, file, 1);
    made("MAP_PRIVATE of a program", PROT_READ | PROT_EXEC, MAP_PRIVATE, self, 1);
    made("MAP_SHARED of a program", PROT_READ, MAP_SHARED, self, 1);
    made("MAP_NORESERVE", RW, OWN | MAP_NORESERVE, -1, 1);
    made("MAP_NORESERVE|MAP_SHARED", RW, COMMON | MAP_NORESERVE, -1, 1);
    made("MAP_GROWSDOWN", RW, OWN | MAP_GROWSDOWN, -1, 1);
    made("MAP_STACK", RW, OWN | MAP_STACK, -1, 1);
    made("MAP_LOCKED", RW, OWN | MAP_LOCKED, -1, 1);
    made("MAP_POPULATE", RW, OWN | MAP_POPULATE, -1, 1);
    made("MAP_32BIT", RW, OWN | MAP_32BIT, -1, 1);
    made("MAP_DROPPABLE", RW, MAP_ANONYMOUS | 8, -1, 0);
    static const struct { const char *name; int advice, needed; } how[] = {
        {"MADV_RANDOM", MADV_RANDOM, 1}, {"MADV_SEQUENTIAL", MADV_SEQUENTIAL, 1}, {"MADV_DONTFORK", MADV_DONTFORK, 1}, {"MADV_MERGEABLE", MADV_MERGEABLE, 0}, {"MADV_HUGEPAGE", MADV_HUGEPAGE, 0},
        {"MADV_NOHUGEPAGE", MADV_NOHUGEPAGE, 0}, {"MADV_DONTDUMP", MADV_DONTDUMP, 1}, {"MADV_WILLNEED", MADV_WILLNEED, 1}, {"MADV_COLD", MADV_COLD, 0}, {"MADV_PAGEOUT", MADV_PAGEOUT, 0},
    };
    for (size_t i = 0; i < sizeof how / sizeof *how; i++) {
        advised(how[i].name, how[i].advice, OWN, -1, how[i].needed);
        advised(how[i].name, how[i].advice, MAP_PRIVATE, file, how[i].needed);
        advised(how[i].name, how[i].advice, MAP_SHARED, memory, how[i].needed);
    }
    advised("MADV_WIPEONFORK", MADV_WIPEONFORK, OWN, -1, 1);
    char *m = apart(RW, OWN, -1);
    OK(madvise(m, LEN, MADV_DONTFORK));
    OK(madvise(m, LEN, MADV_DOFORK));
    OK(madvise(m, LEN, MADV_DONTDUMP));
    OK(madvise(m, LEN, MADV_DODUMP));
    add("MADV_DOFORK, MADV_DODUMP", m);
    m = apart(RW, OWN, -1);
    OK(syscall(SYS_mlock2, m, LEN, 1));
    add("MLOCK_ONFAULT", m);
    for (int shared = 0; shared < 2; shared++) {
        m = apart(RW, shared ? COMMON : OWN, -1);
        fill(m, LEN, 1);
        if (prctl(0x53564d41 /* PR_SET_VMA */, 0, m, LEN, shared ? "a shared (name)" : "a name")) printf("not here: PR_SET_VMA_ANON_NAME\n");
        else add("PR_SET_VMA_ANON_NAME", m);
    }
    int id = (int)OK(shmget(IPC_PRIVATE, LEN, IPC_CREAT | 0720));
    m = shmat(id, NULL, SHM_RDONLY);
    CHECK(m != (void *)-1);
    add("SHM_RDONLY", m);
    m = shmat(id, NULL, SHM_EXEC);
    CHECK(m != (void *)-1);
    add("SHM_EXEC", m);
    struct shmid_ds ds, now;
    OK(shmctl(id, IPC_STAT, &ds));
    ds.shm_perm.mode = 0704;
    OK(shmctl(id, IPC_SET, &ds));
    OK(shmctl(id, SHM_LOCK, NULL));
    OK(shmctl(id, IPC_STAT, &ds));
    // What reads them first makes the kernel's own marks.
    for (int i = 0; i < n; i++) all[i].want[0] = 0;
    describe();
    while (running()) {
        nap_us(3000);
        describe();
        OK(shmctl(id, IPC_STAT, &now));
        if (now.shm_perm.mode != ds.shm_perm.mode) fail("the segment has mode %o, had %o", now.shm_perm.mode, ds.shm_perm.mode);
    }
    shmctl(id, IPC_RMID, NULL);
    unlink(path);
    return finish();
}
