// mem_twins MEGABYTES: two processes, as two ranks on one node, that each have filled memory of their own with the same
// contents; no two of its pages are alike.
#include "check.h"
#define P 4096
static char *make(size_t pages) {
    char *m = mmap(NULL, pages * P, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(m != MAP_FAILED);
    for (size_t i = 0; i < pages; i++) fill(m + i * P, P, i + 1);
    return m;
}
static void check_all(const char *m, size_t pages, const char *whose) {
    for (size_t i = 0; i < pages; i++) verify(m + i * P, P, i + 1, whose);
}
int main(int argc, char **argv) {
    begin("mem_twins");
    size_t pages = (argc > 1 ? strtoull(argv[1], NULL, 10) : 8) << 8;
    int ready[2], end[2];
    OK(pipe(ready));
    OK(pipe(end));
    pid_t twin = (pid_t)OK(fork());
    if (!twin) {
        begin_child();
        OK(close(end[1]));
        char *m = make(pages);
        full_write(ready[1], "r", 1);
        struct pollfd p = {end[0], POLLIN, 0};
        while (OK(poll(&p, 1, 20)) == 0) check_all(m, pages, "memory of the other process");
        _exit(7);
    }
    OK(close(end[0]));
    char *m = make(pages), r;
    full_read(ready[0], &r, 1);
    while (running()) {
        check_all(m, pages, "memory of the first process");
        nap_us(5000);
    }
    OK(close(end[1]));
    int status;
    EQ(OK(waitpid(twin, &status, 0)), twin);
    EQ(status, 7 << 8);
    return finish();
}
