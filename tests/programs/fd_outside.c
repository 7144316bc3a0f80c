// TCP to a server outside the job (BELAY_TEST_OUTSIDE=port). It works on when the program continues; after a restart it
// is dead with ECONNRESET (or end of file), at once, never a hang.
#include "check.h"
#include <arpa/inet.h>
#include <sys/socket.h>
static int dial(int port) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int s = (int)OK(socket(AF_INET, SOCK_STREAM, 0));
    OK(connect(s, (struct sockaddr *)&a, sizeof a));
    return s;
}
int main(void) {
    begin("fd_outside");
    const char *e = getenv("BELAY_TEST_OUTSIDE");
    CHECK(e);
    signal(SIGPIPE, SIG_IGN);
    int port = atoi(e), s = dial(port), resets = 0;
    for (uint64_t r = 1; running(); r++) {
        nap_us(2000);
        uint64_t v = mix(r), got = 0;
        if (write(s, &v, 8) != 8) {
            if (errno != ECONNRESET && errno != EPIPE) fail("write: %s", strerror(errno));
            goto again;
        }
        struct pollfd p = {s, POLLIN, 0};
        if (poll(&p, 1, 10000) != 1) fail("no answer and no error within 10 s: a hang");
        ssize_t n = recv(s, &got, 8, MSG_WAITALL);
        if (n == 8) { EQ(got, v); continue; }
        if (n < 0 && errno != ECONNRESET) fail("read: %s", strerror(errno));
        if (n == 0) fail("the dead connection reads as a proper end of file, expected ECONNRESET");
    again:
        close(s);
        resets++;
        s = dial(port);
    }
    printf("connection was reset %d times\n", resets);
    return finish();
}
