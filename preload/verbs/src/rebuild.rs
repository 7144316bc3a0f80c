//! Making everything again after a restart.
//!
//! The devices of before are gone. What their provider left in memory is not looked at any more. All hosts go together:
//!
//! ```text
//! round 0     devices, domains, regions, channels, queues; queue pairs to INIT with their receives; where each is today is told
//! round 1     the tables are there: reliable queue pairs to RTR; the keys of the regions are told to the peers
//! round 2     every peer can receive: to RTS
//! round 3     what peers have not received is posted again; events are made up for who may wait for them
//! ```

use crate::api::{
    keeps, make_extended, make_plain, moderate_again, open_real, real_init, real_init_ex, real_parent_domain, register_again,
    roomy, save_events, SPARE,
};
use crate::control::Answer;
use crate::drain::{self, done_at_rest, hear, tell};
use crate::gate;
use crate::made_up::{complete, flush_receives};
use crate::names::{both_ends, context_of, port_of, NameFact, Port, PortName, QpName};
use crate::path::{give, repost, repost_shared, takes_receive};
use crate::real::real;
use crate::rounds::{Heard, Told};
use crate::shadow::{ShadowContext, ShadowPd, ShadowQp, Table, World, WORLD};
use crate::sizes::{are_few_keys, is_open, tell_keys};
use crate::translate::{self, adopt, tables, Keys, Places, Tables};
use belay_ibv::*;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::atomic::{Ordering::Acquire, Ordering::Release};

/// GIDs of a port that are told of: as many as fit into a fact.
const MOST_GIDS: usize = 128;

/// Ports of a job in which everybody is told the keys of all.
const SMALL_JOB: usize = 64;

/// What was to be made, and why that is not possible.
type Made = Result<(), String>;

fn failed(what: &str) -> String {
    format!(
        "{what} cannot be made again: {}",
        std::io::Error::from_raw_os_error(crate::errno())
    )
}

fn check(what: &str, error: Int) -> Made {
    if error == 0 {
        return Ok(());
    }
    let error = if error > 0 { error } else { crate::errno() };
    Err(format!("{what}: {}", std::io::Error::from_raw_os_error(error)))
}

/// Carries out an order to make everything again.
pub(crate) fn rebuild(order: u32, round: u32, heard: u64) -> Answer {
    let world = WORLD.lock();
    if gate::shut_by() != order {
        return Answer::Busy("nobody keeps the gate shut any more".into());
    }
    // SAFETY: nobody else is inside, and all objects on the lists live.
    let made = unsafe {
        match round {
            0 => make_all(&world).and_then(|()| names(&world)),
            1 => connect_all(&world, hear(heard)),
            2 => ready_all(&world, hear(heard)),
            _ => go_on(&world),
        }
    };
    match made {
        Ok(()) if round < 3 => Answer::More,
        Ok(()) => {
            tell(Told::default());
            drain::forget_heard();
            Answer::Done
        }
        Err(why) => Answer::Refused(why),
    }
}

/// Round 0: every object.
unsafe fn make_all(world: &World) -> Made {
    for c in &world.contexts {
        open(&mut **c)?;
    }
    // A parent domain comes after its domain, as it did then.
    for pd in &world.pds {
        let c = ShadowContext::of((**pd).base.context);
        let parent = (**pd).parent;
        (**pd).real = if parent.is_null() {
            (real().ibv_alloc_pd)(c.real)
        } else {
            real_parent_domain(c, parent)
        };
        exists("a protection domain", (**pd).real)?;
    }
    for mr in world.mrs.iter() {
        let m = &mut **mr;
        m.real = register_again(
            (*m.base.pd.cast::<ShadowPd>()).real,
            m.base.addr,
            m.base.length,
            m.iova,
            m.access,
        );
        exists("a memory region", m.real)?;
    }
    for channel in &world.channels {
        let ch = &mut **channel;
        close(ch.base.fd, (*ch.real).fd);
        ch.real = (real().ibv_create_comp_channel)(ShadowContext::of(ch.base.context).real);
        exists("a completion channel", ch.real)?;
        ch.bell.exchange((*ch.real).fd);
    }
    for cq in &world.cqs {
        let cqe = (**cq).base.base.cqe;
        // It may have needed more for a moment.
        (**cq).spare = (**cq).spare.min(SPARE);
        (**cq).real = match (**cq).extended {
            Some(attr) => make_extended(*cq, &attr, cqe),
            None => make_plain(*cq, cqe),
        };
        exists("a completion queue", (**cq).real)?;
        moderate_again(&**cq);
    }
    for srq in &world.srqs {
        let s = &mut **srq;
        let mut init = SrqInitAttr {
            srq_context: keeps(*srq),
            attr: s.attr,
        };
        s.real = (real().ibv_create_srq)((*s.base.pd.cast::<ShadowPd>()).real, &mut init);
        exists("a shared receive queue", s.real)?;
    }
    for qp in &world.qps {
        make_qp(*qp)?;
    }
    Ok(())
}

