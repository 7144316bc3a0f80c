//! Somebody who can write a directory on the way to what a job has open, and exchanges it while the job is down, or in
//! the middle of its restart.

use super::{mode, LIMIT, STRANGER};
use belay_image::model::FileIdentity;
use belay_tests::expect::{io, want};
use belay_tests::job::{show, Job};
use belay_tests::place::{Place, User};
use belay_tests::Failure;
use std::os::unix::fs::{chown, MetadataExt};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// More than a restart makes again before somebody can have exchanged the directory.
const MANY: usize = 400;

/// An ordinary user whom no user namespace shows as somebody else.
const DAEMON: u32 = 1;

/// Gives `path` to the job's user.
fn owned(user: User, path: &Path) -> Result<(), Failure> {
    let id = if user == User::Ordinary { DAEMON } else { 0 };
    io("chown", chown(path, Some(id), Some(id)))
}

/// `shared`, where everybody may write, and in it `d`, which is the user's.
fn shared(job: &Job, user: User) -> Result<PathBuf, Failure> {
    let shared = job.work.join("shared");
    io("make", std::fs::create_dir_all(shared.join("d")))?;
    mode(&shared, 0o777)?;
    mode(&shared.join("d"), 0o755)?;
    owned(user, &shared.join("d"))?;
    Ok(shared)
}

/// A job that has not begun, and its shared directory.
fn planned(place: &Place, user: User, label: &str) -> Result<(Job, PathBuf), Failure> {
    let job = match user {
        User::Root => Job::new(place, label, user)?,
        User::Ordinary => Job::of_user(place, label, DAEMON)?,
    };
    let shared = shared(&job, user)?;
    Ok((job, shared))
}

/// Launches a program in python, which makes the file `open` when it is ready, and makes a checkpoint with all open files.
fn launched(place: &Place, user: User, label: &str, program: &str) -> Result<(Job, PathBuf), Failure> {
    let (mut job, shared) = planned(place, user, label)?;
    run_to_checkpoint(&mut job, program)?;
    Ok((job, shared))
}

/// The same of a job that has not begun.
fn run_to_checkpoint(job: &mut Job, program: &str) -> Result<(), Failure> {
    job.launch(
        &["--save-open-files".into()],
        &["/usr/bin/python3", "-c", program].map(str::to_owned),
    )?;
    let end = Instant::now() + LIMIT;
    while !job.work.join("open").exists() {
        want(Instant::now() < end && !job.has_ended()?, || job.output_text())?;
        std::thread::sleep(Duration::from_millis(5));
    }
    job.checkpoint()?;
    job.kill_all()
}

/// What the stranger runs in `shared`.
struct Stranger(Child);

impl Stranger {
    fn start(shared: &Path, script: &str) -> Result<Self, Failure> {
        let mut c = Command::new("setpriv");
        c.arg(format!("--reuid={STRANGER}"))
            .arg(format!("--regid={STRANGER}"))
            .args(["--clear-groups", "--", "/usr/bin/python3", "-c", script])
            .stdin(Stdio::null())
            .current_dir(shared);
        io("start", c.spawn()).map(Self)
    }

    /// Waits until it has done its work.
    fn done(mut self) -> Result<(), Failure> {
        let status = io("wait", self.0.wait())?;
        want(status.success(), || format!("the stranger: {}", show(status)))
    }
}

