//! What the job's own files hold after a restart, where they outlive the job and nobody has asked for their contents.

use belay_tests::expect::{io, want};
use belay_tests::job::{output, show, text, Job};
use belay_tests::place::{am_root, Place, User, NOBODY};
use belay_tests::rng::Rng;
use belay_tests::runner::rounds;
use belay_tests::target::Target;
use belay_tests::Failure;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(20);
const MIB: usize = 1 << 20;

type Test = fn(&Place, User, &mut Rng) -> Result<(), Failure>;

/// A directory whose files nobody takes for temporary ones.
struct Lasting(PathBuf);

impl Lasting {
    fn new(user: User) -> Result<Self, Failure> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let base = match am_root() {
            true => PathBuf::from("/var/lib"),
            false => belay_tests::place::build_dir()?,
        };
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = base.join(format!("belay-files-{}-{n}", std::process::id()));
        io("create", fs::create_dir(&dir))?;
        if user == User::Ordinary && am_root() {
            io("give away", std::os::unix::fs::chown(&dir, Some(NOBODY), Some(NOBODY)))?;
        }
        Ok(Self(dir))
    }
}

impl Drop for Lasting {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

/// `program` goes back again and again, in a directory whose files outlive it.
fn goes_back(place: &Place, user: User, rng: &mut Rng, program: &str) -> Result<(), Failure> {
    let dir = Lasting::new(user)?;
    let mut job = Job::new(place, program, user)?;
    let script = format!("cd {} && exec {}", dir.0.display(), place.programs().join(program).display());
    job.launch(&[], &["sh", "-c", &script].map(String::from))?;
    job.progress(LIMIT)?;
    for n in 0..rounds(6) {
        rng.pause(60);
        job.checkpoint()?;
        rng.pause(60);
        job.kill_all()?;
        job.clear_beat()?;
        job.restart(&[])?;
        job.progress(LIMIT).map_err(|e| format!("round {n}: {e}"))?;
    }
    job.verdict(false, LIMIT)
}

fn overwritten(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    goes_back(place, user, rng, "fd_overwrite")
}

fn renamed(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    goes_back(place, user, rng, "fd_renamed")
}

/// The files of a program in python that does nothing: `small` and `large`, open for reading and writing, `log`, at whose
/// end it can only write, `input`, which it reads.
const PROGRAM: &str = "
import os, sys, time
os.chdir(sys.argv[1])
small, large = (os.open(n, os.O_RDWR) for n in ('small', 'large'))
log = os.open('log', os.O_WRONLY)
os.lseek(log, 0, os.SEEK_END)
data = os.open('input', os.O_RDONLY)
open('ready', 'w').close()
while os.path.exists('ready'):
    time.sleep(0.01)
print('PASS later', flush=True)
";

/// Launched with `options`, checkpointed, killed; every file overwritten; restarted. Says what `belay checkpoint` has
/// said, and which files hold again what they held.
fn overwritten_later(place: &Place, user: User, options: &[&str]) -> Result<(String, Vec<&'static str>), Failure> {
    const FILES: [(&str, usize); 4] = [("small", MIB), ("large", 3 * MIB), ("log", MIB), ("input", MIB)];
    let dir = Lasting::new(user)?;
    let path = |name: &str| dir.0.join(name);
    for (name, bytes) in FILES {
        io("write", fs::write(path(name), vec![1u8; bytes]))?;
        if user == User::Ordinary && am_root() {
            io("give away", std::os::unix::fs::chown(path(name), Some(NOBODY), Some(NOBODY)))?;
        }
    }
    let mut job = Job::new(place, "later", user)?;
    let options: Vec<String> = options.iter().map(|o| (*o).to_owned()).collect();
    job.launch(
        &options,
        &["python3", "-c", PROGRAM, &dir.0.display().to_string()].map(String::from),
    )?;
    until("the program is ready", || path("ready").exists())?;
    let o = output(job.belay(&["checkpoint", &job.dir().display().to_string()]), LIMIT)?;
    want(o.status.success(), || {
        format!("belay checkpoint: {}: {}", show(o.status), text(&o))
    })?;
    job.kill_all()?;
    // What is only read must be as it was.
    for (name, bytes) in &FILES[..3] {
        overwrite(&path(name), *bytes)?;
    }
    job.restart(&[])?;
    runs(&job)?;
    let held = FILES[..3].iter().filter(|(name, bytes)| {
        let found = fs::read(path(name)).unwrap_or_default();
        found == vec![1u8; *bytes]
    });
    let held = held.map(|(name, _)| *name).collect();
    io("remove", fs::remove_file(path("ready")))?;
    job.verdict(false, LIMIT)?;
    Ok((text(&o), held))
}

/// A script that makes temporary files and writes their names to `names`, checkpointed then and killed; the names.
fn killed_with_files(place: &Place, user: User, label: &str, script: &str) -> Result<(Job, String), Failure> {
    let mut job = Job::new(place, label, user)?;
    job.launch(&[], &["sh", "-c", script].map(String::from))?;
    let names = job.work.join("names");
    until("the files are there", || {
        fs::read_to_string(&names).is_ok_and(|n| n.ends_with('\n'))
    })?;
    job.checkpoint()?;
    let names = io("read", fs::read_to_string(&names))?;
    job.kill_all()?;
    Ok((job, names))
}

/// A temporary file that is written, closed and read again by other programs is there after a restart, if it was removed
/// meanwhile; one that has other contents now is left alone, and so is one of somebody else.
fn passed_on(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    const SCRIPT: &str = "a=$(mktemp); b=$(mktemp); seq 1000 >$a; seq 2000 >$b; echo $a $b >names
        while [ ! -e go-on ]; do sleep 0.01; done
        wc -l <$a; wc -l <$b; rm $a $b; echo PASS passed on";
    let (mut job, names) = killed_with_files(place, user, "passed", SCRIPT)?;
    let [a, b] = names.split_whitespace().collect::<Vec<_>>()[..] else {
        return Err(format!("names of two files: {names}"));
    };
    io("remove", fs::remove_file(a))?;
    io("write", fs::write(b, "one line\n"))?;
    job.restart(&[])?;
    io("write", fs::write(job.work.join("go-on"), ""))?;
    job.verdict(false, LIMIT)?;
    let said = job.output_text();
    let lines: Vec<&str> = said.lines().filter(|l| l.parse::<u32>().is_ok()).collect();
    want(lines == ["1000", "1"], || format!("lines of the files: {said}"))
}

/// What is stored of a file rots, while the file is there: nobody reads that at the restart, and the next checkpoint does
/// not take it for what was written.
fn rotten(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    const SCRIPT: &str = "a=$(mktemp); seq 20000 >$a; echo $a >names
        while [ ! -e go-on ]; do sleep 0.01; done
        wc -l <$a; rm $a; echo PASS rotten";
    const STORED: &[u8] = b"\n9998\n9999\n";
    let (mut job, name) = killed_with_files(place, user, "rotten", SCRIPT)?;
    let mut flipped = 0;
    for chunk in io("list", fs::read_dir(job.dir().join("chunks")))?.flatten() {
        let mut bytes = io("read", fs::read(chunk.path()))?;
        for at in 0..bytes.len().saturating_sub(STORED.len()) {
            if bytes[at..].starts_with(STORED) {
                bytes[at] ^= 1;
                flipped += 1;
            }
        }
        io("write", fs::write(chunk.path(), bytes))?;
    }
    want(flipped == 1, || format!("stored {flipped} times"))?;
    job.restart(&[])?;
    runs(&job)?;
    job.checkpoint()?;
    job.kill_all()?;
    io("remove", fs::remove_file(name.trim_end()))?;
    job.restart(&["--generation", "2"])?;
    runs(&job)?;
    io("write", fs::write(job.work.join("go-on"), ""))?;
    job.verdict(false, LIMIT)?;
    want(job.output_text().lines().any(|l| l == "20000"), || job.output_text())
}

/// `sort` comes back to the files that it has filled, from every moment.
fn sorted(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    const SCRIPT: &str = "seq 200000 | rev >numbers
        first=$(sort numbers | md5sum); echo >sorted
        while [ ! -e go ]; do
            now=$(sort -S 64k --batch-size=3 --parallel=1 numbers | md5sum)
            [ \"$now\" = \"$first\" ] || { echo FAIL sorted; exit 1; }
        done
        echo PASS sorted";
    let mut job = Job::new(place, "sorted", user)?;
    // Those of the processes that are killed stay.
    let temporary = place.work("temporary", user)?.display().to_string();
    job.set("TMPDIR", &temporary);
    job.launch(&[], &["sh", "-c", SCRIPT].map(String::from))?;
    until("it has sorted once", || job.work.join("sorted").exists())?;
    for n in 0..rounds(6) {
        rng.pause(300);
        let taken = job.checkpoint();
        taken.map_err(|e| format!("round {n}: {e}; {}", job.output_text()))?;
        rng.pause(500);
        job.kill_all()?;
        job.restart(&[])?;
        runs(&job).map_err(|e| format!("round {n}: {e}"))?;
    }
    job.verdict(false, LIMIT)
}

/// Waits until the restarted program runs.
fn runs(job: &Job) -> Result<(), Failure> {
    let running = || job.status().is_ok_and(|s| s["state"] == "running");
    until("the restarted program runs", running).map_err(|e| format!("{e}: {}", job.output_text()))
}

fn until(what: &str, mut is: impl FnMut() -> bool) -> Result<(), Failure> {
    let end = Instant::now() + LIMIT;
    while !is() {
        want(Instant::now() < end, || format!("not within {LIMIT:?}: {what}"))?;
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

fn overwrite(path: &Path, bytes: usize) -> Result<(), Failure> {
    use std::os::unix::fs::FileExt;
    let file = io("open", fs::File::options().write(true).open(path))?;
    io("write", file.write_all_at(&vec![2u8; bytes], 0))
}

/// What comes back with each choice of what is saved, and what is said of the rest.
fn choices(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    for (options, expected) in [
        (&[][..], &["small", "large"][..]),
        (&["--save-open-files=2M"], &["small"]),
        (&["--save-open-files=none"], &[]),
        (&["--save-open-files=all"], &["small", "large", "log"]),
        (&["--save-open-files"], &["small", "large", "log"]),
    ] {
        let (said, held) = overwritten_later(place, user, options)?;
        want(held == expected, || {
            format!("{options:?}: {held:?} came back, not {expected:?}")
        })?;
        let named = said.contains("not saved") && said.contains("large") && !said.contains("small");
        want(named == (expected == ["small"]), || format!("{options:?}: {said}"))?;
    }
    Ok(())
}

/// A program outside the job that waits for somebody to read a FIFO goes on waiting, where the job only writes to it.
fn waiting(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    const PROGRAM: &str = "import os, time
os.mkfifo('fifo')
both = os.open('fifo', os.O_RDWR)
os.open('fifo', os.O_WRONLY)
os.close(both)
open('ready', 'w')
time.sleep(1000)";
    let mut job = Job::new(place, "waiting", user)?;
    job.launch(&[], &["python3", "-c", PROGRAM].map(String::from))?;
    until("the program is ready", || job.work.join("ready").exists())?;
    let fifo = job.work.join("fifo");
    let opened = std::thread::spawn(move || fs::File::options().write(true).open(fifo));
    std::thread::sleep(Duration::from_millis(300));
    let before = opened.is_finished();
    job.checkpoint()?;
    std::thread::sleep(Duration::from_millis(300));
    let after = opened.is_finished();
    want(!before && !after, || format!("somebody seems to read it: {before}, {after}"))?;
    job.kill_all()?;
    // Lets the thread go.
    io("read", fs::File::open(job.work.join("fifo")))?;
    opened
        .join()
        .map_err(|_| "the thread".to_owned())?
        .map(drop)
        .map_err(|e| e.to_string())
}

fn main() {
    let mut target = Target::new("files", &["fd_overwrite", "fd_renamed"]);
    let tests: [(&str, Test); 7] = [
        ("passed_on", passed_on),
        ("rotten", rotten),
        ("sorted", sorted),
        ("overwritten", overwritten),
        ("renamed", renamed),
        ("choices", choices),
        ("waiting", waiting),
    ];
    for (name, test) in tests {
        target.by_user(name, |_| true, test);
    }
    target.run();
}
