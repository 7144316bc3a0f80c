//! Life of a version in one tier. All transitions are in [`step`].
//!
//! ```text
//!            Reserve(Down)          Arrived           Flushed
//!   Absent ───────────────▶ Writing ───────▶ Written ────────▶ Flushed ──Evict──▶ Absent
//!     │                                        │  ▲ Unplan       │  ▲ Unplan
//!     │ Reserve(Up)        Arrived             ▼  │              ▼  │
//!     └──────────▶ Reading ───────────────▶  Ready { spare } ────────
//!                                              │ Get                  Promoted (from any that is whole)
//!                                              ▼                         │
//!                                           Consumed { spare } ◀─────────┘ ──Evict, if spare──▶ Absent
//! ```
//! An instance is *spare* when another tier has the version whole too. Only a spare one may be evicted, and when the
//! other one goes the last is told so (`Alone`): from then on it has to be flushed before it may go. `Flushed` is
//! `Written` with a spare.

use std::fmt;

/// What a tier has of a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// Nothing.
    Absent,
    /// Room is reserved, and bytes arrive from above.
    Writing,
    /// Whole, and no other tier has it.
    Written,
    /// Whole, and whole in another tier; no read is planned.
    Flushed,
    /// Room is reserved, and bytes arrive from below.
    Reading,
    /// Whole, and stays for a planned read.
    Ready {
        /// Another tier has it too.
        spare: bool,
    },
    /// Whole, and not needed here any more: read by the application, or copied to a faster tier.
    Consumed {
        /// Another tier has it too, or nobody needs it.
        spare: bool,
    },
}

impl State {
    /// All bytes are here.
    pub fn is_whole(self) -> bool {
        !matches!(self, State::Absent | State::Writing | State::Reading)
    }

    /// It may be evicted.
    pub fn may_go(self) -> bool {
        matches!(self, State::Flushed | State::Consumed { spare: true })
    }

    /// It is the only whole instance, and has to be copied down before it may go.
    pub fn is_alone(self) -> bool {
        matches!(
            self,
            State::Written | State::Ready { spare: false } | State::Consumed { spare: false }
        )
    }

    /// It takes room.
    pub fn takes_room(self) -> bool {
        self != State::Absent
    }
}

/// Where the bytes come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Way {
    /// The application, or a faster tier.
    Down,
    /// A slower tier.
    Up,
}

/// What becomes of a version that has been read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum After {
    /// It is not needed any more.
    Discard,
    /// It may be read again.
    Keep,
}

/// What happens to an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// Room has been reserved for it.
    Reserve(Way),
    /// The copy to this tier has ended.
    Arrived,
    /// The copy to a lower tier has ended.
    Flushed,
    /// The copy to a faster tier has ended, and that one is used from now on.
    Promoted,
    /// The other whole instance has gone.
    Alone,
    /// Its turn in the prefetch window has come.
    Plan,
    /// Its read is not expected soon any more.
    Unplan,
    /// The application has read it from here.
    Get(After),
    /// Its room is needed.
    Evict,
    /// The version is dropped.
    Drop,
    /// The copy to this tier has failed.
    Fail,
}

/// An event that the state does not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an instance that is {state} cannot take {event:?}")]
pub struct Illegal {
    /// The state,
    pub state: State,
    /// and the event.
    pub event: Event,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            State::Absent => f.write_str("absent"),
            State::Writing => f.write_str("being written"),
            State::Written => f.write_str("written"),
            State::Flushed => f.write_str("flushed"),
            State::Reading => f.write_str("being read"),
            State::Ready { .. } => f.write_str("ready"),
            State::Consumed { .. } => f.write_str("consumed"),
        }
    }
}

