// Regular files: offsets, append, access modes, flags, sparse tails, duplicated and separately opened descriptions, directories.
#include "check.h"
#include <dirent.h>
#include <sys/uio.h>
int main(void) {
    begin("fd_regular");
    char path[64], ap[64], dir[64];
    snprintf(path, sizeof path, "regular.%d", getpid());
    snprintf(ap, sizeof ap, "append.%d", getpid());
    snprintf(dir, sizeof dir, "dir.%d", getpid());
    int rd, w = (int)OK(open(path, O_RDWR | O_CREAT | O_TRUNC, 0600));
    static uint64_t blk[512];
    for (uint64_t i = 0; i < 64; i++) {
        fill(blk, sizeof blk, i);
        full_write(w, blk, sizeof blk);
    }
    rd = (int)OK(open(path, O_RDONLY | O_NOATIME));
    int nonblock = (int)OK(open(path, O_WRONLY | O_NONBLOCK | O_SYNC));
    int log = (int)OK(open(ap, O_WRONLY | O_APPEND | O_CREAT | O_TRUNC, 0600));
    int fl = (int)OK(fcntl(nonblock, F_GETFL));
    OK(mkdir(dir, 0700));
    for (int i = 0; i < 20; i++) {
        char f[128];
        snprintf(f, sizeof f, "%s/f%d", dir, i);
        close((int)OK(open(f, O_CREAT | O_WRONLY, 0600)));
    }
    int d = (int)OK(open(dir, O_RDONLY | O_DIRECTORY));
    char ents[8192];
    int el = 0;
    for (long n; (n = syscall(SYS_getdents64, d, ents, sizeof ents)) > 0;) el += (int)n;
    OK(lseek(d, 0, SEEK_SET));
    OK(lseek(w, 17, SEEK_SET));
    uint64_t lines = 0, at = 0;
    while (running()) {
        EQ(lseek(w, 0, SEEK_CUR), 17);
        EQ(lseek(rd, 0, SEEK_CUR), (at % 64) * 4096);
        if (at % 64 == 0) OK(lseek(rd, 0, SEEK_SET));
        full_read(rd, blk, 4096);
        verify(blk, 4096, at % 64, "a file's block");
        at++;
        if (at % 64 == 0) OK(lseek(rd, 0, SEEK_SET));
        EQ(fcntl(nonblock, F_GETFL), fl);
        EQ(write(rd, "x", 1), -1);
        EQ(errno, EBADF);
        char line[32];
        struct stat st;
        OK(fstat(log, &st));
        EQ(st.st_size, (off_t)lines * 20);  // after a restart the log is as long as at the checkpoint
        snprintf(line, sizeof line, "%019llu\n", (unsigned long long)lines);
        full_write(log, line, 20);
        lines++;
        long n = syscall(SYS_getdents64, d, ents, 200);
        CHECK(n >= 0);
        if (n == 0) OK(lseek(d, 0, SEEK_SET));
        nap_us(500);
    }
    int in = (int)OK(open(ap, O_RDONLY));
    for (uint64_t i = 0; i < lines; i++) {
        char line[21] = {0};
        full_read(in, line, 20);
        EQ(strtoull(line, NULL, 10), i);
    }
    char c;
    EQ(read(in, &c, 1), 0);
    return finish();
}
