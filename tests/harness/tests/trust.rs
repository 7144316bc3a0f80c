//! What a job directory holds is its owner's word: whoever else looks at it changes nothing, connects to nobody, opens
//! none of its tiers, and does not wait for it for ever. Nor does its owner believe what no belay has written, or use a
//! directory that others can exchange.
//!
//! Only root can become other users, so these checks need a harness that is root's.

#[path = "trust/astray.rs"]
mod astray;
#[path = "trust/ways.rs"]
mod ways;

use belay_image::manifest::Manifest;
use belay_tests::expect::{io, refused, want};
use belay_tests::job::{output, show, text, Job};
use belay_tests::place::{am_root, Place, User, NOBODY};
use belay_tests::target::Target;
use belay_tests::witness::witness;
use belay_tests::Failure;
use serde_json::{json, Value};
use std::os::unix::fs::{chown, lchown, symlink, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(90);
/// The other user.
const STRANGER: u32 = NOBODY - 1;

type Test = fn(&Place, User) -> Result<(), Failure>;

fn mode(path: &Path, mode: u32) -> Result<(), Failure> {
    io("chmod", std::fs::set_permissions(path, PermissionsExt::from_mode(mode)))
}

/// A directory of the job's user.
fn directory(job: &Job, user: User, name: &str) -> Result<PathBuf, Failure> {
    let dir = job.work.join(name);
    io("make a directory", std::fs::create_dir(&dir))?;
    if user == User::Ordinary {
        io("chown", chown(&dir, Some(NOBODY), Some(NOBODY)))?;
    }
    Ok(dir)
}

/// A job that was killed after a checkpoint that a tier holds too.
fn killed(place: &Place, user: User, label: &str) -> Result<(Job, PathBuf), Failure> {
    let mut job = Job::new(place, label, user)?;
    let tier = directory(&job, user, "tier")?;
    let config = job.work.join("belay.toml");
    let text_of = format!("[[tier]]\nname = \"a\"\nkind = \"pfs\"\npath = \"{}\"\n", tier.display());
    io("write", std::fs::write(&config, text_of))?;
    job.launch(
        &["--config".into(), config.display().to_string()],
        &[place.programs().join("fault_target").display().to_string(), "1".into()],
    )?;
    job.progress(LIMIT)?;
    let o = job.checkpoint_raw(&["--level", "durable"])?;
    want(o.status.success(), || text(&o))?;
    job.kill_all()?;
    Ok((job, tier))
}

fn description(job: &Job) -> Result<Value, Failure> {
    let text = io("read job.json", std::fs::read(job.dir().join("job.json")))?;
    serde_json::from_slice(&text).map_err(|e| e.to_string())
}

fn describe(job: &Job, d: &Value) -> Result<(), Failure> {
    let files = ["job.json", "job.json.copy"].map(|name| job.dir().join(name));
    files
        .iter()
        .try_for_each(|file| io("write job.json", std::fs::write(file, d.to_string())))
}

/// Every file and directory below `dir`, with its length.
fn everything(dir: &Path) -> Vec<(PathBuf, u64)> {
    let mut out = Vec::new();
    for e in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let Ok(m) = e.metadata() else { continue };
        if m.is_dir() {
            out.extend(everything(&e.path()));
        }
        out.push((e.path(), if m.is_dir() { 0 } else { m.len() }));
    }
    out.sort();
    out
}

