// Mappings of a file that has been deleted: shared between two processes, and a private one.
#include "check.h"
#define LEN (16 * 4096)
int main(void) {
    begin("mem_filegone");
    char path[64];
    snprintf(path, sizeof path, "gone.%d", getpid());
    int fd = (int)OK(open(path, O_RDWR | O_CREAT | O_EXCL, 0600));
    OK(ftruncate(fd, LEN + 100));
    char *sh = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), *pr = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    CHECK(sh != MAP_FAILED && pr != MAP_FAILED);
    OK(unlink(path));
    close(fd);
    _Atomic uint64_t *turn = (_Atomic uint64_t *)(sh + LEN - 64);
    fill(pr, 4096, 3);
    fill(sh, LEN - 64, 0);
    pid_t c = fork();
    if (c == 0) {
        begin_child();
        for (;;) {
            uint64_t t = *turn;
            if (t == UINT64_MAX) _exit(0);
            if (t % 2) {
                verify(sh, LEN - 64, t, "a deleted file's mapping");
                fill(sh, LEN - 64, t + 1);
                *turn = t + 1;
            } else nap_us(200);
        }
    }
    while (running()) {
        int64_t t0 = now_ns();
        while (*turn % 2) {
            if (now_ns() - t0 > 10000000000LL) fail("the other process does not see the memory any more");
            nap_us(200);
        }
        uint64_t t = *turn;
        verify(sh, LEN - 64, t, "a deleted file's mapping");
        verify(pr, 4096, 3, "a private page of a deleted file");
        fill(sh, LEN - 64, t + 1);
        *turn = t + 1;
        nap_us(500);
    }
    while (*turn % 2) nap_us(200);
    *turn = UINT64_MAX;
    reap(c, 0);
    return finish();
}
