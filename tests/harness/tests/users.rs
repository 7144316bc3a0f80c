//! Other users of the machine: they can neither read a job's checkpoints, nor command it, nor make its owner or root do
//! harm by what they put in the way.
//!
//! Only root can become other users, so these checks need a harness that is root's.

use belay_tests::expect::{io, refusal, refused, want};
use belay_tests::job::{output, show, text, Job};
use belay_tests::place::{am_root, Place, User, NOBODY};
use belay_tests::target::Target;
use belay_tests::Failure;
use std::os::unix::fs::{lchown, symlink, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);
/// The other user.
const STRANGER: u32 = NOBODY - 1;

type Test = fn(&Place, User) -> Result<(), Failure>;

fn mode(path: &Path, mode: u32) -> Result<(), Failure> {
    io("chmod", std::fs::set_permissions(path, PermissionsExt::from_mode(mode)))
}

/// A command of the stranger's, with nothing of ours open.
fn as_stranger(argv: &[&str], dir: &Path) -> Result<Output, Failure> {
    let mut c = Command::new("setpriv");
    c.arg(format!("--reuid={STRANGER}"))
        .arg(format!("--regid={STRANGER}"))
        .args(["--clear-groups", "--"])
        .args(argv);
    c.current_dir(dir).env_clear().env("PATH", "/usr/bin:/bin");
    output(c, LIMIT)
}

/// A launched job with one checkpoint.
fn job(place: &Place, user: User, label: &str) -> Result<Job, Failure> {
    let mut job = Job::new(place, label, user)?;
    run_target(place, &mut job)?;
    Ok(job)
}

fn run_target(place: &Place, job: &mut Job) -> Result<(), Failure> {
    job.launch(
        &[],
        &[place.programs().join("fault_target").display().to_string(), "1".into()],
    )?;
    job.progress(LIMIT)?;
    job.checkpoint()
}

fn nothing_can_be_read(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = job(place, user, "read")?;
    let dir = job.dir().display().to_string();
    for argv in [
        vec!["ls", &dir],
        vec!["cat", &format!("{dir}/job.json")],
        vec!["cat", &format!("{dir}/gen/000001/job.bimg")],
        vec!["cat", &format!("{dir}/chunks/pages-00000001.bpg")],
    ] {
        let o = as_stranger(&argv, &job.work)?;
        want(!o.status.success() && o.stdout.is_empty(), || {
            format!("{argv:?} as another user: {}: {}", show(o.status), text(&o))
        })?;
    }
    // The directory alone must not be what protects them: it can be moved, copied, or opened by mistake.
    for sub in ["", "gen", "gen/000001", "chunks", "log"] {
        mode(&job.dir().join(sub), 0o755)?;
    }
    let o = as_stranger(&["find", &dir, "-type", "f", "-readable"], &job.work)?;
    want(o.stdout.is_empty(), || {
        format!("in open directories another user can read {}", text(&o))
    })?;
    mode(&job.dir(), 0o700)?;
    job.verdict(false, LIMIT)
}

