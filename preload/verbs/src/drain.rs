//! Coming to rest before a checkpoint.
//!
//! The gate is shut and no thread is inside. The thread takes all completions from the provider and saves them, until
//! it is certain of every reliable connection what has become of its requests (`settled`), and nothing arrives in the
//! other queue pairs any more. What this takes of the other ends is told in rounds:
//!
//! ```text
//! round 0     take what is there; tell the facts of all connections, wish those of the peers
//! round n     go on taking, with what the peers have told; tell the facts again, and how much is not at rest
//! the last    nothing was, on any host, and no fact has changed since: the sum is 0
//! ```
//! In round 1 nobody posts any more on any host. A marker, a write without data, is posted where the last request has
//! no completion of its own.

use crate::api::save_events;
use crate::bias::strike_all;
use crate::control::{holds, Answer};
use crate::gate;
use crate::heap;
use crate::lock::Lock;
use crate::names::{both_ends, PortName, QpFact, QpName};
use crate::path::{collect, mark, takes_receive};
use crate::real::real;
use crate::rounds::{Heard, Told};
use crate::settled::{done, done_before_held, settled, Need, Peer, Request};
use crate::shadow::{ShadowQp, World, WORLD};
use crate::sizes::{tell_sizes, too_much};
use belay_abi::control::{Span, MAX_TOLD};
use belay_ibv::*;
use std::collections::{HashMap, HashSet};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering::Acquire, Ordering::Release};
use std::time::{Duration, Instant};

/// How long one goes on taking completions in a round, where something is missing.
const PATIENCE: Duration = Duration::from_millis(5);
/// How long nothing must have arrived where no counter says what is on its way.
const QUIET: Duration = Duration::from_millis(3);
/// How long is waited for an adapter that sends nothing again.
const NEVER_AGAIN: Duration = Duration::from_secs(1);
/// Rounds after which one has more patience.
const MANY: u32 = 50;
/// The sum of what is not at rest.
const BUSY: &[u8] = b"busy";

#[derive(Default)]
struct State {
    told: Told,
    /// How long all rounds together may take.
    limit: Duration,
    /// What was told of each connection in the last round, what its peer told before, and since when both are so.
    facts: HashMap<QpName, (QpFact, Option<QpFact>, Instant)>,
    round: u32,
    /// Queue pairs that hold back (SQD) and have done all that they had begun, and in which round that was found.
    drained: HashMap<*const ShadowQp, u32>,
    /// Ports that processes of the job have, or had: a peer at one of them is gone, and no stranger. Kept from one
    /// checkpoint to the next.
    ports: HashSet<PortName>,
    /// What is not at rest, in words.
    why: String,
}

// SAFETY: its pointers are looked up, and not followed.
unsafe impl Send for State {}

static STATE: Lock<Option<State>> = Lock::new(None);
/// Where the agent writes what was wished for.
static ROOM: AtomicPtr<u8> = AtomicPtr::new(null_mut());

/// Room for all that one may hear: pages that are not touched cost nothing.
pub(crate) fn room() -> Span {
    let mut room = ROOM.load(Acquire);
    if room.is_null() {
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        let how = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping.
        let new = unsafe { libc::mmap(null_mut(), MAX_TOLD as usize, rw, how, -1, 0) };
        if new == libc::MAP_FAILED {
            return Span::default();
        }
        room = new.cast();
        ROOM.store(room, Release);
    }
    Span {
        address: room as u64,
        bytes: MAX_TOLD,
    }
}

/// What the agent has written there.
pub(crate) fn hear(bytes: u64) -> Heard<'static> {
    let room = ROOM.load(Acquire);
    if room.is_null() {
        return Heard(&[]);
    }
    // SAFETY: the agent has written so much, into a mapping of this length, and writes the next time when it is asked.
    Heard(unsafe { std::slice::from_raw_parts(room, bytes.min(MAX_TOLD) as usize) })
}

