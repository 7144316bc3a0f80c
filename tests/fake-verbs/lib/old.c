// Names of libibverbs 1.0, whose structures were others. Nothing that runs today asks for them; here they say so.
#include <errno.h>
#include <stddef.h>

static void *gone(void) {
    errno = ENOSYS;
    return NULL;
}

#define OLD(name, version)                                                                                             \
    void *old_##name(void);                                                                                            \
    void *old_##name(void) { return gone(); }                                                                          \
    __asm__(".symver old_" #name ", " #name "@" #version)

OLD(ibv_ack_async_event, IBVERBS_1.0);
OLD(ibv_ack_cq_events, IBVERBS_1.0);
OLD(ibv_alloc_pd, IBVERBS_1.0);
OLD(ibv_attach_mcast, IBVERBS_1.0);
OLD(ibv_close_device, IBVERBS_1.0);
OLD(ibv_create_ah, IBVERBS_1.0);
OLD(ibv_create_cq, IBVERBS_1.0);
OLD(ibv_create_qp, IBVERBS_1.0);
OLD(ibv_create_srq, IBVERBS_1.0);
OLD(ibv_dealloc_pd, IBVERBS_1.0);
OLD(ibv_dereg_mr, IBVERBS_1.0);
OLD(ibv_destroy_ah, IBVERBS_1.0);
OLD(ibv_destroy_cq, IBVERBS_1.0);
OLD(ibv_destroy_qp, IBVERBS_1.0);
OLD(ibv_destroy_srq, IBVERBS_1.0);
OLD(ibv_detach_mcast, IBVERBS_1.0);
OLD(ibv_free_device_list, IBVERBS_1.0);
OLD(ibv_get_async_event, IBVERBS_1.0);
OLD(ibv_get_cq_event, IBVERBS_1.0);
OLD(ibv_get_device_guid, IBVERBS_1.0);
OLD(ibv_get_device_list, IBVERBS_1.0);
OLD(ibv_get_device_name, IBVERBS_1.0);
OLD(ibv_modify_qp, IBVERBS_1.0);
OLD(ibv_modify_srq, IBVERBS_1.0);
OLD(ibv_open_device, IBVERBS_1.0);
OLD(ibv_query_device, IBVERBS_1.0);
OLD(ibv_query_gid, IBVERBS_1.0);
OLD(ibv_query_pkey, IBVERBS_1.0);
OLD(ibv_query_port, IBVERBS_1.0);
OLD(ibv_query_qp, IBVERBS_1.0);
OLD(ibv_query_srq, IBVERBS_1.0);
OLD(ibv_reg_mr, IBVERBS_1.0);
OLD(ibv_register_driver, IBVERBS_1.1);
OLD(ibv_resize_cq, IBVERBS_1.0);
