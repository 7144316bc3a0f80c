// The daemon's objects. One thread does everything, so that nothing here needs a lock.
#ifndef FAKE_VERBS_DAEMON_H
#define FAKE_VERBS_DAEMON_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "../wire.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// map.c: numbers to objects.
struct map {
    struct place {
        uint32_t key;
        void *value;
    } *at;
    uint32_t room, used;
};
void *map_get(const struct map *m, uint32_t key);
void map_put(struct map *m, uint32_t key, void *value);
void map_drop(struct map *m, uint32_t key);
void map_free(struct map *m);

// timer.c
struct timer {
    uint64_t at;
    size_t pos; // In the heap, from 1; 0 is out of it.
    void (*fire)(struct timer *);
};
uint64_t now_ns(void);
void timer_set(struct timer *t, uint64_t at);
void timer_stop(struct timer *t);
void timers_fire(void);
// When the next one is due; UINT64_MAX: none.
uint64_t timers_next(void);

struct ctx;

enum kind { K_PD, K_MR, K_CHANNEL, K_CQ, K_SRQ, K_QP };

struct obj {
    enum kind kind;
    uint32_t handle, users;
    struct ctx *ctx;
    struct obj *next, *prev; // In the context's list.
};

struct host {
    struct host *next;
    char name[FV_HOST_MAX];
    uint32_t restarts, next_qpn, next_key, next_srqn;
    struct fv_port port;
    uint64_t guid;
    struct map qps, lkeys, rkeys, srqs;
};

struct ctx {
    struct ctx *next, *prev;
    int sock, memory, async;
    bool opened, dead;
    struct host *host;
    struct fv_bells *bells;
    struct map objs, mrs;
    struct obj *list;
    uint32_t next_handle, next_mr;
};

struct pd {
    struct obj o;
};

struct mr {
    struct obj o;
    struct pd *pd;
    uint64_t addr, length, iova;
    uint32_t access, lkey, rkey;
};

struct channel {
    struct obj o;
    int fd;
    uint32_t *waiting, count; // Events for which the pipe had no room.
    struct timer timer;
};

struct cq {
    struct obj o;
    struct channel *channel;
    struct fv_cq_ring *ring;
    size_t bytes;
    uint32_t cqe, mask, count, period; // The last two say when an event is to come, and are only kept.
    bool overrun;
};

// Where receives are taken from.
struct rq {
    struct fv_queue *shared;
    uint8_t *place;
    uint32_t slots, stride, head;
};

struct srq {
    struct obj o;
    struct pd *pd;
    struct fv_srq_ring *ring;
    size_t bytes;
    uint32_t number;
    struct ibv_srq_attr attr;
    struct rq rq;
    struct qp *starved; // Senders that wait for a receive here.
};

enum stall { S_NONE, S_RNR, S_PEER };

// What is known of a work request that has been executed, or will be at a time.
struct sent {
    uint64_t exec_at, ack_at;
    uint32_t status, bytes;
    bool lost;  // Its acknowledgement is.
    void *data; // What came back, for a READ or an atomic operation.
};

struct qp {
    struct obj o;
    struct pd *pd;
    struct cq *scq, *rcq;
    struct srq *srq;
    struct fv_qp_ring *ring;
    size_t bytes;
    uint64_t owner;
    uint32_t number, create_flags, sq_slots, sq_stride;
    enum ibv_qp_type type;
    bool sig_all, broken, established, last_said;
    struct ibv_qp_attr attr;  // Its qp_state is the state.
    uint32_t una, next, seen; // Unacknowledged, not executed, not looked at: indices of the send queue.
    struct sent *sent;
    struct rq rq;
    enum stall stall;
    uint64_t stall_until, give_up_at, last_exec;
    uint32_t rnr_left;
    struct timer timer;
    bool queued, starving;
    struct qp *run_next, *starved_next;
    struct srq *starved_at;
};

struct faults {
    uint32_t latency_us, jitter_us, ack_us, ack_drop, hold_acks, hold_messages, ud_drop, rnr, bandwidth_mb, retry_us,
        no_ah, rereg_key, next_qpn;
    struct fv_limits limits;
};

struct stats {
    uint64_t messages, bytes, datagrams, dropped, rnr, acks_lost, no_peer, overruns, not_found;
};