fn exists<T>(what: &str, made: *mut T) -> Made {
    if made.is_null() {
        Err(failed(what))
    } else {
        Ok(())
    }
}

/// Closes a descriptor of the provider's that was left over, which is not the program's own.
unsafe fn close(own: i32, left: i32) {
    if left >= 0 && left != own {
        libc::close(left);
    }
}

unsafe fn open(c: &mut ShadowContext) -> Made {
    let name = String::from_utf8_lossy(&(*c.device()).base.name)
        .trim_end_matches('\0')
        .to_owned();
    close(c.bell.fd, (*c.real).async_fd);
    close(c.bell.fd, (*c.real).cmd_fd);
    let context = open_real(&*c.device());
    if context.is_null() {
        return Err(failed(&format!("the device {name}")) + ": restart on a host with such an adapter");
    }
    c.real = context;
    // Numbers of the device that is gone.
    c.qps = Table::new();
    c.bell.exchange((*context).async_fd);
    let today = Port::all(context);
    let alike = |(then, now): (&Port, &Port)| then.ethernet == now.ethernet;
    if today.len() < c.ports().len() || !c.ports().iter().zip(&today).all(alike) {
        return Err(format!(
            "the device {name} has other ports than before: restart on a host with such an adapter"
        ));
    }
    c.set_today(today);
    Ok(())
}

/// Makes a queue pair, and brings it as far as it goes without its peer.
unsafe fn make_qp(qp: *mut ShadowQp) -> Made {
    let q = &mut *qp;
    let c = ShadowContext::of(q.base.base.context);
    let b = &q.base.base;
    let cap = roomy(&q.cap, q.spare);
    q.real = match (q.extended, c.extended().and_then(|x| x.as_ref().create_qp_ex)) {
        (Some(attr), Some(make)) => make(c.real, &mut real_init_ex(&QpInitAttrEx { cap, ..attr })),
        _ => {
            let init = QpInitAttr {
                qp_context: b.qp_context,
                send_cq: b.send_cq,
                recv_cq: b.recv_cq,
                srq: b.srq,
                cap,
                qp_type: b.qp_type,
                sq_sig_all: i32::from(q.sig_all),
            };
            (real().ibv_create_qp)((*b.pd.cast::<ShadowPd>()).real, &mut real_init(&init))
        }
    };
    exists("a queue pair", q.real)?;
    (*q.real).qp_context = keeps(qp);
    // A program that destroys it strikes off the number of today.
    c.qps.set((*q.real).qp_num, qp);
    bring_back(q)?;
    // A queue pair may join a group in any state.
    let groups = q.groups.lock().clone();
    groups
        .iter()
        .try_for_each(|(gid, lid)| check("a multicast group", (real().ibv_attach_mcast)(q.real, gid, *lid)))
}

/// Brings a new queue pair as far as it goes without its peer.
unsafe fn bring_back(q: &ShadowQp) -> Made {
    let rested = q.rested.load(Acquire);
    if rested == QPS_RESET {
        return Ok(());
    }
    let shown = *q.shown.lock();
    to(q, QPS_INIT, shown.to_init)?;
    if rested == QPS_ERR {
        // The kernel knows no way there from RESET. What there was to be said of it has been said.
        q.leaving.store(true, Release);
        return to(q, QPS_ERR, 0);
    }
    if q.kind() != QPT_UD || rested == QPS_INIT {
        return Ok(());
    }
    // Nobody sends anything before all are ready.
    to(q, QPS_RTR, shown.to_rtr)?;
    if rested != QPS_RTR {
        to(q, QPS_RTS, shown.to_rts)?;
    }
    Ok(())
}

