// Pipes: bytes in flight, full pipe, sizes, packet mode (also what a writer has left that is gone, or writes no packets
// any more), non-blocking, a blocked writer, end of file after the writer closed.
#include "check.h"
int main(void) {
    begin("fd_pipe");
    int held[2], pkt[2], big[2], eof[2], flow[2], full[2];
    OK(pipe(held));
    OK(pipe2(pkt, O_DIRECT | O_NONBLOCK));
    OK(pipe(big));
    OK(pipe(eof));
    OK(pipe(flow));
    OK(pipe2(full, O_NONBLOCK));
    EQ(fcntl(big[0], F_SETPIPE_SZ, 262144), 262144);
    static uint64_t buf[32768], in[32768];
    fill(buf, 30000, 1);
    full_write(held[1], buf, 30000);
    full_write(eof[1], "tail", 4);
    close(eof[1]);
    static char junk[65536];
    ssize_t capacity = 0, w;
    while ((w = write(full[1], junk, 4096)) > 0) capacity += w;
    EQ(errno, EAGAIN);
    // Packets whose writer is gone, and packets before bytes that are none.
    int left[2], mixed[2];
    OK(pipe2(left, O_DIRECT | O_NONBLOCK));
    full_write(left[1], "abc", 3);
    full_write(left[1], "d", 1);
    full_write(left[1], "ef", 2);
    close(left[1]);
    OK(pipe2(mixed, O_DIRECT | O_NONBLOCK));
    full_write(mixed[1], "ghi", 3);
    OK(fcntl(mixed[1], F_SETFL, 0));
    full_write(mixed[1], "jklm", 4);
    pid_t c = fork();
    if (c == 0) {  // writes a stream for ever, mostly blocked in write on a full pipe
        begin_child();
        close(flow[0]);
        signal(SIGPIPE, SIG_IGN);
        uint64_t blk[1000];
        for (uint64_t s = 0;; s++) {
            fill(blk, sizeof blk, s);
            for (size_t d = 0; d < sizeof blk;) {
                ssize_t r = write(flow[1], (char *)blk + d, sizeof blk - d);
                if (r < 0 && errno == EPIPE) _exit(21);
                if (r <= 0) fail("write: %zd %s", r, strerror(errno));
                d += (size_t)r;
            }
        }
    }
    close(flow[1]);
    char msgs = 0;
    // One opened by its name has O_LARGEFILE, an end from pipe() has not.
    int named[2], ends[] = {held[0], held[1], pkt[0], pkt[1], big[0], big[1], eof[0], flow[0], full[0], full[1]}, flags[10];
    for (int i = 0; i < 2; i++) {
        char path[40];
        snprintf(path, sizeof path, "/proc/self/fd/%d", held[i]);
        named[i] = (int)OK(open(path, i ? O_WRONLY : O_RDONLY));
        CHECK(fcntl(named[i], F_GETFL) & 0100000);
    }
    for (int i = 0; i < 10; i++) {
        flags[i] = fcntl(ends[i], F_GETFL);
        CHECK(!(flags[i] & 0100000));
    }
    for (uint64_t r = 0; running(); r++) {
        for (int i = 0; i < 10; i++) EQ(fcntl(ends[i], F_GETFL), flags[i]);
        for (int i = 0; i < 2; i++) EQ(fcntl(named[i], F_GETFL), 0100000 | i);
        uint64_t blk[1000];
        full_read(flow[0], blk, sizeof blk);
        verify(blk, sizeof blk, r, "a pipe's stream");
        if (r % 4) continue;
        int n = 0;
        full_read(held[0], in, 30000);
        verify(in, 30000, r / 4 + 1, "bytes held in a pipe");
        fill(buf, 30000, r / 4 + 2);
        full_write(held[1], buf, 30000);
        for (int i = 0; i < 5; i++) EQ(write(pkt[1], "abcdefghij", (size_t)(i + 1 + msgs % 3)), i + 1 + msgs % 3);
        fill(buf, 200000, r);
        full_write(big[1], buf, 200000);
        nap_us(4000);
        char m[64];
        while ((n = (int)read(pkt[0], m, sizeof m)) > 0) {
            EQ(n, 1 + msgs % 3);
            EQ(read(pkt[0], m, sizeof m), 2 + msgs % 3);
            EQ(read(pkt[0], m, sizeof m), 3 + msgs % 3);
            EQ(read(pkt[0], m, sizeof m), 4 + msgs % 3);
            EQ(read(pkt[0], m, sizeof m), 5 + msgs % 3);
        }
        EQ(errno, EAGAIN);
        msgs = (char)((msgs + 1) % 3);
        full_read(big[0], in, 200000);
        verify(in, 200000, r, "bytes in a large pipe");
        EQ(fcntl(big[1], F_GETPIPE_SZ), 262144);
        EQ(write(full[1], junk, 4096), -1);
        EQ(errno, EAGAIN);
        EQ(fcntl(pkt[1], F_GETFL) & (O_DIRECT | O_NONBLOCK), O_DIRECT | O_NONBLOCK);
        EQ(fcntl(mixed[1], F_GETFL) & O_DIRECT, 0);
    }
    char t[8];
    for (int i = 0; i < 3; i++) EQ(read(left[0], t, sizeof t), i == 0 ? 3 : i);
    EQ(read(left[0], t, sizeof t), 0);
    EQ(read(mixed[0], t, sizeof t), 3);
    EQ(read(mixed[0], t, 2), 2);
    EQ(read(mixed[0], t, sizeof t), 2);
    CHECK(!memcmp(t, "lm", 2));
    full_read(eof[0], t, 4);
    CHECK(!memcmp(t, "tail", 4));
    EQ(read(eof[0], t, 1), 0);
    for (ssize_t g = 0; g < capacity; g += 4096) full_read(full[0], junk, 4096);
    EQ(read(full[0], junk, 1), -1);
    EQ(errno, EAGAIN);
    close(flow[0]);
    reap(c, 21 << 8);
    return finish();
}
