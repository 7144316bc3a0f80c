// Pages made to have one hash: XXH3 with the secret that everybody knows only adds a word of which the lower half is that
// of the secret, and another word makes up for it. They lie beside each other, and one after the other in one place.
#include "check.h"
#define P 4096
// The first words of the default secret of XXH3, for the first two stripes of 64 bytes.
static const uint32_t secret[2] = {0x396cfeb8, 0x2c81017c};
static void craft(unsigned char *page, uint32_t word) {
    const uint32_t high[2] = {word, -word};
    memset(page, 7, P);
    for (int i = 0; i < 2; i++) {
        memcpy(page + 64 * i, &secret[i], 4);
        memcpy(page + 64 * i + 4, &high[i], 4);
    }
}
static void look(const unsigned char *page, uint32_t word, const char *what) {
    unsigned char expected[P];
    craft(expected, word);
    for (size_t i = 0; i < P; i++)
        if (page[i] != expected[i]) fail("%s, of word %u: byte %zu is %d, not %d", what, word, i, page[i], expected[i]);
}
int main(void) {
    begin("mem_crafted");
    enum { N = 64 };
    unsigned char *m = mmap(NULL, (N + 1) * P, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(m != MAP_FAILED);
    for (uint32_t i = 0; i < N; i++) craft(m + i * P, i);
    for (uint32_t turn = N; running(); turn++) {
        for (uint32_t i = 0; i < N; i++) look(m + i * P, i, "a page that stays");
        craft(m + N * P, turn);
        nap_us(20000);
        look(m + N * P, turn, "a page that changes");
    }
    return finish();
}
