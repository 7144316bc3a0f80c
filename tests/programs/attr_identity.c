// /proc/self as the program sees it: exe, cmdline, environ, auxv, uids, groups, capabilities, a rewritten argument area.
#include "check.h"
#include <sys/auxv.h>
static size_t slurp(const char *path, char *b, size_t n) {
    int fd = (int)OK(open(path, O_RDONLY));
    size_t d = 0;
    ssize_t r;
    while ((r = read(fd, b + d, n - d)) > 0) d += (size_t)r;
    close(fd);
    return d;
}
static void status_lines(char *out, size_t n) {
    static char b[16384];
    size_t l = slurp("/proc/self/status", b, sizeof b - 1);
    b[l] = 0;
    const char *keys[] = {"Uid:", "Gid:", "Groups:", "NoNewPrivs:", "Seccomp:", "CapInh:", "CapPrm:", "CapEff:", "CapAmb:", "Threads:", "SigBlk:", "SigIgn:", "SigCgt:", "SigQ:", "CoreDumping:", "Umask:"};
    out[0] = 0;
    for (size_t k = 0; k < sizeof keys / sizeof *keys; k++) {
        char *p = strstr(b, keys[k]);
        CHECK(p);
        if (!strcmp(keys[k], "SigQ:")) continue;
        size_t len = strcspn(p, "\n");
        strncat(out, p, len < n - strlen(out) - 2 ? len : 0);
        strncat(out, "\n", 2);
    }
}
static int tracer(void) {
    static char b[16384];
    size_t l = slurp("/proc/self/status", b, sizeof b - 1);
    b[l] = 0;
    char *p = strstr(b, "TracerPid:");
    CHECK(p);
    return atoi(p + 10);
}
int main(int argc, char **argv) {
    begin("attr_identity");
    (void)argc;
    static char exe[PATH_MAX], cmd[8192], env[65536], aux[4096], st[4096], tmp[65536], now_st[4096];
    memset(argv[0], 'Z', 3);  // as setproctitle does
    ssize_t el = readlink("/proc/self/exe", exe, sizeof exe);
    CHECK(el > 0);
    size_t cl = slurp("/proc/self/cmdline", cmd, sizeof cmd), vl = slurp("/proc/self/environ", env, sizeof env), al = slurp("/proc/self/auxv", aux, sizeof aux);
    CHECK(!memcmp(cmd, "ZZZ", 3));
    status_lines(st, sizeof st);
    unsigned long rnd = getauxval(AT_RANDOM), vdso = getauxval(AT_SYSINFO_EHDR);
    unsigned char canary[16];
    memcpy(canary, (void *)rnd, 16);
    while (running()) {
        nap_us(3000);
        CHECK(readlink("/proc/self/exe", tmp, sizeof tmp) == el && !memcmp(tmp, exe, (size_t)el));
        CHECK(slurp("/proc/self/cmdline", tmp, sizeof tmp) == cl && !memcmp(tmp, cmd, cl));
        CHECK(slurp("/proc/self/environ", tmp, sizeof tmp) == vl && !memcmp(tmp, env, vl));
        CHECK(slurp("/proc/self/auxv", tmp, sizeof tmp) == al && !memcmp(tmp, aux, al));
        CHECK(!memcmp((void *)rnd, canary, 16));
        CHECK(!memcmp((void *)vdso, "\177ELF", 4));
        // A checkpoint begins a few microseconds before the process stands still, and longer where the agent loses its
        // processor just then.
        for (int looks = 0; tracer(); looks++) {
            CHECK(looks < 100);
            nap_us(1000);
        }
        status_lines(now_st, sizeof now_st);
        if (strcmp(now_st, st)) fail("status changed from\n%sto\n%s", st, now_st);
    }
    return finish();
}
