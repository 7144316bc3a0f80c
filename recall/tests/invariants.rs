//! Any calls, under any rules, with the real threads: what is there is known, and every byte of it comes back (I3, I5
//! and I6 of the invariants; the others are the planner's, and tested there).

mod common;

use belay_history::plan::Rules;
use belay_recall::device::Slow;
use belay_recall::{After, History, HistoryError, Layout, Level, Life, Options};
use common::Dir;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

const KIB: u64 = 1 << 10;
/// Room of the host's memory; versions have up to half as much, and some do not fit at all.
const HOST: u64 = 256 * KIB;

#[derive(Debug, Clone)]
enum Call {
    Put(u64, usize),
    Get(u64, bool),
    Drop(u64),
    Hint(Vec<u64>),
    Replace(usize, Vec<u64>),
    Prefetch(bool),
    Wait(Level),
    Fail(u64),
    /// Closed and opened again.
    Again,
}

fn call() -> impl Strategy<Value = Call> {
    let version = || 0u64..24;
    let size = prop_oneof![
        1 => Just(0),
        8 => 1usize..100_000,
        1 => Just(300_000),
    ];
    let some = || prop::collection::vec(version(), 0..12);
    prop_oneof![
        10 => (version(), size).prop_map(|(v, s)| Call::Put(v, s)),
        8 => (version(), any::<bool>()).prop_map(|(v, d)| Call::Get(v, d)),
        1 => version().prop_map(Call::Drop),
        2 => some().prop_map(Call::Hint),
        1 => (0usize..30, some()).prop_map(|(f, h)| Call::Replace(f, h)),
        1 => any::<bool>().prop_map(Call::Prefetch),
        1 => prop::sample::select(vec![Level::Host, Level::Local]).prop_map(Call::Wait),
        1 => (0u64..4).prop_map(Call::Fail),
        1 => Just(Call::Again),
    ]
}

#[derive(Debug, Clone, Copy)]
struct Setting {
    rules: Rules,
    layout: Layout,
    life: Life,
    device: bool,
}

fn setting() -> impl Strategy<Value = Setting> {
    (
        prop::sample::select(vec![Rules::OURS, Rules::OURS, Rules::SCORE, Rules::LRU, Rules::BELADY]),
        prop::sample::select(vec![Layout::Paged, Layout::Contiguous]),
        prop::sample::select(vec![Life::Lasting, Life::UntilRead]),
        any::<bool>(),
    )
        .prop_map(|(rules, layout, life, device)| Setting {
            rules,
            layout,
            life,
            device,
        })
}

fn bytes(version: u64, serial: u64, len: usize) -> Vec<u8> {
    common::bytes(version << 32 | serial, len)
}

/// A history beside what it should hold.
struct World {
    dir: Dir,
    setting: Setting,
    device: Arc<Slow>,
    history: Option<History>,
    /// Serial number and size of what is there.
    there: BTreeMap<u64, (u64, usize)>,
    gone: BTreeSet<u64>,
    serial: u64,
    fails: bool,
}

impl World {
    fn new(setting: Setting) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("belay-recall-any-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let mut world = Self {
            dir: Dir(dir),
            setting,
            device: Arc::new(Slow::new(128 * KIB, 500e6).unwrap()),
            history: None,
            there: BTreeMap::new(),
            gone: BTreeSet::new(),
            serial: 0,
            fails: false,
        };
        world.open();
        world
    }

    fn open(&mut self) {
        let s = self.setting;
        let options = Options {
            rules: s.rules,
            layout: s.layout,
            life: s.life,
            extent: 4 * KIB,
            device: s.device.then(|| self.device.clone() as _),
            ..Options::new(&self.dir.0, "any", HOST)
        };
        self.history = Some(History::open(options).unwrap());
    }

    fn history(&self) -> &History {
        self.history.as_ref().unwrap()
    }

    fn get(&mut self, version: u64, discard: bool) {
        let after = if discard { After::Discard } else { After::Keep };
        let (serial, size) = self.there.get(&version).copied().unwrap_or((0, 3));
        let mut read = vec![0; size];
        let answer = self.history().get(version, &mut [(7, &mut read)], after);
        if self.there.contains_key(&version) {
            answer.unwrap();
            assert!(read == bytes(version, serial, size), "version {version} has other bytes");
            if discard {
                self.there.remove(&version);
                self.gone.insert(version);
            }
        } else if self.gone.contains(&version) {
            assert!(matches!(answer, Err(HistoryError::Dropped(_))), "{answer:?}");
        } else {
            assert!(matches!(answer, Err(HistoryError::Unknown(_))), "{answer:?}");
        }
    }

    fn put(&mut self, version: u64, size: usize) {
        self.serial += 1;
        let answer = self.history().put(version, &[(7, &bytes(version, self.serial, size))]);
        if self.there.contains_key(&version) {
            assert!(matches!(answer, Err(HistoryError::Exists(_))), "{answer:?}");
            return;
        }
        answer.unwrap();
        self.there.insert(version, (self.serial, size));
        self.gone.remove(&version);
    }

    fn call(&mut self, call: Call) {
        match call {
            Call::Put(version, size) => self.put(version, size),
            Call::Get(version, discard) => self.get(version, discard),
            Call::Drop(version) => {
                let is_there = self.there.remove(&version).is_some();
                assert_eq!(self.history().drop_version(version).is_ok(), is_there);
                if is_there {
                    self.gone.insert(version);
                }
            }
            Call::Hint(list) => self.history().hint(list).unwrap(),
            Call::Replace(from, list) => self.history().hint_replace(from, list).unwrap(),
            Call::Prefetch(on) => self.history().prefetch(on).unwrap(),
            Call::Wait(level) => {
                let end = self.history().wait(level);
                assert!(end.is_ok() || self.fails, "{end:?}");
            }
            Call::Fail(n) => {
                // A device that never works again is not waited for.
                let n = if n == 1 { 2 } else { n };
                self.fails = n > 0;
                self.device.fail(n);
            }
            Call::Again => self.again(),
        }
        let known: Vec<u64> = self.there.keys().copied().collect();
        assert_eq!(self.history().versions().unwrap(), known);
    }

    fn again(&mut self) {
        self.device.fail(0);
        self.fails = false;
        let closed = self.history.take().unwrap().close();
        closed.unwrap();
        let files = std::fs::read_dir(self.dir.0.join("any")).unwrap().count() - 2;
        if self.setting.life == Life::UntilRead {
            self.there.clear();
        }
        assert_eq!(files, self.there.len());
        self.gone.clear();
        self.open();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn every_byte_of_what_is_there_comes_back(setting in setting(), calls in prop::collection::vec(call(), 1..120)) {
        let mut world = World::new(setting);
        calls.into_iter().for_each(|c| world.call(c));
        world.device.fail(0);
        let all: Vec<u64> = world.there.keys().copied().collect();
        all.into_iter().for_each(|v| world.get(v, true));
        let stats = world.history().stats().unwrap();
        prop_assert_eq!((stats.versions, stats.held), (0, 0));
    }
}
