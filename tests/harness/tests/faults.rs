//! Faults and bad input: killed parts during a checkpoint, a full disk, damaged, foreign and missing files.
//!
//! The rules that every test here checks: the running program is never harmed, a committed generation always restarts, and what cannot
//! be done ends with one line that names the object and an exit status of belay's own.

use belay_image::manifest::Manifest;
use belay_tests::build::{build, Kind};
use belay_tests::expect::{refused_for_one_of as refused, want};
use belay_tests::job::{output, show, text, Job};
use belay_tests::place::{am_root, Place, User, NOBODY};
use belay_tests::rng::{run_seed, Rng};
use belay_tests::runner::{self, Check};
use belay_tests::{procs, Failure};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(40);

type Test = fn(&Place, User, &mut Rng) -> Result<(), Failure>;

fn io<T>(what: &str, r: std::io::Result<T>) -> Result<T, Failure> {
    r.map_err(|e| format!("{what}: {e}"))
}

/// A launched fault_target with one committed generation.
fn target(place: &Place, user: User, label: &str, megabytes: &str) -> Result<Job, Failure> {
    let mut job = Job::new(place, label, user)?;
    job.launch(
        &[],
        &[place.programs().join("fault_target").display().to_string(), megabytes.into()],
    )?;
    job.progress(LIMIT)?;
    job.checkpoint()?;
    Ok(job)
}

/// Kill everything, restart, go on: the newest committed generation is good.
fn comes_back(job: &mut Job) -> Result<(), Failure> {
    job.kill_all()?;
    job.clear_beat()?;
    job.restart(&[])?;
    job.progress(LIMIT).map_err(|e| format!("restart: {e}"))
}

/// `belay restart` that must not succeed.
fn restart_refused(job: &Job, words: &[&str]) -> Result<(), Failure> {
    let dir = job.dir().display().to_string();
    let o = output(job.belay(&["restart", &dir]), Duration::from_secs(10))
        .map_err(|e| format!("restart was expected to name {words:?}: {e}"))?;
    refused(&o, words)?;
    job.left_behind()
}

/// A running checkpoint, and its end.
fn during_checkpoint(job: &Job, delay: &mut dyn FnMut(), act: impl FnOnce(&Job) -> Result<(), Failure>) -> Result<Output, Failure> {
    let dir = job.dir().display().to_string();
    let c = job.belay(&["checkpoint", &dir]);
    let (tx, rx) = std::sync::mpsc::channel();
    std::thread::spawn(move || tx.send(output(c, LIMIT)).ok());
    delay();
    act(job)?;
    rx.recv().map_err(|e| e.to_string())?
}

fn rounds() -> u64 {
    std::env::var("BELAY_STRESS")
        .ok()
        .and_then(|v| v.parse::<u64>().ok())
        .unwrap_or(6)
}

/// The checkpoint command is killed: the job does not care.
fn command_killed(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = target(place, user, "cmdkill", "16")?;
    let dir = job.dir().display().to_string();
    for n in 0..rounds() {
        let mut c = io(
            "start",
            job.belay(&["checkpoint", &dir])
                .stdout(std::process::Stdio::null())
                .stderr(std::process::Stdio::null())
                .spawn(),
        )?;
        rng.pause(25);
        procs::kill_tree(c.id() as i32);
        io("wait", c.wait())?;
        job.progress(LIMIT).map_err(|e| format!("round {n}: {e}"))?;
    }
    // A checkpoint that the dead command asked for may still be on its way; the next one waits for it or says so.
    let end = Instant::now() + LIMIT;
    while let Err(e) = job.checkpoint() {
        want(Instant::now() < end && e.contains("progress"), || {
            format!("checkpoint after killed commands: {e}")
        })?;
        std::thread::sleep(Duration::from_millis(20));
    }
    comes_back(&mut job)?;
    job.verdict(false, LIMIT)
}

