//! What a process that has registered with `mq_notify` will be told, and the messages of that queue.
//!
//! The kernel shows how a process will be notified and by which signal, but not the value that the signal carries, nor
//! what `SIGEV_THREAD` sends to its netlink socket. Both come to light only when the registration ends: by a message
//! that arrives in the empty queue, or by taking it back. So it ends here, where no other thread of the process runs
//! (see `turn`) and all signals are blocked, what it brings is taken before anybody sees it, and the process registers
//! again. Nothing is begun that cannot be finished without the agent.

use crate::libc_nr as nr;
use crate::turn;
use belay_abi::inject::{
    MessageHead, NotificationTable, MAX_NOTIFIED, RENEW_DONE, RENEW_LOST, RENEW_NOT_NOW, RENEW_NO_ACCESS, RENEW_NO_ROOM,
    RENEW_TAKEN,
};
use belay_abi::syscall;
use core::ptr::{addr_of, addr_of_mut, null, null_mut};

const SIG_SETMASK: usize = 2;
const SIGEV_SIGNAL: i32 = 0;
const SIGEV_NONE: i32 = 1;
const SIGEV_THREAD: i32 = 2;
const SI_USER: i32 = 0;
const SI_QUEUE: i32 = -1;
const SI_MESGQ: i32 = -3;
const F_GETFL: usize = 3;
const O_ACCMODE: isize = 3;
const O_RDWR: isize = 2;
const MSG_PEEK: usize = 2;
const MSG_DONTWAIT: usize = 0x40;
/// O_RDWR | O_NONBLOCK | O_CLOEXEC
const OPEN_FLAGS: usize = 2 | 0o4000 | 0o2000000;
/// The last byte of a cookie that says that the registration was taken back.
const NOTIFY_REMOVED: u8 = 2;
const HIGHEST_PRIORITY: usize = 32767;
/// Signals of the same number that others may send in the same moment.
const OTHERS: usize = 8;
const PATH: &[u8] = b"/proc/self/fd/";
/// What stands before the process that is to be notified, in the text that a queue can be read as; 0 where nobody is.
const OWNER: &[u8] = b"NOTIFY_PID:";

/// A moment that has passed: calls with it never wait.
static PAST: [u64; 2] = [0, 0];

/// `siginfo_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Info {
    signo: i32,
    errno: i32,
    code: i32,
    pad: i32,
    sender: u64,
    value: u64,
    rest: [u64; 12],
}

const BLANK: Info = Info {
    signo: 0,
    errno: 0,
    code: 0,
    pad: 0,
    sender: 0,
    value: 0,
    rest: [0; 12],
};

/// `struct sigevent`.
#[repr(C)]
struct Event {
    value: u64,
    signo: i32,
    notify: i32,
    rest: [u64; 6],
}

/// Looks into the registration and renews it.
///
/// # Safety
/// `t` points to a table in the injected area, whose room is mapped.
pub(crate) unsafe fn run(t: *mut NotificationTable) {
    unsafe {
        // Whatever comes from outside meanwhile comes later.
        let all = u64::MAX;
        let mut before = 0u64;
        syscall!(nr::RT_SIGPROCMASK, SIG_SETMASK, &raw const all, &raw mut before, 8usize);
        let turn = addr_of_mut!((*t).turn);
        (*t).outcome = if !turn::mine(turn) || must_wait(t) {
            RENEW_NOT_NOW
        } else if !has_room(t) {
            RENEW_NO_ROOM
        } else {
            renew(t)
        };
        turn::over(turn);
        syscall!(nr::RT_SIGPROCMASK, SIG_SETMASK, &raw const before, null_mut::<u64>(), 8usize);
    }
}

/// Whether what the end of the registration brings could not be told from what is there already.
///
/// # Safety
/// `t` points to a table in the injected area.
unsafe fn must_wait(t: *const NotificationTable) -> bool {
    unsafe {
        match (*t).how {
            SIGEV_SIGNAL => {
                let mut pending = 0u64;
                syscall!(nr::RT_SIGPENDING, &raw mut pending, 8usize);
                pending & mask((*t).signo) != 0
            }
            SIGEV_THREAD => sockets(t).any(|s| {
                let mut byte = 0u8;
                let flags = MSG_PEEK | MSG_DONTWAIT;
                syscall!(nr::RECVFROM, s, &raw mut byte, 1usize, flags) >= 0
            }),
            _ => false,
        }
    }
}

/// The sockets of the process that could be the one of the registration.
///
/// # Safety
/// `t` points to a table in the injected area, which stays as long as the iterator is used.
unsafe fn sockets(t: *const NotificationTable) -> impl Iterator<Item = i32> {
    unsafe {
        let count = ((*t).socket_count as usize).min(MAX_NOTIFIED);
        let first = addr_of!((*t).sockets).cast::<i32>();
        (0..count).map(move |i| *first.add(i))
    }
}

