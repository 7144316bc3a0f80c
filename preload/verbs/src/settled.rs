//! Whether a reliable connection is at rest: what its requests have done at the other end, or have not, is certain.
//!
//! A responder executes requests in order. So a request is executed when a later one is that has taken a receive there;
//! and nothing behind a request is executed that takes a receive where there is none. What is before such a request
//! completes, if it is to have a completion: that is waited for. Otherwise it is waited until nothing has changed for
//! longer than the adapter tries to send again what was lost. After a restart everything is done that is before the first
//! request which the peer has not received, and all from there is posted again.
//!
//! A queue pair that holds its requests back (SQD) and is drained has done all that it has begun. There no time tells what
//! is done; but what is to have a completion, and has none, has not begun, nor has what was posted since it holds back.

/// What a request needs at the other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Need {
    /// A receive.
    Receive,
    /// Nothing, and it may be executed again.
    Nothing,
    /// Nothing, and its answer counts: it must not be executed again when it has been.
    Answer,
}

/// A request that is not known to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Request {
    pub(crate) need: Need,
    /// It has a completion of its own.
    pub(crate) signalled: bool,
}

/// What is not certain of the requests before another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Open {
    Nothing,
    /// Something that nobody will tell of.
    Silent,
    /// Something that has yet to complete.
    Completes,
}

/// What the peer has told, when it posted no receives any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Peer {
    /// Messages that have taken a receive there.
    pub(crate) received: u64,
    /// Receives that are left.
    pub(crate) available: u64,
}

/// Whether it is certain what has become of the `pending` requests, of which those that take a receive are counted
/// from `acknowledged`. `quiet`: nothing has changed for long enough.
pub(crate) fn settled(pending: impl Iterator<Item = Request>, acknowledged: u64, peer: Peer, quiet: bool) -> bool {
    let mut count = acknowledged;
    let (mut unknown, mut unanswered) = (Open::Nothing, Open::Nothing);
    for request in pending {
        let open = if request.signalled { Open::Completes } else { Open::Silent };
        match request.need {
            Need::Answer => unanswered = unanswered.max(open),
            Need::Nothing => unknown = unknown.max(open),
            Need::Receive if count < peer.received => {
                count += 1;
                unknown = Open::Nothing;
            }
            Need::Receive => {
                return peer.available == 0
                    && match unknown.max(unanswered) {
                        Open::Nothing => true,
                        Open::Silent => quiet,
                        Open::Completes => false,
                    }
            }
        }
    }
    unknown.max(unanswered) == Open::Nothing
}

/// How many of the pending requests are done, in a connection that was at rest, of whose messages the peer has
/// received so many.
pub(crate) fn done(pending: impl Iterator<Item = Request>, acknowledged: u64, received: u64) -> usize {
    let mut count = acknowledged;
    let is_done = |request: &Request| {
        let takes = request.need == Need::Receive;
        count += u64::from(takes);
        !takes || count <= received
    };
    pending.take_while(is_done).count()
}