/// What was heard is of no use any more: no page of it is in the image.
pub(crate) fn forget_heard() {
    let room = ROOM.load(Acquire);
    if !room.is_null() {
        // SAFETY: the mapping of `room`, into which nobody writes now.
        unsafe { heap::forget(room, MAX_TOLD as usize) };
    }
}

/// What is told in this round: it stays where it is until the next one.
pub(crate) fn told() -> Span {
    let state = STATE.lock();
    let bytes = state.as_ref().map_or(&[][..], |s| s.told.bytes());
    Span {
        address: bytes.as_ptr() as u64,
        bytes: bytes.len() as u64,
    }
}

/// Tells something else than before.
pub(crate) fn tell(told: Told) {
    STATE.lock().get_or_insert_default().told = told;
}

pub(crate) fn after_fork() {
    // SAFETY: the only thread; what the parent's threads were changing may be torn, and is left to itself.
    unsafe {
        STATE.reset(None);
        WORLD.reset(World::default());
        crate::shadow::after_fork();
        crate::around::after_fork();
    }
}

/// Carries out an order to come to rest.
pub(crate) fn close(order: u32, round: u32, heard: u64, limit: Duration) -> Answer {
    let end = Instant::now() + limit;
    let quarter = limit / 4;
    let patient = || holds(order) && Instant::now() + quarter < end;
    let inside = || Answer::Busy("a thread is inside a function of the verbs for long".into());
    if !gate::await_empty(patient) {
        return inside();
    }
    if round == 0 {
        crate::cm::hear_all();
    }
    let world = WORLD.lock();
    if gate::shut_by() != order {
        return Answer::Busy("nobody keeps the gate shut any more".into());
    }
    // SAFETY: on the lists, so they live.
    if !unsafe { strike_all(|| world.locks(), patient) } {
        return inside();
    }
    let mut held = STATE.lock();
    let state = held.get_or_insert_default();
    let heard = hear(if round == 0 { 0 } else { heard });
    let peers: HashMap<_, _> = heard
        .facts(b"q")
        .filter_map(|(name, fact)| Some((name, QpFact::decode(fact)?)))
        .collect();
    if round == 0 {
        *state = State {
            limit,
            ports: std::mem::take(&mut state.ports),
            ..State::default()
        };
        // SAFETY: on the list, so they live.
        world.contexts.iter().for_each(|c| unsafe { (**c).look_again() });
        // SAFETY: as above.
        if let Some(fd) = unsafe { crate::around::find(&world) } {
            return Answer::Refused(format!(
                "descriptor {fd} is of an adapter that was opened around belay's library: let what did so not use the verbs (NCCL: NCCL_IB_DISABLE=1)"
            ));
        }
    } else if round > 1 && heard.sum(BUSY) == Some(0) {
        state.told = Told::default();
        // SAFETY: nobody else is inside.
        unsafe { rest(&world, state, &peers) };
        // The names of the peers are in what was heard.
        drop(peers);
        forget_heard();
        return Answer::Done;
    }
    // SAFETY: nobody else is inside.
    let busy = unsafe { take(&world, state, &peers, round, &|| holds(order)) };
    if busy > 0 && round > 0 && limit < state.limit / 4 {
        return Answer::Busy(std::mem::take(&mut state.why));
    }
    let ports = heard.facts(b"p").filter_map(|(port, _)| port.try_into().ok());
    state.ports.extend(ports.map(PortName));
    // SAFETY: on the lists, so they live.
    let too_much = unsafe { too_much(&world, heard) };
    if let Some(why) = too_much.or_else(|| stranger(&world, &peers, &state.ports, round)) {
        return Answer::Refused(why);
    }
    state.told = tell_all(&world, state, busy);
    Answer::More
}

type Peers<'a> = HashMap<&'a [u8], QpFact>;

