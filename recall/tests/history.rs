//! Histories as programs use them.

mod common;

use belay_recall::device::Slow;
use belay_recall::{After, History, HistoryError, Layout, Level, Life, Options, Shape};
use common::{bytes, Dir};
use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const MIB: u64 = 1 << 20;

impl Dir {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("belay-recall-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    fn options(&self, host_bytes: u64) -> Options {
        Options::new(&self.0, "h", host_bytes)
    }

    /// Files of versions.
    fn files(&self) -> Vec<PathBuf> {
        let all = std::fs::read_dir(self.0.join("h")).unwrap().map(|e| e.unwrap().path());
        let mut files: Vec<PathBuf> = all.filter(|p| p.is_file() && !p.ends_with("lock")).collect();
        files.sort();
        files
    }
}

fn put(history: &History, version: u64, len: usize) {
    history.put(version, &[(0, &bytes(version, len))]).unwrap();
}

fn get(history: &History, version: u64, len: usize, after: After) -> Result<(), HistoryError> {
    let mut read = vec![0; len];
    history.get(version, &mut [(0, &mut read)], after)?;
    assert!(read == bytes(version, len), "version {version} has other bytes");
    Ok(())
}

#[test]
fn a_thousand_versions_larger_than_memory_come_back_in_reverse_order() {
    const LEN: usize = 100_000;
    for life in [Life::Lasting, Life::UntilRead] {
        let dir = Dir::new("thousand");
        let history = History::open(Options {
            life,
            ..dir.options(16 * MIB)
        })
        .unwrap();
        history.hint((0..1000).rev()).unwrap();
        (0..1000).for_each(|v| put(&history, v, LEN + v as usize));
        for v in (0..1000).rev() {
            get(&history, v, LEN + v as usize, After::Discard).unwrap();
        }
        let stats = history.stats().unwrap();
        assert_eq!((stats.puts, stats.gets, stats.versions), (1000, 1000, 0));
        assert!(stats.hits > 900 && stats.up > 50 * MIB, "{stats:?}");
        history.close().unwrap();
        assert_eq!(dir.files(), Vec::<PathBuf>::new());
    }
}

#[test]
fn what_fits_is_not_written_unless_it_is_to_last() {
    let dir = Dir::new("fits");
    let history = History::open(Options {
        life: Life::UntilRead,
        ..dir.options(16 * MIB)
    })
    .unwrap();
    history.hint(0..8).unwrap();
    (0..8).for_each(|v| put(&history, v, MIB as usize));
    for v in 0..8 {
        get(&history, v, MIB as usize, After::Discard).unwrap();
    }
    assert_eq!(history.stats().unwrap().down, 0);
}

#[test]
fn versions_are_there_again_when_a_history_is_opened_again() {
    let dir = Dir::new("again");
    let history = History::open(dir.options(4 * MIB)).unwrap();
    (0..10).for_each(|v| put(&history, v, MIB as usize));
    get(&history, 3, MIB as usize, After::Discard).unwrap();
    history.close().unwrap();
    std::fs::write(dir.0.join("h/0000000000000001-77.new"), "half").unwrap();
    let history = History::open(dir.options(4 * MIB)).unwrap();
    assert_eq!(history.versions().unwrap(), [0, 1, 2, 4, 5, 6, 7, 8, 9]);
    // Its number is free again.
    put(&history, 3, 1000);
    for v in (0..10).rev() {
        let len = if v == 3 { 1000 } else { MIB as usize };
        get(&history, v, len, After::Keep).unwrap();
    }
    history.wait(Level::Durable).unwrap();
    assert_eq!(dir.files().len(), 10);
    drop(history);
    // What lasts is not thrown away by who wants versions only until they are read.
    let other = History::open(Options {
        life: Life::UntilRead,
        ..dir.options(4 * MIB)
    });
    assert!(matches!(other.err(), Some(HistoryError::OtherLife { until_read: false, .. })));
    assert_eq!(dir.files().len(), 10);
}

