// Calls that take their time do all that was asked for: writes to pipes and sockets with slow readers, MSG_WAITALL with
// slow senders, sendfile, copy_file_range, getrandom, a read of /dev/zero. A handler that interrupts one ends it, as it
// does without a stop. call_cut
#include "check.h"
#include <netinet/in.h>
#include <sys/random.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>

enum { BLOCK = 512 << 10, PIECE = 4096, BIG = 24 << 20, HEAD = 100 };
enum { PIPE, WRITEV, UNIX, TCP, WAITALL, WAITALL_TCP, WAYS };
static _Atomic int over;
static _Atomic unsigned long rounds[WAYS + 1];
static struct way { int in, out, number; } ways[WAYS];
static char pattern[BLOCK];

static void handler(int sig) { (void)sig; }

static void check_block(const char *got, size_t n, size_t at) {
    if (memcmp(got, pattern + at, n)) fail("what was read at byte %zu of a block is not what was written there", at);
}

// Moves a block in small pieces, with pauses in which the other side waits.
static void *slow(void *v) {
    struct way *w = v;
    static _Thread_local char b[PIECE];
    int sends = w->number == WAITALL || w->number == WAITALL_TCP;
    for (size_t at = 0;; at = (at + PIECE) % BLOCK) {
        if (at % (8 * PIECE) == 0) nap_us(1000);
        if (sends && at == 0 && over) {
            OK(close(w->out));
            return NULL;
        } else if (sends) {
            full_write(w->out, pattern + at, PIECE);
        } else {
            for (size_t d = 0; d < PIECE;) {
                ssize_t r = read(w->in, b + d, PIECE - d);
                if (r == 0) return NULL;
                if (r < 0) fail("read: %s", strerror(errno));
                d += (size_t)r;
            }
            check_block(b, PIECE, at);
        }
    }
}

static ssize_t whole(struct way *w, char *b) {
    switch (w->number) {
    case PIPE: return write(w->out, pattern, BLOCK);
    case WRITEV: {
        struct iovec v[2] = {{pattern, HEAD}, {pattern + HEAD, BLOCK - HEAD}};
        return writev(w->out, v, 2);
    }
    case UNIX:
    case TCP: return send(w->out, pattern, BLOCK, MSG_NOSIGNAL);
    default: return recv(w->in, b, BLOCK, MSG_WAITALL);
    }
}

static void *quick(void *v) {
    struct way *w = v;
    char *b = malloc(BLOCK);
    CHECK(b);
    int reads = w->number == WAITALL || w->number == WAITALL_TCP;
    while (reads || !over) {
        ssize_t n = whole(w, b);
        if (reads && n == 0 && over) break;
        if (n != BLOCK) fail("way %d: %zd of %d bytes: %s", w->number, n, BLOCK, n < 0 ? strerror(errno) : "cut short");
        if (reads) check_block(b, BLOCK, 0);
        rounds[w->number]++;
    }
    OK(close(reads ? w->in : w->out));
    free(b);
    return NULL;
}

// Nobody reads: a signal ends the write with what the pipe holds.
static void interrupted(void) {
    int p[2];
    OK(pipe(p));
    int room = (int)OK(fcntl(p[1], F_GETPIPE_SZ));
    timer_t t;
    struct sigevent e = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGUSR1, ._sigev_un._tid = (pid_t)syscall(SYS_gettid)};
    OK(timer_create(CLOCK_MONOTONIC, &e, &t));
    // Again and again: the first may come before the write has begun.
    struct itimerspec in = {.it_value.tv_nsec = 150000000, .it_interval.tv_nsec = 150000000};
    OK(timer_settime(t, 0, &in, NULL));
    EQ(write(p[1], pattern, BLOCK), room);
    OK(timer_delete(t));
    OK(close(p[0]));
    OK(close(p[1]));
}

static void *computes(void *v) {
    (void)v;
    static char b[BIG];
    int from = (int)OK(memfd_create("from", 0)), to = (int)OK(memfd_create("to", 0)), zero = (int)OK(open("/dev/zero", O_RDONLY));
    OK(ftruncate(from, BIG));
    while (!over) {
        off_t at = 0;
        loff_t in = 0, out = 0;
        OK(lseek(to, 0, SEEK_SET));
        EQ(sendfile(to, from, &at, BIG), BIG);
        EQ(at, BIG);
        EQ(copy_file_range(from, &in, to, &out, BIG, 0), BIG);
        EQ(in, BIG);
        EQ(getrandom(b, BIG / 4, 0), BIG / 4);
        EQ(read(zero, b, BIG), BIG);
        interrupted();
        rounds[WAYS]++;
    }
    return NULL;
}

static void tcp_pair(int s[2]) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    int l = (int)OK(socket(AF_INET, SOCK_STREAM, 0));
    OK(bind(l, (struct sockaddr *)&a, n));
    OK(listen(l, 1));
    OK(getsockname(l, (struct sockaddr *)&a, &n));
    s[0] = (int)OK(socket(AF_INET, SOCK_STREAM, 0));
    OK(connect(s[0], (struct sockaddr *)&a, n));
    s[1] = (int)OK(accept(l, NULL, NULL));
    OK(close(l));
}

int main(void) {
    begin("call_cut");
    fill(pattern, BLOCK, 7);
    struct sigaction sa = {.sa_handler = handler};
    OK(sigaction(SIGUSR1, &sa, NULL));
    pthread_t t[2 * WAYS + 1];
    int threads = 0;
    for (int i = 0; i < WAYS; i++) {
        int s[2];
        if (i == PIPE || i == WRITEV) OK(pipe(s));
        else if (i == TCP || i == WAITALL_TCP) tcp_pair(s);
        else OK(socketpair(AF_UNIX, SOCK_STREAM, 0, s));
        ways[i] = (struct way){s[0], s[1], i};
        EQ(pthread_create(&t[threads++], NULL, slow, &ways[i]), 0);
        EQ(pthread_create(&t[threads++], NULL, quick, &ways[i]), 0);
    }
    EQ(pthread_create(&t[threads++], NULL, computes, NULL), 0);
    while (running()) nap_us(2000);
    // On a loaded machine some have not had their first turn.
    for (int i = 0; i <= WAYS; i++)
        for (int ms = 0; !rounds[i]; ms++) {
            CHECK(ms < 60000);
            nap_us(1000);
        }
    over = 1;
    for (int i = 0; i < threads; i++) EQ(pthread_join(t[i], NULL), 0);
    for (int i = 0; i <= WAYS; i++) CHECK(rounds[i] > 0);
    return finish();
}
