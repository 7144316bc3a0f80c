// Files that the program makes under one name and moves to another, as programs write their results: whoever goes on after a
// restart finds the first name again, with what it had written so far. A second descriptor keeps each open until it is read.
#include "check.h"
#define BLOCK 4096
#define BLOCKS 12
int main(void) {
    begin("fd_renamed");
    char next[64], result[64];
    snprintf(next, sizeof next, "next.%d", getpid());
    snprintf(result, sizeof result, "result.%d", getpid());
    static uint64_t block[BLOCK / 8];
    int before = -1;
    for (uint64_t n = 1; running(); n++) {
        int fd = (int)OK(open(next, O_WRONLY | O_CREAT | O_TRUNC, 0644));
        for (uint64_t i = 0; i < BLOCKS; i++) {
            fill(block, BLOCK, n * BLOCKS + i);
            EQ(write(fd, block, BLOCK), BLOCK);
            if (i % 4 == 0) nap_us(300);
        }
        OK(rename(next, result));
        int in = (int)OK(open(result, O_RDONLY));
        OK(close(fd));
        for (uint64_t i = 0; i < BLOCKS; i++) {
            EQ(read(in, block, BLOCK), BLOCK);
            verify(block, BLOCK, n * BLOCKS + i, "the result");
            if (i % 4 == 0) nap_us(300);
        }
        EQ(read(in, block, BLOCK), 0);
        if (before != -1) OK(close(before));
        before = in;
    }
    return finish();
}
