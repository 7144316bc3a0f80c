//! What sockets have to say.

use super::channel::{tell, Channel, Queued};
use super::id::new_id;
use super::socket::Socket;
use super::wire::{End, Garbage, Kind, Message};
use super::{adapter, Caller, Id, Manager, Source, Stage};
use belay_ibv::*;
use std::collections::BTreeSet;

/// How it went.
pub(super) enum Advanced {
    /// Something has changed: there may be an event.
    Somewhat,
    Nothing,
    Failed(i32),
}

/// Those who have connected to one listener and said nothing yet: the one who has waited longest is sent away.
const CALLERS: usize = 128;
/// Descriptors that are looked at in one go.
const BATCH: usize = 32;

/// Lets all sockets of a channel that have something to say do so.
///
/// # Safety
/// A channel that lives.
pub(super) unsafe fn advance(manager: &mut Manager, channel: *mut Channel) -> Advanced {
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; BATCH];
    let n = libc::epoll_wait((*channel).base.fd, events.as_mut_ptr(), BATCH as i32, 0);
    let mut advanced = Advanced::Nothing;
    for event in &events[..n.max(0) as usize] {
        let token = event.u64;
        match manager.sources.get(&token) {
            // The counter: another thread may have taken what it was about.
            None => {}
            Some(Source::Listener(id)) => {
                let id = *id;
                match take_callers(manager, id) {
                    0 => advanced = Advanced::Somewhat,
                    error if matches!(advanced, Advanced::Nothing) => advanced = Advanced::Failed(error),
                    _ => {}
                }
            }
            Some(Source::Caller(_)) => {
                hear_caller(manager, token);
                advanced = Advanced::Somewhat;
            }
            Some(Source::Connection(id)) => {
                let id = *id;
                hear(manager, id);
                advanced = Advanced::Somewhat;
            }
        }
    }
    advanced
}

/// The same of all channels.
///
/// # Safety
/// Channels that live.
pub(super) unsafe fn advance_all(manager: &mut Manager) {
    /// Strangers may go on calling.
    const TURNS: usize = 64;
    let channels: BTreeSet<*mut Channel> = manager.sources.values().map(|s| channel_of(s)).collect();
    for channel in channels {
        let somewhat = |_: &usize| matches!(advance(manager, channel), Advanced::Somewhat);
        (0..TURNS).take_while(somewhat).for_each(drop);
    }
}

/// Where a socket is watched.
unsafe fn channel_of(source: &Source) -> *mut Channel {
    match source {
        Source::Listener(id) | Source::Connection(id) => (**id).channel(),
        Source::Caller(caller) => (*caller.listener).channel(),
    }
}

impl Manager {
    /// Watches a descriptor: how it is called, or 0 where it cannot be.
    pub(super) fn watch(&mut self, channel: &Channel, fd: i32, what: i32, source: Source) -> u64 {
        let token = self.last + 1;
        if !channel.watch(libc::EPOLL_CTL_ADD, fd, what, token) {
            return 0;
        }
        self.last = token;
        self.sources.insert(token, source);
        token
    }

    /// Those who have connected to a listener and said nothing yet, the one who has waited longest first.
    pub(super) fn callers(&self, listener: *mut Id) -> Vec<u64> {
        let waits = |s: &Source| matches!(s, Source::Caller(c) if c.listener == listener);
        self.sources
            .iter()
            .filter(|(_, s)| waits(s))
            .map(|(token, _)| *token)
            .collect()
    }

    /// What is watched in a channel.
    pub(super) unsafe fn sources_of(&self, channel: *mut Channel) -> Vec<u64> {
        let own = self.sources.iter().filter(|(_, s)| channel_of(s) == channel);
        own.map(|(token, _)| *token).collect()
    }

    /// One of those is not waited for any more.
    pub(super) unsafe fn dismiss(&mut self, token: u64) -> Option<Caller> {
        let Some(Source::Caller(caller)) = self.sources.remove(&token) else {
            return None;
        };
        // A forked child may have the socket too, which stays in the channel then.
        let channel = (*caller.listener).channel();
        (*channel).watch(libc::EPOLL_CTL_DEL, caller.socket.fd(), 0, 0);
        Some(caller)
    }
}

