//! Event channels.

use super::id::{forget_new, rdma_destroy_id, rdma_migrate_id};
use super::progress::{advance, hang_up, Advanced};
use super::queue::{make_ready, to_error};
use super::wire::{Kind, Message};
use super::{adapter, managing, refuse, Id, Manager, Source, Stage};
use crate::gate::Whole;
use crate::shadow::{acknowledge, free, wait_readable};
use belay_ibv::*;
use std::collections::VecDeque;
use std::mem::zeroed;
use std::ptr::{addr_of_mut, from_ref, null_mut};

#[repr(C)]
pub(super) struct Channel {
    pub(super) base: EventChannel,
    /// Readable while events are queued.
    kick: i32,
    events: VecDeque<Queued>,
    /// Identifiers that name it: it lasts until the last of them is gone.
    ids: u32,
    /// The program has destroyed it.
    gone: bool,
}

/// An event that the program has not had.
pub(super) struct Queued {
    pub(super) event: u32,
    pub(super) status: Int,
    pub(super) id: *mut Id,
    /// Of a request: who has been asked. The program counts the event to it.
    pub(super) listener: *mut Id,
    /// What the other end has sent.
    pub(super) message: Option<Message>,
}

impl Queued {
    pub(super) fn plain(id: *mut Id, event: u32, status: Int) -> Self {
        Queued {
            event,
            status,
            id,
            listener: null_mut(),
            message: None,
        }
    }

    /// The identifier that counts it.
    pub(super) fn counts(&self) -> *mut Id {
        if self.listener.is_null() {
            self.id
        } else {
            self.listener
        }
    }
}

/// An event as a program has it, and what it does not see.
#[repr(C)]
struct Event {
    base: CmEvent,
    counts: *mut Id,
    data: [u8; 256],
}

/// A descriptor that was made, or why not.
fn made(fd: i32) -> Result<i32, i32> {
    match fd {
        -1 => Err(crate::errno()),
        fd => Ok(fd),
    }
}

