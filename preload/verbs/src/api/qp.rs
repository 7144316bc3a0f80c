//! Queue pairs.

use super::cq::has_room_for_silent;
use super::event::{drop_events, save_events};
use super::{enter, keeps, make_fitting, none};
use crate::gate::Call;
use crate::names::{port_of, PortName};
use crate::path::{collect, extend_qp, forget_saved, send_operations};
use crate::real::real;
use crate::shadow::{
    await_acknowledged, free, strike, ShadowContext, ShadowCq, ShadowPd, ShadowQp, ShadowSrq, Shown, CONDITION, MUTEX, WORLD,
};
use crate::translate::{self, is_identity, most_numbers, number_is_free};
use belay_ibv::*;
use std::mem::zeroed;
use std::ptr::{addr_of_mut, null_mut};
use std::sync::atomic::Ordering::{Acquire, Release};

/// What can be made again of what an extended queue pair may be made with.
const KNOWN_MASK: u32 = QP_INIT_ATTR_PD | QP_INIT_ATTR_CREATE_FLAGS | QP_INIT_ATTR_SEND_OPS_FLAGS;

/// Queue pairs of the other kinds are not made again.
fn is_offered(kind: u32) -> bool {
    matches!(kind, QPT_RC | QPT_UC | QPT_UD)
}

unsafe fn real_cq(cq: *mut Cq) -> *mut Cq {
    cq.cast::<ShadowCq>().as_ref().map_or(null_mut(), |c| c.real)
}

unsafe fn real_srq(srq: *mut Srq) -> *mut Srq {
    srq.cast::<ShadowSrq>().as_ref().map_or(null_mut(), |s| s.real)
}

/// The attributes of a plain queue pair as its provider is to have them.
pub(crate) unsafe fn real_init(init: &QpInitAttr) -> QpInitAttr {
    QpInitAttr {
        send_cq: real_cq(init.send_cq),
        recv_cq: real_cq(init.recv_cq),
        srq: real_srq(init.srq),
        ..*init
    }
}

/// The same of an extended one.
pub(crate) unsafe fn real_init_ex(init: &QpInitAttrEx) -> QpInitAttrEx {
    let pd = init.pd.cast::<ShadowPd>().as_ref().map_or(null_mut(), |p| p.real);
    QpInitAttrEx {
        send_cq: real_cq(init.send_cq),
        recv_cq: real_cq(init.recv_cq),
        srq: real_srq(init.srq),
        pd,
        ..*init
    }
}

/// Makes a real queue pair whose number the program may see.
unsafe fn make_new(c: &ShadowContext, (domain, plain): (*mut Pd, &QpInitAttr), make: impl FnMut() -> *mut Qp) -> *mut Qp {
    let mut small = QpInitAttr {
        srq: null_mut(),
        cap: QpCap {
            max_send_wr: 1,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        },
        ..*plain
    };
    let make_small = || (real().ibv_create_qp)(domain, &mut small);
    let destroy = |qp| (real().ibv_destroy_qp)(qp);
    make_fitting(most_numbers(c), make, make_small, destroy, |qp| {
        number_is_free(c, (*qp).qp_num)
    })
}

/// So much, and places for markers.
pub(crate) fn roomy(cap: &QpCap, spare: u32) -> QpCap {
    QpCap {
        max_send_wr: cap.max_send_wr.saturating_add(spare),
        ..*cap
    }
}

/// Makes a real queue pair with a place for a marker, where it is of a kind that needs one; without, where its device has
/// no room. It, and the places that it has besides the program's.
unsafe fn make_roomy(c: &ShadowContext, plain: (*mut Pd, &QpInitAttr), mut make: impl FnMut(u32) -> *mut Qp) -> (*mut Qp, u32) {
    let spare = u32::from(plain.1.qp_type == QPT_RC);
    let made = make_new(c, plain, || make(spare));
    if !made.is_null() || spare == 0 {
        return (made, spare);
    }
    (make_new(c, plain, || make(0)), 0)
}

