//! Identifiers.

use super::channel::{rdma_ack_cm_event, rdma_create_event_channel, rdma_destroy_event_channel, rdma_get_cm_event, tell, Queued};
use super::progress::{fresh_psn, hang_up};
use super::socket::{read_address, source_towards, write_address, Socket};
use super::wire::End;
use super::{adapter, managing, refuse, Channel, Id, Manager, Options, Place, Source, Stage};
use crate::shadow::{await_acknowledged, free, CONDITION, MUTEX};
use belay_ibv::*;
use libc::sockaddr;
use std::mem::zeroed;
use std::net::SocketAddr;
use std::ptr::{addr_of_mut, null_mut};

/// The P_Key that all have.
const DEFAULT_PKEY: u16 = 0xffff;
/// Of path records: exactly the value that is said.
const EXACTLY: u8 = 2;

/// An identifier of this kind in a channel.
pub(super) unsafe fn new_id(manager: &Manager, channel: *mut EventChannel, context: *mut Opaque, ps: u32, qp_type: u32) -> *mut Id {
    let base = CmId {
        verbs: null_mut(),
        channel,
        context,
        qp: null_mut(),
        route: Route {
            // SAFETY: numbers, for which zero is a value.
            src: unsafe { zeroed() },
            // SAFETY: as above.
            dst: unsafe { zeroed() },
            ib: IbAddr::default(),
            path_rec: null_mut(),
            num_paths: 0,
        },
        ps,
        port_num: 0,
        event: null_mut(),
        send_cq_channel: null_mut(),
        send_cq: null_mut(),
        recv_cq_channel: null_mut(),
        recv_cq: null_mut(),
        srq: null_mut(),
        pd: null_mut(),
        qp_type,
    };
    Channel::hold(manager, channel.cast());
    Box::into_raw(Box::new(Id {
        base,
        sync: false,
        reported: 0,
        completed: 0,
        mutex: MUTEX,
        cond: CONDITION,
        failed: false,
        stage: Stage::Idle,
        place: None,
        socket: None,
        token: 0,
        partial: Vec::new(),
        request: None,
        own: End::default(),
        peer: None,
        initiator_depth: 0,
        responder_resources: 0,
        prefix: Vec::new(),
        template: None,
        path: None,
        options: Options::default(),
    }))
}

impl Id {
    /// Where it is from and where it leads, as far as that is known now.
    pub(super) fn set_route(&mut self, source: Option<SocketAddr>, destination: Option<SocketAddr>) {
        if let Some(source) = source {
            self.base.route.src = write_address(source).0;
        }
        if let Some(destination) = destination {
            self.base.route.dst = write_address(destination).0;
        }
    }

    pub(super) fn source(&self) -> Option<SocketAddr> {
        // SAFETY: room for any address.
        unsafe { read_address(std::ptr::from_ref(&self.base.route.src).cast()) }
    }

    pub(super) fn destination(&self) -> Option<SocketAddr> {
        // SAFETY: as above.
        unsafe { read_address(std::ptr::from_ref(&self.base.route.dst).cast()) }
    }

    /// It is on this port.
    pub(super) fn set_place(&mut self, place: Place) {
        self.place = Some(place);
        (self.base.verbs, self.base.port_num) = (place.adapter.context, place.port);
        if self.base.pd.is_null() {
            self.base.pd = place.adapter.pd;
        }
        self.base.route.ib.sgid = place.gid().gid;
        self.base.route.ib.pkey = DEFAULT_PKEY;
    }