/// Waits until the stranger has made the link.
fn ready(shared: &Path) -> Result<(), Failure> {
    let end = Instant::now() + LIMIT;
    while std::fs::symlink_metadata(shared.join("trap")).is_err() {
        want(Instant::now() < end, || "no stranger".into())?;
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

impl Drop for Stranger {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Restarts, while a stranger puts a link to a directory of the user's in the place of `d` as soon as the first of what
/// is made again is there. The restart is refused, and the directory is as it was, but for so many empty files at most.
fn exchanged_in_the_middle(place: &Place, user: User, label: &str, program: &str, strays: usize) -> Result<(), Failure> {
    let (mut job, shared) = launched(place, user, label, program)?;
    let victim = job.work.join("victim");
    io("make", std::fs::create_dir(&victim))?;
    // A server of the user's that has nothing to do with the job.
    let server = io("bind", UnixDatagram::bind(victim.join("0")))?;
    for path in [&victim, &victim.join("0")] {
        owned(user, path)?;
    }
    let d = shared.join("d");
    for e in io("list", std::fs::read_dir(&d))?.flatten() {
        io("remove", std::fs::remove_file(e.path()))?;
    }
    // Ends when nobody restarts anything.
    let script = format!(
        "import os, time
os.symlink({:?}, 'trap')
end = time.monotonic() + 60
while not os.path.lexists('d/0'):
    assert time.monotonic() < end
os.rename('d', 'away')
os.rename('trap', 'd')",
        victim.display().to_string()
    );
    let stranger = Stranger::start(&shared, &script)?;
    ready(&shared)?;
    job.restart(&[])?;
    stranger.done()?;
    let goes_on = job.answers(LIMIT)?;
    let said = job.output_text();
    let mut names: Vec<_> = io("list", std::fs::read_dir(&victim))?
        .flatten()
        .map(|e| e.file_name())
        .collect();
    names.retain(|name| name != "0");
    want(victim.join("0").exists() && names.len() <= strays, || {
        format!("what the link leads to has lost its file, or holds {names:?}: {said}")
    })?;
    drop(server);
    want(!goes_on && said.contains("restart again"), || {
        format!("the job goes on: {goes_on}: {said}")
    })
}

/// Names of sockets that their program has removed. `bind` goes by path: it may just have begun.
pub(crate) fn sockets(place: &Place, user: User) -> Result<(), Failure> {
    let program = format!(
        "
import os, socket, time
all = []
for n in range({MANY}):
    all.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    all[-1].bind('shared/d/%d' % n)
    os.unlink('shared/d/%d' % n)
open('open', 'w')
while True: time.sleep(1)"
    );
    exchanged_in_the_middle(place, user, "way-sockets", &program, 1)
}

/// FIFOs that are gone.
pub(crate) fn fifos(place: &Place, user: User) -> Result<(), Failure> {
    let program = format!(
        "
import os, time
for n in range({MANY}):
    os.mkfifo('shared/d/%d' % n)
    os.open('shared/d/%d' % n, os.O_RDWR)
open('open', 'w')
while True: time.sleep(1)"
    );
    exchanged_in_the_middle(place, user, "way-fifos", &program, 0)
}

/// A directory in which a process stands, or that it has open, is somebody else's after the restart only where it was before.
pub(crate) fn directories(place: &Place, user: User) -> Result<(), Failure> {
    for (label, enter) in [
        ("way-cwd", "os.chdir('shared/d')"),
        (
            "way-thread",
            "import ctypes, threading\nready = threading.Event()\ndef stand():\n ctypes.CDLL(None).unshare(0x200)\n os.chdir('shared/d')\n ready.set()\n time.sleep(1000)\nthreading.Thread(target=stand, daemon=True).start()\nready.wait()",
        ),
        ("way-open", "f = os.open('shared/d', os.O_RDONLY | os.O_DIRECTORY)"),
    ] {
        let program = format!("import os, time\n{enter}\nopen(os.environ['HOME'] + '/open', 'w')\nwhile True: time.sleep(1)");
        let (mut job, shared) = launched(place, user, label, &program)?;
        Stranger::start(&shared, "import os\nos.rename('d', 'away')\nos.mkdir('d')")?.done()?;
        job.restart(&[])?;
        let ended = job.answers(LIMIT).map(|answers| !answers)?;
        want(ended, || {
            format!(
                "{label}: the job goes on in a directory of another user's: {}",
                job.output_text()
            )
        })?;
        let (status, said) = (job.wait(LIMIT)?, job.output_text());
        let named = said.contains("belongs to user") && said.contains("shared/d");
        want(!status.success() && named, || format!("{label}: {}: {said}", show(status)))?;
        // The old one is as good as ever.
        io("remove", std::fs::remove_dir(shared.join("d")))?;
        io("bring back", std::fs::rename(shared.join("away"), shared.join("d")))?;
        job.restart(&[])?;
        want(job.answers(LIMIT)?, || job.output_text())?;
        job.kill_all()?;
    }
    Ok(())
}

/// A directory that is gone is made again where it was missing: not through a link that a stranger has put there since,
/// to a directory of the user's in which something has a name that the job's had.
pub(crate) fn missing(place: &Place, user: User) -> Result<(), Failure> {
    const FILES: &str = "
def make(path):
    all.append(open(path, 'w'))
    all[-1].write('of the job')
    all[-1].flush()";
    const FIFOS: &str = "
def make(path):
    os.mkfifo(path)
    all.append(os.open(path, os.O_RDWR))";
    // As servers do that must not be found before they are ready.
    const SOCKETS: &str = "
def make(path):
    all.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    all[-1].bind(path + '-new')
    os.rename(path + '-new', path)";
    for (label, make) in [
        ("missing-files", FILES),
        ("missing-fifos", FIFOS),
        ("missing-sockets", SOCKETS),
    ] {
        let program = format!(
            "import os, socket, time
all = []
{make}
os.mkdir('shared/e')
for n in range({MANY}): make('shared/e/%d' % n)
make('shared/d/x')
open('open', 'w')
while True: time.sleep(1)"
        );
        let (mut job, shared) = launched(place, user, label, &program)?;
        let victim = job.work.join("victim");
        io("make", std::fs::create_dir(&victim))?;
        let own = victim.join("x");
        if label == "missing-sockets" {
            drop(io("bind", UnixDatagram::bind(&own))?);
        } else {
            io("write", std::fs::write(&own, "the user's own"))?;
        }
        for path in [&victim, &own] {
            owned(user, path)?;
        }
        let before = io("stat", std::fs::metadata(&own))?;
        let mut attempts = 0;
        while !linked_in_the_middle(&mut job, &shared, &victim)? {
            attempts += 1;
            want(attempts < 5, || format!("{label}: the stranger is always too late"))?;
        }
        let said = job.output_text();
        let names = io("list", std::fs::read_dir(&victim))?.count();
        let now = io("stat", std::fs::metadata(&own))?;
        let as_it_was = (before.ino(), before.len(), before.mode()) == (now.ino(), now.len(), now.mode());
        want(names == 1 && as_it_was, || {
            format!("{label}: what the link leads to holds {names} files, its own as it was: {as_it_was}: {said}")
        })?;
        let goes_on = job.answers(LIMIT)?;
        want(!goes_on && said.contains("restart again"), || {
            format!("{label}: the job goes on: {goes_on}: {said}")
        })?;
    }
    Ok(())
}

/// Restarts without what is in `e` and without `d`, in whose place a stranger puts a link to `victim` when the first of
/// `e` is there; says whether that was before the restart had made `d`.
fn linked_in_the_middle(job: &mut Job, shared: &Path, victim: &Path) -> Result<bool, Failure> {
    for dir in ["e", "d"].map(|name| shared.join(name)) {
        for e in io("list", std::fs::read_dir(&dir)).into_iter().flatten().flatten() {
            io("remove", std::fs::remove_file(e.path()))?;
        }
    }
    drop(std::fs::remove_dir(shared.join("d")));
    drop(std::fs::remove_file(shared.join("trap")));
    let script = format!(
        "import os, time
os.symlink({:?}, 'trap')
end = time.monotonic() + 60
while not any(name.startswith('0') for name in os.listdir('e')):
    assert time.monotonic() < end
try: os.rename('trap', 'd')
except OSError: pass",
        victim.display().to_string()
    );
    let stranger = Stranger::start(shared, &script)?;
    ready(shared)?;
    job.restart(&[])?;
    stranger.done()?;
    let goes_on = job.answers(LIMIT)?;
    let in_time = io("look", std::fs::symlink_metadata(shared.join("d")))?.is_symlink();
    if goes_on && !in_time {
        job.kill_all()?;
    }
    Ok(in_time)
}

/// What a job sends to a log daemon goes on to nobody else who has taken the daemon's name since; but to a daemon that
/// was that user's from the beginning.
pub(crate) fn peers(place: &Place, user: User) -> Result<(), Failure> {
    const PROGRAM: &str = "
import os, socket, time
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.connect('shared/log')
s.setblocking(False)
open('open', 'w')
while True:
    try: s.send(b'of the job')
    except OSError: pass
    time.sleep(0.002)";
    const SERVER: &str = "
import os, socket
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
if os.path.lexists('log'): os.unlink('log')
os.chdir('..')
s.bind('shared/log')
os.chdir('shared')
os.chmod('log', 0o777)
open('up', 'w')
while True:
    s.recv(100)
    open('got', 'w')";
    for strange_before in [false, true] {
        let (mut job, shared) = planned(place, user, &format!("way-peers-{strange_before}"))?;
        let (log, got) = (shared.join("log"), shared.join("got"));
        let first = match strange_before {
            true => Err(server(&shared, SERVER)?),
            false => Ok(io("bind", UnixDatagram::bind(&log))?),
        };
        if !strange_before {
            owned(user, &log)?;
        }
        run_to_checkpoint(&mut job, PROGRAM)?;
        drop(first);
        drop(std::fs::remove_file(&got));
        let _server = server(&shared, SERVER)?;
        job.restart(&[])?;
        want(job.answers(LIMIT)?, || job.output_text())?;
        let end = Instant::now() + if strange_before { LIMIT } else { Duration::from_millis(500) };
        while !got.exists() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        want(got.exists() == strange_before, || {
            format!("the stranger, whose it was before: {strange_before}: {}", job.output_text())
        })?;
        job.kill_all()?;
    }
    Ok(())
}

/// While a job is restarted, a stranger connects and sends to its sockets all the time: nothing of what the job has
/// said to itself comes to the stranger, and nothing of the stranger's stands before what the job had received.
pub(crate) fn visitors(place: &Place, user: User) -> Result<(), Failure> {
    const PROGRAM: &str = "
import os, socket
name = '\\0belay-visited-%d' % os.getpid()
listener = socket.socket(socket.AF_UNIX); listener.bind(name); listener.listen(3)
beside = socket.socket(socket.AF_UNIX); beside.bind('shared/beside'); os.chmod('shared/beside', 0o777); beside.listen(3)
pairs = []
for n in range(40):
    to = (listener, beside)[n % 2]
    client = socket.socket(socket.AF_UNIX); client.connect(to.getsockname())
    server = to.accept()[0]
    server.send(b'to client %d' % n); client.send(b'to server %d' % n)
    pairs.append((client, server))
said = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); said.bind(name + 'd')
for n in range(5):
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); sender.sendto(b'%d' % n, name + 'd'); sender.close()
with open('shared/name', 'w') as f: f.write(name[1:])
open('open', 'w')
while not os.path.exists('go'): pass
for n, (client, server) in enumerate(pairs):
    client.settimeout(1); server.settimeout(1)
    assert client.recv(100) == b'to client %d' % n, n
    assert server.recv(100) == b'to server %d' % n, n
for n in range(5): assert said.recv(100) == b'%d' % n, n
open('well', 'w')";
    // It also holds what it gets, as long as it can.
    const STRANGER: &str = "
import socket
name = '\\0' + open('name').read()
got, held = open('got', 'w'), []
open('up', 'w')
while True:
    for to in (name, 'beside'):
        s = socket.socket(socket.AF_UNIX); s.setblocking(False)
        try: s.connect(to)
        except OSError: continue
        held.append(s)
    for s in held:
        try: got.write(repr(s.recv(100))); got.flush()
        except OSError: pass
    held = held[-50:]
    d = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); d.setblocking(False)
    try: d.sendto(b'of the stranger', name + 'd')
    except OSError: pass";
    let (mut job, shared) = planned(place, user, "way-visitors")?;
    run_to_checkpoint(&mut job, PROGRAM)?;
    let _stranger = server(&shared, STRANGER)?;
    job.restart(&[])?;
    io("let it go on", std::fs::write(job.work.join("go"), ""))?;
    let end = Instant::now() + LIMIT;
    while !job.work.join("well").exists() && Instant::now() < end && !job.has_ended()? {
        std::thread::sleep(Duration::from_millis(5));
    }
    want(job.work.join("well").exists(), || job.output_text())?;
    let got = io("read", std::fs::read_to_string(shared.join("got")))?;
    want(!got.contains("to client") && !got.contains("to server"), || got)?;
    job.kill_all()
}

