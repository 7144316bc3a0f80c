// Libraries are loaded and unloaded; functions found in them keep working; vDSO clocks agree with the system calls.
#include "check.h"
#include <dlfcn.h>
#include <sys/time.h>
int main(void) {
    begin("mem_dlopen");
    void *keep = dlopen("libm.so.6", RTLD_NOW);
    double (*ksin)(double) = (double (*)(double))dlsym(keep, "sin");
    CHECK(ksin);
    while (running()) {
        void *h = dlopen("libresolv.so.2", RTLD_NOW);
        CHECK(h);
        CHECK(dlsym(h, "ns_get16") || dlsym(h, "__ns_get16") || 1);
        volatile double x = 0.5;
        CHECK(ksin(x) > 0.479 && ksin(x) < 0.480);
        struct timespec a, b, c;
        CHECK(syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &a) == 0 && clock_gettime(CLOCK_MONOTONIC, &b) == 0 && syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &c) == 0);
        int64_t ta = a.tv_sec * 1000000000LL + a.tv_nsec, tb = b.tv_sec * 1000000000LL + b.tv_nsec, tc = c.tv_sec * 1000000000LL + c.tv_nsec;
        if (tb < ta || tb > tc) fail("vDSO clock %lld outside %lld..%lld", (long long)tb, (long long)ta, (long long)tc);
        struct timeval tv;
        CHECK(gettimeofday(&tv, NULL) == 0 && llabs((long long)tv.tv_sec - (long long)time(NULL)) <= 1);
        unsigned cpu;
        CHECK(getcpu(&cpu, NULL) == 0);
        dlclose(h);
        nap_us(1000);
    }
    return finish();
}
