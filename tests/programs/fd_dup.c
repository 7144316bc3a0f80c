// Shared descriptions: duplicates in one process and across processes share offset and flags, separate opens do not;
// close-on-exec is per descriptor.
#include "check.h"
#include <linux/kcmp.h>
static int same(int a, int b) { return syscall(SYS_kcmp, getpid(), getpid(), KCMP_FILE, a, b) == 0; }
int main(void) {
    begin("fd_dup");
    char path[64];
    snprintf(path, sizeof path, "dup.%d", getpid());
    int a = (int)OK(open(path, O_RDWR | O_CREAT | O_TRUNC, 0600));
    OK(ftruncate(a, 100000));
    int b = (int)OK(dup(a)), c = (int)OK(fcntl(a, F_DUPFD_CLOEXEC, 200)), other = (int)OK(open(path, O_RDWR));
    OK(dup2(a, 77));
    int p[2], q[2];
    OK(pipe(p));
    OK(pipe(q));
    int inherited = (int)OK(open(path, O_RDONLY));
    pid_t k = fork();
    if (k == 0) {
        begin_child();
        OK(dup2(a, 500));
        OK(close(a));
        close(p[1]);
        char m;
        off_t v;
        while (read(p[0], &m, 1) == 1) {
            v = lseek(500, 0, SEEK_CUR);
            OK(lseek(500, v + 3, SEEK_SET));
            OK(lseek(inherited, 11, SEEK_CUR));
            full_write(q[1], (char *)&v, sizeof v);
        }
        _exit(0);
    }
    close(p[0]);
    OK(lseek(other, 5, SEEK_SET));
    off_t pos = 0, ipos = 0;
    while (running()) {
        nap_us(1500);
        off_t seen;
        EQ(lseek(b, 0, SEEK_CUR), pos);
        full_write(p[1], "x", 1);
        full_read(q[0], &seen, sizeof seen);
        EQ(seen, pos);
        pos += 3;
        ipos += 11;
        EQ(lseek(a, 0, SEEK_CUR), pos);
        EQ(lseek(77, 0, SEEK_CUR), pos);
        EQ(lseek(inherited, 0, SEEK_CUR), ipos);
        EQ(lseek(other, 0, SEEK_CUR), 5);
        EQ(fcntl(a, F_GETFD), 0);
        EQ(fcntl(c, F_GETFD), FD_CLOEXEC);
        CHECK(same(a, b) && same(a, c) && same(a, 77) && !same(a, other));
        OK(fcntl(b, F_SETFL, check_round % 2 ? O_NONBLOCK : 0));
        EQ(fcntl(c, F_GETFL) & O_NONBLOCK, check_round % 2 ? O_NONBLOCK : 0);
    }
    close(p[1]);
    reap(k, 0);
    return finish();
}