/// Brings a queue pair to a state with the attributes that the program gave.
///
/// Not the alternative path: where that would lead is not told.
unsafe fn to(q: &ShadowQp, state: u32, mask: i32) -> Made {
    let mask = mask & !(QP_ALT_PATH | QP_PATH_MIG_STATE);
    let shown = *q.shown.lock();
    let mut attr = QpAttr {
        qp_state: state,
        ..shown.attr
    };
    if shown.write_added {
        attr.qp_access_flags |= ACCESS_REMOTE_WRITE;
    }
    if state == QPS_RTR && mask & QP_AV != 0 {
        let attr_then = AhAttr {
            port_num: shown.attr.port_num,
            ..attr.ah_attr
        };
        let (now, found) = translate::address(context_of(q), &attr_then, attr.dest_qp_num);
        attr.ah_attr = AhAttr {
            port_num: attr.ah_attr.port_num,
            ..now
        };
        attr.dest_qp_num = found.map_or(attr.dest_qp_num, |f| f.number);
    }
    check(
        &format!("queue pair {:#x} to state {state}", q.number()),
        (real().ibv_modify_qp)(q.real, &mut attr, mask | QP_STATE),
    )
}

/// What round 0 tells and wishes: where everything is.
unsafe fn names(world: &World) -> Made {
    let mut told = Told::default();
    for c in &world.contexts {
        for (then, now) in (**c).ports().iter().zip((**c).today()) {
            // Each GID of then, and what it is today.
            let same = |g: &GidEntry| Some([g.gid.raw, now.gid(now.index_like(then, g.gid_index as u8).into())?.gid.raw].concat());
            let gids: Vec<u8> = then.gids.iter().filter_map(same).take(MOST_GIDS).flatten().collect();
            told.fact(&[&b"o"[..], &then.name(0).0, &now.name(0).0].concat(), &gids);
            told.wish(&[&b"n"[..], &then.name(0).0, b"*"].concat());
        }
    }
    told.wish(b"o*");
    tell_keys(world, &mut told);
    // Those that may be called without a connection.
    told.wish(b"d*");
    told.wish(b"i*");
    for q in world.qps.iter().map(|q| &**q) {
        let rested = q.rested.load(Acquire);
        let kind = match q.kind() == QPT_UD {
            true => b'd',
            // Its peer has yet to hear of it, whichever that is.
            false if !(QPS_RTR..=QPS_SQE).contains(&rested) || q.half_open.load(Acquire) => b'i',
            false => b'n',
        };
        let c = context_of(q);
        let port = port_of(q).map(|p| p.number);
        // One that has no port yet may get any.
        let ports = c.ports().iter().filter(|p| port.is_none_or(|own| own == p.number));
        for then in ports {
            if let Some(now) = c.today().iter().find(|p| p.number == then.number) {
                let names = every_name(q, then, now);
                names
                    .iter()
                    .for_each(|(then, fact)| told.fact(&then.key(kind), &fact.encode()));
            }
        }
        if q.kind() != QPT_UD && (QPS_RTR..=QPS_SQE).contains(&rested) {
            // Also of one that has not heard of its peer: that one may have heard of it.
            if let Some((_, peer)) = both_ends(q) {
                told.wish(&peer.key(b'n'));
            }
        }
    }
    tell(told);
    Ok(())
}

/// The names by which a queue pair may be called, and where it is.
unsafe fn every_name(q: &ShadowQp, then: &Port, now: &Port) -> Vec<(QpName, NameFact)> {
    let fact = |port| NameFact {
        port,
        number: (*q.real).qp_num,
        received: q.received.load(Acquire),
    };
    let name = |port| QpName {
        port,
        number: q.number(),
    };
    if !then.ethernet {
        return vec![(name(PortName::lid(then.lid)), fact(PortName::lid(now.lid)))];
    }
    let all = then.gids.iter().map(|g| g.gid_index as u8);
    all.map(|i| (name(then.name(i)), fact(now.name(now.index_like(then, i)))))
        .collect()
}