/// What the program is told of what the provider has made.
fn without(cap: &QpCap, spare: u32) -> QpCap {
    QpCap {
        max_send_wr: cap.max_send_wr.saturating_sub(spare),
        ..*cap
    }
}

/// A shadow of what the provider has made.
unsafe fn keep(pd: *mut Pd, init: &QpInitAttr, extended: Option<QpInitAttrEx>, (made, spare): (*mut Qp, u32)) -> *mut Qp {
    // SAFETY: numbers, pointers and optional functions, for which zero is a value.
    let mut base: QpEx = zeroed();
    base.base = Qp {
        context: (*pd).context,
        qp_context: init.qp_context,
        pd,
        send_cq: init.send_cq,
        recv_cq: init.recv_cq,
        srq: init.srq,
        handle: (*made).handle,
        qp_num: (*made).qp_num,
        state: QPS_RESET,
        qp_type: init.qp_type,
        mutex: MUTEX,
        cond: CONDITION,
        events_completed: 0,
    };
    if extended.is_some_and(|e| e.comp_mask & QP_INIT_ATTR_SEND_OPS_FLAGS != 0) {
        extend_qp(&mut base);
    }
    let Some(shadow) = ShadowQp::new(base, made, (init.cap, spare), init, extended) else {
        (real().ibv_destroy_qp)(made);
        return none(libc::ENOMEM);
    };
    let shadow = Box::into_raw(shadow);
    (*made).qp_context = keeps(shadow);
    ShadowContext::of((*pd).context).qps.set((*made).qp_num, shadow);
    WORLD.lock().qps.push(shadow);
    shadow.cast()
}

#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_create_qp(pd: *mut Pd, init: *mut QpInitAttr) -> *mut Qp {
    let _call = enter!((*pd).context, (real().ibv_create_qp)(pd, init));
    if !is_offered((*init).qp_type) {
        return none(libc::EOPNOTSUPP);
    }
    let mut own = real_init(&*init);
    let domain = (*pd.cast::<ShadowPd>()).real;
    let plain = own;
    let (made, spare) = make_roomy(ShadowContext::of((*pd).context), (domain, &plain), |spare| {
        own.cap = roomy(&(*init).cap, spare);
        (real().ibv_create_qp)(domain, &mut own)
    });
    if made.is_null() {
        return null_mut();
    }
    (*init).cap = without(&own.cap, spare);
    keep(pd, &*init, None, (made, spare))
}

pub(crate) unsafe extern "C" fn create_qp_ex(context: *mut Context, init: *mut QpInitAttrEx) -> *mut Qp {
    let _call = Call::enter();
    let c = ShadowContext::of(context);
    let Some(make) = c.extended().and_then(|x| x.as_ref().create_qp_ex) else {
        return none(libc::EOPNOTSUPP);
    };
    let i = &mut *init;
    if i.comp_mask & !KNOWN_MASK != 0 || i.comp_mask & QP_INIT_ATTR_PD == 0 || i.pd.is_null() {
        return none(libc::EOPNOTSUPP);
    }
    let operations = match i.comp_mask & QP_INIT_ATTR_SEND_OPS_FLAGS {
        0 => 0,
        _ => i.send_ops_flags,
    };
    if !is_offered(i.qp_type) || operations & !send_operations(i.qp_type) != 0 {
        return none(libc::EOPNOTSUPP);
    }
    let mut own = real_init_ex(i);
    let mut plain = QpInitAttr {
        qp_context: i.qp_context,
        send_cq: i.send_cq,
        recv_cq: i.recv_cq,
        srq: i.srq,
        cap: i.cap,
        qp_type: i.qp_type,
        sq_sig_all: i.sq_sig_all,
    };
    let (made, spare) = make_roomy(c, (own.pd, &real_init(&plain)), |spare| {
        own.cap = roomy(&i.cap, spare);
        make(c.real, &mut own)
    });
    if made.is_null() {
        return null_mut();
    }
    i.cap = without(&own.cap, spare);
    plain.cap = i.cap;
    keep(i.pd, &plain, Some(*i), (made, spare))
}

