//! Completion channels and asynchronous events.
//!
//! The provider's events are acknowledged when they are handed out: what a program has to acknowledge is counted in the
//! shadows.

use super::{enter, none};
use crate::real::real;
use crate::shadow::{acknowledge, free, strike, Bell, ShadowChannel, ShadowContext, ShadowCq, ShadowQp, ShadowSrq, WORLD};
use belay_ibv::*;
use std::ptr::{addr_of_mut, null_mut};
use std::sync::atomic::{AtomicU32, Ordering::Acquire};

#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_create_comp_channel(context: *mut Context) -> *mut CompChannel {
    let _call = enter!(context, (real().ibv_create_comp_channel)(context));
    let real_channel = (real().ibv_create_comp_channel)(ShadowContext::of(context).real);
    if real_channel.is_null() {
        return null_mut();
    }
    let Some(bell) = Bell::new((*real_channel).fd) else {
        (real().ibv_destroy_comp_channel)(real_channel);
        return none(libc::EMFILE);
    };
    let base = CompChannel {
        context,
        fd: bell.fd,
        refcnt: 0,
    };
    let shadow = ShadowChannel {
        base,
        real: real_channel,
        bell,
        users: AtomicU32::new(0),
        events: Default::default(),
    };
    let shadow = Box::into_raw(Box::new(shadow));
    WORLD.lock().channels.push(shadow);
    shadow.cast()
}

#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut CompChannel) -> Int {
    let _call = enter!((*channel).context, (real().ibv_destroy_comp_channel)(channel));
    let shadow = channel.cast::<ShadowChannel>();
    if (*shadow).users.load(Acquire) != 0 {
        return libc::EBUSY;
    }
    let error = (real().ibv_destroy_comp_channel)((*shadow).real);
    if error == 0 {
        strike(&mut WORLD.lock().channels, shadow);
        (*shadow).bell.close();
        free(shadow);
    }
    error
}

/// The next event, if there is one: its queue.
unsafe fn next_event(channel: &ShadowChannel) -> *mut ShadowCq {
    let mut events = channel.events.lock();
    let mut cq = events.kicked.pop_front().unwrap_or(null_mut());
    if events.kicked.is_empty() {
        channel.bell.silence();
    }
    if cq.is_null() {
        let (mut real_cq, mut shadow) = (null_mut(), null_mut());
        if (real().ibv_get_cq_event)(channel.real, &mut real_cq, &mut shadow) != 0 {
            return null_mut();
        }
        (real().ibv_ack_cq_events)(real_cq, 1);
        cq = shadow.cast();
    }
    libc::pthread_mutex_lock(addr_of_mut!((*cq).base.base.mutex));
    (*cq).events = (*cq).events.wrapping_add(1);
    libc::pthread_mutex_unlock(addr_of_mut!((*cq).base.base.mutex));
    cq
}