/// The command ends while a checkpoint begins: there is a checkpoint with which it ends as it does, or none.
fn command_ending(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    for round in 0..10 {
        let mut job = Job::new(place, "command_ending", user)?;
        // In every other round something is left behind, which goes on.
        let script = ["sleep 0.2; exit 5", "(sleep 0.5; echo left) & sleep 0.2; exit 5"][round % 2];
        job.launch(&[], &["sh".into(), "-c".into(), script.into()])?;
        job.answers(LIMIT)?;
        std::thread::sleep(Duration::from_millis(150));
        rng.pause(80);
        let taken = job.checkpoint_raw(&[])?;
        let status = job.wait(LIMIT)?;
        want(status.code() == Some(5), || format!("ended with {}", show(status)))?;
        let said = text(&taken);
        let ended = ["not running", "ended before", "is ending"].iter().any(|w| said.contains(w));
        want(taken.status.success() || ended, || format!("the checkpoint: {said}"))?;
        job.left_behind_within(LIMIT)?;
        if taken.status.success() {
            job.restart(&[])?;
            let status = job.wait(LIMIT)?;
            want(status.code() == Some(5), || {
                format!("round {round}: restarted, it ended with {}", show(status))
            })?;
            job.left_behind_within(LIMIT)?;
        }
    }
    Ok(())
}

/// The agent is killed in the middle of a checkpoint: the program goes on without it, and the last generation restarts.
fn agent_killed(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = target(place, user, "agentkill", "16")?;
    for n in 0..rounds() {
        let agent = job.pid().ok_or("no job")?;
        let program = procs::tree(agent)
            .into_iter()
            .find(|p| is_program(*p))
            .ok_or("the program is not below the agent")?;
        let o = during_checkpoint(&job, &mut || rng.pause(40), |job| {
            // Only the agent, which is a child of the harness when the job was launched.
            let agent = agent_of(job, program)?;
            procs::signal(agent, libc::SIGKILL);
            Ok(())
        });
        // The command fails, or the checkpoint was faster; but it ends.
        o.map_err(|e| format!("round {n}: the agent was killed: {e}"))?;
        let end = Instant::now() + LIMIT;
        if restarted(n) {
            job.wait(LIMIT).map_err(|e| format!("round {n}: {e}"))?;
        } else {
            // The program of a launched job is not in a namespace that died: it must go on.
            job.clear_beat()?;
            let read = || std::fs::read_to_string(job.work.join("beat")).unwrap_or_default();
            let mut last = read();
            let mut changes = 0;
            while changes < 3 {
                let now = read();
                if now != last {
                    changes += 1;
                    last = now;
                }
                want(Instant::now() < end, || {
                    let status = std::fs::read_to_string(format!("/proc/{program}/status")).unwrap_or_default();
                    let state = status.lines().find(|l| l.starts_with("State")).unwrap_or("gone").to_owned();
                    format!(
                        "round {n}: the program (pid {program}) does not go on after the agent's death: {state}; {}",
                        job.output_text()
                    )
                })?;
                std::thread::sleep(Duration::from_millis(5));
            }
            want(!job.output_text().contains("FAIL"), || job.output_text())?;
        }
        for (p, _) in procs::marked(&job.work) {
            procs::kill_tree(p);
        }
        if !restarted(n) {
            // The front of a launched job waits for the program as long as it runs.
            job.wait(LIMIT).map_err(|e| format!("round {n}: {e}"))?;
        }
        job.clear_beat()?;
        job.restart(&[])?;
        job.progress(LIMIT).map_err(|e| format!("round {n}: restart: {e}"))?;
    }
    job.verdict(false, LIMIT)
}

/// In later rounds the job is a restarted one.
fn restarted(round: u64) -> bool {
    round > 0
}

fn is_program(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|c| c.trim() == "fault_target")
}

fn parent(pid: i32) -> Option<i32> {
    let s = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    s[s.rfind(')')? + 2..].split(' ').nth(1)?.parse().ok()
}

/// The agent: the nearest ancestor of the program that is not the program itself.
fn agent_of(job: &Job, program: i32) -> Result<i32, Failure> {
    let mut p = program;
    while is_program(p) {
        p = parent(p).ok_or_else(|| format!("the program ended: {}", job.output_text()))?;
    }
    want(p > 1 && p != std::process::id() as i32, || "the program has no agent".into())?;
    Ok(p)
}