/// Runs each command that only looks, as `who`: it changes nothing, connects to nobody but the job's agent, and
/// commands no terminal.
fn only_looks(who: &Job, job: &Job, what: &str) -> Result<(), Failure> {
    let dir = job.dir().display().to_string();
    let gen = job.dir().join("gen/000001").display().to_string();
    // Who has which number is the system's to say.
    let fine = [format!("connect {dir}/control.sock"), "connect /var/run/nscd/socket".into()];
    for argv in [
        vec!["verify", &dir],
        vec!["status", &dir],
        vec!["status", &dir, "--json"],
        vec!["list", &dir],
        vec!["list", &dir, "--json"],
        vec!["inspect", &dir],
        vec!["inspect", &gen],
    ] {
        let w = witness(who.belay(&argv))?;
        let said = text(&w.output);
        let bad: Vec<&String> = w.deeds.iter().filter(|d| !fine.contains(d)).collect();
        want(bad.is_empty(), || format!("{what}: belay {argv:?}: {bad:?}: {said}"))?;
        want(!said.contains(['\x1b', '\u{9b}']), || {
            format!("{what}: belay {argv:?} commands the terminal: {said:?}")
        })?;
        want(w.output.status.code().is_some_and(|c| c != 101), || {
            format!("{what}: belay {argv:?}: {}: {said}", show(w.output.status))
        })?;
    }
    Ok(())
}

/// Flips a bit in each file below `dir`.
fn damage(dir: &Path) -> Result<(), Failure> {
    for (path, bytes) in everything(dir).into_iter().filter(|(_, bytes)| *bytes > 0) {
        let mut data = io("read", std::fs::read(&path))?;
        data[bytes as usize / 3] ^= 1;
        io("write", std::fs::write(&path, data))?;
    }
    Ok(())
}

/// Root looks at whatever a user has put into a job directory, and its owner verifies it.
fn looking_changes_nothing(place: &Place, user: User) -> Result<(), Failure> {
    let (job, tier) = killed(place, user, "look")?;
    let root = Job::new(place, "look-root", User::Root)?;
    let good = description(&job)?;
    let o = output(root.belay(&["verify", &job.dir().display().to_string()]), LIMIT)?;
    want(o.status.success(), || text(&o))?;
    if user == User::Ordinary {
        want(text(&o).contains("only the job's owner opens its tiers"), || text(&o))?;
    }
    for (what, change) in [
        ("nothing is wrong", json!({})),
        ("an id that leads elsewhere", json!({ "id": "x/../../made-by-root" })),
        ("a tier's name that leads elsewhere", json!({ "name": "../../made-by-root" })),
        (
            "a tier's name that commands the terminal",
            json!({ "name": "a\x1b]0;owned\x07\u{9b}2J" }),
        ),
        (
            "an object store of somebody's",
            json!({ "kind": "object", "path": null, "url": "s3://bucket/x", "endpoint": "http://127.0.0.1:9", "allow_http": true }),
        ),
    ] {
        let mut d = good.clone();
        for (key, value) in change.as_object().into_iter().flatten() {
            match key.as_str() {
                "id" => d["id"] = value.clone(),
                key => d["config"]["tiers"][0][key] = value.clone(),
            }
        }
        describe(&job, &d)?;
        let before = everything(&job.work);
        // Its owner asks an object store.
        let is_store = what.contains("object store");
        if user == User::Ordinary || !is_store {
            only_looks(&root, &job, what)?;
        }
        if !is_store {
            only_looks(&job, &job, &format!("{what}, as the owner"))?;
        }
        want(everything(&job.work) == before, || format!("{what}: {before:?}"))?;
    }
    // What is damaged on the tier would be marked there, through whatever link lies in the way.
    describe(&job, &good)?;
    damage(&tier)?;
    let victim = root.work.join("victim");
    for folder in io("list", std::fs::read_dir(&tier))?.flatten() {
        io("link", symlink(&victim, folder.path().join("suspect")))?;
        io("link", symlink(&victim, folder.path().join("packs/.tmp-x")))?;
    }
    only_looks(&root, &job, "damage on the tier")?;
    only_looks(&job, &job, "damage on the tier, as the owner")?;
    want(!victim.exists(), || "root has written through a link".into())
}