fn nothing_can_be_commanded(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = job(place, user, "command")?;
    let dir = job.dir().display().to_string();
    let belay = place.belay().display().to_string();
    for open in [0o700, 0o755] {
        mode(&job.dir(), open)?;
        for verb in ["status", "list", "verify", "checkpoint", "stop", "restart", "gc"] {
            let o = as_stranger(&[&belay, verb, &dir], &job.work)?;
            let said = refusal(&o).map_err(|e| format!("belay {verb} as another user: {e}"))?;
            want(said.contains("user") || said.contains("permission"), || {
                format!("belay {verb}: {said}")
            })?;
        }
        refusal(&as_stranger(
            &[&belay, "launch", "--ckpt-dir", &dir, "--", "true"],
            &job.work,
        )?)?;
    }
    // Straight to the socket.
    let ask = "import socket,sys\n\
               s=socket.socket(socket.AF_UNIX)\n\
               s.connect(sys.argv[1])\n\
               print(s.recv(4096))\n\
               try: s.sendall(b'{\"op\":\"checkpoint\",\"then_stop\":true}\\n'); print(s.recv(4096))\n\
               except OSError as e: print(e)";
    let socket = job.dir().join("control.sock");
    let connect = || as_stranger(&["python3", "-c", ask, &socket.display().to_string()], &job.work);
    let o = connect()?;
    want(!o.status.success() && text(&o).contains("PermissionError"), || {
        format!("another user connects to the socket: {}", text(&o))
    })?;
    // With the socket open to all the agent itself knows who asks.
    mode(&socket, 0o666)?;
    let o = connect()?;
    want(text(&o).contains("not_ours"), || {
        format!("the agent answers another user: {}", text(&o))
    })?;
    mode(&job.dir(), 0o700)?;
    let o = output(job.belay(&["list", &dir, "--json"]), LIMIT)?;
    want(text(&o).matches("\"generation\"").count() == 1, || {
        format!("another user has made a checkpoint: {}", text(&o))
    })?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

fn what_strangers_put_in_the_way(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = job(place, user, "planted")?;
    job.kill_all()?;
    let dir = job.dir().display().to_string();
    // A checkpoint of another user's.
    let planted = job.work.join("planted");
    let o = io("copy", Command::new("cp").args(["-a", &dir]).arg(&planted).output())?;
    want(o.status.success(), || text(&o))?;
    let theirs = planted.display().to_string();
    let chown = |what: &str| {
        io(
            "chown",
            Command::new("chown").args(["-R", &STRANGER.to_string(), what]).output(),
        )
    };
    chown(&format!("{theirs}/gen/000001/job.bimg"))?;
    refused(
        &output(job.belay(&["restart", &theirs]), LIMIT)?,
        &["job.bimg", "belongs to user"],
    )?;
    chown(&theirs)?;
    refused(&output(job.belay(&["restart", &theirs]), LIMIT)?, &["belongs to user"])?;
    let launch = job.belay(&["launch", "--ckpt-dir", &theirs, "--", "true"]);
    refusal(&output(launch, LIMIT)?)?;
    // Another user's link to our own directory could lead elsewhere a moment later.
    let link = job.work.join("link");
    io("link", symlink(job.dir(), &link))?;
    io("chown", lchown(&link, Some(STRANGER), Some(STRANGER)))?;
    let name = link.display().to_string();
    for verb in ["restart", "gc", "list"] {
        refused(
            &output(job.belay(&[verb, &name]), LIMIT)?,
            &["symbolic link", "belongs to user"],
        )?;
    }
    // Our own link is as good as the directory.
    io("unlink", std::fs::remove_file(&link))?;
    io("link", symlink(job.dir(), &link))?;
    if user == User::Ordinary {
        io("chown", lchown(&link, Some(NOBODY), Some(NOBODY)))?;
    }
    let o = output(job.belay(&["list", &name]), LIMIT)?;
    want(o.status.success(), || text(&o))
}

/// Root may look at any job. What it finds there must neither keep it waiting nor be read without end, nor command its terminal.
fn root_looks_at_anything(place: &Place, user: User) -> Result<(), Failure> {
    if user == User::Root {
        return Ok(());
    }
    let mut job = job(place, user, "hostile")?;
    job.kill_all()?;
    let root = Job::new(place, "hostile-root", User::Root)?;
    let dir = job.dir();
    let look = |verb: &str| output(root.belay(&[verb, &dir.display().to_string()]), LIMIT);
    let manifest = dir.join("gen/000001/manifest.json");
    let saved = io("read", std::fs::read(&manifest))?;
    for hostile in ["fifo", "/dev/zero", "escape"] {
        io("unlink", std::fs::remove_file(&manifest))?;
        match hostile {
            "fifo" => drop(io("mkfifo", Command::new("mkfifo").arg(&manifest).output())?),
            "escape" => io("write", std::fs::write(&manifest, "{\"\x1b]0;owned\x07\":1}"))?,
            device => io("link", symlink(device, &manifest))?,
        }
        for verb in ["list", "verify", "status"] {
            let o = look(verb).map_err(|e| format!("{hostile}: {e}"))?;
            let said = text(&o);
            want(said.contains("manifest.json") && !said.contains('\x1b'), || {
                format!("belay {verb} with {hostile}: {}: {said}", show(o.status))
            })?;
        }
    }
    io("unlink", std::fs::remove_file(&manifest))?;
    io("write", std::fs::write(&manifest, saved))?;
    let description = dir.join("job.json");
    io("unlink", std::fs::remove_file(&description))?;
    io("mkfifo", Command::new("mkfifo").arg(&description).output())?;
    refused(&look("status")?, &["job.json", "not a regular file"])
}

/// Puts a new file of root's where the job looks for it.
fn put(job: &Job, text: &str, bits: u32) -> Result<(), Failure> {
    let new = job.work.join("new");
    io("write a file", std::fs::write(&new, text))?;
    mode(&new, bits)?;
    io("give it its name", std::fs::rename(new, job.work.join("theirs")))
}

/// A job that has a file of root's open. It is made after the launch: older ones are input, which is not saved unasked.
fn reader(place: &Place, user: User, label: &str, bits: u32) -> Result<Job, Failure> {
    const PROGRAM: &str = ": > ready; while [ ! -e theirs ]; do sleep 0.02; done; exec 3< theirs; : > open; while [ ! -e go ]; do sleep 0.02; done; read -r line <&3; echo \"got $line\"";
    let mut job = Job::new(place, label, user)?;
    job.launch(&[], &["/bin/sh", "-c", PROGRAM].map(str::to_owned))?;
    made(&job, "ready")?;
    put(&job, "what they wrote\n", bits)?;
    made(&job, "open")?;
    Ok(job)
}

/// Launches a program that makes the file `open` when it has opened what it needs.
fn launch_opened(job: &mut Job, program: &[&str]) -> Result<(), Failure> {
    let program: Vec<String> = program.iter().map(|w| (*w).to_owned()).collect();
    job.launch(&[], &program)?;
    made(job, "open")
}

/// Waits until the job's program has made the file `name`.
fn made(job: &Job, name: &str) -> Result<(), Failure> {
    let end = Instant::now() + LIMIT;
    while !job.work.join(name).exists() {
        want(Instant::now() < end, || format!("no file {name}; {}", job.output_text()))?;
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Kills and restarts it.
fn again(job: &mut Job) -> Result<(), Failure> {
    job.kill_all()?;
    job.restart(&[])?;
    want(job.answers(LIMIT)?, || format!("restart: {}", job.output_text()))
}

/// What it reads in the end.
fn has_read(mut job: Job) -> Result<(), Failure> {
    io("let it go on", std::fs::write(job.work.join("go"), ""))?;
    let status = job.wait(LIMIT)?;
    want(status.success() && job.output_text().ends_with("got what they wrote"), || {
        format!("{}: {}", show(status), job.output_text())
    })
}

/// A file of root's that the job had open, and that root has replaced since the checkpoint, comes back at a restart;
/// for an ordinary user without its name, so that root's new one stays.
fn replaced_file_of_others(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = reader(place, user, "theirs", 0o644)?;
    for _ in 0..3 {
        job.checkpoint()?;
        put(&job, LATER, 0o644)?;
        again(&mut job)?;
        has_later(&job, user)?;
    }
    has_read(job)
}

/// The same where root has written into it.
fn changed_file_of_others(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = reader(place, user, "changed", 0o644)?;
    job.checkpoint()?;
    io("write the file", std::fs::write(job.work.join("theirs"), LATER))?;
    again(&mut job)?;
    has_later(&job, user)?;
    has_read(job)
}

const LATER: &str = "what they wrote later\n";

fn has_later(job: &Job, user: User) -> Result<(), Failure> {
    let there = io("read the file", std::fs::read_to_string(job.work.join("theirs")))?;
    want((there == LATER) != matches!(user, User::Root), || {
        format!("the file has {there:?} in it")
    })
}

/// A program of root's that runs as root wherever it lies, and is gone at the restart, does not run as the job's user
/// after it: its contents are somebody else's.
fn program_of_others(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = reader(place, user, "program", 0o4755)?;
    job.checkpoint()?;
    let path = job.work.join("theirs");
    io("remove the file", std::fs::remove_file(&path))?;
    again(&mut job)?;
    let m = io("stat the file", std::fs::metadata(&path))?;
    let (owner, bits) = match user {
        User::Root => (0, 0o4755),
        User::Ordinary => (NOBODY, 0o700),
    };
    want((m.uid(), m.mode() & 0o7777) == (owner, bits), || {
        format!("owner {}, mode {:o}", m.uid(), m.mode())
    })?;
    has_read(job)
}

/// A directory of somebody else is gone at the restart, with a FIFO and the name of a socket in it that are theirs too:
/// root's job makes them as they were, an ordinary user's as its own and closed to others.
fn objects_of_others(place: &Place, user: User) -> Result<(), Failure> {
    const PROGRAM: &str = "
import os, socket, time
fifo = os.open('theirs.d/fifo', os.O_RDWR)
os.write(fifo, b'they wrote')
server = socket.socket(socket.AF_UNIX)
server.bind('theirs.d/socket')
server.listen()
open('open', 'w')
while not os.path.exists('go'):
    time.sleep(0.02)
client = socket.socket(socket.AF_UNIX)
client.connect('theirs.d/socket')
client.send(b'what ')
print('got', server.accept()[0].recv(99).decode() + os.read(fifo, 99).decode(), end='', flush=True)
";
    let mut job = Job::new(place, "objects", user)?;
    let (dir, fifo, socket) = (
        job.work.join("theirs.d"),
        job.work.join("theirs.d/fifo"),
        job.work.join("theirs.d/socket"),
    );
    io("make a directory", std::fs::create_dir(&dir))?;
    io("mkfifo", Command::new("mkfifo").arg(&fifo).output())?;
    let whose = match user {
        User::Root => NOBODY,
        User::Ordinary => 0,
    };
    let give = |path: &Path, bits| {
        io("give it away", std::os::unix::fs::chown(path, Some(whose), Some(whose)))?;
        mode(path, bits)
    };
    give(&dir, 0o2777)?;
    give(&fifo, 0o666)?;
    launch_opened(&mut job, &["/usr/bin/python3", "-c", PROGRAM])?;
    give(&socket, 0o606)?;
    for _ in 0..2 {
        job.checkpoint()?;
        job.kill_all()?;
        io("remove the directory", std::fs::remove_dir_all(&dir))?;
        job.restart(&[])?;
        want(job.answers(LIMIT)?, || format!("restart: {}", job.output_text()))?;
        for (path, bits) in [(&dir, 0o2777), (&fifo, 0o666), (&socket, 0o606)] {
            let m = io("stat what came back", std::fs::metadata(path))?;
            let bits = match user {
                User::Root => bits,
                User::Ordinary => bits & 0o700,
            };
            want((m.uid(), m.gid(), m.mode() & 0o7777) == (NOBODY, NOBODY, bits), || {
                format!("{}: owner {}, mode {:o}", path.display(), m.uid(), m.mode())
            })?;
        }
    }
    has_read(job)
}

/// `state` and `running` as the owner and as root see them, before and after restarts: finished, killed, restarting and
/// running are four things, and root may command what it sees.
fn state_for_owner_and_root(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = match user {
        User::Root => Job::new(place, "state", user)?,
        User::Ordinary => Job::of_user(place, "state", STRANGER)?,
    };
    run_target(place, &mut job)?;
    let root = Job::new(place, "state-root", User::Root)?;
    let dir = job.dir().display().to_string();
    let seen = |job: &Job| -> Result<[String; 2], Failure> {
        let of = |who: &Job| {
            let o = output(who.belay(&["status", &dir, "--json"]), LIMIT)?;
            let s: serde_json::Value = serde_json::from_slice(&o.stdout).map_err(|e| format!("{e}: {}", text(&o)))?;
            Ok::<_, Failure>(format!("{} {}", s["state"], s["running"]).replace('"', ""))
        };
        Ok([of(job)?, of(&root)?])
    };
    let is = |job: &Job, state: &str| {
        let seen = seen(job)?;
        want(seen.iter().all(|s| s == state), || {
            format!("not {state} but {} for the owner, {} for root", seen[0], seen[1])
        })
    };
    is(&job, "running true")?;
    for _ in 0..2 {
        job.kill_all()?;
        is(&job, "killed false")?;
        job.restart(&[])?;
        // Whatever is seen on the way, in this order and nothing else.
        let way = ["killed false", "restarting false", "running true"];
        let (mut at, end) = ([0; 2], Instant::now() + LIMIT);
        while at != [2; 2] {
            want(Instant::now() < end && !job.has_ended()?, || {
                format!("restart: {}", job.output_text())
            })?;
            for (at, state) in at.iter_mut().zip(seen(&job)?) {
                let now = way.iter().position(|w| *w == state).filter(|now| now >= at);
                *at = now.ok_or_else(|| format!("{state} after {}", way[*at]))?;
            }
        }
        let o = output(root.belay(&["checkpoint", &dir]), LIMIT)?;
        want(o.status.success(), || {
            format!("root's checkpoint after a restart: {}: {}", show(o.status), text(&o))
        })?;
    }
    let agent = job.status()?["agent"]["host_pid"].to_string();
    io("kill the agent", Command::new("kill").args(["-9", &agent]).status())?;
    let end = Instant::now() + LIMIT;
    while !job.output_text().contains("ended unexpectedly") {
        want(Instant::now() < end, || job.output_text())?;
        std::thread::sleep(Duration::from_millis(5));
    }
    is(&job, "unattended false")?;
    job.kill_all()?;
    is(&job, "killed false")?;
    job.restart(&[])?;
    want(job.answers(LIMIT)?, || format!("restart: {}", job.output_text()))?;
    job.verdict(false, LIMIT)?;
    is(&job, "finished false")
}

/// A HOME of root's that the user may not enter is told and left out; a file of somebody else's that can be read there is refused.
fn home_of_others(place: &Place, user: User) -> Result<(), Failure> {
    if user == User::Root {
        return Ok(());
    }
    let mut job = Job::new(place, "home", user)?;
    let home = job.work.join("theirs");
    let config = home.join(".config/belay/belay.toml");
    io("make a home", std::fs::create_dir_all(home.join(".config/belay")))?;
    io("write a file", std::fs::write(&config, "[checkpoints]\nkeep = 7\n"))?;
    job.set("HOME", &home.display().to_string());
    let dir = job.dir().display().to_string();
    let launch = |job: &Job| output(job.belay(&["launch", "--ckpt-dir", &dir, "--", "true"]), LIMIT);
    io("chown", std::os::unix::fs::chown(&config, Some(STRANGER), Some(STRANGER)))?;
    refused(&launch(&job)?, &["belay.toml", "not yours alone"])?;
    // A link of theirs, to a file of root's: what that says they may have chosen.
    io("remove", std::fs::remove_file(&config))?;
    let of_root = job.work.join("of-root");
    io("write a file", std::fs::write(&of_root, "[checkpoints]\nkeep = 7\n"))?;
    io("link", std::os::unix::fs::symlink(&of_root, &config))?;
    io("chown", std::os::unix::fs::lchown(&config, Some(STRANGER), Some(STRANGER)))?;
    refused(&launch(&job)?, &["belay.toml", "not yours alone", "symbolic link"])?;
    // A file of the user's own that a group of others may write.
    io("remove", std::fs::remove_file(&config))?;
    io("write a file", std::fs::write(&config, "[checkpoints]\nkeep = 7\n"))?;
    io("chown", std::os::unix::fs::chown(&config, Some(NOBODY), Some(STRANGER)))?;
    mode(&config, 0o664)?;
    refused(&launch(&job)?, &["belay.toml", "not yours alone", "664"])?;
    mode(&home, 0o700)?;
    let o = launch(&job)?;
    want(o.status.success() && text(&o).contains("is left out"), || {
        format!("{}: {}", show(o.status), text(&o))
    })
}

fn main() {
    if !am_root() {
        println!("\ntest result: ok. 0 passed; 0 failed; 10 ignored (only root can become other users)");
        return;
    }
    let mut target = Target::new("users", &["fault_target"]);
    target.as_every_user();
    let tests: [(&str, Test); 10] = [
        ("nothing_can_be_read", nothing_can_be_read),
        ("nothing_can_be_commanded", nothing_can_be_commanded),
        ("what_strangers_put_in_the_way", what_strangers_put_in_the_way),
        ("root_looks_at_anything", root_looks_at_anything),
        ("replaced_file_of_others", replaced_file_of_others),
        ("changed_file_of_others", changed_file_of_others),
        ("program_of_others", program_of_others),
        ("objects_of_others", objects_of_others),
        ("state_for_owner_and_root", state_for_owner_and_root),
        ("home_of_others", home_of_others),
    ];
    for (name, test) in tests {
        target.by_user(name, |_| true, move |place, user, _| test(place, user));
    }
    target.run();
}