/// How many of the requests are done in front of those that a drained queue pair certainly has not begun, when the peer has
/// received so many messages. None where that is not certain: each is to be executed once.
pub(crate) fn done_before_held(begun: impl Iterator<Item = Request>, acknowledged: u64, received: u64) -> Option<usize> {
    let (mut count, mut done, mut at) = (acknowledged, 0, 0);
    for request in begun {
        at += 1;
        if request.need == Need::Receive {
            count += 1;
            if count > received {
                at -= 1;
                break;
            }
            done = at;
        }
    }
    (done == at).then_some(done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use Need::{Answer, Nothing, Receive};

    #[test]
    fn what_has_no_receive_waits_with_all_behind_it() {
        let requests = |pending: &[Need], signalled| {
            let all: Vec<Request> = pending.iter().map(|need| Request { need: *need, signalled }).collect();
            all.into_iter()
        };
        let rests = |pending: &[Need], signalled, acknowledged, received, available| {
            let peer = Peer { received, available };
            [false, true].map(|quiet| settled(requests(pending, signalled), acknowledged, peer, quiet))
        };
        let at_rest =
            |pending: &[Need], acknowledged, received, available| rests(pending, false, acknowledged, received, available);
        // What is to complete is waited for, however long nothing is heard of it.
        assert_eq!(rests(&[Nothing, Receive], true, 0, 0, 0), [false, false]);
        assert_eq!(rests(&[Answer, Receive], true, 0, 0, 0), [false, false]);
        assert_eq!(rests(&[Answer, Receive, Receive], true, 0, 1, 0), [false, false]);
        assert_eq!(rests(&[Nothing, Receive, Receive], true, 0, 1, 0), [true, true]);
        assert_eq!(at_rest(&[Receive, Answer, Nothing], 0, 0, 0), [true, true]);
        assert_eq!(at_rest(&[Nothing, Receive], 0, 0, 0), [false, true]);
        assert_eq!(at_rest(&[Receive], 0, 0, 1), [false, false]);
        assert_eq!(at_rest(&[Nothing, Receive], 4, 5, 3), [true, true]);
        assert_eq!(at_rest(&[Answer, Receive], 4, 5, 0), [false, false]);
        assert_eq!(at_rest(&[], 3, 3, 9), [true, true]);
        assert_eq!(done(requests(&[Receive, Nothing, Answer, Receive, Nothing], false), 4, 5), 3);
    }

    /// A connection: requests of which the responder has executed some and the requester has heard of fewer.
    #[derive(Clone, PartialEq, Eq, Hash)]
    struct Link {
        requests: Vec<Request>,
        executed: usize,
        acknowledged: usize,
        received: u64,
        receives: u64,
        /// How often each was executed.
        times: Vec<u32>,
    }

    impl Link {
        /// All that may happen next: the responder executes one, or acknowledges up to one (others are lost).
        fn next(&self) -> Vec<Link> {
            let mut all = Vec::new();
            if let Some(Request { need, .. }) = self.requests.get(self.executed) {
                if *need != Receive || self.receives > 0 {
                    let mut n = self.clone();
                    n.times[n.executed] += 1;
                    n.executed += 1;
                    if *need == Receive {
                        n.received += 1;
                        n.receives -= 1;
                    }
                    all.push(n);
                }
            }
            all.extend((self.acknowledged + 1..=self.executed).map(|acknowledged| Link {
                acknowledged,
                ..self.clone()
            }));
            all
        }

        fn consumed(&self, until: usize) -> u64 {
            self.requests[..until].iter().filter(|r| r.need == Receive).count() as u64
        }

        /// Whether each is executed once after a restart, and no answer is missing. Answers are back when the link
        /// is `quiet`.
        fn restarts_well(&self, quiet: bool) -> bool {
            let pending = &self.requests[self.acknowledged..];
            let done = self.acknowledged + done(pending.iter().copied(), self.consumed(self.acknowledged), self.received);
            let mut times = self.times.clone();
            times[done..].iter_mut().for_each(|t| *t += 1);
            let unanswered = |r: &Request| r.need == Answer && (r.signalled || !quiet);
            let answered = !self.requests[self.acknowledged..done].iter().any(unanswered);
            answered && times.iter().all(|t| *t == 1)
        }
    }

    /// Every connection with up to four requests and up to four receives, in every state: wherever it is called
    /// settled with what the peer may have told by then, the restart is right, whatever still happens.
    #[test]
    fn every_restart_is_right() {
        let kind = |need, signalled| Request { need, signalled };
        let kinds = [
            kind(Receive, true),
            kind(Nothing, false),
            kind(Nothing, true),
            kind(Answer, false),
            kind(Answer, true),
        ];
        let count = kinds.len();
        let mut checked = 0;
        for n in 0..5u32 {
            for code in 0..count.pow(n) {
                let requests: Vec<Request> = (0..n).map(|i| kinds[code / count.pow(i) % count]).collect();
                for receives in 0..=u64::from(n) {
                    let times = vec![0; n as usize];
                    let first = Link {
                        requests: requests.clone(),
                        executed: 0,
                        acknowledged: 0,
                        received: 0,
                        receives,
                        times,
                    };
                    checked += check(first);
                }
            }
        }
        assert!(checked > 500, "{checked}");
    }

    /// Every drained queue pair with up to four requests, of which any number has begun: where it is certain what is done,
    /// that is what has begun.
    #[test]
    fn what_is_held_back_is_not_done() {
        let kinds = [Receive, Nothing, Answer].map(|need| [false, true].map(|signalled| Request { need, signalled }));
        let kinds = kinds.as_flattened();
        let mut certain = 0;
        for n in 0..5u32 {
            for code in 0..kinds.len().pow(n) {
                let requests: Vec<Request> = (0..n).map(|i| kinds[code / kinds.len().pow(i) % kinds.len()]).collect();
                for begun in 0..=requests.len() {
                    // What has completed is not pending, with all before it.
                    let first = requests[..begun].iter().rposition(|r| r.signalled).map_or(0, |last| last + 1);
                    let received = requests[first..begun].iter().filter(|r| r.need == Receive).count() as u64;
                    for held in begun..=requests.len() {
                        let known = requests[first..held].iter().position(|r| r.signalled);
                        let pending = requests[first..first + known.unwrap_or(held - first)].iter();
                        if let Some(done) = done_before_held(pending.copied(), 7, 7 + received) {
                            assert_eq!(first + done, begun, "{requests:?} {held}");
                            certain += 1;
                        } else {
                            assert!(requests[first..held].iter().any(|r| !r.signalled && r.need != Receive));
                        }
                    }
                }
            }
        }
        assert!(certain > 500, "{certain}");
    }

    fn check(first: Link) -> u32 {
        let (mut seen, mut todo, mut checked) = (HashSet::from([first.clone()]), vec![first], 0);
        while let Some(link) = todo.pop() {
            let peer = Peer {
                received: link.received,
                available: link.receives,
            };
            let pending = link.requests[link.acknowledged..].iter().copied();
            // Long enough after the last change everything is executed that can be.
            let quiet = link.next().iter().all(|n| n.executed == link.executed);
            if settled(pending, link.consumed(link.acknowledged), peer, quiet) {
                checked += 1;
                assert!(
                    link.restarts_well(quiet),
                    "{:?} {} {}",
                    link.requests,
                    link.executed,
                    link.acknowledged
                );
                assert!(quiet, "something still happens: {:?}", link.requests);
            }
            for n in link.next() {
                if seen.insert(n.clone()) {
                    todo.push(n);
                }
            }
        }
        checked
    }
}
