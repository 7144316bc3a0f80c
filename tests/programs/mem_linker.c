// A linker at work: a program is written through a shared mapping, and run as soon as that is gone. Also while a
// checkpoint is still being written nobody else may have it mapped for writing (ETXTBSY). And a page that the program has
// denied itself (pkeys(7)) is stored like any other.
#define _GNU_SOURCE
#include "check.h"
#include <spawn.h>
extern char **environ;
int main(void) {
    begin("mem_linker");
    enum { BALLAST = 48 << 20, PAGE = 4096 };
    char *ballast = mmap(NULL, BALLAST, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(ballast != MAP_FAILED);
    char *denied = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(denied != MAP_FAILED);
    memset(denied, 'd', PAGE);
    int key = pkey_alloc(0, PKEY_DISABLE_ACCESS);  // none where the processor has none
    if (key >= 0) OK(pkey_mprotect(denied, PAGE, PROT_READ | PROT_WRITE, key));
    int source = (int)OK(open("/bin/true", O_RDONLY));
    struct stat st;
    OK(fstat(source, &st));
    size_t length = (size_t)st.st_size;
    char *code = malloc(length), path[64];
    full_read(source, code, length);
    for (uint64_t r = 0; running(); r++) {
        for (size_t at = 0; at < BALLAST; at += PAGE) *(uint64_t *)(ballast + at) = mix(r + at);
        snprintf(path, sizeof path, "./linked.%d.%lu", getpid(), r % 3);
        unlink(path);
        int fd = (int)OK(open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0755));
        OK(ftruncate(fd, (off_t)length));
        char *out = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        CHECK(out != MAP_FAILED);
        memcpy(out, code, length);
        nap_us(20000);
        OK(munmap(out, length));
        close(fd);
        pid_t child;
        char *argv[] = {path, NULL};
        EQ(posix_spawn(&child, path, NULL, NULL, argv, environ), 0);
        reap(child, 0);
        unlink(path);
    }
    if (key >= 0) pkey_set(key, 0);
    for (int i = 0; i < PAGE; i++) EQ(denied[i], 'd');
    return finish();
}
