use super::*;
use crate::engine::{Engine, Options};
use crate::store::tests::Scratch;
use belay_image::manifest::{FileEntry, Manifest};
use belay_image::sections::{Kind, SectionFile};
use belay_image::TableId;
use proptest::prelude::*;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

fn engine(store: &Store, max_bytes: Option<u64>) -> Engine {
    let options = Options {
        max_bytes,
        find_by_hash: true,
        key: crate::testing::key(),
    };
    Engine::new(store.clone(), options).unwrap()
}

fn page(seed: u64) -> Vec<u8> {
    (0..PAGE / 8)
        .flat_map(|i| (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ i).to_le_bytes())
        .collect()
}

/// Stores memory given as page number → seed; process 1.
fn put(session: &mut Session, memory: &BTreeMap<u64, u64>) -> Result<(), StorageError> {
    let mut table = Vec::new();
    for (at, seed) in memory {
        session.store_pages(at * PAGE, &page(*seed), &mut table)?;
    }
    session.set_table(TableId::Process(1), table)?;
    session.compact()?;
    session.seal()
}

/// What a restart would read.
fn get(store: &Store, chunks: &[ChunkEntry], table: &[Extent]) -> BTreeMap<u64, Vec<u8>> {
    let open: HashMap<u32, _> = chunks.iter().map(|c| (c.id, store.open(c).unwrap())).collect();
    let mut out = BTreeMap::new();
    let mut buf = belay_kernel::direct::Buffer::default();
    for e in table {
        open[&e.chunk].read(e.page, e.pages() as u32, &mut buf).unwrap();
        for (i, data) in buf.chunks(PAGE as usize).enumerate() {
            out.insert(e.vaddr / PAGE + i as u64, data.to_vec());
        }
    }
    out
}

fn commit(engine: &mut Engine, mut session: Session) -> (Vec<ChunkEntry>, Vec<Extent>) {
    session.publish().unwrap();
    let committed = (session.entries().unwrap(), session.tables()[&TableId::Process(1)].clone());
    engine.keep(session, Path::new("/nonexistent"));
    committed
}

fn files(store: &Store) -> usize {
    std::fs::read_dir(store.path(0).parent().unwrap()).unwrap().count()
}

#[test]
fn what_is_known_is_not_stored_again_and_a_lost_session_leaves_nothing() {
    let (_s, store) = Scratch::new("session");
    let mut engine = engine(&store, None);
    let memory: BTreeMap<u64, u64> = (0..100).map(|i| (i, i % 90)).collect();
    let mut session = engine.begin(0).unwrap();
    put(&mut session, &memory).unwrap();
    assert_eq!((session.stats.written, session.stats.found), (90, 10));
    drop(session);
    assert_eq!(files(&store), 0, "a lost session");

    let mut session = engine.begin(0).unwrap();
    put(&mut session, &memory).unwrap();
    assert!(
        !session.knows(1) && session.knows(2),
        "a lost session's number is not used again"
    );
    assert_eq!(session.stats.written, 90, "a lost session has taught nothing");
    let first = commit(&mut engine, session);
    let moved: BTreeMap<u64, u64> = memory.iter().map(|(at, seed)| (at + 7, *seed)).collect();
    let mut session = engine.begin(0).unwrap();
    put(&mut session, &moved).unwrap();
    assert_eq!((session.stats.written, session.new_bytes()), (0, 0));
    let second = commit(&mut engine, session);
    assert_eq!(first.0, second.0);
    let expected: BTreeMap<u64, Vec<u8>> = moved.iter().map(|(at, seed)| (*at, page(*seed))).collect();
    assert!(get(&store, &second.0, &second.1) == expected);
}

