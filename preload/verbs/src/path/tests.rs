//! Posting and polling, with a provider that takes everything and completes what a test tells it to.

use super::*;
use crate::names::{Port, QpFact};
use crate::shadow::{Bell, RealAhs, ShadowAh, ShadowChannel, ShadowContext, ShadowCq, ShadowPd, ShadowQp, World};
use belay_ibv::*;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::mem::zeroed;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

pub(crate) const NUMBER: u32 = 0x11;

thread_local! {
    static COMPLETIONS: RefCell<VecDeque<Wc>> = const { RefCell::new(VecDeque::new()) };
    /// The numbers of what was posted to receive, as the provider has them.
    static RECEIVES: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

unsafe extern "C" fn take_completions(_: *mut Cq, room: Int, wc: *mut Wc) -> Int {
    COMPLETIONS.with_borrow_mut(|c| {
        let n = c.len().min(room as usize);
        c.drain(..n).enumerate().for_each(|(i, one)| *wc.add(i) = one);
        n as Int
    })
}

unsafe extern "C" fn raise_nothing(_: *mut Cq, _: Int) -> Int {
    0
}

unsafe extern "C" fn take_sends(_: *mut Qp, _: *mut SendWr, _: *mut *mut SendWr) -> Int {
    0
}

unsafe extern "C" fn take_receives(_: *mut Qp, wr: *mut RecvWr, _: *mut *mut RecvWr) -> Int {
    RECEIVES.with_borrow_mut(|r| r.push((*wr).wr_id));
    0
}

/// A queue pair both of whose queues complete into one. What it consists of is not freed.
pub(crate) struct End {
    qp: *mut ShadowQp,
    cq: *mut ShadowCq,
}

fn leak<T>(value: T) -> *mut T {
    Box::into_raw(Box::new(value))
}

pub(crate) fn end(kind: u32, srq: *mut Srq) -> End {
    // SAFETY: numbers, pointers and optional functions, for which zero is a value.
    unsafe {
        let mut real: Context = zeroed();
        real.ops.poll_cq = Some(take_completions);
        real.ops.req_notify_cq = Some(raise_nothing);
        real.ops.post_send = Some(take_sends);
        real.ops.post_recv = Some(take_receives);
        let real = leak(real);
        let port = Port {
            number: 1,
            lid: 3,
            sm_lid: 1,
            ethernet: false,
            gids: Vec::new(),
            places: 1,
        };
        let bell = Bell::new(libc::eventfd(0, libc::EFD_CLOEXEC)).unwrap();
        let context = Box::leak(ShadowContext::with(real, null_mut(), bell, vec![port]));
        let mut real_cq: Cq = zeroed();
        real_cq.context = real;
        let mut base: CqEx = zeroed();
        base.base.context = context.program();
        let cq = leak(ShadowCq {
            base,
            real: leak(real_cq),
            state: Default::default(),
            vector: 0,
            spare: 4,
            armed: Default::default(),
            has_saved: Default::default(),
            extended: None,
            moderation: ModifyCqAttr::default(),
            events: 0,
            async_events: 0,
        });
        let mut real_qp: Qp = zeroed();
        (real_qp.context, real_qp.qp_num) = (real, NUMBER);
        let mut base: QpEx = zeroed();
        let b = &mut base.base;
        (b.context, b.qp_num, b.qp_type, b.srq) = (context.program(), NUMBER, kind, srq);
        b.state = QPS_RTS;
        (b.send_cq, b.recv_cq) = (cq.cast(), cq.cast());
        let cap = QpCap {
            max_send_wr: 8,
            max_recv_wr: if srq.is_null() { 8 } else { u32::MAX },
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let qp = ShadowQp::new(base, leak(real_qp), (cap, 1), &zeroed(), None).unwrap();
        let qp = Box::into_raw(qp);
        let mut shown = (*qp).shown.lock();
        shown.attr.port_num = 1;
        (*qp).note_port(&shown);
        drop(shown);
        context.qps.set(NUMBER, qp);
        End { qp, cq }
    }
}

type Post = unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> Int;
type Poll = unsafe extern "C" fn(*mut Cq, Int, *mut Wc) -> Int;

// SAFETY: what it points to is shadows, which threads share.
unsafe impl Sync for End {}

impl End {
    /// Another provider.
    pub(crate) fn provide(&self, post: Post, poll: Poll) {
        // SAFETY: never freed, and nobody has used it yet.
        let ops = unsafe { &mut (*(*(*self.qp).real).context).ops };
        (ops.post_send, ops.poll_cq) = (Some(post), Some(poll));
    }

    /// Puts it on the lists of the world.
    pub(crate) fn list(&self, world: &mut World) {
        world.qps.push(self.qp);
        world.cqs.push(self.cq);
    }

    /// Takes what the provider has, as before a checkpoint.
    pub(crate) fn collect(&self) -> usize {
        // SAFETY: never freed.
        unsafe { collect(&*self.cq, &mut (*self.cq).state.lock()) }
    }

    pub(crate) fn shadow(&self) -> &ShadowQp {
        // SAFETY: never freed.
        unsafe { &*self.qp }
    }

    /// Posts requests to receive. Their numbers, as the provider has them.
    pub(crate) fn receive(&self, ids: &[u64]) -> Vec<u64> {
        RECEIVES.with_borrow_mut(Vec::clear);
        for id in ids {
            // SAFETY: one request without segments.
            let error = unsafe {
                let mut wr: RecvWr = zeroed();
                wr.wr_id = *id;
                post_recv(self.qp.cast(), &mut wr, &mut null_mut())
            };
            assert_eq!(error, 0);
        }
        RECEIVES.with_borrow(Vec::clone)
    }

    pub(crate) fn send(&self, id: u64, flags: u32, change: impl FnOnce(&mut SendWr)) -> Int {
        // SAFETY: one request without segments.
        unsafe {
            let mut wr: SendWr = zeroed();
            (wr.wr_id, wr.send_flags, wr.opcode) = (id, flags, WR_SEND);
            change(&mut wr);
            post_send(self.qp.cast(), &mut wr, &mut null_mut())
        }
    }

    /// What the program gets when the provider completes this.
    pub(crate) fn polled(&self, wr_id: u64, status: u32, opcode: u32) -> Option<Wc> {
        Self::completes(wr_id, status, opcode);
        self.next()
    }

    fn completes(wr_id: u64, status: u32, opcode: u32) {
        let qp_num = NUMBER;
        COMPLETIONS.with_borrow_mut(|c| {
            c.push_back(Wc {
                wr_id,
                status,
                opcode,
                qp_num,
                ..Wc::default()
            })
        });
    }

    pub(crate) fn next(&self) -> Option<Wc> {
        let mut wc = Wc::default();
        // SAFETY: room for one.
        (unsafe { poll_cq(self.cq.cast(), 1, &mut wc) } == 1).then_some(wc)
    }

    pub(crate) fn pending(&self) -> (u64, u64) {
        (self.shadow().send.posted(), self.shadow().recv.posted())
    }
}

#[test]
fn a_receive_that_fails_is_no_send_of_the_same_number() {
    let e = end(QPT_RC, null_mut());
    let [first, second] = e.receive(&[7, 5])[..] else { panic!() };
    for id in [5, 6, 7] {
        assert_eq!(e.send(id, SEND_SIGNALED, |_| {}), 0);
    }
    for (number, id, left) in [
        (first, 7, (3, 1)),
        (5, 5, (2, 1)),
        (second, 5, (2, 0)),
        (6, 6, (1, 0)),
        (7, 7, (0, 0)),
    ] {
        // The kind of a failed request is not told.
        let wc = e.polled(number, WC_WR_FLUSH_ERR, 0).unwrap();
        assert_eq!((wc.wr_id, wc.status, e.pending()), (id, WC_WR_FLUSH_ERR, left));
    }
}

#[test]
fn a_receive_completes_under_the_number_of_the_program() {
    let e = end(QPT_RC, null_mut());
    let numbers = e.receive(&[9, 9]);
    for number in &numbers {
        assert_eq!(e.polled(*number, WC_SUCCESS, WC_RECV).unwrap().wr_id, 9);
    }
    // One more than was posted is the provider's mistake, not a count below zero.
    assert!(e.polled(numbers[1], WC_SUCCESS, WC_RECV).is_some());
    assert_eq!(e.pending(), (0, 0));
}

static POSTING: AtomicBool = AtomicBool::new(false);
static FORGOTTEN: AtomicBool = AtomicBool::new(false);

/// Refuses a request when its queue was cleared meanwhile, or after a while.
fn refused() -> Int {
    let since = Instant::now();
    POSTING.store(true, SeqCst);
    while !FORGOTTEN.load(SeqCst) && since.elapsed() < Duration::from_millis(200) {
        std::thread::yield_now();
    }
    libc::ENOMEM
}

unsafe extern "C" fn refuse_send(_: *mut Qp, wr: *mut SendWr, bad: *mut *mut SendWr) -> Int {
    *bad = wr;
    refused()
}

unsafe extern "C" fn refuse_receive(_: *mut Qp, wr: *mut RecvWr, bad: *mut *mut RecvWr) -> Int {
    *bad = wr;
    refused()
}

/// A thread posts what is refused while another resets the queue pair, or makes it send again after an error.
#[test]
fn a_queue_is_not_cleared_while_somebody_posts() {
    let _alone = crate::gate::tests::ALONE.lock().unwrap_or_else(|e| e.into_inner());
    crate::gate::prepare();
    for case in 0..3 {
        let e = end(QPT_RC, null_mut());
        // SAFETY: never freed, and nobody has used it yet.
        let ops = unsafe { &mut (*(*(*e.qp).real).context).ops };
        ops.post_send = Some(refuse_send);
        ops.post_recv = Some(refuse_receive);
        e.shadow().broken.store(true, SeqCst);
        POSTING.store(false, SeqCst);
        FORGOTTEN.store(false, SeqCst);
        std::thread::scope(|s| {
            s.spawn(|| match case {
                0 => {
                    // SAFETY: one request without segments.
                    let mut wr: RecvWr = unsafe { zeroed() };
                    // SAFETY: as above.
                    unsafe { post_recv(e.qp.cast(), &mut wr, &mut null_mut()) }
                }
                _ => e.send(1, SEND_SIGNALED, |_| {}),
            });
            while !POSTING.load(SeqCst) {
                std::thread::yield_now();
            }
            // SAFETY: never freed.
            unsafe {
                match case {
                    2 => e.shadow().mend(),
                    _ => e.shadow().forget(),
                }
            }
            FORGOTTEN.store(true, SeqCst);
        });
        let q = e.shadow();
        assert!(q.send.begins() <= q.send.ends() && q.recv.begins() <= q.recv.ends(), "{case}");
    }
}

#[test]
fn with_a_shared_queue_the_size_of_an_own_one_is_nothing() {
    let mut srq = std::mem::MaybeUninit::<crate::shadow::ShadowSrq>::uninit();
    let e = end(QPT_RC, srq.as_mut_ptr().cast());
    // SAFETY: nobody else has it.
    assert!(unsafe { e.shadow().recv.log.peek() }.room() <= 8);
}

#[test]
fn without_a_handle_nothing_is_posted() {
    let e = end(QPT_UD, null_mut());
    // SAFETY: plain pointers.
    let pd: *mut ShadowPd = leak(unsafe { zeroed() });
    let attr = AhAttr::default();
    let reals = RealAhs {
        all: vec![(attr, null_mut())],
        ..RealAhs::default()
    };
    let ah = leak(ShadowAh {
        base: Ah {
            context: null_mut(),
            pd: pd.cast(),
            handle: 0,
        },
        attr,
        real: crate::lock::Lock::new(reals),
    });
    let error = e.send(1, SEND_SIGNALED, |w| {
        w.wr.ud = Ud {
            ah: ah.cast(),
            remote_qpn: 5,
            remote_qkey: 6,
        }
    });
    assert_eq!((error, e.pending()), (libc::EINVAL, (0, 0)));
}

#[test]
fn of_a_packets_number_24_bits_count() {
    let e = end(QPT_RC, null_mut());
    {
        let mut shown = e.shadow().shown.lock();
        (shown.attr.rq_psn, shown.attr.sq_psn) = (0xff12_3456, 0x0165_4321);
    }
    let (_, fact) = QpFact::of(e.shadow()).unwrap();
    assert_eq!((fact.rq_psn, fact.sq_psn), (0x12_3456, 0x65_4321));
}

/// A program that has seen an empty queue arms it, and waits: what was saved in between is an event too.
#[test]
fn whoever_arms_a_queue_of_which_something_is_saved_gets_an_event() {
    let e = end(QPT_RC, null_mut());
    // SAFETY: plain pointers, and a queue that nobody else uses yet.
    let channel: &ShadowChannel = unsafe {
        let channel = leak(ShadowChannel {
            base: zeroed(),
            real: null_mut(),
            bell: Bell::new(libc::eventfd(0, libc::EFD_CLOEXEC)).unwrap(),
            users: Default::default(),
            events: Default::default(),
        });
        (*e.cq).base.base.channel = channel.cast();
        &*channel
    };
    // SAFETY: never freed.
    let arm = || assert_eq!(unsafe { req_notify_cq(e.cq.cast(), 0) }, 0);
    let kicked = || channel.events.lock().kicked.len();
    arm();
    assert_eq!(kicked(), 0);
    e.receive(&[1, 2])
        .into_iter()
        .for_each(|n| End::completes(n, WC_SUCCESS, WC_RECV));
    assert_eq!(e.collect(), 2);
    arm();
    assert!(e.next().is_some());
    arm();
    assert_eq!(kicked(), 1, "one is enough");
    channel.events.lock().kicked.clear();
    assert!(e.next().is_some() && e.next().is_none());
    arm();
    assert_eq!(kicked(), 0);
}

/// A provider that works as that of soft-RoCE does: what is shown is taken by the next, or by the end, whatever the next has
/// found.
#[repr(C)]
struct Careless {
    queue: CqEx,
    held: VecDeque<u64>,
    /// Ends with nothing to take.
    missed: u32,
}

impl Careless {
    unsafe fn of<'a>(queue: *mut CqEx) -> &'a mut Careless {
        &mut *queue.cast()
    }

    fn show(&mut self) -> Int {
        let Some(id) = self.held.front() else { return libc::ENOENT };
        (self.queue.wr_id, self.queue.status) = (*id, WC_SUCCESS);
        0
    }

    fn take(&mut self) {
        self.missed += u32::from(self.held.pop_front().is_none());
    }

    unsafe extern "C" fn start(queue: *mut CqEx, _: *mut PollAttr) -> Int {
        Self::of(queue).show()
    }

    unsafe extern "C" fn next(queue: *mut CqEx) -> Int {
        Self::of(queue).take();
        Self::of(queue).show()
    }

    unsafe extern "C" fn end(queue: *mut CqEx) {
        Self::of(queue).take();
    }

    unsafe extern "C" fn opcode(_: *mut CqEx) -> u32 {
        WC_RECV
    }

    unsafe extern "C" fn number(_: *mut CqEx) -> u32 {
        NUMBER
    }
}

#[test]
fn no_more_is_taken_from_a_provider_than_it_has() {
    let e = end(QPT_RC, null_mut());
    // SAFETY: numbers, pointers and optional functions; queues that nobody else uses, and that are not freed.
    unsafe {
        let mut queue: CqEx = zeroed();
        queue.start_poll = Some(Careless::start);
        queue.next_poll = Some(Careless::next);
        queue.end_poll = Some(Careless::end);
        queue.read_opcode = Some(Careless::opcode);
        queue.read_qp_num = Some(Careless::number);
        let held = e.receive(&[3, 4, 5, 6]).into();
        let provider = leak(Careless { queue, held, missed: 0 });
        (*e.cq).real = provider.cast();
        (*e.cq).extended = Some(zeroed());
        extend_cq(&mut (*e.cq).base);
        let shown: *mut CqEx = e.cq.cast();
        assert_eq!((*shown).start_poll.unwrap()(shown, &mut PollAttr::default()), 0);
        let mut ids = vec![(*shown).wr_id];
        while (*shown).next_poll.unwrap()(shown) == 0 {
            ids.push((*shown).wr_id);
        }
        (*shown).end_poll.unwrap()(shown);
        assert_eq!((ids, (*provider).missed), (vec![3, 4, 5, 6], 0));
        (*provider).held = e.receive(&[7, 8]).into();
        assert_eq!((e.collect(), (*provider).missed), (2, 0));
    }
}
