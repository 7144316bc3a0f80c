//! The layouts are those of the system's header: a C program prints its own.

use belay_ibv::*;
use std::mem::{offset_of, size_of};
use std::process::Command;

/// One line for each: the C expression, and what it is here.
macro_rules! compare {
    ($($expression:literal => $value:expr,)*) => { vec![$(($expression, $value)),*] };
}

fn sizes() -> Vec<(&'static str, usize)> {
    compare! {
        "sizeof(union ibv_gid)" => size_of::<Gid>(),
        "sizeof(struct ibv_gid_entry)" => size_of::<GidEntry>(),
        "sizeof(struct ibv_device)" => size_of::<Device>(),
        "sizeof(struct ibv_pd)" => size_of::<Pd>(),
        "sizeof(struct ibv_mr)" => size_of::<Mr>(),
        "sizeof(struct ibv_ah)" => size_of::<Ah>(),
        "sizeof(struct ibv_comp_channel)" => size_of::<CompChannel>(),
        "sizeof(struct ibv_srq)" => size_of::<Srq>(),
        "sizeof(struct ibv_cq)" => size_of::<Cq>(),
        "sizeof(struct ibv_cq_ex)" => size_of::<CqEx>(),
        "sizeof(struct ibv_qp)" => size_of::<Qp>(),
        "sizeof(struct ibv_qp_ex)" => size_of::<QpEx>(),
        "sizeof(struct ibv_async_event)" => size_of::<AsyncEvent>(),
        "sizeof(struct ibv_sge)" => size_of::<Sge>(),
        "sizeof(struct ibv_send_wr)" => size_of::<SendWr>(),
        "sizeof(struct ibv_recv_wr)" => size_of::<RecvWr>(),
        "sizeof(struct ibv_wc)" => size_of::<Wc>(),
        "sizeof(struct ibv_grh)" => size_of::<Grh>(),
        "sizeof(struct ibv_ah_attr)" => size_of::<AhAttr>(),
        "sizeof(struct ibv_qp_init_attr)" => size_of::<QpInitAttr>(),
        "sizeof(struct ibv_qp_init_attr_ex)" => size_of::<QpInitAttrEx>(),
        "sizeof(struct ibv_qp_attr)" => size_of::<QpAttr>(),
        "sizeof(struct ibv_srq_init_attr)" => size_of::<SrqInitAttr>(),
        "sizeof(struct ibv_cq_init_attr_ex)" => size_of::<CqInitAttrEx>(),
        "sizeof(struct ibv_modify_cq_attr)" => size_of::<ModifyCqAttr>(),
        "sizeof(struct ibv_port_attr)" => size_of::<PortAttr>(),
        "sizeof(struct ibv_device_attr)" => size_of::<DeviceAttr>(),
        "sizeof(struct ibv_device_attr_ex)" => size_of::<DeviceAttrEx>(),
        "sizeof(struct ibv_parent_domain_init_attr)" => size_of::<ParentDomainInitAttr>(),
        "sizeof(struct ibv_context_ops)" => size_of::<ContextOps>(),
        "sizeof(struct ibv_context)" => size_of::<Context>(),
        "sizeof(struct verbs_context)" => size_of::<VerbsContext>(),
        "sizeof(struct ibv_sa_path_rec)" => size_of::<PathRecord>(),
        "sizeof(struct rdma_cm_id)" => size_of::<CmId>(),
        "sizeof(struct rdma_event_channel)" => size_of::<EventChannel>(),
        "sizeof(struct rdma_conn_param)" => size_of::<ConnParam>(),
        "sizeof(struct rdma_ud_param)" => size_of::<UdParam>(),
        "sizeof(struct rdma_cm_event)" => size_of::<CmEvent>(),
        "sizeof(struct rdma_addrinfo)" => size_of::<AddrInfo>(),
    }
}

