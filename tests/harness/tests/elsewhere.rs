//! Restarts in a chroot, in the middle of reading clocks, on another kernel build and on another processor, without
//! either: the checkpoint is changed as if it had been taken there. Its vDSO gets another byte behind its last
//! function, so that it is not this kernel's and its code still right; its processor gets features that this one lacks,
//! or another layout of the registers.

use belay_image::manifest::{Manifest, MANIFEST_FILE};
use belay_image::model::{Job as Image, StateComponent, VmaKind};
use belay_image::sections::{Kind, SectionFile};
use belay_image::{checksum, BLOB_FILE, JOB_FILE};
use belay_tests::expect::{io, refused, want};
use belay_tests::job::{output, Job};
use belay_tests::place::{am_root, Place, User};
use belay_tests::rng::Rng;
use belay_tests::target::Target;
use belay_tests::Failure;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
const ROUNDS: usize = 8;
const INTERRUPTIONS: usize = 5;
/// Where XSTATE_BV and the first part that may move lie in an XSAVE area.
const IN_USE: usize = 512;

type Test = fn(&Place, User, &mut Rng) -> Result<(), Failure>;

/// `program` launched; it runs.
fn launch(place: &Place, user: User, label: &str, program: &[&str]) -> Result<Job, Failure> {
    let mut job = Job::new(place, label, user)?;
    let mut argv = vec![place.programs().join(program[0]).display().to_string()];
    argv.extend(program[1..].iter().map(|a| (*a).to_owned()));
    job.launch(&[], &argv)?;
    job.progress(LIMIT)?;
    Ok(job)
}

/// The newest generation's directory.
fn newest(job: &Job) -> Result<PathBuf, Failure> {
    let all = io("list", std::fs::read_dir(job.dir().join("gen")))?
        .flatten()
        .map(|e| e.path());
    all.max().ok_or_else(|| "no generation".into())
}

/// Changes the description in the newest checkpoint, with right checksums.
fn change(job: &Job, change: impl Fn(&mut Image, &std::fs::File) -> Result<(), Failure>) -> Result<(), Failure> {
    let dir = newest(job)?;
    let fail = |e: belay_image::ImageError| e.to_string();
    let path = dir.join(JOB_FILE);
    let old = SectionFile::decode(&path, &io("read", std::fs::read(&path))?).map_err(fail)?;
    let mut image: Image = old.get_json(Kind::Job).map_err(fail)?;
    let blobs = std::fs::OpenOptions::new().read(true).write(true).open(dir.join(BLOB_FILE));
    change(&mut image, &io("open", blobs)?)?;
    let mut new = SectionFile::new();
    for s in old.sections().iter().filter(|s| s.kind == Kind::Descriptors as u32) {
        let value: serde_json::Value = serde_json::from_slice(&s.payload).map_err(|e| e.to_string())?;
        new.push_json(Kind::Descriptors, &value).map_err(fail)?;
    }
    new.push_json(Kind::Job, &image).map_err(fail)?;
    let bytes = new.encode();
    io("write", std::fs::write(&path, &bytes))?;
    let mut manifest = Manifest::read(&dir).map_err(fail)?;
    for f in manifest.files.iter_mut().filter(|f| f.name == JOB_FILE) {
        (f.bytes, f.xxh3) = (bytes.len() as u64, Some(checksum(&bytes)));
    }
    io(
        "write",
        std::fs::write(dir.join(MANIFEST_FILE), manifest.encode().map_err(fail)?),
    )
}

/// Another byte at the end of the vDSO, where no code is.
fn other_vdso(image: &mut Image, blobs: &std::fs::File) -> Result<(), Failure> {
    let pages = image.kernel_pages.as_mut().ok_or("the vDSO is not in the checkpoint")?;
    let mut code = vec![0; pages.code.bytes as usize];
    io("read", blobs.read_exact_at(&mut code, pages.code.offset))?;
    let last = code.last_mut().ok_or("the vDSO is empty")?;
    *last = last.wrapping_add(1);
    io("write", blobs.write_all_at(&code, pages.code.offset))?;
    pages.code.xxh3 = checksum(&code);
    image.vdso_xxh3 = pages.code.xxh3;
    Ok(())
}