/// Takes completions for a while. How much is not at rest.
unsafe fn take(world: &World, state: &mut State, peers: &Peers, round: u32, go_on: &dyn Fn() -> bool) -> u64 {
    state.round = round;
    let begin = Instant::now();
    let patience = PATIENCE * if round < MANY { 1 } else { 4 };
    // Of a connection that has failed everything is on its way that was pending.
    let uncounted = |q: &ShadowQp| (q.kind() != QPT_RC && q.base.base.state != QPS_RESET) || q.broken.load(Acquire);
    let datagrams = world.qps.iter().any(|q| uncounted(&**q));
    let mut arrived = 0;
    let mut last = begin;
    loop {
        world.qps.iter().for_each(|q| note_drained(&**q, state));
        let came: usize = world.cqs.iter().map(|c| collect(&**c, &mut (**c).state.lock())).sum();
        arrived += came as u64;
        if came > 0 {
            last = Instant::now();
            continue;
        }
        if round > 0 {
            world.qps.iter().for_each(|q| mark_if_needed(&**q, peers, state));
        }
        let waiting = world.qps.iter().filter(|q| !at_rest(&***q, peers, state)).count();
        let quiet = !datagrams || last.elapsed() >= QUIET;
        if round == 0 || waiting == 0 && quiet || begin.elapsed() > patience || !go_on() {
            let (changed, open) = (changes(world, peers, state), waiting as u64 + arrived);
            if let Some(q) = world.qps.iter().find(|q| !at_rest(&***q, peers, state)) {
                state.why = waits(&**q, peers, state);
            } else {
                state.why = "messages go on arriving".into();
            }
            return if round == 0 { 1 } else { open + changed };
        }
        std::thread::yield_now();
    }
}

/// What a queue pair waits for, in words.
fn waits(q: &ShadowQp, peers: &Peers, state: &State) -> String {
    let number = q.number();
    let held = q.base.base.state == QPS_SQD;
    if held && q.kind() != QPT_RC {
        return format!("queue pair {number:#x} holds back requests with completions (SQD): let it send (RTS)");
    }
    if held && is_drained(q, state) {
        return format!(
            "queue pair {number:#x} holds its requests back (SQD), and nothing tells which of them are done: let it send (RTS), or give each request a completion of its own"
        );
    }
    let Some((own, fact)) = connected(q) else {
        return format!("queue pair {number:#x} has not sent everything");
    };
    let Some(peer) = peer_of(own, &fact, peers) else {
        return format!("the peer of queue pair {number:#x} is gone");
    };
    // SAFETY: on the list, so both live.
    if q.spare == 0 || unsafe { (*q.send_cq()).spare } == 0 {
        return format!(
            "queue pair {number:#x} waits for requests without completions: its queues are as long as the device allows, which leaves no place for one of belay's (max_qp_wr and max_cqe of ibv_query_device are what it may have)"
        );
    }
    format!(
        "queue pair {number:#x} waits: {} requests are pending, {} messages acknowledged, {} received by the peer, which has {} receives; {} received of {}",
        pending(q).count(), fact.acknowledged, peer.received, peer.available, fact.received, peer.acknowledged
    )
}

/// Connections of which something else is known than was told in the last round.
fn changes(world: &World, peers: &Peers, state: &mut State) -> u64 {
    let mut changed = 0;
    let mut now = HashMap::new();
    for q in &world.qps {
        // SAFETY: on the list, so it lives.
        if let Some((name, fact)) = connected(unsafe { &**q }) {
            let peer = peer_of(name, &fact, peers);
            let before = state.facts.get(&name);
            changed += u64::from(before.is_none_or(|b| b.0 != fact));
            let same = before.filter(|b| b.0 == fact && b.1 == peer);
            now.insert(name, (fact, peer, same.map_or_else(Instant::now, |b| b.2)));
        }
    }
    state.facts = now;
    changed
}

