// The heap grows and shrinks with brk; contents and break are kept; malloc goes on.
#include "check.h"
int main(void) {
    begin("mem_brk");
    char *base = sbrk(0);
    base = (char *)(((uintptr_t)base + 4095) & ~4095UL);
    CHECK(brk(base + 65536) == 0);
    size_t len = 65536;
    fill(base, len, 1);
    uint64_t seed = 1;
    while (running()) {
        CHECK(sbrk(0) == base + len);
        verify(base, len, seed, "the heap");
        size_t next = 65536 + 4096 * (mix(check_round) % 256);
        CHECK(brk(base + next) == 0);
        if (next > len) for (size_t o = len; o < next; o += 512) EQ(base[o], 0);
        len = next;
        fill(base, len, ++seed);
        if (check_round % 8 == 0) nap_us(1000);
    }
    return finish();
}
