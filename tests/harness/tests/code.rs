//! A job goes on after an update of the system: its programs, libraries and data files are others then, or gone.

use belay_image::model::FileIdentity;
use belay_tests::expect::{io, refused_for_one_of, want};
use belay_tests::job::{output, Job};
use belay_tests::place::{Place, User};
use belay_tests::rng::Rng;
use belay_tests::target::Target;
use belay_tests::Failure;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
const LOADER: &str = "/lib64/ld-linux-x86-64.so.2";
const LIBC: &str = "/lib/x86_64-linux-gnu/libc.so.6";
const PAGE: usize = 4096;
const DATA_BYTES: usize = 6 * PAGE;

type Test = fn(&Place, User, &mut Rng) -> Result<(), Failure>;

/// The pattern of `check.h` with seed 7.
fn pattern() -> Vec<u8> {
    let mix = |x: u64| {
        let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    };
    let words = (0..DATA_BYTES as u64 / 8).map(|i| mix(7 * 1_000_003 + i));
    words.flat_map(u64::to_le_bytes).collect()
}

/// The files of the job: a loader and a C library of its own, the program, and data.
struct Files {
    loader: PathBuf,
    libc: PathBuf,
    program: PathBuf,
    data: PathBuf,
}

impl Files {
    fn lay(job: &Job, place: &Place) -> Result<Self, Failure> {
        let dir = job.work.join("own");
        io("make a directory", fs::create_dir(&dir))?;
        io("chmod", fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)))?;
        let copy = |from: &Path, name: &str| {
            let to = dir.join(name);
            io("copy", fs::copy(from, &to))?;
            io("chmod", fs::set_permissions(&to, fs::Permissions::from_mode(0o755)))?;
            Ok::<_, Failure>(to)
        };
        let data = dir.join("data");
        io("write", fs::write(&data, pattern()))?;
        Ok(Self {
            loader: copy(Path::new(LOADER), "ld.so")?,
            libc: copy(Path::new(LIBC), "libc.so.6")?,
            program: copy(&place.programs().join("mem_code"), "program")?,
            data,
        })
    }

    /// The job: its program is the loader, which has mapped the one named.
    fn launch(&self, job: &mut Job, options: &[&str], names: bool) -> Result<(), Failure> {
        let dir = self.libc.parent().unwrap_or(Path::new("/"));
        let words: [&Path; 5] = [&self.loader, Path::new("--library-path"), dir, &self.program, &self.data];
        let mut words = words.map(|w| w.display().to_string()).to_vec();
        words.extend(names.then(|| "names".to_owned()));
        let options: Vec<String> = options.iter().map(|o| (*o).to_owned()).collect();
        job.launch(&options, &words)?;
        job.progress(LIMIT)
    }

    /// An update: the library is another build, the data others, the rest is gone.
    fn exchange(&self) -> Result<(), Failure> {
        let mut libc = io("read", fs::read(&self.libc))?;
        let identity = io("look at the library", FileIdentity::of(&self.libc))?;
        let id = identity.build_id.ok_or("the library has no build id")?;
        let bytes: Vec<u8> = (0..id.len() / 2)
            .filter_map(|i| u8::from_str_radix(&id[2 * i..2 * i + 2], 16).ok())
            .collect();
        let at = libc
            .windows(bytes.len())
            .position(|w| w == bytes)
            .ok_or("no build id in the library")?;
        libc[at] ^= 1;
        // Who executes this does not live long.
        libc[0x2000..].fill(0xcc);
        self.put(&self.libc, &libc)?;
        self.put(&self.data, &vec![1; DATA_BYTES])?;
        for gone in [&self.loader, &self.program] {
            io("remove", fs::remove_file(gone))?;
        }
        let now = io("look at the library", FileIdentity::of(&self.libc))?;
        want(now.build_id.is_some_and(|now| now != id), || {
            "the library has the same build id".into()
        })
    }

    /// What is changed in the library says nothing of its build.
    fn patch(&self) -> Result<(), Failure> {
        let then = io("look at the library", FileIdentity::of(&self.libc))?;
        let mut libc = io("read", fs::read(&self.libc))?;
        // Who executes this does not live long.
        libc[0x2000..].fill(0xcc);
        self.put(&self.libc, &libc)?;
        let now = io("look at the library", FileIdentity::of(&self.libc))?;
        want(then.accepts(&now), || format!("{now:?} instead of {then:?}"))
    }

    fn put(&self, path: &Path, contents: &[u8]) -> Result<(), Failure> {
        let new = path.with_extension("new");
        io("write", fs::write(&new, contents))?;
        io("chmod", fs::set_permissions(&new, fs::Permissions::from_mode(0o755)))?;
        io("rename", fs::rename(new, path))
    }
}

