// Deleted files, O_TMPFILE files and files renamed after opening keep contents, offset and link count; those without a
// name, and a memfd, that nobody touches, also mode and times. What is written to a file reaches the name that it has in
// another directory.
#include "check.h"
int main(void) {
    begin("fd_deleted");
    char path[64], moved[64];
    snprintf(path, sizeof path, "del.%d", getpid());
    int fd[3], n = 0;
    fd[n] = (int)OK(open(path, O_RDWR | O_CREAT | O_EXCL, 0640));
    OK(unlink(path));
    int dupfd = (int)OK(dup(fd[n]));
    n++;
    int t = open(".", O_RDWR | O_TMPFILE, 0600);
    if (t >= 0) fd[n++] = t;
    snprintf(moved, sizeof moved, "moved.%d", getpid());
    fd[n] = (int)OK(open(path, O_RDWR | O_CREAT | O_EXCL, 0600));
    OK(rename(path, moved));
    n++;
    static uint64_t blk[512];
    for (int i = 0; i < n; i++)
        for (uint64_t b = 0; b < 16; b++) {
            fill(blk, 4096, b + (uint64_t)i * 100);
            full_write(fd[i], blk, 4096);
        }
    uint64_t len[3] = {16, 16, 16};
    int still[3], kept = 0;
    snprintf(path, sizeof path, "still.%d", getpid());
    still[kept++] = (int)OK(open(path, O_RDWR | O_CREAT | O_EXCL, 0600));
    OK(unlink(path));
    t = open(".", O_RDWR | O_TMPFILE, 0600);
    if (t >= 0) still[kept++] = t;
    still[kept++] = (int)OK(memfd_create("still", MFD_CLOEXEC));
    // Files that have got a name in another directory instead of their first one, or of none.
    char from[64], to[64], name[96], other[96];
    int linked[2], links = 0;
    snprintf(from, sizeof from, "from.%d", getpid());
    snprintf(to, sizeof to, "to.%d", getpid());
    OK(mkdir(from, 0700));
    OK(mkdir(to, 0700));
    snprintf(name, sizeof name, "%s/file", from);
    snprintf(other, sizeof other, "%s/0", to);
    linked[links++] = (int)OK(open(name, O_RDWR | O_CREAT | O_EXCL, 0600));
    OK(link(name, other));
    OK(unlink(name));
    t = open(from, O_RDWR | O_TMPFILE, 0600);
    if (t >= 0) {
        snprintf(name, sizeof name, "/proc/self/fd/%d", t);
        snprintf(other, sizeof other, "%s/1", to);
        OK(linkat(AT_FDCWD, name, AT_FDCWD, other, AT_SYMLINK_FOLLOW));
        linked[links++] = t;
    }
    struct stat was[3];
    for (int i = 0; i < kept; i++) {
        full_write(still[i], blk, 4096);
        OK(fchmod(still[i], i == 2 ? 0511 : 06711));
        struct timespec times[2] = {{1000000000 + i, 123456789}, {1100000000 + i, 987654321}};
        OK(futimens(still[i], times));
        OK(fstat(still[i], &was[i]));
    }
    while (running()) {
        for (int i = 0; i < links; i++) {
            struct stat st, there;
            snprintf(other, sizeof other, "%s/%d", to, i);
            full_write(linked[i], "z", 1);
            OK(fstat(linked[i], &st));
            OK(stat(other, &there));
            EQ(st.st_ino, there.st_ino);
            EQ(there.st_size, lseek(linked[i], 0, SEEK_CUR));
        }
        nap_us(1000);
        for (int i = 0; i < n; i++) {
            struct stat st;
            OK(fstat(fd[i], &st));
            EQ(st.st_nlink, i == n - 1 ? 1 : 0);
            EQ(st.st_size, (off_t)len[i] * 4096);
            EQ(lseek(fd[i], 0, SEEK_CUR), (off_t)len[i] * 4096);
            uint64_t b = mix(check_round) % len[i];
            EQ(pread(fd[i], blk, 4096, (off_t)b * 4096), 4096);
            verify(blk, 4096, b + (uint64_t)i * 100, "a deleted file's block");
            if (len[i] < 512) {
                fill(blk, 4096, len[i] + (uint64_t)i * 100);
                full_write(fd[i], blk, 4096);
                len[i]++;
            }
        }
        for (int i = 0; i < kept; i++) {
            struct stat st;
            OK(fstat(still[i], &st));
            EQ(st.st_mode, was[i].st_mode);
            EQ(st.st_atim.tv_sec, was[i].st_atim.tv_sec);
            EQ(st.st_atim.tv_nsec, was[i].st_atim.tv_nsec);
            EQ(st.st_mtim.tv_sec, was[i].st_mtim.tv_sec);
            EQ(st.st_mtim.tv_nsec, was[i].st_mtim.tv_nsec);
        }
        EQ(lseek(dupfd, 0, SEEK_CUR), (off_t)len[0] * 4096);
        CHECK(access(path, F_OK) == -1);
    }
    unlink(moved);
    for (int i = 0; i < links; i++) {
        snprintf(other, sizeof other, "%s/%d", to, i);
        OK(unlink(other));
    }
    OK(rmdir(to));
    OK(rmdir(from));
    return finish();
}