    /// The way to the other end: on InfiniBand what is known of that when it has said something.
    pub(super) fn set_path(&mut self) {
        let Some(place) = self.place else { return };
        if let Some(peer) = &self.peer {
            self.base.route.ib.dgid.raw = peer.gid;
        } else if let (true, Some(destination)) = (place.is_ethernet(), self.destination()) {
            self.base.route.ib.dgid = match adapter::is_any(destination.ip()) {
                true => place.gid().gid,
                false => adapter::gid_of(destination.ip()),
            };
        }
        let mtu = self.peer.map_or(u8::MAX, |p| p.mtu).min(place.mtu());
        let ib = self.base.route.ib;
        let record = PathRecord {
            dgid: ib.dgid,
            sgid: ib.sgid,
            dlid: self.peer.map_or(0, |p| p.lid).to_be(),
            slid: place.lid().to_be(),
            hop_limit: super::queue::HOPS,
            traffic_class: self.options.traffic_class,
            reversible: 1,
            numb_path: 1,
            pkey: ib.pkey,
            mtu_selector: EXACTLY,
            mtu,
            rate_selector: EXACTLY,
            packet_life_time_selector: EXACTLY,
            packet_life_time: super::queue::LIFE_TIME,
            ..PathRecord::default()
        };
        // The program may have kept the address.
        let path = self.path.get_or_insert_default();
        **path = record;
        (self.base.route.path_rec, self.base.route.num_paths) = (&mut **path, 1);
    }

    /// Takes an address of this host's.
    pub(super) fn bind(&mut self, address: SocketAddr) -> Result<(), i32> {
        let place = match adapter::is_any(address.ip()) {
            true => None,
            false => Some(adapter::find(address.ip(), true).ok_or(libc::ENODEV)?),
        };
        let socket = Socket::stream(address)?;
        if let Some(only) = self.options.v6_only.filter(|_| address.is_ipv6()) {
            socket.set(libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, only.into());
        }
        socket.bind(address, self.options.reuse)?;
        let port = socket.local().map_or(0, |a| a.port());
        self.socket = Some(socket);
        // By the name that the program has for it.
        self.set_route(Some(SocketAddr::new(address.ip(), port)), None);
        if let Some(place) = place {
            self.set_place(place);
        }
        self.stage = Stage::Bound;
        Ok(())
    }
}

/// Queue pairs of a port space.
fn kind_of(ps: u32) -> u32 {
    if ps == PS_UDP {
        QPT_UD
    } else {
        QPT_RC
    }
}

pub(super) unsafe fn create(
    mut channel: *mut EventChannel,
    id: *mut *mut CmId,
    context: *mut Opaque,
    ps: u32,
    qp_type: u32,
) -> Int {
    if !matches!(ps, PS_TCP | PS_UDP | PS_IB) || !matches!(qp_type, QPT_RC | QPT_UC | QPT_UD) {
        return refuse(libc::EOPNOTSUPP);
    }
    let sync = channel.is_null();
    if sync {
        channel = rdma_create_event_channel();
        if channel.is_null() {
            return -1;
        }
    }
    let new = new_id(&managing(), channel, context, ps, qp_type);
    (*new).sync = sync;
    *id = (*new).program();
    0
}

#[no_mangle]
unsafe extern "C" fn rdma_create_id(channel: *mut EventChannel, id: *mut *mut CmId, context: *mut Opaque, ps: u32) -> Int {
    create(channel, id, context, ps, kind_of(ps))
}

/// What has not been told, or not been heard to its end, of an identifier that goes: those who wait for it are sent away.
unsafe fn forget(manager: &mut Manager, id: *mut Id) {
    let channel = (*id).channel();
    hang_up(manager, &mut *id);
    for caller in manager.callers(id) {
        manager.dismiss(caller);
    }
    for event in (*channel).extract(id) {
        if event.listener == id && event.event == CM_CONNECT_REQUEST {
            forget_new(manager, event.id);
        }
    }
}

/// The same of the identifier of a request that nobody has seen, which goes with it.
pub(super) unsafe fn forget_new(manager: &mut Manager, id: *mut Id) {
    forget(manager, id);
    release(manager, id);
}

/// Gives an identifier back that nobody knows any more.
unsafe fn release(manager: &Manager, id: *mut Id) {
    let channel = (*id).channel();
    free(id);
    Channel::let_go(manager, channel);
}

#[no_mangle]
pub(super) unsafe extern "C" fn rdma_destroy_id(id: *mut CmId) -> Int {
    let at = id.cast::<Id>();
    forget(&mut managing(), at);
    if !(*id).event.is_null() {
        rdma_ack_cm_event((*id).event);
    }
    let (mutex, cond) = (addr_of_mut!((*at).mutex), addr_of_mut!((*at).cond));
    await_acknowledged(mutex, cond, || (*at).completed == (*at).reported);
    if (*at).sync {
        rdma_destroy_event_channel((*id).channel);
    }
    release(&managing(), at);
    0
}

