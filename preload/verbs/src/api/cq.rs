//! Completion queues.

use super::event::drop_events;
use super::{enter, keeps, none};
use crate::gate::Call;
use crate::path::{collect, extend_cq};
use crate::real::real;
use crate::shadow::{await_acknowledged, free, strike, ShadowChannel, ShadowContext, ShadowCq, ShadowQp, CONDITION, MUTEX, WORLD};
use belay_ibv::*;
use std::mem::zeroed;
use std::ptr::{addr_of_mut, null_mut};
use std::sync::atomic::Ordering::AcqRel;

/// Places for markers: so many may be on their way at a time for the queue pairs that complete into one queue.
pub(crate) const SPARE: Int = 4;

/// A shadow that waits for its real queue: the real one keeps a pointer to it.
unsafe fn prepare(context: *mut Context, user: *mut Opaque, channel: *mut CompChannel, vector: Int) -> *mut ShadowCq {
    // SAFETY: numbers, pointers and optional functions, for which zero is a value.
    let mut base: CqEx = zeroed();
    (base.base.context, base.base.cq_context, base.base.channel) = (context, user, channel);
    (base.base.mutex, base.base.cond) = (MUTEX, CONDITION);
    Box::into_raw(Box::new(ShadowCq {
        base,
        real: null_mut(),
        state: Default::default(),
        vector,
        spare: SPARE,
        armed: Default::default(),
        has_saved: Default::default(),
        extended: None,
        moderation: ModifyCqAttr::default(),
        events: 0,
        async_events: 0,
    }))
}

unsafe fn real_channel(channel: *mut CompChannel) -> *mut CompChannel {
    match channel.cast::<ShadowChannel>().as_ref() {
        Some(c) => c.real,
        None => null_mut(),
    }
}

/// The provider has made the queue, or not.
unsafe fn finish(shadow: *mut ShadowCq, made: *mut Cq) -> *mut Cq {
    if made.is_null() {
        free(shadow);
        return null_mut();
    }
    (*shadow).real = made;
    (*shadow).base.base.cqe = (*made).cqe - (*shadow).spare;
    (*shadow).base.base.handle = (*made).handle;
    if let Some(channel) = (*shadow).channel().as_ref() {
        channel.users.fetch_add(1, AcqRel);
    }
    WORLD.lock().cqs.push(shadow);
    shadow.cast()
}

/// What the real queue is to have for a program's `cqe`. One that is no number of places stays as it is.
fn with_spare(cqe: Int, spare: Int) -> Int {
    if cqe <= 0 {
        return cqe;
    }
    cqe.saturating_add(spare)
}

/// Makes a real queue with places for markers; without, where its device has no room for them.
unsafe fn make_roomy(shadow: *mut ShadowCq, make: impl Fn() -> *mut Cq) -> *mut Cq {
    let made = make();
    if !made.is_null() {
        return made;
    }
    (*shadow).spare = 0;
    make()
}

/// The vector that stands for one of the device that the program has opened, which may have had more.
fn vector_today(vector: Int, then: Int, now: Int) -> Int {
    match (0..then).contains(&vector) {
        true => vector % now.max(1),
        false => vector,
    }
}

unsafe fn real_vector(c: &ShadowContext, vector: Int) -> Int {
    vector_today(vector, (*c.program()).num_comp_vectors, (*c.real).num_comp_vectors)
}

/// Makes the real queue of a plain shadow, with room for the program's `cqe`.
pub(crate) unsafe fn make_plain(shadow: *mut ShadowCq, cqe: Int) -> *mut Cq {
    let base = &(*shadow).base.base;
    let c = ShadowContext::of(base.context);
    let (cqe, vector) = (with_spare(cqe, (*shadow).spare), real_vector(c, (*shadow).vector));
    (real().ibv_create_cq)(c.real, cqe, keeps(shadow), real_channel(base.channel), vector)
}

#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_create_cq(
    context: *mut Context,
    cqe: Int,
    user: *mut Opaque,
    channel: *mut CompChannel,
    vector: Int,
) -> *mut Cq {
    let _call = enter!(context, (real().ibv_create_cq)(context, cqe, user, channel, vector));
    let shadow = prepare(context, user, channel, vector);
    finish(shadow, make_roomy(shadow, || make_plain(shadow, cqe)))
}

/// Makes the real queue of an extended shadow, with room for the program's `cqe`.
pub(crate) unsafe fn make_extended(shadow: *mut ShadowCq, attr: &CqInitAttrEx, cqe: Int) -> *mut Cq {
    let c = ShadowContext::of((*shadow).base.base.context);
    let Some(make) = c.extended().and_then(|x| x.as_ref().create_cq_ex) else {
        return none(libc::EOPNOTSUPP);
    };
    // The library reads what every completion has, whatever the program asks for. What stands for a parent domain is a
    // promise to the provider that it can do without.
    let mut own = CqInitAttrEx {
        cqe: with_spare(cqe, (*shadow).spare) as u32,
        cq_context: keeps(shadow),
        channel: real_channel(attr.channel),
        comp_vector: real_vector(c, attr.comp_vector as Int) as u32,
        wc_flags: attr.wc_flags | WC_STANDARD_FLAGS,
        comp_mask: attr.comp_mask & !CQ_INIT_ATTR_MASK_PD,
        parent_domain: null_mut(),
        ..*attr
    };
    make(c.real, &mut own).cast()
}

