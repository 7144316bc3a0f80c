// The main thread has ended with pthread_exit (a zombie leader); the other threads carry the process on.
#include "check.h"
static void *work(void *arg) {
    (void)arg;
    pthread_t main_thread = *(pthread_t *)arg;
    CHECK(pthread_join(main_thread, NULL) == 0);
    while (running()) nap_us(3000);
    no_children();
    exit(finish());
}
int main(void) {
    begin("thr_leader_gone");
    static pthread_t self, t, u;
    self = pthread_self();
    CHECK(pthread_create(&t, NULL, work, &self) == 0);
    (void)u;
    pthread_exit(NULL);
}
