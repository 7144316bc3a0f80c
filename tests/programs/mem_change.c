// The address space changes all the time: maps, unmaps, mremap grow/move/shrink, holes, protection splits, between and
// during checkpoints.
#include "check.h"
#define N 64
static struct { char *p; size_t len; uint64_t seed; } a[N];
int main(void) {
    begin("mem_change");
    uint64_t rnd = 1;
    while (running()) {
        for (int k = 0; k < 20; k++) {
            rnd = mix(rnd);
            int i = (int)(rnd % N);
            size_t len = 4096 * (1 + (rnd >> 8) % 200);
            if (!a[i].p) {
                a[i].p = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
                CHECK(a[i].p != MAP_FAILED);
                a[i].len = len;
                fill(a[i].p, len, a[i].seed = rnd % 1000003);
                continue;
            }
            size_t keep = len < a[i].len ? len : a[i].len;
            verify(a[i].p, a[i].len, a[i].seed, "a mapping");
            switch ((rnd >> 40) % 4) {
            case 0: OK(munmap(a[i].p, a[i].len)); a[i].p = NULL; break;
            case 1: {
                char *q = mremap(a[i].p, a[i].len, len, MREMAP_MAYMOVE);
                CHECK(q != MAP_FAILED);
                verify(q, keep, a[i].seed, "a remapped mapping");
                for (size_t o = keep; o < len; o += 4096) EQ(q[o], 0);
                a[i].p = q;
                a[i].len = len;
                fill(q, len, a[i].seed);
                break;
            }
            case 2: OK(mprotect(a[i].p, 4096, PROT_READ)); verify(a[i].p, a[i].len, a[i].seed, "a mapping"); OK(mprotect(a[i].p, 4096, PROT_READ | PROT_WRITE)); break;
            default: OK(madvise(a[i].p, a[i].len, MADV_DONTNEED)); for (size_t o = 0; o < a[i].len; o += 4096) EQ(a[i].p[o], 0); fill(a[i].p, a[i].len, a[i].seed);
            }
        }
        nap_us(500);
    }
    for (int i = 0; i < N; i++) if (a[i].p) verify(a[i].p, a[i].len, a[i].seed, "a mapping at the end");
    return finish();
}
