//! Rooms, lists and states of a table.

use super::*;
use crate::life::After;
use proptest::prelude::*;

const ROOMS: [Room; 3] = [
    Room::Paged { bytes: 64, extent: 4 },
    Room::Contiguous { bytes: 128 },
    Room::Endless,
];

fn events() -> impl Strategy<Value = Event> {
    prop::sample::select(vec![
        Event::Reserve(Way::Down),
        Event::Reserve(Way::Up),
        Event::Arrived,
        Event::Flushed,
        Event::Plan,
        Event::Unplan,
        Event::Get(After::Keep),
        Event::Evict,
        Event::Fail,
    ])
}

/// Events that make sense for what the other tiers have, so that states say the truth about each other.
fn makes_sense(table: &Table, version: Version, tier: usize, event: Event) -> bool {
    let whole = |t: usize| table.state(version, t).is_whole();
    let other = (0..3).any(|t| t != tier && whole(t));
    match event {
        Event::Flushed => other,
        Event::Reserve(Way::Up) => tier < 2 && whole(tier + 1),
        Event::Reserve(Way::Down) => tier == 0 && !other || tier > 0 && whole(tier - 1),
        Event::Arrived => other || table.state(version, tier) == State::Writing && tier == 0,
        _ => true,
    }
}

proptest! {
    /// I1, I2 and I3: rooms add up; what nobody else has is never evicted; what was whole somewhere stays whole
    /// somewhere; the lists say what the states say.
    #[test]
    fn nothing_is_lost_and_rooms_add_up(steps in prop::collection::vec((0u64..8, 0usize..3, events()), 0..400)) {
        let mut table = Table::new(&ROOMS);
        (0..8).for_each(|v| {
            table.add(Version(v), 5 + 3 * v).unwrap();
            table.rank(Version(v), Rank { evict: v, flush: 100 - v });
        });
        let mut whole = [false; 8];
        for (v, tier, event) in steps {
            let version = Version(v);
            if !makes_sense(&table, version, tier, event) {
                continue;
            }
            let before = table.state(version, tier);
            let after = table.apply(version, tier, event);
            if event == Event::Evict && after.is_ok() {
                prop_assert!(before.may_go());
            }
            whole[v as usize] |= table.fastest(version).is_some();
            for v in 0..8 {
                prop_assert_eq!(table.fastest(Version(v)).is_some(), whole[v as usize]);
            }
            for (t, room) in [(0, 64), (1, 128)] {
                let used: u64 = table.versions().filter(|v| table.state(*v, t).takes_room())
                    .map(|v| table.taken(t, table.size(v).unwrap())).sum();
                prop_assert_eq!(used + table.free(t), room);
            }
            for t in 0..3 {
                let mut places: Vec<_> = table.versions().flat_map(|v| table.place(v, t)).collect();
                places.sort_by_key(|r| r.start);
                prop_assert!(places.windows(2).all(|w| w[0].end <= w[1].start), "{places:?}");
                for v in table.versions().filter(|v| t < 2 && table.state(*v, t).takes_room()) {
                    let placed: u64 = table.place(v, t).iter().map(|r| r.end - r.start).sum();
                    prop_assert_eq!(Some(placed), table.bytes(v));
                }
                for (_, v) in table.going(t) {
                    prop_assert!((0..3).filter(|o| table.state(v, *o).is_whole()).count() > 1);
                }
                for (_, v) in table.alone(t) {
                    prop_assert!(table.state(v, t).is_alone());
                }
                let deep: u64 = table.versions().filter(|v| {
                    let has = |o: usize| table.state(*v, o).is_whole() || table.state(*v, o) == State::Writing;
                    (0..=t).any(has) && !(t + 1..3).any(has)
                }).map(|v| table.size(v).unwrap()).sum();
                prop_assert_eq!(table.above(t), deep);
                let deepest = table.versions().find(|v| table.state(*v, t).is_whole()
                    && !(t + 1..3).any(|o| table.state(*v, o).is_whole() || table.state(*v, o) == State::Writing));
                prop_assert_eq!(table.deepest(t), deepest);
            }
        }
    }
}

#[test]
fn an_instance_that_a_faster_tier_has_too_goes_first() {
    let mut table = Table::new(&ROOMS);
    for v in [1, 2] {
        table.add(Version(v), 8).unwrap();
        table.rank(Version(v), Rank { evict: 10 * v, flush: 0 });
        for tier in 0..3 {
            table.reserve(Version(v), tier, Way::Down).unwrap();
            table.apply(Version(v), tier, Event::Arrived).unwrap();
            if tier > 0 {
                table.apply(Version(v), tier - 1, Event::Flushed).unwrap();
            }
        }
    }
    table.apply(Version(2), 0, Event::Evict).unwrap();
    let order: Vec<Version> = table.going(1).map(|(_, v)| v).collect();
    assert_eq!(order, [Version(1), Version(2)]);
}

#[test]
fn refusals_name_version_and_tier() {
    let mut table = Table::new(&ROOMS);
    table.add(Version(3), 65).unwrap();
    let error = table.reserve(Version(3), 0, Way::Down).unwrap_err();
    assert_eq!(error.to_string(), "tier 0 has no room for version 3 of 65 bytes");
    assert_eq!(table.drop(Version(4)), Err(TableError::Unknown(Version(4))));
    assert_eq!(table.add(Version(3), 1), Err(TableError::Exists(Version(3))));
    let error = table.apply(Version(3), 1, Event::Evict).unwrap_err();
    assert_eq!(
        error.to_string(),
        "version 3 in tier 1: an instance that is absent cannot take Evict"
    );
}
