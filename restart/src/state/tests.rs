//! Order and arguments of the lists that give a process its kernel state.

use super::*;

fn arena() -> Arena {
    Arena::new(0x1000_0000)
}

fn numbers(calls: &[Call]) -> Vec<u32> {
    calls.iter().map(|c| c.nr).collect()
}

/// The words at `at`, once the arena is laid out.
fn words(arena: Arena, at: u64, count: usize) -> Vec<u64> {
    let bytes = arena.finish();
    let from = (at - 0x1000_0000) as usize;
    let word = |b: &[u8]| b.try_into().map(u64::from_le_bytes).unwrap();
    bytes[from..from + count * 8].chunks_exact(8).map(word).collect()
}

fn timer(id: i32) -> PosixTimer {
    PosixTimer {
        id,
        clock: 1,
        notify: 4,
        signo: 34,
        value: 0xdead,
        tid: 77,
        interval_ns: 1_500_000_000,
        value_ns: 2_000_000_003,
        overrun: 0,
    }
}

fn own(permitted: u64) -> Own {
    Own {
        uids: [0; 4],
        gids: [0; 4],
        groups: vec![0],
        permitted,
        bounding: 0xff,
        ordinary: false,
    }
}

#[test]
fn credentials_that_are_right_already_take_no_call() {
    let c = Credentials {
        groups: vec![0],
        cap_permitted: 0xff,
        cap_effective: 0xff,
        cap_bounding: 0xff,
        ..Credentials::default()
    };
    let mut out = Vec::new();
    credentials(&c, 0, &own(0xff), &mut arena(), &mut out);
    assert!(out.is_empty());
}

#[test]
fn an_ordinary_user_ends_without_capabilities() {
    let own = Own {
        uids: [1000; 4],
        gids: [1000; 4],
        groups: vec![65534],
        ordinary: true,
        ..own(0x1ff_ffff_ffff)
    };
    let c = Credentials {
        uids: [1000; 4],
        gids: [1000; 4],
        groups: vec![27, 1000],
        cap_bounding: 0xfe,
        ..Credentials::default()
    };
    let (mut a, mut out) = (arena(), Vec::new());
    credentials(&c, 0, &own, &mut a, &mut out);
    assert_eq!(
        numbers(&out),
        vec![nr::PRCTL, nr::CAPSET],
        "groups cannot and need not be changed"
    );
    assert_eq!((out[0].args[0], out[0].args[1]), (PR_CAPBSET_DROP, 0));
    assert_eq!(words(a, out[1].args[1], 3), vec![0; 3]);
    // Without namespaces there is no capability for that.
    out.clear();
    credentials(&c, 0, &Own { permitted: 0, ..own }, &mut arena(), &mut out);
    assert!(out.is_empty());
}

#[test]
fn capabilities_are_kept_over_a_change_of_user_as_the_thread_has_it() {
    let c = Credentials {
        groups: vec![0],
        cap_permitted: 0xff,
        cap_effective: 0xff,
        cap_bounding: 0xff,
        ..Credentials::default()
    };
    let settings = |bits: u32| {
        let mut out = Vec::new();
        credentials(&c, bits, &own(0xff), &mut arena(), &mut out);
        let prctl = out.iter().filter(|c| c.nr == nr::PRCTL);
        prctl.map(|c| (c.args[0], c.args[1])).collect::<Vec<_>>()
    };
    assert_eq!(settings(0x10), vec![(PR_SET_KEEPCAPS, 1)], "takes no capability");
    assert_eq!(settings(0x30), vec![(PR_SET_SECUREBITS, 0x30)], "which is final");
}

#[test]
fn another_user_gets_groups_before_users_and_capabilities_last() {
    let c = Credentials {
        uids: [5, 6, 7, 6],
        gids: [8; 4],
        groups: vec![9, 10, 11],
        cap_permitted: 1 << 40 | 1,
        cap_effective: 1,
        cap_bounding: 0xfe,
        ..Credentials::default()
    };
    let (mut a, mut out) = (arena(), Vec::new());
    credentials(&c, 0, &own(0x1ff), &mut a, &mut out);
    let order = numbers(&out);
    let at = |nr: u32| order.iter().position(|n| *n == nr).unwrap();
    assert_eq!((out[0].args[0], out[0].args[1]), (PR_CAPBSET_DROP, 0));
    assert!(at(nr::SETGROUPS) < at(nr::SETRESGID) && at(nr::SETRESGID) < at(nr::SETRESUID));
    assert_eq!(order.last(), Some(&nr::CAPSET));
    let last = out.last().unwrap().args[1];
    // effective, permitted; inheritable, effective of the high half; permitted, inheritable of the high half
    assert_eq!(words(a, last, 3), vec![1 | 1 << 32, 0, 1 << 8]);
}

