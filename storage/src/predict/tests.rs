use super::*;
use proptest::prelude::*;

const MB: f64 = 1e6;

fn flat(total: f64) -> Model {
    // What all get together is the same with one writer and with nine.
    Model::new(8, vec![total, total / 9.0]).unwrap()
}

fn tier(capacity: u64, memory: bool, total: f64) -> Tier {
    Tier {
        capacity,
        memory,
        model: flat(total),
    }
}

/// Nothing but bytes costs anything.
fn node(tiers: Vec<Tier>) -> Node {
    Node {
        policy: Policy::Adaptive,
        tiers,
        home: flat(200.0 * MB),
        moves: 100.0 * MB,
        writers: 4,
        durable: None,
        costs: Costs {
            process_s: 0.0,
            fork_page_s: 0.0,
            scan_page_s: 0.0,
            create_s: 0.0,
            read: 1e9,
        },
    }
}

fn local(node: &Node, new_bytes: f64) -> (f64, Limit) {
    let work = Work {
        new_bytes: new_bytes as u64,
        ..Work::default()
    };
    let t = times(node, &work).local;
    ((t.seconds * 1e6).round() / 1e6, t.limit)
}

#[test]
fn local_tiers_fill_one_after_the_other() {
    assert_eq!(local(&node(vec![]), 400.0 * MB), (2.0, Limit::Home));
    let both = |policy| Node {
        policy,
        ..node(vec![tier(u64::MAX, false, 300.0 * MB), tier(900_000_000, true, 1000.0 * MB)])
    };
    let adaptive = both(Policy::Adaptive);
    assert_eq!(local(&adaptive, 500.0 * MB), (0.5, Limit::Tier(1)), "all of it into memory");
    // Memory grows by 900 MB a second: 1000 MB in its second, then 300 MB/s to the disk and 100 MB/s into what moves free.
    assert_eq!(local(&adaptive, 2000.0 * MB), (3.5, Limit::Tier(0)));
    assert_eq!(local(&both(Policy::Naive), 2000.0 * MB).0, 3.5);
    assert_eq!(local(&both(Policy::FastestOnly), 2000.0 * MB), (11.0, Limit::Moves));
    assert_eq!(local(&both(Policy::LocalOnly), 600.0 * MB), (2.0, Limit::Tier(0)));
    // A tier that is emptied as fast as it is written never fills.
    let emptied = Node {
        moves: 1000.0 * MB,
        ..adaptive
    };
    assert_eq!(local(&emptied, 5000.0 * MB), (5.0, Limit::Tier(1)));
}

#[test]
fn pages_processes_and_files_cost_their_share() {
    let full = Node {
        costs: Costs {
            process_s: 0.01,
            fork_page_s: 1e-7,
            scan_page_s: 1e-6,
            create_s: 0.5,
            read: 500.0 * MB,
        },
        durable: Some(Durable {
            copies: 2,
            rate: 100.0 * MB,
            link: Some(50.0 * MB),
        }),
        ..node(vec![])
    };
    let work = Work {
        processes: 8,
        bytes: 4096 * 1_000_000,
        new_bytes: 200_000_000,
        flush_bytes: 200_000_000,
    };
    let t = times(&full, &work);
    let near = |found: Time, seconds: f64, limit| (found.seconds - seconds).abs() < 1e-9 && found.limit == limit;
    assert!(near(t.stop, 0.08 + 0.1, Limit::Fork), "{t:?}");
    // 0.25 s with four writers to look at all pages, 1 s to write what is new.
    assert!(near(t.local, 1.25, Limit::Home), "{t:?}");
    assert!(near(t.durable.unwrap(), 400.0 / 50.0, Limit::Link), "{t:?}");
    assert!(near(t.restart, 0.08 + 8.192, Limit::Read), "{t:?}");
    let small = Work {
        new_bytes: 0,
        flush_bytes: 1000,
        ..work
    };
    let t = times(&full, &small);
    assert!(
        near(t.durable.unwrap(), 2.0, Limit::Files) && near(t.local, 0.25, Limit::Scan),
        "{t:?}"
    );
    let slow_flush = Node {
        durable: full.durable.map(|d| Durable { link: None, ..d }),
        ..full
    };
    assert!(near(times(&slow_flush, &work).durable.unwrap(), 4.0, Limit::Flush));
}

