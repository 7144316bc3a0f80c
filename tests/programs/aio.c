// Native asynchronous I/O (io_setup) without a library. aio reads: direct and buffered reads and writes, always some on
// their way, some complete and not reaped. aio poll: polls that wait long, one of them for a descriptor that is closed,
// fsync, and an eventfd that counts completions. aio timers: polls that end at any moment, each once. aio threads: some
// threads submit and reap in the same context while another one maps and unmaps memory wherever there is room. aio
// full: a ring in every state, full too, and turned; a child has inherited the mapping and must not have the context.
#include "check.h"
#include <linux/aio_abi.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
struct ring {
    unsigned id, nr, head, tail, magic, compat, incompat, bytes;
};
static long submit(aio_context_t c, long n, struct iocb **p) { return syscall(SYS_io_submit, c, n, p); }
static long reap_events(aio_context_t c, long min, long n, struct io_event *e) {
    // With a time-out this call is interrupted by any stop, as signal(7) says; without one it is not.
    long r = syscall(SYS_io_getevents, c, min, n, e, NULL);
    if (r < min) fail("io_getevents returned %ld of %ld: %s", r, min, strerror(errno));
    return r;
}
static aio_context_t context(unsigned n) {
    aio_context_t c = 0;
    OK(syscall(SYS_io_setup, n, &c));
    return c;
}
static void request(struct iocb *q, int op, int fd, void *b, size_t n, long at, uint64_t data) {
    memset(q, 0, sizeof *q);
    q->aio_lio_opcode = (uint16_t)op;
    q->aio_fildes = (uint32_t)fd;
    q->aio_buf = (uint64_t)(uintptr_t)b;
    q->aio_nbytes = n;
    q->aio_offset = at;
    q->aio_data = data;
}
#define DEPTH 16
#define BLOCK 16384
static int data_file(int flags) {
    char n[64];
    snprintf(n, sizeof n, "aio.%d", getpid());
    int fd = open(n, O_RDWR | O_CREAT | flags, 0600);
    if (fd < 0) fd = (int)OK(open(n, O_RDWR | O_CREAT, 0600));  // a file system without direct I/O
    return fd;
}
// Each slot writes its block with a new pattern, then reads it back; the kernel has many of them at any time.
static void k_reads(void) {
    aio_context_t c = context(DEPTH);
    int fd = data_file(O_DIRECT);
    char *buf = mmap(NULL, DEPTH * BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    static struct iocb q[DEPTH];
    static unsigned long seed[DEPTH], begun, ended;
    static int reading[DEPTH];
    struct io_event e[4];
    for (int i = 0; i < DEPTH; i++) {
        struct iocb *p = &q[i];
        fill(buf + i * BLOCK, BLOCK, seed[i] = (unsigned)i + 1);
        request(p, IOCB_CMD_PWRITE, fd, buf + i * BLOCK, BLOCK, (long)i * BLOCK, (uint64_t)i << 32 | seed[i]);
        EQ(submit(c, 1, &p), 1);
        begun++;
    }
    while (running()) {
        long n = reap_events(c, 1, 4, e);
        for (long k = 0; k < n; k++) {
            int i = (int)(e[k].data >> 32);
            CHECK(i >= 0 && i < DEPTH);
            EQ(e[k].data & 0xffffffff, seed[i] & 0xffffffff);
            EQ(e[k].obj, (uint64_t)(uintptr_t)&q[i]);
            EQ(e[k].res, BLOCK);
            ended++;
            struct iocb *p = &q[i];
            char *b = buf + i * BLOCK;
            if (reading[i]) {
                verify(b, BLOCK, seed[i], "a block that was read");
                fill(b, BLOCK, seed[i] += DEPTH);
                request(p, IOCB_CMD_PWRITE, fd, b, BLOCK, (long)i * BLOCK, (uint64_t)i << 32 | (seed[i] & 0xffffffff));
            } else {
                memset(b, 0x55, BLOCK);
                request(p, IOCB_CMD_PREAD, fd, b, BLOCK, (long)i * BLOCK, (uint64_t)i << 32 | (seed[i] & 0xffffffff));
            }
            reading[i] = !reading[i];
            EQ(submit(c, 1, &p), 1);
            begun++;
        }
        EQ(begun - ended, DEPTH);
        if (check_round % 64 == 0) nap_us(2000);  // now all are complete and not reaped
    }
    while (ended < begun) ended += (unsigned long)reap_events(c, 1, 4, e);
    EQ(syscall(SYS_io_destroy, c), 0);
    char n[64];
    snprintf(n, sizeof n, "aio.%d", getpid());
    OK(unlink(n));
}
static void k_poll(void) {
    aio_context_t c = context(8);
    int a[2], b[2], counter = (int)OK(eventfd(0, EFD_NONBLOCK)), fd = data_file(0);
    OK(pipe(a));
    OK(pipe(b));
    static struct iocb pa, pb, sync, gone;
    struct iocb *p;
    struct io_event e[8];
    request(&pb, IOCB_CMD_POLL, b[0], (void *)(uintptr_t)POLLIN, 0, 0, 77);
    p = &pb;
    EQ(submit(c, 1, &p), 1);
    while (running()) {
        // The kernel waits for its file; nobody else can do so by a number that is closed, and a checkpoint ends it.
        int closed = (int)OK(dup(a[0]));
        request(&gone, IOCB_CMD_POLL, closed, (void *)(uintptr_t)POLLIN, 0, 0, 88);
        p = &gone;
        EQ(submit(c, 1, &p), 1);
        OK(close(closed));
        request(&pa, IOCB_CMD_POLL, a[0], (void *)(uintptr_t)POLLIN, 0, 0, check_round + 100);
        p = &pa;
        EQ(submit(c, 1, &p), 1);
        nap_us(2000);
        uint64_t v = check_round;
        full_write(fd, &v, 8);
        request(&sync, IOCB_CMD_FDSYNC, fd, NULL, 0, 0, 55);
        sync.aio_flags = IOCB_FLAG_RESFD;
        sync.aio_resfd = (uint32_t)counter;
        p = &sync;
        EQ(submit(c, 1, &p), 1);
        int ended = 0;
        EQ(reap_events(c, 1, 1, e), 1);
        if (e[0].data == 88) {
            EQ(e[0].res, POLLNVAL);
            ended = 1;
            EQ(reap_events(c, 1, 1, e), 1);
        }
        EQ(e[0].data, 55);
        EQ(e[0].res, 0);
        // The event can be seen before the counter.
        await(counter, POLLIN, "the eventfd of a completion");
        full_read(counter, &v, 8);
        EQ(v, 1);
        full_write(a[1], "x", 1);
        for (int seen = 0; seen < 2 - ended; seen++) {
            EQ(reap_events(c, 1, 1, e), 1);
            if (e[0].data == 88) {
                EQ(e[0].obj, (uint64_t)(uintptr_t)&gone);
                CHECK(e[0].res & (POLLIN | POLLNVAL));
            } else {
                EQ(e[0].data, check_round + 100);
                CHECK(e[0].res & POLLIN);
            }
        }
        EQ(syscall(SYS_io_getevents, c, 0L, 8L, e, &(struct timespec){0, 0}), 0);
        char x;
        full_read(a[0], &x, 1);
        OK(ftruncate(fd, 0));
        OK(lseek(fd, 0, SEEK_SET));
    }
    full_write(b[1], "y", 1);
    EQ(reap_events(c, 1, 8, e), 1);
    EQ(e[0].data, 77);
    EQ(e[0].obj, (uint64_t)(uintptr_t)&pb);
    char n[64];
    snprintf(n, sizeof n, "aio.%d", getpid());
    OK(unlink(n));
}
static aio_context_t shared;
static int shared_ready, threads_end;
static unsigned long submitted, reaped;
static void *t_submit(void *x) {
    struct iocb q, *p = &q;
    request(&q, IOCB_CMD_POLL, shared_ready, (void *)(uintptr_t)POLLIN, 0, 0, 99);
    while (!__atomic_load_n(&threads_end, __ATOMIC_ACQUIRE)) {
        long n = submit(shared, 1, &p);
        if (n < 0) EQ(errno, EAGAIN);
        else __atomic_add_fetch(&submitted, 1, __ATOMIC_ACQ_REL);
        nap_us(50);
    }
    return x;
}
static void *t_reap(void *x) {
    struct io_event e[8];
    while (!__atomic_load_n(&threads_end, __ATOMIC_ACQUIRE)) {
        long n = reap_events(shared, 0, 8, e);
        for (long i = 0; i < n; i++) EQ(e[i].data, 99);
        __atomic_add_fetch(&reaped, (unsigned long)n, __ATOMIC_ACQ_REL);
        nap_us(50);
    }
    return x;
}
static void *t_map(void *x) {
    char *m[8];
    while (!__atomic_load_n(&threads_end, __ATOMIC_ACQUIRE)) {
        for (int i = 0; i < 8; i++) {
            m[i] = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            CHECK(m[i] != MAP_FAILED);
            m[i][5] = (char)(i + 1);
        }
        nap_us(500);
        for (int i = 0; i < 8; i++) {
            EQ(m[i][5], i + 1);
            OK(munmap(m[i], 4096));
        }
    }
    return x;
}
static void k_threads(void) {
    shared = context(16);
    shared_ready = (int)OK(eventfd(1, 0));
    void *(*f[])(void *) = {t_submit, t_submit, t_reap, t_map};
    pthread_t t[4];
    for (int i = 0; i < 4; i++) EQ(pthread_create(&t[i], NULL, f[i], NULL), 0);
    while (running()) {
        unsigned long before = __atomic_load_n(&reaped, __ATOMIC_ACQUIRE);
        int64_t since = now_ns();
        while (__atomic_load_n(&reaped, __ATOMIC_ACQUIRE) < before + 10) {
            if (now_ns() - since > 60000000000LL) fail("no request ends");
            nap_us(500);
        }
    }
    __atomic_store_n(&threads_end, 1, __ATOMIC_RELEASE);
    for (int i = 0; i < 4; i++) EQ(pthread_join(t[i], NULL), 0);
    struct io_event e;
    while (reap_events(shared, 0, 1, &e) == 1) reaped++;
    EQ(reaped, submitted);
    OK(syscall(SYS_io_destroy, shared));
}
#define TIMERS 64
static void k_timers(void) {
    aio_context_t c = context(TIMERS);
    static struct iocb q[TIMERS];
    struct io_event e[TIMERS];
    int timer[TIMERS];
    for (int i = 0; i < TIMERS; i++) timer[i] = (int)OK(timerfd_create(CLOCK_MONOTONIC, 0));
    while (running()) {
        for (int i = 0; i < TIMERS; i++) {
            struct iocb *p = &q[i];
            OK(timerfd_settime(timer[i], 0, &(struct itimerspec){.it_value = {0, (i + 1) * 700000}}, NULL));
            request(p, IOCB_CMD_POLL, timer[i], (void *)(uintptr_t)POLLIN, 0, 0, check_round << 8 | (unsigned)i);
            EQ(submit(c, 1, &p), 1);
        }
        uint64_t seen = 0, n = 0;
        while (n < TIMERS) {
            long got = reap_events(c, 1, TIMERS, e);
            for (long k = 0; k < got; k++, n++) {
                uint64_t i = e[k].data & 255;
                EQ(e[k].data >> 8, check_round);
                EQ(e[k].obj, (uint64_t)(uintptr_t)&q[i]);
                CHECK(e[k].res & POLLIN);
                if (seen >> i & 1) fail("the poll of timer %d has ended twice", (int)i);
                seen |= 1ull << i;
            }
        }
        EQ(syscall(SYS_io_getevents, c, 0L, (long)TIMERS, e, &(struct timespec){0, 0}), 0);
        uint64_t x;
        for (int i = 0; i < TIMERS; i++) full_read(timer[i], &x, 8);
    }
    OK(syscall(SYS_io_destroy, c));
}
static void k_full(void) {
    aio_context_t small = context(1), large = context(1500), other = context(40);
    struct ring *s = (struct ring *)small, *l = (struct ring *)large;
    OK(syscall(SYS_io_destroy, other));
    int ready = (int)OK(eventfd(1, 0)), to[2], from[2];
    OK(pipe(to));
    OK(pipe(from));
    // It has the mappings of the rings, but no context.
    pid_t child = (pid_t)OK(fork());
    if (child == 0) {
        begin_child();
        OK(close(to[1]));
        char x;
        struct io_event e;
        while (read(to[0], &x, 1) == 1) {
            EQ(syscall(SYS_io_getevents, small, 0L, 1L, &e, &(struct timespec){0, 0}), -1);
            EQ(errno, EINVAL);
            full_write(from[1], &x, 1);
        }
        _exit(0);
    }
    OK(close(to[0]));
    uint64_t put[2] = {0}, got[2] = {0};
    aio_context_t c[2] = {small, large};
    unsigned nr[2] = {s->nr, l->nr}, deepest = 0;
    cpu_set_t where, now;
    OK(sched_getaffinity(0, sizeof where, &where));
    static struct iocb q[4096], *list[4096];
    while (running()) {
        OK(sched_getaffinity(0, sizeof now, &now));
        CHECK(CPU_EQUAL(&where, &now));
        for (int i = 0; i < 2; i++) {
            unsigned want = (unsigned)(mix(check_round * 2 + (uint64_t)i) % (nr[i] / 2 - 2));
            if (check_round % 5 == 0 && i == 0) want = nr[i] * 3 / 4;
            if (check_round == 1) want = nr[i] / 2 - 3;
            unsigned have = (unsigned)(put[i] - got[i]), n = want > have ? want - have : 0;
            for (unsigned k = 0; k < n; k++) {
                request(&q[k], IOCB_CMD_POLL, ready, (void *)(uintptr_t)POLLIN, 0, 0, (uint64_t)i << 60 | put[i]++);
                list[k] = &q[k];
            }
            for (unsigned k = 0; k < n;) {
                long r = submit(c[i], n - k, list + k);
                if (r <= 0) {  // no place just now: fewer this time
                    CHECK(r < 0 && errno == EAGAIN);
                    put[i] -= n - k;
                    break;
                }
                k += (unsigned)r;
            }
            if (put[i] - got[i] > deepest) deepest = (unsigned)(put[i] - got[i]);
        }
        nap_us(1000);
        for (int i = 0; i < 2; i++) {
            struct ring *r = (struct ring *)c[i];
            EQ(r->nr, nr[i]);
            EQ(r->magic, 0xa10a10a1);
            unsigned unread = r->tail >= r->head ? r->tail - r->head : r->tail + r->nr - r->head;
            EQ(unread, put[i] - got[i]);
            unsigned n = unread - (unsigned)(mix(check_round * 2 + 1 + (uint64_t)i) % (unread / 3 + 1));
            static struct io_event e[8192];
            // Half of them the way libraries do, without the kernel.
            for (unsigned k = 0; k < n / 2; k++) {
                struct io_event *at = (struct io_event *)(r + 1) + r->head;
                EQ(at->data, (uint64_t)i << 60 | got[i]);
                CHECK(at->res & POLLIN);
                got[i]++;
                __atomic_store_n(&r->head, (r->head + 1) % r->nr, __ATOMIC_RELEASE);
            }
            n -= n / 2;
            if (n) EQ(reap_events(c[i], n, n, e), n);
            for (unsigned k = 0; k < n; k++) {
                EQ(e[k].data, (uint64_t)i << 60 | got[i]);
                CHECK(e[k].res & POLLIN);
                got[i]++;
            }
        }
        char x = 'c';
        full_write(to[1], &x, 1);
        full_read(from[0], &x, 1);
    }
    CHECK(deepest > nr[1] / 4);
    OK(close(to[1]));
    reap(child, 0);
    // Gone is gone: its name must not lead to another.
    struct io_event e;
    EQ(syscall(SYS_io_getevents, other, 0L, 1L, &e, &(struct timespec){0, 0}), -1);
    OK(syscall(SYS_io_destroy, small));
    OK(syscall(SYS_io_destroy, large));
}
int main(int argc, char **argv) {
    const char *kind = argc > 1 ? argv[1] : "reads";
    char name[64];
    snprintf(name, sizeof name, "aio-%s", kind);
    begin(name);
    if (!strcmp(kind, "reads")) k_reads();
    else if (!strcmp(kind, "poll")) k_poll();
    else if (!strcmp(kind, "timers")) k_timers();
    else if (!strcmp(kind, "threads")) k_threads();
    else if (!strcmp(kind, "full")) k_full();
    else fail("unknown kind");
    return finish();
}
