// A process that has reached its limit for memory, RLIMIT_AS or, with `data`, RLIMIT_DATA, is checkpointed as any other,
// and keeps its limit. With `hard` an ordinary user may not raise it.
#include "check.h"
#include <sys/resource.h>
#define MORE (1L << 20)
static const int kind = PROT_READ | PROT_WRITE;
static int what = RLIMIT_AS;
static struct rlimit small = {0, RLIM_INFINITY};
static void *more(long bytes) { return mmap(NULL, bytes, kind, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0); }
static void keeps(void) {
    struct rlimit now;
    OK(getrlimit(what, &now));
    EQ(now.rlim_cur, small.rlim_cur);
    EQ(now.rlim_max, small.rlim_max);
    CHECK(more(MORE) == MAP_FAILED && errno == ENOMEM);
}
int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "";
    begin(!strcmp(mode, "data") ? "mem_room-data" : !strcmp(mode, "hard") ? "mem_room-hard" : "mem_room");
    if (!strcmp(mode, "data")) what = RLIMIT_DATA;
    char *m = more(MORE);
    CHECK(m != MAP_FAILED);
    fill(m, MORE, 1);
    small.rlim_cur = 512L << 20;
    if (!strcmp(mode, "hard")) small.rlim_max = small.rlim_cur;
    OK(setrlimit(what, &small));
    // All but eight pages are taken.
    char *last = NULL;
    for (long bytes = 1L << 26; bytes >= 4096; bytes /= 2)
        for (char *p; (p = more(bytes)) != MAP_FAILED;) last = p;
    CHECK(last);
    OK(munmap(m + MORE / 2, 8 * 4096));
    while (running()) {
        keeps();
        verify(m, MORE / 2, 1, "its memory");
        nap_us(2000);
    }
    keeps();
    return finish();
}