/// The snapshot child is killed: the checkpoint fails, the program does not.
fn snapshot_killed(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = target(place, user, "snapkill", "64")?;
    let agent = job.pid().ok_or("no job")?;
    let before = procs::tree(agent);
    let mut hit = 0;
    for n in 0..rounds() * 2 {
        let mut killed = false;
        let o = during_checkpoint(&job, &mut || rng.pause(5), |_| {
            let end = Instant::now() + Duration::from_millis(400);
            while Instant::now() < end && !killed {
                for p in procs::tree(agent).difference(&before) {
                    procs::signal(*p, libc::SIGKILL);
                    killed = true;
                }
            }
            Ok(())
        })?;
        if !o.status.success() {
            hit += 1;
            refused(&o, &["snapshot", "killed", "signal", "process", "application"]).map_err(|e| format!("round {n}: {e}"))?;
        }
        job.progress(LIMIT).map_err(|e| format!("round {n}: {e}"))?;
        let temporary = io("list", std::fs::read_dir(job.dir().join("gen")))?
            .flatten()
            .filter(|e| e.file_name().to_string_lossy().starts_with('.'))
            .count();
        want(o.status.success() || temporary == 0, || {
            format!("round {n}: a failed checkpoint left {temporary} temporary directories")
        })?;
    }
    want(hit > 0, || "no snapshot child was ever caught".into())?;
    job.checkpoint()?;
    comes_back(&mut job)?;
    job.verdict(false, LIMIT)
}

/// A process of the job is killed in the middle of a checkpoint: the checkpoint ends, belay goes on.
fn rank_killed(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    for n in 0..rounds() {
        let mut job = target(place, user, "rankkill", "8")?;
        let agent = job.pid().ok_or("no job")?;
        let child = procs::tree(agent)
            .into_iter()
            .filter(|p| is_program(*p))
            .max()
            .ok_or("no program")?;
        let o = during_checkpoint(&job, &mut || rng.pause(30), |_| {
            procs::signal(child, libc::SIGKILL);
            Ok(())
        });
        drop(o); // succeeded or failed, but it ended
        let s = job.wait(LIMIT).map_err(|e| format!("round {n}: {e}"))?;
        want(!s.success(), || {
            format!(
                "round {n}: the program did not notice its child's death: {}",
                job.output_text()
            )
        })?;
        job.left_behind()?; // the agent finishes its checkpoint first
        job.clear_beat()?;
        job.restart(&["--generation", "1"])?;
        job.progress(LIMIT).map_err(|e| format!("round {n}: restart: {e}"))?;
        job.verdict(false, LIMIT)?;
    }
    Ok(())
}

/// Everything is killed in the middle of a checkpoint: the previous generation restarts.
fn all_killed(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = target(place, user, "allkill", "32")?;
    for n in 0..rounds() {
        let dir = job.dir().display().to_string();
        let mut c = io(
            "start",
            job.belay(&["checkpoint", &dir])
                .stdout(std::process::Stdio::null())
                .stderr(std::process::Stdio::null())
                .spawn(),
        )?;
        rng.pause(80);
        comes_back(&mut job).map_err(|e| format!("round {n}: {e}"))?;
        io("wait", c.wait())?;
    }
    job.checkpoint()?;
    job.verdict(false, LIMIT)
}

/// The disk is full at the second checkpoint.
fn disk_full(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "diskfull", user)?;
    let dir = job.dir();
    io("create", std::fs::create_dir(&dir))?;
    let owner = if user == User::Ordinary { NOBODY } else { 0 };
    let options = format!("size=48m,mode=0700,uid={owner},gid={owner}");
    let mount = Command::new("mount")
        .args(["-t", "tmpfs", "-o", &options, "tmpfs"])
        .arg(&dir)
        .status();
    want(io("mount", mount)?.success(), || "mount a small tmpfs".into())?;
    let r = (|| {
        job.launch(
            &[],
            &[place.programs().join("fault_target").display().to_string(), "6".into()],
        )?;
        job.progress(LIMIT)?;
        job.checkpoint()?;
        let filler = dir.join("filler");
        let full = std::fs::write(&filler, vec![1u8; 48 << 20]);
        want(full.is_err(), || "the disk is not full".into())?;
        for _ in 0..3 {
            let o = job.checkpoint_raw(&[])?;
            refused(&o, &["no space", "full"])?;
            job.progress(LIMIT).map_err(|e| format!("after the failed checkpoint: {e}"))?;
        }
        comes_back(&mut job)?;
        io("remove", std::fs::remove_file(&filler))?;
        job.checkpoint().map_err(|e| format!("with space again: {e}"))?;
        comes_back(&mut job)?;
        job.verdict(false, LIMIT)
    })();
    job.kill_all()?;
    io("umount", Command::new("umount").arg("-l").arg(&dir).status())?;
    r
}