pub(crate) unsafe extern "C" fn create_cq_ex(context: *mut Context, attr: *mut CqInitAttrEx) -> *mut CqEx {
    let _call = Call::enter();
    let attr = *attr;
    if attr.wc_flags & !WC_KNOWN_FLAGS != 0 {
        return none(libc::EOPNOTSUPP);
    }
    let shadow = prepare(context, attr.cq_context, attr.channel, attr.comp_vector as Int);
    (*shadow).extended = Some(attr);
    extend_cq(&mut (*shadow).base);
    let made = make_roomy(shadow, || make_extended(shadow, &attr, attr.cqe as Int));
    finish(shadow, made).cast()
}

pub(crate) unsafe extern "C" fn modify_cq(cq: *mut Cq, attr: *mut ModifyCqAttr) -> Int {
    let _call = Call::enter();
    let shadow = cq.cast::<ShadowCq>();
    let error = moderate(&*shadow, &mut *attr);
    if error == 0 && (*attr).attr_mask != 0 {
        (*shadow).moderation = *attr;
    }
    error
}

/// Tells the provider when a queue is to give its events.
unsafe fn moderate(shadow: &ShadowCq, attr: &mut ModifyCqAttr) -> Int {
    match ShadowContext::of(shadow.base.base.context)
        .extended()
        .and_then(|x| x.as_ref().modify_cq)
    {
        Some(modify) => modify(shadow.real, attr),
        None => libc::EOPNOTSUPP,
    }
}

/// The same after a restart. An adapter that does not know of it gives more events than were asked for, which is as good.
pub(crate) unsafe fn moderate_again(shadow: &ShadowCq) {
    if shadow.moderation.attr_mask != 0 {
        moderate(shadow, &mut { shadow.moderation });
    }
}

/// Whether a queue pair may be brought into error: its requests without completions of their own get some then, for which
/// the program has made no places. Where those for markers are too few, the real queue gets more.
pub(crate) unsafe fn has_room_for_silent(q: &ShadowQp) -> bool {
    let Some(cq) = q.send_cq().as_mut() else { return true };
    let markers = WORLD.lock().markers(cq);
    // Nothing is retired meanwhile.
    let mut held = cq.state.lock();
    collect(cq, &mut held);
    let silent = q.send.places().filter(|i| !q.is_signalled(*i)).count();
    let wanted = (silent as u32 + markers) as Int;
    if silent == 0 || wanted <= cq.spare {
        return true;
    }
    let shown = cq.base.base.cqe;
    let made = (real().ibv_resize_cq)(cq.real, with_spare(shown, wanted)) == 0;
    if made {
        cq.spare = (*cq.real).cqe - shown;
    }
    made
}

#[no_mangle]
unsafe extern "C" fn ibv_resize_cq(cq: *mut Cq, cqe: Int) -> Int {
    let _call = enter!((*cq).context, (real().ibv_resize_cq)(cq, cqe));
    let shadow = &mut *cq.cast::<ShadowCq>();
    let mut held = shadow.state.lock();
    // The real one has more places than the program's: what is in it would fit.
    collect(shadow, &mut held);
    if cqe >= 0 && held.saved.len() > cqe as usize {
        return libc::EINVAL;
    }
    let mut spare = SPARE;
    let mut error = (real().ibv_resize_cq)(shadow.real, with_spare(cqe, spare));
    if error != 0 {
        spare = 0;
        error = (real().ibv_resize_cq)(shadow.real, cqe);
    }
    drop(held);
    if error == 0 {
        shadow.spare = spare;
    }
    (*cq).cqe = (*shadow.real).cqe - shadow.spare;
    error
}

#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_destroy_cq(cq: *mut Cq) -> Int {
    let call = enter!((*cq).context, (real().ibv_destroy_cq)(cq));
    let shadow = cq.cast::<ShadowCq>();
    let channel = (*shadow).channel();
    {
        // Nobody hands out its events meanwhile.
        let mut held = channel.as_ref().map(|c| c.events.lock());
        let error = (real().ibv_destroy_cq)((*shadow).real);
        if error != 0 {
            return error;
        }
        if let (Some(events), Some(channel)) = (held.as_mut(), channel.as_ref()) {
            events.kicked.retain(|c| *c != shadow);
            if events.kicked.is_empty() {
                channel.bell.silence();
            }
        }
    }
    if let Some(channel) = channel.as_ref() {
        channel.users.fetch_sub(1, AcqRel);
    }
    {
        let mut world = WORLD.lock();
        strike(&mut world.cqs, shadow);
        drop_events((*cq).context, shadow);
    }
    drop(call);
    let base = addr_of_mut!((*shadow).base.base);
    await_acknowledged(addr_of_mut!((*base).mutex), addr_of_mut!((*base).cond), || {
        (*base).comp_events_completed == (*shadow).events && (*base).async_events_completed == (*shadow).async_events
    });
    free(shadow);
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adapter_with_fewer_vectors_takes_the_queues_of_one_with_more() {
        let today = |vector| vector_today(vector, 8, 3);
        assert_eq!([0, 2, 3, 7].map(today), [0, 2, 0, 1]);
        // What was never one is refused by the provider.
        assert_eq!([-1, 8].map(today), [-1, 8]);
        assert_eq!(vector_today(7, 8, 8), 7);
    }
}
