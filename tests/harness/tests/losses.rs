//! Parts of a job on several hosts are lost: an agent is killed, and a host is cut off, in each phase of a checkpoint;
//! hosts die one after the other.
//!
//! The agent concerned is traced, and names each phase in its log as it begins, so every phase is hit at one of its
//! first steps, not by chance.

use belay_still::Watch;
use belay_tests::across::{files, Job, LIMIT};
use belay_tests::agents::{agent, number_inside};
use belay_tests::beat;
use belay_tests::build::Kind;
use belay_tests::expect::{io, want};
use belay_tests::job::{output, text};
use belay_tests::place::{Place, User};
use belay_tests::rng::Rng;
use belay_tests::stepper::{step, step_each, Step, Verdict, PHASES};
use belay_tests::target::Target;
use belay_tests::Failure;
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

#[path = "losses/dead.rs"]
mod dead;
#[path = "losses/relay.rs"]
mod relay;
#[path = "losses/slow.rs"]
mod slow;

/// A phase is hit at one of so many steps at its beginning.
const FIRST_STEPS: u64 = 3;

/// The others hear of an agent that was killed within two seconds; here, where agents are stepped through and much else
/// may run, within this, long before its silence would be noticed (10 s, the root's 15 s).
const TOLD: Duration = Duration::from_secs(5);

/// A checkpoint during which `strike` decides what becomes of the agent of `part`, at step `at` of `phase` or where the
/// phase ends. What the command said.
fn checkpoint_struck(
    job: &Job,
    part: usize,
    (phase, at): (&str, u64),
    strike: impl Fn() -> Result<Verdict, Failure>,
) -> Result<Output, Failure> {
    let taking = job.command(job.at[0], &[&job.belay, "checkpoint", "--quiet", &job.dir()]);
    let (mut inside, mut struck) = (0, None);
    let at_step = |s: Step| {
        let here = s.phase == Some(phase);
        inside += u64::from(here);
        if struck.is_none() && (inside > at || (inside > 0 && !here)) {
            struck = Some(strike());
            return struck.iter().flatten().copied().next().unwrap_or(Verdict::Leave);
        }
        Verdict::On
    };
    let (steps, taken) = step(agent(job, part)?, move || output(taking, LIMIT), at_step)?;
    let taken = taken?;
    struck.unwrap_or_else(|| Err(format!("phase {phase} was not seen in {steps} steps: {}", text(&taken))))?;
    Ok(taken)
}

/// How often the logs of part `part` contain `words`.
fn said_in_logs(job: &Job, part: usize, words: &str) -> usize {
    let logs = files(Path::new(&job.dir_of(part)).join("log").as_ref(), ".jsonl");
    let said = |log| std::fs::read_to_string(log).unwrap_or_default().matches(words).count();
    logs.iter().map(said).sum()
}

/// How often the part has been told that it has lost the root.
fn roots_lost(job: &Job) -> usize {
    said_in_logs(job, 1, "the root is lost")
}

/// After a loss during a checkpoint, which has come to what `taken` says: it has an end, a reason, and the newest whole
/// generation restarts on other hosts than that of `part`.
fn goes_on_elsewhere(job: &mut Job, part: usize, before: u64, taken: &Output) -> Result<(), Failure> {
    want(taken.status.success() || text(taken).contains("belay:"), || {
        format!("no reason: {}", text(taken))
    })?;
    let newest = job.newest();
    want(newest == before || (newest == before + 1), || {
        format!("generation {newest} after {before}")
    })?;
    want(newest > before || !taken.status.success(), || {
        format!("not there: {}", text(taken))
    })?;
    job.crash();
    // The host that had none gets the lost one's part.
    let spare = (1..=3).find(|h| !job.at.contains(h)).ok_or("no spare host")?;
    job.at[part] = spare;
    job.at.reverse();
    job.restart_at(&[])?;
    want(!job.said().contains("belay:"), || {
        format!("the restart complains: {}", job.said())
    })
}

fn started(place: &Place, label: &str) -> Result<Job, Failure> {
    let mut job = Job::new(place, label, 2, 3)?.unhurried();
    let program = job.program(place, "mpi/mpi_p2p")?;
    job.options = vec!["--log-level".into(), "debug".into()];
    job.launch(&program)?;
    Ok(job)
}