fn places() -> Vec<(&'static str, usize)> {
    compare! {
        "offsetof(struct ibv_device, ibdev_path)" => offset_of!(Device, ibdev_path),
        "offsetof(struct ibv_context_ops, poll_cq)" => offset_of!(ContextOps, poll_cq),
        "offsetof(struct ibv_context_ops, post_srq_recv)" => offset_of!(ContextOps, post_srq_recv),
        "offsetof(struct ibv_context_ops, post_recv)" => offset_of!(ContextOps, post_recv),
        "offsetof(struct ibv_context_ops, alloc_mw)" => offset_of!(ContextOps, alloc_mw),
        "offsetof(struct ibv_context, abi_compat)" => offset_of!(Context, abi_compat),
        "offsetof(struct verbs_context, alloc_parent_domain)" => offset_of!(VerbsContext, alloc_parent_domain),
        "offsetof(struct verbs_context, modify_cq)" => offset_of!(VerbsContext, modify_cq),
        "offsetof(struct verbs_context, query_rt_values)" => offset_of!(VerbsContext, query_rt_values),
        "offsetof(struct verbs_context, query_device_ex)" => offset_of!(VerbsContext, query_device_ex),
        "offsetof(struct verbs_context, create_qp_ex)" => offset_of!(VerbsContext, create_qp_ex),
        "offsetof(struct verbs_context, create_srq_ex)" => offset_of!(VerbsContext, create_srq_ex),
        "offsetof(struct verbs_context, context)" => offset_of!(VerbsContext, context),
        "offsetof(struct ibv_qp, events_completed)" => offset_of!(Qp, events_completed),
        "offsetof(struct ibv_qp_ex, wr_set_ud_addr)" => offset_of!(QpEx, wr_set_ud_addr),
        "offsetof(struct ibv_qp_ex, wr_complete)" => offset_of!(QpEx, wr_complete),
        "offsetof(struct ibv_cq_ex, start_poll)" => offset_of!(CqEx, start_poll),
        "offsetof(struct ibv_cq_ex, read_completion_ts)" => offset_of!(CqEx, read_completion_ts),
        "offsetof(struct ibv_send_wr, wr)" => offset_of!(SendWr, wr),
        "offsetof(struct ibv_send_wr, qp_type)" => offset_of!(SendWr, remote_srqn),
        "offsetof(struct ibv_qp_attr, ah_attr)" => offset_of!(QpAttr, ah_attr),
        "offsetof(struct ibv_qp_attr, rnr_retry)" => offset_of!(QpAttr, rnr_retry),
        "offsetof(struct ibv_qp_attr, rate_limit)" => offset_of!(QpAttr, rate_limit),
        "offsetof(struct ibv_qp_init_attr_ex, send_ops_flags)" => offset_of!(QpInitAttrEx, send_ops_flags),
        "offsetof(struct ibv_port_attr, lid)" => offset_of!(PortAttr, lid),
        "offsetof(struct ibv_port_attr, link_layer)" => offset_of!(PortAttr, link_layer),
        "offsetof(struct ibv_device_attr, max_cqe)" => offset_of!(DeviceAttr, max_cqe),
        "offsetof(struct ibv_device_attr, atomic_cap)" => offset_of!(DeviceAttr, atomic_cap),
        "offsetof(struct ibv_device_attr, phys_port_cnt)" => offset_of!(DeviceAttr, phys_port_cnt),
        "offsetof(struct ibv_device_attr, max_mw)" => offset_of!(DeviceAttr, max_mw),
        "offsetof(struct ibv_device_attr_ex, comp_mask)" => offset_of!(DeviceAttrEx, comp_mask),
        "offsetof(struct ibv_device_attr_ex, device_cap_flags_ex)" => offset_of!(DeviceAttrEx, device_cap_flags_ex),
        "offsetof(struct ibv_device_attr_ex, rss_caps)" => offset_of!(DeviceAttrEx, rss_caps),
        "offsetof(struct ibv_device_attr_ex, max_wq_type_rq)" => offset_of!(DeviceAttrEx, max_wq_type_rq),
        "offsetof(struct ibv_device_attr_ex, raw_packet_caps)" => offset_of!(DeviceAttrEx, raw_packet_caps),
        "offsetof(struct ibv_device_attr_ex, tm_caps)" => offset_of!(DeviceAttrEx, tm_caps),
        "offsetof(struct ibv_device_attr_ex, max_dm_size)" => offset_of!(DeviceAttrEx, max_dm_size),
        "offsetof(struct ibv_device_attr_ex, xrc_odp_caps)" => offset_of!(DeviceAttrEx, xrc_odp_caps),
        "IBV_EVENT_LID_CHANGE" => EVENT_LID_CHANGE as usize,
        "IBV_EVENT_GID_CHANGE" => EVENT_GID_CHANGE as usize,
        "IBV_EVENT_WQ_FATAL" => EVENT_WQ_FATAL as usize,
        "IBV_EVENT_DEVICE_FATAL" => EVENT_DEVICE_FATAL as usize,
        "IBV_EVENT_SRQ_LIMIT_REACHED" => EVENT_SRQ_LIMIT_REACHED as usize,
        "IBV_EVENT_PATH_MIG_ERR" => EVENT_PATH_MIG_ERR as usize,
        "IBV_EVENT_QP_LAST_WQE_REACHED" => EVENT_QP_LAST_WQE_REACHED as usize,
        "IBV_QP_DEST_QPN" => QP_DEST_QPN as usize,
        "IBV_QP_RATE_LIMIT" => QP_RATE_LIMIT as usize,
        "IBV_WR_SEND_WITH_INV" => WR_SEND_WITH_INV as usize,
        "IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK" => WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK as usize,
        "IBV_LINK_LAYER_ETHERNET" => LINK_LAYER_ETHERNET as usize,
        "IBV_WC_WR_FLUSH_ERR" => WC_WR_FLUSH_ERR as usize,
        "IBV_QPT_UD" => QPT_UD as usize,
        "IBV_QPS_ERR" => QPS_ERR as usize,
        "offsetof(struct ibv_sa_path_rec, pkey)" => offset_of!(PathRecord, pkey),
        "offsetof(struct ibv_sa_path_rec, preference)" => offset_of!(PathRecord, preference),
        "offsetof(struct rdma_cm_id, route.addr.dst_addr)" => offset_of!(CmId, route.dst),
        "offsetof(struct rdma_cm_id, route.addr.addr.ibaddr.pkey)" => offset_of!(CmId, route.ib.pkey),
        "offsetof(struct rdma_cm_id, route.num_paths)" => offset_of!(CmId, route.num_paths),
        "offsetof(struct rdma_cm_id, port_num)" => offset_of!(CmId, port_num),
        "offsetof(struct rdma_cm_id, qp_type)" => offset_of!(CmId, qp_type),
        "offsetof(struct rdma_conn_param, qp_num)" => offset_of!(ConnParam, qp_num),
        "offsetof(struct rdma_ud_param, qkey)" => offset_of!(UdParam, qkey),
        "offsetof(struct rdma_cm_event, param)" => offset_of!(CmEvent, param),
        "offsetof(struct rdma_addrinfo, ai_connect)" => offset_of!(AddrInfo, connect),
        "RDMA_CM_EVENT_CONNECT_REQUEST" => CM_CONNECT_REQUEST as usize,
        "RDMA_CM_EVENT_TIMEWAIT_EXIT" => CM_TIMEWAIT_EXIT as usize,
        "RDMA_PS_UDP" => PS_UDP as usize,
        "RDMA_UDP_QKEY" => UDP_QKEY as usize,
        "RAI_FAMILY" => RAI_FAMILY as usize,
        "RDMA_OPTION_ID_ACK_TIMEOUT" => OPTION_ID_ACK_TIMEOUT as usize,
    }
}

