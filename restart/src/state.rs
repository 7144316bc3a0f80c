//! Kernel state of a process and its threads as lists of system calls. Pure.

use crate::arena::Arena;
use crate::attributes;
use crate::call::{call, nr, signed, With};
use belay_abi::restore::{Call, Step, CALL_COMPARE, CALL_MAY_FAIL};
use belay_image::model::{Credentials, Mm, PosixTimer, Process, ProcessState, SigAction, Thread};
use std::ops::Range;

const PR_SET_PDEATHSIG: u64 = 1;
const PR_SET_DUMPABLE: u64 = 4;
const PR_SET_KEEPCAPS: u64 = 8;
const PR_SET_NAME: u64 = 15;
const PR_CAPBSET_DROP: u64 = 24;
const PR_SET_SECUREBITS: u64 = 28;
const PR_SET_TIMERSLACK: u64 = 29;
const PR_SET_MM: u64 = 35;
const PR_SET_MM_MAP: u64 = 14;
const PR_SET_NO_NEW_PRIVS: u64 = 38;
const PR_SET_THP_DISABLE: u64 = 41;
/// Linux 6.18.
const PR_THP_DISABLE_EXCEPT_ADVISED: u64 = 2;
const PR_CAP_AMBIENT: u64 = 47;
const PR_CAP_AMBIENT_RAISE: u64 = 2;
const PR_SET_MDWE: u64 = 65;
const PR_SET_MEMORY_MERGE: u64 = 67;
const PR_TIMER_CREATE_RESTORE_IDS: u64 = 77;
const SIG_IGN: u64 = 1;
const SIGKILL: i32 = 9;
const SIGSTOP: i32 = 19;
const SS_DISABLE: i32 = 2;
const SS_AUTODISARM: i32 = i32::MIN;
/// That of the bits of `PR_SET_SECUREBITS` which takes no capability.
const SECBIT_KEEP_CAPS: u32 = 1 << 4;
const SECBIT_NO_CAP_AMBIENT_RAISE: u32 = 1 << 6;
const CAP_SETPCAP: u32 = 8;
const CAP_WAKE_ALARM: u32 = 35;
const CAP_VERSION_3: u64 = 0x2008_0522;
/// Timers that may be made and deleted to reach a wanted identifier on a kernel that cannot be asked for it.
const TIMER_TRIES: i32 = 20_000;

/// Address space layout: `brk`, arguments, environment, auxiliary vector and, where permitted, `/proc/PID/exe`.
pub(crate) fn layout(mm: &Mm, exe_fd: Option<i32>, arena: &mut Arena, out: &mut Vec<Call>) {
    let auxv = arena.words(&mm.auxv);
    let map = |fd: i32| {
        let tail = (mm.auxv.len() as u64 * 8) | (u64::from(fd as u32) << 32);
        [
            mm.start_code,
            mm.end_code,
            mm.start_data,
            mm.end_data,
            mm.start_brk,
            mm.brk,
            mm.start_stack,
            mm.arg_start,
            mm.arg_end,
            mm.env_start,
            mm.env_end,
            auxv,
            tail,
        ]
    };
    let mut set = |fd: i32, flags: u32| {
        let at = arena.words(&map(fd));
        let c = call(Step::Layout, 0, nr::PRCTL, &[PR_SET_MM, PR_SET_MM_MAP, at, 104, 0]);
        out.push(c.with(flags));
    };
    set(-1, 0);
    if let Some(fd) = exe_fd {
        set(fd, CALL_MAY_FAIL);
    }
    if mm.mlockall != 0 {
        // As with the locks of mappings, only how fast the program runs depends on it.
        let c = call(Step::Layout, 0, nr::MLOCKALL, &[mm.mlockall.into()]);
        out.push(c.with(CALL_MAY_FAIL));
    }
}

/// The promise to make nothing executable that is or was writable, once everything is as it was.
pub(crate) fn no_new_code(mdwe: u32, out: &mut Vec<Call>) {
    if mdwe != 0 {
        out.push(call(Step::Process, 6, nr::PRCTL, &[PR_SET_MDWE, mdwe.into(), 0, 0, 0]));
    }
}