/// Address of `[vdso]` in the program's first process, in the newest checkpoint.
fn vdso(job: &Job) -> Result<u64, Failure> {
    let path = newest(job)?.join(JOB_FILE);
    let file = SectionFile::decode(&path, &io("read", std::fs::read(&path))?).map_err(|e| e.to_string())?;
    let image: Image = file.get_json(Kind::Job).map_err(|e| e.to_string())?;
    let root = image.processes.iter().find(|p| p.pid == image.root_pid);
    let mut vmas = root.iter().flat_map(|p| &p.vmas);
    let found = vmas.find(|v| matches!(&v.kind, VmaKind::Vdso(n) if n == "vdso"));
    found.map(|v| v.start).ok_or_else(|| "it has no vDSO".into())
}

/// Kills all of the job and restarts it.
fn again(job: &mut Job, options: &[&str]) -> Result<(), Failure> {
    job.kill_all()?;
    job.clear_beat()?;
    job.restart(options)?;
    job.progress(LIMIT)
}

/// Killed in the middle of calls to the vDSO and restarted under another again and again; each restart leads through
/// one vDSO more. Every third is under the kernel of the checkpoint.
fn kernel(place: &Place, user: User, rng: &mut Rng, program: &[&str]) -> Result<(), Failure> {
    let mut job = launch(place, user, &format!("kernel-{}", program[0]), program)?;
    for round in 0..ROUNDS {
        std::thread::sleep(Duration::from_millis(rng.below(100)));
        job.checkpoint()?;
        let before = vdso(&job)?;
        let other = round % 3 != 2;
        if other {
            change(&job, other_vdso)?;
        }
        let options: &[&str] = if round % 2 == 0 { &[] } else { &["--lazy"] };
        again(&mut job, options).map_err(|e| format!("round {round}: {e}"))?;
        job.checkpoint()?;
        let now = vdso(&job)?;
        // That of the same kernel stays, where nobody was stopped in it.
        let may_move = other || program[0] == "time_vdso";
        want(if now == before { !other } else { may_move }, || {
            format!("round {round}: [vdso] was at {before:#x} and is at {now:#x}")
        })?;
    }
    job.verdict(false, LIMIT)
}

/// Killed while a thread stands behind each instruction of reading a clock, and restarted under the same kernel: from
/// the second time on with other offsets in a time namespace.
fn interrupted(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = launch(place, user, "interrupted", &["time_steps"])?;
    for round in 0..INTERRUPTIONS {
        std::thread::sleep(Duration::from_millis(rng.below(400)));
        let taken = job.checkpoint();
        taken.map_err(|e| format!("round {round}: {e}; {}", job.output_text()))?;
        let options: &[&str] = if round % 2 == 0 { &[] } else { &["--lazy"] };
        again(&mut job, options).map_err(|e| format!("round {round}: {e}"))?;
    }
    job.verdict(false, LIMIT)
}

/// What this processor lacks is named before anything is started.
fn processor_lacks(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = launch(place, user, "cpulacks", &["compute_regs"])?;
    job.checkpoint()?;
    job.kill_all()?;
    let dir = job.dir().display().to_string();
    let ends = |job: &Job, options: &[&str], words: &[&str]| {
        let o = output(job.belay(&[&["restart", &dir], options].concat()), LIMIT)?;
        refused(&o, words)?;
        job.left_behind()
    };
    let processor = |image: &mut Image, f: &dyn Fn(&mut belay_image::model::Processor)| match &mut image.processor {
        Some(p) => {
            f(p);
            Ok(())
        }
        None => Err("the processor is not in the checkpoint".into()),
    };
    change(&job, |image, _| processor(image, &|p| p.features.push("qubits".into())))?;
    ends(&job, &[], &["processor", "qubits", "--any-cpu"])?;
    job.clear_beat()?;
    job.restart(&["--any-cpu"])?;
    job.progress(LIMIT)?;
    job.checkpoint()?;
    job.kill_all()?;
    // Registers that do not exist here are in use: those cannot be done without.
    change(&job, |image, _| {
        image
            .processes
            .iter_mut()
            .flat_map(|p| &mut p.threads)
            .for_each(|t| t.xstate[IN_USE + 5] |= 1);
        let part = StateComponent {
            number: 40,
            offset: 0,
            bytes: 8,
        };
        processor(image, &|p| p.components.push(part))
    })?;
    ends(&job, &["--any-cpu"], &["processor", "state component 40"])
}