impl Channel {
    pub(super) fn new() -> Result<Box<Channel>, i32> {
        let mut channel = Box::new(Channel {
            base: EventChannel { fd: -1 },
            kick: -1,
            events: VecDeque::new(),
            ids: 0,
            gone: false,
        });
        // SAFETY: makes a descriptor.
        channel.base.fd = made(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: as above.
        channel.kick = made(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
        match channel.watch(libc::EPOLL_CTL_ADD, channel.kick, libc::EPOLLIN, 0) {
            true => Ok(channel),
            false => Err(crate::errno()),
        }
    }

    fn close(&mut self) {
        for fd in [&mut self.base.fd, &mut self.kick] {
            // SAFETY: descriptors of our own, which nothing uses any more.
            unsafe { libc::close(std::mem::replace(fd, -1)) };
        }
    }

    /// An identifier names it from now on.
    pub(super) unsafe fn hold(_manager: &Manager, channel: *mut Channel) {
        (*channel).ids += 1;
    }

    /// An identifier does not name it any more.
    pub(super) unsafe fn let_go(_manager: &Manager, channel: *mut Channel) {
        (*channel).ids -= 1;
        if (*channel).gone && (*channel).ids == 0 {
            free(channel);
        }
    }

    /// Whether it could be: `token` is what an event of the descriptor is told by.
    pub(super) fn watch(&self, how: i32, fd: i32, what: i32, token: u64) -> bool {
        let mut event = libc::epoll_event {
            events: what as u32,
            u64: token,
        };
        // SAFETY: descriptors, and an event that lives.
        unsafe { libc::epoll_ctl(self.base.fd, how, fd, &mut event) == 0 }
    }

    pub(super) fn queue(&mut self, event: Queued) {
        self.events.push_back(event);
        let one = 1u64;
        // SAFETY: eight bytes. A counter that is full is readable already.
        unsafe { libc::write(self.kick, from_ref(&one).cast(), 8) };
    }

    fn silence(&self) {
        let mut count = 0u64;
        // SAFETY: eight bytes.
        unsafe { libc::read(self.kick, std::ptr::from_mut(&mut count).cast(), 8) };
    }

    /// The next event, which its identifier counts from now on.
    fn take(&mut self) -> Option<Queued> {
        let event = self.events.pop_front();
        if self.events.is_empty() {
            self.silence();
        }
        if let Some(event) = &event {
            // SAFETY: events of an identifier go with it.
            unsafe { (*event.counts()).reported += 1 };
        }
        event
    }

    /// Takes the events out that are about an identifier.
    pub(super) fn extract(&mut self, id: *mut Id) -> VecDeque<Queued> {
        let (about, others) = self.events.drain(..).partition(|e: &Queued| e.id == id || e.listener == id);
        self.events = others;
        if self.events.is_empty() {
            self.silence();
        }
        about
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.close();
    }
}

#[no_mangle]
pub(super) unsafe extern "C" fn rdma_create_event_channel() -> *mut EventChannel {
    if !adapter::are_there() {
        crate::set_errno(libc::ENODEV);
        return null_mut();
    }
    match Channel::new() {
        Ok(channel) => Box::into_raw(channel).cast(),
        Err(error) => {
            crate::set_errno(error);
            null_mut()
        }
    }
}

#[no_mangle]
pub(super) unsafe extern "C" fn rdma_destroy_event_channel(channel: *mut EventChannel) {
    let mut manager = managing();
    let at = channel.cast::<Channel>();
    // As with the kernel, what is left in it ends, and the identifiers are of no use but to be destroyed.
    for token in manager.sources_of(at) {
        match manager.sources.get(&token) {
            Some(Source::Caller(_)) => drop(manager.dismiss(token)),
            Some(Source::Listener(id) | Source::Connection(id)) => {
                let id = *id;
                hang_up(&mut manager, &mut *id);
            }
            None => {}
        }
    }
    for event in std::mem::take(&mut (*at).events) {
        if event.event == CM_CONNECT_REQUEST {
            forget_new(&mut manager, event.id);
        }
    }
    (*at).close();
    (*at).gone = true;
    if (*at).ids == 0 {
        free(at);
    }
}

#[no_mangle]
pub(super) unsafe extern "C" fn rdma_get_cm_event(channel: *mut EventChannel, event: *mut *mut CmEvent) -> Int {
    if event.is_null() {
        return refuse(libc::EINVAL);
    }
    let at = channel.cast::<Channel>();
    loop {
        // An event that has been taken is told, or it would be waited for.
        let whole = Whole::begin();
        let taken = {
            let _manager = managing();
            if (*at).gone {
                return refuse(libc::EBADF);
            }
            (*at).take()
        };
        if let Some(taken) = taken {
            let counts = taken.counts();
            match deliver(taken) {
                Some(made) => {
                    *event = made;
                    return 0;
                }
                None => complete(counts),
            }
            continue;
        }
        let advanced = advance(&mut managing(), at);
        match advanced {
            Advanced::Somewhat => {}
            Advanced::Failed(error) => return refuse(error),
            Advanced::Nothing => {
                drop(whole);
                if wait_readable((*channel).fd) != 0 {
                    return -1;
                }
            }
        }
    }
}

/// The event counts as acknowledged.
unsafe fn complete(id: *mut Id) {
    acknowledge(
        addr_of_mut!((*id).mutex),
        addr_of_mut!((*id).cond),
        addr_of_mut!((*id).completed),
        1,
    );
}

#[no_mangle]
pub(super) unsafe extern "C" fn rdma_ack_cm_event(event: *mut CmEvent) -> Int {
    if event.is_null() {
        return refuse(libc::EINVAL);
    }
    let event = event.cast::<Event>();
    let counts = (*event).counts;
    free(event);
    complete(counts);
    0
}

/// What becomes of an event on its way to the program; None where it is not told.
unsafe fn deliver(mut queued: Queued) -> Option<*mut CmEvent> {
    let id = &mut *queued.id;
    if queued.message.as_ref().is_some_and(|m| m.kind != Kind::Reject) {
        id.set_path();
    }
    match queued.event {
        // Who listens with a channel of its own gets requests with channels of their own.
        CM_CONNECT_REQUEST if (*queued.listener).sync && rdma_migrate_id(id.program(), null_mut()) != 0 => {
            rdma_destroy_id(id.program());
            return None;
        }
        CM_CONNECT_RESPONSE if !id.base.qp.is_null() => match establish(id) {
            0 => queued.event = CM_ESTABLISHED,
            error => {
                (queued.event, queued.status) = (CM_CONNECT_ERROR, error);
                id.failed = true;
            }
        },
        CM_REJECTED | CM_DISCONNECTED if id.failed => return None,
        CM_REJECTED => {
            to_error(id);
        }
        _ => {}
    }
    Some(as_program_sees(queued, id))
}

/// Brings the queue pair of an identifier whose request is answered to where it can send, and says so to the other end.
/// -1 where that fails.
pub(super) unsafe fn establish(id: &mut Id) -> Int {
    if make_ready(id, None) != 0 {
        to_error(id);
        return -1;
    }
    let _manager = managing();
    let ready = Message::new(Kind::Ready, id.own, &[]).encode();
    match &id.socket {
        Some(socket) if id.stage == Stage::Answered => {
            // Where the other end is gone, the end of the connection comes next.
            let _ = socket.send(&ready);
            id.stage = Stage::Established;
            0
        }
        // It has ended meanwhile, which is queued.
        Some(_) | None if id.stage == Stage::Ended => 0,
        _ => refuse(libc::EINVAL),
    }
}

/// How much data of the program's an event has: as much as the adapters' message has room for.
fn room(event: u32, kind: Kind, datagrams: bool) -> usize {
    match (event, kind, datagrams) {
        (_, Kind::Request, false) => REQUEST_DATA,
        (_, Kind::Request, true) => SIDR_REQUEST_DATA,
        (_, Kind::Reply, false) => REPLY_DATA,
        (CM_REJECTED, Kind::Reject, _) => REJECT_DATA,
        (_, Kind::Reply | Kind::Reject, true) => SIDR_REPLY_DATA,
        _ => 0,
    }
}

unsafe fn as_program_sees(queued: Queued, id: &mut Id) -> *mut CmEvent {
    let listen_id = match queued.listener.as_mut() {
        Some(listener) => listener.program(),
        None => null_mut(),
    };
    let mut event = Box::new(Event {
        base: CmEvent {
            id: id.program(),
            listen_id,
            event: queued.event,
            status: queued.status,
            // SAFETY: numbers and a pointer, for which zero is a value.
            param: zeroed(),
        },
        counts: queued.counts(),
        data: [0; 256],
    });
    if let Some(message) = &queued.message {
        let length = room(queued.event, message.kind, id.is_datagrams());
        let given = message.data.len().min(length);
        event.data[..given].copy_from_slice(&message.data[..given]);
        let private_data = match length {
            0 => std::ptr::null(),
            _ => event.data.as_ptr().cast(),
        };
        let e = &message.end;
        event.base.param = if id.is_datagrams() {
            let told = message.kind == Kind::Reply;
            CmParam {
                ud: UdParam {
                    private_data,
                    private_data_len: length as u8,
                    ah_attr: if told { super::queue::towards(id) } else { AhAttr::default() },
                    qp_num: if told { e.number } else { 0 },
                    qkey: if told { e.qkey } else { 0 },
                },
            }
        } else {
            CmParam {
                conn: ConnParam {
                    private_data,
                    private_data_len: length as u8,
                    // What the one initiates the other responds to.
                    responder_resources: e.initiator_depth,
                    initiator_depth: e.responder_resources,
                    flow_control: e.flow_control,
                    retry_count: e.retry_count,
                    rnr_retry_count: e.rnr_retry_count,
                    srq: e.srq,
                    qp_num: e.number,
                },
            }
        };
    }
    Box::into_raw(event).cast()
}

/// Queues an event of an identifier.
pub(super) unsafe fn tell(_manager: &mut Manager, event: Queued) {
    (*(*event.counts()).channel()).queue(event);
}

#[no_mangle]
unsafe extern "C" fn rdma_event_str(event: u32) -> *const libc::c_char {
    CM_EVENTS.get(event as usize).map_or(c"UNKNOWN EVENT", |name| name).as_ptr()
}
