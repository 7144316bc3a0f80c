//! Who belongs to a node: letting new nodes in, children that come back or are lost, the way back to a parent.

use super::{Child, Guest, Registered, Service, FIRST_PAUSE, GRACE};
use crate::event::Event;
use crate::link::{Link, LinkError};
use crate::message::{Down, Failed, FailureKind, NodeInfo, Up, MAX_FAILURES};
use crate::{shape, strangers};
use std::collections::HashSet;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long a node whose parent was lost may take to come to the root.
const REHOME: Duration = Duration::from_secs(5);
/// So many refusals in a row, and one more when the grace is over, say that a root has ended. A firewall that is loaded
/// anew refuses too.
const REFUSALS: u32 = 5;
/// How long the root may be unreachable before its job is over for this node.
const ROOT_LIMIT: Duration = Duration::from_secs(15);
const CONNECT_LIMIT: Duration = Duration::from_millis(500);
const LAST_PAUSE: Duration = Duration::from_secs(1);

impl Service {
    pub(super) fn hear_guests(&mut self, ready: &HashSet<RawFd>) {
        for guest in std::mem::take(&mut self.guests) {
            let is_ready = ready.contains(&guest.link.raw());
            self.hear_guest(guest, is_ready);
        }
    }

    /// Lets `guest` in, hears who it is where it has something to say, or leaves it where it is.
    pub(super) fn hear_guest(&mut self, mut guest: Guest, is_ready: bool) {
        if guest.hello.is_some() && self.may_let_in() {
            return self.let_in(guest);
        }
        let mut got: Vec<Up> = Vec::new();
        if is_ready {
            if let Err(error) = guest.link.receive(&mut got) {
                tracing::warn!(%error, "a node went away before it was let in");
                return;
            }
        }
        let mut got = got.into_iter();
        let Some(Up::Hello { info, released, ordered }) = got.next() else {
            if guest.hello.is_some() || guest.since.elapsed() < strangers::LIMIT {
                self.guests.push(guest);
            }
            return;
        };
        self.traffic.received.fetch_add(1, Ordering::Relaxed);
        self.traffic.note_reached(guest.link.local());
        match info.node {
            Some(node) if !self.may_be(node) => tracing::warn!(node, "a node came with a number that it has not been given"),
            Some(node) => {
                self.attach(node, info, guest.link, released, ordered);
                // What came together with it.
                got.for_each(|message| self.hear_child(node, message));
            }
            None if self.is_root() => {
                guest.hello = Some(info);
                if self.may_let_in() {
                    self.let_in(guest);
                } else {
                    self.guests.push(guest);
                }
            }
            None => tracing::warn!("a new node came to a relay"),
        }
    }

    /// Whether there is such a node below this one. The root gives the numbers; others know their own alone.
    fn may_be(&self, node: u64) -> bool {
        node != 0 && node != self.node && (!self.is_root() || node < self.next_node)
    }

    /// Whether the next new node can be let in: its parent-to-be is not about to connect itself.
    fn may_let_in(&self) -> bool {
        let parent = shape::parent(self.next_node, self.fan_out).unwrap_or(0);
        self.held.is_none() && self.registry.get(&parent).is_none_or(|r| r.attached)
    }

    /// At the root: gives a new node its number and its parent.
    pub(super) fn let_in(&mut self, mut guest: Guest) {
        let Some(mut info) = guest.hello.take() else { return };
        let node = self.next_node;
        self.next_node += 1;
        info.node = Some(node);
        let parent = shape::parent(node, self.fan_out).unwrap_or(0);
        let above = self.registry.get(&parent).filter(|r| r.attached && r.awaited.is_none());
        let parent = above.map(|r| (parent, r.info.addresses.clone()));
        let registered = Registered {
            info: info.clone(),
            parent: parent.as_ref().map_or(0, |p| p.0),
            attached: false,
            awaited: Some(Instant::now() + REHOME),
        };
        self.registry.insert(node, registered);
        self.traffic.sent.fetch_add(1, Ordering::Relaxed);
        let here = parent.is_none();
        let ordered = self.ordered;
        if let Err(error) = guest.link.send(&Down::Welcome { node, parent, ordered }) {
            tracing::warn!(node, %error, "a node went away while it was let in");
            self.registry.remove(&node);
            return;
        }
        if here {
            self.attach(node, info, guest.link, 0, ordered);
        }
    }