/// Takes who has connected to a listener, a limited number at a time. An error that will be there again at the next try.
unsafe fn take_callers(manager: &mut Manager, listener: *mut Id) -> i32 {
    for _ in 0..CALLERS {
        let Some(listening) = &(*listener).socket else { return 0 };
        match listening.accept() {
            Ok(socket) => welcome(manager, listener, socket),
            Err(libc::EAGAIN) => return 0,
            // Whoever it was is gone, or the network said so (accept(2)).
            Err(
                libc::ECONNABORTED
                | libc::EINTR
                | libc::EPROTO
                | libc::ENOPROTOOPT
                | libc::ENETDOWN
                | libc::ENETUNREACH
                | libc::EHOSTDOWN
                | libc::EHOSTUNREACH
                | libc::ENONET
                | libc::EOPNOTSUPP
                | libc::ETIMEDOUT,
            ) => {}
            Err(error) => return error,
        }
    }
    0
}

unsafe fn welcome(manager: &mut Manager, listener: *mut Id, socket: Socket) {
    let callers = manager.callers(listener);
    if callers.len() >= CALLERS {
        // It may have spoken by now.
        hear_caller(manager, callers[0]);
        manager.dismiss(callers[0]);
    }
    let fd = socket.fd();
    let caller = Source::Caller(Caller {
        listener,
        socket,
        partial: Vec::new(),
    });
    // Where it cannot be watched, it is closed with what was to be kept.
    let token = manager.watch(&*(*listener).channel(), fd, libc::EPOLLIN, caller);
    // Most have said what they want before they are taken.
    hear_caller(manager, token);
}

/// The next message on a connection: none yet, or none ever.
enum Heard {
    Nothing,
    Message(Message),
    Garbage,
    End,
}

fn hear_message(socket: &Socket, partial: &mut Vec<u8>) -> Heard {
    let open = socket.receive(partial);
    match Message::decode(partial) {
        Ok(Some((message, length))) => {
            partial.drain(..length);
            Heard::Message(message)
        }
        Ok(None) if open => Heard::Nothing,
        Ok(None) => Heard::End,
        Err(Garbage) => Heard::Garbage,
    }
}

/// Somebody says what he wants.
unsafe fn hear_caller(manager: &mut Manager, token: u64) {
    let Some(Source::Caller(caller)) = manager.sources.get_mut(&token) else {
        return;
    };
    let heard = hear_message(&caller.socket, &mut caller.partial);
    if matches!(heard, Heard::Nothing) {
        return;
    }
    let Some(caller) = manager.dismiss(token) else { return };
    match heard {
        Heard::Message(message) if message.kind == Kind::Request && message.space == (*caller.listener).base.ps => {
            put_request(manager, caller, message);
        }
        Heard::Message(_) => send_away(&caller.socket),
        Heard::Nothing | Heard::Garbage | Heard::End => {}
    }
}

fn send_away(socket: &Socket) {
    // Who does not hear it sees the end of the connection.
    let _ = socket.send(&rejection(REJ_INVALID_SERVICE, &[]));
}

pub(super) fn rejection(reason: Int, data: &[u8]) -> Vec<u8> {
    let mut reject = Message::new(Kind::Reject, End::default(), data);
    reject.reason = reason as u32;
    reject.encode()
}

/// Makes the identifier of a request, for the program to accept or to reject.
unsafe fn put_request(manager: &mut Manager, caller: Caller, message: Message) {
    let listener = &mut *caller.listener;
    let ends = caller.socket.local().zip(caller.socket.peer());
    let found = ends.and_then(|(local, peer)| {
        let place = adapter::find(local.ip(), true)?;
        let place = match place.is_ethernet() {
            true => place.of_type(message.end.gid_type)?,
            false => place,
        };
        Some((local, peer, place))
    });
    let Some((local, peer, place)) = found else {
        return send_away(&caller.socket);
    };
    let base = &listener.base;
    let id = new_id(manager, base.channel, base.context, base.ps, base.qp_type);
    let new = &mut *id;
    new.set_route(Some(local), Some(peer));
    new.set_place(place);
    new.peer = Some(message.end);
    (new.initiator_depth, new.responder_resources) = (message.end.responder_resources, message.end.initiator_depth);
    new.own.psn = fresh_psn();
    new.stage = Stage::Requested;
    let fd = caller.socket.fd();
    new.socket = Some(caller.socket);
    new.partial = caller.partial;
    new.token = manager.watch(&*listener.channel(), fd, libc::EPOLLIN, Source::Connection(id));
    let event = Queued {
        listener: caller.listener,
        message: Some(message),
        ..Queued::plain(id, CM_CONNECT_REQUEST, 0)
    };
    tell(manager, event);
}

/// The number of a connection's first packet: another each time, so that what is late of an earlier one is not taken.
pub(super) fn fresh_psn() -> u32 {
    let mut bytes = [0u8; 4];
    // SAFETY: as much as there is room for. Without, they are zeroes.
    unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), libc::GRND_NONBLOCK) };
    u32::from_ne_bytes(bytes) & 0xff_ffff
}

