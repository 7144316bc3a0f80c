// Names that are not UTF-8: its own file, directory, arguments, environment and thread; a mapped file, an open file, a
// FIFO, a socket.
#include "check.h"
#include <sys/socket.h>
#include <sys/un.h>
#define ODD "\xe9\xff\x80"
#define ARGUMENT "a" ODD "\\xe9"
static const char *const value = "v" ODD "\\";

// Goes on as a program of an odd name, in an odd directory.
static void become_odd(const char *name) {
    char dir[64], self[PATH_MAX], *argv[] = {(char *)name, (char *)ARGUMENT, NULL};
    ssize_t n = OK(readlink("/proc/self/exe", self, sizeof self - 1));
    self[n] = 0;
    snprintf(dir, sizeof dir, "dir" ODD ".%d", getpid());
    OK(mkdir(dir, 0755));
    OK(chdir(dir));
    int from = (int)OK(open(self, O_RDONLY | O_CLOEXEC)), to = (int)OK(open("program" ODD, O_WRONLY | O_CREAT | O_CLOEXEC, 0755));
    char buf[65536];
    while ((n = OK(read(from, buf, sizeof buf))) > 0) EQ(write(to, buf, (size_t)n), n);
    OK(close(to));
    OK(setenv("NAME", value, 1));
    OK(execv("program" ODD, argv));
}

static int ends_with(const char *text, const char *end) {
    size_t n = strlen(text), m = strlen(end);
    return n >= m && !strcmp(text + n - m, end);
}

static void check_link(const char *link, const char *end) {
    char to[PATH_MAX];
    ssize_t n = OK(readlink(link, to, sizeof to - 1));
    to[n] = 0;
    if (!ends_with(to, end)) fail("%s leads to %s", link, to);
}

static void check_file(const char *file, const char *word) {
    char raw[65536];
    int fd = (int)OK(open(file, O_RDONLY | O_CLOEXEC));
    ssize_t n = OK(read(fd, raw, sizeof raw));
    OK(close(fd));
    if (!memmem(raw, (size_t)n, word, strlen(word))) fail("%s lacks a word", file);
}

static void check_mapped(const char *name) {
    char line[PATH_MAX + 256];
    FILE *maps = fopen("/proc/self/maps", "re");
    CHECK(maps);
    while (fgets(line, sizeof line, maps)) {
        line[strcspn(line, "\n")] = 0;
        if (ends_with(line, name)) {
            fclose(maps);
            return;
        }
    }
    fail("nothing of that name is mapped");
}

int main(int argc, char **argv) {
    begin("odd_names");
    if (argc < 2) become_odd(argv[0]);
    char dir[64], line[64];
    snprintf(dir, sizeof dir, "/dir" ODD ".%d", getpid());
    OK(prctl(PR_SET_NAME, "n" ODD));
    int out = (int)OK(open("file" ODD, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644)), map = (int)OK(open("mapped" ODD, O_RDWR | O_CREAT | O_CLOEXEC, 0644));
    char page[4096];
    fill(page, sizeof page, 7);
    full_write(map, page, sizeof page);
    char *private = mmap(NULL, sizeof page, PROT_READ | PROT_WRITE, MAP_PRIVATE, map, 0);
    char *shared = mmap(NULL, sizeof page, PROT_READ | PROT_WRITE, MAP_SHARED, map, 0);
    CHECK(private != MAP_FAILED && shared != MAP_FAILED);
    OK(close(map));
    OK(mkfifo("fifo" ODD, 0600));
    int fifo = (int)OK(open("fifo" ODD, O_RDWR | O_CLOEXEC));
    struct sockaddr_un name = {.sun_family = AF_UNIX, .sun_path = "socket" ODD};
    int listening = (int)OK(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    OK(bind(listening, (void *)&name, sizeof name));
    OK(listen(listening, 4));
    pid_t ended = (pid_t)OK(fork());
    if (!ended) _exit(0);
    siginfo_t info;
    OK(waitid(P_PID, (id_t)ended, &info, WEXITED | WNOWAIT));
    for (unsigned long i = 0; running(); i++) {
        nap_us(1500);
        CHECK(ends_with(getcwd(page, sizeof page), dir));
        check_link("/proc/self/cwd", dir);
        check_link("/proc/self/exe", "/program" ODD);
        CHECK(!strcmp(argv[1], ARGUMENT) && !strcmp(getenv("NAME"), value));
        check_file("/proc/self/cmdline", ARGUMENT);
        check_file("/proc/self/environ", value);
        check_file("/proc/self/comm", "n" ODD);
        snprintf(line, sizeof line, "/proc/%d/comm", ended);
        check_file(line, "n" ODD);
        check_mapped("/mapped" ODD);
        verify(private, sizeof page, 7, "private");
        verify(shared, sizeof page, 7, "shared");
        int n = snprintf(line, sizeof line, "line %lu\n", i);
        full_write(out, line, (size_t)n);
        struct stat open_file, named;
        OK(fstat(out, &open_file));
        OK(stat("file" ODD, &named));
        CHECK(open_file.st_ino == named.st_ino && open_file.st_dev == named.st_dev);
        full_write(fifo, line, (size_t)n);
        char got[64];
        int late = (int)OK(open("fifo" ODD, O_RDONLY | O_NONBLOCK | O_CLOEXEC));
        full_read(late, got, (size_t)n);
        CHECK(!memcmp(got, line, (size_t)n));
        OK(close(late));
        int to = (int)OK(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
        OK(connect(to, (void *)&name, sizeof name));
        int from = (int)OK(accept4(listening, NULL, NULL, SOCK_CLOEXEC));
        full_write(to, line, (size_t)n);
        full_read(from, got, (size_t)n);
        CHECK(!memcmp(got, line, (size_t)n));
        OK(close(to));
        OK(close(from));
    }
    return finish();
}