/// Whether nothing has changed for longer than the adapter tries to send again what was lost.
fn is_quiet(q: &ShadowQp, name: &QpName, now: (&QpFact, Option<&QpFact>), state: &State) -> bool {
    let attr = q.shown.lock().attr;
    let known = state.facts.get(name).filter(|b| b.0 == *now.0 && b.1.as_ref() == now.1);
    known.is_some_and(|b| b.2.elapsed() > last_try(attr.timeout, attr.retry_cnt))
}

/// After this time a request is acknowledged or has failed, if there is nothing for which it waits.
fn last_try(timeout: u8, retries: u8) -> Duration {
    if timeout == 0 {
        return NEVER_AGAIN;
    }
    // An adapter may wait four times as long as it was told (InfiniBand Architecture Specification 1, 9.7.6.1.3).
    let once = Duration::from_nanos((4 * 4096) << timeout.min(31));
    once * (u32::from(retries) + 1) + QUIET
}

/// The fact of a queue pair that is reliable and connected. One that has failed is not, whatever the program knows of it.
fn connected(q: &ShadowQp) -> Option<(QpName, QpFact)> {
    let state = q.base.base.state;
    let connected = q.kind() == QPT_RC && (QPS_RTR..=QPS_SQE).contains(&state) && !q.broken.load(Acquire);
    connected.then(|| QpFact::of(q))?
}

/// What the peer of a connection has told, if it is still connected to it.
fn peer_of(own: QpName, fact: &QpFact, peers: &Peers) -> Option<QpFact> {
    let peer = peers.get(&fact.peer.key(b'q')[1..])?;
    (peer.peer == own && peer.rq_psn == fact.sq_psn).then_some(*peer)
}

/// The requests of a queue pair that are not known to be done.
fn pending(q: &ShadowQp) -> impl Iterator<Item = Request> + Clone + '_ {
    // SAFETY: nobody posts.
    let log = unsafe { q.send.log.peek() };
    q.send.places().map(|i| log.entry(i)).filter(|e| !e.marker).map(|e| Request {
        need: match e.opcode {
            opcode if takes_receive(opcode) => Need::Receive,
            WR_RDMA_WRITE => Need::Nothing,
            _ => Need::Answer,
        },
        signalled: q.sig_all || e.flags & SEND_SIGNALED != 0,
    })
}

fn at_rest(q: &ShadowQp, peers: &Peers, state: &State) -> bool {
    if q.kind() != QPT_RC {
        // What is sent leaves by itself. After an error it has completed, whichever it was.
        return q.broken.load(Acquire) || !q.send.places().any(|i| signalled(q, i));
    }
    let Some((own, fact)) = connected(q) else { return true };
    let Some(peer) = peer_of(own, &fact, peers) else {
        if is_drained(q, state) {
            return done_while_held(q, None).is_some();
        }
        // What has no completion of its own is done after a while, or the connection has failed.
        let silent = !q.send.places().any(|i| signalled(q, i));
        return q.send.is_empty() || silent && is_quiet(q, &own, (&fact, None), state);
    };
    if fact.received < peer.acknowledged {
        return false;
    }
    if is_drained(q, state) {
        return done_while_held(q, Some(peer.received)).is_some();
    }
    let told = Peer {
        received: peer.received,
        available: peer.available,
    };
    let quiet = is_quiet(q, &own, (&fact, Some(&peer)), state);
    settled(pending(q), fact.acknowledged, told, quiet)
}

/// How many of the pending requests are done, when the peer has received so many messages and the queue pair was at rest.
/// None: the peer is not connected to it. What it has received is of another connection, or forgotten by a reset.
///
/// # Safety
/// As for [`ShadowQp::is_signalled`].
pub(crate) unsafe fn done_at_rest(q: &ShadowQp, received: Option<u64>) -> usize {
    if q.drained.load(Acquire) {
        return done_while_held(q, received).unwrap_or(0);
    }
    let acknowledged = q.acknowledged.load(Acquire);
    done(pending(q), acknowledged, received.unwrap_or(acknowledged))
}

