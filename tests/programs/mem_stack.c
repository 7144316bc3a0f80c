// A deep recursion grows the main stack while checkpoints come; later it shrinks; automatic growth still works.
#include "check.h"
__attribute__((noinline)) static uint64_t deep(int n) {
    volatile uint64_t frame[256];
    for (int i = 0; i < 256; i++) frame[i] = mix((uint64_t)(n * 256 + i));
    if (n % 500 == 0) running();
    uint64_t r = n ? deep(n - 1) : 0;
    if (n == 0) nap_us(4000);
    for (int i = 0; i < 256; i++) if (frame[i] != mix((uint64_t)(n * 256 + i))) fail("stack frame %d is damaged", n);
    return r + frame[0];
}
int main(void) {
    begin("mem_stack");
    for (int d = 100; running(); d = d % 3400 + 100) deep(d);
    return finish();
}