/// Registrations for `membarrier`.
pub(crate) fn membarrier(registered: u32, out: &mut Vec<Call>) {
    for bit in (0..32).filter(|b| registered & (1 << b) != 0) {
        let c = call(Step::Membarrier, bit, nr::MEMBARRIER, &[1 << bit, 0, 0]);
        out.push(c);
    }
}

/// Signal dispositions. Each signal is ignored first, which discards what the restart itself caused (SIGCHLD of
/// temporary processes).
pub(crate) fn sigactions(actions: &[SigAction], arena: &mut Arena, out: &mut Vec<Call>) {
    let ignore = arena.words(&[SIG_IGN, 0, 0, 0]);
    for (signal, action) in (1..).zip(actions) {
        if signal == SIGKILL || signal == SIGSTOP {
            continue;
        }
        let set = |at: u64| {
            call(
                Step::Sigaction,
                signal as usize,
                nr::RT_SIGACTION,
                &[signed(signal), at, 0, 8],
            )
        };
        out.push(set(ignore));
        let at = arena.words(&[action.handler, action.flags, action.restorer, action.mask]);
        out.push(set(at));
    }
}

/// The signal by which a process that was stopped by job control stops itself again, 0 for one that was not: the same
/// signal, unless it would now be handled or ignored, or the process that it shares its dispositions with may ignore it
/// for a moment.
pub(crate) fn stop_signal(p: &Process) -> i32 {
    let ProcessState::Stopped(signal) = p.state else { return 0 };
    let index = usize::try_from(signal - 1).unwrap_or(usize::MAX);
    let stops = matches!(signal, libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU);
    if stops && !p.shares_handlers && p.sigactions.get(index).is_some_and(|a| a.handler == 0) {
        signal
    } else {
        SIGSTOP
    }
}

/// In the parent of `children`, which have just stopped again: takes notice of it where it had been told so, so that
/// the program does not hear of the same stop twice.
pub(crate) fn forget_stops(p: &Process, children: &[(i32, bool)], arena: &mut Arena, out: &mut Vec<Call>) {
    for (child, _) in children.iter().filter(|(_, told)| *told) {
        let options = (libc::WUNTRACED | libc::WNOHANG | libc::__WALL) as u64;
        out.push(call(Step::Process, 5, nr::WAIT4, &[signed(*child), 0, options, 0]).with(CALL_MAY_FAIL));
    }
    let had_one = |infos: &[Vec<u8>]| infos.iter().any(|i| i.first() == Some(&(libc::SIGCHLD as u8)));
    let Some(action) = p.sigactions.get(libc::SIGCHLD as usize - 1) else {
        return;
    };
    if had_one(&p.pending) || p.threads.iter().any(|t| had_one(&t.pending)) {
        return; // one more of the same kind is not kept anyway
    }
    for words in [
        [SIG_IGN, 0, 0, 0],
        [action.handler, action.flags, action.restorer, action.mask],
    ] {
        let at = arena.words(&words);
        let args = [signed(libc::SIGCHLD), at, 0, 8];
        out.push(call(Step::Sigaction, libc::SIGCHLD as usize, nr::RT_SIGACTION, &args));
    }
}

