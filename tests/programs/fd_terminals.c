// Everything that can be set of a pseudo-terminal: one terminal for each flag and each control character of termios,
// one for each speed, and for each setting of another kind. Each is read back as long as the program runs. What this
// kernel or this user may not set is left out and named.
#include "check.h"
#include <sys/ioctl.h>
#include <asm/termbits.h>
enum { MOST = 128 };
struct seen { struct termios2 t; struct termios locked; struct winsize size; int discipline, packet, slave_locked, exclusive, soft, unread; mode_t mode; long flags[2]; };
static struct { char name[40]; int m, s; struct seen want; } all[MOST];
static int n;

static int open_pair(const char *fmt, unsigned long v) {
    int i = n++, locked = 0;
    char path[32];
    CHECK(i < MOST);
    snprintf(all[i].name, sizeof all[i].name, fmt, v);
    all[i].m = (int)OK(open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC));
    OK(ioctl(all[i].m, TIOCSPTLCK, &locked));
    unsigned number;
    OK(ioctl(all[i].m, TIOCGPTN, &number));
    snprintf(path, sizeof path, "/dev/pts/%u", number);
    all[i].s = (int)OK(open(path, O_RDWR | O_NOCTTY));
    return i;
}
static struct seen look(int i) {
    struct seen v;
    memset(&v, 0, sizeof v);
    struct stat st;
    OK(ioctl(all[i].s, TCGETS2, &v.t));
    OK(ioctl(all[i].s, TIOCGLCKTRMIOS, &v.locked));
    OK(ioctl(all[i].s, TIOCGWINSZ, &v.size));
    OK(ioctl(all[i].s, TIOCGETD, &v.discipline));
    OK(ioctl(all[i].m, TIOCGPKT, &v.packet));
    OK(ioctl(all[i].m, TIOCGPTLCK, &v.slave_locked));
    OK(ioctl(all[i].s, TIOCGEXCL, &v.exclusive));
    OK(ioctl(all[i].s, TIOCGSOFTCAR, &v.soft));
    OK(ioctl(all[i].m, FIONREAD, &v.unread));
    OK(fstat(all[i].s, &st));
    v.mode = st.st_mode;
    v.flags[0] = fcntl(all[i].m, F_GETFL);
    v.flags[1] = fcntl(all[i].s, F_GETFL);
    return v;
}
static void show(const struct seen *v, char *b, size_t len) {
    int at = snprintf(b, len, "%x %x %x %x line %d speeds %u %u cc", v->t.c_iflag, v->t.c_oflag, v->t.c_cflag, v->t.c_lflag, v->t.c_line, v->t.c_ispeed, v->t.c_ospeed);
    for (int i = 0; i < NCCS; i++) at += snprintf(b + at, len - (size_t)at, " %x", v->t.c_cc[i]);
    snprintf(b + at, len - (size_t)at, " locked %x %x %x %x size %d %d %d %d discipline %d packet %d lock %d exclusive %d soft %d unread %d mode %o flags %lx %lx", v->locked.c_iflag, v->locked.c_oflag, v->locked.c_cflag,
             v->locked.c_lflag, v->size.ws_row, v->size.ws_col, v->size.ws_xpixel, v->size.ws_ypixel, v->discipline, v->packet, v->slave_locked, v->exclusive, v->soft, v->unread, v->mode, v->flags[0], v->flags[1]);
}
static void settings(int i, int which, unsigned bits) {
    struct termios2 t;
    OK(ioctl(all[i].s, TCGETS2, &t));
    *(which == 0 ? &t.c_iflag : which == 1 ? &t.c_oflag : which == 2 ? &t.c_cflag : &t.c_lflag) ^= bits;
    OK(ioctl(all[i].s, TCSETSF2, &t));
}
// Every second flag of each word in one terminal, the others in the next, and each that changes how it works in one of its own.
static void flags(void) {
    for (int which = 0; which < 4; which++)
        for (int odd = 0; odd < 2; odd++) settings(open_pair("flags of word %lu", (unsigned long)which), which, which == 2 ? (odd ? CSTOPB | PARODD | CMSPAR | HUPCL | CRTSCTS : PARENB | CREAD | CLOCAL | ADDRB) : odd ? 0xaaaaaaaa : 0x55555555);
    for (int which = 0; which < 4; which++)
        for (int bit = 0; bit < 17; bit++)
            if (which != 2) settings(open_pair(which == 0 ? "input flag %lo" : which == 1 ? "output flag %lo" : "local flag %lo", 1ul << bit), which, 1u << bit);
    int i = open_pair("control characters", 0);
    struct termios2 t;
    OK(ioctl(all[i].s, TCGETS2, &t));
    for (int c = 0; c < NCCS; c++) t.c_cc[c] = (cc_t)(0x41 + c);
    OK(ioctl(all[i].s, TCSETS2, &t));
    i = open_pair("characters per read", 0);
    OK(ioctl(all[i].s, TCGETS2, &t));
    t.c_lflag &= ~(tcflag_t)ICANON;
    t.c_cc[VMIN] = 7;
    t.c_cc[VTIME] = 9;
    OK(ioctl(all[i].s, TCSETSW2, &t));
    static const unsigned speeds[] = {B0, B50, B300, B9600, B38400, B115200, B4000000};
    for (size_t k = 0; k < sizeof speeds / sizeof *speeds; k++) {
        i = open_pair("speed %lo", speeds[k]);
        OK(ioctl(all[i].s, TCGETS2, &t));
        t.c_cflag = (t.c_cflag & ~(tcflag_t)(CBAUD | CIBAUD)) | speeds[k] | B1200 << IBSHIFT;
        OK(ioctl(all[i].s, TCSETS2, &t));
    }
    i = open_pair("speeds of its own", 0);
    OK(ioctl(all[i].s, TCGETS2, &t));
    t.c_cflag = (t.c_cflag & ~(tcflag_t)(CBAUD | CIBAUD)) | BOTHER | BOTHER << IBSHIFT;
    t.c_ispeed = 12345;
    t.c_ospeed = 54321;
    OK(ioctl(all[i].s, TCSETS2, &t));
}
static void others(void) {
    int on = 1, i = open_pair("TIOCSWINSZ", 0);
    OK(ioctl(all[i].m, TIOCSWINSZ, &(struct winsize){12, 345, 678, 910}));
    i = open_pair("TIOCPKT", 0);
    OK(ioctl(all[i].m, TIOCPKT, &on));
    i = open_pair("TIOCSPTLCK", 0);
    OK(ioctl(all[i].m, TIOCSPTLCK, &on));
    i = open_pair("TIOCEXCL", 0);
    OK(ioctl(all[i].s, TIOCEXCL));
    i = open_pair("TIOCSSOFTCAR", 0);
    OK(ioctl(all[i].s, TIOCSSOFTCAR, &on));
    i = open_pair("FIONBIO", 0);
    OK(ioctl(all[i].m, FIONBIO, &on));
    i = open_pair("mode", 0);
    OK(fchmod(all[i].s, 0604));
    if (!geteuid()) {
        i = open_pair("TIOCSLCKTRMIOS", 0);
        struct termios locked = {.c_iflag = 0x55, .c_oflag = 0xaa, .c_lflag = 0x5a, .c_cflag = 0xa5};
        locked.c_cc[VINTR] = 1;
        OK(ioctl(all[i].s, TIOCSLCKTRMIOS, &locked));
    }
}
// Whether one side takes what is written to it.
static int takes(int fd) { return poll(&(struct pollfd){fd, POLLOUT, 0}, 1, 0) == 1; }
static void is_stopped(int fd) {
    int flags = fcntl(fd, F_GETFL);
    CHECK(!takes(fd));
    OK(fcntl(fd, F_SETFL, flags | O_NONBLOCK));
    EQ(write(fd, "y", 1), -1);
    EQ(errno, EAGAIN);
    OK(fcntl(fd, F_SETFL, flags));
}
// What is written to a side that has been started comes out on the other.
static void flows(int from, int to, char what) {
    char b[8];
    await(from, POLLOUT, "a terminal that has been started");
    EQ(write(from, &what, 1), 1);
    await(to, POLLIN, "a terminal that has been started");
    EQ(read(to, b, sizeof b), 1);
}
// Output that has been stopped stays so until it is started again.
static void stopped(int fd, int other, char what) {
    is_stopped(fd);
    OK(ioctl(fd, TCXONC, TCOON));
    flows(fd, other, what);
    OK(ioctl(fd, TCXONC, TCOOFF));
    is_stopped(fd);
}
static void key(int i, char what) {
    EQ(write(all[i].m, &what, 1), 1);
    for (int64_t t0 = now_ns(); takes(all[i].s) != (what == 'Q' - 64);)
        if (now_ns() - t0 > 10000000000LL) fail("key %d does nothing", what);
}
static void stopped_by_key(int i) {
    is_stopped(all[i].s);
    OK(ioctl(all[i].s, TCXONC, TCOON));
    is_stopped(all[i].s);
    key(i, 'Q' - 64);
    flows(all[i].s, all[i].m, 'x');
    key(i, 'S' - 64);
}
int main(void) {
    begin("fd_terminals");
    flags();
    others();
    int stop = open_pair("TCOOFF", 0), master = open_pair("TCOOFF of the master", 0), raw = open_pair("TCOOFF without editing", 0), keyed = open_pair("Ctrl-S", 0);
    struct termios2 quiet;
    OK(ioctl(all[master].s, TCGETS2, &quiet));
    quiet.c_lflag &= ~(tcflag_t)ECHO;
    OK(ioctl(all[master].s, TCSETS2, &quiet));
    quiet.c_lflag &= ~(tcflag_t)ICANON;
    OK(ioctl(all[raw].s, TCSETS2, &quiet));
    OK(ioctl(all[stop].s, TCXONC, TCOOFF));
    OK(ioctl(all[master].m, TCXONC, TCOOFF));
    OK(ioctl(all[raw].s, TCXONC, TCOOFF));
    key(keyed, 'S' - 64);
    for (int i = 0; i < n; i++) all[i].want = look(i);
    while (running()) {
        nap_us(3000);
        char what[1900] = "";
        for (int i = 0; i < n; i++) {
            struct seen now = look(i);
            if (!memcmp(&now, &all[i].want, sizeof now)) continue;
            char is[600], was[600];
            show(&now, is, sizeof is);
            show(&all[i].want, was, sizeof was);
            size_t at = strlen(what);
            snprintf(what + at, sizeof what - at, "%s is\n%s\nwas\n%s\n", all[i].name, is, was);
        }
        if (what[0]) fail("%s", what);
        stopped(all[stop].s, all[stop].m, 'x');
        stopped(all[raw].s, all[raw].m, 'x');
        stopped(all[master].m, all[master].s, '\n');
        stopped_by_key(keyed);
    }
    return finish();
}