#[no_mangle]
unsafe extern "C" fn ibv_get_cq_event(channel: *mut CompChannel, cq: *mut *mut Cq, user: *mut *mut Opaque) -> Int {
    loop {
        {
            let _call = enter!((*channel).context, (real().ibv_get_cq_event)(channel, cq, user));
            let found = next_event(&*channel.cast());
            if let Some(found) = found.as_ref() {
                *cq = std::ptr::from_ref(found).cast_mut().cast();
                *user = found.base.base.cq_context;
                return 0;
            }
            if crate::errno() != libc::EAGAIN {
                return -1;
            }
        }
        if (*channel.cast::<ShadowChannel>()).bell.wait() != 0 {
            return -1;
        }
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_ack_cq_events(cq: *mut Cq, count: u32) {
    if super::means_real((*cq).context) {
        return (real().ibv_ack_cq_events)(cq, count);
    }
    acknowledge(
        addr_of_mut!((*cq).mutex),
        addr_of_mut!((*cq).cond),
        addr_of_mut!((*cq).comp_events_completed),
        count,
    );
}

/// What an asynchronous event is about.
enum Subject {
    Cq,
    Qp,
    Srq,
    Other,
}

fn subject(event: u32) -> Subject {
    match event {
        EVENT_CQ_ERR => Subject::Cq,
        EVENT_QP_FATAL..=EVENT_PATH_MIG_ERR | EVENT_QP_LAST_WQE_REACHED => Subject::Qp,
        EVENT_SRQ_ERR | EVENT_SRQ_LIMIT_REACHED => Subject::Srq,
        _ => Subject::Other,
    }
}

/// The shadow's event of a real one, which is acknowledged. It counts when the program gets it ([`count`]).
unsafe fn take_over(event: &mut AsyncEvent) {
    let mut given = *event;
    match subject(event.event_type) {
        Subject::Cq => given.element.cq = (*event.element.cq).cq_context.cast(),
        Subject::Qp => {
            let q = (*event.element.qp).qp_context.cast::<ShadowQp>();
            given.element.qp = q.cast();
            if event.event_type == EVENT_SQ_DRAINED {
                (*q).shown.lock().to_sqd = 0;
            }
        }
        Subject::Srq => {
            let srq = (*event.element.srq).srq_context.cast::<ShadowSrq>();
            given.element.srq = srq.cast();
            if event.event_type == EVENT_SRQ_LIMIT_REACHED {
                (*srq).attr.srq_limit = 0;
            }
        }
        Subject::Other => return,
    }
    (real().ibv_ack_async_event)(event);
    *event = given;
}

/// Counts an event that the program gets: whoever destroys its object waits until it is acknowledged.
unsafe fn count(event: &AsyncEvent) {
    let e = event.element;
    let (mutex, count): (*mut libc::pthread_mutex_t, *mut u32) = match subject(event.event_type) {
        Subject::Cq => {
            let cq = e.cq.cast::<ShadowCq>();
            (addr_of_mut!((*cq).base.base.mutex), addr_of_mut!((*cq).async_events))
        }
        Subject::Qp => {
            let qp = e.qp.cast::<ShadowQp>();
            (addr_of_mut!((*qp).base.base.mutex), addr_of_mut!((*qp).async_events))
        }
        Subject::Srq => {
            let srq = e.srq.cast::<ShadowSrq>();
            (addr_of_mut!((*srq).base.mutex), addr_of_mut!((*srq).async_events))
        }
        Subject::Other => return,
    };
    libc::pthread_mutex_lock(mutex);
    *count = (*count).wrapping_add(1);
    libc::pthread_mutex_unlock(mutex);
}

/// Drops the events of an object that goes, which the program has not had: as the kernel drops those that it still has.
/// The world is locked.
pub(crate) unsafe fn drop_events<T>(context: *mut Context, object: *mut T) {
    let c = ShadowContext::of(context);
    let mut events = c.events.lock();
    events.retain(|event| {
        let e = event.element;
        let about: *mut Opaque = match subject(event.event_type) {
            Subject::Cq => e.cq.cast(),
            Subject::Qp => e.qp.cast(),
            Subject::Srq => e.srq.cast(),
            Subject::Other => return true,
        };
        about != object.cast()
    });
    if events.is_empty() {
        c.bell.silence();
    }
}

/// Whether this library has brought about what an event says.
unsafe fn is_own(event: &AsyncEvent) -> bool {
    event.event_type == EVENT_QP_LAST_WQE_REACHED && (*(*event.element.qp).qp_context.cast::<ShadowQp>()).leaving.load(Acquire)
}

/// The provider's next event, as the program gets it. The world is locked.
unsafe fn next_async(c: &ShadowContext) -> Option<AsyncEvent> {
    let mut event = AsyncEvent {
        element: EventElement { port_num: 0 },
        event_type: 0,
    };
    loop {
        if (real().ibv_get_async_event)(c.real, &mut event) != 0 {
            return None;
        }
        if !is_own(&event) {
            break;
        }
        (real().ibv_ack_async_event)(&mut event);
    }
    if matches!(event.event_type, EVENT_LID_CHANGE | EVENT_GID_CHANGE) {
        c.look_again();
    }
    take_over(&mut event);
    Some(event)
}

/// Takes the events that the provider has. What this library has brought about is none of the program's. The world is locked.
pub(crate) unsafe fn save_events(c: &ShadowContext) {
    let mut events = c.events.lock();
    while let Some(event) = next_async(c) {
        events.push_back(event);
    }
    if !events.is_empty() {
        c.bell.ring();
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_get_async_event(context: *mut Context, event: *mut AsyncEvent) -> Int {
    loop {
        {
            let _call = enter!(context, (real().ibv_get_async_event)(context, event));
            // Objects go only when whoever hands out an event of theirs has counted it.
            let _world = WORLD.lock();
            let c = ShadowContext::of(context);
            let mut saved = c.events.lock();
            if let Some(found) = saved.pop_front().or_else(|| next_async(c)) {
                count(&found);
                *event = found;
                if saved.is_empty() {
                    c.bell.silence();
                }
                return 0;
            }
            if crate::errno() != libc::EAGAIN {
                return -1;
            }
        }
        if ShadowContext::of(context).bell.wait() != 0 {
            return -1;
        }
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_ack_async_event(event: *mut AsyncEvent) {
    let e = (*event).element;
    let context = match subject((*event).event_type) {
        Subject::Cq => (*e.cq).context,
        Subject::Qp => (*e.qp).context,
        Subject::Srq => (*e.srq).context,
        Subject::Other => null_mut(),
    };
    if super::means_real(context) {
        return (real().ibv_ack_async_event)(event);
    }
    match subject((*event).event_type) {
        Subject::Cq => {
            let cq = e.cq;
            acknowledge(
                addr_of_mut!((*cq).mutex),
                addr_of_mut!((*cq).cond),
                addr_of_mut!((*cq).async_events_completed),
                1,
            );
        }
        Subject::Qp => {
            let qp = e.qp;
            acknowledge(
                addr_of_mut!((*qp).mutex),
                addr_of_mut!((*qp).cond),
                addr_of_mut!((*qp).events_completed),
                1,
            );
        }
        Subject::Srq => {
            let srq = e.srq;
            acknowledge(
                addr_of_mut!((*srq).mutex),
                addr_of_mut!((*srq).cond),
                addr_of_mut!((*srq).events_completed),
                1,
            );
        }
        Subject::Other => {}
    }
}