/// The agent of a part, or of the root, is killed in each phase: the others are told, nothing hangs, and the newest
/// whole checkpoint restarts on other hosts.
fn killed(place: &Place, part: usize, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = started(place, &format!("losses-killed{part}"))?;
    let mut longest = Duration::ZERO;
    for phase in PHASES {
        let in_phase = |e: Failure| format!("{phase}: {e}");
        job.checkpoint().map_err(in_phase)?;
        let before = job.newest();
        // Not because the time was over.
        let ended = |job: &Job| said_in_logs(job, 1, "nobody listens there any more");
        let known = ended(&job);
        let moment = (phase, rng.below(FIRST_STEPS));
        let lost = format!("the part of the job on h{} is lost", job.at[1]);
        let told = || match part {
            0 => ended(&job) > known,
            _ => job.said().contains(&lost),
        };
        let watch = Watch::begin();
        let since = std::cell::Cell::new((Instant::now(), Duration::ZERO));
        let kill = || {
            since.set((Instant::now(), watch.stood()));
            Ok(Verdict::Kill)
        };
        let taken = checkpoint_struck(&job, part, moment, kill).map_err(in_phase)?;
        job.comes_true("the others are told of the loss", told).map_err(in_phase)?;
        let (since, stood) = since.get();
        let took = since.elapsed().saturating_sub(watch.stood() - stood);
        want(took < TOLD, || {
            in_phase(format!("the others are told only after {} ms", took.as_millis()))
        })?;
        longest = longest.max(took);
        if part > 0 {
            let o = job.belay(&["checkpoint", "--quiet", &job.dir()])?;
            want(!o.status.success(), || {
                in_phase("a checkpoint without the lost part was taken".into())
            })?;
        }
        goes_on_elsewhere(&mut job, part, before, &taken).map_err(|e| format!("{moment:?}: {e}"))?;
    }
    println!("killed agents: the others told after at most {} ms", longest.as_millis());
    job.verdict()
}

/// The agent of the root is killed when it has committed a checkpoint and nobody knows of that yet: the part keeps what
/// it has of it, from which the job restarts.
fn committed(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "losses-committed", 2, 2)?.unhurried();
    let program = job.program(place, "mpi/mpi_p2p")?;
    job.launch(&program)?;
    let taking = job.command(1, &[&job.belay, "checkpoint", "--quiet", &job.dir()]);
    let at_step = |_| match job.newest() {
        0 => Verdict::On,
        _ => Verdict::Kill,
    };
    let (_, taken) = step_each(agent(&job, 0)?, move || output(taking, LIMIT), at_step)?;
    let taken = taken?;
    want(!taken.status.success() && job.newest() == 1, || {
        format!("not killed between commit and answer: {}", text(&taken))
    })?;
    job.comes_true("the part gives the root up", || said_in_logs(&job, 1, "part given up") > 0)?;
    job.crash();
    job.restart(&[])?;
    job.checkpoint()?;
    job.verdict()
}

/// The host of a part is cut off in each phase: the user is told, the checkpoint has an end, and the newest whole one
/// restarts on other hosts.
fn partition(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = started(place, "losses-partition")?;
    // The other side waits 15 s for the root to come back, so it is heard once.
    let heard = rng.below(PHASES.len() as u64) as usize;
    for (n, phase) in PHASES.into_iter().enumerate() {
        let in_phase = |e: Failure| format!("{phase}: {e}");
        job.checkpoint().map_err(in_phase)?;
        let (before, known, cut) = (job.newest(), roots_lost(&job), job.at[1]);
        let moment = (phase, rng.below(FIRST_STEPS));
        let off = || job.hosts.cut(cut, true).map(|()| Verdict::Leave);
        let taken = checkpoint_struck(&job, 1, moment, off).map_err(in_phase)?;
        job.says(&format!("the part of the job on h{cut} is lost"))
            .map_err(in_phase)?;
        if n == heard {
            job.comes_true("the part has noticed too", || roots_lost(&job) > known)
                .map_err(in_phase)?;
        }
        goes_on_elsewhere(&mut job, 1, before, &taken).map_err(|e| format!("{moment:?}: {e}"))?;
        job.hosts.cut(cut, false)?;
    }
    job.verdict()
}

/// The words of `belay run`, with two restarts and these options, for a command.
fn run_words(job: &Job, options: &[&str], command: &[String]) -> Vec<String> {
    let dir = job.dir();
    let run = [&job.belay, "run", "--across-hosts", "--restarts", "2", "--ckpt-dir", &dir];
    let words = run.iter().chain(options).chain(&["--"]).map(|w| (*w).to_owned());
    words.chain(command.iter().cloned()).collect()
}

