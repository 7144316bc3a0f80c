//! Every model as it is, and some of a processor or kernel that is broken, so that what should be found is seen to be.

use belay_verbs_models::{
    child_of_a_fork, gate_is_shut_and_opened, holder_ends, lock_changes_hands, lock_is_taken, owners_and_gate, places_are_given_on,
    posted_and_polled, Broken, End, How,
};

/// The kernel makes the barrier for all.
const KERNEL: How = How {
    kernel_barrier: true,
    broken: Broken::Nothing,
    interruptions: 2,
};
/// Each thread makes its own.
const OWN: How = How {
    kernel_barrier: false,
    ..KERNEL
};
/// With three threads that work.
const THREE: How = How {
    interruptions: 1,
    ..KERNEL
};
const BROKEN: How = How {
    broken: Broken::Barrier,
    ..KERNEL
};

#[test]
fn nobody_is_inside_a_gate_that_is_shut() {
    gate_is_shut_and_opened(KERNEL, 1, End::LetGo);
}

#[test]
fn nor_where_threads_make_the_barrier() {
    gate_is_shut_and_opened(OWN, 1, End::LetGo);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn somebody_is_inside_where_no_barrier_is_made() {
    gate_is_shut_and_opened(BROKEN, 1, End::LetGo);
}

#[test]
fn nobody_is_left_at_the_gate() {
    gate_is_shut_and_opened(THREE, 2, End::LetGo);
}

#[test]
fn nobody_is_left_at_the_gate_of_an_agent_that_has_died() {
    gate_is_shut_and_opened(THREE, 2, End::Dies);
}

#[test]
fn threads_that_end_give_their_places_on() {
    places_are_given_on(KERNEL);
}

#[test]
fn the_child_of_a_fork_has_a_gate_of_its_own() {
    child_of_a_fork(KERNEL);
}

#[test]
fn a_lock_is_one_threads() {
    lock_is_taken(KERNEL);
}

#[test]
fn a_lock_with_an_owner_is_one_threads() {
    lock_changes_hands(KERNEL, &[2, 2]);
    lock_changes_hands(OWN, &[2, 2]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_lock_with_an_owner_is_two_threads_where_no_barrier_is_made() {
    lock_changes_hands(BROKEN, &[2, 2]);
}

#[test]
fn an_owner_is_not_in_while_the_gate_is_shut() {
    let often = How {
        interruptions: 3,
        ..KERNEL
    };
    owners_and_gate(often, &[2]);
    owners_and_gate(THREE, &[1, 1]);
    owners_and_gate(OWN, &[2]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn an_owner_is_in_while_the_gate_is_shut_where_no_barrier_is_made() {
    owners_and_gate(BROKEN, &[2]);
}

#[test]
fn a_thread_that_ends_leaves_its_lock_and_the_gate() {
    holder_ends(THREE, false);
    holder_ends(KERNEL, true);
    holder_ends(OWN, false);
    holder_ends(OWN, true);
}

#[test]
fn entries_are_complete_and_kept_until_they_are_read() {
    posted_and_polled(KERNEL, 1, 3, false);
    posted_and_polled(KERNEL, 2, 4, false);
}

#[test]
fn a_marker_takes_no_place() {
    posted_and_polled(KERNEL, 1, 2, true);
}
