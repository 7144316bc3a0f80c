// Descriptors above 1024, with holes, and the last number that the limit allows; each is the right object.
#include "check.h"
#include <sys/resource.h>
int main(void) {
    begin("fd_many");
    struct rlimit l;
    OK(getrlimit(RLIMIT_NOFILE, &l));
    l.rlim_cur = l.rlim_max;
    OK(setrlimit(RLIMIT_NOFILE, &l));
    int top = l.rlim_max > 5000 ? 5000 : (int)l.rlim_max - 1, n = 0;
    int src[2];
    struct { int r, w; } a[600];
    for (int fd = 3; n < 600; n++) {
        fd += 1 + (int)(mix((uint64_t)n) % 3) * 2;
        if (fd + 1 >= top) break;
        OK(pipe(src));
        int r = (int)OK(fcntl(src[0], F_DUPFD, fd)), w = (int)OK(fcntl(src[1], F_DUPFD_CLOEXEC, r + 1));
        close(src[0]);
        close(src[1]);
        a[n].r = r;
        a[n].w = w;
        fd = w + 1;
        uint64_t v = mix((uint64_t)n * 3);
        full_write(w, &v, 8);
    }
    int high = top > 4000 ? (int)OK(dup2(a[5].r, 4567)) : a[5].r;
    if (top > 1100) CHECK(high > 1024);
    // The last that the limit allows: nothing is left above.
    int last = (int)OK(fcntl(a[6].r, F_DUPFD, (int)l.rlim_max - 1));
    for (uint64_t r = 0; running(); r++) {
        for (int i = 0; i < n; i++) {
            uint64_t v;
            full_read(i == 5 ? high : i == 6 ? last : a[i].r, &v, 8);
            EQ(v, mix((uint64_t)i * 3 + r));
            v = mix((uint64_t)i * 3 + r + 1);
            full_write(a[i].w, &v, 8);
        }
        EQ(fcntl(a[3].w, F_GETFD), FD_CLOEXEC);
        EQ(fcntl(a[3].r, F_GETFD), 0);
        nap_us(1000);
    }
    return finish();
}
