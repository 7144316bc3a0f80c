//! Contexts: open devices.

use super::{Bell, ShadowDevice, Table};
use crate::lock::Lock;
use crate::names::{Port, PortName};
use crate::translate::{is_identity, Keys};
use crate::{api, path};

use belay_ibv::*;
use std::collections::VecDeque;
use std::mem::{offset_of, size_of, zeroed};
use std::ptr::{null_mut, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering::Acquire, Ordering::Release};

#[repr(C)]
pub(crate) struct ShadowContext {
    verbs: VerbsContext,
    pub(crate) real: *mut Context,
    pub(crate) bell: Bell,
    /// By the numbers that the provider has given.
    pub(crate) qps: Table,
    /// As they were when the program was last checkpointed before a restart: what it sees after one. Those of before a
    /// change stay where they are: somebody may be reading them.
    ports: AtomicPtr<Vec<Port>>,
    /// As they are, kept in the same way: a signal handler may ask while the thread that it has interrupted does.
    today: AtomicPtr<Vec<Port>>,
    /// What ports were called before.
    pub(crate) former: Lock<Vec<PortName>>,
    /// The program's keys of its regions, and today's. Never freed; null where they are the same.
    pub(crate) lkeys: AtomicPtr<Keys>,
    /// Asynchronous events that the program has not had, and the provider has no more.
    pub(crate) events: Lock<VecDeque<AsyncEvent>>,
}

impl ShadowContext {
    /// The shadow of a context that a program has.
    ///
    /// # Safety
    /// One that [`ShadowContext::program`] has given.
    #[inline]
    pub(crate) unsafe fn of<'a>(context: *mut Context) -> &'a ShadowContext {
        &*context.byte_sub(offset_of!(VerbsContext, context)).cast::<ShadowContext>()
    }

    /// Whether a context is a shadow's, and not a provider's: its functions are this library's.
    ///
    /// # Safety
    /// Null, or a context that lives.
    pub(crate) unsafe fn is_one(context: *mut Context) -> bool {
        let poll = context.as_ref().and_then(|c| c.ops.poll_cq);
        poll.is_some_and(|poll| std::ptr::fn_addr_eq(poll, path::poll_cq as unsafe extern "C" fn(*mut Cq, Int, *mut Wc) -> Int))
    }

    /// What the program gets.
    pub(crate) fn program(&self) -> *mut Context {
        std::ptr::from_ref(&self.verbs.context).cast_mut()
    }

    pub(crate) fn device(&self) -> *mut ShadowDevice {
        self.verbs.context.device.cast()
    }

    /// The provider's own table, where it has one that goes as far as ours.
    pub(crate) unsafe fn extended(&self) -> Option<NonNull<VerbsContext>> {
        let whole = ((*self.real).abi_compat == EXTENDED).then(|| self.real.byte_sub(offset_of!(VerbsContext, context)))?;
        let whole = whole.cast::<VerbsContext>();
        // The first field of ours is there.
        let there = (*std::ptr::addr_of!((*whole).sz)) >= size_of::<VerbsContext>();
        if there {
            NonNull::new(whole)
        } else {
            None
        }
    }

    /// The real key of a region.
    #[inline]
    pub(crate) fn lkey(&self, key: u32) -> u32 {
        // SAFETY: never freed.
        let keys = unsafe { self.lkeys.load(Acquire).as_ref() };
        keys.and_then(|k| k.get(&key)).copied().unwrap_or(key)
    }

    /// How many regions have other keys.
    pub(crate) fn lkeys(&self) -> usize {
        // SAFETY: never freed.
        unsafe { self.lkeys.load(Acquire).as_ref() }.map_or(0, |k| k.len())
    }

    /// The ports as the program sees them.
    pub(crate) fn ports(&self) -> &[Port] {
        // SAFETY: never freed.
        unsafe { &*self.ports.load(Acquire) }
    }

    /// The ports as they are.
    pub(crate) fn today(&self) -> &[Port] {
        // SAFETY: never freed.
        unsafe { &*self.today.load(Acquire) }
    }

    pub(crate) fn set_today(&self, ports: Vec<Port>) {
        self.today.store(Box::into_raw(Box::new(ports)), Release);
    }

