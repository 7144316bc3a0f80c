// Processes that live for moments: each makes the next and ends, so that all are left to whoever collects orphans, one
// after the other and for as long as the program runs.
#include "check.h"
static _Atomic unsigned long *links;

static void chain(void) {
    for (;;) {
        // Whoever kills a whole job looks for its processes one after the other, and can miss this one: its directory is gone then.
        if (told_to_end() || access(check_beat, F_OK)) _exit(0);
        atomic_fetch_add(links, 1);
        pid_t next = fork();
        if (next < 0 && errno != EAGAIN) _exit(1);
        if (next > 0) _exit(0);
    }
}
int main(void) {
    begin("proc_chain");
    links = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(links != MAP_FAILED);
    CHECK(running());
    pid_t first = (pid_t)OK(fork());
    if (first == 0) chain();
    reap(first, 0);
    unsigned long last = 0;
    int64_t since = now_ns();
    while (running()) {
        nap_us(2000);
        unsigned long now = atomic_load(links);
        if (now != last) since = now_ns();
        last = now;
        if (now_ns() - since > 20000000000LL) fail("the chain has stopped after %lu", now);
    }
    return finish();
}