/// What a thread sets for itself, except credentials.
pub(crate) fn thread(index: usize, t: &Thread, arena: &mut Arena, out: &mut Vec<Call>) {
    let c = |nr: u32, args: &[u64]| call(Step::ThreadState, index, nr, args);
    let mut comm = t.comm.as_bytes().to_vec();
    comm.resize(16, 0);
    comm[15] = 0;
    let comm = arena.bytes(&comm);
    out.push(c(nr::PRCTL, &[PR_SET_NAME, comm]));
    out.push(c(nr::SET_TID_ADDRESS, &[t.tid_address]));
    if t.robust_list.0 != 0 {
        out.push(c(nr::SET_ROBUST_LIST, &[t.robust_list.0, t.robust_list.1]));
    }
    if t.rseq.0 != 0 {
        out.push(c(nr::RSEQ, &[t.rseq.0, u64::from(t.rseq.1), 0, u64::from(t.rseq.2)]));
    }
    let (sp, flags, size) = t.altstack;
    if flags & SS_DISABLE == 0 && size != 0 {
        let at = arena.words(&[sp, u64::from((flags & SS_AUTODISARM) as u32), size]);
        out.push(c(nr::SIGALTSTACK, &[at, 0]));
    }
    if t.timer_slack_ns != 0 {
        out.push(c(nr::PRCTL, &[PR_SET_TIMERSLACK, t.timer_slack_ns]));
    }
    attributes::policy(t.policy.as_ref(), index, arena, out);
    attributes::thread(index, &t.prctl, out);
    if let Some((cwd, umask)) = &t.directories {
        let cwd = arena.string(cwd.as_bytes());
        out.push(c(nr::UNSHARE, &[libc::CLONE_FS as u64]));
        out.push(c(nr::CHDIR, &[cwd]));
        out.push(c(nr::UMASK, &[u64::from(*umask)]));
    }
}

/// What a thread of `p` sets after its credentials: what these would clear, and what makes them final. Its execution
/// domain too, which is each thread's own, and makes memory executable that is mapped afterwards. `late`: who is told of
/// its parent's end is told so by [`crate::resume`].
pub(crate) fn thread_late(index: usize, (p, t, late): (&Process, &Thread, bool), c: &Credentials, out: &mut Vec<Call>) {
    let personality = t.personality.unwrap_or(p.personality);
    if personality != 0 {
        out.push(call(Step::ThreadState, index, nr::PERSONALITY, &[personality]));
    }
    if t.pdeathsig != 0 && !late {
        out.push(call(
            Step::ThreadState,
            index,
            nr::PRCTL,
            &[PR_SET_PDEATHSIG, signed(t.pdeathsig)],
        ));
    }
    if c.no_new_privs {
        out.push(call(Step::ThreadState, index, nr::PRCTL, &[PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0]));
    }
    attributes::thread_late(index, &t.prctl, out);
}

/// Whether the first thread of the parent of `p`, which makes `p`, ends before the job goes on: the kernel would tell
/// `p` so (`PR_SET_PDEATHSIG`).
pub(crate) fn loses_maker(p: &Process, all: &[Process]) -> bool {
    let exits = |q: &Process| q.threads.iter().any(|t| t.tid == q.pid && t.exited.is_some());
    p.threads.iter().any(|t| t.pdeathsig != 0) && all.iter().any(|q| q.pid == p.ppid && exits(q))
}

/// Queues pending signals with their `siginfo`: from the process itself, as the kernel demands where `si_code` says
/// that the kernel sent them.
pub(crate) fn pending(pid: i32, tid: Option<i32>, infos: &[Vec<u8>], arena: &mut Arena, out: &mut Vec<Call>) {
    for info in infos {
        let signal = info.first_chunk::<4>().map_or(0, |b| i32::from_le_bytes(*b));
        let at = arena.bytes(info);
        let (nr, args) = match tid {
            Some(tid) => (nr::RT_TGSIGQUEUEINFO, vec![signed(pid), signed(tid), signed(signal), at]),
            None => (nr::RT_SIGQUEUEINFO, vec![signed(pid), signed(signal), at]),
        };
        out.push(call(Step::Pending, signal as usize, nr, &args));
    }
}

/// Credentials of the restarting process that matter for what must be changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Own {
    pub(crate) uids: [u32; 4],
    pub(crate) gids: [u32; 4],
    pub(crate) groups: Vec<u32>,
    pub(crate) permitted: u64,
    pub(crate) bounding: u64,
    /// Processes can only have the caller's user, groups and bounding set.
    pub(crate) ordinary: bool,
}

