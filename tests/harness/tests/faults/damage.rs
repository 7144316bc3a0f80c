//! A full disk, and files that are damaged, foreign or missing.

use super::{comes_back, restart_refused, target, target_with, LIMIT};
use belay_image::manifest::Manifest;
use belay_tests::expect::{io, refused_for_one_of as refused, want};
use belay_tests::filler::fill;
use belay_tests::job::{output, show, text, Job};
use belay_tests::place::{am_root, Place, User, NOBODY};
use belay_tests::rng::Rng;
use belay_tests::Failure;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The disk is full at the second checkpoint.
pub(super) fn disk_full(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
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
        fill(&filler)?;
        for _ in 0..3 {
            let o = job.checkpoint_raw(&[])?;
            refused(&o, &["no space", "full"])?;
            want(o.status.code() == Some(79), || format!("{}: {}", show(o.status), text(&o)))?;
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

/// The disk is full, and so is that to which standard error leads: the log cannot be written, and that cannot be said.
pub(super) fn full_everywhere(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let job = Job::new(place, "fulleverywhere", user)?;
    let dir = job.work.join("small");
    io("create", std::fs::create_dir(&dir))?;
    let owner = if user == User::Ordinary { NOBODY } else { 0 };
    let options = format!("size=1m,mode=0700,uid={owner},gid={owner}");
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(&dir);
    want(io("mount", mount.status())?.success(), || "mount a small tmpfs".into())?;
    let r = (|| {
        for left_kib in (4..=40).step_by(4) {
            let filler = dir.join("filler");
            io("write", std::fs::write(&filler, vec![0; (1024 - left_kib) << 10]))?;
            let name = dir.join(format!("job-{left_kib}")).display().to_string();
            let mut launch = job.belay(&["launch", "--ckpt-dir", &name, "--", "true"]);
            let full = std::fs::OpenOptions::new().write(true).open("/dev/full");
            launch.stderr(io("open /dev/full", full)?);
            let status = io("launch", launch.status())?;
            want(matches!(status.code(), Some(0 | 79)), || {
                format!("{left_kib} KiB are left: {}", show(status))
            })?;
            io("remove", std::fs::remove_file(&filler))?;
            io("remove", std::fs::remove_dir_all(&name))?;
        }
        Ok(())
    })();
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

/// What `belay verify` finds damaged while the job runs is not built upon: the program still has what it should be.
pub(super) fn damaged_meanwhile(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = target(place, user, "meanwhile", "16")?;
    for chunk in files(&job.dir().join("chunks"))?
        .iter()
        .filter(|f| f.extension().is_some_and(|e| e == "bpg"))
    {
        let mut bytes = io("read", std::fs::read(chunk))?;
        bytes.iter_mut().step_by(16 * 4096).for_each(|byte| *byte ^= 1);
        io("write", std::fs::write(chunk, bytes))?;
    }
    verify_fails(&job, "all chunks")?;
    job.checkpoint()?;
    let dir = job.dir().display().to_string();
    let o = output(job.belay(&["verify", &dir]), LIMIT)?;
    want(text(&o).contains("generation 2: whole"), || text(&o))?;
    job.kill_all()?;
    job.clear_beat()?;
    job.restart(&["--generation", "2"])?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// Truncated and bit-flipped files: verify notices each, restart refuses.
pub(super) fn damaged(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    // Without stored libraries: of those a restart needs what this machine lacks.
    let mut job = target_with(&["--no-save-code".into()], place, user, "damaged", "1")?;
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
pub(super) fn falls_back(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = target(place, user, "fallback", "1")?;
    job.checkpoint()?;
    job.kill_all()?;
    if user == User::Ordinary {
        // One that cannot be looked at is not damaged: nothing older is used in its place.
        let manifest = generation(&job, 2).join("manifest.json");
        let mode = |bits| {
            io(
                "chmod",
                std::fs::set_permissions(&manifest, std::fs::Permissions::from_mode(bits)),
            )
        };
        mode(0)?;
        restart_refused(&job, &["manifest.json", "permission denied"])?;
        mode(0o600)?;
    }
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

/// Generations share chunks. Damage of one that only the newest needs leads to the generation before; damage of one
/// that all need leaves nothing to restart, and that is said.
pub(super) fn shared_chunk(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
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
        said.contains("generation 2 was found damaged") && said.contains("using generation 1"),
        || format!("nothing was said about the generation that verify has marked: {said}"),
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
pub(super) fn foreign(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = target(place, user, "foreign", "1")?;
    job.kill_all()?;
    let path = generation(&job, 1).join("manifest.json");
    let old = forge(&job, |m| m.arch = "riscv64".into())?;
    restart_refused(&job, &["riscv64"])?;
    io("write", std::fs::write(&path, &old))?;
    forge(&job, |m| m.files[0].name = "../../../etc/passwd".into())?;
    restart_refused(&job, &["damaged", "leaves"])?;
    let version = format!("\"format\": {}", belay_image::FORMAT_VERSION);
    let text = String::from_utf8_lossy(&old).replacen(&version, "\"format\": 77", 1);
    io("write", std::fs::write(&path, text))?;
    restart_refused(&job, &["format 77"])?;
    io("write", std::fs::write(&path, &old))?;
    comes_back(&mut job)?;
    job.verdict(false, LIMIT)
}

/// Images that others could have written are not trusted.
pub(super) fn owner_and_mode(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
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
pub(super) fn missing_files(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
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
    job.launch(
        &["--no-save-code", "--save-open-files=none"].map(String::from),
        &["bash".into(), "-c".into(), script],
    )?;
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