/// The set of one signal, empty for 0.
fn mask(signo: i32) -> u64 {
    if (1..=64).contains(&signo) {
        1 << (signo - 1)
    } else {
        0
    }
}

/// Takes what the end of the registration brings, and registers again; a `RENEW_` constant.
///
/// # Safety
/// `t` points to a table in the injected area, whose room is mapped; all signals are blocked, and no other thread runs.
unsafe fn renew(t: *mut NotificationTable) -> i32 {
    unsafe {
        let flags = syscall!(nr::FCNTL, (*t).queue, F_GETFL);
        let opened = if flags >= 0 && flags & O_ACCMODE == O_RDWR {
            -1
        } else {
            open((*t).queue)
        };
        // Its mode can forbid what a descriptor allows that was opened before.
        let queue = if opened >= 0 { opened as i32 } else { (*t).queue };
        let error = if opened >= 0 { 0 } else { try_both(queue, t) };
        if error < 0 {
            (*t).error = -error as i32;
            return RENEW_NO_ACCESS;
        }
        if (*t).how != SIGEV_SIGNAL {
            syscall!(nr::MQ_NOTIFY, (*t).queue, null::<Event>());
        }
        empty(queue, t);
        fill(queue, t);
        if (*t).how == SIGEV_SIGNAL && (*t).received == 0 && mask((*t).signo) != 0 {
            // It is received first, whatever others send at this moment.
            syscall!(nr::MQ_TIMEDSEND, queue, (*t).room, 0usize, HIGHEST_PRIORITY, &raw const PAST);
            syscall!(
                nr::MQ_TIMEDRECEIVE,
                queue,
                (*t).room,
                (*t).message_bytes,
                null_mut::<u32>(),
                &raw const PAST
            );
        }
        let untold = (*t).how == SIGEV_SIGNAL && mask((*t).signo) != 0 && is_registered(queue);
        // Closing any descriptor of the queue would end a registration of this process.
        close(opened);
        match (*t).how {
            SIGEV_SIGNAL if untold => {
                if opened >= 0 {
                    register(t);
                    (*t).error = 1;
                }
                return RENEW_TAKEN;
            }
            SIGEV_SIGNAL if mask((*t).signo) != 0 => match take(t, |info| info.code == SI_MESGQ) {
                Some(info) => (*t).value = info.value,
                // The registration is older than an exec.
                None => (*t).how = SIGEV_NONE,
            },
            SIGEV_THREAD if !take_cookie(t) => return RENEW_LOST,
            _ => {}
        }
        register(t)
    }
}