fn start(job: &mut Job, words: &[String]) -> Result<(), Failure> {
    job.start(&words.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Runs net_alone, with one process on h1 and one on h2, from a shell that has started a `sleep` and executes belay in
/// its own place. The words that do it again.
fn run_alone(job: &mut Job, place: &Place) -> Result<Vec<String>, Failure> {
    let program = job.program(place, "net/net_alone")?;
    let shell = ["sh", "-c", r#"sleep 100000 & exec "$0" "$@""#].map(str::to_owned);
    let run = run_words(job, &[], &[program, "h2".into()]);
    let words: Vec<String> = shell.into_iter().chain(run).collect();
    start(job, &words)?;
    both_go_on(job).map(|()| words)
}

/// Waits until both processes of net_alone have done something after this call.
fn both_go_on(job: &mut Job) -> Result<(), Failure> {
    ["beat", "beat.below"].iter().try_for_each(|file| job.progress_of(file))
}

/// The processes on a host that execute a file of this name.
fn named(job: &Job, host: usize, name: &str) -> Vec<i32> {
    let is = |p: &i32| std::fs::read_to_string(format!("/proc/{p}/comm")).is_ok_and(|c| c.trim() == name);
    job.hosts.find(host, name).into_iter().filter(is).collect()
}

/// Agents are killed, and nothing else, first that of part `first` as it was launched, then the other one after a
/// restart: `belay run` ends what each leaves, which would not end by itself, and restarts the job; what is beside it
/// is not touched.
fn agents(place: &Place, user: User, first: usize, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::by(user, place, &format!("losses-agents{first}"), Kind::C, 2, 2)?;
    run_alone(&mut job, place)?;
    job.comes_true("the shell has started a process", || named(&job, 1, "sleep").len() == 1)?;
    let beside = named(&job, 1, "sleep");
    for (n, part) in [(1, first), (2, 1 - first)] {
        let at = |e: Failure| format!("loss {n}: {e}");
        std::thread::sleep(Duration::from_millis(rng.below(300)));
        want(job.take().map_err(at)?, || at("the job has ended".into()))?;
        both_go_on(&mut job).map_err(at)?;
        let (host, left) = (job.at[part], named(&job, job.at[part], "program"));
        want(left.len() == 1, || {
            at(format!("processes {left:?} of the program on h{host}"))
        })?;
        belay_tests::procs::signal(agent(&job, part)?, libc::SIGKILL);
        job.comes_true("what the agent has left is ended", || {
            !named(&job, host, "program").iter().any(|p| left.contains(p))
        })
        .map_err(at)?;
        job.says(&format!(" ({n} of 2 restarts)")).map_err(at)?;
        both_go_on(&mut job).map_err(at)?;
        for host in [1, 2] {
            let there = named(&job, host, "program");
            want(there.len() == 1, || {
                at(format!("processes {there:?} of the program on h{host}"))
            })?;
        }
        want(beside.len() == 1 && named(&job, 1, "sleep") == beside, || {
            at(format!(
                "of {beside:?}, which are no part of the job, {:?} are left",
                named(&job, 1, "sleep")
            ))
        })?;
    }
    job.verdict()
}

/// Another belay is put in the place of the one that runs, as an upgrade does: `belay run` restarts the job with it when
/// an agent is killed.
fn replaced(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::of(place, "losses-replaced", Kind::C, 2, 2)?;
    run_alone(&mut job, place)?;
    want(job.take()?, || "the job has ended".into())?;
    for file in [
        &job.belay,
        &format!("{}-inject", job.belay),
        &format!("{}-restorer", job.belay),
    ] {
        let new = format!("{file}.new");
        io("copy belay", std::fs::copy(file, &new))?;
        io("replace belay", std::fs::rename(&new, file))?;
    }
    belay_tests::procs::signal(agent(&job, 0)?, libc::SIGKILL);
    job.says(" (1 of 2 restarts)")?;
    both_go_on(&mut job)?;
    job.verdict()
}

/// Who ends the job while `belay run` restarts it by itself ends it for good: while it ends what is left, while it
/// waits for parts that may be cut off, and while parts are started.
fn ended_in_restart(place: &Place, moment: &str, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::of(place, &format!("losses-ended-{moment}"), Kind::C, 2, 2)?;
    run_alone(&mut job, place)?;
    std::thread::sleep(Duration::from_millis(rng.below(300)));
    want(job.take()?, || "the job has ended".into())?;
    both_go_on(&mut job)?;
    belay_tests::procs::signal(agent(&job, 1)?, libc::SIGKILL);
    match moment {
        "ending" => job.says("ending what is left of the job")?,
        "waiting" => job.comes_true("it begins again", || !job.hosts.find(1, "--again").is_empty())?,
        _ => job.says(" (1 of 2 restarts)")?,
    }
    belay_tests::procs::signal(job.front_pid()?, libc::SIGTERM);
    let mark = job.work.join("beat.term");
    let begin = Instant::now();
    // A restart that was over by then has given the program the signal, which it ignores.
    while !job.has_ended()? && begin.elapsed() < LIMIT {
        if moment == "restarting" && mark.exists() {
            std::fs::write(job.work.join("go"), "").map_err(|e| e.to_string())?;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let (end, said) = (job.end()?, job.said());
    want(!end.success() || mark.exists(), || format!("{end}: {said}"))?;
    want(moment == "restarting" || !said.contains("restarts)"), || {
        format!("restarted all the same: {said}")
    })?;
    job.comes_true("all of the job ends", || {
        [1, 2]
            .iter()
            .all(|h| named(&job, *h, "program").is_empty() && named(&job, *h, "belay").is_empty())
    })
}

/// The process that stands in for a remote shell is killed, and another one, which is none of the job's, gets its
/// number: it is not told how the remote shell has ended.
fn number_used_again(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::of(place, "losses-number", Kind::C, 2, 2)?;
    let program = job.program(place, "net/net_alone")?;
    let (go, beat) = (job.work.join("go"), job.work.join("beat"));
    let (go, beat) = (go.display(), beat.display());
    let script = format!(
        "ssh h2 '{program} below {go} {beat}.below' & while [ ! -e {go} ]; do n=$((n + 1)); echo $n > {beat}; sleep 0.05; done; echo PASS"
    );
    job.launch_words(&["sh", "-c", &script])?;
    both_go_on(&mut job)?;
    let standin = |p: &i32| std::fs::read_link(format!("/proc/{p}/exe")).is_ok_and(|exe| exe.ends_with("belay"));
    let standin = named(&job, 1, "ssh").into_iter().find(standin).ok_or("no stand-in")?;
    let number = number_inside(standin).ok_or("the stand-in has no number")?;
    belay_tests::procs::signal(standin, libc::SIGKILL);
    job.comes_true("the stand-in is gone", || !Path::new(&format!("/proc/{standin}")).exists())?;
    let take = format!(
        "while :; do echo {} > /proc/sys/kernel/ns_last_pid; sleep 100000 > /dev/null 2>&1 & [ $! = {number} ] && break; kill $!; done",
        number - 1
    );
    job.on_host(1, &["sh", "-c", &take])?;
    let is_it = |p: &i32| number_inside(*p) == Some(number);
    let other = |job: &Job| named(job, 1, "sleep").into_iter().find(is_it);
    want(other(&job).is_some(), || "nobody has the number".into())?;
    for below in named(&job, 2, "program") {
        belay_tests::procs::signal(below, libc::SIGKILL);
    }
    job.comes_true("the remote shell has ended", || {
        said_in_logs(&job, 0, "remote shell ended") > 0
    })?;
    // Its agent has answered, so it has done what it does then.
    job.must(&["status", "--json"])?;
    want(other(&job).is_some(), || "another process was taken for the stand-in".into())?;
    job.verdict()
}

/// Who waits for a remote shell is told how that ends: after a restart, and where the agent is killed and the program goes on.
fn shell_status(place: &Place, (restarted, killed): (bool, bool)) -> Result<(), Failure> {
    let mut job = Job::of(place, &format!("losses-shell-{restarted}-{killed}"), Kind::C, 2, 3)?;
    let program = job.program(place, "net/net_alone")?;
    let (go, beat) = (job.work.join("go"), job.work.join("beat"));
    let (go, beat) = (go.display(), beat.display());
    let script = format!("ssh h2 '{program} below {go} {beat}; exit 7'; echo PASS after $?");
    job.launch_words(&["sh", "-c", &script])?;
    if restarted {
        job.checkpoint()?;
        job.crash();
        job.shift(1);
        job.restart_at(&[])?;
    }
    if killed {
        belay_tests::procs::signal(agent(&job, 0)?, libc::SIGKILL);
        job.says("the program goes on")?;
    }
    job.progress()?;
    job.verdict()?;
    want(job.said().contains("PASS after 7"), || job.said())
}

/// The same for a remote shell that was started only after the restart.
fn later_shell_status(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::of(place, "losses-shell-later", Kind::C, 2, 2)?;
    let program = job.program(place, "net/net_alone")?;
    let [go, beat, begin] = ["go", "beat", "begin"].map(|f| job.work.join(f));
    let script = format!(
        "while [ ! -e {} ]; do n=$((n + 1)); echo $n > {2}; sleep 0.05; done; ssh h2 '{program} below {1} {2}.below; exit 7'; echo PASS after $?",
        begin.display(),
        go.display(),
        beat.display()
    );
    job.launch_words(&["sh", "-c", &script])?;
    job.checkpoint()?;
    job.crash();
    job.restart(&[])?;
    std::fs::write(begin, "").map_err(|e| e.to_string())?;
    job.progress_of("beat.below")?;
    belay_tests::procs::signal(agent(&job, 0)?, libc::SIGKILL);
    job.says("the program goes on")?;
    job.progress_of("beat.below")?;
    job.verdict()?;
    want(job.said().contains("PASS after 7"), || job.said())
}

/// The agent is killed, and the command ends before its remote shells do: who stands in for them is told of their end all
/// the same, and stays no longer. One shell ends in time, the other does not.
fn shell_left(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::of(place, "losses-shell-left", Kind::C, 2, 2)?;
    let [beat, begin] = ["beat", "begin"].map(|f| job.work.join(f));
    let shell = |seconds: u32| format!("ssh h2 'sleep {seconds}' > /dev/null 2>&1 & ");
    let turn = format!("n=$((n + 1)); echo $n > {}; sleep 0.05", beat.display());
    let script = format!(
        "{}{}while [ ! -e {} ]; do {turn}; done; echo PASS; exit 5",
        shell(4),
        shell(60),
        begin.display()
    );
    job.launch_words(&["sh", "-c", &script])?;
    let own = job.work.clone();
    let stand_in = || {
        let is_one = |pid: &i32| {
            let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let program = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
            words.starts_with(b"ssh\0") && program.starts_with(&own)
        };
        belay_tests::procs::all().into_iter().filter(is_one).count()
    };
    job.comes_true("two stand-ins", || stand_in() == 2)?;
    belay_tests::procs::signal(agent(&job, 0)?, libc::SIGKILL);
    job.says("the program goes on")?;
    std::fs::write(begin, "").map_err(|e| e.to_string())?;
    let end = job.end()?;
    want(end.code() == Some(5) && job.said().contains("PASS"), || {
        format!("{end}: {}", job.said())
    })?;
    job.comes_true("no stand-in", || stand_in() == 0)
}

/// A process of the job hangs in the kernel when its agent is killed: `belay run` does not wait for it for ever, and names it.
fn hung(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::of(place, "losses-hung", Kind::C, 1, 1)?;
    let (mount, program) = ("/tmp/hung", job.program(place, "net/hung_mount")?);
    job.on_host(1, &["mkdir", mount])?;
    let mut server = job.command(1, &[&program, mount]);
    let mut server = server.stdout(Stdio::null()).spawn().map_err(|e| e.to_string())?;
    let mounts = |job: &Job| job.on_host(1, &["cat", "/proc/mounts"]).unwrap_or_default();
    job.comes_true("the file system is there", || mounts(&job).contains(" /tmp/hung fuse"))?;
    let (ask, beat) = (job.work.join("ask"), job.work.join("beat"));
    let script = format!(
        "while :; do n=$((n + 1)); echo $n > {}; [ -e {} ] && cat {mount}/x; sleep 0.05; done",
        beat.display(),
        ask.display()
    );
    let words = run_words(&job, &[], &["sh", "-c", &script].map(str::to_owned));
    start(&mut job, &words)?;
    job.progress()?;
    job.checkpoint()?;
    std::fs::write(&ask, "").map_err(|e| e.to_string())?;
    job.comes_true("a process asks", || !named(&job, 1, "cat").is_empty())?;
    let asks = named(&job, 1, "cat");
    belay_tests::procs::signal(agent(&job, 0)?, libc::SIGKILL);
    let end = job.end();
    let left = named(&job, 1, "cat");
    server.kill().and_then(|()| server.wait()).map_err(|e| e.to_string())?;
    let (end, said) = (end?, job.said());
    want(left == asks, || format!("it did not hang: {said}"))?;
    let named = [
        "on h1: process ",
        "(cat /tmp/hung/x; state D",
        "does not end",
        "call belay restart",
    ];
    want(end.code() == Some(71) && named.iter().all(|w| said.contains(w)), || {
        format!("{end}: {said}")
    })
}

/// A job that its user has ended does not come back when its agent is killed then, and ends as the program does: as it
/// was launched, and after a restart.
fn ended_by_user(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::by(user, place, &format!("losses-ended-{}", user.name()), Kind::C, 2, 2)?;
    let words = run_alone(&mut job, place)?;
    std::thread::sleep(Duration::from_millis(rng.below(300)));
    want(job.take()?, || "the job has ended".into())?;
    for restarted in [false, true] {
        let at = |e: Failure| format!("restarted {restarted}: {e}");
        let mut stop = None;
        if restarted {
            start(&mut job, &words)?;
            both_go_on(&mut job).map_err(at)?;
            // A signal before that gives the restart up.
            want(job.answers().map_err(at)?, || at("the job has ended".into()))?;
            belay_tests::procs::signal(job.front_pid()?, libc::SIGTERM);
        } else {
            let mut c = job.command(1, &[&job.belay, "stop", "--grace", "1h", &job.dir()]);
            stop = Some(c.stderr(Stdio::null()).spawn().map_err(|e| e.to_string())?);
        }
        let mark = job.work.join("beat.term");
        job.comes_true("the program is told to end", || mark.exists()).map_err(at)?;
        if restarted {
            // What the part's agent leaves goes on, too, when that has heard of it.
            let told = || said_in_logs(&job, 1, "told that nothing is restarted") > 0;
            job.comes_true("the part is told", told).map_err(at)?;
            belay_tests::procs::signal(agent(&job, 1)?, libc::SIGKILL);
            job.says("the part of the job on h2 is lost").map_err(at)?;
            both_go_on(&mut job).map_err(at)?;
        }
        // It has answered a request, so that its front has heard of what came before.
        belay_tests::procs::signal(agent(&job, 0)?, libc::SIGKILL);
        job.says("the program goes on").map_err(at)?;
        job.progress().map_err(at)?;
        std::fs::write(job.work.join("go"), "").map_err(|e| e.to_string())?;
        let end = job.end().map_err(at)?;
        let said = job.said();
        want(end.success() && !said.contains("restarts)"), || at(format!("{end}: {said}")))?;
        job.comes_true("the part ends by itself", || named(&job, 2, "program").is_empty())
            .map_err(at)?;
        if let Some(mut stop) = stop {
            stop.wait().map_err(|e| e.to_string())?;
        }
        for file in ["go", "beat.term"] {
            std::fs::remove_file(job.work.join(file)).map_err(|e| e.to_string())?;
        }
    }
    Ok(())
}

fn main() {
    let mut target = Target::over_hosts("losses");
    target.once("killed_part", |p, r| killed(p, 1, r));
    target.once("killed_root", |p, r| killed(p, 0, r));
    target.once("killed_relay", relay::killed);
    target.once("committed", committed);
    target.once("partition", partition);
    target.once("slow_in_restart", slow::in_restart);
    // Each waits twice for hosts that may only be cut off.
    target.once("agents::of_root_first::root", |p, r| agents(p, User::Root, 0, r));
    target.once("agents::of_part_first::user", |p, r| agents(p, User::Ordinary, 1, r));
    target.once("replaced", replaced);
    target.by_user("ended_by_user", |_| true, ended_by_user);
    for moment in ["ending", "waiting", "restarting"] {
        target.once(&format!("ended_in_restart::{moment}"), move |p, r| {
            ended_in_restart(p, moment, r)
        });
    }
    target.once("number_used_again", number_used_again);
    let cases = [
        ("shell_without_agent", (false, true)),
        ("shell_after_restart", (true, false)),
        ("shell_after_restart_without_agent", (true, true)),
    ];
    for (name, case) in cases {
        target.once(name, move |p, _| shell_status(p, case));
    }
    target.once("later_shell_after_restart_without_agent", later_shell_status);
    target.once("shell_left_without_agent", shell_left);
    if Path::new("/dev/fuse").exists() {
        target.once("hung", hung);
    }
    target.once("dying", dead::while_asked);
    target.once("spare", dead::spare);
    target.at_a_time(3);
    target.first(&["partition", "spare", "agents", "killed_relay", "killed_part", "killed_root"]);
    target.run();
}
