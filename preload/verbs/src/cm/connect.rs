//! Asking for connections, accepting, rejecting and ending them.

use super::channel::{establish, rdma_ack_cm_event, tell, Queued};
use super::id::wait;
use super::progress::{ended, hang_up, reached, rejection, unreachable};
use super::queue::{make_ready, to_error};
use super::socket::Socket;
use super::wire::{End, Kind, Message};
use super::{managing, refuse, Id, Source, Stage};
use belay_ibv::*;
use std::net::{Ipv4Addr, SocketAddr};
use std::ptr::null_mut;

/// The most that adapters try again: three bits.
const MOST_RETRIES: u8 = 7;
/// Connections that wait to be taken, where the program names no number.
const BACKLOG: Int = 1024;
/// That something has come before the other end has said that it is connected.
const EVENT_COMM_EST: u32 = 4;

/// What the program gives with a request or an answer, where it gives anything.
unsafe fn private_data<'a>(data: *const Opaque, length: u8) -> &'a [u8] {
    match data.is_null() {
        true => &[],
        false => std::slice::from_raw_parts(data.cast(), length.into()),
    }
}

/// Whether the program may ask for so much.
fn check(id: &Id, param: Option<&ConnParam>) -> Result<(), i32> {
    let place = id.place.ok_or(libc::EINVAL)?;
    if id.base.ps != PS_TCP {
        return Ok(());
    }
    let Some(param) = param else {
        return if id.base.qp.is_null() { Err(libc::EINVAL) } else { Ok(()) };
    };
    let too_much = |wanted: u8, most: u8| wanted != MAX_RESOURCES && wanted > most;
    match too_much(param.responder_resources, place.adapter.max_responder_resources)
        || too_much(param.initiator_depth, place.adapter.max_initiator_depth)
    {
        true => Err(libc::EINVAL),
        false => Ok(()),
    }
}

/// The identifier's own end, as the other is told of it.
unsafe fn own_end(id: &Id, param: Option<&ConnParam>) -> Result<End, i32> {
    let place = id.place.ok_or(libc::EINVAL)?;
    let (gid, qp) = (place.gid(), id.base.qp.as_ref());
    let number = qp.map_or(param.map_or(0, |p| p.qp_num), |q| q.qp_num);
    let srq = qp.map_or(param.map_or(0, |p| p.srq), |q| (!q.srq.is_null()).into());
    Ok(End {
        gid: gid.gid.raw,
        gid_type: gid.gid_type as u8,
        mtu: place.mtu(),
        lid: place.lid(),
        number: number & 0xff_ffff,
        psn: id.own.psn,
        qkey: if id.is_datagrams() { UDP_QKEY } else { 0 },
        responder_resources: id.responder_resources,
        initiator_depth: id.initiator_depth,
        flow_control: param.map_or(0, |p| p.flow_control),
        retry_count: 0,
        rnr_retry_count: param.map_or(MOST_RETRIES, |p| p.rnr_retry_count.min(MOST_RETRIES)),
        srq,
    })
}

/// What the program says for one of its limits; `most` where it leaves that open.
fn chosen(given: Option<u8>, most: u8) -> u8 {
    given.filter(|n| *n != MAX_RESOURCES).unwrap_or(most)
}

/// The request that an identifier is about to send.
unsafe fn request(id: &mut Id, param: Option<&ConnParam>) -> Result<Message, i32> {
    if id.stage != Stage::RouteResolved {
        return Err(libc::EINVAL);
    }
    check(id, param)?;
    let adapter = id.place.ok_or(libc::EINVAL)?.adapter;
    id.initiator_depth = chosen(param.map(|p| p.initiator_depth), adapter.max_initiator_depth);
    id.responder_resources = chosen(param.map(|p| p.responder_resources), adapter.max_responder_resources);
    id.own = own_end(id, param)?;
    id.own.retry_count = param.map_or(MOST_RETRIES, |p| p.retry_count.min(MOST_RETRIES));
    let own = param.map_or(&[][..], |p| private_data(p.private_data, p.private_data_len));
    let data = [&id.prefix, own].concat();
    let most = if id.is_datagrams() { SIDR_REQUEST_DATA } else { REQUEST_DATA };
    if data.len() > most {
        return Err(libc::EINVAL);
    }
    let mut message = Message::new(Kind::Request, id.own, &data);
    message.space = id.base.ps;
    Ok(message)
}

#[no_mangle]
unsafe extern "C" fn rdma_connect(id: *mut CmId, param: *mut ConnParam) -> Int {
    let this = Id::of(id);
    let asked = request(this, param.as_ref());
    let (message, to) = match (asked, this.destination()) {
        (Ok(message), Some(to)) => (message, to),
        (Err(error), _) => return refuse(error),
        (_, None) => return refuse(libc::EINVAL),
    };
    let socket = match this.socket.take().map_or_else(|| Socket::stream(to), Ok) {
        Ok(socket) => socket,
        Err(error) => return refuse(error),
    };
    this.prefix.clear();
    this.request = Some(message);
    {
        // Nobody else knows the socket yet.
        let begun = socket.connect(to);
        let mut manager = managing();
        let fd = socket.fd();
        this.socket = Some(socket);
        this.stage = Stage::Connecting;
        match begun {
            Ok(()) => this.token = manager.watch(&*this.channel(), fd, libc::EPOLLOUT, Source::Connection(this)),
            Err(error) => unreachable(&mut manager, this, error),
        }
        if this.stage == Stage::Connecting && this.token == 0 {
            return -1;
        }
        // On one host that is so at once: then the channel is not readable for a step that is no event.
        if this.stage == Stage::Connecting && this.socket.as_ref().is_some_and(Socket::is_decided) {
            reached(&mut manager, this);
        }
    }
    wait(id)
}