#[no_mangle]
pub(super) unsafe extern "C" fn rdma_bind_addr(id: *mut CmId, address: *mut sockaddr) -> Int {
    let Some(address) = read_address(address) else {
        return refuse(libc::EINVAL);
    };
    let id = Id::of(id);
    if id.stage != Stage::Idle {
        return refuse(libc::EINVAL);
    }
    id.bind(address).map_or_else(refuse, |()| 0)
}

/// Where an identifier that asks for a connection is: as the program says, or where packets go out.
fn whence(id: &mut Id, source: Option<SocketAddr>, destination: SocketAddr) -> Result<Option<Place>, i32> {
    if let Some(source) = source.filter(|s| id.stage == Stage::Idle && (!s.ip().is_unspecified() || s.port() != 0)) {
        match id.bind(source) {
            // Such an address is no adapter's, which the event says.
            Err(libc::ENODEV) => return Ok(None),
            bound => bound?,
        }
    }
    if id.place.is_some() {
        return Ok(id.place);
    }
    let bound = id.source().map(|s| s.ip()).filter(|ip| !ip.is_unspecified());
    let Some(ip) = bound.or_else(|| source_towards(destination)) else {
        return Ok(None);
    };
    let place = adapter::find(ip, bound.is_some());
    if let Some(place) = place.filter(|_| !adapter::is_any(ip)) {
        // By the name that the program has for it, where it has one.
        let shown = std::net::Ipv6Addr::from(place.gid().gid.raw);
        let name = match (place.is_ethernet(), shown.to_ipv4_mapped()) {
            (true, Some(v4)) => v4.into(),
            (true, None) => shown.into(),
            (false, _) => ip,
        };
        let port = id.source().map_or(0, |s| s.port());
        id.set_route(Some(SocketAddr::new(name, port)), None);
    }
    Ok(place)
}

#[no_mangle]
pub(super) unsafe extern "C" fn rdma_resolve_addr(
    id: *mut CmId,
    source: *mut sockaddr,
    destination: *mut sockaddr,
    _timeout_ms: Int,
) -> Int {
    let from = read_address(source);
    let Some(to) = read_address(destination).filter(|_| source.is_null() || from.is_some()) else {
        return refuse(libc::EINVAL);
    };
    let this = Id::of(id);
    if !matches!(this.stage, Stage::Idle | Stage::Bound) {
        return refuse(libc::EINVAL);
    }
    let place = match whence(this, from, to) {
        Ok(place) => place,
        Err(error) => return refuse(error),
    };
    this.set_route(None, Some(to));
    let (event, status) = match place {
        Some(place) => {
            this.set_place(place);
            this.set_path();
            this.own.psn = fresh_psn();
            this.stage = Stage::AddressResolved;
            (CM_ADDR_RESOLVED, 0)
        }
        None => (CM_ADDR_ERROR, -libc::ENODEV),
    };
    tell(&mut managing(), Queued::plain(this, event, status));
    wait(id)
}

#[no_mangle]
pub(super) unsafe extern "C" fn rdma_resolve_route(id: *mut CmId, _timeout_ms: Int) -> Int {
    let this = Id::of(id);
    if this.stage != Stage::AddressResolved {
        return refuse(libc::EINVAL);
    }
    this.stage = Stage::RouteResolved;
    tell(&mut managing(), Queued::plain(this, CM_ROUTE_RESOLVED, 0));
    wait(id)
}

/// Of an identifier with a channel of its own: waits for the next event, and says what it says.
pub(super) unsafe fn wait(id: *mut CmId) -> Int {
    if !Id::of(id).sync {
        return 0;
    }
    if !(*id).event.is_null() {
        rdma_ack_cm_event((*id).event);
        (*id).event = null_mut();
    }
    let error = rdma_get_cm_event((*id).channel, &mut (*id).event);
    if error != 0 {
        return error;
    }
    let event = &*(*id).event;
    match (event.status, event.event) {
        (0, _) => 0,
        (_, CM_REJECTED) => refuse(libc::ECONNREFUSED),
        (status, _) => refuse(status.abs()),
    }
}

