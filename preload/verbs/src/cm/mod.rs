//! librdmacm: programs that connect by addresses.
//!
//! The kernel's connection manager is not asked: what it knows of a connection could not be made again after a restart.
//! This one is the program's own. It speaks ([`wire`]) over TCP, of the same addresses and port numbers, and all that it
//! knows is memory and sockets of the process, which a restart brings back like any others, on other hosts too. The
//! queue pairs are made and connected by the functions of `api`, which know where everything is after a restart.
//!
//! | room | what |
//! |---|---|
//! | `adapter` | adapters, and which of them an address is on |
//! | `channel` | event channels: what is queued, and how it becomes a program's event |
//! | `progress` | what sockets have to say: the protocol |
//! | `id` | identifiers: made, bound, resolved, moved, destroyed |
//! | `connect` | asking for connections, accepting, rejecting, ending them |
//! | `queue` | queue pairs of an identifier, and how they are brought into each state |
//! | `endpoint` | the simple interface: endpoints, requests, names of hosts |
//! | `wire`, `socket` | messages; TCP |
//!
//! There is no thread: the protocol goes on in `rdma_get_cm_event`, and before a checkpoint. The channel's descriptor is
//! an epoll instance that holds the sockets, and a counter that is readable while events are queued. A message that is
//! not complete yet makes it readable too; who asks without waiting is told EAGAIN then, as programs expect.
//!
//! | asks | accepts |
//! |---|---|
//! | connects, sends `Request` | takes the connection, hears it: CONNECT_REQUEST |
//! | | `rdma_accept`: sends `Reply` |
//! | hears it: ESTABLISHED, sends `Ready` | hears it: ESTABLISHED |
//! | `rdma_disconnect`, or the process ends: the end of the TCP connection | hears it: DISCONNECTED |
//!
//! What more than one thread changes is behind [`MANAGER`], which nobody holds while calling the verbs: who waits at the
//! gate keeps nobody else waiting.

mod adapter;
mod channel;
mod connect;
mod endpoint;
mod id;
mod progress;
mod queue;
mod refused;
mod socket;
mod wire;

use crate::gate::Whole;
use crate::lock::{Held, Lock};
use adapter::Place;
use belay_ibv::*;
use channel::Channel;
use socket::Socket;
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use wire::{End, Message};

/// How far an identifier is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Idle,
    Bound,
    AddressResolved,
    RouteResolved,
    Listening,
    /// The TCP connection is on its way.
    Connecting,
    /// The request is sent.
    Asked,
    /// The answer is here, and not confirmed yet.
    Answered,
    /// A request has come.
    Requested,
    /// It is accepted.
    Accepted,
    Established,
    Ended,
}

/// An identifier: what the program sees, and what it does not.
#[repr(C)]
struct Id {
    base: CmId,
    /// It has a channel of its own, and calls wait.
    sync: bool,
    /// Events that the program has had, and those that it has acknowledged.
    reported: u32,
    completed: u32,
    mutex: libc::pthread_mutex_t,
    cond: libc::pthread_cond_t,
    /// Bringing its queue pair into a state has failed: what comes of it is not told.
    failed: bool,
    stage: Stage,
    place: Option<Place>,
    socket: Option<Socket>,
    /// What the socket is called among [`Manager::sources`].
    token: u64,
    /// A message that is not complete.
    partial: Vec<u8>,
    /// What is sent when the TCP connection is there.
    request: Option<Message>,
    /// Its own end, as the other was told.
    own: End,
    peer: Option<End>,
    initiator_depth: u8,
    responder_resources: u8,
    /// In front of what the program sends with its request.
    prefix: Vec<u8>,
    /// Queue pairs of requests are made with these, in the simple interface.
    template: Option<QpInitAttr>,
    path: Option<Box<PathRecord>>,
    options: Options,
}

/// What the program has set.
#[derive(Debug, Clone, Copy, Default)]
struct Options {
    traffic_class: u8,
    v6_only: Option<bool>,
    /// Others may have the port too, as long as one of them listens.
    reuse: bool,
    /// Time-out of the queue pair: exponent, as in its attributes.
    ack_timeout: Option<u8>,
}

impl Id {
    /// # Safety
    /// One that this library has given, and that is not destroyed.
    unsafe fn of<'a>(id: *mut CmId) -> &'a mut Id {
        &mut *id.cast::<Id>()
    }

    fn program(&mut self) -> *mut CmId {
        &mut self.base
    }

    fn is_datagrams(&self) -> bool {
        self.base.qp_type == QPT_UD
    }

    fn channel(&self) -> *mut Channel {
        self.base.channel.cast()
    }
}

/// What a descriptor in a channel is.
enum Source {
    Listener(*mut Id),
    /// Somebody has connected to a listener, and not said what he wants.
    Caller(Caller),
    Connection(*mut Id),
}

struct Caller {
    listener: *mut Id,
    socket: Socket,
    partial: Vec<u8>,
}

struct Manager {
    sources: BTreeMap<u64, Source>,
    last: u64,
}

/// Behind it is also what is in identifiers and channels.
static MANAGER: Lock<Manager> = Lock::new(NONE);
const NONE: Manager = Manager {
    sources: BTreeMap::new(),
    last: 0,
};

/// The manager, for a thread that does not end meanwhile.
struct Managing {
    manager: Held<'static, Manager>,
    _whole: Whole,
}

fn managing() -> Managing {
    let whole = Whole::begin();
    Managing {
        manager: MANAGER.lock(),
        _whole: whole,
    }
}

impl Deref for Managing {
    type Target = Manager;
    fn deref(&self) -> &Manager {
        &self.manager
    }
}

impl DerefMut for Managing {
    fn deref_mut(&mut self) -> &mut Manager {
        &mut self.manager
    }
}

/// Hears what has come to sockets for which the program does not ask: these are connections of the process then, and not in
/// a queue of the kernel's any more, which no checkpoint can take. By the library's thread, while the gate is shut.
pub(crate) fn hear_all() {
    // SAFETY: what is watched is of identifiers that live.
    unsafe { progress::advance_all(&mut managing()) };
}

/// In the child of a fork, which has no identifiers of its own. What it calls its sources is not what those of before are
/// called, whose identifiers it may destroy.
///
/// # Safety
/// No other thread is there.
pub(crate) unsafe fn after_fork() {
    let last = MANAGER.peek().last;
    MANAGER.reset(Manager { last, ..NONE });
    adapter::after_fork();
}

/// Says why not.
fn refuse(error: i32) -> Int {
    crate::set_errno(error);
    -1
}