/// Published figures of the law: memory, share of the disks' capacity, one disk.
#[test]
fn the_fill_time_is_memory_by_bandwidth() {
    // Stampede: 205 TB of memory, 10 PB of disks, of 2 TB and 100 MB/s each: 6.7 minutes are published.
    let disks = 10e15 / 2e12;
    let stampede = node(vec![tier(u64::MAX, false, disks * 100.0 * MB)]);
    let (local, durable) = fill_time(&stampede, 205_000_000_000_000);
    assert!((local.seconds / 60.0 - 6.8).abs() < 0.15 && durable.is_none(), "{local:?}");
    let two = Node {
        durable: Some(Durable {
            copies: 1,
            rate: 100.0 * MB,
            link: Some(50.0 * MB),
        }),
        ..node(vec![
            tier(1 << 30, true, 9000.0 * MB),
            tier(u64::MAX, false, 100.0 * MB),
            tier(u64::MAX, false, 300.0 * MB),
        ])
    };
    let (local, durable) = fill_time(&two, 1_000_000_000);
    assert_eq!((local.seconds, local.limit), (2.5, Limit::Tier(2)), "memory is no disk");
    assert_eq!(durable.map(|d| (d.seconds, d.limit)), Some((20.0, Limit::Link)));
    assert_eq!(fill_time(&node(vec![]), 400_000_000).0.seconds, 2.0);
}

fn number() -> impl Strategy<Value = f64> {
    prop_oneof![
        any::<f64>(),
        Just(f64::NAN),
        Just(-1.0),
        Just(0.0),
        Just(1e308),
        Just(f64::INFINITY),
        1e-9f64..1e12
    ]
}

fn policy() -> impl Strategy<Value = Policy> {
    prop::sample::select(Policy::ALL.to_vec())
}

proptest! {
    /// Whatever a file or a configuration says.
    #[test]
    fn every_time_is_a_number(
        costs in prop::array::uniform5(number()),
        rates in prop::array::uniform3(number()),
        (copies, writers, processes) in (any::<u32>(), any::<u32>(), any::<u32>()),
        (bytes, new_bytes, flush_bytes, capacity) in (any::<u64>(), any::<u64>(), any::<u64>(), any::<u64>()),
        sample in 1e-300f64..1e308,
        policy in policy(),
    ) {
        let model = Model::new(1, vec![sample]).unwrap();
        let node = Node {
            policy,
            tiers: vec![
                Tier { capacity, memory: true, model: model.clone() },
                Tier { capacity: u64::MAX, memory: false, model: model.clone() },
            ],
            home: model,
            moves: rates[0],
            writers,
            durable: Some(Durable { copies, rate: rates[1], link: Some(rates[2]) }),
            costs: Costs {
                process_s: costs[0],
                fork_page_s: costs[1],
                scan_page_s: costs[2],
                create_s: costs[3],
                read: costs[4],
            },
        };
        let t = times(&node, &Work { processes, bytes, new_bytes, flush_bytes });
        let (local, durable) = fill_time(&node, bytes);
        for time in [t.stop, t.local, t.restart, local].into_iter().chain(t.durable).chain(durable) {
            prop_assert!((0.0..=MOST_S).contains(&time.seconds), "{time:?}");
        }
    }

    #[test]
    fn more_takes_longer_and_more_room_does_not(
        bytes in 0u64..1 << 40,
        more in 0u64..1 << 40,
        capacity in 0u64..1 << 40,
        rates in prop::array::uniform4(1e6f64..1e10),
        policy in policy(),
    ) {
        let with = |capacity| Node {
            policy,
            moves: rates[2],
            home: flat(rates[3]),
            ..node(vec![tier(capacity, true, rates[0].max(rates[1])), tier(1 << 35, false, rates[0].min(rates[1]))])
        };
        let small = with(capacity);
        let time = |node: &Node, bytes: u64| local(node, bytes as f64).0;
        prop_assert!(time(&small, bytes) <= time(&small, bytes.saturating_add(more)) + 1e-5);
        // Where a full tier is waited for, room is worth its bytes.
        let large = with(capacity.saturating_add(more));
        prop_assert!(policy != Policy::FastestOnly || time(&large, bytes) <= time(&small, bytes) * (1.0 + 1e-6) + 1e-5);
    }

    /// No chunk can be written faster than all places take it together.
    #[test]
    fn no_time_is_below_the_bound(
        bytes in 1u64..1 << 40,
        capacity in 0u64..1 << 36,
        rates in prop::array::uniform3(1e6f64..1e10),
    ) {
        let node = Node { moves: rates[2], ..node(vec![tier(capacity, true, rates[0]), tier(u64::MAX, false, rates[1])]) };
        let bound = bytes as f64 / (rates[0].max(rates[1]) + rates[2]);
        prop_assert!(local(&node, bytes as f64).0 >= bound - 1e-5);
    }
}