    /// `node` is a child of this node from now on, or again.
    pub(super) fn attach(&mut self, node: u64, info: NodeInfo, link: Link, released: u64, ordered: u64) {
        let again = self.children.remove(&node).and_then(|c| c.released);
        self.children.insert(
            node,
            Child {
                link: Some(link),
                missing_since: None,
                released: again.clone(),
            },
        );
        // What it missed, here or below a parent that was lost. A new node counts from the orders given before it was
        // let in, which are not for it.
        let missed = self.orders.iter().filter(|o| o.id > ordered);
        let missed: Vec<Down> = missed
            .map(|o| Down::Order {
                id: o.id,
                text: o.text.clone(),
            })
            .collect();
        missed.iter().for_each(|order| self.send_down(node, order));
        if let Some((step, failures, values)) = again.filter(|(step, ..)| *step > released) {
            self.send_down(node, &Down::Release { step, failures, values });
        }
        if self.above.as_ref().is_some_and(|a| a.given_up) {
            self.send_down(node, &Down::RootLost);
        } else if self.is_root() {
            self.register(info, 0);
        } else {
            self.send_up(&Up::Attached { info, parent: self.node });
        }
    }

    /// At the root: a node has connected to its parent.
    pub(super) fn register(&mut self, info: NodeInfo, parent: u64) {
        let Some(node) = info.node.filter(|node| self.may_be(*node)) else {
            tracing::warn!(host = info.host, "a node was named that has not been given a number");
            return;
        };
        let new = !self.registry.get(&node).is_some_and(|r| r.attached);
        let registered = Registered {
            info: info.clone(),
            parent,
            attached: true,
            awaited: None,
        };
        self.registry.insert(node, registered);
        if new {
            self.tell(Event::Joined(info));
        }
    }

    pub(super) fn child_broke(&mut self, node: u64, error: &LinkError) {
        if let Some(child) = self.children.get_mut(&node) {
            tracing::warn!(node, %error, "connection to a child ended");
            child.link = None;
            child.missing_since = Some(Instant::now());
        }
    }

    pub(super) fn parent_broke(&mut self, error: &LinkError) {
        if let Some(above) = &mut self.above {
            tracing::warn!(%error, "connection to the parent ended");
            let now = Instant::now();
            // The kernel takes connections also for a process that stands still: only who has answered was there.
            if let Some(link) = above.link.take().filter(Link::is_authenticated) {
                above.lost = now;
                above.seen = link.peer().or(above.seen);
                above.refusals = 0;
                above.pause = FIRST_PAUSE;
            }
            above.next_try = now;
        }
    }

    /// This process has entered a time namespace since something was noted last: what has been noted is of another clock,
    /// and counts as of now.
    pub(crate) fn clock_is_another(&mut self) {
        let now = Instant::now();
        for child in self.children.values_mut() {
            child.link.iter_mut().for_each(|l| l.begin_at(now));
            child.missing_since = child.missing_since.map(|_| now);
        }
        for guest in &mut self.guests {
            guest.link.begin_at(now);
            guest.since = now;
        }
        if let Some(above) = &mut self.above {
            above.link.iter_mut().for_each(|l| l.begin_at(now));
            (above.lost, above.next_try) = (now, now);
        }
        for node in self.registry.values_mut() {
            node.awaited = node.awaited.map(|_| now + REHOME);
        }
        self.patience = self.patience.map(|(_, patience)| (now, patience));
        self.orders.iter_mut().for_each(|o| o.at = now);
        self.strangers.clock_is_another(now);
        self.attended = now;
    }

