// Many processes with many descriptors each, in all more than one process may have: sockets, pipes, eventfds and memory
// files, data in flight in each, and an epoll instance that watches them. argv: processes, groups of descriptors in
// each.
#include "check.h"
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>

// Seven descriptors.
struct group { int stream[2], dgram[2], pipe[2], event; };
static struct group *all;
static int groups, shared[2], epoll, memory;

static uint64_t word(int process, int i, uint64_t round) { return mix((uint64_t)process << 40 ^ (uint64_t)i << 20 ^ round); }

static void put(int process, int i, uint64_t round) {
    uint64_t v = word(process, i, round);
    EQ(write(all[i].stream[0], &v, 8), 8);
    EQ(write(all[i].dgram[1], &v, 8), 8);
    EQ(write(all[i].pipe[1], &v, 8), 8);
    v = 1 + v % 1000;
    EQ(write(all[i].event, &v, 8), 8);
}

static void get(int process, int i, uint64_t round) {
    uint64_t v, want = word(process, i, round);
    EQ(recv(all[i].stream[1], &v, 8, MSG_DONTWAIT), 8);
    EQ(v, want);
    EQ(recv(all[i].dgram[0], &v, 8, MSG_DONTWAIT), 8);
    EQ(v, want);
    EQ(read(all[i].pipe[0], &v, 8), 8);
    EQ(v, want);
    EQ(read(all[i].event, &v, 8), 8);
    EQ(v, 1 + want % 1000);
}

static void make(int process) {
    all = calloc((size_t)groups, sizeof *all);
    epoll = (int)OK(epoll_create1(0));
    memory = (int)OK(memfd_create("crowd", 0));
    for (int i = 0; i < groups; i++) {
        struct group *g = &all[i];
        OK(socketpair(AF_UNIX, SOCK_STREAM, 0, g->stream));
        OK(socketpair(AF_UNIX, SOCK_DGRAM, 0, g->dgram));
        OK(pipe2(g->pipe, O_NONBLOCK));
        g->event = (int)OK(eventfd(0, EFD_NONBLOCK));
        struct epoll_event e = {.events = EPOLLIN, .data.u64 = (uint64_t)i};
        OK(epoll_ctl(epoll, EPOLL_CTL_ADD, g->stream[1], &e));
        e.events |= EPOLLET;
        OK(epoll_ctl(epoll, EPOLL_CTL_ADD, g->event, &e));
        put(process, i, 0);
    }
    uint64_t v = word(process, 0, 0);
    EQ(pwrite(memory, &v, 8, 4096), 8);
}

static int live(int process) {
    begin_child();
    make(process);
    char ready = 1;
    EQ(write(shared[1], &ready, 1), 1);
    uint64_t round = 0, v;
    // In each round one group of hundred; all of them in the end.
    for (; running(); round++) {
        for (int i = (int)(round % 100); i < groups; i += 100) {
            get(process, i, round / 100);
            put(process, i, round / 100 + 1);
        }
        nap_us(2000);
    }
    struct epoll_event e[64];
    CHECK(OK(epoll_wait(epoll, e, 64, 0)) > 0);
    for (int i = 0; i < groups; i++) get(process, i, round / 100 + ((uint64_t)i % 100 < round % 100));
    EQ(pread(memory, &v, 8, 4096), 8);
    EQ(v, word(process, 0, 0));
    EQ(fcntl(shared[0], F_GETFL) & O_NONBLOCK, O_NONBLOCK);
    return 0;
}

int main(int argc, char **argv) {
    begin("fd_crowd");
    int processes = argc > 1 ? atoi(argv[1]) : 4;
    groups = argc > 2 ? atoi(argv[2]) : 20;
    struct rlimit l;
    OK(getrlimit(RLIMIT_NOFILE, &l));
    l.rlim_cur = l.rlim_max;
    OK(setrlimit(RLIMIT_NOFILE, &l));
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, shared));
    for (int i = 0; i < processes; i++)
        if (OK(fork()) == 0) _exit(live(i));
    char ready;
    for (int i = 0; i < processes; i++) EQ(read(shared[0], &ready, 1), 1);
    OK(fcntl(shared[0], F_SETFL, O_NONBLOCK));
    int left = processes, status;
    while (running()) {
        // They may hear of the end before this one does.
        for (; left && OK(waitpid(-1, &status, WNOHANG)) > 0; left--) {
            EQ(status, 0);
            CHECK(told_to_end());
        }
        nap_us(1000);
    }
    for (; left; left--) {
        OK(wait(&status));
        EQ(status, 0);
    }
    return finish();
}
