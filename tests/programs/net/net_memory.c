// Two processes that two remote shells start on one other host share memory.
//
// net_memory start HOST NAME         starts both, through ssh: net_memory share NAME GO-FILE WHICH
#include "../check.h"
#include <sys/mman.h>

// Counts in its own place until the go file is there; the other one's count must go on.
static int share(char **arg) {
    int which = atoi(arg[2]), fd = (int)OK(shm_open(arg[0], O_RDWR | O_CREAT, 0600));
    OK(ftruncate(fd, 4096));
    _Atomic uint64_t *count = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(count != MAP_FAILED);
    close(fd);
    printf("%d shares\n", which);
    fflush(stdout);
    while (access(arg[1], F_OK)) {
        uint64_t seen = count[!which];
        count[which]++;
        for (int n = 0; count[!which] == seen && access(arg[1], F_OK); n++) {
            if (n > 20000) fail("the other process shares this memory no longer");
            count[which]++;
            nap_us(2000);
        }
    }
    return 0;
}
int main(int argc, char **argv) {
    begin("net_memory");
    if (argc > 4 && !strcmp(argv[1], "share")) return share(argv + 2);
    CHECK(argc == 4 && !strcmp(argv[1], "start"));
    char line[3 * PATH_MAX], path[PATH_MAX];
    ssize_t n = OK(readlink("/proc/self/exe", path, sizeof path - 1));
    path[n] = 0;
    pid_t shell[2];
    for (int i = 0; i < 2; i++) {
        snprintf(line, sizeof line, "%s share %s %s %d", path, argv[3], getenv("BELAY_TEST_GO"), i);
        shell[i] = (pid_t)OK(fork());
        if (!shell[i]) {
            execlp("ssh", "ssh", argv[2], line, NULL);
            fail("ssh: %s", strerror(errno));
        }
    }
    while (running()) nap_us(2000);
    for (int i = 0; i < 2; i++) {
        int st;
        EQ(waitpid(shell[i], &st, 0), shell[i]);
        EQ(st, 0);
    }
    return finish();
}