/// Whose thread `t` of `p` is: credentials and PR_GET_SECUREBITS.
pub(crate) fn whose<'a>(p: &'a Process, t: &'a Thread) -> (&'a Credentials, u32) {
    let own = t.own.as_ref().map(|own| (&own.creds, own.securebits));
    own.unwrap_or((&p.creds, p.prctl.securebits))
}

/// Arguments of `capset`: what is permitted, effective and inheritable.
fn capset(permitted: u64, effective: u64, inheritable: u64, arena: &mut Arena) -> [u64; 2] {
    let header = arena.words(&[CAP_VERSION_3]); // version, pid 0
    let (p, e, i) = (permitted, effective, inheritable);
    let low = |v: u64| v & 0xffff_ffff;
    // effective, permitted, inheritable of the low 32 capabilities, then of the high ones
    let data = arena.words(&[low(e) | low(p) << 32, low(i) | (e >> 32) << 32, (p >> 32) | (i >> 32) << 32]);
    [header, data]
}

/// Credentials `c` of a first thread until it has made `timers`. Those of alarm clocks take a right that the program may
/// have given up since.
pub(crate) fn until_timers(timers: &[PosixTimer], c: &Credentials, own: &Own) -> Credentials {
    let alarm = |t: &PosixTimer| [libc::CLOCK_REALTIME_ALARM, libc::CLOCK_BOOTTIME_ALARM].contains(&t.clock);
    let mut c = c.clone();
    if timers.iter().any(alarm) {
        let right = own.permitted & (1 << CAP_WAKE_ALARM);
        c.cap_permitted |= right;
        c.cap_effective |= right;
    }
    c
}

/// Takes away what that thread has by [`until_timers`] only.
pub(crate) fn after_timers(timers: &[PosixTimer], c: &Credentials, own: &Own, arena: &mut Arena, out: &mut Vec<Call>) {
    if until_timers(timers, c, own) != *c {
        let all = capset(c.cap_permitted, c.cap_effective, c.cap_inheritable, arena);
        out.push(call(Step::Credentials, 10, nr::CAPSET, &all));
    }
}

/// What a thread does to get the saved credentials. Per thread, and after everything that needs privilege.
pub(crate) fn credentials(c: &Credentials, securebits: u32, own: &Own, arena: &mut Arena, out: &mut Vec<Call>) {
    let mut push = |index: usize, nr: u32, args: &[u64]| out.push(call(Step::Credentials, index, nr, args));
    let caps = [c.cap_permitted, c.cap_effective, c.cap_inheritable, c.cap_ambient];
    let same_ids = own.uids == c.uids && own.gids == c.gids && (own.ordinary || own.groups == c.groups);
    let plain = caps[0] == own.permitted && caps[1] == own.permitted && caps[2] == 0 && caps[3] == 0;
    // An ordinary user has what it takes for that in a user namespace of its own only.
    let dropped = own.bounding & !c.cap_bounding & if own.permitted >> CAP_SETPCAP & 1 == 1 { u64::MAX } else { 0 };
    if same_ids && plain && dropped == 0 && securebits == 0 {
        return;
    }
    let bits = |set: u64| (0..64).filter(move |b| set & (1 << b) != 0);
    // What is outside of the bounding set can stay inheritable, and not become it.
    let early = if c.cap_inheritable & dropped == 0 {
        0
    } else {
        c.cap_inheritable
    };
    if early != 0 {
        let all = capset(own.permitted, own.permitted, early, arena);
        push(10, nr::CAPSET, &all);
    }
    for cap in bits(dropped) {
        push(0, nr::PRCTL, &[PR_CAPBSET_DROP, cap]);
    }
    if !same_ids {
        push(1, nr::PRCTL, &[PR_SET_KEEPCAPS, 1]);
        let mut raw = Vec::new();
        c.groups.iter().for_each(|g| raw.extend_from_slice(&g.to_le_bytes()));
        let groups = arena.bytes(&raw);
        push(2, nr::SETGROUPS, &[c.groups.len() as u64, groups]);
        let three = |ids: [u32; 4]| [u64::from(ids[0]), u64::from(ids[1]), u64::from(ids[2])];
        push(3, nr::SETRESGID, &three(c.gids));
        push(4, nr::SETFSGID, &[u64::from(c.gids[3])]);
        push(5, nr::SETRESUID, &three(c.uids));
        push(6, nr::SETFSUID, &[u64::from(c.uids[3])]);
        let all = capset(own.permitted, own.permitted, early, arena);
        push(7, nr::CAPSET, &all);
    }
    // Some of these bits keep ambient capabilities from being raised; those that are there stay.
    let locked = securebits & SECBIT_NO_CAP_AMBIENT_RAISE != 0;
    if locked && c.cap_ambient != 0 {
        let all = capset(own.permitted, own.permitted, c.cap_inheritable, arena);
        push(10, nr::CAPSET, &all);
        for cap in bits(c.cap_ambient) {
            push(11, nr::PRCTL, &[PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, cap]);
        }
    }
    if securebits & !SECBIT_KEEP_CAPS != 0 {
        push(8, nr::PRCTL, &[PR_SET_SECUREBITS, u64::from(securebits)]);
    } else if !same_ids || securebits != 0 {
        push(9, nr::PRCTL, &[PR_SET_KEEPCAPS, u64::from(securebits != 0)]);
    }
    let last = capset(c.cap_permitted, c.cap_effective, c.cap_inheritable, arena);
    push(10, nr::CAPSET, &last);
    for cap in bits(if locked { 0 } else { c.cap_ambient }) {
        push(11, nr::PRCTL, &[PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, cap]);
    }
}

