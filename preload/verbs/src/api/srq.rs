//! Shared receive queues.

use super::event::drop_events;
use super::{enter, keeps, none};
use crate::gate::Call;
use crate::real::real;
use crate::shadow::{await_acknowledged, free, strike, ShadowContext, ShadowPd, ShadowSrq, CONDITION, MUTEX, WORLD};
use belay_ibv::*;
use std::ptr::{addr_of_mut, null_mut};

#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_create_srq(pd: *mut Pd, init: *mut SrqInitAttr) -> *mut Srq {
    let _call = enter!((*pd).context, (real().ibv_create_srq)(pd, init));
    let user = (*init).srq_context;
    let base = Srq {
        context: (*pd).context,
        srq_context: user,
        pd,
        handle: 0,
        mutex: MUTEX,
        cond: CONDITION,
        events_completed: 0,
    };
    let empty = SrqAttr::default();
    let Some(requests) = ShadowSrq::shared_log(&empty) else {
        return none(libc::ENOMEM);
    };
    let shadow = Box::into_raw(Box::new(ShadowSrq {
        base,
        real: null_mut(),
        attr: empty,
        requests,
        number: 0,
        async_events: 0,
    }));
    (*init).srq_context = keeps(shadow);
    let made = (real().ibv_create_srq)((*pd.cast::<ShadowPd>()).real, init);
    (*init).srq_context = user;
    if made.is_null() {
        free(shadow);
        return null_mut();
    }
    // The provider has put in what it made.
    let Some(requests) = ShadowSrq::shared_log(&(*init).attr) else {
        (real().ibv_destroy_srq)(made);
        free(shadow);
        return none(libc::ENOMEM);
    };
    // A limit is not set here, whatever the program has left in its place.
    let attr = SrqAttr {
        srq_limit: 0,
        ..(*init).attr
    };
    ((*shadow).attr, (*shadow).requests) = (attr, requests);
    (*shadow).real = made;
    (*shadow).base.handle = (*made).handle;
    (*shadow).number = real_number(&*shadow);
    WORLD.lock().srqs.push(shadow);
    shadow.cast()
}

/// The provider's number of the queue, 0 where it has none.
unsafe fn real_number(srq: &ShadowSrq) -> u32 {
    let mut number = 0;
    if let Some(ask) = ShadowContext::of(srq.base.context)
        .extended()
        .and_then(|x| x.as_ref().get_srq_num)
    {
        ask(srq.real, &mut number);
    }
    number
}

#[no_mangle]
unsafe extern "C" fn ibv_modify_srq(srq: *mut Srq, attr: *mut SrqAttr, mask: Int) -> Int {
    let _call = enter!((*srq).context, (real().ibv_modify_srq)(srq, attr, mask));
    let shadow = &mut *srq.cast::<ShadowSrq>();
    let error = (real().ibv_modify_srq)(shadow.real, attr, mask);
    if error == 0 && mask & SRQ_MAX_WR != 0 {
        shadow.grow((*attr).max_wr);
        shadow.attr.max_wr = (*attr).max_wr;
    }
    if error == 0 && mask & SRQ_LIMIT != 0 {
        shadow.attr.srq_limit = (*attr).srq_limit;
    }
    error
}

#[no_mangle]
unsafe extern "C" fn ibv_query_srq(srq: *mut Srq, attr: *mut SrqAttr) -> Int {
    let _call = enter!((*srq).context, (real().ibv_query_srq)(srq, attr));
    (real().ibv_query_srq)((*srq.cast::<ShadowSrq>()).real, attr)
}

pub(crate) unsafe extern "C" fn get_srq_num(srq: *mut Srq, number: *mut u32) -> Int {
    let _call = Call::enter();
    *number = (*srq.cast::<ShadowSrq>()).number;
    0
}

#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_destroy_srq(srq: *mut Srq) -> Int {
    let call = enter!((*srq).context, (real().ibv_destroy_srq)(srq));
    let shadow = srq.cast::<ShadowSrq>();
    let error = (real().ibv_destroy_srq)((*shadow).real);
    if error != 0 {
        return error;
    }
    {
        let mut world = WORLD.lock();
        strike(&mut world.srqs, shadow);
        drop_events((*srq).context, shadow);
    }
    drop(call);
    let base = addr_of_mut!((*shadow).base);
    await_acknowledged(addr_of_mut!((*base).mutex), addr_of_mut!((*base).cond), || {
        (*base).events_completed == (*shadow).async_events
    });
    free(shadow);
    0
}
