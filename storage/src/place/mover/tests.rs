use super::*;
use crate::engine::{Engine, Options};
use crate::place::model::Model;
use crate::session::Session;
use crate::store::{set_local_tiers, LocalTier};
use crate::testing::Scratch;
use crate::PAGE;
use belay_image::extents::Extent;
use belay_image::manifest::ChunkEntry;
use belay_image::TableId;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

const CHUNK: u64 = 8 * PAGE;

/// A job with a tier in memory that holds `memory` chunks, and a disk that holds `disk`.
fn engine(s: &Scratch, memory: u64, disk: u64, policy: Policy, rate: Option<u64>) -> Engine {
    let room = chunk::file_bytes((CHUNK / PAGE) as u32);
    let tiers = [("mem", true), ("disk", false)].map(|(name, memory)| LocalTier {
        name: name.into(),
        memory,
        dir: s.0.join(name),
        host: None,
    });
    set_local_tiers(&s.job(), &tiers, &tiers).unwrap();
    let spec = |chunks: u64, memory: bool| Spec {
        capacity: chunks * room,
        memory,
        model: Model::unmeasured(memory),
        shared: None,
    };
    let options = Options {
        max_bytes: None,
        find_by_hash: true,
        key: crate::testing::key(),
    };
    let mut engine = Engine::new(Store::of_job(&s.job()), options).unwrap();
    let specs = vec![spec(memory, true), spec(disk, false)];
    engine.use_tiers(specs, policy, rate).unwrap();
    engine.chunk_bytes = CHUNK;
    engine
}