/// The same of a drained queue pair. None where it is not certain.
fn done_while_held(q: &ShadowQp, received: Option<u64>) -> Option<usize> {
    let places = q.send.places();
    // Of what it had begun all completions are there.
    let has_not_begun = |i: &u64| *i >= q.held_from.load(Acquire) || signalled(q, *i);
    let held = places.clone().find(has_not_begun).unwrap_or(places.end);
    // None of these is a marker, which has a completion.
    let begun = pending(q).take((held - places.start) as usize);
    match received {
        Some(received) => done_before_held(begun, q.acknowledged.load(Acquire), received),
        None => (held == places.start).then_some(0),
    }
}

/// Whether it was drained in an earlier round: what it has sent has been told by its peer since.
fn is_drained(q: &ShadowQp, state: &State) -> bool {
    let since = state.drained.get(&std::ptr::from_ref(q));
    since.is_some_and(|since| *since < state.round)
}

/// Notes whether it begins to send nothing more, as the program has told it, and has sent what it had begun: the
/// completions of that are there then.
fn note_drained(q: &ShadowQp, state: &mut State) {
    // SAFETY: numbers; the provider's queue pair lives as long as its shadow.
    let is_drained = q.base.base.state == QPS_SQD
        && unsafe {
            let (mut attr, mut init): (QpAttr, QpInitAttr) = (std::mem::zeroed(), std::mem::zeroed());
            let error = (real().ibv_query_qp)(q.real, &mut attr, QP_STATE, &mut init);
            error == 0 && attr.qp_state == QPS_SQD && attr.sq_draining == 0
        };
    if is_drained {
        state.drained.entry(q).or_insert(state.round);
    } else {
        state.drained.remove(&std::ptr::from_ref(q));
    }
}

/// Whether the request in this place has a completion of its own.
fn signalled(q: &ShadowQp, place: u64) -> bool {
    // SAFETY: nobody posts.
    unsafe { q.is_signalled(place) }
}

/// Posts a marker behind the last request, where it has no completion of its own and the connection does not come to
/// rest without.
unsafe fn mark_if_needed(q: &ShadowQp, peers: &Peers, state: &State) {
    let silent = q.send.places().last().is_some_and(|last| !signalled(q, last));
    if q.kind() != QPT_RC || q.base.base.state != QPS_RTS || !silent || at_rest(q, peers, state) {
        return;
    }
    let allowed = QpFact::of(q)
        .and_then(|(own, fact)| peer_of(own, &fact, peers))
        .is_some_and(|p| p.marks);
    if allowed && has_room(q) {
        mark(q);
    }
}

/// Whether there is a place for a marker in both queues. It is none of the program's, which may post again before the
/// marker is done.
unsafe fn has_room(q: &ShadowQp) -> bool {
    let on_their_way = WORLD.peek().markers(q.send_cq());
    q.spare > 0 && q.send.markers() == 0 && on_their_way < (*q.send_cq()).spare as u32
}

/// A connection to a port that no process of the job has, nor has had.
fn stranger(world: &World, peers: &Peers, ports: &HashSet<PortName>, round: u32) -> Option<String> {
    if round == 0 {
        return None;
    }
    for q in &world.qps {
        // SAFETY: on the list, so it lives.
        let q = unsafe { &**q };
        if let Some((own, fact)) = connected(q) {
            if peer_of(own, &fact, peers).is_none() && !ports.contains(&fact.peer.port) {
                return Some(format!(
                    "queue pair {:#x} is connected to a process outside the job: launch both with belay, or close it",
                    q.number()
                ));
            }
        }
    }
    None
}