#[test]
fn where_looking_does_not_pay_a_sample_is_looked_for_until_it_would() {
    let (s, store) = Scratch::new("payoff");
    let mut engine = engine(&store, None);
    let dir: PathBuf = s.0.join("gen/000001");
    let mut take = |seed: u64| {
        let memory: BTreeMap<u64, u64> = (0..600).map(|i| (i, seed + i)).collect();
        let mut session = engine.begin(0).unwrap();
        put(&mut session, &memory).unwrap();
        let stats = &mut session.stats;
        let seen = (stats.looked, stats.found, stats.written);
        // As if it had been a large one, at a microsecond for each page written and a tenth for each looked for.
        for count in [&mut stats.looked, &mut stats.found, &mut stats.written] {
            *count *= 1000;
        }
        (stats.write_pages, stats.write_ns) = (100_000, 100_000_000);
        (stats.timed_pages, stats.look_ns, stats.table_ns) = (1000, 100_000, 0);
        let without = session.why_without().is_some();
        session.publish().unwrap();
        let table = session.tables()[&TableId::Process(1)].clone();
        write_manifest(&dir, &session.entries().unwrap(), &table);
        let chunks = session.entries().unwrap();
        engine.keep(session, &dir);
        assert!(get(&store, &chunks, &table).iter().all(|(at, data)| *data == page(seed + at)));
        (without, seen)
    };
    for n in 0..4 {
        assert_eq!(take(n * 1000), (false, (600, 0, 600)));
    }
    for n in 4..30 {
        let (without, (looked, found, written)) = take(n * 1000);
        assert_eq!((without, found, written), (true, 0, 600));
        assert!((1..40).contains(&looked), "{looked}");
    }
    // The memory stops changing: the sample shows it, and the next one finds what was stored meanwhile.
    let (without, (looked, found, written)) = take(29_000);
    assert_eq!((without, found, written), (true, looked, 600 - looked));
    assert_eq!(take(29_000), (false, (600, 600, 0)));
}

#[test]
fn a_limit_holds_and_is_named() {
    let (_s, store) = Scratch::new("limit");
    let mut engine = engine(&store, Some(50 * chunk::file_bytes(1)));
    let memory = |n: u64| -> BTreeMap<u64, u64> { (0..n).map(|i| (i, i)).collect() };
    let mut session = engine.begin(0).unwrap();
    put(&mut session, &memory(49)).unwrap();
    commit(&mut engine, session);
    let mut session = engine.begin(0).unwrap();
    let e = put(&mut session, &memory(60)).unwrap_err();
    assert!(
        matches!(e, StorageError::Quota { .. }) && e.to_string().contains("--max-bytes"),
        "{e}"
    );
    assert!(session.lend(1000, 2).unwrap().iter().map(|l| l.pages).sum::<u32>() < 5);
}

#[test]
fn several_borrow_at_once_and_never_more_than_there_is() {
    let (_s, store) = Scratch::new("several");
    let mut engine = engine(&store, Some(50 * chunk::file_bytes(1)));
    let mut session = engine.begin(0).unwrap();
    assert!(session.may_lend(60, 0), "alone it gets what there is");
    let first = session.lend(20, 1).unwrap();
    assert!(session.may_lend(20, 20) && !session.may_lend(40, 20));
    assert_eq!(session.writers(2000, 8), 1, "no room for a second");
    let second = session.lend(20, 1).unwrap();
    let ids = |loans: &[Loan]| loans.iter().map(|l| l.id).collect::<BTreeSet<_>>();
    assert!(ids(&first).is_disjoint(&ids(&second)), "a chunk has one borrower");
    let third = session.lend(60, 1).unwrap();
    let all: u32 = [&first, &second, &third].iter().flat_map(|l| l.iter()).map(|l| l.pages).sum();
    assert!((48..=50).contains(&all), "{all}");
    // What the agent stores meanwhile goes into none of them, also where one has its file already.
    assert!(session.place_loan(first[0].id).unwrap().is_some());
    let mut table = Vec::new();
    let lent: BTreeSet<u32> = [&first, &second, &third].iter().flat_map(|l| ids(l)).collect();
    session.store_pages(0, &[7; PAGE as usize], &mut table).unwrap();
    assert!(!lent.contains(&table[0].chunk));
    for loan in first.iter().chain(&second).chain(&third) {
        session.give_back(loan.id, std::iter::empty()).unwrap();
    }
    assert!(session.may_lend(40, 0), "what was not written is there again");
}

