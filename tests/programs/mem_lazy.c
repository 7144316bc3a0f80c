// Memory that is changed in every way while it may still be being filled: written, given back, grown, moved, unmapped,
// inherited by children that do the same, read into and written from by the kernel; by several threads at once. Whatever
// is read must be what was there, and zeros where it was given back. There are children only while FILE is there.
// mem_lazy MEGABYTES THREADS FILE
#include "check.h"
#include <malloc.h>
#define REGIONS 24
#define MOST 4096 // pages of a region
static const char *forks;
static size_t mean;
static int pipes[8][2];
struct region {
    char *at;
    size_t pages;
    uint64_t seeds[MOST]; // 0: zeros
};
struct worker {
    uint64_t random;
    int id;
    struct region r[REGIONS];
};
static struct worker *workers;
static _Atomic int over;

static uint64_t draw(struct worker *w, uint64_t below) { return (w->random = mix(w->random)) % below; }

static void page_is(struct region *r, size_t i, const char *what) {
    char *p = r->at + i * 4096;
    if (r->seeds[i]) return verify(p, 4096, r->seeds[i], what);
    uint64_t *word = (uint64_t *)p;
    for (int k = 0; k < 512; k++)
        if (word[k]) fail("%s: word %d of a page of zeros is %llx", what, k, (unsigned long long)word[k]);
}

static void check_all(struct worker *w, const char *what) {
    for (int k = 0; k < REGIONS; k++)
        for (size_t i = 0; i < w->r[k].pages; i++) page_is(&w->r[k], i, what);
}

static void fresh(struct worker *w, struct region *r) {
    r->pages = mean / 2 + draw(w, mean);
    if (r->pages > MOST) r->pages = MOST;
    r->at = mmap(NULL, r->pages * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(r->at != MAP_FAILED);
    memset(r->seeds, 0, sizeof r->seeds);
}

static void write_page(struct worker *w, struct region *r, size_t i) {
    fill(r->at + i * 4096, 4096, r->seeds[i] = 1 + draw(w, 1u << 30));
}

static void remap(struct worker *w, struct region *r) {
    size_t pages = mean / 2 + draw(w, 3 * mean / 2);
    if (pages > MOST) pages = MOST;
    char *to;
    if (draw(w, 2)) {
        to = mremap(r->at, r->pages * 4096, pages * 4096, MREMAP_MAYMOVE);
    } else {
        // To where something is that is replaced.
        char *room = mmap(NULL, pages * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(room != MAP_FAILED);
        to = mremap(r->at, r->pages * 4096, pages * 4096, MREMAP_MAYMOVE | MREMAP_FIXED, room);
    }
    if (to == MAP_FAILED) {
        // Of several mappings, as protections have made them: nothing has happened.
        CHECK(errno == EFAULT);
        return;
    }
    for (size_t i = r->pages; i < pages; i++) r->seeds[i] = 0;
    r->at = to;
    r->pages = pages;
}

static void give_back(struct worker *w, struct region *r) {
    size_t i = draw(w, r->pages), n = 1 + draw(w, r->pages - i);
    OK(madvise(r->at + i * 4096, n * 4096, MADV_DONTNEED));
    memset(r->seeds + i, 0, n * sizeof r->seeds[0]);
}

// The kernel reads from pages and writes to others.
static void through_the_kernel(struct worker *w, struct region *r, size_t i, struct region *q, size_t j) {
    int *p = pipes[w->id];
    full_write(p[1], r->at + i * 4096, 4096);
    full_read(p[0], q->at + j * 4096, 4096);
    q->seeds[j] = r->seeds[i];
    page_is(q, j, "read by the kernel");
}

static void allocate(struct worker *w) {
    size_t n = 1000 + draw(w, 60000);
    unsigned char *c = calloc(1, n);
    CHECK(c);
    for (size_t i = 0; i < n; i++) CHECK(c[i] == 0);
    memset(c, 0x5a, n);
    free(c);
    if (draw(w, 16) == 0) malloc_trim(0);
}

static void child(struct worker *w) {
    pid_t c = (pid_t)OK(fork());
    if (c) return reap(c, 0);
    begin_child();
    w->random = mix(w->random + 1);
    for (int n = 0; n < 60; n++) {
        struct region *r = &w->r[draw(w, REGIONS)];
        page_is(r, draw(w, r->pages), "in a child");
        if (n % 16 == 3) remap(w, r);
        if (n % 16 == 7) give_back(w, r);
        if (n % 4 == 1) write_page(w, r, draw(w, r->pages));
    }
    if (draw(w, 8) == 0) {
        pid_t g = (pid_t)OK(fork());
        if (g == 0) {
            check_all(w, "in a child of a child");
            _exit(0);
        }
        reap(g, 0);
    }
    if (draw(w, 2)) execl("/bin/true", "true", NULL);
    if (draw(w, 4) == 0) check_all(w, "all in a child");
    _exit(0);
}

static void step(struct worker *w) {
    struct region *r = &w->r[draw(w, REGIONS)], *q = &w->r[draw(w, REGIONS)];
    size_t i = draw(w, r->pages);
    page_is(r, i, "memory");
    uint64_t what = draw(w, 200);
    if (what < 60) write_page(w, r, i);
    else if (what < 90) through_the_kernel(w, r, i, q, draw(w, q->pages));
    else if (what < 96) give_back(w, r);
    else if (what < 108) remap(w, r);
    else if (what < 112) {
        OK(munmap(r->at, r->pages * 4096));
        fresh(w, r);
        for (size_t k = 0; k < r->pages; k++) write_page(w, r, k);
    } else if (what < 114) {
        OK(mprotect(r->at + i * 4096, 4096, PROT_READ));
        page_is(r, i, "protected");
        OK(mprotect(r->at + i * 4096, 4096, PROT_READ | PROT_WRITE));
    } else if (what < 140) allocate(w);
    else if (what < 144 && access(forks, F_OK) == 0) child(w);
}

static void *work(void *arg) {
    struct worker *w = arg;
    while (!over) step(w);
    check_all(w, "at the end");
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    size_t mb = (size_t)atoi(argv[1]);
    int threads = atoi(argv[2]);
    forks = argv[3];
    begin("mem_lazy");
    check_quiet_parent = 1;
    mean = mb * 256 / REGIONS / (size_t)threads;
    workers = calloc((size_t)threads, sizeof *workers);
    CHECK(workers && threads <= 8 && mean > 8);
    for (int t = 0; t < threads; t++) {
        struct worker *w = &workers[t];
        w->random = 77 + (uint64_t)t;
        w->id = t;
        OK(pipe(pipes[t]));
        for (int k = 0; k < REGIONS; k++) {
            fresh(w, &w->r[k]);
            for (size_t i = 0; i < w->r[k].pages; i++) write_page(w, &w->r[k], i);
        }
    }
    pthread_t others[8];
    for (int t = 1; t < threads; t++) CHECK(pthread_create(&others[t], NULL, work, &workers[t]) == 0);
    while (running()) step(&workers[0]);
    over = 1;
    for (int t = 1; t < threads; t++) CHECK(pthread_join(others[t], NULL) == 0);
    check_all(&workers[0], "at the end");
    no_children();
    return finish();
}
