// A storm of fork, vfork and posix_spawn, each with exec; every exit status and output arrives. proc_forkexec MODE
#include "check.h"
#include <spawn.h>
extern char **environ;
static char self[PATH_MAX];
static pid_t start(const char *mode, char *const argv[], int out) {
    pid_t p = -1;
    if (!strcmp(mode, "spawn")) {
        posix_spawn_file_actions_t fa;
        posix_spawn_file_actions_init(&fa);
        posix_spawn_file_actions_adddup2(&fa, out, 1);
        int r = posix_spawn(&p, self, &fa, NULL, argv, environ);
        if (r) fail("posix_spawn: %s", strerror(r));
        posix_spawn_file_actions_destroy(&fa);
        return p;
    }
    p = !strcmp(mode, "vfork") ? vfork() : fork();
    if (p == 0) {
        dup2(out, 1);
        execv(self, argv);
        _exit(99);
    }
    CHECK(p > 0);
    return p;
}
int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "fork";
    if (argc > 2) {  // the child: prints its argument's mix and exits with a code made of it
        uint64_t v = strtoull(argv[2], NULL, 10);
        uint64_t out = mix(v);
        if (argc > 3) {
            struct timespec t = {0, 2000000};
            nanosleep(&t, NULL);
        }
        if (write(1, &out, 8) != 8) return 98;
        return (int)(v % 90);
    }
    char name[64];
    snprintf(name, sizeof name, "proc_forkexec-%s", mode);
    begin(name);
    CHECK(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
    int p[2];
    OK(pipe2(p, O_CLOEXEC));
    for (uint64_t v = 1; running(); v++) {
        char num[32];
        snprintf(num, sizeof num, "%llu", (unsigned long long)v);
        char *args[] = {self, (char *)mode, num, v % 4 == 0 ? "slow" : NULL, NULL};
        pid_t c = start(mode, args, p[1]);
        uint64_t got = 0;
        full_read(p[0], &got, 8);
        EQ(got, mix(v));
        reap(c, (int)(v % 90) << 8);
        no_children();
    }
    return finish();
}