    /// This process has stood still for `time`, perhaps with all of its machine: what others should have done meanwhile
    /// they may still do.
    pub(super) fn stood_still(&mut self, time: Duration) {
        tracing::info!(ms = time.as_millis(), "this node has stood still");
        for child in self.children.values_mut() {
            child.link.iter_mut().for_each(|l| l.stood_still(time));
            child.missing_since = child.missing_since.map(|since| since + time);
        }
        for guest in &mut self.guests {
            guest.link.stood_still(time);
            guest.since += time;
        }
        if let Some(above) = &mut self.above {
            above.link.iter_mut().for_each(|l| l.stood_still(time));
            above.lost += time;
        }
        for node in self.registry.values_mut() {
            node.awaited = node.awaited.map(|until| until + time);
        }
        self.patience = self.patience.map(|(since, patience)| (since + time, patience));
        self.orders.iter_mut().for_each(|o| o.at += time);
        self.strangers.stood_still(time);
    }

    /// Time passing: signs of life, time limits, new attempts.
    pub(super) fn look_after(&mut self) {
        let mut broken = Vec::new();
        for (node, child) in &mut self.children {
            if let Some(link) = &mut child.link {
                if let Err(e) = link.keep_alive(&Down::Beat, self.silence) {
                    broken.push((*node, e));
                }
            }
        }
        for (node, error) in broken {
            self.child_broke(node, &error);
        }
        let silence = self.silence;
        self.guests.retain_mut(|guest| {
            // A guest that has not said which node it is has a limit of its own.
            let waits = guest.hello.is_some();
            let kept = if waits {
                guest.link.keep_alive(&Down::Beat, silence)
            } else {
                Ok(())
            };
            kept.inspect_err(|error| tracing::warn!(%error, "a node went away before it was let in"))
                .is_ok()
        });
        let over = |c: &Child| c.missing_since.is_some_and(|t| t.elapsed() >= GRACE);
        let lost: Vec<u64> = self.children.iter().filter(|(_, c)| over(c)).map(|(n, _)| *n).collect();
        for node in lost {
            let reason = "its agent is gone, or its host cannot be reached";
            self.children.remove(&node);
            self.step.lose(node, FailureKind::Lost, reason);
            if self.is_root() {
                self.lost(node, reason);
            } else {
                self.send_up(&Up::Lost {
                    node,
                    reason: reason.into(),
                });
            }
        }
        let now = Instant::now();
        let late = |r: &Registered| r.awaited.is_some_and(|t| t < now);
        let late: Vec<u64> = self.registry.iter().filter(|(_, r)| late(r)).map(|(n, _)| *n).collect();
        for node in late {
            self.lost(node, "it did not come back after its parent was lost");
        }
        if let Some(link) = self.above.as_mut().and_then(|a| a.link.as_mut()) {
            if let Err(e) = link.keep_alive(&Up::Beat, self.silence) {
                self.parent_broke(&e);
            }
        }
        self.try_parent(now);
    }

    /// At the root, which has come to a step of a fixed set of nodes: why that cannot end well any more. A node
    /// that comes later hears so then.
    pub(super) fn hopeless(&self) -> Vec<Failed> {
        let Some(held) = self.held.as_ref().filter(|_| self.step.is_own_there()) else {
            return Vec::new();
        };
        let failed = |node, kind, reason: &str| Failed {
            node,
            kind,
            reason: reason.into(),
        };
        let is_there = |node: &u64| self.registry.get(node).is_some_and(|r| r.attached);
        let missing = held.nodes.iter().filter(|n| !is_there(n)).map(|n| {
            let (kind, reason) = held
                .gone
                .get(n)
                .map_or((FailureKind::Lost, "its agent is gone"), |(kind, reason)| (*kind, reason));
            failed(*n, kind, reason)
        });
        let new = self.registry.iter().filter(|(n, r)| r.attached && !held.nodes.contains(n));
        let new = new.map(|(n, _)| failed(*n, FailureKind::Absent, "it has just joined"));
        let late = self.patience.filter(|(since, patience)| since.elapsed() > *patience);
        let silent = late.iter().flat_map(|(_, patience)| {
            let awaited = self.children.keys().filter(|n| !self.step.has_come(**n));
            awaited.map(move |n| {
                let host = self.registry.get(n).map_or("its host", |r| r.info.host.as_str());
                let within = patience.as_secs();
                let reason = format!("the agent on {host} has not answered within {within} s, or one connected through it; see whether it hangs (DIR/nodes/*/log)");
                failed(*n, FailureKind::Silent, &reason)
            })
        });
        missing.chain(new).chain(silent).take(MAX_FAILURES).collect()
    }