#[no_mangle]
pub(super) unsafe extern "C" fn rdma_migrate_id(id: *mut CmId, mut channel: *mut EventChannel) -> Int {
    let at = id.cast::<Id>();
    let sync = channel.is_null();
    if sync {
        if (*at).sync {
            return refuse(libc::EINVAL);
        }
        channel = rdma_create_event_channel();
        if channel.is_null() {
            return -1;
        }
    }
    let old = (*id).channel;
    let moved = {
        let manager = managing();
        let (from, to) = (&mut *(*at).channel(), &mut *channel.cast::<Channel>());
        let moved = match &(*at).socket {
            Some(socket) if (*at).token != 0 => {
                let what = if (*at).stage == Stage::Connecting {
                    libc::EPOLLOUT
                } else {
                    libc::EPOLLIN
                };
                from.watch(libc::EPOLL_CTL_DEL, socket.fd(), 0, 0);
                to.watch(libc::EPOLL_CTL_ADD, socket.fd(), what, (*at).token)
            }
            _ => true,
        };
        let name = |id: *mut Id| {
            let old = (*id).channel();
            (*id).base.channel = channel;
            Channel::hold(&manager, channel.cast());
            Channel::let_go(&manager, old);
        };
        let shift = |from: &Channel, fd: i32, token: u64| {
            from.watch(libc::EPOLL_CTL_DEL, fd, 0, 0);
            to.watch(libc::EPOLL_CTL_ADD, fd, libc::EPOLLIN, token);
        };
        // Who has connected to it goes with it, and the requests that have been made and that nobody has seen.
        for token in manager.callers(at) {
            if let Some(Source::Caller(caller)) = manager.sources.get(&token) {
                shift(from, caller.socket.fd(), token);
            }
        }
        let mut events = from.extract(at);
        let asked: Vec<*mut Id> = events.iter().filter(|e| e.listener == at).map(|e| e.id).collect();
        for new in asked {
            if let Some(socket) = (*new).socket.as_ref().filter(|_| (*new).token != 0) {
                shift(from, socket.fd(), (*new).token);
            }
            name(new);
            events.append(&mut from.extract(new));
        }
        events.into_iter().for_each(|event| to.queue(event));
        name(at);
        moved
    };
    if !moved {
        return -1;
    }
    if (*at).sync {
        if !(*id).event.is_null() {
            rdma_ack_cm_event((*id).event);
            (*id).event = null_mut();
        }
        rdma_destroy_event_channel(old);
    }
    (*at).sync = sync;
    let (mutex, cond) = (addr_of_mut!((*at).mutex), addr_of_mut!((*at).cond));
    await_acknowledged(mutex, cond, || (*at).completed == (*at).reported);
    0
}

#[no_mangle]
unsafe extern "C" fn rdma_set_option(id: *mut CmId, level: Int, name: Int, value: *mut Opaque, length: usize) -> Int {
    let options = &mut Id::of(id).options;
    match (level, name, length) {
        (OPTION_ID, OPTION_ID_TOS, 1) => options.traffic_class = *value.cast::<u8>(),
        (OPTION_ID, OPTION_ID_REUSEADDR, 4) => options.reuse = *value.cast::<i32>() != 0,
        (OPTION_ID, OPTION_ID_AFONLY, 4) => options.v6_only = Some(*value.cast::<i32>() != 0),
        // As many as the exponent has bits for.
        (OPTION_ID, OPTION_ID_ACK_TIMEOUT, 1) if *value.cast::<u8>() < 32 => options.ack_timeout = Some(*value.cast::<u8>()),
        (OPTION_ID, OPTION_ID_TOS..=OPTION_ID_ACK_TIMEOUT, _) => return refuse(libc::EINVAL),
        _ => return refuse(libc::EOPNOTSUPP),
    }
    0
}

#[no_mangle]
unsafe extern "C" fn rdma_get_src_port(id: *mut CmId) -> u16 {
    Id::of(id).source().map_or(0, |a| a.port().to_be())
}

#[no_mangle]
unsafe extern "C" fn rdma_get_dst_port(id: *mut CmId) -> u16 {
    Id::of(id).destination().map_or(0, |a| a.port().to_be())
}
