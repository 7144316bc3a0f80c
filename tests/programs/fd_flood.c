// A pseudo-terminal that is always full: every byte arrives once, in order and as the settings say.
// "in": to a raw slave; "out": from it to the master; "canon": lines with erased characters, carriage returns and ends of file.
#include "check.h"
#include <pty.h>
#include <termios.h>
static struct shared { volatile int stop; volatile unsigned long lines; } *sh;
static int raw_bytes;
// Line n as it is written; returns its length, and in `want` what is read.
static size_t line(unsigned long n, char *out, char *want, size_t *wants) {
    uint64_t h = mix(n);
    size_t len = h % 16 ? 1 + (h >> 8) % 90 : 900, o = 0, w = 0;
    for (size_t i = 0; i < len; i++) {
        char c = raw_bytes ? (char)mix(n * 4096 + i) : (char)('a' + mix(n * 4096 + i) % 26);
        out[o++] = want[w++] = c;
    }
    if (!raw_bytes) {
        if (h >> 20 & 1) out[o++] = 'X', out[o++] = 0x7f;  // erased again
        if ((h >> 21) % 9 == 0) out[o++] = 4;              // end of file: the line is read without a newline
        else out[o++] = h >> 30 & 1 ? '\r' : '\n', want[w++] = '\n';
    }
    *wants = w;
    return o;
}
int main(int argc, char **argv) {
    begin("fd_flood");
    CHECK(argc == 2);
    int m, s, out = !strcmp(argv[1], "out"), canon = !strcmp(argv[1], "canon");
    raw_bytes = !canon;
    struct termios t;
    OK(openpty(&m, &s, NULL, NULL, NULL));
    OK(tcgetattr(s, &t));
    if (canon) t.c_lflag &= ~(tcflag_t)(ECHO | ISIG), t.c_iflag = ICRNL;
    else cfmakeraw(&t);
    OK(tcsetattr(s, TCSANOW, &t));
    sh = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(sh != MAP_FAILED);
    char a[2048], b[2048], got[4096];
    size_t wants;
    pid_t c = fork();
    if (c == 0) {
        begin_child();
        for (unsigned long n = 0; !sh->stop; n++) {
            size_t len = line(n, a, b, &wants);
            sh->lines = n + 1;
            full_write(out ? s : m, a, len);
        }
        _exit(0);
    }
    int from = out ? m : s, over = 0;
    for (unsigned long n = 0; !over || n < sh->lines; n++) {
        if (!over && !running()) sh->stop = over = 1;
        if (n % 512 == 0 && !over) nap_us(2000);  // the writer fills it
        if (over && n >= sh->lines) break;
        line(n, a, b, &wants);
        for (size_t d = 0; d < wants;) {
            await(from, POLLIN, "flooded terminal");
            ssize_t r = read(from, got, canon ? sizeof got : wants - d);
            if (r <= 0) fail("line %lu, byte %zu: read returned %zd", n, d, r);
            if ((size_t)r > wants - d || (canon && (size_t)r != wants)) fail("line %lu has %zd bytes, expected %zu", n, r, wants);
            for (ssize_t i = 0; i < r; i++)
                if (got[i] != b[d + (size_t)i]) fail("line %lu: byte %zu is %02x, expected %02x", n, d + (size_t)i, (unsigned char)got[i], (unsigned char)b[d + (size_t)i]);
            d += (size_t)r;
        }
    }
    reap(c, 0);
    return finish();
}
