//! Queue pairs of identifiers, and how they are brought into each state.

use super::{adapter, refuse, Id, Stage};
use crate::api::{
    create_qp_ex, ibv_create_comp_channel, ibv_create_cq, ibv_create_qp, ibv_create_srq, ibv_destroy_comp_channel, ibv_destroy_cq,
    ibv_destroy_qp, ibv_destroy_srq, ibv_get_pkey_index, ibv_modify_qp,
};
use belay_ibv::*;
use std::ptr::null_mut;

/// Routers that a packet passes, at most, as the kernel's manager says.
pub(super) const HOPS: u8 = 64;
/// How long a packet is on its way, at most: 4.096 µs × 2 to the power of this.
pub(super) const LIFE_TIME: u8 = 16;
/// For how long a queue pair waits for an acknowledgement, in the same way: there, back, and what the other end takes.
const ACK_TIMEOUT: u8 = 18;

/// The way to the other end.
pub(super) fn towards(id: &Id) -> AhAttr {
    let (Some(place), Some(peer)) = (id.place, id.peer) else {
        return AhAttr::default();
    };
    let ethernet = place.is_ethernet();
    AhAttr {
        grh: GlobalRoute {
            dgid: Gid { raw: peer.gid },
            flow_label: 0,
            sgid_index: place.gid_index,
            hop_limit: HOPS,
            traffic_class: id.options.traffic_class,
        },
        dlid: if ethernet { 0 } else { peer.lid },
        is_global: ethernet.into(),
        port_num: place.port,
        ..AhAttr::default()
    }
}

/// What a queue pair of an identifier is given on its way to a state, and which of it.
unsafe fn attributes(id: &Id, state: u32) -> Result<(QpAttr, Int), i32> {
    let place = id.place.ok_or(libc::EINVAL)?;
    let mut attr = QpAttr {
        qp_state: state,
        port_num: place.port,
        ..QpAttr::default()
    };
    let connected = !matches!(
        id.stage,
        Stage::Idle | Stage::Bound | Stage::AddressResolved | Stage::RouteResolved
    );
    if id.is_datagrams() || state == QPS_INIT {
        let index = ibv_get_pkey_index(place.adapter.context, place.port, id.base.route.ib.pkey);
        attr.pkey_index = u16::try_from(index).map_err(|_| libc::EINVAL)?;
        let mask = QP_STATE | QP_PKEY_INDEX | QP_PORT;
        if id.is_datagrams() {
            attr.qkey = UDP_QKEY;
            return Ok((attr, mask | QP_QKEY));
        }
        if connected {
            attr.qp_access_flags = ACCESS_REMOTE_WRITE;
        }
        if connected && id.responder_resources > 0 {
            attr.qp_access_flags |= ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC;
        }
        return Ok((attr, mask | QP_ACCESS_FLAGS));
    }
    let peer = id.peer.ok_or(libc::EINVAL)?;
    let reliable = id.base.qp_type == QPT_RC;
    match state {
        QPS_RTR => {
            attr.ah_attr = towards(id);
            attr.path_mtu = u32::from(peer.mtu.min(place.mtu()));
            attr.dest_qp_num = peer.number;
            attr.rq_psn = peer.psn;
            attr.max_dest_rd_atomic = id.responder_resources;
            let mask = QP_STATE | QP_AV | QP_PATH_MTU | QP_DEST_QPN | QP_RQ_PSN;
            let more = QP_MAX_DEST_RD_ATOMIC | QP_MIN_RNR_TIMER;
            Ok((attr, if reliable { mask | more } else { mask }))
        }
        QPS_RTS => {
            attr.sq_psn = id.own.psn;
            attr.timeout = id.options.ack_timeout.unwrap_or(ACK_TIMEOUT);
            attr.retry_cnt = match id.own.retry_count {
                // Only who asks says how often.
                0 => peer.retry_count,
                own => own,
            };
            attr.rnr_retry = peer.rnr_retry_count;
            attr.max_rd_atomic = id.initiator_depth;
            let more = QP_TIMEOUT | QP_RETRY_CNT | QP_RNR_RETRY | QP_MAX_QP_RD_ATOMIC;
            let mask = QP_STATE | QP_SQ_PSN;
            Ok((attr, if reliable { mask | more } else { mask }))
        }
        _ => Err(libc::EINVAL),
    }
}

#[no_mangle]
unsafe extern "C" fn rdma_init_qp_attr(id: *mut CmId, attr: *mut QpAttr, mask: *mut Int) -> Int {
    match attributes(Id::of(id), (*attr).qp_state) {
        Ok(made) => {
            (*attr, *mask) = made;
            0
        }
        Err(error) => refuse(error),
    }
}