/// Interval timers, relative to now.
pub(crate) fn itimers(p: &Process, arena: &mut Arena, out: &mut Vec<Call>) {
    for (which, t) in p.itimers.iter().enumerate() {
        // ITIMER_REAL with a period but no time left has just expired; the kernel starts the next period when the
        // pending SIGALRM is taken. It cannot be put into that state, so it expires once more at once: SIGALRM is
        // pending only once.
        let expired = which == 0 && t.value_us == 0 && t.interval_us != 0;
        let value_us = if expired { 1 } else { t.value_us };
        if value_us == 0 {
            continue;
        }
        let split = |us: u64| [us / 1_000_000, us % 1_000_000];
        let ([a, b], [c, d]) = (split(t.interval_us), split(value_us));
        let at = arena.words(&[a, b, c, d]);
        out.push(call(Step::Itimer, which, nr::SETITIMER, &[which as u64, at, 0]));
    }
}

/// POSIX timers with their identifiers. `restore_ids`: the kernel can be asked for an identifier; `chosen`: the program
/// does so itself.
pub(crate) fn posix_timers(
    timers: &[PosixTimer],
    restore_ids: bool,
    chosen: bool,
    arena: &mut Arena,
    out: &mut Vec<Call>,
) -> Result<(), String> {
    if timers.is_empty() && !(chosen && restore_ids) {
        return Ok(());
    }
    let mut timers: Vec<&PosixTimer> = timers.iter().collect();
    timers.sort_by_key(|t| t.id);
    if restore_ids {
        let on = [PR_TIMER_CREATE_RESTORE_IDS, 1, 0, 0, 0];
        out.push(call(Step::Timer, 0, nr::PRCTL, &on));
    } else if let Some(t) = timers.iter().find(|t| t.id >= TIMER_TRIES) {
        return Err(format!(
            "POSIX timer {}: this kernel cannot make a timer with that identifier",
            t.id
        ));
    }
    let mut next = 0;
    for (i, t) in timers.iter().enumerate() {
        let event = arena.zeroed(64);
        arena.set(event, &t.value);
        arena.set(event + 8, &(u64::from(t.signo as u32) | u64::from(t.notify as u32) << 32));
        arena.set(event + 16, &u64::from(t.tid as u32));
        let id = arena.words(&[u64::from(t.id as u32)]);
        let create = call(Step::Timer, i, nr::TIMER_CREATE, &[signed(clock(t)), event, id]);
        while !restore_ids && next < t.id {
            out.push(create);
            out.push(call(Step::Timer, i, nr::TIMER_DELETE, &[signed(next)]));
            next += 1;
        }
        next += 1;
        out.push(create);
        let check = call(Step::Timer, i, 0, &[id, u64::from(t.id as u32)]);
        out.push(check.with(CALL_COMPARE));
        if t.value_ns != 0 {
            let split = |ns: u64| [ns / 1_000_000_000, ns % 1_000_000_000];
            let ([a, b], [c, d]) = (split(t.interval_ns), split(t.value_ns));
            let at = arena.words(&[a, b, c, d]);
            out.push(call(Step::Timer, i, nr::TIMER_SETTIME, &[signed(t.id), 0, at, 0]));
        }
    }
    if restore_ids {
        let after = [PR_TIMER_CREATE_RESTORE_IDS, chosen.into(), 0, 0, 0];
        out.push(call(Step::Timer, 0, nr::PRCTL, &after));
    }
    Ok(())
}

