// File mappings: shared written and read through both mapping and descriptor; private with some pages changed; offset,
// tail page, closed descriptor.
#include "check.h"
#define LEN (40 * 4096 + 1000)
int main(void) {
    begin("mem_file");
    char path[64];
    snprintf(path, sizeof path, "mapped.%d", getpid());
    int fd = (int)OK(open(path, O_RDWR | O_CREAT | O_TRUNC, 0600));
    static char buf[LEN];
    fill(buf, LEN, 1);
    full_write(fd, buf, LEN);
    char *sh = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    char *pr = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    char *ro = mmap(NULL, 4 * 4096, PROT_READ, MAP_SHARED, fd, 8 * 4096);
    CHECK(sh != MAP_FAILED && pr != MAP_FAILED && ro != MAP_FAILED);
    close(fd);
    uint64_t cow = 0;
    fill(pr + 4096, 4096, 500);  // two private pages differ from the file
    fill(pr + 30 * 4096, 4096, 501);
    for (uint64_t r = 2; running(); r++) {
        verify(pr + 4096, 4096, 500 + cow * 2, "a changed private page");
        verify(pr + 30 * 4096, 4096, 501 + cow * 2, "a changed private page");
        cow++;
        fill(pr + 4096, 4096, 500 + cow * 2);
        fill(pr + 30 * 4096, 4096, 501 + cow * 2);
        verify(sh, LEN / 8 * 8, r - 1, "the shared file mapping");
        if (memcmp(sh + 8 * 4096, ro, 4 * 4096)) fail("two shared mappings of a file differ");
        if (memcmp(sh + 20 * 4096, pr + 20 * 4096, 4096)) fail("an unchanged private page differs from the file");
        fill(sh, LEN / 8 * 8, r);
        OK(fd = open(path, O_RDONLY));
        EQ(pread(fd, buf, LEN, 0), LEN);
        if (memcmp(buf, sh, LEN)) fail("file and shared mapping differ");
        close(fd);
        for (int i = LEN; i < 41 * 4096; i++) if (pr[i]) fail("byte %d behind the end of the file is %d", i, pr[i]);
        nap_us(1000);
    }
    unlink(path);
    return finish();
}