unsafe fn modify(qp: *mut Qp, (mut attr, mask): (QpAttr, Int)) -> Result<(), i32> {
    match ibv_modify_qp(qp, &mut attr, mask) {
        0 => Ok(()),
        error => Err(error),
    }
}

/// Connects the queue pair, where the identifier has one. `depths`: the program's own responder resources and depth.
pub(super) unsafe fn make_ready(id: &Id, depths: Option<(u8, u8)>) -> Int {
    if id.base.qp.is_null() {
        return 0;
    }
    let all = || {
        modify(id.base.qp, attributes(id, QPS_INIT)?)?;
        let (mut attr, mask) = attributes(id, QPS_RTR)?;
        attr.max_dest_rd_atomic = depths.map_or(attr.max_dest_rd_atomic, |d| d.0);
        modify(id.base.qp, (attr, mask))?;
        let (mut attr, mask) = attributes(id, QPS_RTS)?;
        attr.max_rd_atomic = depths.map_or(attr.max_rd_atomic, |d| d.1);
        modify(id.base.qp, (attr, mask))
    };
    all().map_or_else(refuse, |()| 0)
}

pub(super) unsafe fn to_error(id: &Id) -> Int {
    if id.base.qp.is_null() {
        return 0;
    }
    let error = QpAttr {
        qp_state: QPS_ERR,
        ..QpAttr::default()
    };
    modify(id.base.qp, (error, QP_STATE)).map_or_else(refuse, |()| 0)
}

/// A new queue pair to where it can be given receives, and where it needs no other end, to where it sends.
unsafe fn begin(id: &Id, qp: *mut Qp) -> Result<(), i32> {
    modify(qp, attributes(id, QPS_INIT)?)?;
    if !id.is_datagrams() {
        return Ok(());
    }
    for (state, mask) in [(QPS_RTR, QP_STATE), (QPS_RTS, QP_STATE | QP_SQ_PSN)] {
        let attr = QpAttr {
            qp_state: state,
            ..QpAttr::default()
        };
        modify(qp, (attr, mask))?;
    }
    Ok(())
}

/// One half of the completion queues that an identifier makes where the program gives none.
unsafe fn make_cq(id: *mut CmId, size: u32) -> Option<(*mut CompChannel, *mut Cq)> {
    let channel = ibv_create_comp_channel((*id).verbs);
    if channel.is_null() {
        return None;
    }
    let cq = ibv_create_cq((*id).verbs, size as Int, id.cast(), channel, 0);
    if cq.is_null() {
        ibv_destroy_comp_channel(channel);
        return None;
    }
    Some((channel, cq))
}

unsafe fn create_cqs(id: *mut CmId, send: u32, receive: u32) -> bool {
    if receive > 0 {
        let Some(made) = make_cq(id, receive) else { return false };
        ((*id).recv_cq_channel, (*id).recv_cq) = made;
    }
    if send > 0 {
        let Some(made) = make_cq(id, send) else {
            destroy_cqs(id);
            return false;
        };
        ((*id).send_cq_channel, (*id).send_cq) = made;
    }
    true
}

unsafe fn destroy_cqs(id: *mut CmId) {
    let i = &mut *id;
    // A program may have set both to one.
    let queues = [i.recv_cq, if i.send_cq == i.recv_cq { null_mut() } else { i.send_cq }];
    let other = if i.send_cq_channel == i.recv_cq_channel {
        null_mut()
    } else {
        i.send_cq_channel
    };
    let channels = [i.recv_cq_channel, other];
    for cq in queues.into_iter().filter(|cq| !cq.is_null()) {
        ibv_destroy_cq(cq);
    }
    for channel in channels.into_iter().filter(|channel| !channel.is_null()) {
        ibv_destroy_comp_channel(channel);
    }
    (i.recv_cq, i.send_cq) = (null_mut(), null_mut());
    (i.recv_cq_channel, i.send_cq_channel) = (null_mut(), null_mut());
}