/// A server of the stranger's, which is up.
fn server(shared: &Path, script: &str) -> Result<Stranger, Failure> {
    let up = shared.join("up");
    drop(std::fs::remove_file(&up));
    let stranger = Stranger::start(shared, script)?;
    let end = Instant::now() + LIMIT;
    while !up.exists() {
        want(Instant::now() < end, || "no server".into())?;
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(stranger)
}

/// What a stranger has put in the place of the job's program is not mapped, whatever it says that it is: the job goes
/// on with the one of the checkpoint.
pub(crate) fn program(place: &Place, user: User) -> Result<(), Failure> {
    let (mut job, shared) = planned(place, user, "way-program")?;
    let program = shared.join("program");
    io("copy", std::fs::copy(place.programs().join("fault_target"), &program))?;
    mode(&program, 0o755)?;
    owned(user, &program)?;
    job.launch(&[], &[program.display().to_string(), "1".into()])?;
    job.progress(LIMIT)?;
    job.checkpoint()?;
    job.kill_all()?;
    let then = io("look", FileIdentity::of(&program))?;
    // Whoever executes this does not live long.
    const SCRIPT: &str = "import os
data = open('program', 'rb').read()
open('new', 'wb').write(data[:0x1000] + b'\\xcc' * (len(data) - 0x1000))
os.chmod('new', 0o755)
os.rename('new', 'program')";
    Stranger::start(&shared, SCRIPT)?.done()?;
    let now = io("look", FileIdentity::of(&program))?;
    want(then.build_id.is_some() && then.accepts(&now), || {
        format!("{now:?} instead of {then:?}")
    })?;
    job.restart(&[])?;
    want(job.answers(LIMIT)?, || job.output_text())?;
    job.verdict(false, LIMIT)
}
