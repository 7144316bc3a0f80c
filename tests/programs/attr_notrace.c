// A checkpoint leaves nothing behind: same descriptors, threads, address ranges, children, no signal delivered, no
// environment added.
#include "check.h"
#include <dirent.h>
struct range { uint64_t a, b; char perm[5]; };
static struct range base[512], cur[512];
static char raw[262144];
// Adjacent ranges of one permission are merged, because the kernel may split or merge them. The heap and the stack may
// grow. The file is read in pieces: over a restart in between, these do not fit together, because names and inode
// numbers of other lengths shift what follows. Then a line cannot be read, and -1 is returned.
static int ranges(struct range *r) {
    int fd = (int)OK(open("/proc/self/maps", O_RDONLY)), n = 0;
    size_t d = 0;
    ssize_t g;
    while ((g = read(fd, raw + d, sizeof raw - 1 - d)) > 0) d += (size_t)g;
    close(fd);
    raw[d] = 0;
    for (char *l = strtok(raw, "\n"); l; l = strtok(NULL, "\n")) {
        unsigned long a, b;
        char p[8];
        if (sscanf(l, "%lx-%lx %7s", &a, &b, p) != 3) return -1;
        if (strstr(l, "[stack]") || strstr(l, "[heap]") || strstr(l, "[vsyscall]")) continue;
        if (n && r[n - 1].b == a && !strcmp(r[n - 1].perm, p)) { r[n - 1].b = b; continue; }
        CHECK(n < 512);
        r[n].a = a;
        r[n].b = b;
        snprintf(r[n].perm, 5, "%.4s", p);
        n++;
    }
    return n;
}
static int same(const struct range *a, int n, const struct range *b, int m) { return n == m && !memcmp(a, b, sizeof *a * (size_t)n); }
static int entries(const char *dir, uint64_t *sum) {
    DIR *d = opendir(dir);
    CHECK(d);
    int n = 0;
    *sum = 0;
    struct dirent *e;
    while ((e = readdir(d))) {
        n++;
        if (e->d_name[0] != '.') *sum += mix((uint64_t)atoi(e->d_name));
    }
    closedir(d);
    return n;
}
static _Atomic int signals;
static void on(int s) { signals = s; }
int main(void) {
    begin("attr_notrace");
    for (int s = 1; s < 65; s++) if (s != SIGKILL && s != SIGSTOP && s != SIGSEGV && s != SIGTERM) signal(s, on);
    uint64_t fs, ts, s2;
    entries("/proc/self/fd", &fs);
    int nf = entries("/proc/self/fd", &fs), nt = entries("/proc/self/task", &ts);
    running();
    int nr = ranges(base);
    while (nr < 0) nr = ranges(base);
    extern char **environ;
    int ne = 0;
    while (environ[ne]) ne++;
    void *brk0 = sbrk(0);
    while (running()) {
        nap_us(2000);
        int n = ranges(cur);
        if (!same(cur, n, base, nr)) n = ranges(cur);
        CHECK(n >= 0);
        for (int i = 0; i < n || i < nr; i++)
            if (i >= n || i >= nr || memcmp(&base[i], &cur[i], sizeof base[i]))
                fail("address ranges differ at entry %d: now %lx-%lx %s, was %lx-%lx %s", i, (long)cur[i].a, (long)cur[i].b, cur[i].perm, (long)base[i].a, (long)base[i].b, base[i].perm);
        EQ(entries("/proc/self/fd", &s2), nf);
        EQ(s2, fs);
        EQ(entries("/proc/self/task", &s2), nt);
        EQ(s2, ts);
        no_children();
        EQ(signals, 0);
        EQ(sbrk(0), brk0);
        int k = 0;
        while (environ[k]) {
            if (!strncmp(environ[k], "LD_PRELOAD=", 11) && strstr(environ[k], "belay")) fail("LD_PRELOAD is set: %s", environ[k]);
            k++;
        }
        EQ(k, ne);
    }
    return finish();
}