/// No huge pages in the whole address space, before there are any pages.
pub(crate) fn huge_pages(p: &Process, out: &mut Vec<Call>) {
    if p.prctl.thp_disable {
        let flags = if p.prctl.thp_advised {
            PR_THP_DISABLE_EXCEPT_ADVISED
        } else {
            0
        };
        out.push(call(Step::Process, 0, nr::PRCTL, &[PR_SET_THP_DISABLE, 1, flags, 0, 0]));
    }
}

/// Settings of the whole address space, once its pages are there.
pub(crate) fn process_early(p: &Process, arena: &mut Arena, out: &mut Vec<Call>) {
    if p.prctl.merge {
        // What it has advised for each mapping is done again anyway.
        out.push(call(Step::Process, 7, nr::PRCTL, &[PR_SET_MEMORY_MERGE, 1, 0, 0, 0]).with(CALL_MAY_FAIL));
    }
    if p.root != "/" && !p.root.is_empty() {
        let root = arena.string(p.root.as_bytes());
        out.push(call(Step::Process, 1, nr::CHROOT, &[root]));
    }
}

/// Settings of the process that must come last: dumpable flag; every descriptor in `room` is closed.
pub(crate) fn process_late(p: &Process, room: &Range<i32>, out: &mut Vec<Call>) {
    if matches!(p.prctl.dumpable, 0 | 1) {
        out.push(call(
            Step::Process,
            4,
            nr::PRCTL,
            &[PR_SET_DUMPABLE, signed(p.prctl.dumpable)],
        ));
    }
    let args = [signed(room.start), signed(room.end - 1), 0];
    out.push(call(Step::Close, 0, nr::CLOSE_RANGE, &args));
}

/// The clock of a timer. The kernel tells of the processor time of a thread, but not of which: who is signalled alone is
/// taken to measure itself. The first thread makes all timers, and would be measured.
fn clock(t: &PosixTimer) -> i32 {
    const OF_MAKER: i32 = -2;
    const OF_THREAD: i32 = 6;
    match (t.clock, t.notify) {
        (OF_MAKER, libc::SIGEV_THREAD_ID) => !t.tid << 3 | OF_THREAD,
        (clock, _) => clock,
    }
}

/// POSIX locks, once more: closing any descriptor of a file has released them.
pub(crate) fn locks(locks: &[(i32, libc::flock, bool)], arena: &mut Arena, out: &mut Vec<Call>) {
    for (i, (fd, lock, may_fail)) in locks.iter().enumerate() {
        let kind = u64::from(lock.l_type.cast_unsigned()) | u64::from(lock.l_whence.cast_unsigned()) << 16;
        let at = arena.words(&[kind, lock.l_start.cast_unsigned(), lock.l_len.cast_unsigned(), 0]);
        let set = call(Step::Lock, i, nr::FCNTL, &[signed(*fd), libc::F_SETLK as u64, at]);
        out.push(set.with(if *may_fail { CALL_MAY_FAIL } else { 0 }));
    }
}

#[cfg(test)]
mod tests;
