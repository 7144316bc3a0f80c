// Private anonymous memory: many mappings, patterns, changes in every round, zero pages, guard pages between.
#include "check.h"
#define N 48
int main(void) {
    begin("mem_private");
    char *m[N];
    size_t len[N];
    uint64_t seed[N];
    for (int i = 0; i < N; i++) {
        len[i] = 4096u * (size_t)(1 + (i * 7) % 60);
        m[i] = mmap(NULL, len[i] + 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(m[i] != MAP_FAILED);
        m[i] += 4096;
        OK(mprotect(m[i], len[i], PROT_READ | PROT_WRITE));
        fill(m[i], len[i], seed[i] = (uint64_t)i);
    }
    size_t zl = 32 << 20;
    unsigned char *zero = mmap(NULL, zl, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t o = 0; o < zl; o += 65536) CHECK(((volatile unsigned char *)zero)[o] == 0);  // zero pages are mapped
    for (uint64_t r = N; running(); r++) {
        size_t i = r % N;
        verify(m[i], len[i], seed[i], "private memory");
        fill(m[i], len[i], seed[i] = r);
        size_t o = (r * 4096 * 37) % zl;
        CHECK(zero[o] == 0);
        zero[o + 1] = (unsigned char)r;
        CHECK(zero[o + 1] == (unsigned char)r);
        zero[o + 1] = 0;
        if (r % 64 == 0) nap_us(2000);
    }
    for (int i = 0; i < N; i++) verify(m[i], len[i], seed[i], "private memory at the end");
    for (size_t o = 0; o < zl; o++) if (zero[o]) fail("byte %zu of the zero area is %d", o, zero[o]);
    return finish();
}
