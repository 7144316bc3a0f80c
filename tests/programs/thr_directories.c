// Threads with a working directory and a file mode creation mask of their own (unshare(CLONE_FS)), beside threads that
// share those of the process.
#include "check.h"
#define THREADS 4
static char base[PATH_MAX];
static atomic_int ending;
static void check(int dir, mode_t want) {
    char name[PATH_MAX + 32], have[PATH_MAX + 32];
    snprintf(name, sizeof name, "%s/dir.%d", base, dir);
    CHECK(getcwd(have, sizeof have));
    if (strcmp(name, have)) fail("the working directory is %s, expected %s", have, name);
    mode_t m = umask(0777);
    umask(m);
    EQ(m, want);
}
static void *run(void *arg) {
    int i = (int)(intptr_t)arg;
    int own = i & 1;
    if (own) {
        char d[PATH_MAX + 32];
        snprintf(d, sizeof d, "%s/dir.%d", base, i);
        OK(unshare(CLONE_FS));
        OK(chdir(d));
        umask((mode_t)(i * 9));
    }
    while (!ending) {
        if (own) check(i, (mode_t)(i * 9));
        usleep(300);
    }
    return NULL;
}
int main(void) {
    begin("thr_directories");
    CHECK(getcwd(base, sizeof base));
    for (int i = 0; i < THREADS; i++) {
        char d[32];
        snprintf(d, sizeof d, "dir.%d", i);
        OK(mkdir(d, 0700));
    }
    OK(chdir("dir.0"));
    umask(0);
    pthread_t t[THREADS];
    for (int i = 1; i < THREADS; i++) CHECK(pthread_create(&t[i], NULL, run, (void *)(intptr_t)i) == 0);
    while (running()) {
        umask((mode_t)(check_round % 8));
        check(0, (mode_t)(check_round % 8));
        nap_us(300);
    }
    ending = 1;
    for (int i = 1; i < THREADS; i++) pthread_join(t[i], NULL);
    return finish();
}