extern struct faults faults;
extern struct stats stats;
extern uint32_t epoch, link_layer;

// faults.c
bool chance(uint32_t percent);
uint64_t some(uint64_t below);
int faults_set(const char *text);

// host.c
struct host *host_named(const char *name);
struct host *host_by_lid(uint16_t lid);
struct host *host_by_gid(const union ibv_gid *gid);
int host_move(const char *text);
int host_readdress(const char *name);
int host_restart(const char *name);
int find_gid(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a);
uint32_t take_qpn(struct host *h, void *qp);
uint32_t take_srqn(struct host *h, void *srq);
void take_keys(struct host *h, struct mr *mr);
void take_other_keys(struct host *h, struct mr *mr);

// ctx.c
extern struct ctx *contexts;
struct ctx *ctx_new(int sock);
bool ctx_serve(struct ctx *c);
void ctx_die(struct ctx *c);
void ctxs_bury(void);

// objects.c, qp.c
typedef int (*handler)(struct ctx *, const struct fv_request *, int *fds, struct fv_reply *);
void *obj_new(struct ctx *c, enum kind kind, size_t size);
void *obj_get(struct ctx *c, enum kind kind, uint32_t handle);
void obj_free(void *obj);
void *map_shared(int fd, size_t bytes);
int alloc_pd(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a);
int dealloc_pd(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a);
int reg_mr(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a);
int rereg_mr(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a);
int dereg_mr(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a);
int create_channel(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a);
int destroy_channel(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a);
int create_cq(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a);
int resize_cq(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a);
int moderate_cq(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a);
int destroy_cq(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a);
int create_srq(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a);
int modify_srq(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a);
int query_srq(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a);
int destroy_srq(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a);
int create_qp(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a);
int modify_qp(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a);
int query_qp(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a);
int destroy_qp(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a);
int attach(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a);
int detach(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a);

// move.c: memory of processes.
struct side {
    int memory;
    const uint8_t *direct; // Instead of segments.
    uint32_t count;
    uint64_t total;
    struct segment {
        uint64_t addr, length;
    } segment[FV_MAX_SGE];
};
enum moved { M_OK, M_SOURCE, M_SINK };
bool side_of_sges(struct side *s, struct ctx *c, const struct pd *pd, const struct ibv_sge *sge, uint32_t n,
                  uint32_t access);
bool side_of_key(struct side *s, struct ctx *c, const struct pd *pd, uint32_t rkey, uint64_t addr, uint64_t length,
                 uint32_t access);
bool key_fits(struct host *h, const struct pd *pd, uint32_t rkey);
void side_of_buffer(struct side *s, void *data, uint64_t length);
enum moved move(const struct side *from, const struct side *to, uint64_t length);

// complete.c
bool push_cqe(struct cq *cq, struct fv_cqe *e, bool solicited);
void tell(struct ctx *c, enum ibv_event_type type, uint32_t handle);
void channel_retry(struct timer *t);
void complete_send(struct qp *q, uint32_t index, enum ibv_wc_status status);
bool complete_receive(struct qp *q, const struct fv_recv *r, struct fv_cqe *e, bool solicited);
struct rq *rq_of(struct qp *q);
bool rq_peek(const struct rq *rq, struct fv_recv *out);
void fail_qp(struct qp *q);
void flush(struct qp *q);
struct fv_send *send_at(const struct qp *q, uint32_t index);

// run.c: the engine.
void wake(struct qp *q);
void forget_running(struct qp *q);
bool run_some(void);
void work_in_qp(struct qp *q);
void receives_posted(struct qp *q);
void receives_posted_srq(struct srq *s);
void starve(struct qp *q, struct srq *s);
void sated(struct qp *q);
struct host *host_of(const struct ibv_ah_attr *a);
struct qp *peer_of(const struct qp *q, bool established);
void wake_timer(struct timer *t);
void restart_all(void);

// rc.c, ud.c
enum done { D_DONE, D_LATER };
enum done execute(struct qp *q, uint32_t index, uint64_t now);
uint64_t length_of(const struct fv_send *s);
void send_datagram(struct qp *q, uint32_t index, uint64_t now);
void groups_forget(struct qp *q);
#endif