    /// Looks at the ports: a subnet manager may have given one another LID, and the host others of its addresses. A
    /// program that has not been restarted sees them as they are; after a restart it keeps its names, whatever they lead
    /// to. The world is locked.
    ///
    /// # Safety
    /// The real device is open.
    pub(crate) unsafe fn look_again(&self) {
        let now = Port::all(self.real);
        // One that is gone says nothing.
        if now.len() != self.today().len() || now == self.today() {
            return;
        }
        if is_identity() {
            let names = |ports: &[Port]| ports.iter().flat_map(Port::names).collect::<Vec<_>>();
            let (before, names) = (names(self.ports()), names(&now));
            let gone = before.into_iter().filter(|n| !names.contains(n));
            self.former.lock().extend(gone);
            self.ports.store(Box::into_raw(Box::new(now.clone())), Release);
        }
        self.set_today(now);
    }

    /// Of a context that has just been opened.
    ///
    /// # Safety
    /// A real context of this device.
    pub(crate) unsafe fn new(real: *mut Context, device: *mut ShadowDevice) -> Option<Box<ShadowContext>> {
        Some(Self::with(real, device, Bell::new((*real).async_fd)?, Port::all(real)))
    }

    /// The same with what is known of it.
    ///
    /// # Safety
    /// As for [`ShadowContext::new`].
    pub(crate) unsafe fn with(real: *mut Context, device: *mut ShadowDevice, bell: Bell, ports: Vec<Port>) -> Box<ShadowContext> {
        // SAFETY: numbers, pointers and optional functions only, for all of which zero is a value.
        let verbs: VerbsContext = zeroed();
        let mut shadow = Box::new(ShadowContext {
            verbs,
            real,
            bell,
            qps: Table::new(),
            today: AtomicPtr::new(Box::into_raw(Box::new(ports.clone()))),
            ports: AtomicPtr::new(Box::into_raw(Box::new(ports))),
            former: Lock::default(),
            lkeys: AtomicPtr::new(null_mut()),
            events: Lock::default(),
        });
        let theirs = shadow.extended();
        let v = &mut shadow.verbs;
        v.sz = size_of::<VerbsContext>();
        v.context.device = device.cast();
        v.context.cmd_fd = (*real).cmd_fd;
        v.context.async_fd = shadow.bell.fd;
        v.context.num_comp_vectors = (*real).num_comp_vectors;
        v.context.mutex = super::MUTEX;
        v.context.abi_compat = EXTENDED;
        v.context.ops.poll_cq = Some(path::poll_cq);
        v.context.ops.req_notify_cq = Some(path::req_notify_cq);
        v.context.ops.post_send = Some(path::post_send);
        v.context.ops.post_recv = Some(path::post_recv);
        v.context.ops.post_srq_recv = Some(path::post_srq_recv);
        v.query_port = Some(api::query_port_sized);
        if let Some(theirs) = theirs {
            offer(v, theirs.as_ref());
        }
        shadow
    }
}

/// Offers of the provider's extensions those that can be made again.
fn offer(v: &mut VerbsContext, theirs: &VerbsContext) {
    v.advise_mr = theirs.advise_mr.and(Some(api::advise_mr));
    v.alloc_parent_domain = theirs.alloc_parent_domain.and(Some(api::alloc_parent_domain));
    v.alloc_td = theirs.alloc_td.and(Some(api::alloc_td));
    v.dealloc_td = theirs.dealloc_td.and(Some(api::dealloc_td));
    v.modify_cq = theirs.modify_cq.and(Some(api::modify_cq));
    v.query_rt_values = theirs.query_rt_values.and(Some(api::query_rt_values));
    v.create_cq_ex = theirs.create_cq_ex.and(Some(api::create_cq_ex));
    v.query_device_ex = theirs.query_device_ex.and(Some(api::query_device_ex));
    v.create_qp_ex = theirs.create_qp_ex.and(Some(api::create_qp_ex));
    v.get_srq_num = theirs.get_srq_num.and(Some(api::get_srq_num));
    v.modify_qp_rate_limit = null_mut();
}
