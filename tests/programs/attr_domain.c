// The execution domain (personality) is each thread's own: all have what the process had when they were made.
#include "check.h"
#include <pthread.h>
#include <sys/personality.h>
static _Atomic int ends, looked;
static int want;

static void *look(void *unused) {
    while (!ends) {
        EQ(personality(0xffffffff), want);
        looked++;
        nap_us(500);
    }
    return unused;
}

int main(void) {
    begin("attr_domain");
    want = (int)OK(personality(0xffffffff)) | ADDR_NO_RANDOMIZE | STICKY_TIMEOUTS;
    OK(personality((unsigned long)want));
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) EQ(pthread_create(&threads[i], NULL, look, NULL), 0);
    while (running()) {
        nap_us(1000);
        EQ(personality(0xffffffff), want);
    }
    ends = 1;
    for (int i = 0; i < 3; i++) EQ(pthread_join(threads[i], NULL), 0);
    CHECK(looked > 0);
    return finish();
}
