// A name leads to what it held at the checkpoint, whatever took its place since: the program
// replaces its data file (a new one is moved there, the old one keeps another name) and gives a second name to the file
// it has open. What lies under those other names was made after the checkpoint and must stay whole.
#include "check.h"
#define LEN 8192
static char work[64], next[64], backup[64], copy[64];

// Whole under any name: one round's data from beginning to end.
static uint64_t whole(const char *name) {
    static uint64_t blk[LEN / 8];
    int fd = open(name, O_RDONLY);
    if (fd == -1) {
        CHECK(errno == ENOENT);
        return 0;
    }
    uint64_t n;
    EQ(pread(fd, &n, 8, LEN), 8);
    EQ(pread(fd, blk, LEN, 0), LEN);
    verify(blk, LEN, n, name);
    close(fd);
    return n;
}

// Files that nobody has open stay as the crash left them, so the name may be taken again after a restart.
static void second_name(const char *name) {
    unlink(name);
    while (link(work, name) == -1) {
        CHECK(errno == EEXIST);
        unlink(name);
    }
}

static int make(const char *name, uint64_t n) {
    static uint64_t blk[LEN / 8];
    int fd = (int)OK(open(name, O_RDWR | O_CREAT | O_TRUNC, 0644));
    fill(blk, LEN, n);
    EQ(pwrite(fd, blk, LEN, 0), LEN);
    EQ(pwrite(fd, &n, 8, LEN), 8);
    return fd;
}

int main(void) {
    begin("fd_replaced");
    snprintf(work, sizeof work, "work.%d", getpid());
    snprintf(next, sizeof next, "next.%d", getpid());
    snprintf(backup, sizeof backup, "backup.%d", getpid());
    snprintf(copy, sizeof copy, "copy.%d", getpid());
    uint64_t n = 1;
    int fd = make(work, n);
    while (running()) {
        struct stat st, there;
        OK(fstat(fd, &st));
        OK(stat(work, &there));
        EQ(st.st_ino, there.st_ino);
        EQ(whole(work), n);
        int64_t changed = st.st_mtim.tv_sec * 1000000000LL + st.st_mtim.tv_nsec;
        nap_us(3000);
        OK(fstat(fd, &st));
        EQ(st.st_mtim.tv_sec * 1000000000LL + st.st_mtim.tv_nsec, changed);
        // A second name for the file that is open, removed much later.
        second_name(copy);
        nap_us(2000);
        CHECK(whole(copy) >= n);
        // Another file takes its place; the old one stays under another name.
        unlink(next);
        int other = make(next, n + 1);
        second_name(backup);
        OK(rename(next, work));
        close(fd);
        fd = other;
        n++;
        whole(backup);
        whole(copy);
    }
    unlink(work), unlink(next), unlink(backup), unlink(copy);
    return finish();
}
