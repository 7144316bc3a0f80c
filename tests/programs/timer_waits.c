// Calls with a relative time-out, one in each thread: each returns when that has passed and not before, however often the
// job is checkpointed meanwhile. How late they are, who reads what is printed can tell. timer_waits MILLISECONDS
#include "check.h"
#include <linux/futex.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/sem.h>
static long wait_ms;
static struct timespec span(void) { return (struct timespec){wait_ms / 1000, wait_ms % 1000 * 1000000}; }
static void by_epoll_wait(void) {
    struct epoll_event e;
    EQ(epoll_wait(OK(epoll_create1(0)), &e, 1, (int)wait_ms), 0);
}
static void by_epoll_pwait(void) {
    struct epoll_event e;
    sigset_t none;
    sigemptyset(&none);
    EQ(epoll_pwait(OK(epoll_create1(0)), &e, 1, (int)wait_ms, &none), 0);
}
static void by_sigtimedwait(void) {
    struct timespec t = span();
    sigset_t s;
    sigemptyset(&s);
    sigaddset(&s, SIGRTMIN + 3);
    EQ(sigtimedwait(&s, NULL, &t), -1);
    EQ(errno, EAGAIN);
    EQ(t.tv_sec * 1000 + t.tv_nsec / 1000000, wait_ms);
}
static void by_semtimedop(void) {
    struct timespec t = span();
    int id = (int)OK(semget(IPC_PRIVATE, 1, 0600));
    struct sembuf down = {0, -1, 0};
    int r = semtimedop(id, &down, 1, &t), e = errno;
    OK(semctl(id, 0, IPC_RMID));
    EQ(r, -1);
    EQ(e, EAGAIN);
}
static void by_poll(void) { EQ(poll(NULL, 0, (int)wait_ms), 0); }
static void by_ppoll(void) {
    struct timespec t = span();
    EQ(ppoll(NULL, 0, &t, NULL), 0);
}
static void by_select(void) {
    struct timeval t = {wait_ms / 1000, wait_ms % 1000 * 1000};
    EQ(select(0, NULL, NULL, NULL, &t), 0);
}
static void by_nanosleep(void) {
    const struct timespec t = span();
    OK(nanosleep(&t, NULL));
}
static void by_rest(void) {
    struct timespec t = span();
    OK(nanosleep(&t, &t));
}
static void by_clock_nanosleep(void) {
    const struct timespec t = span();
    EQ(clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL), 0);
}
static void by_futex(void) {
    const struct timespec t = span();
    int word = 7;
    EQ(syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 7, &t, NULL, 0), -1);
    EQ(errno, ETIMEDOUT);
}
static struct {
    const char *name;
    void (*call)(void);
} calls[] = {{"epoll_wait", by_epoll_wait}, {"epoll_pwait", by_epoll_pwait}, {"sigtimedwait", by_sigtimedwait}, {"semtimedop", by_semtimedop}, {"poll", by_poll},
    {"ppoll", by_ppoll}, {"select", by_select}, {"nanosleep", by_nanosleep}, {"nanosleep, rest", by_rest}, {"clock_nanosleep", by_clock_nanosleep}, {"futex", by_futex}};
enum { CALLS = sizeof calls / sizeof *calls };
static void *one(void *arg) {
    long i = (long)arg;
    int64_t begin = now_ns();
    calls[i].call();
    int64_t took = (now_ns() - begin) / 1000;
    printf("%s: %lld us\n", calls[i].name, (long long)took);
    if (took < wait_ms * 1000) fail("%s returned after %lld us instead of %ld ms", calls[i].name, (long long)took, wait_ms);
    return NULL;
}
int main(int argc, char **argv) {
    begin("timer_waits");
    CHECK(argc == 2);
    wait_ms = atol(argv[1]);
    pthread_t t[CALLS];
    for (long i = 0; i < CALLS; i++) pthread_create(&t[i], NULL, one, (void *)i);
    for (int i = 0; i < CALLS; i++) pthread_join(t[i], NULL);
    return finish();
}