#[test]
fn what_is_wanted_until_it_is_read_does_not_outlive_a_history() {
    let dir = Dir::new("until-read");
    let options = || Options {
        life: Life::UntilRead,
        ..dir.options(MIB)
    };
    let history = History::open(options()).unwrap();
    (0..4).for_each(|v| put(&history, v, MIB as usize));
    drop(history);
    let history = History::open(options()).unwrap();
    assert_eq!(history.versions().unwrap(), [0u64; 0]);
}

/// As after a restart by belay: the program is as it was, but its directory has what it has written since.
#[test]
fn files_of_a_future_that_is_gone_are_written_over() {
    let dir = Dir::new("future");
    let history = History::open(dir.options(4 * MIB)).unwrap();
    for name in [
        "0000000000000003-1.new",
        "0000000000000004-2.new",
        "0000000000000004-2.version",
    ] {
        std::fs::write(dir.0.join("h").join(name), [7; 300_000]).unwrap();
    }
    put(&history, 3, 1000);
    put(&history, 4, 2000);
    history.close().unwrap();
    let history = History::open(dir.options(4 * MIB)).unwrap();
    get(&history, 3, 1000, After::Keep).unwrap();
    get(&history, 4, 2000, After::Keep).unwrap();
    assert_eq!(dir.files().len(), 2);
}

#[test]
fn parts_have_numbers_and_sizes() {
    let dir = Dir::new("parts");
    let history = History::open(dir.options(4 * MIB)).unwrap();
    let (a, b) = (bytes(1, 70_000), bytes(2, 300));
    history.put(5, &[(9, &a), (2, &b), (4, &[])]).unwrap();
    history.put(6, &[]).unwrap();
    let shape = Shape::new([(2, 300), (4, 0), (9, 70_000)]).unwrap();
    assert_eq!(*history.shape(5).unwrap(), shape);
    let (mut x, mut y) = (vec![0; 70_000], vec![0; 300]);
    history
        .get(5, &mut [(2, &mut y), (4, &mut []), (9, &mut x)], After::Keep)
        .unwrap();
    assert!(x == a && y == b);
    history.get(6, &mut [], After::Discard).unwrap();
    let other = history.get(5, &mut [(2, &mut y), (9, &mut x)], After::Keep);
    assert!(matches!(other, Err(HistoryError::Parts(5))), "{other:?}");
    let twice = history.put(7, &[(1, &a), (1, &b)]);
    assert!(matches!(twice, Err(HistoryError::Invalid(_))), "{twice:?}");
}