#[no_mangle]
unsafe extern "C" fn rdma_listen(id: *mut CmId, backlog: Int) -> Int {
    let this = Id::of(id);
    if this.stage == Stage::Idle {
        let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        if let Err(error) = this.bind(any) {
            return refuse(error);
        }
    }
    let Some(socket) = this.socket.as_ref().filter(|_| this.stage == Stage::Bound) else {
        return refuse(libc::EINVAL);
    };
    let backlog = if (1..BACKLOG).contains(&backlog) { backlog } else { BACKLOG };
    if let Err(error) = socket.listen(backlog) {
        return refuse(error);
    }
    let fd = socket.fd();
    let mut manager = managing();
    this.token = manager.watch(&*this.channel(), fd, libc::EPOLLIN, Source::Listener(this));
    if this.token == 0 {
        return -1;
    }
    this.stage = Stage::Listening;
    0
}

/// Answers a request: the message.
unsafe fn answer(id: &mut Id, param: Option<&ConnParam>) -> Result<Vec<u8>, i32> {
    if id.stage != Stage::Requested || id.base.qp.is_null() && param.is_none() {
        return Err(libc::EINVAL);
    }
    check(id, param)?;
    let adapter = id.place.ok_or(libc::EINVAL)?.adapter;
    let most = id.initiator_depth.min(adapter.max_initiator_depth);
    id.initiator_depth = chosen(param.map(|p| p.initiator_depth), most);
    let most = id.responder_resources.min(adapter.max_responder_resources);
    id.responder_resources = chosen(param.map(|p| p.responder_resources), most);
    let data = param.map_or(&[][..], |p| private_data(p.private_data, p.private_data_len));
    let most = if id.is_datagrams() { SIDR_REPLY_DATA } else { REPLY_DATA };
    if data.len() > most {
        return Err(libc::EINVAL);
    }
    id.own = own_end(id, param)?;
    Ok(Message::new(Kind::Reply, id.own, data).encode())
}

#[no_mangle]
unsafe extern "C" fn rdma_accept(id: *mut CmId, param: *mut ConnParam) -> Int {
    let this = Id::of(id);
    let bytes = match answer(this, param.as_ref()) {
        Ok(bytes) => bytes,
        Err(error) => return refuse(error),
    };
    let depths = (this.responder_resources, this.initiator_depth);
    if !this.is_datagrams() && make_ready(this, Some(depths)) != 0 {
        return -1;
    }
    {
        let mut manager = managing();
        let Some(socket) = this.socket.as_ref().filter(|_| this.stage == Stage::Requested) else {
            // Who has asked is gone, which is queued.
            return refuse(libc::EINVAL);
        };
        // Where he is gone by now, the end of the connection says so.
        let _ = socket.send(&bytes);
        this.stage = Stage::Accepted;
        if this.is_datagrams() {
            hang_up(&mut manager, this);
            this.stage = Stage::Established;
        }
    }
    if !this.is_datagrams() {
        return wait(id);
    }
    if this.sync && !(*id).event.is_null() {
        rdma_ack_cm_event((*id).event);
        (*id).event = null_mut();
    }
    0
}

#[no_mangle]
unsafe extern "C" fn rdma_reject(id: *mut CmId, data: *const Opaque, length: u8) -> Int {
    let this = Id::of(id);
    let data = private_data(data, length);
    if data.len() > REJECT_DATA {
        return refuse(libc::EINVAL);
    }
    let mut manager = managing();
    match (&this.socket, this.stage) {
        (Some(socket), Stage::Requested | Stage::Answered) => {
            let _ = socket.send(&rejection(REJ_CONSUMER, data));
            hang_up(&mut manager, this);
            0
        }
        _ => refuse(libc::EINVAL),
    }
}

/// Enhancements are not agreed upon: a request with some is rejected like any other.
#[no_mangle]
unsafe extern "C" fn rdma_reject_ece(id: *mut CmId, data: *const Opaque, length: u8) -> Int {
    rdma_reject(id, data, length)
}

#[no_mangle]
unsafe extern "C" fn rdma_establish(id: *mut CmId) -> Int {
    if !(*id).qp.is_null() {
        return refuse(libc::EINVAL);
    }
    establish(Id::of(id))
}

#[no_mangle]
unsafe extern "C" fn rdma_notify(id: *mut CmId, event: u32) -> Int {
    let this = Id::of(id);
    let mut manager = managing();
    if event == EVENT_COMM_EST && this.stage == Stage::Accepted {
        this.stage = Stage::Established;
        tell(&mut manager, Queued::plain(this, CM_ESTABLISHED, 0));
    }
    0
}

#[no_mangle]
unsafe extern "C" fn rdma_disconnect(id: *mut CmId) -> Int {
    let this = Id::of(id);
    if this.place.is_none() {
        return refuse(libc::EINVAL);
    }
    if to_error(this) != 0 {
        return -1;
    }
    {
        let mut manager = managing();
        match this.stage {
            Stage::Asked | Stage::Answered | Stage::Accepted | Stage::Established => ended(&mut manager, this),
            Stage::Ended => {}
            _ => return refuse(libc::EINVAL),
        }
    }
    wait(id)
}