/// What a connection has to say.
unsafe fn hear(manager: &mut Manager, at: *mut Id) {
    let id = &mut *at;
    if id.stage == Stage::Connecting {
        return reached(manager, id);
    }
    let Some(socket) = &id.socket else { return };
    match (hear_message(socket, &mut id.partial), id.stage) {
        (Heard::Nothing, _) => {}
        (Heard::Message(message), Stage::Asked) if message.kind == Kind::Reply => answered(manager, id, message),
        (Heard::Message(message), Stage::Asked | Stage::Accepted) if message.kind == Kind::Reject => {
            let reason = message.reason as Int;
            rejected(manager, id, reason, Some(message));
        }
        (Heard::Message(message), Stage::Accepted) if message.kind == Kind::Ready => {
            id.stage = Stage::Established;
            tell(manager, Queued::plain(id, CM_ESTABLISHED, 0));
        }
        // The program has said itself that it is there.
        (Heard::Message(message), Stage::Established) if message.kind == Kind::Ready => {}
        (Heard::End, Stage::Asked | Stage::Accepted) => rejected(manager, id, REJ_CONSUMER, None),
        (_, Stage::Asked | Stage::Accepted) => rejected(manager, id, REJ_INVALID_SERVICE, None),
        (_, Stage::Requested) => rejected(manager, id, REJ_TIMEOUT, None),
        _ => ended(manager, id),
    }
}

/// The TCP connection is there, or there is none.
pub(super) unsafe fn reached(manager: &mut Manager, id: &mut Id) {
    let Some(socket) = &id.socket else { return };
    let error = match (socket.error(), &id.request) {
        (0, Some(request)) => socket.send(&request.encode()).err(),
        (error, _) => Some(error),
    };
    if let Some(error) = error {
        return unreachable(manager, id, error);
    }
    let local = socket.local();
    (*id.channel()).watch(libc::EPOLL_CTL_MOD, socket.fd(), libc::EPOLLIN, id.token);
    id.set_route(local, None);
    id.request = None;
    id.stage = Stage::Asked;
}

/// Nobody is there, or nobody listens.
pub(super) unsafe fn unreachable(manager: &mut Manager, id: &mut Id, error: i32) {
    if error == libc::ECONNREFUSED {
        return rejected(manager, id, REJ_INVALID_SERVICE, None);
    }
    hang_up(manager, id);
    tell(manager, Queued::plain(id, CM_UNREACHABLE, -error));
}

unsafe fn answered(manager: &mut Manager, id: &mut Id, message: Message) {
    id.peer = Some(message.end);
    (id.initiator_depth, id.responder_resources) = (message.end.responder_resources, message.end.initiator_depth);
    let event = match id.is_datagrams() {
        true => CM_ESTABLISHED,
        false => CM_CONNECT_RESPONSE,
    };
    id.stage = Stage::Answered;
    if id.is_datagrams() {
        hang_up(manager, id);
        id.stage = Stage::Established;
    }
    let event = Queued {
        message: Some(message),
        ..Queued::plain(id, event, 0)
    };
    tell(manager, event);
}

unsafe fn rejected(manager: &mut Manager, id: &mut Id, reason: Int, message: Option<Message>) {
    hang_up(manager, id);
    let (event, status) = match id.is_datagrams() {
        true => (CM_UNREACHABLE, SIDR_REJECTED),
        false => (CM_REJECTED, reason),
    };
    let message = message.unwrap_or_else(|| Message::new(Kind::Reject, End::default(), &[]));
    let event = Queued {
        message: Some(message),
        ..Queued::plain(id, event, status)
    };
    tell(manager, event);
}

/// The connection has ended, here or there.
pub(super) unsafe fn ended(manager: &mut Manager, id: &mut Id) {
    hang_up(manager, id);
    if !id.is_datagrams() {
        tell(manager, Queued::plain(id, CM_DISCONNECTED, 0));
    }
    // Packets that are late find no queue pair that would take them: a number is not given again at once. So nobody
    // waits for the end of a time for that, but who waits for the next event after the last is to get one.
    if id.sync {
        tell(manager, Queued::plain(id, CM_TIMEWAIT_EXIT, 0));
    }
}

/// Ends the TCP connection, which the other end hears.
pub(super) unsafe fn hang_up(manager: &mut Manager, id: &mut Id) {
    manager.sources.remove(&id.token);
    // As in `dismiss`.
    if let Some(socket) = id.socket.take() {
        (*id.channel()).watch(libc::EPOLL_CTL_DEL, socket.fd(), 0, 0);
    }
    id.stage = Stage::Ended;
}