#[test]
fn the_table_of_hashes_stays_while_writers_have_it() {
    let (_s, store) = Scratch::new("stays");
    let mut engine = engine(&store, None);
    let mut session = engine.begin(0).unwrap();
    let loans = session.lend(1, 1).unwrap();
    let shared = |session: &Session| (session.index_share().fd, session.index_share().bytes);
    let before = shared(&session);
    let mut table = Vec::new();
    let mut store = |session: &mut Session, pages: std::ops::Range<u64>| {
        for n in pages {
            session.store_pages(n * PAGE, &page(n), &mut table).unwrap();
        }
    };
    let many = before.1 / 16;
    store(&mut session, 0..many);
    assert_eq!(shared(&session), before, "writers would open what has taken its descriptor");
    assert!(!session.may_lend(many, 0), "who comes now would need a larger one");
    for loan in &loans {
        session.give_back(loan.id, std::iter::empty()).unwrap();
    }
    store(&mut session, many..2 * many);
    assert!(shared(&session).1 > before.1);
}

#[test]
fn chunks_that_vanished_are_not_referred_to() {
    let (_s, store) = Scratch::new("vanished");
    let mut engine = engine(&store, None);
    let memory: BTreeMap<u64, u64> = (0..10).map(|i| (i, i)).collect();
    for _ in 0..2 {
        let mut session = engine.begin(0).unwrap();
        put(&mut session, &memory).unwrap();
        assert_eq!(session.stats.written, 10);
        let (chunks, _) = commit(&mut engine, session);
        std::fs::remove_file(store.path(chunks[0].id)).unwrap();
    }
}

fn write_manifest(dir: &Path, chunks: &[ChunkEntry], table: &[Extent]) {
    std::fs::create_dir_all(dir).unwrap();
    let name = TableId::Process(1).file_name();
    let mut file = SectionFile::new();
    file.push(Kind::Extents, belay_image::extents::encode(table));
    file.write(&dir.join(&name)).unwrap();
    let m = Manifest {
        taken: None,
        left_out: None,
        declared: None,
        dirty: None,
        without_hashes: None,
        generation: 1,
        time_unix_s: 0,
        host: String::new(),
        arch: std::env::consts::ARCH.into(),
        blocked_ms: 0.0,
        phases_ms: Vec::new(),
        processes: 1,
        threads: 1,
        bytes: 0,
        new_bytes: 0,
        files: vec![FileEntry {
            name,
            bytes: 0,
            xxh3: None,
        }],
        chunks: chunks.to_vec(),
        next_chunk: 0,
    };
    std::fs::write(dir.join(belay_image::manifest::MANIFEST_FILE), m.encode().unwrap()).unwrap();
}

#[test]
fn an_engine_that_begins_anew_builds_on_a_generation() {
    let (s, store) = Scratch::new("anew");
    let memory: BTreeMap<u64, u64> = (0..10).map(|i| (i, i)).collect();
    let mut engine1 = engine(&store, None);
    let mut session = engine1.begin(0).unwrap();
    put(&mut session, &memory).unwrap();
    let (chunks, table) = commit(&mut engine1, session);
    let dir: PathBuf = s.0.join("gen/000001");
    write_manifest(&dir, &chunks, &table);
    let mut engine2 = engine(&store, None);
    engine2.build_on(&dir, Vec::new());
    let mut session = engine2.begin(0).unwrap();
    put(&mut session, &memory).unwrap();
    assert_eq!((session.stats.written, session.stats.found), (0, 10));
    drop(session);
    // Nobody has read the pages to which it does not refer: they are stored again, and may be damaged where they are.
    write_manifest(&dir, &chunks, &[table[0].part(table[0].vaddr, table[0].vaddr + 7 * PAGE)]);
    engine2.build_on(&dir, Vec::new());
    let mut session = engine2.begin(0).unwrap();
    put(&mut session, &memory).unwrap();
    assert_eq!((session.stats.written, session.stats.found), (3, 7));
    drop(session);
    engine2.build_on(&dir, vec![(chunks[0].id, 1..2), (chunks[0].id, 4..6)]);
    let mut session = engine2.begin(0).unwrap();
    put(&mut session, &memory).unwrap();
    assert_eq!((session.stats.written, session.stats.found), (6, 4));
    drop(session);
    // Nothing is known of a generation that the engine was not told to build on.
    let mut session = engine(&store, None).begin(0).unwrap();
    put(&mut session, &memory).unwrap();
    assert_eq!(session.stats.written, 10);
}