/// Opens descriptor `queue` anew, for receiving and sending; its number or a negative error.
fn open(queue: i32) -> isize {
    let mut path = [0u8; 32];
    let digits = core::iter::successors(Some(queue as u32), |n| (*n >= 10).then_some(n / 10)).count();
    for (to, from) in path.iter_mut().zip(PATH) {
        *to = *from;
    }
    let mut rest = queue as u32;
    for to in path.iter_mut().skip(PATH.len()).take(digits).rev() {
        *to = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    unsafe { syscall!(nr::OPEN, path.as_ptr(), OPEN_FLAGS, 0usize) }
}

/// Closes what [`open`] returned.
///
/// # Safety
/// `opened` is an error, or a descriptor of this program's that nobody uses any more: closing one of the
/// application's would end what it has there.
unsafe fn close(opened: isize) {
    if opened >= 0 {
        unsafe { syscall!(nr::CLOSE, opened) };
    }
}

/// Whether messages can be received and sent through `queue`: with a length that is refused for any message. Returns an error.
///
/// # Safety
/// `t` points to a table in the injected area, whose room is mapped.
unsafe fn try_both(queue: i32, t: *const NotificationTable) -> isize {
    const EMSGSIZE: isize = -90;
    unsafe {
        let received = syscall!(
            nr::MQ_TIMEDRECEIVE,
            queue,
            (*t).room,
            0usize,
            null_mut::<u32>(),
            &raw const PAST
        );
        let sent = syscall!(nr::MQ_TIMEDSEND, queue, (*t).room, u32::MAX, 0usize, &raw const PAST);
        match (received, sent) {
            (EMSGSIZE, EMSGSIZE) => 0,
            (EMSGSIZE, other) | (other, _) => other,
        }
    }
}

/// Where message `i` lies in the room.
///
/// # Safety
/// `t` points to a table in the injected area, whose room is mapped and has a place for message `i`.
unsafe fn message(t: *const NotificationTable, i: u32) -> *mut MessageHead {
    unsafe { ((*t).room + (*t).stride * u64::from(i)) as *mut MessageHead }
}

/// Receives all messages into the room.
///
/// # Safety
/// `t` points to a table in the injected area, whose room is mapped and has places for `capacity` messages.
unsafe fn empty(queue: i32, t: *mut NotificationTable) {
    unsafe {
        while (*t).received < (*t).capacity {
            let head = message(t, (*t).received);
            let mut priority = 0u32;
            let text = head.add(1);
            let n = syscall!(
                nr::MQ_TIMEDRECEIVE,
                queue,
                text,
                (*t).message_bytes,
                &raw mut priority,
                &raw const PAST
            );
            if n < 0 {
                return;
            }
            (*head).bytes = n as u64;
            (*head).priority = priority;
            (*t).received += 1;
        }
    }
}

/// Sends all messages in the room again.
///
/// # Safety
/// `t` points to a table in the injected area, in whose room [`empty`] has put the messages of `queue`.
unsafe fn fill(queue: i32, t: *mut NotificationTable) {
    unsafe {
        while (*t).sent < (*t).received {
            let head = message(t, (*t).sent);
            let text = head.add(1);
            let sent = syscall!(
                nr::MQ_TIMEDSEND,
                queue,
                text,
                (*head).bytes,
                (*head).priority,
                &raw const PAST
            );
            if sent < 0 {
                return;
            }
            (*t).sent += 1;
        }
    }
}

/// Whether the kernel has room for a signal with a value: a probe is queued and taken back.
///
/// # Safety
/// `t` points to a table in the injected area; all signals are blocked.
unsafe fn has_room(t: *const NotificationTable) -> bool {
    unsafe {
        if (*t).how != SIGEV_SIGNAL || mask((*t).signo) == 0 {
            return true;
        }
        let probe = Info {
            signo: (*t).signo,
            code: SI_QUEUE,
            value: t as u64,
            ..BLANK
        };
        if syscall!(nr::RT_SIGQUEUEINFO, (*t).mark.pid, (*t).signo, &raw const probe) < 0 {
            return false;
        }
        // Without room, a signal of standard kind comes without what it should tell.
        let bare = |info: &Info| info.code == SI_USER && info.sender == 0;
        let got = take(t, |info| bare(info) || (info.code == SI_QUEUE && info.value == probe.value));
        got.is_some_and(|info| !bare(&info))
    }
}

/// Takes the first pending signal of the registration's number that is `ours`; what others have sent is queued again.
///
/// # Safety
/// `t` points to a table in the injected area; all signals are blocked.
unsafe fn take(t: *const NotificationTable, ours: impl Fn(&Info) -> bool) -> Option<Info> {
    unsafe {
        let set = mask((*t).signo);
        let mut others = [BLANK; OTHERS];
        let mut count = 0;
        let mut found = None;
        for slot in &mut others {
            let got = syscall!(
                nr::RT_SIGTIMEDWAIT,
                &raw const set,
                slot as *mut Info,
                &raw const PAST,
                8usize
            );
            if got < 0 {
                break;
            }
            if ours(slot) {
                found = Some(*slot);
                break;
            }
            count += 1;
        }
        for other in others.iter().take(count) {
            syscall!(nr::RT_SIGQUEUEINFO, (*t).mark.pid, other.signo, other as *const Info);
        }
        found
    }
}

/// Whether anybody is registered for notification about `queue`.
fn is_registered(queue: i32) -> bool {
    let mut text = [0u8; 128];
    let n = unsafe { syscall!(nr::PREAD64, queue, text.as_mut_ptr(), text.len(), 0usize) };
    let text = text.get(..usize::try_from(n).unwrap_or(0)).unwrap_or_default();
    let at = text.windows(OWNER.len()).position(|w| w == OWNER);
    let owner = at.and_then(|at| text.get(at + OWNER.len()));
    owner.is_some_and(|digit| *digit != b'0')
}

/// Takes what the socket was sent.
///
/// # Safety
/// `t` points to a table in the injected area.
unsafe fn take_cookie(t: *mut NotificationTable) -> bool {
    unsafe {
        for s in sockets(t) {
            let cookie = addr_of_mut!((*t).cookie).cast::<u8>();
            let n = syscall!(nr::RECVFROM, s, cookie, 32usize, MSG_DONTWAIT);
            if n == 32 && *cookie.add(31) == NOTIFY_REMOVED {
                (*t).socket = s;
                return true;
            }
        }
        false
    }
}

/// Registers as the table says; a `RENEW_` constant.
///
/// # Safety
/// `t` points to a table in the injected area.
unsafe fn register(t: *mut NotificationTable) -> i32 {
    unsafe {
        let mut event = Event {
            value: (*t).value,
            signo: (*t).signo,
            notify: (*t).how,
            rest: [0; 6],
        };
        if (*t).how == SIGEV_THREAD {
            event.value = addr_of!((*t).cookie) as u64;
            event.signo = (*t).socket;
        }
        let done = syscall!(nr::MQ_NOTIFY, (*t).queue, &raw const event);
        (*t).error = -done as i32;
        if done < 0 {
            RENEW_LOST
        } else {
            RENEW_DONE
        }
    }
}
