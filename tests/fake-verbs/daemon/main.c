// fake-verbsd: the adapters, the switch and the subnet manager of the hosts that share a directory.
//
//     fake-verbsd serve DIR [--roce] [NAME=VALUE...]   serves until it is killed; prints "ready" when processes may
//     come fake-verbsd set DIR NAME=VALUE...                faults from now on fake-verbsd restart DIR HOST the host
//     goes down and comes back with other numbers fake-verbsd move DIR FROM TO                     processes that call
//     themselves FROM run on TO when they open a device fake-verbsd stats DIR                            what has
//     happened
#include "fvd.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static void die(const char *what) {
    fprintf(stderr, "fake-verbsd: %s: %s\n", what, strerror(errno));
    exit(1);
}

static struct sockaddr_un address(const char *dir) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    if (snprintf(a.sun_path, sizeof a.sun_path, "%s/" FV_SOCKET, dir) >= (int)sizeof a.sun_path) {
        errno = ENAMETOOLONG;
        die(dir);
    }
    return a;
}

// Each run has a number of its own, from which all other numbers follow.
static uint32_t next_epoch(const char *dir) {
    char path[4096], text[16] = "";
    snprintf(path, sizeof path, "%s/epoch", dir);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0 || read(fd, text, sizeof text - 1) < 0) die(path);
    uint32_t n = (uint32_t)strtoul(text, NULL, 10) + 1;
    int length = snprintf(text, sizeof text, "%u\n", n);
    if (pwrite(fd, text, (size_t)length, 0) != length || close(fd)) die(path);
    return n;
}

static int listen_in(const char *dir) {
    struct sockaddr_un a = address(dir);
    unlink(a.sun_path);
    int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (s < 0 || bind(s, (struct sockaddr *)&a, sizeof a) || chmod(a.sun_path, 0666) || listen(s, 1024))
        die(a.sun_path);
    return s;
}

static void watch(int epoll, int fd, void *what) {
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = what};
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &e)) die("epoll_ctl");
}

static void welcome(int epoll, int listener) {
    for (int s; (s = accept4(listener, NULL, NULL, SOCK_CLOEXEC)) >= 0;) watch(epoll, s, ctx_new(s));
}

static int wait_for(int epoll, struct epoll_event *e, int count, bool busy) {
    uint64_t next = timers_next(), now = now_ns(), left = busy || next <= now ? 0 : next - now;
    struct timespec t = {(time_t)(left / 1000000000), (long)(left % 1000000000)};
    return epoll_pwait2(epoll, e, count, next == UINT64_MAX && !busy ? NULL : &t, NULL);
}

static void serve(const char *dir) {
    struct epoll_event e[64];
    bool busy = false;
    epoch = next_epoch(dir);
    int listener = listen_in(dir), epoll = epoll_create1(EPOLL_CLOEXEC);
    if (epoll < 0) die("epoll_create1");
    watch(epoll, listener, NULL);
    puts("ready");
    fflush(stdout);
    for (;;) {
        int n = wait_for(epoll, e, 64, busy);
        if (n < 0 && errno != EINTR) die("epoll_pwait2");
        for (int i = 0; i < n; i++) {
            struct ctx *c = e[i].data.ptr;
            if (!c) welcome(epoll, listener);
            else if (!c->dead && !ctx_serve(c)) ctx_die(c);
        }
        ctxs_bury();
        timers_fire();
        busy = run_some();
    }
}

static void ask(const char *dir, enum fv_op op, const char *text) {
    struct sockaddr_un a = address(dir);
    struct fv_request q = {.op = op};
    struct fv_reply r;
    snprintf(q.text, sizeof q.text, "%s", text);
    int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (s < 0 || connect(s, (struct sockaddr *)&a, sizeof a)) die(a.sun_path);
    if (send(s, &q, sizeof q, MSG_NOSIGNAL) != (ssize_t)sizeof q || recv(s, &r, sizeof r, 0) != (ssize_t)sizeof r)
        die("ask");
    errno = r.error;
    if (r.error) die(text);
    if (op == FV_STATS) fputs(r.text, stdout);
}

static void usage(void) {
    fputs("usage: fake-verbsd serve DIR [--roce] [NAME=VALUE...] | set DIR NAME=VALUE... | restart DIR HOST | move DIR "
          "FROM TO | readdress DIR HOST [IPV4] | stats DIR\n",
          stderr);
    exit(2);
}

int main(int argc, char **argv) {
    char text[512] = "";
    if (argc < 3) usage();
    for (int i = 3; i < argc; i++) {
        if (!strcmp(argv[i], "--roce")) {
            link_layer = IBV_LINK_LAYER_ETHERNET;
            continue;
        }
        if (strlen(text) + strlen(argv[i]) + 2 > sizeof text) usage();
        if (*text) strcat(text, " ");
        strcat(text, argv[i]);
    }
    if (!strcmp(argv[1], "serve")) {
        // One descriptor and some mappings for each context and channel.
        struct rlimit most;
        if (!getrlimit(RLIMIT_NOFILE, &most)) {
            most.rlim_cur = most.rlim_max;
            setrlimit(RLIMIT_NOFILE, &most);
        }
        signal(SIGPIPE, SIG_IGN);
        if (faults_set(text)) {
            errno = EINVAL;
            die(text);
        }
        serve(argv[2]);
    } else if (!strcmp(argv[1], "set")) ask(argv[2], FV_SET, text);
    else if (!strcmp(argv[1], "restart")) ask(argv[2], FV_RESTART, text);
    else if (!strcmp(argv[1], "move")) ask(argv[2], FV_MOVE, text);
    else if (!strcmp(argv[1], "readdress")) ask(argv[2], FV_READDRESS, text);
    else if (!strcmp(argv[1], "stats")) ask(argv[2], FV_STATS, text);
    else usage();
    return 0;
}
