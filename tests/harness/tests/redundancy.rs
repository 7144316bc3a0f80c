//! Jobs over several hosts whose checkpoints lie on the hosts' own disks: hosts are lost with all they had, and the job
//! restarts on spare hosts from what is left.

#[path = "redundancy/levels.rs"]
mod levels;

use belay_tests::across::{files, Job, LIMIT};
use belay_tests::expect::want;
use belay_tests::job::{output, show, text};
use belay_tests::place::Place;
use belay_tests::rng::Rng;
use belay_tests::target::Target;
use belay_tests::Failure;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// On every host, a file system of its own.
const LOCAL: &str = "/tmp/local";

/// A job with `parts` parts on the first of `all` hosts, whose ranks talk, launched with `scheme`.
fn launched(place: &Place, label: &str, (parts, all): (usize, usize), scheme: &str) -> Result<Job, Failure> {
    launched_with(&[], place, label, (parts, all), scheme)
}

fn launched_with(more: &[&str], place: &Place, label: &str, hosts: (usize, usize), scheme: &str) -> Result<Job, Failure> {
    program_launched("mpi/mpi_p2p", more, place, label, hosts, scheme)
}

fn program_launched(
    program: &str,
    more: &[&str],
    place: &Place,
    label: &str,
    (parts, all): (usize, usize),
    scheme: &str,
) -> Result<Job, Failure> {
    let mut job = Job::new(place, label, parts, all)?.unhurried();
    let program = job.program(place, program)?;
    for host in 1..=all {
        job.on_host(host, &["mkdir", LOCAL])?;
    }
    let options = ["--redundancy", scheme, "--local-dir", LOCAL];
    job.options = options.iter().chain(more).map(|o| (*o).to_owned()).collect();
    job.launch(&program)?;
    Ok(job)
}

/// A checkpoint that is redundant when this returns.
fn checkpoint(job: &Job) -> Result<(), Failure> {
    let said = job.must(&["checkpoint", "--quiet", "--level", "redundant"])?;
    want(said.contains(", redundant"), || format!("checkpoint: {said}"))?;
    let said = job.must(&["status", "--json"])?;
    want(said.contains("\"level\": \"redundant\""), || {
        format!("no generation is redundant: {said}")
    })
}

/// Host `n` is gone with all it had; nobody reaches it any more.
fn lose(job: &Job, n: usize) -> Result<(), Failure> {
    job.on_host(n, &["sh", "-c", &format!("rm -rf {LOCAL}/* {}/*", levels::RAM)])?;
    job.hosts.hide(n)
}

/// Changes one bit of byte `at` of every file on a host that `pattern` names in the job's stores.
fn flip(job: &Job, host: usize, pattern: &str, at: u64) -> Result<(), Failure> {
    let script = format!(
        "for f in {LOCAL}/belay-*/{pattern}; do b=$(od -An -tu1 -j {at} -N 1 $f); printf \"\\\\$(printf %o $((b ^ 1)))\" | \
         dd of=$f bs=1 seek={at} conv=notrunc status=none || exit; done"
    );
    job.on_host(host, &["sh", "-c", &script]).map(drop)
}

/// Rounds in which as many hosts are lost as the scheme survives.
fn lost_hosts(place: &Place, scheme: &str, (parts, all): (usize, usize), losses: usize, rng: &mut Rng) -> Result<(), Failure> {
    let label = format!("redundancy-{}", scheme.split(':').next().unwrap_or_default());
    let mut job = launched(place, &label, (parts, all), scheme)?;
    let mut spares: Vec<usize> = (parts + 1..=all).collect();
    for round in 0..2 {
        std::thread::sleep(Duration::from_millis(rng.below(300)));
        checkpoint(&job).map_err(|e| format!("round {round}: {e}"))?;
        std::thread::sleep(Duration::from_millis(rng.below(200)));
        job.crash();
        let mut gone = Vec::new();
        // The first time also mpirun's own.
        let mut part = if round == 0 { 0 } else { rng.below(parts as u64) as usize };
        for _ in 0..losses {
            let spare = spares.pop().ok_or("no spare host")?;
            gone.push(std::mem::replace(&mut job.at[part], spare));
            part = (part + 1 + rng.below(parts as u64 - 1) as usize) % parts;
            while spares.contains(&job.at[part]) || gone.contains(&job.at[part]) {
                part = (part + 1) % parts;
            }
        }
        for host in &gone {
            lose(&job, *host)?;
        }
        job.restart_at(&[])
            .map_err(|e| format!("round {round}: h{gone:?} lost: {e}"))?;
        for host in gone {
            job.hosts.show(host)?;
            spares.insert(0, host);
        }
    }
    job.verdict()
}

