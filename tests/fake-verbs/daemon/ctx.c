// Connections of processes: what they ask, which of their queues have work, what is left of them when they die.
#include "fvd.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#define FDS 4

struct ctx *contexts;

struct ctx *ctx_new(int sock) {
    struct ctx *c = calloc(1, sizeof *c);
    if (!c) abort();
    c->sock = sock;
    c->memory = c->async = -1;
    c->next = contexts;
    if (contexts) contexts->prev = c;
    contexts = c;
    return c;
}

static int list(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a) {
    (void)c, (void)fds;
    if (q->open.version != FV_VERSION) return EPROTO;
    const struct host *h = host_named(q->open.host);
    a->list.count = 1;
    snprintf(a->list.device[0].name, sizeof a->list.device[0].name, "fake%u", 0);
    a->list.device[0].guid = h->guid;
    return 0;
}

// Takes the bells, the memory and the pipe for events.
static int open_device(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a) {
    if (q->open.version != FV_VERSION || c->opened) return EPROTO;
    if (q->open.device != 0) return ENODEV;
    c->bells = map_shared(fds[0], sizeof *c->bells);
    if (!c->bells || fds[1] < 0 || fds[2] < 0) return EINVAL;
    c->memory = fds[1];
    c->async = fds[2];
    fds[1] = fds[2] = -1;
    if (fcntl(c->async, F_SETFL, O_NONBLOCK)) return errno;
    c->host = host_named(q->open.host);
    c->opened = true;
    a->port = c->host->port;
    return 0;
}

static int port(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a) {
    (void)q, (void)fds;
    a->port = c->host->port;
    return 0;
}

static int device(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a) {
    (void)c, (void)q, (void)fds;
    a->limits = faults.limits;
    return 0;
}

static int set(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a) {
    (void)c, (void)fds, (void)a;
    int error = faults_set(q->text);
    restart_all();
    return error;
}

static int restart(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a) {
    (void)c, (void)fds, (void)a;
    return host_restart(q->text);
}

static int moved_to(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a) {
    (void)c, (void)fds, (void)a;
    return host_move(q->text);
}

static int readdressed(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a) {
    (void)c, (void)fds, (void)a;
    return host_readdress(q->text);
}

static int report(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a) {
    (void)c, (void)q, (void)fds;
    unsigned int open = 0;
    unsigned int cq_count = 0, cq_period = 0;
    for (struct ctx *o = contexts; o; o = o->next) {
        if (!o->opened || o->dead) continue;
        open++;
        for (const struct obj *i = o->list; i; i = i->next)
            if (i->kind == K_CQ) {
                cq_count += ((const struct cq *)i)->count;
                cq_period += ((const struct cq *)i)->period;
            }
    }
    snprintf(a->text, sizeof a->text,
             "epoch %u\ncontexts %u\nmessages %llu\nbytes %llu\ndatagrams %llu\ndropped %llu\nrnr %llu\nacks_lost "
             "%llu\nno_peer %llu\n"
             "overruns %llu\nnot_found %llu\ncq_count %u\ncq_period %u\n",
             epoch, open, (unsigned long long)stats.messages, (unsigned long long)stats.bytes,
             (unsigned long long)stats.datagrams, (unsigned long long)stats.dropped, (unsigned long long)stats.rnr,
             (unsigned long long)stats.acks_lost, (unsigned long long)stats.no_peer,
             (unsigned long long)stats.overruns, (unsigned long long)stats.not_found, cq_count, cq_period);
    return 0;
}