/// The facts of all connections, and what is wished of the peers.
fn tell_all(world: &World, state: &State, busy: u64) -> Told {
    let mut told = Told::default();
    told.sum(BUSY, busy);
    // SAFETY: on the lists, so they live.
    unsafe { tell_sizes(world, &mut told) };
    for (name, (fact, ..)) in &state.facts {
        told.fact(&name.key(b'q'), &fact.encode());
        told.wish(&fact.peer.key(b'q'));
    }
    // SAFETY: on the lists, so they live.
    unsafe {
        for port in world.contexts.iter().flat_map(|c| (**c).ports()) {
            for name in port.names() {
                told.fact(&[b"p", &name.0[..]].concat(), &[]);
            }
        }
        // A queue pair that is still connected to what was there before is not connected to a stranger.
        for c in &world.contexts {
            let former = (**c).former.lock();
            former.iter().for_each(|name| told.fact(&[b"p", &name.0[..]].concat(), &[]));
        }
        for (_, peer) in world.qps.iter().filter_map(|q| both_ends(&**q)) {
            told.wish(&[b"p", &peer.port.0[..]].concat());
        }
    }
    told
}

/// The last that is done with the provider before the checkpoint.
unsafe fn rest(world: &World, state: &State, peers: &Peers) {
    for q in &world.qps {
        let (mut attr, mut init) = (QpAttr::default(), std::mem::zeroed());
        let q = &**q;
        let known = (real().ibv_query_qp)(q.real, &mut attr, QP_STATE, &mut init) == 0;
        let half_open = connected(q).is_some_and(|(own, fact)| peer_of(own, &fact, peers).is_none());
        q.half_open.store(half_open, Release);
        let held = connected(q).is_some() && is_drained(q, state);
        q.drained.store(held, Release);
        if q.broken.load(Acquire) || half_open && !held {
            // What is left has completed: which it was could not be told by its number, or nothing says so.
            q.send.clear();
        }
        q.rested.store(if known { attr.qp_state } else { q.base.base.state }, Release);
    }
    for c in &world.contexts {
        save_events(&**c);
        (**c).bell.hide();
    }
    world.channels.iter().for_each(|c| (**c).bell.hide());
}

/// The gate is about to open.
pub(crate) fn go_on() {
    let world = WORLD.lock();
    // SAFETY: on the lists, so they live.
    unsafe {
        world.contexts.iter().for_each(|c| (**c).bell.show());
        world.channels.iter().for_each(|c| (**c).bell.show());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::path::tests::end;

    #[test]
    fn nothing_is_called_lost_before_its_last_try() {
        // 67 ms, of which an adapter may make 268, eight times.
        assert!((2147..2160).contains(&last_try(14, 7).as_millis()));
        assert!(last_try(20, 7) > Duration::from_secs(130));
        assert!(last_try(31, 7) > Duration::from_secs(70_000));
    }

    /// Requests without completions of their own, all of the same number, of which the last has failed.
    #[test]
    fn a_connection_that_has_failed_keeps_no_checkpoint_out() {
        let e = end(QPT_RC, null_mut());
        for _ in 0..3 {
            assert_eq!(e.send(0, 0, |_| {}), 0);
        }
        let rests = || at_rest(e.shadow(), &Peers::new(), &State::default());
        assert!(!rests());
        assert!(e.polled(0, WC_WR_FLUSH_ERR, 0).is_some());
        assert_eq!(e.pending().0, 2);
        assert!(rests());
    }

    /// Without a connection only what has failed to be sent stops it.
    #[test]
    fn what_is_sent_is_on_its_way_also_after_a_receive_that_failed() {
        let e = end(QPT_UC, null_mut());
        let [number] = e.receive(&[7])[..] else { panic!() };
        assert_eq!(e.send(3, SEND_SIGNALED, |_| {}), 0);
        let rests = || at_rest(e.shadow(), &Peers::new(), &State::default());
        assert!(e.polled(number, WC_WR_FLUSH_ERR, 0).is_some());
        assert!(!rests());
        assert!(e.polled(3, WC_WR_FLUSH_ERR, 0).is_some());
        assert!(rests());
    }
}
