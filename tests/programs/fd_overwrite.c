// A file overwritten in place: its contents go back with the program.
#include "check.h"
int main(void) {
    begin("fd_overwrite");
    char path[64];
    snprintf(path, sizeof path, "records.%d", getpid());
    int fd = (int)OK(open(path, O_RDWR | O_CREAT | O_TRUNC, 0600));
    static uint64_t rec[64][64], got[64];
    for (uint64_t r = 0; running(); r++) {
        size_t i = mix(r) % 64;
        fill(rec[i], sizeof rec[i], r);
        EQ(pwrite(fd, rec[i], sizeof rec[i], (off_t)(i * sizeof rec[i])), sizeof rec[i]);
        for (size_t k = 0; k < 64; k++) {
            ssize_t n = pread(fd, got, sizeof got, (off_t)(k * sizeof got));
            if (n == (ssize_t)sizeof got && memcmp(got, rec[k], sizeof got)) fail("record %zu of the file differs from memory", k);
        }
        if (r % 16 == 0) nap_us(500);
    }
    return finish();
}
