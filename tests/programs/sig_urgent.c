// A signal that is blocked by and pending for one thread alone, of the kind with which runtimes stop their threads
// (SIGURG), stays pending there; the thread keeps its alternate stack and its name.
#include "check.h"
#include <sys/mman.h>
static _Atomic int ready, ending, taken;
static char alt[32768];
static void *work(void *arg) {
    (void)arg;
    prctl(PR_SET_NAME, "urgent");
    stack_t a = {.ss_sp = alt, .ss_size = sizeof alt}, b;
    OK(sigaltstack(&a, NULL));
    sigset_t s, p;
    sigemptyset(&s);
    sigaddset(&s, SIGURG);
    CHECK(pthread_sigmask(SIG_BLOCK, &s, NULL) == 0);
    CHECK(pthread_kill(pthread_self(), SIGURG) == 0);
    ready = 1;
    while (!ending) {
        char name[16] = "";
        nap_us(2000);
        OK(sigpending(&p));
        CHECK(sigismember(&p, SIGURG));
        OK(sigaltstack(NULL, &b));
        CHECK(b.ss_sp == alt && b.ss_size == sizeof alt && b.ss_flags == 0);
        prctl(PR_GET_NAME, name);
        CHECK(!strcmp(name, "urgent"));
    }
    int got = 0;
    CHECK(sigwait(&s, &got) == 0);
    EQ(got, SIGURG);
    OK(sigpending(&p));
    CHECK(!sigismember(&p, SIGURG));
    taken = 1;
    return NULL;
}
static void handler(int sig) { (void)sig; }
int main(void) {
    begin("sig_urgent");
    struct sigaction a = {.sa_handler = handler, .sa_flags = SA_RESTART};
    // Runtimes that use it catch it; the others must be caught too, or the checkpoint would not have to do with this one.
    OK(sigaction(SIGURG, &a, NULL));
    OK(sigaction(SIGWINCH, &a, NULL));
    OK(sigaction(SIGCHLD, &a, NULL));
    pthread_t t;
    CHECK(pthread_create(&t, NULL, work, NULL) == 0);
    while (!ready) nap_us(500);
    sigset_t p;
    while (running()) {
        nap_us(2000);
        OK(sigpending(&p));
        CHECK(!sigismember(&p, SIGURG));
    }
    ending = 1;
    CHECK(pthread_join(t, NULL) == 0);
    EQ(taken, 1);
    return finish();
}
