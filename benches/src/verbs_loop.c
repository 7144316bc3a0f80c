// verbs_loop COUNT: nanoseconds of processor time that each of COUNT requests takes to be posted and polled, then each of
// COUNT polls that find nothing.
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void need(int good, const char *what) {
    if (good) return;
    fprintf(stderr, "%s failed\n", what);
    exit(1);
}

int main(int argc, char **argv) {
    long count = argc > 1 ? atol(argv[1]) : 1000000;
    char *memory = malloc(64);
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *c = ibv_open_device(list[0]);
    need(c != NULL, "ibv_open_device");
    struct ibv_pd *pd = ibv_alloc_pd(c);
    struct ibv_mr *mr = (ibv_reg_mr)(pd, memory, 64, IBV_ACCESS_LOCAL_WRITE);
    struct ibv_cq *cq = ibv_create_cq(c, 32, NULL, NULL, 0);
    struct ibv_qp_init_attr init = {.send_cq = cq,
                                    .recv_cq = cq,
                                    .cap = {.max_send_wr = 32, .max_recv_wr = 32, .max_send_sge = 1, .max_recv_sge = 1},
                                    .qp_type = IBV_QPT_RC};
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    need(qp != NULL, "ibv_create_qp");
    struct ibv_sge sge = {(uintptr_t)memory, 8, mr->lkey};
    struct ibv_send_wr w = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED}, *bad;
    struct ibv_wc wc;
    w.wr.rdma.remote_addr = (uintptr_t)memory;
    double begin = now();
    for (long i = 0; i < count; i++) {
        w.wr_id = (uint64_t)i;
        need(!ibv_post_send(qp, &w, &bad), "ibv_post_send");
        need(ibv_poll_cq(cq, 1, &wc) == 1 && wc.wr_id == (uint64_t)i, "ibv_poll_cq");
    }
    double middle = now();
    for (long i = 0; i < count; i++) need(!ibv_poll_cq(cq, 1, &wc), "ibv_poll_cq");
    printf("%.3f %.3f\n", (middle - begin) / (double)count, (now() - middle) / (double)count);
}
