// Named pipes: both ends, data in flight, opened read-write, the name still there. Of one that nobody has opened for writing
// no hang-up is told, of one that somebody has, one is, but not to who has opened it since.
#include "check.h"
int main(void) {
    begin("fd_fifo");
    char path[64];
    snprintf(path, sizeof path, "fifo.%d", getpid());
    OK(mkfifo(path, 0600));
    int r = (int)OK(open(path, O_RDONLY | O_NONBLOCK)), w = (int)OK(open(path, O_WRONLY)), rw = (int)OK(open(path, O_RDWR));
    char quiet[64], left[64];
    snprintf(quiet, sizeof quiet, "quiet.%d", getpid());
    snprintf(left, sizeof left, "left.%d", getpid());
    OK(mkfifo(quiet, 0600));
    OK(mkfifo(left, 0600));
    struct pollfd none = {(int)OK(open(quiet, O_RDONLY | O_NONBLOCK)), POLLIN, 0}, over = {(int)OK(open(left, O_RDONLY | O_NONBLOCK)), POLLIN, 0};
    OK(close((int)OK(open(left, O_WRONLY))));
    struct pollfd since = {(int)OK(open(left, O_RDONLY | O_NONBLOCK)), POLLIN, 0};
    char b[4000], g[4000];
    fill(b, sizeof b, 0);
    full_write(w, b, sizeof b);
    for (uint64_t i = 0; running(); i++) {
        nap_us(1500);
        full_read(i % 2 ? rw : r, g, sizeof g);
        verify(g, sizeof g, i, "bytes in a fifo");
        fill(b, sizeof b, i + 1);
        int late = (int)OK(open(path, O_WRONLY | O_NONBLOCK));
        full_write(i % 3 ? w : late, b, sizeof b);
        close(late);
        EQ(fcntl(r, F_GETFL) & O_NONBLOCK, O_NONBLOCK);
        EQ(fcntl(w, F_GETFL) & O_ACCMODE, O_WRONLY);
        EQ(poll(&none, 1, 0), 0);
        EQ(read(none.fd, g, 1), 0);
        EQ(poll(&over, 1, 0), 1);
        EQ(over.revents, POLLHUP);
        EQ(poll(&since, 1, 0), 0);
        EQ(fcntl(rw, F_GETFL) & O_ACCMODE, O_RDWR);
    }
    unlink(path);
    unlink(quiet);
    unlink(left);
    return finish();
}