/// Files of a generation.
fn files(dir: &Path) -> Result<Vec<PathBuf>, Failure> {
    let mut v: Vec<PathBuf> = io("list", std::fs::read_dir(dir))?.flatten().map(|e| e.path()).collect();
    v.sort();
    Ok(v)
}

fn generation(job: &Job, n: u32) -> PathBuf {
    job.dir().join(format!("gen/{n:06}"))
}

fn verify_fails(job: &Job, what: &str) -> Result<(), Failure> {
    let dir = job.dir().display().to_string();
    let o = output(job.belay(&["verify", &dir]), LIMIT)?;
    want(!o.status.success(), || format!("{what}: verify did not notice: {}", text(&o)))?;
    want(!text(&o).contains("panicked"), || format!("{what}: {}", text(&o)))
}

/// Truncated and bit-flipped files: verify notices each, restart refuses.
fn damaged(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = target(place, user, "damaged", "1")?;
    job.kill_all()?;
    let mut all = files(&generation(&job, 1))?;
    all.extend(files(&job.dir().join("chunks"))?);
    for f in &all {
        let name = f.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let good = io("read", std::fs::read(f))?;
        let put = |bytes: &[u8]| io("write", std::fs::write(f, bytes));
        let mut tries: Vec<(String, Vec<u8>)> = vec![("longer".into(), [&good[..], b"x"].concat())];
        if !good.is_empty() {
            tries.push(("empty".into(), Vec::new()));
            for _ in 0..3 {
                let n = rng.below(good.len() as u64) as usize;
                tries.push((format!("cut to {n} bytes"), good[..n].to_vec()));
            }
            for k in 0..10 {
                let at = if k == 0 { 0 } else { rng.below(good.len() as u64) as usize };
                let mut bad = good.clone();
                bad[at] ^= 1 << rng.below(8);
                tries.push((format!("bit flipped in byte {at} of {}", good.len()), bad));
            }
        }
        for (i, (what, bytes)) in tries.iter().enumerate() {
            put(bytes)?;
            verify_fails(&job, &format!("{name} {what}"))?;
            if i % 4 == 1 {
                restart_refused(&job, &["damaged", "no checkpoint", "checksum", "manifest"])
                    .map_err(|e| format!("{name} {what}: {e}"))?;
            }
        }
        io("remove", std::fs::remove_file(f))?;
        verify_fails(&job, &format!("{name} missing"))?;
        put(&good)?;
        io("chmod", std::fs::set_permissions(f, std::fs::Permissions::from_mode(0o600)))?;
        if user == User::Ordinary && am_root() {
            io("chown", std::os::unix::fs::chown(f, Some(NOBODY), Some(NOBODY)))?;
        }
    }
    comes_back(&mut job)?;
    job.verdict(false, LIMIT)
}

/// The newest generation is damaged: restart says so and takes the one before.
fn falls_back(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = target(place, user, "fallback", "1")?;
    job.checkpoint()?;
    job.kill_all()?;
    let f = generation(&job, 2).join("job.bimg");
    let mut b = io("read", std::fs::read(&f))?;
    let middle = b.len() / 2;
    b[middle] ^= 4;
    io("write", std::fs::write(&f, b))?;
    job.clear_beat()?;
    job.restart(&[])?;
    job.progress(LIMIT)?;
    let said = job.output_text().to_lowercase();
    want(said.contains("damaged") && said.contains("generation"), || {
        format!("nothing was said about the damaged generation: {said}")
    })?;
    job.verdict(false, LIMIT)
}