/// The state after `event`.
pub fn step(state: State, event: Event) -> Result<State, Illegal> {
    use Event as E;
    use State as S;
    Ok(match (state, event) {
        (S::Absent, E::Reserve(Way::Down)) => S::Writing,
        (S::Absent, E::Reserve(Way::Up)) => S::Reading,
        (S::Writing, E::Arrived) => S::Written,
        (S::Reading, E::Arrived) => S::Ready { spare: true },

        (S::Written, E::Flushed) => S::Flushed,
        (S::Ready { .. }, E::Flushed) => S::Ready { spare: true },
        (S::Consumed { .. }, E::Flushed) => S::Consumed { spare: true },
        (S::Flushed, E::Alone) => S::Written,
        (S::Ready { .. }, E::Alone) => S::Ready { spare: false },
        (S::Consumed { .. }, E::Alone) => S::Consumed { spare: false },
        (s, E::Promoted) if s.is_whole() => S::Consumed { spare: true },

        (S::Written, E::Plan) => S::Ready { spare: false },
        (S::Flushed, E::Plan) => S::Ready { spare: true },
        (S::Consumed { spare }, E::Plan) => S::Ready { spare },
        (S::Ready { spare: false }, E::Unplan) => S::Written,
        (S::Ready { spare: true }, E::Unplan) => S::Flushed,

        (s, E::Get(After::Discard)) if s.is_whole() => S::Absent,
        (S::Written, E::Get(After::Keep)) => S::Consumed { spare: false },
        (S::Flushed, E::Get(After::Keep)) => S::Consumed { spare: true },
        (S::Ready { spare } | S::Consumed { spare }, E::Get(After::Keep)) => S::Consumed { spare },

        (s, E::Evict) if s.may_go() => S::Absent,
        (S::Writing | S::Reading, E::Fail) => S::Absent,
        (_, E::Drop) => S::Absent,
        (state, event) => return Err(Illegal { state, event }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STATES: [State; 9] = [
        State::Absent,
        State::Writing,
        State::Written,
        State::Flushed,
        State::Reading,
        State::Ready { spare: false },
        State::Ready { spare: true },
        State::Consumed { spare: false },
        State::Consumed { spare: true },
    ];
    const EVENTS: [Event; 13] = [
        Event::Reserve(Way::Down),
        Event::Reserve(Way::Up),
        Event::Arrived,
        Event::Flushed,
        Event::Promoted,
        Event::Alone,
        Event::Plan,
        Event::Unplan,
        Event::Get(After::Discard),
        Event::Get(After::Keep),
        Event::Evict,
        Event::Drop,
        Event::Fail,
    ];

    #[test]
    fn only_spare_instances_that_nobody_waits_for_are_evicted() {
        let evicted: Vec<State> = STATES.into_iter().filter(|s| step(*s, Event::Evict).is_ok()).collect();
        assert_eq!(evicted, [State::Flushed, State::Consumed { spare: true }]);
    }

    #[test]
    fn every_pair_is_a_transition_or_an_error_that_names_both() {
        let mut legal = 0;
        for state in STATES {
            for event in EVENTS {
                match step(state, event) {
                    Ok(_) => legal += 1,
                    Err(e) => assert_eq!(e, Illegal { state, event }),
                }
            }
        }
        assert_eq!(legal, 51);
        let error = step(State::Written, Event::Evict).unwrap_err();
        assert_eq!(error.to_string(), "an instance that is written cannot take Evict");
    }

    #[test]
    fn a_planned_version_remembers_that_it_is_still_to_be_flushed() {
        let planned = step(State::Written, Event::Plan).unwrap();
        assert_eq!(planned, State::Ready { spare: false });
        assert_eq!(step(planned, Event::Unplan), Ok(State::Written));
        let read = step(planned, Event::Get(After::Keep)).unwrap();
        assert!(!read.may_go(), "it is the only one");
        assert!(step(read, Event::Flushed).unwrap().may_go());
    }

    proptest! {
        /// Room appears only by a reservation, and the bytes of a whole instance go only by eviction, discard or drop.
        #[test]
        fn bytes_come_and_go_by_named_events(events in prop::collection::vec(prop::sample::select(EVENTS.to_vec()), 0..200)) {
            let mut state = State::Absent;
            for event in events {
                let Ok(next) = step(state, event) else { continue };
                if next.takes_room() && !state.takes_room() {
                    prop_assert!(matches!(event, Event::Reserve(_)));
                }
                if next.is_whole() && !state.is_whole() {
                    prop_assert_eq!(event, Event::Arrived);
                }
                if state.is_whole() && !next.is_whole() {
                    prop_assert!(matches!(event, Event::Evict | Event::Get(After::Discard) | Event::Drop));
                    prop_assert!(event != Event::Evict || !state.is_alone());
                }
                state = next;
            }
        }
    }
}