/// The registers of AVX lie where another processor would have them.
fn processor_layout(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = launch(place, user, "cpulayout", &["compute_regs", "threads"])?;
    for _ in 0..3 {
        job.checkpoint()?;
        job.kill_all()?;
        change(&job, |image, _| {
            let processor = image.processor.as_mut().ok_or("the processor is not in the checkpoint")?;
            let avx = processor.components.iter_mut().find(|c| c.number == 2).ok_or("no AVX here")?;
            let old = avx.offset as usize..(avx.offset + avx.bytes) as usize;
            for t in image.processes.iter_mut().flat_map(|p| &mut p.threads) {
                avx.offset = t.xstate.len() as u32;
                let registers = t.xstate[old.clone()].to_vec();
                t.xstate[old.clone()].fill(0x55);
                t.xstate.extend(registers);
            }
            Ok(())
        })?;
        again(&mut job, &[])?;
    }
    job.verdict(false, LIMIT)
}

/// The directories of the machine that are shown in a chroot.
const SHOWN: &str = "usr bin sbin lib lib64 etc dev sys proc tmp";

/// Everything inside a chroot whose "/" is a directory like any other, not a mount.
fn in_a_chroot(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    // Beside the place, which is shown inside it.
    let root = std::env::temp_dir().join(format!("belay-chroot-{}", std::process::id()));
    io("make a directory", std::fs::create_dir(&root))?;
    let result = chrooted(place, &root);
    // What was mounted there has gone with its namespace.
    for shown in SHOWN.split(' ') {
        drop(std::fs::remove_dir(root.join(shown)));
    }
    result.and(io("remove the chroot", std::fs::remove_dir(&root)))
}

fn chrooted(place: &Place, root: &std::path::Path) -> Result<(), Failure> {
    const INSIDE: &str = r#"set -e
R=$1 SHOWN=$2; shift 2
for d in $SHOWN; do
    [ -d /$d ] || continue
    mkdir -p $R/$d
    mount --rbind /$d $R/$d
done
exec chroot $R sh -c 'cd "$1"; shift; exec "$@"' sh "$PWD" "$@""#;
    let inside = |job: &Job, words: &[String]| {
        let enter = ["unshare", "-m", "sh", "-c", INSIDE, "sh"].map(str::to_owned);
        let mut all = enter.to_vec();
        all.extend([root.display().to_string(), SHOWN.to_owned()]);
        all.extend_from_slice(words);
        job.command(&all)
    };
    let mut job = Job::new(place, "chroot", User::Root)?;
    let (belay, dir) = (place.belay().display().to_string(), job.dir().display().to_string());
    let program = place.programs().join("compute_regs").display().to_string();
    let launch = ["launch", "--ckpt-dir", &dir, "--", &program].map(str::to_owned);
    let c = inside(&job, &[std::slice::from_ref(&belay), launch.as_slice()].concat());
    job.start(c)?;
    for _ in 0..2 {
        job.progress(LIMIT)?;
        job.checkpoint()?;
        job.kill_all()?;
        job.clear_beat()?;
        let c = inside(&job, &[belay.clone(), "restart".into(), dir.clone()]);
        job.start(c)?;
    }
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// A copy of a test program in the directory of the job, under this name.
fn copy(job: &Job, place: &Place, program: &str, name: &str) -> Result<String, Failure> {
    let to = job.dir().with_file_name(name);
    io("copy the program", std::fs::copy(place.programs().join(program), &to))?;
    Ok(to.display().to_string())
}

/// In a container the numbers of the job's threads are the lowest there are. The helpers of a restart take none of them,
/// such as those of a launcher of MPI, whose new programs are shown its namespaces.
fn low_numbers(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "low", User::Root)?;
    let program = copy(&job, place, "time_vdso", "orterun")?;
    let (belay, dir) = (place.belay().display().to_string(), job.dir().display().to_string());
    let inside = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--"];
    let launch = [&belay, "launch", "--ckpt-dir", &dir, "--", &program, "4"];
    let words: Vec<String> = inside.iter().chain(&launch).map(|w| (*w).to_owned()).collect();
    job.start(job.command(&words))?;
    job.progress(LIMIT)?;
    for _ in 0..2 {
        job.checkpoint()?;
        again(&mut job, &[])?;
    }
    job.verdict(false, LIMIT)
}