#[no_mangle]
unsafe extern "C" fn ibv_qp_to_qp_ex(qp: *mut Qp) -> *mut QpEx {
    let _call = enter!((*qp).context, (real().ibv_qp_to_qp_ex)(qp));
    let q = qp.cast::<ShadowQp>();
    if (*q).base.wr_start.is_some() {
        qp.cast()
    } else {
        null_mut()
    }
}

/// Keeps what the program has set: the way to a state is gone again after a restart.
fn note(shown: &mut Shown, attr: &QpAttr, mask: i32) {
    let a = &mut shown.attr;
    macro_rules! take {
        ($($bit:ident: $($field:ident),*;)*) => { $(if mask & $bit != 0 { $(a.$field = attr.$field;)* })* };
    }
    take! {
        QP_EN_SQD_ASYNC_NOTIFY: en_sqd_async_notify;
        QP_ACCESS_FLAGS: qp_access_flags;
        QP_PKEY_INDEX: pkey_index;
        QP_PORT: port_num;
        QP_QKEY: qkey;
        QP_AV: ah_attr;
        QP_PATH_MTU: path_mtu;
        QP_TIMEOUT: timeout;
        QP_RETRY_CNT: retry_cnt;
        QP_RNR_RETRY: rnr_retry;
        QP_RQ_PSN: rq_psn;
        QP_MAX_QP_RD_ATOMIC: max_rd_atomic;
        QP_ALT_PATH: alt_ah_attr, alt_pkey_index, alt_port_num, alt_timeout;
        QP_MIN_RNR_TIMER: min_rnr_timer;
        QP_SQ_PSN: sq_psn;
        QP_MAX_DEST_RD_ATOMIC: max_dest_rd_atomic;
        QP_PATH_MIG_STATE: path_mig_state;
        QP_DEST_QPN: dest_qp_num;
        QP_RATE_LIMIT: rate_limit;
    }
    if mask & QP_STATE == 0 {
        return;
    }
    let given = mask & !(QP_STATE | QP_CUR_STATE);
    match attr.qp_state {
        QPS_RESET => *shown = Shown::default(),
        QPS_INIT => shown.to_init |= given,
        QPS_RTR => shown.to_rtr |= given,
        QPS_RTS => shown.to_rts |= given & !QP_EN_SQD_ASYNC_NOTIFY,
        _ => {}
    }
}

/// Whether a queue pair gets a right that the program does not give it: markers are writes without data, for which it is
/// needed all the same. At first, and as long as it has it from here: rights that are given later take the place of all
/// before. A right of the program's own goes when the program takes it.
fn adds_write(kind: u32, attr: &QpAttr, mask: Int, added: bool) -> bool {
    let first = mask & QP_STATE != 0 && attr.qp_state == QPS_INIT;
    let given = mask & QP_ACCESS_FLAGS != 0 && attr.qp_access_flags & ACCESS_REMOTE_WRITE == 0;
    kind == QPT_RC && given && (first || added)
}

#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_modify_qp(qp: *mut Qp, attr: *mut QpAttr, mask: Int) -> Int {
    let _call = enter!((*qp).context, (real().ibv_modify_qp)(qp, attr, mask));
    let q = &*qp.cast::<ShadowQp>();
    let resets = mask & QP_STATE != 0 && (*attr).qp_state == QPS_RESET;
    if resets {
        spare_shared(q);
    } else if mask & QP_STATE != 0 && q.leaving.load(Acquire) {
        // An adapter may have been late to say so.
        take_events(q);
        q.leaving.store(false, Release);
    }
    let mut own = *attr;
    let adds = adds_write(q.kind(), &own, mask, q.shown.lock().write_added);
    if adds {
        own.qp_access_flags |= ACCESS_REMOTE_WRITE;
    }
    if mask & QP_AV != 0 && !is_identity() {
        connect(q, &mut own, mask);
    }
    let sends = (QPS_RTS..=QPS_SQE).contains(&(*qp).state);
    let mends = sends && mask & QP_STATE != 0 && own.qp_state == QPS_RTS && q.kind() != QPT_RC;
    if mends {
        collect_both(q);
    }
    let holds = mask & QP_STATE != 0 && own.qp_state == QPS_SQD && (*qp).state != QPS_SQD;
    let asked = q.shown.lock().to_sqd;
    if holds {
        // The event may come before this returns.
        q.shown.lock().to_sqd = mask & QP_EN_SQD_ASYNC_NOTIFY;
    }
    let error = (real().ibv_modify_qp)(q.real, &mut own, mask);
    (*qp).state = (*q.real).state;
    if error != 0 {
        if holds {
            q.shown.lock().to_sqd = asked;
        }
        return error;
    }
    if holds {
        // What others post meanwhile may have begun.
        q.held_from.store(q.send.ends(), Release);
    }
    let mut shown = q.shown.lock();
    note(&mut shown, &*attr, mask);
    q.note_port(&shown);
    if mask & QP_ACCESS_FLAGS != 0 {
        shown.write_added = adds;
    }
    drop(shown);
    if mends {
        q.mend();
    }
    if resets {
        if q.leaving.load(Acquire) {
            take_events(q);
        }
        collect_both(q);
        q.forget();
        forget_both(q);
    }
    0
}

