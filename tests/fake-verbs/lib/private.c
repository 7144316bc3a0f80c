// What providers get from libibverbs. There is no other provider here than the stand-in's own, but libraries of
// adapters, which UCX and others load, must find the names.
#include <errno.h>
#include <stddef.h>

#define UNUSED(name)                                                                                                   \
    int name(void);                                                                                                    \
    int name(void) { return ENOSYS; }
#define UNUSED_POINTER(name)                                                                                           \
    void *name(void);                                                                                                  \
    void *name(void) { return NULL; }

extern const char verbs_allow_disassociate_destroy;
const char verbs_allow_disassociate_destroy = 0;

// Drivers register when their library is loaded, and are not asked again.
void verbs_register_driver_34(const void *ops);
void verbs_register_driver_34(const void *ops) { (void)ops; }

UNUSED(__ioctl_final_num_attrs)
UNUSED(__verbs_log)
UNUSED_POINTER(_verbs_init_and_alloc_context)
UNUSED(execute_ioctl)
UNUSED(ibv_cmd_advise_mr)
UNUSED(ibv_cmd_alloc_dm)
UNUSED(ibv_cmd_alloc_mw)
UNUSED(ibv_cmd_alloc_pd)
UNUSED(ibv_cmd_attach_mcast)
UNUSED(ibv_cmd_close_xrcd)
UNUSED(ibv_cmd_create_ah)
UNUSED(ibv_cmd_create_counters)
UNUSED(ibv_cmd_create_cq)
UNUSED(ibv_cmd_create_cq_ex)
UNUSED(ibv_cmd_create_flow)
UNUSED(ibv_cmd_create_flow_action_esp)
UNUSED(ibv_cmd_create_qp)
UNUSED(ibv_cmd_create_qp_ex2)
UNUSED(ibv_cmd_create_qp_ex)
UNUSED(ibv_cmd_create_rwq_ind_table)
UNUSED(ibv_cmd_create_srq)
UNUSED(ibv_cmd_create_srq_ex)
UNUSED(ibv_cmd_create_wq)
UNUSED(ibv_cmd_dealloc_mw)
UNUSED(ibv_cmd_dealloc_pd)
UNUSED(ibv_cmd_dereg_mr)
UNUSED(ibv_cmd_destroy_ah)
UNUSED(ibv_cmd_destroy_counters)
UNUSED(ibv_cmd_destroy_cq)
UNUSED(ibv_cmd_destroy_flow)
UNUSED(ibv_cmd_destroy_flow_action)
UNUSED(ibv_cmd_destroy_qp)
UNUSED(ibv_cmd_destroy_rwq_ind_table)
UNUSED(ibv_cmd_destroy_srq)
UNUSED(ibv_cmd_destroy_wq)
UNUSED(ibv_cmd_detach_mcast)
UNUSED(ibv_cmd_free_dm)
UNUSED(ibv_cmd_get_context)
UNUSED(ibv_cmd_modify_cq)
UNUSED(ibv_cmd_modify_flow_action_esp)
UNUSED(ibv_cmd_modify_qp)
UNUSED(ibv_cmd_modify_qp_ex)
UNUSED(ibv_cmd_modify_srq)
UNUSED(ibv_cmd_modify_wq)
UNUSED(ibv_cmd_open_qp)
UNUSED(ibv_cmd_open_xrcd)
UNUSED(ibv_cmd_poll_cq)
UNUSED(ibv_cmd_post_recv)
UNUSED(ibv_cmd_post_send)
UNUSED(ibv_cmd_post_srq_recv)
UNUSED(ibv_cmd_query_context)
UNUSED(ibv_cmd_query_device_any)
UNUSED(ibv_cmd_query_mr)
UNUSED(ibv_cmd_query_port)
UNUSED(ibv_cmd_query_qp)
UNUSED(ibv_cmd_query_srq)
UNUSED(ibv_cmd_read_counters)
UNUSED(ibv_cmd_reg_dm_mr)
UNUSED(ibv_cmd_reg_dmabuf_mr)
UNUSED(ibv_cmd_reg_mr)
UNUSED(ibv_cmd_req_notify_cq)
UNUSED(ibv_cmd_rereg_mr)
UNUSED(ibv_cmd_resize_cq)
UNUSED(ibv_read_ibdev_sysfs_file)
UNUSED(verbs_init_cq)
UNUSED_POINTER(verbs_open_device)
UNUSED(verbs_set_ops)
UNUSED(verbs_uninit_context)