/// In the place of the program stands what nobody writes to: its copy is used, and nothing waits.
fn program_is_a_fifo(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "fifo", user)?;
    let program = copy(&job, place, "compute_regs", "program")?;
    job.launch(&[], std::slice::from_ref(&program))?;
    job.progress(LIMIT)?;
    job.checkpoint()?;
    job.kill_all()?;
    job.clear_beat()?;
    io("remove the program", std::fs::remove_file(&program))?;
    let made = io(
        "mkfifo",
        std::process::Command::new("mkfifo").args(["-m", "644", &program]).status(),
    )?;
    want(made.success(), || format!("mkfifo: {made}"))?;
    job.restart(&[])?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// What nobody can take back is named in the log, and only where the job did not have it.
fn without_new_privileges(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    const WORDS: &str = "the job inherits from its restart: no_new_privs";
    for had in [false, true] {
        let mut job = Job::new(place, &format!("privileges-{had}"), user)?;
        let program = place.programs().join("compute_regs").display().to_string();
        let under = ["/usr/bin/setpriv", "--no-new-privs"].map(str::to_owned);
        let run = [&under[..if had { 2 } else { 0 }], &[program]].concat();
        job.launch(&[], &run)?;
        job.progress(LIMIT)?;
        job.checkpoint()?;
        job.kill_all()?;
        job.clear_beat()?;
        job.restart_under(&under, &[])?;
        job.progress(LIMIT)?;
        let logs = io("list", std::fs::read_dir(job.dir().join("log")))?.flatten();
        let log: String = logs.filter_map(|e| std::fs::read_to_string(e.path()).ok()).collect();
        want(log.contains(WORDS) != had, || format!("had it: {had}; the log: {log}"))?;
        job.verdict(false, LIMIT)?;
    }
    Ok(())
}

fn main() {
    let mut target = Target::new("elsewhere", &["time_vdso", "time_steps", "proc_forkexec", "compute_regs"]);
    let tests: [(&str, Test); 8] = [
        ("kernel_clocks", |p, u, r| kernel(p, u, r, &["time_vdso", "4"])),
        ("kernel_many_threads", |p, u, r| kernel(p, u, r, &["time_vdso", "16"])),
        ("kernel_children", |p, u, r| kernel(p, u, r, &["proc_forkexec", "spawn"])),
        ("interrupted", interrupted),
        ("processor_lacks", processor_lacks),
        ("processor_layout", processor_layout),
        ("without_new_privileges", without_new_privileges),
        ("program_is_a_fifo", program_is_a_fifo),
    ];
    for (name, test) in tests {
        target.by_user(name, |_| true, test);
    }
    if am_root() {
        target.once("in_a_chroot", in_a_chroot);
        target.once("low_numbers", low_numbers);
    }
    target.run();
}