#[test]
fn nothing_is_found_in_a_chunk_that_is_damaged() {
    let (_s, store) = Scratch::new("intact");
    let mut first = engine(&store, None);
    let memory: BTreeMap<u64, u64> = (0..10).map(|i| (i, i)).collect();
    let mut session = first.begin(0).unwrap();
    put(&mut session, &memory).unwrap();
    let (chunks, table) = commit(&mut first, session);
    let found = |expected: bool| {
        let mut session = first_session(&store, (&chunks, &table));
        assert_eq!(session.is_intact(&table), expected);
        put(&mut session, &memory).unwrap();
        (session.stats.written, session.stats.found)
    };
    assert_eq!(found(true), (0, 10));
    let path = store.path(chunks[0].id);
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&[0xff], 5 * PAGE).unwrap();
    assert_eq!(found(false), (10, 0));
    std::fs::remove_file(path).unwrap();
    let mut session = engine(&store, None).begin(0).unwrap();
    assert!(!session.is_intact(&table), "a chunk that nobody knows");
}

/// Checkpoint after checkpoint, the chunk of the first one becomes mostly dead, and is damaged: in what is still needed
/// of it, or beside that.
#[test]
fn damage_that_is_found_in_passing_is_told_where_it_is_needed() {
    let found = |damaged: u64| {
        let (_s, store) = Scratch::new(&format!("passing-{damaged}"));
        let mut engine = engine(&store, None);
        engine.chunk_bytes = 16 * PAGE;
        let mut session = engine.begin(0).unwrap();
        put(&mut session, &(0..16).map(|i| (i, i)).collect()).unwrap();
        let (chunks, _) = commit(&mut engine, session);
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(store.path(chunks[0].id))
            .unwrap();
        file.write_all_at(&[0xff], damaged * PAGE).unwrap();
        let mut session = engine.begin(0).unwrap();
        // Two pages of the first chunk are left, with one between them that nobody needs.
        put(
            &mut session,
            &(0..16).map(|i| (i, if [2, 4].contains(&i) { i } else { 100 + i })).collect(),
        )
        .unwrap();
        assert_eq!(session.stats.moved > 0, damaged > 4, "compacted: {:?}", session.stats);
        session.damage().is_some()
    };
    assert_eq!([2, 3, 4, 9].map(found), [true, false, true, false]);
}

/// The first session after a restart of what lies in `chunks`.
fn first_session(store: &Store, (chunks, table): (&[ChunkEntry], &[Extent])) -> Session {
    let dir: PathBuf = store.directory().join("../gen/000001");
    write_manifest(&dir, chunks, table);
    let mut engine = engine(store, None);
    engine.build_on(&dir, Vec::new());
    engine.begin(0).unwrap()
}