/// A host is lost, and after the restart another one, before there is a further checkpoint.
fn lost_again(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut job = launched(place, "redundancy-again", (3, 5), "xor")?;
    checkpoint(&job)?;
    for (part, spare) in [(1, 4), (2, 5)] {
        job.crash();
        let gone = std::mem::replace(&mut job.at[part], spare);
        lose(&job, gone)?;
        job.restart_at(&[]).map_err(|e| format!("h{gone} lost: {e}"))?;
        let record = PathBuf::from(job.dir()).join("redundant/000001.json");
        let (end, host) = (Instant::now() + LIMIT, format!("\"h{spare}\""));
        while !std::fs::read_to_string(&record).is_ok_and(|r| r.contains(&host)) {
            want(Instant::now() < end, || {
                format!("generation 1 did not become redundant with {host}")
            })?;
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    job.verdict()
}

/// Two racks of three are lost one after the other, each at once with all that its hosts had: the job goes on on the
/// hosts that are left. Without the domains, hosts 1 and 3 would be of one group, which survives the loss of one.
fn lost_domains(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "redundancy-domains", 6, 6)?.unhurried();
    let program = job.program(place, "mpi/mpi_p2p")?;
    for host in 1..=6 {
        job.on_host(host, &["mkdir", LOCAL])?;
    }
    let racks = r#"[["h1", "h3"], ["h2", "h4"], ["h5", "h6"]]"#;
    let text = format!("[redundancy]\nscheme = \"xor\"\ngroup = 3\nlocal = \"{LOCAL}\"\ndomains = {racks}\n");
    let config = job.work.join("belay.toml");
    std::fs::write(&config, text).map_err(|e| e.to_string())?;
    job.options = vec!["--config".into(), config.display().to_string()];
    job.launch(&program)?;
    // The first rack has mpirun's host too. Three parts in each of the two that are left then make three groups.
    for (rack, at) in [([1, 3], [2, 2, 5, 4, 5, 6]), ([5, 6], [2, 2, 4, 4, 2, 4])] {
        std::thread::sleep(Duration::from_millis(rng.below(300)));
        checkpoint(&job).map_err(|e| format!("before h{rack:?} are lost: {e}"))?;
        std::thread::sleep(Duration::from_millis(rng.below(200)));
        job.crash();
        rack.iter().try_for_each(|host| lose(&job, *host))?;
        job.at = at.to_vec();
        job.restart_at(&[]).map_err(|e| format!("h{rack:?} lost: {e}"))?;
    }
    job.verdict()
}

/// All pages of the chunks on a host, so that some of them are of use, are overwritten.
fn scribble(job: &Job, host: usize) -> Result<(), Failure> {
    let script = format!(
        "for f in {LOCAL}/belay-*/*/chunks/pages-*.bpg; do n=$((($(stat -c %s $f) - 24) / 4112)); \
         dd if=/dev/urandom of=$f bs=4096 count=$n conv=notrunc status=none || exit; done"
    );
    job.on_host(host, &["sh", "-c", &script]).map(drop)
}

/// Bits change: in a chunk while the program runs, which is named, and of which the next checkpoint makes no use; in a
/// chunk, which is rebuilt where it is; in parity, which `verify` finds, and which is not used, so that the loss of a
/// host is then one too many.
fn damage(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut job = launched(place, "redundancy-damage", (3, 4), "xor")?;
    checkpoint(&job)?;
    scribble(&job, 2)?;
    let o = job.belay(&["checkpoint", "--quiet", "--level", "redundant", &job.dir()])?;
    let said = text(&o);
    if o.status.success() || !(said.contains("h2: ") && said.contains("damaged") && said.contains(".bpg")) {
        return Err(format!("a checkpoint with a damaged chunk: {said}"));
    }
    // The root sees nothing of what lies there, and does not count it all the same.
    let said = job.must(&["list"])?;
    want(said.contains("damaged: part "), || {
        format!("after the chunk was found damaged: {said}")
    })?;
    checkpoint(&job).map_err(|e| format!("after one with a damaged chunk: {e}"))?;
    // The next one begins from what is known of the last.
    let flip_record = r#"f=$(ls "$0"/redundant/0*.json | tail -n 1); printf X | dd of="$f" bs=1 seek=20 conv=notrunc status=none"#;
    job.on_host(1, &["sh", "-c", flip_record, &job.dir()])?;
    checkpoint(&job).map_err(|e| format!("after a record has been damaged: {e}"))?;
    job.crash();
    flip(&job, 3, "*/chunks/pages-*.bpg", 5000)?;
    job.restart_at(&[]).map_err(|e| format!("a chunk is damaged: {e}"))?;
    checkpoint(&job)?;
    job.crash();
    let o = job.belay(&["verify", &job.dir()])?;
    let said = text(&o);
    let elsewhere = "not read here: part 1 (on h2), part 2 (on h3)";
    if !(o.status.success() && said.contains("parity of its group whole") && said.contains(elsewhere)) {
        return Err(format!("verify of whole parity: {said}"));
    }
    let said = job.must(&["list"])?;
    want(!said.contains("damaged"), || said)?;
    for host in [1, 3] {
        flip(&job, host, "*/parity/*.bpar", 0)?;
    }
    let o = job.belay(&["verify", &job.dir()])?;
    if o.status.success() || !text(&o).contains("checksum of the block at 0 does not match") {
        return Err(format!("verify of damaged parity: {}", text(&o)));
    }
    // Part 1 with all its host had.
    job.on_host(2, &["sh", "-c", &format!("mkdir /tmp/kept && mv {LOCAL}/* /tmp/kept")])?;
    job.at[1] = 4;
    let words = job.restart_words();
    let o = output(job.command(1, &words.iter().map(String::as_str).collect::<Vec<_>>()), LIMIT)?;
    let said = text(&o);
    if o.status.success() || !said.contains("cannot be rebuilt") || !said.contains("h2") {
        return Err(format!("a restart without enough blocks: {said}"));
    }
    job.on_host(2, &["sh", "-c", &format!("mv /tmp/kept/* {LOCAL}")])?;
    job.restart_at(&[]).map_err(|e| format!("the host is back: {e}"))?;
    job.verdict()?;
    job.crash();
    for (words, stays) in [
        (&["gc"][..], "other parts: not looked at"),
        (&["gc", "--all"], "part 1: what it has lies on another host"),
    ] {
        let said = job.must(words)?;
        want(said.contains(stays), || format!("{words:?}: {said}"))?;
    }
    Ok(())
}

/// The agent of a host is killed while it encodes: the generation stays what it was, and the job restarts from it.
fn killed_encoder(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = launched(place, "redundancy-killed", (3, 3), "reed-solomon:3:1")?;
    checkpoint(&job)?;
    let mut waits = job.command(1, &[&job.belay, "checkpoint", "--quiet", "--level", "redundant", &job.dir()]);
    let mut client = waits
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|e| e.to_string())?;
    let victim = 2 + rng.below(2) as usize;
    // The parity has a temporary name while it is written.
    let script = format!("while ! ls -A {LOCAL}/belay-*/*/parity | grep -q 000002; do :; done");
    job.on_host(victim, &["sh", "-c", &script])?;
    for pid in job.hosts.find(victim, "belay agent").into_iter().skip(1) {
        // SAFETY: takes numbers only.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
    let begin = Instant::now();
    let ended = loop {
        match client.try_wait().map_err(|e| e.to_string())? {
            Some(status) => break status,
            None if begin.elapsed() > LIMIT => return Err("the client waits for ever".into()),
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let o = job.belay(&["status", "--json", &job.dir()])?;
    let redundant = text(&o).matches("\"level\": \"redundant\"").count();
    // It may have been done just before.
    if redundant != 1 + usize::from(ended.success()) {
        return Err(format!("{ended}, but {redundant} generations are redundant: {}", text(&o)));
    }
    job.crash();
    job.restart_at(&[])?;
    checkpoint(&job)?;
    job.verdict()
}

/// Checkpoints come quickly, of which two are kept: what somebody waits for stays on every host until it is redundant.
fn incessant(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let quickly = ["--ckpt-interval", "200ms"];
    let mut job = launched_with(&quickly, place, "redundancy-incessant", (3, 3), "xor:3")?;
    for round in 0..6 {
        checkpoint(&job).map_err(|e| format!("round {round}: {e}"))?;
    }
    job.verdict()
}

/// Bytes of parity that were encoded for generation `number`, and that were taken over from one before, on all hosts.
fn encoded(job: &Job, number: u64) -> Result<(u64, u64), Failure> {
    let (line, of) = ("generation is redundant", format!("\"generation\":{number},"));
    let logs = files(&PathBuf::from(job.dir()).join("log"), ".jsonl");
    let text: String = logs.iter().filter_map(|l| std::fs::read_to_string(l).ok()).collect();
    let found = text.lines().rfind(|l| l.contains(line) && l.contains(&of));
    let field = |name: &str| -> Option<u64> {
        let (_, rest) = found?.split_once(&format!("\"{name}\":"))?;
        rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    };
    let both = field("encoded_bytes").zip(field("kept_bytes"));
    both.ok_or_else(|| format!("nothing is said of what generation {number} cost: {text}"))
}

/// Of a job of which little changes little is encoded at a checkpoint, also after hosts have been lost; and what was
/// taken over is good: the next host that is lost is rebuilt from it.
fn little_changes(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = program_launched("mpi/mpi_field", &[], place, "redundancy-little", (4, 6), "xor:4")?;
    checkpoint(&job)?;
    let (all, kept) = encoded(&job, 1)?;
    want(kept == 0 && all > 4 * (96 << 20) / 3, || {
        format!("of the first checkpoint {all} bytes were encoded, {kept} taken over")
    })?;
    // What the others have declared lies on their disks.
    let o = job.belay(&["export", &job.dir()])?;
    let said = String::from_utf8_lossy(&o.stderr);
    want(
        o.status.code() == Some(88) && said.contains("what part 1, which ran on h"),
        || format!("export: {o:?}"),
    )?;
    // Here lies nothing of it: that is no damage.
    let o = output(job.command(5, &[&job.belay, "verify", &job.dir()]), LIMIT)?;
    want(
        o.status.code() == Some(88) && text(&o).contains("run belay verify there"),
        || format!("verify on h5: {o:?}"),
    )?;
    let mut number = 1;
    for (part, spare) in [(1, 5), (0, 6)] {
        for _ in 0..2 {
            std::thread::sleep(Duration::from_millis(rng.below(300)));
            checkpoint(&job)?;
            number += 1;
            let (new, kept) = encoded(&job, number)?;
            want(new <= (new + kept) / 10, || {
                format!("checkpoint {number}: {new} bytes encoded, {kept} taken over")
            })?;
        }
        job.crash();
        let gone = std::mem::replace(&mut job.at[part], spare);
        lose(&job, gone)?;
        job.restart_at(&[]).map_err(|e| format!("h{gone} lost: {e}"))?;
    }
    job.verdict()
}

fn main() {
    let mut target = Target::over_hosts("redundancy");
    type Run = fn(&Place, &mut Rng) -> Result<(), Failure>;
    let tests: [(&str, Run); 13] = [
        ("partner", |p, r| lost_hosts(p, "partner:3", (3, 4), 1, r)),
        ("xor", |p, r| lost_hosts(p, "xor", (3, 4), 1, r)),
        ("reed_solomon", |p, r| lost_hosts(p, "reed-solomon:4:2", (4, 6), 2, r)),
        ("lost_again", lost_again),
        ("domains", lost_domains),
        ("damage", damage),
        ("killed_encoder", killed_encoder),
        ("incessant", incessant),
        ("little_changes", little_changes),
        ("with_durable", levels::cheapest),
        ("levels", levels::at_random),
        ("in_memory", levels::memory),
        ("at_rest", levels::at_rest),
    ];
    for (name, test) in tests {
        target.once(name, test);
    }
    target.at_a_time(3);
    target.first(&["in_memory", "with_durable", "reed_solomon", "damage", "levels"]);
    target.run();
}
