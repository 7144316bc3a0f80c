// A file system that does not answer: whoever looks a name up in it hangs in the kernel, where no signal ends it, until
// this program ends.
//
// hung_mount DIRECTORY
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <unistd.h>

int main(int argc, char **argv) {
    static char request[1 << 20];
    char options[64];
    int device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    if (argc != 2 || device < 0) return 2;
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0", device);
    if (mount("hung", argv[1], "fuse", 0, options)) return 3;
    for (;;) {
        ssize_t n = read(device, request, sizeof request);
        if (n < 0) {
            if (errno == EINTR || errno == ENOENT) continue;
            return 0;
        }
        struct fuse_in_header in;
        memcpy(&in, request, sizeof in);
        if (in.opcode != FUSE_INIT) continue;
        struct {
            struct fuse_out_header header;
            struct fuse_init_out init;
        } out = {.header = {.len = sizeof out, .unique = in.unique},
                 .init = {.major = FUSE_KERNEL_VERSION, .minor = FUSE_KERNEL_MINOR_VERSION, .max_write = 4096}};
        if (write(device, &out, sizeof out) != (ssize_t)sizeof out) return 4;
        puts("mounted");
        fflush(stdout);
    }
}