/// Leads a queue pair to where its peer is after a restart.
unsafe fn connect(q: &ShadowQp, own: &mut QpAttr, mask: Int) {
    let mut attr = own.ah_attr;
    attr.port_num = if mask & QP_PORT != 0 {
        own.port_num
    } else {
        q.shown.lock().attr.port_num
    };
    let given = own.ah_attr.port_num;
    let (now, found) = translate::address(ShadowContext::of(q.base.base.context), &attr, own.dest_qp_num);
    own.ah_attr = AhAttr { port_num: given, ..now };
    if let (Some(real), true) = (found, mask & QP_DEST_QPN != 0) {
        own.dest_qp_num = real.number;
    }
    let ethernet = port_of(q).is_some_and(|p| p.ethernet);
    translate::use_keys_of(q, PortName::addressed(&attr, ethernet));
}

/// Takes the events that are there, as long as it is known whose they are.
unsafe fn take_events(q: &ShadowQp) {
    let _world = WORLD.lock();
    save_events(ShadowContext::of(q.base.base.context));
}

/// Takes what is there out of the queue of a queue pair that goes: the requests of a shared queue that are done are
/// not lost with their completions. In error, it takes no more of them; where the adapter refuses the room for that, those
/// that it takes between now and its end are lost.
unsafe fn spare_shared(q: &ShadowQp) {
    let (false, Some(cq)) = (q.srq().is_null(), q.recv_cq().as_ref()) else {
        return;
    };
    // One that is in a group is not destroyed.
    let goes = (QPS_INIT..=QPS_SQE).contains(&q.base.base.state) && q.groups.lock().is_empty();
    if goes && has_room_for_silent(q) {
        // What it has said by itself is the program's.
        take_events(q);
        q.leaving.store(true, Release);
        let mut error = QpAttr {
            qp_state: QPS_ERR,
            ..QpAttr::default()
        };
        (real().ibv_modify_qp)(q.real, &mut error, QP_STATE);
    }
    collect(cq, &mut cq.state.lock());
}

/// Takes what the provider has left in the queues of a queue pair that is gone or reset. Most leave nothing of it; with
/// others it would be taken for something of the next one that has its number.
unsafe fn collect_both(q: &ShadowQp) {
    for cq in q.cqs().filter_map(|cq| cq.as_ref()) {
        collect(cq, &mut cq.state.lock());
    }
}

/// Forgets its completions that the program has not had.
unsafe fn forget_both(q: &ShadowQp) {
    q.cqs().for_each(|cq| forget_saved(cq, q.number()));
}

