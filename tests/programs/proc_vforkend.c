// Ends as soon as its child has, which has its memory: a checkpoint that waits for the child meets the end.
#include <stdlib.h>
#include <unistd.h>
int main(void) {
    usleep(200000);
    pid_t child = vfork();
    if (!child) {
        usleep(200000);
        _exit(0);
    }
    exit(child < 0 ? 1 : 5);
}