#[no_mangle]
unsafe extern "C" fn rdma_create_qp_ex(id: *mut CmId, init: *mut QpInitAttrEx) -> Int {
    let (i, a) = (&mut *id, &mut *init);
    if !i.qp.is_null() || i.verbs.is_null() {
        return refuse(libc::EINVAL);
    }
    if a.comp_mask & QP_INIT_ATTR_PD == 0 || a.pd.is_null() {
        a.comp_mask |= QP_INIT_ATTR_PD;
        a.pd = i.pd;
    } else if (*a.pd).context != i.verbs {
        return refuse(libc::EINVAL);
    }
    let other = |own: *mut Cq, given: *mut Cq| !own.is_null() && !given.is_null() && own != given;
    if other(i.recv_cq, a.recv_cq) || other(i.send_cq, a.send_cq) {
        return refuse(libc::EINVAL);
    }
    let size = |given: *mut Cq, own: *mut Cq, wanted: u32| if given.is_null() && own.is_null() { wanted } else { 0 };
    let send = size(a.send_cq, i.send_cq, a.cap.max_send_wr);
    let receive = size(a.recv_cq, i.recv_cq, a.cap.max_recv_wr);
    if !create_cqs(id, send, receive) {
        return -1;
    }
    let or = |given: *mut Cq, own: *mut Cq| if given.is_null() { own } else { given };
    (a.send_cq, a.recv_cq) = (or(a.send_cq, i.send_cq), or(a.recv_cq, i.recv_cq));
    if a.srq.is_null() {
        a.srq = i.srq;
    }
    let qp = match a.comp_mask {
        // What is plain begins with the same fields.
        QP_INIT_ATTR_PD => ibv_create_qp(a.pd, init.cast()),
        _ => create_qp_ex(i.verbs, init),
    };
    let begun = match qp.is_null() {
        true => Err(crate::errno()),
        false => begin(Id::of(id), qp),
    };
    if let Err(error) = begun {
        if !qp.is_null() {
            ibv_destroy_qp(qp);
        }
        destroy_cqs(id);
        return refuse(error);
    }
    (i.pd, i.qp) = ((*qp).pd, qp);
    0
}

#[no_mangle]
pub(super) unsafe extern "C" fn rdma_create_qp(id: *mut CmId, pd: *mut Pd, init: *mut QpInitAttr) -> Int {
    let plain = &mut *init;
    // SAFETY: numbers and pointers, for which zero is a value.
    let mut extended: QpInitAttrEx = std::mem::zeroed();
    extended.qp_context = plain.qp_context;
    (extended.send_cq, extended.recv_cq, extended.srq) = (plain.send_cq, plain.recv_cq, plain.srq);
    (extended.cap, extended.qp_type, extended.sq_sig_all) = (plain.cap, plain.qp_type, plain.sq_sig_all);
    extended.comp_mask = QP_INIT_ATTR_PD;
    extended.pd = if pd.is_null() { (*id).pd } else { pd };
    let error = rdma_create_qp_ex(id, &mut extended);
    (plain.send_cq, plain.recv_cq, plain.srq) = (extended.send_cq, extended.recv_cq, extended.srq);
    plain.cap = extended.cap;
    error
}

#[no_mangle]
pub(super) unsafe extern "C" fn rdma_destroy_qp(id: *mut CmId) {
    ibv_destroy_qp((*id).qp);
    (*id).qp = null_mut();
    destroy_cqs(id);
}

#[no_mangle]
unsafe extern "C" fn rdma_create_srq(id: *mut CmId, pd: *mut Pd, init: *mut SrqInitAttr) -> Int {
    let pd = if pd.is_null() { (*id).pd } else { pd };
    if pd.is_null() {
        return refuse(libc::EINVAL);
    }
    let srq = ibv_create_srq(pd, init);
    if srq.is_null() {
        return -1;
    }
    if (*id).pd.is_null() {
        (*id).pd = pd;
    }
    (*id).srq = srq;
    0
}

#[no_mangle]
pub(super) unsafe extern "C" fn rdma_destroy_srq(id: *mut CmId) {
    ibv_destroy_srq((*id).srq);
    (*id).srq = null_mut();
    destroy_cqs(id);
}

#[no_mangle]
unsafe extern "C" fn rdma_get_devices(count: *mut Int) -> *mut *mut Context {
    let contexts = adapter::contexts();
    if let Some(count) = count.as_mut() {
        *count = contexts.len() as Int;
    }
    if contexts.is_empty() {
        crate::set_errno(libc::ENODEV);
        return null_mut();
    }
    let list = libc::calloc(contexts.len() + 1, size_of::<*mut Context>()).cast::<*mut Context>();
    if !list.is_null() {
        contexts.iter().enumerate().for_each(|(i, c)| *list.add(i) = *c);
    }
    list
}

#[no_mangle]
unsafe extern "C" fn rdma_free_devices(list: *mut *mut Context) {
    libc::free(list.cast());
}
