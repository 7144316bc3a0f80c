// Native asynchronous I/O (io_setup) on a file that another process of the job serves (FUSE), so that the requests of a
// stopped job never end. aio_served named: by the usual device. aio_served other: by a device of another name, as a
// server of a kind that nobody knows. Needs root. Checkpoints are refused, and everything must go on.
#include "check.h"
#include <linux/aio_abi.h>
#include <linux/fuse.h>
#include <sys/mount.h>
#include <sys/sysmacros.h>
#define DEPTH 4
#define BLOCK 4096
#define BLOCKS 64
static void reply(int fd, const struct fuse_in_header *in, int error, const void *data, size_t n) {
    static char b[sizeof(struct fuse_out_header) + BLOCK];
    struct fuse_out_header h = {(uint32_t)(sizeof h + n), error, in->unique};
    memcpy(b, &h, sizeof h);
    if (n) memcpy(b + sizeof h, data, n);
    // Nobody waits for the answer to a RELEASE: the file system may be unmounted before it comes.
    if (write(fd, b, h.len) != h.len) CHECK(error && errno == ENOENT);
}
static struct fuse_attr attributes(uint64_t node) {
    struct fuse_attr a = {.ino = node, .mode = S_IFDIR | 0755, .nlink = 2, .blksize = BLOCK};
    if (node == 2) a.mode = S_IFREG | 0444, a.nlink = 1, a.size = BLOCK * BLOCKS;
    return a;
}
static void serve(int fd) {
    static char b[1 << 17];
    for (;;) {
        ssize_t n = read(fd, b, sizeof b);
        if (n < 0 && errno == ENODEV) _exit(0);  // unmounted
        CHECK(n >= (ssize_t)sizeof(struct fuse_in_header));
        const struct fuse_in_header *in = (const void *)b;
        if (in->opcode == FUSE_INIT) {
            struct fuse_init_out o = {.major = 7, .minor = 31, .flags = FUSE_ASYNC_READ | FUSE_ASYNC_DIO, .max_background = 16, .congestion_threshold = 12, .max_write = BLOCK};
            reply(fd, in, 0, &o, sizeof o);
        } else if (in->opcode == FUSE_LOOKUP) {
            struct fuse_entry_out o = {.nodeid = 2, .attr = attributes(2)};
            reply(fd, in, 0, &o, sizeof o);
        } else if (in->opcode == FUSE_GETATTR) {
            struct fuse_attr_out o = {.attr = attributes(in->nodeid)};
            reply(fd, in, 0, &o, sizeof o);
        } else if (in->opcode == FUSE_OPEN) {
            struct fuse_open_out o = {.fh = 1};
            reply(fd, in, 0, &o, sizeof o);
        } else if (in->opcode == FUSE_READ) {
            const struct fuse_read_in *r = (const void *)(in + 1);
            static uint64_t block[BLOCK / 8];
            EQ(r->size, BLOCK);
            fill(block, BLOCK, r->offset);
            nap_us(20000);
            reply(fd, in, 0, block, BLOCK);
        } else if (in->opcode != FUSE_FORGET && in->opcode != FUSE_INTERRUPT) {
            reply(fd, in, -ENOSYS, NULL, 0);
        }
    }
}
int main(int argc, char **argv) {
    int other = argc > 1 && !strcmp(argv[1], "other");
    begin(other ? "aio_served-other" : "aio_served-named");
    const char *device = "/dev/fuse", *dir = "mnt";
    if (other) {
        device = "device";
        OK(mknod(device, S_IFCHR | 0600, makedev(10, 229)));
    }
    int fd = (int)OK(open(device, O_RDWR));
    OK(mkdir(dir, 0700));
    // The mount goes with the processes.
    OK(unshare(CLONE_NEWNS));
    OK(mount("", "/", NULL, MS_REC | MS_PRIVATE, NULL));
    char options[64];
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0", fd);
    OK(mount("served", dir, "fuse", 0, options));
    pid_t server = (pid_t)OK(fork());
    if (!server) {
        begin_child();
        serve(fd);
    }
    OK(close(fd));
    int f = (int)OK(open("mnt/f", O_RDONLY | O_DIRECT));
    aio_context_t c = 0;
    OK(syscall(SYS_io_setup, DEPTH, &c));
    char *buf = mmap(NULL, DEPTH * BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    static struct iocb q[DEPTH];
    unsigned long begun = 0;
    for (struct io_event e = {0}; begun < DEPTH || running(); begun++) {
        uint64_t slot = begun;
        if (begun >= DEPTH) {
            EQ(syscall(SYS_io_getevents, c, 1L, 1L, &e, NULL), 1);
            slot = e.data;
            EQ(e.res, BLOCK);
            verify(buf + slot * BLOCK, BLOCK, (uint64_t)q[slot].aio_offset, "a block read");
        }
        q[slot] = (struct iocb){.aio_lio_opcode = IOCB_CMD_PREAD, .aio_fildes = (uint32_t)f, .aio_buf = (uint64_t)(uintptr_t)(buf + slot * BLOCK), .aio_nbytes = BLOCK, .aio_offset = (long)(mix(begun) % BLOCKS * BLOCK), .aio_data = slot};
        struct iocb *p = &q[slot];
        EQ(syscall(SYS_io_submit, c, 1L, &p), 1);
    }
    OK(syscall(SYS_io_destroy, c));
    OK(close(f));
    OK(umount(dir));
    reap(server, 0);
    OK(rmdir(dir));
    if (other) OK(unlink(device));
    return finish();
}