fn files(dir: &Path) -> Vec<String> {
    let list = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = list.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Stores memory as a checkpoint does; the chunks and the extents.
fn commit(engine: &mut Engine, memory: &[u8]) -> (Vec<ChunkEntry>, Vec<Extent>) {
    let session = engine.begin(0).unwrap();
    store_in(session, engine, memory)
}

fn store_in(mut session: Session, engine: &mut Engine, memory: &[u8]) -> (Vec<ChunkEntry>, Vec<Extent>) {
    let mut table = Vec::new();
    session.store_pages(0x10000, memory, &mut table).unwrap();
    session.set_table(TableId::Process(1), table).unwrap();
    session.seal().unwrap();
    session.publish().unwrap();
    let committed = (session.entries().unwrap(), session.tables()[&TableId::Process(1)].clone());
    engine.keep(session, Path::new("/nonexistent"));
    committed
}

fn read(store: &Store, (chunks, table): &(Vec<ChunkEntry>, Vec<Extent>)) -> Vec<u8> {
    let mut out = Vec::new();
    let mut buf = Buffer::default();
    for e in table {
        let chunk = chunks.iter().find(|c| c.id == e.chunk).unwrap();
        store.open(chunk).unwrap().read(e.page, e.pages() as u32, &mut buf).unwrap();
        out.extend_from_slice(&buf);
    }
    out
}

#[test]
fn chunks_are_written_to_local_tiers_and_moved_home() {
    let s = Scratch::new("moved");
    for policy in Policy::ALL {
        let mut engine = engine(&s, 2, 3, policy, None);
        let memory = Scratch::memory(80, policy as u64);
        let committed = commit(&mut engine, &memory);
        let store = Store::of_job(&s.job());
        assert!(read(&store, &committed) == memory, "{policy:?}: while chunks are moved");
        engine.mover().unwrap().drain();
        assert!(read(&store, &committed) == memory, "{policy:?}: at home");
        assert_eq!(
            (files(&s.0.join("mem")).len(), files(&s.0.join("disk")).len()),
            (0, 0),
            "{policy:?}"
        );
        assert_eq!(files(store.directory()).len(), committed.0.len());
        engine.mover().unwrap().stop();
        engine.collect(&Needed::default()).unwrap();
        assert_eq!(files(store.directory()), [""; 0]);
    }
}

#[test]
fn what_is_given_up_leaves_nothing_anywhere() {
    let s = Scratch::new("given-up");
    for rate in [None, Some(1 << 20)] {
        let mut engine = engine(&s, 2, 3, Policy::Naive, rate);
        let mut session = engine.begin(0).unwrap();
        let mut table = Vec::new();
        session.store_pages(0x10000, &Scratch::memory(60, 3), &mut table).unwrap();
        // Two loans are asked for and never used.
        let loans = session.lend(100, 2).unwrap();
        session.place_loan(loans[0].id).unwrap();
        session.place_loan(loans[1].id).unwrap();
        assert!(session.is_tiered() && loans.len() > 3, "some have no place yet");
        drop(session);
        let mover = engine.mover().unwrap();
        mover.drain();
        for dir in ["mem", "disk", "job/chunks"] {
            assert_eq!(files(&s.0.join(dir)), [""; 0], "{dir}");
        }
        assert_eq!(mover.desk().room_in_memory(), 2 * chunk::file_bytes(8));
        mover.stop();
    }
}

#[test]
fn what_the_desk_says_of_a_chunk_that_was_given_up_is_not_about_its_successor() {
    let s = Scratch::new("ticket");
    let engine = engine(&s, 2, 0, Policy::Naive, None);
    let (mover, store) = (engine.mover().unwrap(), Store::of_job(&s.job()));
    let (tier, bytes) = (Place::Tier(0), chunk::file_bytes(8));
    let home = store.name_in(Place::Home, 7, false);
    // Chunk 7 twice; the first is given up before its turn.
    for contents in [1, 2] {
        assert_eq!(mover.desk().now(bytes), tier);
        std::fs::write(store.name_in(tier, 7, false), vec![contents; bytes as usize]).unwrap();
        mover.sealed(0, 7, bytes, 8);
        if contents == 1 {
            mover.give_up(7);
        }
    }
    for moved in [false, true] {
        let (_, entry, bytes) = mover.desk().take().unwrap();
        mover.move_home(0, parts(entry), bytes).unwrap();
        assert_eq!(home.exists(), moved);
        assert_eq!(store.name_in(tier, 7, false).exists(), !moved);
    }
    assert!(std::fs::read(&home).unwrap() == vec![2; bytes as usize]);
}

#[test]
fn a_restart_finds_chunks_wherever_they_are_and_moves_them_home() {
    let s = Scratch::new("found");
    let memory = Scratch::memory(40, 5);
    let committed = {
        let mut engine = engine(&s, 100, 0, Policy::Adaptive, None);
        let session = engine.begin(0).unwrap();
        // Nothing gets home.
        engine.mover().unwrap().stop();
        store_in(session, &mut engine, &memory)
    };
    let store = Store::of_job(&s.job());
    assert_eq!(files(&s.0.join("mem")).len(), committed.0.len());
    assert!(read(&store, &committed) == memory);
    assert!(committed.0.iter().all(|c| store.path(c.id).starts_with(s.0.join("mem"))));
    // One of them was just about to be removed from the tier.
    let first = &committed.0[0];
    std::fs::copy(store.path_in(Place::Tier(0), first.id), store.path_in(Place::Home, first.id)).unwrap();
    let mut engine = engine(&s, 100, 0, Policy::Adaptive, None);
    let ids: BTreeSet<u32> = committed.0.iter().map(|c| c.id).collect();
    let mover = engine.mover().unwrap().clone();
    assert_eq!(mover.in_memory(&ids), 4 * chunk::file_bytes(8));
    mover.start().unwrap();
    mover.drain();
    assert_eq!((mover.in_memory(&ids), files(&s.0.join("mem"))), (0, vec![]));
    assert!(read(&store, &committed) == memory);
    engine.collect(&committed.0.iter().copied().collect()).unwrap();
    assert!(read(&store, &committed) == memory);
    mover.stop();
}

/// What a job with a tier in memory has left there, committed and not moved.
fn left_in_memory(s: &Scratch, memory: &[u8]) -> (Vec<ChunkEntry>, Vec<Extent>) {
    let mut engine = engine(s, 100, 0, Policy::Adaptive, None);
    let session = engine.begin(0).unwrap();
    engine.mover().unwrap().stop();
    store_in(session, &mut engine, memory)
}

#[test]
fn a_chunk_with_the_number_of_another_one_never_takes_its_place() {
    let s = Scratch::new("another");
    let (mem, away) = (s.0.join("mem"), s.0.join("away"));
    let old = left_in_memory(&s, &Scratch::memory(40, 1));
    std::fs::rename(&mem, &away).unwrap();
    // The tier is away, and numbers begin anew.
    let memory = Scratch::memory(40, 2);
    let mut before = engine(&s, 0, 0, Policy::Adaptive, None);
    let new = commit(&mut before, &memory);
    before.mover().unwrap().stop();
    let numbers = |c: &[ChunkEntry]| c.iter().map(|c| (c.id, c.pages)).collect::<Vec<_>>();
    assert_eq!(numbers(&old.0), numbers(&new.0));
    std::fs::remove_dir(&mem).unwrap();
    std::fs::rename(&away, &mem).unwrap();
    let store = Store::of_job(&s.job());
    for collected in [false, true] {
        let mut engine = engine(&s, 100, 0, Policy::Adaptive, None);
        let mover = engine.mover().unwrap().clone();
        if collected {
            engine.collect(&new.0.iter().copied().collect()).unwrap();
        }
        mover.start().unwrap();
        mover.drain();
        assert!(read(&store, &new) == memory, "{collected}");
        let there = files(&mem).len();
        assert_eq!(
            there,
            if collected { 0 } else { old.0.len() },
            "nothing is removed before it is known to be unneeded"
        );
        assert_eq!(mover.left().is_none(), collected);
        mover.stop();
    }
}

#[test]
fn what_a_fetch_has_healed_at_home_is_not_overwritten_with_what_was_damaged() {
    let s = Scratch::new("healed");
    let memory = Scratch::memory(40, 3);
    let committed = left_in_memory(&s, &memory);
    let store = Store::of_job(&s.job());
    let engine = engine(&s, 100, 0, Policy::Adaptive, None);
    let mover = engine.mover().unwrap();
    for (i, c) in committed.0.iter().take(2).enumerate() {
        let (tier, home) = (store.path_in(Place::Tier(0), c.id), store.path_in(Place::Home, c.id));
        std::fs::copy(&tier, &home).unwrap();
        let file = std::fs::OpenOptions::new().write(true).open(&tier).unwrap();
        file.write_all_at(&[0xff; 8], 5000).unwrap();
        if i == 1 {
            std::fs::remove_file(&tier).unwrap();
        }
    }
    mover.finish().unwrap();
    assert!(read(&store, &committed) == memory);
    assert_eq!((files(&s.0.join("mem")), mover.left()), (vec![], None));
}

#[test]
fn a_table_behind_junk_at_home_is_not_taken_for_the_chunk_that_lies_in_the_tier() {
    let s = Scratch::new("junk");
    let memory = Scratch::memory(40, 3);
    let committed = left_in_memory(&s, &memory);
    let store = Store::of_job(&s.job());
    let of = |n: usize| [Place::Home, Place::Tier(0)].map(|place| store.path_in(place, committed.0[n].id));
    let junk_of = |path: &Path| {
        let mut bytes = std::fs::read(path).unwrap();
        bytes[..CHUNK as usize].fill(0x55);
        bytes
    };
    let ([home, tier], [home_too, tier_too]) = (of(0), of(1));
    std::fs::write(&home, junk_of(&tier)).unwrap();
    let engine = engine(&s, 100, 0, Policy::Adaptive, None);
    let mover = engine.mover().unwrap();
    // That of the second comes later. Where neither is whole, both stay.
    let good = std::fs::read(&tier_too).unwrap();
    std::fs::write(&home_too, junk_of(&tier_too)).unwrap();
    std::fs::write(&tier_too, junk_of(&tier_too)).unwrap();
    mover.start().unwrap();
    mover.drain();
    assert!(tier_too.exists() && home_too.exists() && !tier.exists());
    assert!(mover.take_rotten().is_some_and(|why| why.contains("damaged")));
    std::fs::write(&tier_too, good).unwrap();
    mover.finish().unwrap();
    assert!(read(&store, &committed) == memory);
    assert_eq!((files(&s.0.join("mem")), mover.left()), (vec![], None));
}

#[test]
fn numbers_are_not_used_again_where_chunks_are_out_of_sight() {
    let s = Scratch::new("out-of-sight");
    let begin = || {
        let mut engine = engine(&s, 0, 0, Policy::Adaptive, None);
        engine.keep_numbers().unwrap();
        engine
    };
    let mut first = begin();
    let numbers = |c: Vec<ChunkEntry>| c.iter().map(|c| c.id).collect::<BTreeSet<u32>>();
    let used = numbers(commit(&mut first, &Scratch::memory(40, 1)).0);
    assert!(
        s.job().join(crate::numbers::NUMBERS).exists(),
        "before the generation is committed"
    );
    first.mover().unwrap().stop();
    // They lay in a tier that is away, and no manifest names them.
    std::fs::remove_dir_all(s.job().join("chunks")).unwrap();
    let mut second = begin();
    let more = numbers(commit(&mut second, &Scratch::memory(40, 2)).0);
    second.mover().unwrap().stop();
    assert!(used.last() < more.first(), "{used:?} {more:?}");
}

#[test]
fn a_chunk_that_cannot_be_moved_stays_where_it_is_and_is_tried_again() {
    let s = Scratch::new("stays");
    let mut engine = engine(&s, 100, 0, Policy::Adaptive, None);
    let home = s.job().join("chunks");
    let memory = Scratch::memory(30, 6);
    let session = engine.begin(0).unwrap();
    // A directory in the way of the copy.
    let blocked = home.join(".tmp-pages-00000002.bpg");
    std::fs::create_dir_all(blocked.join("x")).unwrap();
    let committed = store_in(session, &mut engine, &memory);
    let mover = engine.mover().unwrap().clone();
    mover.drain();
    let store = Store::of_job(&s.job());
    assert_eq!(files(&s.0.join("mem")), ["pages-00000002.bpg"]);
    assert!(read(&store, &committed) == memory);
    mover.start().unwrap();
    mover.drain();
    assert_eq!(files(&s.0.join("mem")), ["pages-00000002.bpg"]);
    // Also when the job ends, and nothing else is to be moved.
    std::fs::remove_dir_all(&blocked).unwrap();
    mover.finish().unwrap();
    assert_eq!(files(&s.0.join("mem")), [""; 0]);
    assert!(read(&store, &committed) == memory && mover.left().is_none());
}

#[test]
fn a_chunk_that_cannot_be_moved_gives_its_room_back_when_nobody_needs_it() {
    let s = Scratch::new("room");
    let mut engine = engine(&s, 100, 0, Policy::Adaptive, None);
    let all = engine.mover().unwrap().desk().room_in_memory();
    let session = engine.begin(0).unwrap();
    let blocked = s.job().join("chunks/.tmp-pages-00000002.bpg");
    std::fs::create_dir_all(blocked.join("x")).unwrap();
    store_in(session, &mut engine, &Scratch::memory(30, 6));
    let mover = engine.mover().unwrap().clone();
    mover.drain();
    assert_eq!(mover.desk().room_in_memory(), all - chunk::file_bytes(8));
    std::fs::remove_dir_all(&blocked).unwrap();
    engine.collect(&Needed::default()).unwrap();
    assert_eq!((mover.desk().room_in_memory(), files(&s.0.join("mem"))), (all, vec![]));
    mover.stop();
}

#[test]
fn a_tier_that_is_gone_is_left_out() {
    let s = Scratch::new("gone");
    let mut engine = engine(&s, 100, 100, Policy::Adaptive, None);
    std::fs::remove_dir(s.0.join("mem")).unwrap();
    let memory = Scratch::memory(30, 7);
    let committed = commit(&mut engine, &memory);
    engine.mover().unwrap().drain();
    assert!(read(&Store::of_job(&s.job()), &committed) == memory);
    engine.mover().unwrap().stop();
    // Nor is one used that belongs to somebody else, or a list that makes no sense.
    std::fs::create_dir(s.0.join("mem")).unwrap();
    assert_eq!(Store::of_job(&s.job()).tiers().len(), 2);
    std::fs::set_permissions(s.0.join("mem"), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    assert_eq!(Store::of_job(&s.job()).tiers().len(), 1);
    std::fs::write(s.job().join(crate::store::PLACES), "[").unwrap();
    assert_eq!(Store::of_job(&s.job()).tiers().len(), 0);
}

/// Chunks in a tier in memory of which the first is home, the next two are on their way and get no further, and the
/// others wait; their entries and extents.
fn under_way(s: &Scratch, memory: &[u8]) -> (Engine, (Vec<ChunkEntry>, Vec<Extent>)) {
    // The first piece is free; the next one is due in hours.
    let mut engine = engine(s, 100, 0, Policy::Adaptive, Some(1));
    let committed = commit(&mut engine, memory);
    let home = s.job().join("chunks");
    let is_unfinished = |n: &&String| n.starts_with(".tmp-");
    let limit = Instant::now() + Duration::from_secs(60);
    loop {
        let names = files(&home);
        if (names.len(), names.iter().filter(is_unfinished).count()) == (1 + THREADS, THREADS) {
            return (engine, committed);
        }
        assert!(Instant::now() < limit, "no chunk is under way: {names:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn collecting_leaves_what_is_being_moved_and_removes_what_nobody_moves() {
    let s = Scratch::new("moving");
    let memory = Scratch::memory(40, 8);
    let (mut engine, committed) = under_way(&s, &memory);
    let home = s.job().join("chunks");
    let before = (files(&s.0.join("mem")), files(&home));
    std::fs::write(home.join(".tmp-pages-000000ff.bpg"), b"of a checkpoint that was killed").unwrap();
    let removed = engine.collect(&committed.0.iter().copied().collect()).unwrap();
    assert_eq!(removed.chunks, 1);
    assert_eq!((files(&s.0.join("mem")), files(&home)), before);
    engine.mover().unwrap().finish().unwrap();
    assert_eq!(files(&s.0.join("mem")), [""; 0]);
    assert!(read(&Store::of_job(&s.job()), &committed) == memory);
}

#[test]
fn chunks_that_are_collected_are_forgotten_also_while_they_are_moved() {
    let s = Scratch::new("forgotten");
    let memory = Scratch::memory(40, 9);
    let (mut engine, (chunks, _)) = under_way(&s, &memory);
    let home = s.job().join("chunks");
    let there = files(&home);
    // All but one of those that are being moved.
    let unneeded = there.iter().find_map(|n| n.strip_prefix(".tmp-")).unwrap().to_owned();
    let store = Store::of_job(&s.job());
    let is_needed = |c: &&ChunkEntry| !store.path_in(Place::Home, c.id).ends_with(&unneeded);
    let needed: Needed = chunks.iter().filter(is_needed).copied().collect();
    let mover = engine.mover().unwrap().clone();
    let all: BTreeSet<u32> = chunks.iter().map(|c| c.id).collect();
    let room = chunk::file_bytes(8);
    assert_eq!((all.len(), mover.in_memory(&all)), (5, 4 * room));
    engine.collect(&needed).unwrap();
    assert_eq!(mover.in_memory(&all), 3 * room, "it is not in the tier any more");
    mover.finish().unwrap();
    let names: Vec<String> = files(&home);
    assert!(
        names.len() == 4 && !names.contains(&unneeded),
        "{names:?}: it does not come back"
    );
    assert_eq!((files(&s.0.join("mem")), mover.desk().room_in_memory()), (vec![], 100 * room));
}

#[test]
fn a_chunk_whose_length_has_changed_is_not_moved() {
    let s = Scratch::new("length");
    let memory = Scratch::memory(40, 10);
    let committed = {
        let mut engine = engine(&s, 100, 0, Policy::Adaptive, None);
        let session = engine.begin(0).unwrap();
        engine.mover().unwrap().stop();
        store_in(session, &mut engine, &memory)
    };
    let engine = engine(&s, 100, 0, Policy::Adaptive, None);
    let mover = engine.mover().unwrap();
    let changed = [1, 2].map(|n: usize| Store::of_job(&s.job()).path_in(Place::Tier(0), committed.0[n].id));
    let good = changed.each_ref().map(|path| std::fs::read(path).unwrap());
    let longer = [&good[0][..], b"x"].concat();
    std::fs::write(&changed[0], longer).unwrap();
    std::fs::write(&changed[1], &good[1][1..]).unwrap();
    mover.start().unwrap();
    mover.drain();
    let names = changed
        .each_ref()
        .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned());
    assert_eq!(files(&s.0.join("mem")), names);
    assert!(mover.take_rotten().is_some_and(|why| why.contains("bytes instead of")));
    // Tried again, which is no news.
    mover.start().unwrap();
    mover.drain();
    assert_eq!(mover.take_rotten(), None);
    let home = files(&s.job().join("chunks"));
    assert!(home.len() == 3 && !home.iter().any(|n| names.contains(n)), "{home:?}");
    for (path, good) in changed.iter().zip(&good) {
        std::fs::write(path, good).unwrap();
    }
    mover.start().unwrap();
    mover.drain();
    assert_eq!(files(&s.0.join("mem")), [""; 0]);
    assert!(read(&Store::of_job(&s.job()), &committed) == memory);
    mover.stop();
}

#[test]
fn a_chunk_that_nobody_writes_makes_room_for_who_waits() {
    let s = Scratch::new("idle");
    let mut engine = engine(&s, 1, 0, Policy::FastestOnly, None);
    let mover = engine.mover().unwrap().clone();
    let mut session = engine.begin(0).unwrap();
    let memory = Scratch::memory(11, 11);
    let pages: Vec<&[u8]> = memory.chunks(PAGE as usize).collect();
    let write = |fd: i32, pages: &[&[u8]]| {
        // SAFETY: the session has the file open until the loan is given back.
        let file = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned().unwrap();
        std::fs::File::from(file).write_all_at(&pages.concat(), 0).unwrap();
    };
    let hashes = |pages: &[&[u8]]| {
        pages
            .iter()
            .map(|p| u128::from(crate::page_checksum(p)))
            .collect::<Vec<_>>()
            .into_iter()
    };
    let loans = session.lend(16, 1).unwrap();
    let (first, second) = (loans[0].id, loans[1].id);
    let (fd, _) = session.place_loan(first).unwrap().unwrap();
    write(fd, &pages[..3]);
    for _ in 0..2 {
        assert_eq!(session.place_loan(second).unwrap(), None, "the tier is full");
        mover.drain();
    }
    assert_eq!(files(&s.0.join("mem")).len(), 1, "what is being written stays");
    session.give_back(first, hashes(&pages[..3])).unwrap();
    assert_eq!(session.place_loan(second).unwrap(), None);
    mover.drain();
    let (fd, _) = session
        .place_loan(second)
        .unwrap()
        .expect("what has been given back has made room");
    write(fd, &pages[3..]);
    session.give_back(second, hashes(&pages[3..])).unwrap();
    let extent = |page: u64, pages: u64, chunk: u32| Extent {
        vaddr: page * PAGE,
        bytes: pages * PAGE,
        chunk,
        page: 0,
    };
    session
        .set_table(TableId::Process(1), vec![extent(0, 3, first), extent(3, 8, second)])
        .unwrap();
    session.seal().unwrap();
    session.publish().unwrap();
    let committed = (session.entries().unwrap(), session.tables()[&TableId::Process(1)].clone());
    engine.keep(session, Path::new("/nonexistent"));
    mover.finish().unwrap();
    assert_eq!(files(&s.0.join("mem")), [""; 0]);
    assert!(read(&Store::of_job(&s.job()), &committed) == memory);
}

#[test]
fn who_waits_for_a_place_holds_none_that_it_comes_to_later() {
    let s = Scratch::new("order");
    let mut engine = engine(&s, 1, 0, Policy::FastestOnly, None);
    let mover = engine.mover().unwrap().clone();
    let mut session = engine.begin(0).unwrap();
    let first = session.lend(16, 1).unwrap();
    let second = session.lend(16, 1).unwrap();
    // The first one found all that it had in the store, and has asked for no place; the second has half filled one.
    assert!(session.place_loan(second[0].id).unwrap().is_some());
    let memory = Scratch::memory(3, 3);
    let hashes: Vec<u128> = memory.chunks(PAGE as usize).map(|p| crate::page_checksum(p).into()).collect();
    for loan in &first {
        session.give_back(loan.id, std::iter::empty()).unwrap();
    }
    for loan in &second {
        let used = if loan.id == second[0].id { hashes.clone() } else { Vec::new() };
        session.give_back(loan.id, used.into_iter()).unwrap();
    }
    let third = session.lend(24, 1).unwrap();
    assert_eq!((third[0].id, third.len() > 1), (second[0].id, true));
    drop(session);
    mover.drain();
    mover.stop();
}

#[test]
fn only_a_tier_that_cannot_read_back_has_rotted() {
    let s = Scratch::new("rotten");
    let engine = engine(&s, 100, 0, Policy::Adaptive, None);
    let mover = engine.mover().unwrap();
    for (step, errno, rotten) in [
        ("write", libc::EIO, false),
        ("read", libc::EMFILE, false),
        ("read", libc::EIO, true),
    ] {
        let e = std::io::Error::from_raw_os_error(errno);
        mover.note_rot(7, &ImageError::io(step, Path::new("chunk"), e).into());
        assert_eq!(mover.take_rotten().is_some(), rotten, "{step}: {errno}");
    }
}