static const struct {
    handler run;
    bool anyone; // Needs no open device.
} handlers[FV_OPS] = {
    [FV_LIST] = {list, true},
    [FV_OPEN] = {open_device, true},
    [FV_PORT] = {port, false},
    [FV_DEVICE] = {device, false},
    [FV_ALLOC_PD] = {alloc_pd, false},
    [FV_DEALLOC_PD] = {dealloc_pd, false},
    [FV_REG_MR] = {reg_mr, false},
    [FV_REREG_MR] = {rereg_mr, false},
    [FV_DEREG_MR] = {dereg_mr, false},
    [FV_CREATE_CHANNEL] = {create_channel, false},
    [FV_DESTROY_CHANNEL] = {destroy_channel, false},
    [FV_CREATE_CQ] = {create_cq, false},
    [FV_RESIZE_CQ] = {resize_cq, false},
    [FV_MODERATE_CQ] = {moderate_cq, false},
    [FV_DESTROY_CQ] = {destroy_cq, false},
    [FV_CREATE_SRQ] = {create_srq, false},
    [FV_MODIFY_SRQ] = {modify_srq, false},
    [FV_QUERY_SRQ] = {query_srq, false},
    [FV_DESTROY_SRQ] = {destroy_srq, false},
    [FV_CREATE_QP] = {create_qp, false},
    [FV_MODIFY_QP] = {modify_qp, false},
    [FV_QUERY_QP] = {query_qp, false},
    [FV_DESTROY_QP] = {destroy_qp, false},
    [FV_ATTACH] = {attach, false},
    [FV_DETACH] = {detach, false},
    [FV_FIND] = {find_gid, false},
    [FV_SET] = {set, true},
    [FV_RESTART] = {restart, true},
    [FV_MOVE] = {moved_to, true},
    [FV_READDRESS] = {readdressed, true},
    [FV_STATS] = {report, true},
};

// The bell first, then the ring: what is rung later rings again.
static void hear(struct ctx *c) {
    if (!c->bells) return;
    atomic_store(&c->bells->bell, 0);
    uint32_t head = atomic_load(&c->bells->head);
    for (uint32_t n = 0; head != atomic_load(&c->bells->tail) && n < FV_BELLS; n++) {
        struct obj *o = map_get(&c->objs, c->bells->ring[head++ % FV_BELLS]);
        if (o && o->kind == K_SRQ) receives_posted_srq((struct srq *)o);
        if (o && o->kind == K_QP) work_in_qp((struct qp *)o);
    }
    atomic_store(&c->bells->head, head);
}

static bool answer(struct ctx *c, const struct fv_request *q, int *fds) {
    struct fv_reply a = {0};
    handler run = q->op < FV_OPS ? handlers[q->op].run : NULL;
    if (!run) a.error = ENOSYS;
    else if (!c->opened && !handlers[q->op].anyone) a.error = EBADF;
    else a.error = run(c, q, fds, &a);
    return send(c->sock, &a, sizeof a, MSG_NOSIGNAL) == (ssize_t)sizeof a;
}

// One message. False when the process has gone.
bool ctx_serve(struct ctx *c) {
    struct fv_request q;
    struct iovec iov = {&q, sizeof q};
    union {
        struct cmsghdr head;
        char space[CMSG_SPACE(FDS * sizeof(int))];
    } control;
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    int fds[FDS] = {-1, -1, -1, -1};
    ssize_t n = recvmsg(c->sock, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (n <= 0) return false;
    struct cmsghdr *h = CMSG_FIRSTHDR(&m);
    if (h && h->cmsg_type == SCM_RIGHTS) memcpy(fds, CMSG_DATA(h), h->cmsg_len - CMSG_LEN(0));
    bool good = true;
    if (n == (ssize_t)sizeof q) {
        // Work that was posted before the question is seen before it is answered.
        hear(c);
        q.text[sizeof q.text - 1] = 0;
        good = answer(c, &q, fds);
    } else {
        hear(c);
    }
    for (int i = 0; i < FDS; i++)
        if (fds[i] >= 0) close(fds[i]);
    return good;
}

// Everything of a process goes: queue pairs before what they stand on.
void ctx_die(struct ctx *c) {
    static const enum kind order[] = {K_QP, K_SRQ, K_CQ, K_CHANNEL, K_MR, K_PD};
    if (c->dead) return;
    c->dead = true;
    for (size_t i = 0; i < sizeof order / sizeof *order; i++)
        for (struct obj *o = c->list, *next; o; o = next) {
            next = o->next;
            if (o->kind == order[i]) obj_free(o);
        }
    close(c->sock);
    if (c->memory >= 0) close(c->memory);
    if (c->async >= 0) close(c->async);
    if (c->bells) munmap(c->bells, sizeof *c->bells);
    map_free(&c->objs);
    map_free(&c->mrs);
    c->sock = c->memory = c->async = -1;
}

// The dead are kept until nobody in the loop can hold them any more.
void ctxs_bury(void) {
    for (struct ctx *c = contexts, *next; c; c = next) {
        next = c->next;
        if (!c->dead) continue;
        if (c->prev) c->prev->next = next;
        else contexts = next;
        if (next) next->prev = c->prev;
        free(c);
    }
}