/// The tables of what round 0 has told.
unsafe fn make_tables(world: &World, heard: Heard) -> Tables {
    let mut t = Tables::default();
    let ports: Vec<PortName> = world
        .contexts
        .iter()
        .flat_map(|c| (**c).ports().iter().map(|p| p.name(0)))
        .collect();
    for kind in [b"n", b"d", b"i"] {
        for (name, fact) in heard
            .facts(kind)
            .filter_map(|(n, f)| Some((QpName::parse(n)?, NameFact::decode(f)?)))
        {
            if kind != b"n" {
                t.back.insert(
                    QpName {
                        port: fact.port,
                        number: fact.number,
                    },
                    name,
                );
            }
            t.names.insert(name, fact);
            if ports.contains(&name.port) {
                t.reserved.insert(name.number);
            }
        }
    }
    let mut places = BTreeMap::new();
    for (key, gids) in heard.facts(b"o") {
        if let Some((then, Ok(now))) = key.split_first_chunk::<16>().map(|(then, now)| (*then, now.try_into())) {
            let gid = |bytes: &[u8]| bytes.try_into().map_or(Gid::default(), |raw| Gid { raw });
            let pairs = gids.chunks_exact(32).map(|pair| (gid(&pair[..16]), gid(&pair[16..])));
            places.insert((PortName(then), PortName(now)), pairs.collect());
        }
    }
    t.places = Places::new(places);
    t
}

/// Today's keys of the regions of each context: those of two adapters may be the same.
unsafe fn own_keys(world: &World) {
    for c in world.contexts.iter().map(|c| &**c) {
        let own = world.mrs.iter().map(|m| &**m).filter(|m| m.base.context == c.program());
        let keys: Keys = own.map(|m| (m.base.lkey, (*m.real).lkey)).collect();
        c.lkeys.store(Box::into_raw(Box::new(keys)), Release);
    }
}

/// Round 1: the tables, receives, and connections as far as RTR. What is told: the keys of the regions.
unsafe fn connect_all(world: &World, heard: Heard) -> Made {
    own_keys(world);
    let t = adopt(make_tables(world, heard));
    let few_keys = are_few_keys(heard);
    for srq in &world.srqs {
        let s = &**srq;
        check("receives of a shared queue", repost_shared(s))?;
        // An empty queue would be below it.
        if s.attr.srq_limit != 0 {
            check(
                "the limit of a shared receive queue",
                (real().ibv_modify_srq)(s.real, &mut { s.attr }, SRQ_LIMIT),
            )?;
        }
    }
    let mut told = Told::default();
    // Of the own ports too: no new key may be one of theirs.
    let mut wished: BTreeSet<PortName> = world
        .contexts
        .iter()
        .flat_map(|c| (**c).ports().iter().map(|p| p.name(0)))
        .collect();
    for mr in world.mrs.iter() {
        let m = &**mr;
        for port in ShadowContext::of(m.base.context).ports() {
            let key = [&b"k"[..], &port.name(0).0, &m.base.rkey.to_le_bytes()].concat();
            told.fact(&key, &(*m.real).rkey.to_le_bytes());
        }
    }
    for q in world.qps.iter().map(|q| &**q) {
        let rested = q.rested.load(Acquire);
        if rested == QPS_ERR {
            flush_receives(q);
        }
        if rested == QPS_RESET || rested == QPS_ERR {
            continue;
        }
        check("receives of a queue pair", repost(q))?;
        if q.kind() == QPT_UD || rested == QPS_INIT {
            continue;
        }
        let Some(peer) = both_ends(q).and_then(|(_, peer)| t.names.get_key_value(&peer)) else {
            // Whom it was connected to is not there any more: its requests fail, as they would have.
            to(q, QPS_ERR, 0)?;
            q.rested.store(QPS_ERR, Release);
            continue;
        };
        wished.extend(t.places.known_as(peer.0.port));
        let to_rtr = q.shown.lock().to_rtr;
        to(q, QPS_RTR, to_rtr)?;
    }
    // Whoever is not connected yet may know keys of anybody. In a small job all are told: a program may know the keys
    // before it has a queue pair.
    let open = |q: &*mut ShadowQp| is_open(&**q, (**q).rested.load(Acquire));
    if few_keys && t.places.len() <= SMALL_JOB || world.qps.iter().any(open) {
        told.wish(b"k*");
        wished.clear();
    }
    for port in wished {
        told.wish(&[&b"k"[..], &port.0, b"*"].concat());
    }
    tell(told);
    Ok(())
}