/// A link in the place of the control socket leads to no other socket of root's.
fn another_socket(place: &Place, user: User) -> Result<(), Failure> {
    let (job, _) = killed(place, user, "socket")?;
    let root = Job::new(place, "socket-root", User::Root)?;
    let path = root.work.join("socket-of-roots");
    let listener = io("listen", UnixListener::bind(&path))?;
    io("set up", listener.set_nonblocking(true))?;
    let socket = job.dir().join("control.sock");
    drop(std::fs::remove_file(&socket));
    io("link", symlink(&path, &socket))?;
    io("chown", lchown(&socket, Some(NOBODY), Some(NOBODY)))?;
    let dir = job.dir().display().to_string();
    for verb in ["status", "checkpoint", "stop"] {
        let o = output(root.belay(&[verb, &dir]), LIMIT)?;
        want(listener.accept().is_err(), || {
            format!("belay {verb} has connected to it: {}", text(&o))
        })?;
    }
    only_looks(&root, &job, "a link in the place of the control socket")
}

/// Values that parse and cannot be: each is refused by name, and no process is aborted.
fn values_that_lie(place: &Place, user: User) -> Result<(), Failure> {
    let (job, _) = killed(place, user, "lies")?;
    let root = Job::new(place, "lies-root", User::Root)?;
    let (good, dir) = (description(&job)?, job.dir().display().to_string());
    for (at, value) in [
        ("/min_gap_s", json!(-1)),
        ("/min_gap_s", json!(1e308)),
        ("/min_gap_s", json!(0)),
        ("/mtti_s", json!(-5)),
        ("/mtti_s", json!(1e308)),
        ("/created_unix_s", json!(u64::MAX)),
        ("/created_ns", json!(u32::MAX)),
        ("/history/run_s", json!(u64::MAX)),
        ("/history/since_unix_s", json!(u64::MAX)),
        ("/lost", json!([["host", u64::MAX]])),
        ("/interval", json!("99999999h")),
        ("/id", json!("../..")),
        ("/id", json!("0123456789abcdef".repeat(100))),
        ("/name", json!("x".repeat(1 << 20))),
        ("/keep", json!(0)),
        ("/config/tiers/0/name", json!("../x")),
        ("/config/tiers/0/path", json!("relative")),
        ("/config/flush/threads", json!(4_000_000_000u32)),
        ("/config/flush/zstd", json!({ "level": 1000 })),
        ("/config/tree/fan_out", json!(0)),
        ("/config/redundancy/group", json!(1_000_000)),
    ] {
        let mut d = good.clone();
        let (above, key) = at.rsplit_once('/').unwrap_or_default();
        let place_of = d.pointer_mut(above).ok_or_else(|| format!("no {above} in job.json"))?;
        place_of[key] = value;
        describe(&job, &d)?;
        for (who, verb) in [
            (&root, "status"),
            (&root, "verify"),
            (&job, "status"),
            (&job, "restart"),
            (&job, "gc"),
            (&job, "flush"),
        ] {
            let o = output(who.belay(&[verb, &dir]), LIMIT)?;
            refused(&o, &["job.json", "damaged"]).map_err(|e| format!("belay {verb} with {at}: {e}"))?;
        }
    }
    describe(&job, &good)
}

/// Links in the place of files that belay writes are not followed.
fn links_in_the_way(place: &Place, user: User) -> Result<(), Failure> {
    let (mut job, _) = killed(place, user, "links")?;
    let victim = job.work.join("victim");
    let is_whole = |when: &str| {
        let there = io("read", std::fs::read_to_string(&victim))?;
        want(there == "theirs", || {
            format!("{when}: the file behind a link holds {there:?}")
        })
    };
    io("write", std::fs::write(&victim, "theirs"))?;
    if user == User::Ordinary {
        io("chown", chown(&victim, Some(NOBODY), Some(NOBODY)))?;
    }
    let (dir, lock) = (job.dir().display().to_string(), job.dir().join("lock"));
    io("unlink", std::fs::remove_file(&lock))?;
    io("link", symlink(&victim, &lock))?;
    for verb in ["restart", "gc", "flush"] {
        refused(&output(job.belay(&[verb, &dir]), LIMIT)?, &["lock"]).map_err(|e| format!("belay {verb}: {e}"))?;
        is_whole(verb)?;
    }
    io("unlink", std::fs::remove_file(&lock))?;
    io("link", symlink(&victim, job.dir().join(".job.json.new")))?;
    job.restart(&[])?;
    want(job.answers(LIMIT)?, || job.output_text())?;
    is_whole("restart")?;
    job.verdict(false, LIMIT)?;
    is_whole("end")
}