#[no_mangle]
unsafe extern "C" fn ibv_query_qp(qp: *mut Qp, attr: *mut QpAttr, mask: Int, init: *mut QpInitAttr) -> Int {
    let _call = enter!((*qp).context, (real().ibv_query_qp)(qp, attr, mask, init));
    let q = &*qp.cast::<ShadowQp>();
    let error = (real().ibv_query_qp)(q.real, attr, mask, init);
    (*qp).state = (*q.real).state;
    if error != 0 {
        return error;
    }
    let shown = *q.shown.lock();
    if shown.write_added {
        (*attr).qp_access_flags &= !ACCESS_REMOTE_WRITE;
    }
    if !is_identity() {
        ((*attr).ah_attr, (*attr).dest_qp_num) = (shown.attr.ah_attr, shown.attr.dest_qp_num);
    }
    (*attr).cap = q.cap;
    let i = &mut *init;
    i.cap = q.cap;
    (i.qp_context, i.send_cq, i.recv_cq, i.srq) = ((*qp).qp_context, (*qp).send_cq, (*qp).recv_cq, (*qp).srq);
    0
}

#[no_mangle]
unsafe extern "C" fn ibv_query_qp_data_in_order(qp: *mut Qp, operation: u32, flags: u32) -> Int {
    let _call = enter!((*qp).context, (real().ibv_query_qp_data_in_order)(qp, operation, flags));
    (real().ibv_query_qp_data_in_order)((*qp.cast::<ShadowQp>()).real, operation, flags)
}

#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_destroy_qp(qp: *mut Qp) -> Int {
    let call = enter!((*qp).context, (real().ibv_destroy_qp)(qp));
    let shadow = qp.cast::<ShadowQp>();
    let q = &*shadow;
    spare_shared(q);
    let number = (*q.real).qp_num;
    let context = ShadowContext::of((*qp).context);
    {
        // Whoever asks for an asynchronous event sees the queue pair and its real one, or neither.
        let mut world = WORLD.lock();
        let error = (real().ibv_destroy_qp)(q.real);
        if error != 0 {
            return error;
        }
        strike(&mut world.qps, shadow);
        drop_events((*qp).context, shadow);
    }
    // Another may have the number by now, whose completions these would be.
    if context.qps.get(number).is_some_and(|found| std::ptr::eq(found, q)) {
        collect_both(q);
    }
    context.qps.strike(number, shadow);
    // Whoever was polling and has found it is done when the locks are had.
    forget_both(q);
    drop(call);
    let base = addr_of_mut!((*shadow).base.base);
    await_acknowledged(addr_of_mut!((*base).mutex), addr_of_mut!((*base).cond), || {
        (*base).events_completed == (*shadow).async_events
    });
    free(shadow);
    0
}

/// Enhancements that both ends agree upon are the provider's own, and are not made again.
#[no_mangle]
unsafe extern "C" fn ibv_set_ece(qp: *mut Qp, options: *mut Opaque) -> Int {
    let _call = enter!((*qp).context, (real().ibv_set_ece)(qp, options));
    crate::set_errno(libc::EOPNOTSUPP);
    libc::EOPNOTSUPP
}

#[no_mangle]
unsafe extern "C" fn ibv_query_ece(qp: *mut Qp, options: *mut Opaque) -> Int {
    let _call = enter!((*qp).context, (real().ibv_query_ece)(qp, options));
    std::ptr::write_bytes(options.cast::<u32>(), 0, 3);
    libc::EOPNOTSUPP
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_that_are_given_later_leave_that_of_markers() {
        let attr = QpAttr {
            qp_state: QPS_INIT,
            qp_access_flags: ACCESS_LOCAL_WRITE,
            ..QpAttr::default()
        };
        let later = QpAttr {
            qp_state: QPS_RTS,
            ..attr
        };
        let both = QP_ACCESS_FLAGS | QP_STATE;
        assert!(adds_write(QPT_RC, &attr, both, false) && !adds_write(QPT_UC, &attr, both, false));
        for mask in [QP_ACCESS_FLAGS, both] {
            assert!(adds_write(QPT_RC, &later, mask, true));
            assert!(!adds_write(QPT_RC, &later, mask, false), "the program has taken its own");
        }
        assert!(!adds_write(QPT_RC, &later, QP_STATE, true));
        let writes = QpAttr {
            qp_access_flags: ACCESS_REMOTE_WRITE,
            ..attr
        };
        assert!(!adds_write(QPT_RC, &writes, both, true));
    }
}
