// What a kernel's record of written pages may not show: memory that changes places with other memory by whole page
// tables (mremap, 2 MiB at a time), pages given back and read before they are written again.
#include "check.h"
#define P 4096
#define PART (2 << 20)
#define PAGES (PART / P)
#define PARTS 4
static char *place[PARTS];
static uint64_t seed[PARTS][PAGES]; // 0: a page of zeros
static uint64_t rnd;
static size_t pick(size_t n) { return (rnd = mix(rnd)) % n; }
static void put(size_t part, size_t page) {
    seed[part][page] = (rnd = mix(rnd)) | 1;
    fill(place[part] + page * P, P, seed[part][page]);
}
static void check_all(void) {
    for (size_t i = 0; i < PARTS; i++)
        for (size_t k = 0; k < PAGES; k++) {
            char *p = place[i] + k * P;
            if (seed[i][k]) verify(p, P, seed[i][k], "a page");
            else
                for (size_t b = 0; b < P; b++)
                    if (p[b]) fail("byte %zu of page %zu of part %zu is %d, not 0", b, k, i, p[b]);
        }
}
static void move(char *from, char *to) { CHECK(mremap(from, PART, PART, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to); }
int main(void) {
    begin("mem_moved");
    // One part more, through which the others change places, and room to align.
    char *all = mmap(NULL, (PARTS + 2) * PART, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(all != MAP_FAILED);
    // Small pages: a huge one is marked when it moves.
    OK(madvise(all, (PARTS + 2) * PART, MADV_NOHUGEPAGE));
    char *aligned = all + (PART - (uintptr_t)all % PART), *aside = aligned + PARTS * PART;
    for (size_t i = 0; i < PARTS; i++) {
        place[i] = aligned + i * PART;
        for (size_t k = 0; k < PAGES; k++) put(i, k);
    }
    while (running()) {
        // Mostly little, so that most pages are clean at most checkpoints.
        switch (pick(12)) {
        case 0: { // two parts change places
            size_t a = pick(PARTS), b = (a + 1 + pick(PARTS - 1)) % PARTS;
            move(place[a], aside);
            move(place[b], place[a]);
            move(aside, place[b]);
            for (size_t k = 0; k < PAGES; k++) {
                uint64_t s = seed[a][k];
                seed[a][k] = seed[b][k];
                seed[b][k] = s;
            }
            break;
        }
        case 1: case 2: case 3: { // given back, and read
            size_t i = pick(PARTS), k = pick(PAGES - 8), n = 1 + pick(8);
            OK(madvise(place[i] + k * P, n * P, MADV_DONTNEED));
            memset(&seed[i][k], 0, n * sizeof seed[i][k]);
            break;
        }
        case 4: case 5: // some are written
            for (size_t k = 0; k < 8; k++) put(pick(PARTS), pick(PAGES));
            break;
        default: // nothing for a while
            for (int k = 0; k < 20; k++) nap_us(5000), beat();
            break;
        }
        check_all();
    }
    return finish();
}