/// A committed generation and what it must read as.
type Kept = (Vec<ChunkEntry>, Vec<Extent>, BTreeMap<u64, u64>);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    /// Random memory over many generations with chunks of 8 pages: every kept generation reads back as it was, whatever
    /// was collected, compacted or lost.
    #[test]
    fn every_kept_generation_reads_back(steps in prop::collection::vec((0u64..60, 1u64..20, 0u64..25, any::<bool>()), 1..25)) {
        let (_s, store) = Scratch::new(&format!("generations-{}", std::thread::current().name().map_or(0, str::len)));
        let mut engine = engine(&store, None);
        engine.chunk_bytes = 8 * PAGE;
        let mut memory: BTreeMap<u64, u64> = BTreeMap::new();
        let mut kept: Vec<Kept> = Vec::new();
        for (at, n, seed, lose) in steps {
            memory.extend((at..at + n).map(|p| (p, (seed + p) % 40)));
            let mut session = engine.begin(0).unwrap();
            put(&mut session, &memory).unwrap();
            if lose && seed % 3 == 0 {
                continue;
            }
            let (chunks, table) = commit(&mut engine, session);
            kept.push((chunks, table, memory.clone()));
            if kept.len() > 2 {
                kept.remove(0);
            }
            let needed: BTreeSet<u32> = kept.iter().flat_map(|k| k.0.iter().map(|c| c.id)).collect();
            engine.collect(&kept.iter().flat_map(|k| k.0.iter().copied()).collect()).unwrap();
            prop_assert_eq!(files(&store), needed.len());
            for (chunks, table, memory) in &kept {
                let expected: BTreeMap<u64, Vec<u8>> = memory.iter().map(|(at, seed)| (*at, page(*seed))).collect();
                prop_assert!(get(&store, chunks, table) == expected);
            }
        }
    }
}

#[test]
fn what_is_held_back_is_there_when_it_is_sealed_and_what_was_forgotten_is_stored_again() {
    let (_s, store) = Scratch::new("held");
    let mut engine = engine(&store, None);
    let memory: BTreeMap<u64, u64> = (0..100).map(|i| (i, i)).collect();
    let mut session = engine.begin(0).unwrap();
    let mut table = Vec::new();
    // An attempt that has come to nothing.
    session.hold_back(30 * PAGE);
    for (at, seed) in &memory {
        session.store_pages(at * PAGE, &page(*seed), &mut table).unwrap();
    }
    session.reset();
    assert_eq!(files(&store), 0, "a forgotten attempt");
    // Some in memory, the rest at once.
    session.hold_back(70 * PAGE);
    put(&mut session, &memory).unwrap();
    assert_eq!((session.stats.written, session.stats.found), (100, 0));
    let (chunks, table) = commit(&mut engine, session);
    let back = get(&store, &chunks, &table);
    assert!(memory.iter().all(|(at, seed)| back[at] == page(*seed)));
}

#[test]
fn a_limit_of_memory_is_for_what_comes() {
    let (_s, store) = Scratch::new("limit");
    let mut session = engine(&store, None).begin(0).unwrap();
    let mut table = Vec::new();
    let mut store_one = |session: &mut Session, n: u64| session.store_pages(n * PAGE, &page(n), &mut table);
    (0..10).for_each(|n| store_one(&mut session, n).unwrap());
    session.limit_memory(5 * chunk::file_bytes(1));
    (10..15).for_each(|n| store_one(&mut session, n).unwrap());
    assert!(matches!(store_one(&mut session, 15), Err(StorageError::Memory { .. })));
}

#[test]
fn what_finds_no_room_when_a_chunk_is_given_up_stays_where_it_is() {
    let (_s, store) = Scratch::new("room");
    let mut engine = engine(&store, None);
    let mut session = engine.begin(64 * PAGE).unwrap();
    put(&mut session, &(0..60).map(|n| (n, n)).collect()).unwrap();
    commit(&mut engine, session);
    let mut session = engine.begin(64 * PAGE).unwrap();
    session.limit_memory(8 * chunk::file_bytes(1));
    // A third of the chunk, and five new pages.
    let memory: BTreeMap<u64, u64> = (0..20).map(|n| (n, n * 3)).chain((100..105).map(|n| (n, n))).collect();
    put(&mut session, &memory).unwrap();
    assert_eq!((session.stats.written, session.stats.moved), (5, 3));
    let (chunks, table) = commit(&mut engine, session);
    let back = get(&store, &chunks, &table);
    assert!(memory.iter().all(|(at, seed)| back[at] == page(*seed)));
}