/// Somebody who can write the directory in which the job directory lies, and exchanges it again and again.
struct Exchanger(Child);

impl Exchanger {
    fn start(at: &Path) -> Result<Self, Failure> {
        let script = "while :; do mv -T job away && mv -T trap job; mv -T job trap; mv -T away job; done 2>/dev/null";
        let mut c = Command::new("setpriv");
        c.arg(format!("--reuid={STRANGER}"))
            .arg(format!("--regid={STRANGER}"))
            .args(["--clear-groups", "--", "sh", "-c", script])
            .current_dir(at);
        io("start", c.spawn()).map(Self)
    }
}

impl Drop for Exchanger {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// `belay verify` finds damage in a directory that others can exchange, and notes it nowhere.
fn marks_nothing(job: &Job) -> Result<(), Failure> {
    let generation = job.dir().join("gen/000001");
    let (file, mark) = (generation.join("job.bimg"), generation.join("damaged"));
    let good = io("read", std::fs::read(&file))?;
    let mut bad = good.clone();
    bad[good.len() / 2] ^= 1;
    for (contents, made, is_whole) in [(&bad, false, false), (&good, true, true)] {
        // As if it had been found before, where there is no more damage.
        if made {
            io("write", std::fs::write(&mark, "bit flips"))?;
        }
        io("write", std::fs::write(&file, contents))?;
        let o = output(job.belay(&["verify", &job.dir().display().to_string()]), LIMIT)?;
        want(o.status.success() == is_whole, || text(&o))?;
        want(mark.exists() == made, || format!("the mark has been changed: {}", text(&o)))?;
    }
    io("remove", std::fs::remove_file(&mark))
}

/// A job directory in one that others may write is refused by name; root's looks at it touch nothing, whatever is
/// exchanged meanwhile.
fn exchanged(place: &Place, user: User) -> Result<(), Failure> {
    let (mut job, _) = killed(place, user, "exchange")?;
    let root = Job::new(place, "exchange-root", User::Root)?;
    let work = job.work.clone();
    let (dir, victim) = (job.dir().display().to_string(), root.work.join("victim"));
    io("write", std::fs::write(&victim, "root's"))?;
    // What the stranger puts in its place.
    let trap = work.join("trap");
    io("make", std::fs::create_dir(&trap))?;
    for name in ["lock", ".job.json.new", "job.json", "log"] {
        io("link", symlink(&victim, trap.join(name)))?;
    }
    io("chown", chown(&trap, Some(STRANGER), Some(STRANGER)))?;
    mode(&trap, 0o700)?;
    for bits in [0o777, 0o2777] {
        mode(&work, bits)?;
        for argv in [
            vec!["restart", &dir],
            vec!["gc", &dir],
            vec!["flush", &dir],
            vec!["launch", "--ckpt-dir", &dir, "--", "true"],
            vec!["run", "--ckpt-dir", &dir, "--", "true"],
        ] {
            refused(
                &output(job.belay(&argv), LIMIT)?,
                &["mode", "chmod", &work.display().to_string()],
            )
            .map_err(|e| format!("belay {argv:?}: {e}"))?;
        }
        let new = work.join("new").display().to_string();
        let o = output(job.belay(&["launch", "--ckpt-dir", &new, "--", "true"]), LIMIT)?;
        refused(&o, &["mode", "chmod"])?;
        want(!Path::new(&new).exists(), || "a refused launch has made its directory".into())?;
    }
    marks_nothing(&job)?;
    {
        let _exchanger = Exchanger::start(&work)?;
        let end = Instant::now() + Duration::from_secs(10);
        while Instant::now() < end {
            for verb in ["status", "list", "verify"] {
                let w = witness(root.belay(&[verb, &dir]))?;
                let bad: Vec<&String> = w.deeds.iter().filter(|d| !d.starts_with("connect ")).collect();
                want(bad.is_empty(), || format!("belay {verb}: {bad:?}: {}", text(&w.output)))?;
            }
            drop(output(job.belay(&["gc", &dir]), LIMIT)?);
        }
    }
    let there = io("read", std::fs::read_to_string(&victim))?;
    want(there == "root's", || format!("root's file holds {there:?}"))?;
    // Whatever the exchanger was killed in the middle of.
    if !job.dir().join("gen").exists() {
        drop(std::fs::rename(job.dir(), &trap));
        io("put it back", std::fs::rename(work.join("away"), job.dir()))?;
    }
    // As /tmp is.
    mode(&work, 0o1777)?;
    job.restart(&[])?;
    want(job.answers(LIMIT)?, || job.output_text())?;
    job.verdict(false, LIMIT)
}

/// Whatever length an image pretends to have, looking at it takes little memory.
fn long_images(place: &Place, user: User) -> Result<(), Failure> {
    /// Far less than the image is long.
    const MEMORY: &str = "ulimit -v 300000; exec \"$@\"";
    const DATA: &str = "ulimit -d 300000; exec \"$@\"";
    let (job, _) = killed(place, user, "long")?;
    let root = Job::new(place, "long-root", User::Root)?;
    let file = job.dir().join("gen/000001/job.bimg");
    let mut image = io("read", std::fs::read(&file))?;
    let length_before = image.len();
    // A section of a kind that nobody knows, of which nothing is stored but its head.
    let length: u64 = 512 << 20;
    image.extend([99u32.to_le_bytes(), 1u32.to_le_bytes()].concat());
    image.extend(length.to_le_bytes());
    image.extend(0u64.to_le_bytes());
    io("write", std::fs::write(&file, &image))?;
    let open = std::fs::OpenOptions::new().write(true).open(&file);
    io("lengthen", io("open", open)?.set_len(image.len() as u64 + length))?;
    let belay = place.belay().display().to_string();
    for who in [&root, &job] {
        let words = ["sh", "-c", MEMORY, "sh", &belay, "inspect", &file.display().to_string()];
        let o = output(who.command(&words.map(str::to_owned)), LIMIT)?;
        refused(&o, &["job.bimg", "checksum"])?;
    }
    // It takes long, and whose it is makes no difference to that.
    if user == User::Root {
        return Ok(());
    }
    // Sections of kinds that nobody knows, which refer to more byte strings than any job has.
    image.truncate(length_before);
    let refs = vec![r#"{"offset":0,"bytes":0,"xxh3":0}"#; 1 << 18].join(",");
    let payload = format!("[{refs}]").into_bytes();
    for kind in 90u32..107 {
        image.resize(image.len().next_multiple_of(8), 0);
        image.extend([kind.to_le_bytes(), 1u32.to_le_bytes()].concat());
        image.extend((payload.len() as u64).to_le_bytes());
        image.extend(belay_image::checksum(&payload).to_le_bytes());
        image.extend(&payload);
    }
    io("write", std::fs::write(&file, &image))?;
    let generation = file.parent().unwrap_or(&file);
    let mut manifest = Manifest::read(generation).map_err(|e| e.to_string())?;
    for f in manifest.files.iter_mut().filter(|f| f.name == "job.bimg") {
        (f.bytes, f.xxh3) = (image.len() as u64, None);
    }
    let encoded = manifest.encode().map_err(|e| e.to_string())?;
    io("write", std::fs::write(generation.join("manifest.json"), encoded))?;
    let words = ["sh", "-c", DATA, "sh", &belay, "verify", &job.dir().display().to_string()];
    let o = output(root.command(&words.map(str::to_owned)), LIMIT)?;
    refused(&o, &["job.bimg", "more byte strings than any job has"])
}

/// A group that is the user's alone may write above the job directory, one of others may not.
fn groups(place: &Place, _: User) -> Result<(), Failure> {
    // A user with a group of the same name on every system.
    const DAEMON: u32 = 1;
    let job = Job::of_user(place, "groups", DAEMON)?;
    let dir = job.dir().display().to_string();
    let launch = || output(job.belay(&["launch", "--ckpt-dir", &dir, "--", "true"]), LIMIT);
    for (group, alone) in [(NOBODY, false), (DAEMON, true)] {
        io("chown", chown(&job.work, Some(DAEMON), Some(group)))?;
        mode(&job.work, 0o2775)?;
        let o = launch()?;
        want(o.status.success() == alone, || {
            format!("group {group}: {}: {}", show(o.status), text(&o))
        })?;
        if !alone {
            refused(&o, &["mode 2775", "others in group nogroup"])?;
        }
    }
    Ok(())
}

/// Root commands any user's job; a silent agent does not keep root waiting, nor its owner's lock.
fn silent_agent(place: &Place, user: User) -> Result<(), Failure> {
    let (mut job, _) = killed(place, user, "silent")?;
    let root = Job::new(place, "silent-root", User::Root)?;
    let dir = job.dir().display().to_string();
    job.restart(&[])?;
    want(job.answers(LIMIT)?, || job.output_text())?;
    only_looks(&root, &job, "a running job")?;
    let o = output(root.belay(&["stop", &dir]), LIMIT)?;
    want(o.status.success(), || {
        format!("root's stop: {}: {}", show(o.status), text(&o))
    })?;
    job.wait(LIMIT)?;
    const SILENCE: &str = "import os, socket, time
if os.path.lexists('control.sock'): os.unlink('control.sock')
s = socket.socket(socket.AF_UNIX)
s.bind('control.sock')
s.listen(0)
open('ready', 'w')
time.sleep(600)";
    let mut c = job.command(&["/usr/bin/python3", "-c", SILENCE].map(str::to_owned));
    let mut agent = io("start", c.current_dir(job.dir()).spawn())?;
    let end = Instant::now() + LIMIT;
    while !job.dir().join("ready").exists() {
        want(Instant::now() < end, || "no socket".into())?;
        std::thread::sleep(Duration::from_millis(5));
    }
    let asked = output(root.belay(&["status", &dir]), LIMIT);
    drop(agent.kill());
    drop(agent.wait());
    refused(&asked?, &["does not answer"])
}

fn main() {
    if !am_root() {
        println!("\ntest result: ok. 0 passed; 0 failed; 6 ignored (only root can become other users)");
        return;
    }
    let mut target = Target::new("trust", &["fault_target"]);
    target.as_every_user();
    let tests: [(&str, Test); 13] = [
        ("looking_changes_nothing", looking_changes_nothing),
        ("values_that_lie", values_that_lie),
        ("links_in_the_way", links_in_the_way),
        ("exchanged", exchanged),
        ("long_images", long_images),
        ("astray_commands", astray::commands),
        ("ways_sockets", ways::sockets),
        ("ways_fifos", ways::fifos),
        ("ways_directories", ways::directories),
        ("ways_missing", ways::missing),
        ("ways_peers", ways::peers),
        ("ways_visitors", ways::visitors),
        ("ways_program", ways::program),
    ];
    for (name, test) in tests {
        target.by_user(name, |_| true, move |place, user, _| test(place, user));
    }
    target.by_user(
        "astray_places",
        |u| u == User::Root,
        |place, user, _| astray::places(place, user),
    );
    // Of root's own there is nobody else who looks.
    let ordinary: [(&str, Test); 3] = [
        ("another_socket", another_socket),
        ("silent_agent", silent_agent),
        ("groups", groups),
    ];
    for (name, test) in ordinary {
        target.by_user(name, |u| u == User::Ordinary, move |place, user, _| test(place, user));
    }
    target.first(&["silent_agent"]);
    target.run();
}