/// Generations share chunks. Damage of one that only the newest needs leads to the generation before; damage of one that all need leaves nothing to restart, and
/// that is said.
fn shared_chunk(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = target(place, user, "sharedchunk", "2")?;
    job.checkpoint()?;
    job.kill_all()?;
    let chunks = files(&job.dir().join("chunks"))?;
    want(chunks.len() > 1, || "the second checkpoint stored nothing".into())?;
    let flip = |f: &Path, at: usize| -> Result<(), Failure> {
        let mut b = io("read", std::fs::read(f))?;
        b[at] ^= 4;
        io("write", std::fs::write(f, b))
    };
    let newest = &chunks[chunks.len() - 1];
    let at = rng.below(4096) as usize;
    flip(newest, at)?;
    verify_fails(&job, "a bit of the newest chunk")?;
    job.clear_beat()?;
    job.restart(&[])?;
    job.progress(LIMIT)?;
    let said = job.output_text().to_lowercase();
    want(
        said.contains("generation 2 is damaged") && said.contains("using generation 1"),
        || format!("nothing was said about the damaged generation: {said}"),
    )?;
    // What follows is stored without the help of the damaged chunk.
    job.checkpoint()?;
    let third = job.belay(&["verify", &job.dir().display().to_string()]);
    let said = text(&output(third, LIMIT)?);
    want(said.contains("generation 3: whole"), || said)?;
    job.kill_all()?;
    // Libraries' data lie in the chunk that was written first and do not change: every generation needs it.
    let oldest = &chunks[0];
    let length = io("stat", std::fs::metadata(oldest))?.len();
    io(
        "cut",
        io("open", std::fs::OpenOptions::new().write(true).open(oldest))?.set_len(length - 1),
    )?;
    let o = output(job.belay(&["restart", &job.dir().display().to_string()]), LIMIT)?;
    want(o.status.code() == Some(65) && text(&o).contains("is damaged"), || {
        format!("a chunk that all generations need is cut: {}", text(&o))
    })?;
    job.left_behind()
}

/// Changes the manifest of generation 1, keeping its checksum right.
fn forge(job: &Job, change: impl FnOnce(&mut Manifest)) -> Result<Vec<u8>, Failure> {
    let dir = generation(job, 1);
    let path = dir.join("manifest.json");
    let old = io("read", std::fs::read(&path))?;
    let mut m = Manifest::read(&dir).map_err(|e| e.to_string())?;
    change(&mut m);
    io("write", std::fs::write(&path, m.encode().map_err(|e| e.to_string())?))?;
    Ok(old)
}

/// Images of another format version, another architecture, with a path that leaves the directory.
fn foreign(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = target(place, user, "foreign", "1")?;
    job.kill_all()?;
    let path = generation(&job, 1).join("manifest.json");
    let old = forge(&job, |m| m.arch = "riscv64".into())?;
    restart_refused(&job, &["riscv64"])?;
    io("write", std::fs::write(&path, &old))?;
    forge(&job, |m| m.files[0].name = "../../../etc/passwd".into())?;
    restart_refused(&job, &["damaged", "leaves"])?;
    let text = String::from_utf8_lossy(&old).replacen("\"format\": 2", "\"format\": 77", 1);
    io("write", std::fs::write(&path, text))?;
    restart_refused(&job, &["format 77"])?;
    io("write", std::fs::write(&path, &old))?;
    comes_back(&mut job)?;
    job.verdict(false, LIMIT)
}

/// Images that others could have written are not trusted.
fn owner_and_mode(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = target(place, user, "owner", "1")?;
    job.kill_all()?;
    let dir = generation(&job, 1);
    for f in files(&dir)?.into_iter().chain(files(&job.dir().join("chunks"))?) {
        let mode = io("stat", std::fs::metadata(&f))?.permissions().mode() & 0o777;
        want(mode == 0o600, || format!("{} has mode {mode:o}", f.display()))?;
    }
    let image = dir.join("job.bimg");
    let chmod = |p: &Path, m: u32| io("chmod", std::fs::set_permissions(p, std::fs::Permissions::from_mode(m)));
    chmod(&image, 0o666)?;
    restart_refused(&job, &["job.bimg"])?;
    chmod(&image, 0o600)?;
    chmod(&job.dir(), 0o777)?;
    restart_refused(&job, &["mode", "permission", "writable"])?;
    chmod(&job.dir(), 0o700)?;
    if am_root() {
        let (mine, other) = if user == User::Ordinary { (NOBODY, 0) } else { (0, NOBODY) };
        io("chown", std::os::unix::fs::chown(&image, Some(other), Some(other)))?;
        restart_refused(&job, &["job.bimg"])?;
        io("chown", std::os::unix::fs::chown(&image, Some(mine), Some(mine)))?;
    }
    comes_back(&mut job)?;
    job.verdict(false, LIMIT)
}

