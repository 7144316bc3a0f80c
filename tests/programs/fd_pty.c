// Pseudo-terminals: settings, window size, data in flight, a child whose controlling terminal it is, line discipline.
#include "check.h"
#include <pty.h>
#include <sys/ioctl.h>
#include <termios.h>
static int m;
static void get(char *b, size_t want) {
    for (size_t d = 0; d < want;) {
        await(m, POLLIN, "pty master");
        ssize_t r = read(m, b + d, want - d);
        CHECK(r > 0);
        d += (size_t)r;
    }
}
int main(void) {
    begin("fd_pty");
    int s;
    struct termios t, now;
    struct winsize w = {37, 111, 5, 6}, wn;
    OK(openpty(&m, &s, NULL, NULL, &w));
    OK(tcgetattr(s, &t));
    t.c_lflag &= ~(tcflag_t)ECHO;
    t.c_oflag &= ~(tcflag_t)OPOST;
    t.c_cc[VINTR] = 'Q' - 64;
    OK(tcsetattr(s, TCSANOW, &t));
    OK(tcgetattr(s, &t));
    struct stat own, is;
    // (An ordinary user's terminal is that user's.)
    if (!geteuid()) OK(fchown(s, 12345, 23456));
    OK(fchmod(s, 0612));
    // A second one, which nobody else may open any more.
    int m2, s2, exclusive;
    OK(openpty(&m2, &s2, NULL, NULL, NULL));
    OK(ioctl(s2, TIOCEXCL));
    full_write(m2, "kept\n", 5);
    full_write(s2, "held", 4);
    OK(ioctl(m2, TIOCEXCL));
    OK(fstat(s, &own));
    pid_t c = fork();
    if (c == 0) {
        begin_child();
        close(m);
        OK(setsid());
        OK(ioctl(s, TIOCSCTTY, 0));
        pid_t g = 0;
        int tty = (int)OK(open("/dev/tty", O_RDWR));
        char line[256];
        signal(SIGINT, SIG_IGN);
        for (;;) {
            ssize_t n = read(tty, line, sizeof line);
            if (n < 0) fail("read from /dev/tty: %s", strerror(errno));
            OK(ioctl(tty, TIOCGPGRP, &g));
            EQ(g, getpgrp());
            EQ(getsid(0), getpid());
            if (!strncmp(line, "end", 3)) _exit(12);
            full_write(tty, line, (size_t)n);  // echoes the line
        }
    }
    char line[64], back[64];
    int gone, dead;
    OK(openpty(&gone, &dead, NULL, NULL, NULL));
    close(gone);
    while (running()) {
        OK(fstat(s, &is));
        EQ(is.st_uid, own.st_uid);
        EQ(is.st_gid, own.st_gid);
        EQ(is.st_mode, own.st_mode);
        OK(ioctl(s2, TIOCGEXCL, &exclusive));
        EQ(exclusive, 1);
        OK(ioctl(m2, TIOCGEXCL, &exclusive));
        EQ(exclusive, 1);
        OK(ioctl(s, TIOCGEXCL, &exclusive));
        EQ(exclusive, 0);
        int n = snprintf(line, sizeof line, "line %lu of many\n", check_round);
        full_write(m, line, 4);  // half a line waits in the line discipline
        nap_us(3000);
        full_write(m, line + 4, (size_t)n - 4);
        if (check_round % 2) nap_us(3000);
        get(back, (size_t)n);
        if (memcmp(line, back, (size_t)n)) fail("the terminal answered %.*s for %s", n, back, line);
        OK(tcgetattr(s, &now));
        if (memcmp(&now, &t, sizeof t)) fail("terminal settings changed");
        OK(ioctl(m, TIOCGWINSZ, &wn));
        CHECK(!memcmp(&w, &wn, sizeof w));
        CHECK(!strncmp(ptsname(m), "/dev/pts/", 9));  // its number may be taken by another terminal at restart
        struct stat st;
        OK(fstat(s, &st));
        CHECK(S_ISCHR(st.st_mode));
        // One that has hung up stays dead.
        EQ(read(dead, back, 1), 0);
        EQ(write(dead, "x", 1), -1);
        EQ(errno, EIO);
        EQ(isatty(dead), 0);
    }
    char kept[16];
    EQ(read(s2, kept, sizeof kept), 5);
    CHECK(!memcmp(kept, "kept\n", 5));
    full_write(m, "end\n", 4);
    reap(c, 12 << 8);
    return finish();
}