/// Round 2: the keys of the peers, and connections to RTS.
unsafe fn ready_all(world: &World, heard: Heard) -> Made {
    let Some(t) = tables() else {
        return Err("the tables of names are missing".into());
    };
    let mut peers: HashMap<PortName, Keys> = HashMap::new();
    for (key, now) in heard.facts(b"k") {
        if let (Some((port, Ok(key))), Ok(now)) = (key.split_first_chunk().map(|(port, k)| (*port, k.try_into())), now.try_into()) {
            let keys = peers.entry(PortName(port)).or_default();
            keys.insert(u32::from_le_bytes(key), u32::from_le_bytes(now));
        }
    }
    // The same again where this round is not the first of its kind: tables are those of one restart.
    let _ = t.keys.set(peers);
    for q in world.qps.iter().map(|q| &**q) {
        let rested = q.rested.load(Acquire);
        if q.kind() == QPT_UD || !(QPS_RTR..=QPS_SQE).contains(&rested) {
            continue;
        }
        if let Some((_, peer)) = both_ends(q) {
            translate::use_keys_of(q, peer.port);
        }
        let to_rts = q.shown.lock().to_rts;
        if rested != QPS_RTR {
            to(q, QPS_RTS, to_rts)?;
        }
    }
    tell(Told::default());
    Ok(())
}

/// Round 3: what was not received is posted again, and whoever may wait for an event gets one.
unsafe fn go_on(world: &World) -> Made {
    for q in world.qps.iter().map(|q| &**q) {
        resend(q)?;
    }
    world.contexts.iter().for_each(|c| save_events(&**c));
    for cq in &world.cqs {
        let c = &**cq;
        let armed = c.armed.load(Acquire);
        if armed == 0 {
            continue;
        }
        if let Some(notify) = (*(*c.real).context).ops.req_notify_cq {
            check("a completion queue", notify(c.real, i32::from(armed == 1)))?;
        }
        c.kick();
    }
    Ok(())
}

/// Has it hold back what is posted from now on, as before.
unsafe fn hold(q: &ShadowQp) -> Made {
    let asked = q.shown.lock().to_sqd;
    to(q, QPS_SQD, asked)
}

/// Retires what the peer has received, and posts the rest again.
unsafe fn resend(q: &ShadowQp) -> Made {
    let rested = q.rested.load(Acquire);
    let acknowledged = q.acknowledged.load(Acquire);
    let received = match (q.kind(), both_ends(q)) {
        (QPT_RC, Some((_, peer))) => tables().and_then(|t| t.names.get(&peer)).map(|n| n.received),
        _ => None,
    };
    let Some(received) = received.filter(|_| rested != QPS_ERR) else {
        // Datagrams have left. Of a connection that is lost every request fails.
        flush(q);
        return if rested == QPS_SQD { hold(q) } else { Ok(()) };
    };
    let connected = !q.half_open.load(Acquire);
    if connected && received < acknowledged {
        return Err(format!(
            "queue pair {:#x}: {acknowledged} messages are acknowledged, and {received} received",
            q.number()
        ));
    }
    let mut left = done_at_rest(q, connected.then_some(received));
    let log = q.send.log.lock();
    let Range {
        start: mut head,
        end: tail,
    } = q.send.places();
    let (mut consumed, mut marker) = (0, false);
    while head < tail && (left > 0 || log.entry(head).marker) {
        let e = *log.entry(head);
        head += 1;
        if e.marker {
            marker = true;
            continue;
        }
        left -= 1;
        consumed += u64::from(takes_receive(e.opcode));
        if q.sig_all || e.flags & SEND_SIGNALED != 0 {
            complete(q, e.wr_id, e.opcode, WC_SUCCESS);
        }
    }
    q.acknowledged.store(acknowledged + consumed, Release);
    q.send.retire(head, marker);
    // A marker that was on its way would be posted again without use, but in its place.
    let give = |from, to| check("requests", give(q, &log, from, to).1);
    if rested == QPS_RTS {
        return give(head, tail);
    }
    if rested == QPS_SQD {
        let held = match q.drained.load(Acquire) {
            true => head,
            false => q.held_from.load(Acquire).clamp(head, tail),
        };
        give(head, held)?;
        hold(q)?;
        q.held_from.store(held, Release);
        give(held, tail)?;
    }
    Ok(())
}

/// Drops what is pending; a reliable queue pair says of each that it was flushed.
unsafe fn flush(q: &ShadowQp) {
    let log = q.send.log.lock();
    for e in q
        .send
        .places()
        .map(|i| log.entry(i))
        .filter(|e| !e.marker && q.kind() == QPT_RC)
    {
        complete(q, e.wr_id, e.opcode, WC_WR_FLUSH_ERR);
    }
    drop(log);
    q.send.clear();
}