/// A program or data file that is missing, shorter or different at restart.
fn missing_files(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "missing", user)?;
    let program = job.work.join("own_copy");
    let copy = |to: &Path| io("copy", std::fs::copy(place.programs().join("fault_target"), to));
    copy(&program)?;
    // Files in temporary directories are saved with the job; this one must lie elsewhere, where only root can put it.
    let elsewhere = PathBuf::from(format!("/var/lib/belay-test-{}", std::process::id()));
    let home = if user == User::Root {
        elsewhere.clone()
    } else {
        job.work.clone()
    };
    io("create", std::fs::create_dir_all(&home))?;
    let data = home.join("data");
    io("write", std::fs::write(&data, vec![7u8; 5000]))?;
    if user == User::Ordinary && am_root() {
        io("chown", std::os::unix::fs::chown(&data, Some(NOBODY), Some(NOBODY)))?;
    }
    let script = format!("exec 5<>{}; read -n 10 x <&5; exec {} 1", data.display(), program.display());
    job.launch(&[], &["bash".into(), "-c".into(), script])?;
    job.progress(LIMIT)?;
    job.checkpoint()?;
    job.kill_all()?;
    let away = job.work.join("away");
    if user == User::Root {
        let moved = home.join("moved");
        io("rename", std::fs::rename(&data, &moved))?;
        restart_refused(&job, &["/data"])?;
        io("rename", std::fs::rename(&moved, &data))?;
    }
    io("rename", std::fs::rename(&program, &away))?;
    restart_refused(&job, &["own_copy"])?;
    let mut changed = io("read", std::fs::read(&away))?;
    let at = changed
        .windows(12)
        .position(|w| w == b"the other th")
        .ok_or("the program's text was not found")?;
    changed[at] ^= 1;
    io("write", std::fs::write(&program, changed))?;
    io(
        "chmod",
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)),
    )?;
    let other = Command::new("objcopy")
        .args(["--remove-section", ".note.gnu.build-id"])
        .arg(&program)
        .status();
    want(io("objcopy", other)?.success(), || "objcopy".into())?;
    restart_refused(&job, &["own_copy"])?;
    io("rename", std::fs::rename(&away, &program))?;
    comes_back(&mut job)?;
    job.verdict(false, LIMIT)?;
    if user == User::Root {
        // The check of the ordinary user runs beside this one and has no file there.
        std::fs::remove_dir_all(&elsewhere).ok();
    }
    Ok(())
}

fn main() {
    let fail = |e: Failure| -> ! {
        println!("{e}");
        std::process::exit(1);
    };
    let place = Arc::new(Place::new("faults").unwrap_or_else(|e| fail(e)));
    if let Err(e) = build(&place, "fault_target", Kind::C) {
        fail(e);
    }
    let seed = run_seed();
    println!("seed {seed}");
    let tests: [(&str, Test); 13] = [
        ("command_ending", command_ending),
        ("command_killed", command_killed),
        ("agent_killed", agent_killed),
        ("snapshot_killed", snapshot_killed),
        ("rank_killed", rank_killed),
        ("all_killed", all_killed),
        ("disk_full", disk_full),
        ("damaged", damaged),
        ("falls_back", falls_back),
        ("shared_chunk", shared_chunk),
        ("foreign", foreign),
        ("owner_and_mode", owner_and_mode),
        ("missing_files", missing_files),
    ];
    let mut checks = Vec::new();
    for (name, test) in tests {
        // Mounting the small file system needs root.
        for user in runner::users().into_iter().filter(|_| name != "disk_full" || am_root()) {
            let place = Arc::clone(&place);
            let run = move || test(&place, user, &mut Rng::new(seed, name));
            checks.push(Check {
                name: format!("faults::{name}::{}", user.name()),
                run: Box::new(run),
            });
        }
    }
    drop(place);
    runner::main(checks);
}
