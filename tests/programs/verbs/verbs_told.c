// Threads that end, or are told to, in the middle of the verbs: verbs_told CHECK, one of the table at the end.
#include "verbsgrams.h"

static struct end c;
static struct ibv_cq_ex *polled;
static struct target to_c;
enum ending { POSTING, RECEIVING, BUILDING, POLLING, ASKING, SENDING, RESETTING };

static void reset(void *e) { Z(go_to(e, IBV_QPS_RESET)); }

static void *ends(void *how) {
    struct ibv_poll_cq_attr none = {0};
    struct ibv_qp_ex *q = ibv_qp_to_qp_ex(c.qp);
    switch ((enum ending)(intptr_t)how) {
    case POSTING:
        Z(pthread_cancel(pthread_self()));
        do_post(&a, IBV_WR_RDMA_WRITE, 5, 8);
        break;
    case RECEIVING:
        Z(pthread_cancel(pthread_self()));
        Z(give(&b, 6, 64));
        break;
    case BUILDING:
        ibv_wr_start(q);
        ibv_wr_send(q);
        return PTHREAD_CANCELED;
    case POLLING:
        Z(post_all(&c, &to_c, 1));
        while (ibv_start_poll(polled, &none)) sched_yield();
        return PTHREAD_CANCELED;
    case RESETTING:
        pthread_cleanup_push(reset, &a);
        Z(pthread_cancel(pthread_self()));
        do_post(&a, IBV_WR_RDMA_WRITE, 5, 8);
        pthread_cleanup_pop(0);
        break;
    case ASKING:
        Z(pthread_cancel(pthread_self()));
        Z(ibv_req_notify_cq(a.cq, 0));
        pthread_testcancel();
        break;
    case SENDING:
        Z(pthread_cancel(pthread_self()));
        Z(post_to(&to_c, 8));
        pthread_testcancel();
        break;
    }
    return NULL;
}

static void end_while(enum ending how) {
    pthread_t t;
    void *ended;
    Z(pthread_create(&t, NULL, ends, (void *)(intptr_t)how));
    Z(pthread_join(t, &ended));
    CHECK(ended == PTHREAD_CANCELED);
}

// A thread ends while it posts, where the provider says so to the kernel, or between two calls that belong together. What it
// was at goes on with the next one.
static void ended(void) {
    struct ibv_poll_cq_attr none = {0};
    make_both();
    c = a;
    polled = V(ibv_create_cq_ex(a.port.context, &(struct ibv_cq_init_attr_ex){.cqe = 64}));
    c.cq = ibv_cq_ex_to_cq(polled);
    make_qp(&c);
    make_datagrams(&c);
    struct ibv_ah_attr attr = ah_attr_to(&a.port, &(struct address){.lid = a.port.attr.lid});
    to_c = (struct target){V(ibv_create_ah(a.port.pd, &attr)), c.qp->qp_num};
    // A checkpoint, and a restart.
    for (int i = 0; i < 2; i++) {
        nap_us(20000);
        end_while(POSTING);
        expect(&a, 5, IBV_WC_SUCCESS);
        nap_us(20000);
        end_while(RECEIVING);
        end_while(BUILDING);
        end_while(POLLING);
        await_harness();
        do_post(&a, IBV_WR_SEND, 7, 8);
        expect(&a, 7, IBV_WC_SUCCESS);
        expect(&b, 6, IBV_WC_SUCCESS);
        Z(post_all(&c, &to_c, 1));
        while (ibv_start_poll(polled, &none)) sched_yield();
        EQ(polled->status, IBV_WC_SUCCESS);
        ibv_end_poll(polled);
    }
    // On its way out it resets what it was posting to.
    nap_us(20000);
    end_while(RESETTING);
    EQ(state(&a), IBV_QPS_RESET);
    again();
    works();
}

// A thread that is told to end does not do so where this library asks the kernel for something: the channel is the others', and
// so is the handle of an address.
static void told(void) {
    struct ibv_cq *event;
    void *user;
    make_end(&a, "rules0", 64);
    make_datagrams(&a);
    to_c = target_at(&a, 3);
    c = a;
    Z(post_to(&to_c, 7));
    nap_us(20000);
    // A restart, after which the queue has a completion, and no handle is made yet.
    await_harness();
    end_while(ASKING);
    await(a.port.channel->fd, POLLIN, "an event");
    Z(ibv_get_cq_event(a.port.channel, &event, &user));
    ibv_ack_cq_events(event, 1);
    end_while(SENDING);
    expect(&a, 7, IBV_WC_SUCCESS);
    expect(&a, 8, IBV_WC_SUCCESS);
    Z(post_to(&to_c, 9));
    expect(&a, 9, IBV_WC_SUCCESS);
    Z(ibv_destroy_ah(to_c.ah));
    drop_end(&a);
    make_both();
    works();
}

static const struct check checks[] = {
    {"ended", ended},
    {"told", told},
};

int main(int argc, char **argv) {
    begin("verbs_told");
    return run_check(argc > 1 ? argv[1] : NULL, checks, sizeof checks / sizeof *checks);
}