#[test]
fn wrong_use_is_refused_and_changes_nothing() {
    let dir = Dir::new("wrong");
    let history = History::open(dir.options(4 * MIB)).unwrap();
    put(&history, 1, 1000);
    put(&history, 2, 1000);
    let errno = |r: Result<(), HistoryError>| r.unwrap_err().errno();
    assert_eq!(errno(history.put(1, &[(0, &[1])])), libc::EEXIST);
    assert_eq!(errno(get(&history, 3, 1000, After::Keep)), libc::ENODATA);
    assert_eq!(errno(get(&history, 1, 1001, After::Keep)), libc::EMSGSIZE);
    get(&history, 2, 1000, After::Discard).unwrap();
    assert_eq!(errno(get(&history, 2, 1000, After::Keep)), libc::ESTALE);
    assert_eq!(errno(history.drop_version(2)), libc::ESTALE);
    assert_eq!(errno(history.drop_version(3)), libc::ENODATA);
    let open = |o| History::open(o).map(|_| ()).unwrap_err().errno();
    assert_eq!(open(dir.options(MIB)), libc::EBUSY);
    for name in ["", "..", "a/b", ".hidden"] {
        assert_eq!(open(Options::new(&dir.0, name, MIB)), libc::EINVAL, "{name}");
    }
    assert_eq!(open(Options::new(&dir.0, "other", 10)), libc::EINVAL);
    assert_eq!(open(Options::new(dir.0.join("none"), "h", MIB)), libc::ENOENT);
    get(&history, 1, 1000, After::Discard).unwrap();
    history.close().unwrap();
    std::fs::set_permissions(dir.0.join("h"), std::fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(open(dir.options(MIB)), libc::EPERM);
}

fn spoil(file: &Path, at: i64) {
    let f = OpenOptions::new().read(true).write(true).open(file).unwrap();
    let at = if at < 0 { f.metadata().unwrap().len() as i64 + at } else { at } as u64;
    let mut byte = [0];
    f.read_exact_at(&mut byte, at).unwrap();
    f.write_all_at(&[byte[0] ^ 1], at).unwrap();
}

#[test]
fn a_damaged_file_is_an_error_for_its_version_alone() {
    let dir = Dir::new("damaged");
    let history = History::open(dir.options(2 * MIB)).unwrap();
    (0..6).for_each(|v| put(&history, v, MIB as usize));
    history.close().unwrap();
    let files = dir.files();
    spoil(&files[1], 500_000);
    spoil(&files[2], -60);
    spoil(&files[3], -1);
    let history = History::open(dir.options(2 * MIB)).unwrap();
    // Fetched ahead, and refused.
    history.hint(0..6).unwrap();
    for v in 0..6 {
        let answer = get(&history, v, MIB as usize, After::Keep);
        match v {
            1..=3 => assert!(matches!(answer, Err(HistoryError::Damaged(_))), "{v}: {answer:?}"),
            _ => answer.unwrap(),
        }
    }
    assert_eq!(history.put(1, &[]).unwrap_err().errno(), libc::EEXIST);
    // Nobody sees it among the versions: it is put as one that was never there.
    put(&history, 2, 10);
    get(&history, 2, 10, After::Keep).unwrap();
    [1, 3].into_iter().for_each(|v| history.drop_version(v).unwrap());
    history.close().unwrap();
    assert_eq!(dir.files().len(), 4);
}

#[test]
fn a_file_that_cannot_be_read_or_is_gone_is_an_error_for_its_version_alone() {
    let dir = Dir::new("unreadable");
    let history = History::open(dir.options(2 * MIB)).unwrap();
    (0..3).for_each(|v| put(&history, v, 1000));
    history.close().unwrap();
    let files = dir.files();
    std::fs::remove_file(&files[1]).unwrap();
    // Whoever opens it is told so.
    std::os::unix::fs::symlink("nowhere", &files[1]).unwrap();
    let history = History::open(dir.options(2 * MIB)).unwrap();
    std::fs::remove_file(&files[2]).unwrap();
    get(&history, 0, 1000, After::Keep).unwrap();
    for v in 1..3 {
        let answer = get(&history, v, 1000, After::Keep);
        assert!(matches!(answer, Err(HistoryError::Damaged(_))), "{v}: {answer:?}");
        // It may be whole another time.
        assert_eq!(history.put(v, &[(0, &[1])]).unwrap_err().errno(), libc::EEXIST);
        history.drop_version(v).unwrap();
    }
    history.close().unwrap();
    assert_eq!(dir.files(), files[..1]);
}

#[test]
fn a_history_says_how_far_down_all_is_without_waiting() {
    let dir = Dir::new("is-at");
    let history = History::open(dir.options(4 * MIB)).unwrap();
    let is_at = |level| history.is_at(level).unwrap();
    let notes = Notes::many(&dir, 0);
    notes.block();
    put(&history, 1, 1000);
    put(&history, 2, 1000);
    assert!(is_at(Level::Host) && !is_at(Level::Local) && !is_at(Level::Durable));
    // Nobody waits for what has been dropped.
    history.drop_version(1).unwrap();
    assert!(!is_at(Level::Local));
    notes.open();
    history.wait(Level::Local).unwrap();
    assert!(is_at(Level::Local) && !is_at(Level::Durable));
    history.wait(Level::Durable).unwrap();
    assert!(is_at(Level::Durable));
    put(&history, 3, 1000);
    history.wait(Level::Local).unwrap();
    assert!(!is_at(Level::Durable));
}

#[test]
fn while_memory_has_a_version_its_file_may_be_damaged() {
    let dir = Dir::new("memory");
    let history = History::open(dir.options(2 * MIB)).unwrap();
    put(&history, 1, MIB as usize);
    history.wait(Level::Local).unwrap();
    spoil(&dir.files()[0], 5);
    get(&history, 1, MIB as usize, After::Keep).unwrap();
}

#[test]
fn a_device_whose_copies_fail_loses_nothing() {
    for layout in [Layout::Paged, Layout::Contiguous] {
        let dir = Dir::new("device");
        let device = Arc::new(Slow::new(2 * MIB, 1e9).unwrap());
        let history = History::open(Options {
            device: Some(device.clone()),
            layout,
            ..dir.options(4 * MIB)
        })
        .unwrap();
        device.fail(3);
        history.hint((0..60).rev()).unwrap();
        (0..60).for_each(|v| put(&history, v, 200_000));
        for v in (0..60).rev() {
            get(&history, v, 200_000, After::Discard).unwrap();
        }
        device.fail(0);
        (0..60).for_each(|v| put(&history, v, 200_000));
        history.wait(Level::Host).unwrap();
    }
}

#[test]
fn a_copy_that_began_before_a_wait_and_fails_is_tried_again() {
    for level in [Some(Level::Host), Some(Level::Local), None] {
        let dir = Dir::new("before");
        // A copy takes 0.2 seconds.
        let device = Arc::new(Slow::new(MIB, 1e6).unwrap());
        let history = History::open(Options {
            device: Some(device.clone()),
            ..dir.options(2 * MIB)
        })
        .unwrap();
        // The first copy does, and the second does not.
        device.fail(2);
        put(&history, 1, 200_000);
        match level {
            Some(level) => history.wait(level).unwrap(),
            None => history.close().unwrap(),
        }
        if level != Some(Level::Host) {
            assert_eq!(dir.files().len(), 1);
        }
    }
}

#[test]
fn a_wait_on_a_device_whose_copies_all_fail_says_so() {
    let dir = Dir::new("all");
    let device = Arc::new(Slow::new(MIB, 1e9).unwrap());
    let history = History::open(Options {
        device: Some(device.clone()),
        ..dir.options(2 * MIB)
    })
    .unwrap();
    device.fail(1);
    put(&history, 1, 200_000);
    for _ in 0..2 {
        let end = history.wait(Level::Local);
        assert!(matches!(&end, Err(e) if e.errno() == libc::EIO), "{end:?}");
    }
    device.fail(0);
    history.wait(Level::Local).unwrap();
    get(&history, 1, 200_000, After::Discard).unwrap();
}

#[test]
fn a_child_is_refused_and_leaves_the_history_alone() {
    let dir = Dir::new("fork");
    let history = History::open(dir.options(2 * MIB)).unwrap();
    put(&history, 1, 1000);
    // The child only makes calls that are refused before any lock.
    let mut own = Some(history);
    let child = belay_kernel::apart::child(|| {
        let Some(history) = own.take() else { return 1 };
        let refused = [history.put(2, &[(0, &[1])]), history.hint([1]), history.close()];
        i32::from(!refused.into_iter().all(|r| matches!(r, Err(HistoryError::Forked))))
    });
    assert_eq!(child.unwrap().wait(0).unwrap(), 0);
    let history = own.unwrap();
    get(&history, 1, 1000, After::Discard).unwrap();
    history.close().unwrap();
}

#[test]
fn calls_of_several_threads_take_turns() {
    let dir = Dir::new("threads");
    let history = History::open(dir.options(2 * MIB)).unwrap();
    std::thread::scope(|s| {
        for t in 0..4u64 {
            let history = &history;
            s.spawn(move || {
                for n in 0..40 {
                    put(history, 100 * t + n, 60_000);
                    if n % 3 == 0 {
                        history.drop_version(100 * t + n).unwrap();
                    } else if n % 3 == 1 {
                        get(history, 100 * t + n, 60_000, After::Keep).unwrap();
                    }
                }
            });
        }
    });
    for v in history.versions().unwrap() {
        get(&history, v, 60_000, After::Discard).unwrap();
    }
}

/// Nothing is written while there is a file in the place of the directory of notes.
struct Notes {
    here: PathBuf,
    aside: PathBuf,
}

impl Notes {
    /// Notes in such numbers that each removal of a file takes long.
    fn many(dir: &Dir, number: usize) -> Self {
        let notes = Self {
            here: dir.0.join("h/belay.generations"),
            aside: dir.0.join("aside"),
        };
        for n in 0..number {
            std::os::unix::fs::symlink(&dir.0, notes.here.join(format!("note-{n}"))).unwrap();
        }
        notes
    }

    fn block(&self) {
        std::fs::rename(&self.here, &self.aside).unwrap();
        std::fs::write(&self.here, "").unwrap();
    }

    fn open(&self) {
        std::fs::remove_file(&self.here).unwrap();
        std::fs::rename(&self.aside, &self.here).unwrap();
    }
}

#[test]
fn a_lane_that_removes_files_when_it_is_time_to_try_again_does_so_afterwards() {
    let dir = Dir::new("lane");
    let history = Arc::new(History::open(dir.options(4 * MIB)).unwrap());
    let notes = Notes::many(&dir, 3000);
    notes.block();
    (0..50).for_each(|v| put(&history, v, 1000));
    // From now on there are 0.32 seconds between attempts.
    while history.stats().unwrap().failed < 5 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    notes.open();
    let (send, receive) = std::sync::mpsc::channel();
    let waits = history.clone();
    std::thread::spawn(move || send.send(waits.wait(Level::Local)));
    std::thread::sleep(std::time::Duration::from_millis(50));
    (1..50).for_each(|v| history.drop_version(v).unwrap());
    let end = receive.recv_timeout(std::time::Duration::from_secs(20));
    end.expect("it waits for ever").unwrap();
}

#[test]
fn what_cannot_be_removed_is_said_by_a_wait_and_tried_again() {
    let dir = Dir::new("stuck");
    let history = History::open(dir.options(4 * MIB)).unwrap();
    (0..6).for_each(|v| put(&history, v, 1000));
    history.wait(Level::Durable).unwrap();
    let notes = Notes::many(&dir, 0);
    let stuck = |version| {
        notes.block();
        history.drop_version(version).unwrap();
        for level in [Level::Local, Level::Durable] {
            let end = history.wait(level);
            assert!(matches!(&end, Err(e) if e.errno() == libc::ENOTDIR), "{end:?}");
        }
        history.wait(Level::Host).unwrap();
        notes.open();
    };
    stuck(0);
    history.wait(Level::Local).unwrap();
    assert_eq!(dir.files().len(), 5);
    // Whoever comes next has it tried, in the background.
    let gone = |files| {
        let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while dir.files().len() != files {
            assert!(std::time::Instant::now() < end, "{:?}", dir.files());
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    };
    stuck(1);
    history.drop_version(2).unwrap();
    gone(3);
    stuck(3);
    put(&history, 6, 1000);
    gone(3);
    history.wait(Level::Durable).unwrap();
    assert_eq!(history.versions().unwrap(), [4, 5, 6]);
}

#[test]
fn a_version_whose_file_somebody_has_removed_is_not_durable() {
    let dir = Dir::new("stolen");
    let history = History::open(dir.options(4 * MIB)).unwrap();
    (0..3).for_each(|v| put(&history, v, 1000));
    history.wait(Level::Local).unwrap();
    std::fs::remove_file(&dir.files()[1]).unwrap();
    for _ in 0..2 {
        let end = history.wait(Level::Durable).unwrap_err();
        assert!(end.to_string().contains("version 1"), "{end}");
        assert!(!history.is_at(Level::Durable).unwrap());
    }
    history.drop_version(1).unwrap();
    history.wait(Level::Durable).unwrap();
    assert!(history.is_at(Level::Durable).unwrap());
}
