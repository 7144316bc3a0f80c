// Names of pseudo-terminals: what /dev/pts/N was called at the start leads to the same terminal for good, also where it
// is opened for the first time long after. With "said", standard input is a terminal, and what that is called is
// printed whenever it is another name.
#include "check.h"
#include <sys/ioctl.h>
#include <termios.h>
enum { ALL = 4, HELD = 1, LATE = 3 };
static int m[ALL];
static char name[ALL][32];

static int make(char *as) {
    int fd = (int)OK(posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
    struct termios t;
    OK(unlockpt(fd));
    OK(ptsname_r(fd, as, sizeof name[0]));
    OK(tcgetattr(fd, &t));
    t.c_oflag &= ~(tcflag_t)OPOST;
    OK(tcsetattr(fd, TCSANOW, &t));
    return fd;
}
// The name of a terminal. One call in which the program was restarted compares the terminal of then with that of now.
static const char *name_of(int fd) {
    const char *said = ttyname(fd);
    return said ? said : ttyname(fd);
}
// What is written to the slave of that name arrives at this master.
static void leads(int master, const char *to) {
    char now[32], line[32], got[32];
    CHECK(!ptsname_r(master, now, sizeof now));
    if (strcmp(now, to)) fail("%s is called %s", to, now);
    int s = (int)OK(open(to, O_RDWR | O_NOCTTY | O_CLOEXEC));
    const char *said = name_of(s);
    if (!said || strcmp(said, to)) fail("an open %s is called %s", to, said ? said : strerror(errno));
    int n = snprintf(line, sizeof line, "%s %lu", to, check_round);
    full_write(s, line, (size_t)n);
    await(master, POLLIN, to);
    if (read(master, got, sizeof got) != n || memcmp(line, got, (size_t)n)) fail("%s is another terminal's name", to);
    OK(close(s));
}
int main(int argc, char **argv) {
    begin("fd_ptynames");
    int said = argc > 1 && !strcmp(argv[1], "said");
    char own[64] = "-";
    for (int i = 0; i < ALL; i++) m[i] = make(name[i]);
    int held = (int)OK(open(name[HELD], O_RDWR | O_NOCTTY));
    int outside[2] = {-1, -1};
    pid_t session;
    if (said) {
        outside[0] = (int)OK(open("/dev/tty", O_RDWR));
        outside[1] = open(name_of(0), O_RDWR);
        if (outside[1] < 0) EQ(errno, EACCES);  // another user's
    }
    if (said) printf("its names: %s %s %s %s.\n", name[0], name[1], name[2], name[3]);
    while (running()) {
        char more[32];
        for (int i = 0; i < LATE; i++) leads(m[i], name[i]);
        const char *called = name_of(held);
        CHECK(called && !strcmp(called, name[HELD]));
        int another = make(more);
        for (int i = 0; i < ALL; i++)
            if (!strcmp(more, name[i])) fail("a new terminal is called %s too", more);
        leads(another, more);
        OK(close(another));
        nap_us(2000);
        // The terminal of its session stays that one, whatever the number of that is.
        for (int i = 0; i < 2; i++)
            if (outside[i] >= 0) OK(ioctl(outside[i], TIOCGSID, &session));
        const char *now = said ? name_of(0) : NULL;
        if (said && strcmp(own, now ? now : strerror(errno))) {
            snprintf(own, sizeof own, "%s", now ? now : strerror(errno));
            printf("on %s.\n", own);
        }
    }
    leads(m[LATE], name[LATE]);
    return finish();
}
