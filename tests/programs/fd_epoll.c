// epoll: nested sets, edge triggered and one-shot entries, user data, events that were ready before the checkpoint.
#include "check.h"
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
static void add(int ep, int fd, uint32_t ev, uint64_t data) {
    struct epoll_event e = {.events = ev, .data.u64 = data};
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e));
}
int main(void) {
    begin("fd_epoll");
    int outer = (int)OK(epoll_create1(EPOLL_CLOEXEC)), inner = (int)OK(epoll_create1(0)), lvl[2], edge[2], once[2], sp[2];
    OK(pipe(lvl));
    OK(pipe(edge));
    OK(pipe(once));
    OK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, sp));
    int evt = (int)OK(eventfd(0, EFD_NONBLOCK));
    add(inner, lvl[0], EPOLLIN, 0x1111222233334444);
    add(inner, evt, EPOLLIN, 0x5555);
    add(outer, inner, EPOLLIN, 0xaaaa);
    int ed = (int)OK(epoll_create1(0)), on = (int)OK(epoll_create1(0));
    add(ed, edge[0], EPOLLIN | EPOLLET, 0xbbbb);
    add(on, once[0], EPOLLIN | EPOLLONESHOT, 0xcccc);
    add(on, sp[0], EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, 0xdddd);
    struct epoll_event e[8];
    EQ(epoll_wait(on, e, 8, 0), 1);  // consumes the first edge of the socket: writable
    int dupd = (int)OK(dup(edge[0]));  // the entry stays though its descriptor is closed: the description lives
    (void)dupd;
    // Many files, registered two and two under the same number, which is closed again. (Numbers at which a restart
    // would put something of its own.)
    enum { PAIRS = 60, NUMBER = 430 };
    int many = (int)OK(epoll_create1(0)), files[2 * PAIRS];
    for (int i = 0; i < 2 * PAIRS; i++) {
        files[i] = (int)OK(eventfd(0, EFD_NONBLOCK));
        files[i] = (int)OK(fcntl(files[i], F_DUPFD, 300 + i));
        OK(dup2(files[i], NUMBER + i / 2));
        add(many, NUMBER + i / 2, EPOLLIN, (uint64_t)i);
    }
    for (int i = 0; i < 2 * PAIRS; i++) close(NUMBER + i / 2);
    // Entries that have the same data: one that always reports, a used one-shot, an edge that has been seen.
    int same = (int)OK(epoll_create1(0)), always = (int)OK(eventfd(1, EFD_NONBLOCK)), used = (int)OK(eventfd(1, EFD_NONBLOCK)), seen = (int)OK(eventfd(1, EFD_NONBLOCK));
    uint64_t count;
    add(same, used, EPOLLIN | EPOLLONESHOT, 7);
    EQ(epoll_wait(same, e, 8, 0), 1);
    full_read(used, &count, 8);
    add(same, seen, EPOLLIN | EPOLLET, 7);
    EQ(epoll_wait(same, e, 8, 0), 1);
    add(same, always, EPOLLIN, 7);
    // Two edges that have, of which one comes at a time.
    int twins = (int)OK(epoll_create1(0)), twin[2] = {(int)OK(eventfd(0, EFD_NONBLOCK)), (int)OK(eventfd(0, EFD_NONBLOCK))};
    for (int i = 0; i < 2; i++) add(twins, twin[i], EPOLLIN | EPOLLET, 9);
    char b[64];
    while (running()) {
        EQ(epoll_wait(same, e, 8, 0), 1);
        count = 1;
        full_write(used, &count, 8);
        EQ(epoll_wait(same, e, 8, 0), 1);
        full_read(used, &count, 8);
        full_write(twin[check_round % 2], &count, 8);
        int which = (int)(check_round % (2 * PAIRS));
        uint64_t told = 1;
        full_write(files[which], &told, 8);
        EQ(epoll_wait(many, e, 8, 0), 1);
        EQ(e[0].data.u64, which);
        full_read(files[which], &told, 8);
        EQ(epoll_wait(outer, e, 8, 0), 0);
        full_write(lvl[1], "a", 1);
        full_write(edge[1], "b", 1);
        full_write(once[1], "c", 1);
        nap_us(4000);
        EQ(epoll_wait(twins, e, 8, 0), 1);
        full_read(twin[check_round % 2], &count, 8);
        EQ(epoll_wait(twins, e, 8, 0), 0);
        EQ(epoll_wait(outer, e, 8, 1000), 1);
        EQ(e[0].data.u64, 0xaaaa);
        EQ(epoll_wait(inner, e, 8, 0), 1);
        EQ(e[0].data.u64, 0x1111222233334444);
        EQ(epoll_wait(inner, e, 8, 0), 1);  // level triggered: still there
        full_read(lvl[0], b, 1);
        EQ(epoll_wait(inner, e, 8, 0), 0);
        EQ(epoll_wait(ed, e, 8, 1000), 1);
        EQ(e[0].data.u64, 0xbbbb);
        EQ(e[0].events, EPOLLIN);
        full_read(edge[0], b, 1);
        for (int more = 1; more;) {  // the socket's edge may be reported once more after a restart, never the one-shot entry
            EQ(epoll_wait(on, e, 1, 1000), 1);
            CHECK(e[0].data.u64 == 0xcccc || e[0].data.u64 == 0xdddd);
            more = e[0].data.u64 != 0xcccc;
        }
        nap_us(4000);
        for (int n; (n = epoll_wait(on, e, 1, 0));) EQ(e[0].data.u64, 0xdddd);  // one shot: disarmed, though readable
        struct epoll_event re = {.events = EPOLLIN | EPOLLONESHOT, .data.u64 = 0xcccc};
        OK(epoll_ctl(on, EPOLL_CTL_MOD, once[0], &re));
        do EQ(epoll_wait(on, e, 1, 0), 1);
        while (e[0].data.u64 == 0xdddd);
        EQ(e[0].data.u64, 0xcccc);
        full_read(once[0], b, 1);
        OK(epoll_ctl(on, EPOLL_CTL_MOD, once[0], &re));
        EQ(epoll_ctl(ed, EPOLL_CTL_ADD, edge[0], &re), -1);
        EQ(errno, EEXIST);
        EQ(epoll_ctl(ed, EPOLL_CTL_MOD, lvl[0], &re), -1);
        EQ(errno, ENOENT);
        uint64_t one = 1;
        full_write(evt, &one, 8);
        EQ(epoll_wait(outer, e, 8, 1000), 1);
        full_read(evt, &one, 8);
        EQ(fcntl(outer, F_GETFD), FD_CLOEXEC);
        EQ(fcntl(inner, F_GETFD), 0);
    }
    return finish();
}
