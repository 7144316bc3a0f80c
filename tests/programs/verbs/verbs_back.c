// What the library does by itself, when a queue pair goes or everything is made again, does not show. verbs_back CHECK, one
// of the table at the end.
#include "verbsends.h"

// A queue pair with a shared queue that is reset has not failed: no event says that it takes no more receives. One that
// has failed before it was reset has said so.
static void renewed(void) {
    use_srq = 1;
    make_both();
    for (int failed = 0; failed < 2; failed++) {
        if (failed) {
            struct ibv_send_wr w = request(&a, IBV_WR_RDMA_WRITE, 1, 8);
            w.wr.rdma.rkey += 1 << 20;
            Z(post(&a, &w));
            expect(&a, 1, IBV_WC_REM_ACCESS_ERR);
            await(b.port.context->async_fd, POLLIN, "an asynchronous event");
            nap_us(20000);
        }
        Z(go_to(&b, IBV_QPS_RESET));
        struct pollfd f = {b.port.context->async_fd, POLLIN, 0};
        EQ(poll(&f, 1, 0), failed);
        Z(go_to(&a, IBV_QPS_RESET));
        rc_init(a.qp);
        rc_init(b.qp);
        connect_both();
        if (failed) {
            expect_event(&b, IBV_EVENT_QP_ACCESS_ERR);
            expect_event(&b, IBV_EVENT_QP_LAST_WQE_REACHED);
        }
        no_event(&b);
    }
    do_post(&a, IBV_WR_RDMA_WRITE, 2, 8);
    expect(&a, 2, IBV_WC_SUCCESS);
}

// A queue pair in error comes back so, and the program hears no second time of its last receive.
static void heard(void) {
    use_srq = 1;
    make_both();
    Z(go_to(&b, IBV_QPS_ERR));
    expect_event(&b, IBV_EVENT_QP_LAST_WQE_REACHED);
    // A restart.
    await_harness();
    EQ(state(&b), IBV_QPS_ERR);
    no_event(&b);
    again();
    works();
}

static const struct {
    const char *name;
    void (*run)(void);
} checks[] = {
    {"renewed", renewed},
    {"heard", heard},
};

int main(int argc, char **argv) {
    begin("verbs_back");
    for (size_t i = 0; argc > 1 && i < sizeof checks / sizeof *checks; i++)
        if (!strcmp(argv[1], checks[i].name)) {
            checks[i].run();
            return finish();
        }
    fail("no such check");
}