#[test]
fn timers_get_their_identifiers_with_and_without_help() {
    let (mut a, mut out) = (arena(), Vec::new());
    posix_timers(&[timer(3), timer(1)], true, false, &mut a, &mut out).unwrap();
    let made: Vec<&Call> = out.iter().filter(|c| c.nr == nr::TIMER_CREATE).collect();
    assert_eq!(made.len(), 2);
    let (event, id) = (made[0].args[1], made[0].args[2]);
    let set: Vec<&Call> = out.iter().filter(|c| c.nr == nr::TIMER_SETTIME).collect();
    assert_eq!((set[0].args[0], set[1].args[0]), (1, 3));
    let value = set[0].args[2];
    assert_eq!((out[0].nr, out[0].args[1]), (nr::PRCTL, 1));
    assert_eq!((out.last().unwrap().nr, out.last().unwrap().args[1]), (nr::PRCTL, 0));
    let bytes = a.finish();
    let word = |at: u64| u64::from_le_bytes(bytes[(at - 0x1000_0000) as usize..][..8].try_into().unwrap());
    assert_eq!((word(event), word(event + 8), word(event + 16)), (0xdead, 34 | 4 << 32, 77));
    assert_eq!(word(id), 1, "the wanted identifier");
    assert_eq!(
        [word(value), word(value + 8), word(value + 16), word(value + 24)],
        [1, 500_000_000, 2, 3]
    );

    let (mut a, mut out) = (arena(), Vec::new());
    posix_timers(&[timer(2)], false, false, &mut a, &mut out).unwrap();
    // 0 and 1 are made and deleted on the way.
    let order = numbers(&out);
    assert_eq!(
        order[..5],
        [
            nr::TIMER_CREATE,
            nr::TIMER_DELETE,
            nr::TIMER_CREATE,
            nr::TIMER_DELETE,
            nr::TIMER_CREATE
        ]
    );
    assert_eq!(out[5].flags, CALL_COMPARE);
    assert!(posix_timers(&[timer(TIMER_TRIES)], false, false, &mut arena(), &mut Vec::new()).is_err());
}

#[test]
fn a_right_that_has_been_given_up_is_there_until_the_alarm_clocks_are() {
    let alarm = PosixTimer {
        clock: libc::CLOCK_BOOTTIME_ALARM,
        ..timer(0)
    };
    let right = 1 << CAP_WAKE_ALARM;
    let c = Credentials {
        groups: vec![0],
        cap_permitted: 1,
        cap_effective: 1,
        cap_bounding: 0xff,
        ..Credentials::default()
    };
    let all = own(0xff | right);
    let last_set = |make: &dyn Fn(&mut Arena, &mut Vec<Call>)| {
        let (mut a, mut out) = (arena(), Vec::new());
        make(&mut a, &mut out);
        assert_eq!(out.last().unwrap().nr, nr::CAPSET);
        words(a, out.last().unwrap().args[1], 3)
    };
    let timers = [timer(1), alarm];
    let until = until_timers(&timers, &c, &all);
    let (high, low) = (right >> 32, 1 | 1 << 32);
    let early = last_set(&|a, out| credentials(&until, 0, &all, a, out));
    assert_eq!(early, [low, high << 32, high]);
    let late = last_set(&|a, out| after_timers(&timers, &c, &all, a, out));
    assert_eq!(late, [low, 0, 0]);
    // Who has it, or needs none, is left as it is; nobody is given what the restart has not.
    let has = Credentials {
        cap_permitted: right,
        cap_effective: right,
        ..c.clone()
    };
    for (timers, c, own) in [
        (&timers[1..], &has, &all),
        (&timers[..1], &c, &all),
        (&timers, &c, &own(0xff)),
    ] {
        assert_eq!(until_timers(timers, c, own), *c);
        let mut out = Vec::new();
        after_timers(timers, c, own, &mut arena(), &mut out);
        assert!(out.is_empty());
    }
}

#[test]
fn dispositions_come_after_everything_was_ignored_once() {
    let actions: Vec<SigAction> = (0..64)
        .map(|i| SigAction {
            handler: 0x4000 + i,
            ..SigAction::default()
        })
        .collect();
    let (mut a, mut out) = (arena(), Vec::new());
    sigactions(&actions, &mut a, &mut out);
    assert_eq!(out.len(), 2 * 62, "all but SIGKILL and SIGSTOP");
    assert!(out.iter().all(|c| c.args[0] != 9 && c.args[0] != 19));
    assert_eq!((out[0].args[0], out[1].args[0]), (1, 1));
    let (first, second) = (out[0].args[1], out[1].args[1]);
    let bytes = a.finish();
    let word = |at: u64| u64::from_le_bytes(bytes[(at - 0x1000_0000) as usize..][..8].try_into().unwrap());
    assert_eq!((word(first), word(second)), (SIG_IGN, 0x4000));
}

#[test]
fn pending_signals_are_queued_by_the_process_itself() {
    let mut info = vec![0u8; 128];
    info[0] = 34;
    let (mut a, mut out) = (arena(), Vec::new());
    pending(10, None, std::slice::from_ref(&info), &mut a, &mut out);
    pending(10, Some(12), std::slice::from_ref(&info), &mut a, &mut out);
    assert_eq!(numbers(&out), vec![nr::RT_SIGQUEUEINFO, nr::RT_TGSIGQUEUEINFO]);
    assert_eq!(out[0].args[..2], [10, 34]);
    assert_eq!(out[1].args[..3], [10, 12, 34]);
}
