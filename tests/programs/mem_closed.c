// Private mappings of files that nobody may read any more, one of them written to: what is not the process's own is of
// the files all the same. `alone`: no process may be made beside this one, so that its memory is stored while it stands.
#include <sys/resource.h>
#include "check.h"
#define LEN (16 * 4096)

static char *mapped(const char *which, uint64_t seed) {
    static char content[LEN];
    char name[64];
    snprintf(name, sizeof name, "closed.%s.%d", which, getpid());
    fill(content, LEN, seed);
    int fd = (int)OK(open(name, O_RDWR | O_CREAT | O_TRUNC, 0600));
    EQ(write(fd, content, LEN), LEN);
    char *at = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    CHECK(at != MAP_FAILED);
    close(fd);
    OK(chmod(name, 0));
    return at;
}

int main(int argc, char **argv) {
    (void)argv;
    begin("mem_closed");
    char *clean = mapped("clean", 1), *written = mapped("written", 2);
    fill(written + 4096, 4096, 3);
    if (argc > 1) OK(setrlimit(RLIMIT_NPROC, &(struct rlimit){1, 1}));
    while (running()) {
        nap_us(500);
        verify(clean, LEN, 1, "a private mapping of a file that may not be read");
        verify(written + 4096, 4096, 3, "a page of the process's own");
        // A page that nobody has touched before the checkpoint.
        fill(written + 4096, 4096, 3);
    }
    char *again = malloc(LEN);
    fill(again, LEN, 2);
    CHECK(!memcmp(written, again, 4096) && !memcmp(written + 8192, again + 8192, LEN - 8192));
    return finish();
}