/// Kills all, restarts, checkpoints, twice; then the program's own verdict.
fn goes_on(job: &mut Job, options: &[&str]) -> Result<(), Failure> {
    for round in 0..2 {
        job.kill_all()?;
        job.clear_beat()?;
        job.restart(options)?;
        job.progress(LIMIT).map_err(|e| format!("restart {round}: {e}"))?;
        job.checkpoint()?;
    }
    job.kill_all()?;
    job.clear_beat()?;
    job.restart(options)?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// The files change after the last checkpoint, in a way.
fn changed_after(place: &Place, user: User, label: &str, change: fn(&Files) -> Result<(), Failure>) -> Result<(), Failure> {
    let mut job = Job::new(place, label, user)?;
    let files = Files::lay(&job, place)?;
    files.launch(&mut job, &[], true)?;
    job.checkpoint()?;
    job.kill_all()?;
    change(&files)?;
    goes_on(&mut job, &[])
}

/// Everything is exchanged, and read on demand.
fn exchanged_lazily(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "lazily", user)?;
    let files = Files::lay(&job, place)?;
    files.launch(&mut job, &[], true)?;
    job.checkpoint()?;
    job.kill_all()?;
    files.exchange()?;
    goes_on(&mut job, &["--lazy"])
}

/// Everything is exchanged before the first checkpoint, or between two.
fn exchanged_meanwhile(first: bool, options: &[&str], place: &Place, user: User) -> Result<(), Failure> {
    let mut job = Job::new(place, "meanwhile", user)?;
    let files = Files::lay(&job, place)?;
    files.launch(&mut job, options, false)?;
    if first {
        job.checkpoint()?;
    }
    files.exchange()?;
    job.checkpoint()?;
    goes_on(&mut job, &[])
}

/// What is mapped is stored once, is named by `inspect`, and is no part of later checkpoints; without it a restart refuses.
fn stored_once(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "once", user)?;
    let files = Files::lay(&job, place)?;
    files.launch(&mut job, &[], true)?;
    job.checkpoint()?;
    job.checkpoint()?;
    let status = job.status()?;
    let new: Vec<u64> = status["generations"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|g| g["new_bytes"].as_u64())
        .collect();
    let libc = io("look at the library", fs::metadata(&files.libc))?.len();
    want(new.len() == 2 && new[0] > libc && new[1] < libc / 2, || {
        format!("{new:?} bytes were new, the library has {libc}")
    })?;
    let o = output(job.belay(&["inspect", &job.dir().display().to_string()]), LIMIT)?;
    let text = String::from_utf8_lossy(&o.stdout).into_owned();
    want(
        text.contains("mapped files stored") && text.contains(&files.libc.display().to_string()),
        || text,
    )?;
    job.verdict(false, LIMIT)
}

/// What is stored of a library is damaged, and the library still there: the restart does not need it, and the next
/// checkpoint stores it anew.
fn damaged(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "damaged", user)?;
    let files = Files::lay(&job, place)?;
    files.launch(&mut job, &["--keep", "1"], true)?;
    job.checkpoint()?;
    job.kill_all()?;
    let libc = io("read", fs::read(&files.libc))?;
    let page = &libc[libc.len() / 2 / PAGE * PAGE..][..PAGE];
    let mut found = 0;
    for chunk in io("list", fs::read_dir(job.dir().join("chunks")))? {
        let path = io("list", chunk)?.path();
        let mut bytes = io("read", fs::read(&path))?;
        let place = bytes.chunks(PAGE).position(|p| p == page);
        if let Some(place) = place {
            bytes[place * PAGE + 100] ^= 4;
            io("write", fs::write(&path, bytes))?;
            found += 1;
        }
    }
    want(found == 1, || format!("{found} chunks have the page of the library"))?;
    job.clear_beat()?;
    job.restart(&[])?;
    job.progress(LIMIT)?;
    job.checkpoint()?;
    job.kill_all()?;
    files.exchange()?;
    goes_on(&mut job, &[])
}

/// `--no-save-code`: nothing is stored, and a restart names what has been exchanged.
fn not_stored(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "not", user)?;
    let files = Files::lay(&job, place)?;
    files.launch(&mut job, &["--no-save-code"], true)?;
    job.checkpoint()?;
    job.kill_all()?;
    let newest = job.dir().join("gen/000001/pages-code.bidx");
    want(!newest.exists(), || format!("{} is there", newest.display()))?;
    files.exchange()?;
    let o = output(job.belay(&["restart", &job.dir().display().to_string()]), LIMIT)?;
    refused_for_one_of(&o, &["/own/"])?;
    job.left_behind()
}

fn main() {
    let mut target = Target::new("code", &["mem_code"]);
    let tests: [(&str, Test); 9] = [
        ("exchanged_after", |place, user, _| {
            changed_after(place, user, "after", Files::exchange)
        }),
        ("patched", |place, user, _| {
            changed_after(place, user, "patched", Files::patch)
        }),
        ("exchanged_lazily", exchanged_lazily),
        ("exchanged_before", |place, user, _| {
            exchanged_meanwhile(false, &[], place, user)
        }),
        ("exchanged_between", |place, user, _| {
            exchanged_meanwhile(true, &[], place, user)
        }),
        ("exchanged_unsaved", |place, user, _| {
            exchanged_meanwhile(false, &["--no-save-code"], place, user)
        }),
        ("stored_once", stored_once),
        ("damaged", damaged),
        ("not_stored", not_stored),
    ];
    for (name, test) in tests {
        target.by_user(name, |_| true, test);
    }
    target.run();
}