    /// At the root: `node` is gone; those below it are expected here.
    pub(super) fn lost(&mut self, node: u64, reason: &str) {
        if self.children.get(&node).is_some_and(|c| c.link.is_some()) {
            return; // it came to the root meanwhile
        }
        if self.gone(node, FailureKind::Lost, reason) {
            self.tell(Event::Lost(node, reason.to_owned()));
        }
    }

    /// Forgets `node`; whether it was known. Its children must find another parent.
    pub(super) fn gone(&mut self, node: u64, kind: FailureKind, reason: &str) -> bool {
        if let Some(held) = &mut self.held {
            held.gone.insert(node, (kind, reason.to_owned()));
        }
        let until = Instant::now() + REHOME;
        for r in self.registry.values_mut().filter(|r| r.parent == node && r.attached) {
            r.awaited = Some(until);
        }
        self.registry.remove(&node).is_some()
    }

    /// The parent says that the root is gone. That may be so from where it is only, so this node asks there itself, once.
    pub(super) fn doubt_root(&mut self) {
        let Some(above) = self.above.as_mut().filter(|a| !a.given_up) else {
            return;
        };
        let now = Instant::now();
        above.link = None;
        above.addresses.clone_from(&self.root);
        (above.seen, above.refusals) = (self.root_seen, REFUSALS);
        (above.lost, above.next_try) = (now.checked_sub(GRACE).unwrap_or(now), now);
    }

    /// The root is gone: the job is over for this node and for all below it.
    fn lose_root(&mut self, why: &str) {
        let Some(above) = self.above.as_mut().filter(|a| !a.given_up) else {
            return;
        };
        (above.given_up, above.link) = (true, None);
        self.tell(Event::RootLost(why.into()));
        if self.step.is_under_way() {
            self.refuse_step(self.step.number());
        }
        for node in self.children.keys().copied().collect::<Vec<_>>() {
            self.send_down(node, &Down::RootLost);
        }
    }

    /// Connects to the parent, or after a while to the root instead.
    pub(super) fn try_parent(&mut self, now: Instant) {
        let Some(above) = &mut self.above else { return };
        if above.link.is_some() || above.given_up || now < above.next_try {
            return;
        }
        let missing = above.lost.elapsed();
        let at_root = above.addresses == self.root;
        if missing > ROOT_LIMIT {
            return self.lose_root("the root of the job cannot be reached any more");
        }
        if !at_root && (missing > GRACE || above.refusals > 0) {
            above.addresses.clone_from(&self.root);
            (above.seen, above.refusals) = (self.root_seen, 0);
        }
        let (seen, mut refused) = (above.seen, false);
        let connected = above.addresses.iter().find_map(|to| {
            let at: SocketAddr = to.parse().ok()?;
            // A loopback address of another host leads to this one, perhaps to this very node.
            if at.ip().is_loopback() && seen.is_some_and(|s| !s.ip().is_loopback()) {
                return None;
            }
            match Link::connect(&self.key, at, CONNECT_LIMIT) {
                Ok(link) => Some(link),
                Err(error) => {
                    tracing::debug!(%to, %error, "connect to the parent");
                    refused |= Some(at) == seen && error.is_refusal();
                    None
                }
            }
        });
        above.refusals = if refused { above.refusals + 1 } else { 0 };
        let Some(mut link) = connected else {
            if above.refusals > REFUSALS && missing > GRACE && above.addresses == self.root {
                return self.lose_root("the root of the job has ended: nobody listens there any more");
            }
            above.next_try = Instant::now() + above.pause;
            above.pause = (above.pause * 2).min(LAST_PAUSE);
            return;
        };
        let hello = Up::Hello {
            info: self.info.clone(),
            released: self.step.released,
            ordered: self.ordered,
        };
        if let Err(e) = link.send(&hello) {
            return self.parent_broke(&e);
        }
        above.link = Some(link);
        if let Some((step, contribution)) = self.step.unanswered() {
            self.send_up(&Up::Arrive { step, contribution });
        }
    }
}