#[test]
fn as_the_header_says() {
    let dir = std::env::temp_dir().join(format!("belay-ibv-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a directory");
    let (source, program) = (dir.join("layout.c"), dir.join("layout"));
    let ours = [sizes(), places()].concat();
    let prints: String = ours
        .iter()
        .map(|(e, _)| format!("    printf(\"%zu\\n\", (size_t)({e}));\n"))
        .collect();
    let text = format!("#include <rdma/rdma_cma.h>\n#include <stdio.h>\nint main(void) {{\n{prints}}}\n");
    std::fs::write(&source, text).expect("the source");
    let made = Command::new("cc").arg(&source).arg("-o").arg(&program).status().expect("cc");
    assert!(
        made.success(),
        "libibverbs-dev or librdmacm-dev is missing: scripts/install-deps"
    );
    let out = Command::new(&program).output().expect("its sizes").stdout;
    let theirs: Vec<usize> = String::from_utf8_lossy(&out)
        .lines()
        .map(|l| l.parse().expect("a number"))
        .collect();
    assert_eq!(theirs.len(), ours.len());
    for ((expression, ours), theirs) in ours.iter().zip(theirs) {
        assert_eq!(*ours, theirs, "{expression}");
    }
    let _ = std::fs::remove_dir_all(dir);
}
