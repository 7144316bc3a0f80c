//! Programs that use a GPU, whose driver takes their state off it for a checkpoint and puts it back, also after a
//! restart. The driver is a stand-in (`tests/fake-cuda`).

use belay_still::Watch;
use belay_tests::expect::{refused, want};
use belay_tests::job::{output, text, Job};
use belay_tests::place::{am_root, Place, User};
use belay_tests::rng::Rng;
use belay_tests::stepper::{step_each, Verdict};
use belay_tests::target::Target;
use belay_tests::{edges, gpu, procs, Failure};
use std::time::Duration;

#[path = "gpu/asker.rs"]
mod asker;
#[path = "gpu/hosts.rs"]
mod hosts;
#[path = "gpu/lost.rs"]
mod lost;
#[path = "gpu/shared.rs"]
mod shared;

const PROGRAM: &str = "gpu_work";
/// Its asynchronous I/O is served by a process of the job.
const SERVED: &str = "aio_served";
/// Calls of an agent in a phase at which it is killed.
const SAMPLE: u64 = 5;
const LIMIT: Duration = Duration::from_secs(60);

/// A job whose driver has these faults, and the words that start it. Where it has any, the gate has half a second.
fn prepared(place: &Place, user: User, (words, faults): (&str, &str)) -> Result<(Job, [Vec<String>; 2]), Failure> {
    let label = format!("gpu-{words}{}", faults.replace(':', "-"));
    let mut job = Job::new(place, &label, user)?;
    job.set("LD_LIBRARY_PATH", &gpu::build(place)?.display().to_string());
    job.set("BELAY_TEST_QUIET_PARENT", "1");
    job.set("FAKE_CUDA", faults);
    job.set("FAKE_CUDA_FULL", &job.work.join("full").display().to_string());
    let config = job.work.join("belay.toml");
    let limit = if faults.is_empty() { "30s" } else { "500ms" };
    std::fs::write(&config, format!("[gate]\nlimit = \"{limit}\"\n")).map_err(|e| format!("write {}: {e}", config.display()))?;
    let program = place.programs().join(PROGRAM).display().to_string();
    let argv = std::iter::once(program).chain(words.split_whitespace().map(str::to_owned));
    let options = ["--config", &config.display().to_string(), "--log-level", "debug"].map(str::to_owned);
    let argv = argv.collect();
    Ok((job, [options.to_vec(), argv]))
}

/// The same, launched.
fn launched(place: &Place, user: User, how: (&str, &str)) -> Result<Job, Failure> {
    let (mut job, [options, argv]) = prepared(place, user, how)?;
    job.launch(&options, &argv)?;
    job.progress(LIMIT)?;
    Ok(job)
}

/// Checkpoints, and restarts from two of them.
fn taken(place: &Place, user: User, how: (&str, &str)) -> Result<(), Failure> {
    let mut job = launched(place, user, how)?;
    for _ in 0..2 {
        for _ in 0..3 {
            job.checkpoint()?;
            job.progress(LIMIT)?;
        }
        job.crash_and_restart(LIMIT)?;
    }
    job.checkpoint()?;
    let o = job.checkpoint_raw(&["--then", "stop"])?;
    want(o.status.success(), || text(&o))?;
    job.wait(LIMIT)?;
    job.clear_beat()?;
    job.restart(&[])?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// Restarts with these GPUs here, of which the environment allows some, and wants a refusal with these words.
fn not_restarted(job: &mut Job, (gpus, allowed): (&str, &str), words: &[&str]) -> Result<(), Failure> {
    job.kill_all()?;
    job.clear_beat()?;
    job.set("FAKE_CUDA_GPU", gpus);
    job.set("CUDA_VISIBLE_DEVICES", allowed);
    job.restart(&[])?;
    let status = job.wait(LIMIT)?;
    let said = job.output_text();
    want(!status.success() && words.iter().all(|w| said.contains(w)), || said)?;
    job.left_behind()
}

/// Another GPU of the same kind takes the place of one that is not there; one of another kind does not.
fn other_gpu(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = launched(place, user, ("", ""))?;
    for gpu in ["b Fake GPU", "b Fake GPU", "c Fake GPU"] {
        job.checkpoint()?;
        job.progress(LIMIT)?;
        not_restarted(&mut job, ("d Other", "0"), &["had a GPU Fake GPU", "Other"])?;
        job.set("FAKE_CUDA_GPU", gpu);
        job.restart(&[])?;
        job.progress(LIMIT).map_err(|e| format!("{gpu}: {e}"))?;
    }
    job.checkpoint()?;
    job.verdict(false, LIMIT)
}

/// Only those GPUs are used that the environment of the restart allows.
fn allowed_gpu(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = launched(place, user, ("", ""))?;
    let uuid = format!("GPU-{0}{0}{0}{0}-{0}", "63");
    for (gpus, allowed) in [("b Fake GPU,c Fake GPU", "1"), ("b Fake GPU,c Fake GPU,d Fake GPU", &uuid)] {
        job.checkpoint()?;
        job.progress(LIMIT)?;
        not_restarted(&mut job, (gpus, "7"), &["CUDA_VISIBLE_DEVICES", "Fake GPU"])?;
        not_restarted(&mut job, ("b Fake GPU,e Other", "1"), &["CUDA_VISIBLE_DEVICES", "Other"])?;
        job.set("FAKE_CUDA_GPU", gpus);
        job.set("CUDA_VISIBLE_DEVICES", allowed);
        job.restart(&[])?;
        job.progress(LIMIT).map_err(|e| format!("{gpus}: {e}"))?;
        // It is on the third one, which is all there is now.
        job.checkpoint()?;
        job.set("FAKE_CUDA_GPU", "c Fake GPU");
        job.set("CUDA_VISIBLE_DEVICES", "0");
        job.crash_and_restart(LIMIT).map_err(|e| format!("{gpus}, then: {e}"))?;
    }
    job.verdict(false, LIMIT)
}

/// What the environment hides from a job has a place too when others take those of its GPUs: the driver counts it. Where it
/// has none, that is said.
fn hidden_gpus(place: &Place, user: User) -> Result<(), Failure> {
    let (mut job, [options, argv]) = prepared(place, user, ("", ""))?;
    let here = "a Fake GPU,b Fake GPU,c Other";
    job.set("FAKE_CUDA_GPU", here);
    job.set("CUDA_VISIBLE_DEVICES", "0");
    job.launch(&options, &argv)?;
    job.progress(LIMIT)?;
    job.checkpoint()?;
    for missing in ["GPU-62626262-6262", "GPU-63636363-6363"] {
        let others = if missing.contains("62") {
            "d Fake GPU,e Other"
        } else {
            "d Fake GPU,e Fake GPU"
        };
        not_restarted(&mut job, (others, "0"), &["not to see", missing])?;
    }
    for (gpus, allowed) in [(here, "1"), ("d Fake GPU,e Fake GPU,f Other,g Fake GPU", "1")] {
        job.kill_all()?;
        job.clear_beat()?;
        job.set("FAKE_CUDA_GPU", gpus);
        job.set("CUDA_VISIBLE_DEVICES", allowed);
        job.restart(&[])?;
        job.progress(LIMIT).map_err(|e| format!("{gpus}: {e}"))?;
        job.checkpoint()?;
        job.crash_and_restart(LIMIT).map_err(|e| format!("{gpus}, then: {e}"))?;
    }
    job.verdict(false, LIMIT)
}

/// Each checkpoint is refused with these words, and the program goes on.
fn refuses(place: &Place, user: User, how: (&str, &str), reasons: &[&str]) -> Result<(), Failure> {
    let mut job = launched(place, user, how)?;
    for n in 0..2 {
        let o = job.checkpoint_raw(&["--quiet"])?;
        refused(&o, reasons).map_err(|e| format!("checkpoint {n}: {e}"))?;
        job.progress(LIMIT).map_err(|e| format!("after checkpoint {n}: {e}"))?;
    }
    job.verdict(false, LIMIT)
}

/// What can never be locked is not to be given more time.
fn denied(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = launched(place, user, ("", "denied"))?;
    let o = job.checkpoint_raw(&["--quiet"])?;
    let (program, _) = edges::program_and_agent(&job, PROGRAM)?;
    let whose = format!("process {program}: gpu driver: process {program}: wait for its gpu work");
    refused(&o, &[&whose, "operation not supported", "cannot checkpoint"])?;
    want(!text(&o).contains("more time"), || text(&o))?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// What goes wrong once does no harm: the program goes on, and the next checkpoints are taken. `refusal` is what the
/// first one is refused with.
fn once(place: &Place, user: User, (faults, refusal): (&str, &[&str])) -> Result<(), Failure> {
    let mut job = launched(place, user, ("", faults))?;
    if !refusal.is_empty() {
        refused(&job.checkpoint_raw(&["--quiet"])?, refusal)?;
        job.progress(LIMIT)?;
    }
    for _ in 0..2 {
        job.checkpoint()?;
        job.progress(LIMIT)?;
    }
    job.crash_and_restart(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// Where there is no driver that could be asked.
fn no_driver(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = Job::new(place, "gpu-no-driver", user)?;
    let script = "import mmap, time, os\nm = mmap.mmap(os.open('/dev/nvidia1', os.O_RDWR), 4096)\n\
        while not os.path.exists(os.environ['BELAY_TEST_GO']):\n open(os.environ['BELAY_TEST_BEAT'], 'w').write('%019d\\n' % time.monotonic_ns())\n time.sleep(.01)\nprint('PASS no_driver')";
    job.launch(&[], &["python3".into(), "-c".into(), script.into()])?;
    job.progress(LIMIT)?;
    let o = job.checkpoint_raw(&["--quiet"])?;
    refused(&o, &["gpu driver", gpu::LIBRARY, "r570"])?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// A request of asynchronous I/O that cannot end while the job stands still lets other processes go on: they are on their GPUs
/// then, which one of them looks at all the time.
fn request_that_lasts(place: &Place) -> Result<(), Failure> {
    let mut job = Job::new(place, "gpu-request", User::Root)?;
    job.set("LD_LIBRARY_PATH", &gpu::build(place)?.display().to_string());
    job.set("BELAY_TEST_QUIET_PARENT", "1");
    let [on_gpu, served] = [PROGRAM, SERVED].map(|p| place.programs().join(p).display().to_string());
    let script = format!("{on_gpu} watch & a=$!; {served} other & wait $a && wait $!");
    job.launch(&[], &["sh".into(), "-c".into(), script])?;
    job.progress(LIMIT)?;
    for _ in 0..2 {
        refused(&job.checkpoint_raw(&["--quiet"])?, &["io_setup", "has not ended"])?;
        let programs = procs::tree(job.pid().ok_or("no job")?);
        let runs = |name: &str| programs.iter().any(|p| procs::comm(*p) == name);
        want(runs(PROGRAM) && runs(SERVED), || {
            format!("one of them has died: {}", job.output_text())
        })?;
        job.progress(LIMIT)?;
    }
    job.verdict(false, LIMIT)
}

/// The phase in which the driver puts the state back, and all go on after that, is called `reopen` while it lasts.
fn phases(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = launched(place, user, ("", ""))?;
    job.checkpoint()?;
    let agent = edges::program_and_agent(&job, PROGRAM)?.1;
    let command = job.belay(&["checkpoint", "--quiet", &job.dir().display().to_string()]);
    let mut detached = Vec::new();
    let (_, taken) = step_each(
        agent,
        move || output(command, LIMIT),
        |s| {
            detached.extend(s.phase.filter(|_| s.name == "detach"));
            Verdict::On
        },
    )?;
    want(taken?.status.success(), || job.output_text())?;
    // Copies are detached before.
    want(detached.last() == Some(&"reopen") && !detached.contains(&"resume"), || {
        format!("all go on in {detached:?}")
    })?;
    job.verdict(false, LIMIT)
}

/// The agent is killed at some of its calls while the driver takes the state off or puts it back, also in a restarted job.
fn agent_killed(place: &Place, user: User, restarted: bool, rng: &mut Rng) -> Result<(), Failure> {
    let prepare = || -> Result<Job, Failure> {
        let mut job = launched(place, user, ("", ""))?;
        job.checkpoint()?;
        if restarted {
            job.crash_and_restart(LIMIT)?;
        }
        Ok(job)
    };
    edges::agent_killed(PROGRAM, &prepare, SAMPLE, rng)
}

/// Continues the program, whenever it is there, until it goes on.
fn continued(job: &mut Job) -> Result<(), Failure> {
    let front = job.pid().ok_or("no job")?;
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                if let Some((program, _)) = procs::program_and_agent(front, PROGRAM) {
                    procs::signal(program, libc::SIGCONT);
                }
                std::thread::sleep(Duration::from_millis(200));
            }
        });
        let progress = job.progress(LIMIT);
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        progress
    })
}

/// SIGSTOP at any moment of a checkpoint stops the program, then or when it goes on, and what is called whole restarts.
fn stopped_meanwhile(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = launched(place, user, ("", "slow"))?;
    for round in 0..8 {
        let (program, _) = edges::program_and_agent(&job, PROGRAM)?;
        let dir = job.dir().display().to_string();
        let command = job.belay(&["checkpoint", "--quiet", &dir]);
        let taking = std::thread::spawn(move || output(command, LIMIT));
        std::thread::sleep(Duration::from_micros(rng.below(300_000)));
        procs::signal(program, libc::SIGSTOP);
        let begin = Watch::begin();
        let o = taking.join().map_err(|_| "the command's thread has ended")??;
        let took = begin.elapsed();
        want(took < LIMIT / 3, || format!("round {round}: {took:?}: {}", text(&o)))?;
        if !o.status.success() {
            // Before its calls were held back, for which it has to run.
            refused(&o, &["gpu driver", "is stopped"]).map_err(|e| format!("round {round}: {e}"))?;
        }
        let state = || std::fs::read_to_string(format!("/proc/{program}/stat")).unwrap_or_default();
        let begin = Watch::begin();
        while !state().contains(") T ") {
            want(begin.elapsed() < Duration::from_secs(5), || {
                format!("round {round}: not stopped: {}", state())
            })?;
            std::thread::sleep(Duration::from_millis(2));
        }
        if o.status.success() && round % 2 == 1 {
            job.kill_all()?;
            job.clear_beat()?;
            job.restart(&[])?;
        }
        continued(&mut job).map_err(|e| format!("round {round}: {e}"))?;
    }
    job.verdict(false, LIMIT)
}

/// The driver's thread ends the program: nobody waits for it.
fn crashes(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = launched(place, user, ("", "crash"))?;
    let begin = Watch::begin();
    let o = job.checkpoint_raw(&["--quiet"])?;
    let took = begin.elapsed();
    want(!o.status.success() && took < LIMIT / 3, || format!("{took:?}: {}", text(&o)))?;
    let status = job.wait(LIMIT)?;
    want(!status.success(), || format!("{status:?}"))?;
    job.left_behind()
}

/// What is stopped already is refused at once, and afterwards there is nothing left to be done.
fn stopped_before(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = launched(place, user, ("", ""))?;
    for _ in 0..2 {
        let (program, _) = edges::program_and_agent(&job, PROGRAM)?;
        procs::signal(program, libc::SIGSTOP);
        let begin = Watch::begin();
        refused(
            &job.checkpoint_raw(&["--quiet"])?,
            &["gpu driver", "is stopped", "kill -cont"],
        )?;
        let took = begin.elapsed();
        want(took < LIMIT / 3, || format!("{took:?}"))?;
        procs::signal(program, libc::SIGCONT);
        job.progress(LIMIT)?;
        job.checkpoint()?;
        job.progress(LIMIT)?;
    }
    job.crash_and_restart(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// One of two programs is killed while its state is taken off the GPU, and the driver does not tell who has asked for it: the
/// attempt ends at once, and the other program goes on.
fn killed_meanwhile(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = Job::new(place, "gpu-killed", user)?;
    job.set("LD_LIBRARY_PATH", &gpu::build(place)?.display().to_string());
    job.set("BELAY_TEST_QUIET_PARENT", "1");
    job.set("FAKE_CUDA", "hang");
    let program = place.programs().join(PROGRAM).display().to_string();
    let script = format!("{program} & {program} watch & wait $!");
    job.launch(&[], &["sh".into(), "-c".into(), script])?;
    job.progress(LIMIT)?;
    job.checkpoint()?;
    let tree = procs::tree(job.pid().ok_or("no job")?);
    let first = tree.into_iter().find(|p| procs::comm(*p) == PROGRAM).ok_or("no program")?;
    let dir = job.dir().display().to_string();
    let command = job.belay(&["checkpoint", "--quiet", &dir]);
    let taking = std::thread::spawn(move || output(command, LIMIT));
    // Stopped for the checkpoint.
    while !taking.is_finished() && procs::state(first) != Some('t') {
        std::thread::sleep(Duration::from_micros(500));
    }
    std::thread::sleep(Duration::from_millis(50));
    procs::signal(first, libc::SIGKILL);
    let begin = Watch::begin();
    let o = taking.join().map_err(|_| "the command's thread has ended")??;
    let took = begin.elapsed();
    want(took < LIMIT / 3, || format!("{took:?}: {}", text(&o)))?;
    // It is tried again, without that program.
    if !o.status.success() {
        refused(&o, &["gpu driver", "has ended while"])?;
    }
    job.progress(LIMIT)?;
    job.checkpoint()?;
    job.crash_and_restart(LIMIT)?;
    job.verdict(false, LIMIT)
}

fn main() {
    belay_tests::hosts::serve_if_asked();
    if am_root() {
        if let Err(e) = gpu::enter() {
            println!("{e}");
            std::process::exit(1);
        }
    }
    let mut target = Target::new("gpu", &[PROGRAM, SERVED]);
    target.by_user("taken", |_| am_root(), |p, u, _| taken(p, u, ("", "")));
    target.by_user("taken_of_several", |_| am_root(), |p, u, _| taken(p, u, ("kids", "")));
    target.by_user("taken_of_one_that_looks", |_| am_root(), |p, u, _| taken(p, u, ("watch", "")));
    target.by_user("taken_of_one_that_polls", |_| am_root(), |p, u, _| taken(p, u, ("poll", "")));
    target.by_user("taken_of_whole_waits", |_| am_root(), |p, u, _| taken(p, u, ("", "whole")));
    let exited = ["gpu driver", "main thread", "exited"];
    target.by_user(
        "without_main_thread",
        |_| am_root(),
        move |p, u, _| refuses(p, u, ("alone", ""), &exited),
    );
    target.by_user("no_driver", |_| am_root(), |p, u, _| no_driver(p, u));
    let unsupported = ["gpu driver", "take its state off the gpu", "operation not supported"];
    target.by_user(
        "unsupported",
        |_| am_root(),
        move |p, u, _| refuses(p, u, ("", "checkpoint"), &unsupported),
    );
    let busy = ["gpu driver", "wait for its gpu work", "not ready", "had 0.5 s", "[gate]"];
    let short = ["gpu driver", "take its state off the gpu", "out of memory", "free memory"];
    target.by_user("short", |_| am_root(), move |p, u, _| once(p, u, ("short:1", &short)));
    target.by_user(
        "endless_work",
        |_| am_root(),
        move |p, u, _| refuses(p, u, ("", "lock"), &busy),
    );
    target.by_user("denied", |_| am_root(), |p, u, _| denied(p, u));
    target.by_user("late_once", |_| am_root(), move |p, u, _| once(p, u, ("lock:1", &busy)));
    target.by_user("no_room", |_| am_root(), |p, u, _| lost::no_room(p, u));
    target.by_user("run_goes_back", |_| am_root(), |p, u, _| lost::run_goes_back(p, u));
    target.by_user(
        "run_goes_back_so_often",
        |_| am_root(),
        |p, u, _| lost::run_goes_back_so_often(p, u),
    );
    target.by_user(
        "run_without_a_checkpoint",
        |_| am_root(),
        |p, u, _| lost::run_without_a_checkpoint(p, u),
    );
    target.by_user("other_gpu", |_| am_root(), |p, u, _| other_gpu(p, u));
    target.by_user("allowed_gpu", |_| am_root(), |p, u, _| allowed_gpu(p, u));
    target.by_user("hidden_gpus", |_| am_root(), |p, u, _| hidden_gpus(p, u));
    target.by_user("given_up", |_| am_root(), |p, u, _| lost::given_up(p, u));
    target.by_user("phases", |_| am_root(), |p, u, _| phases(p, u));
    target.by_user("agent_killed", |_| am_root(), |p, u, rng| agent_killed(p, u, false, rng));
    target.by_user(
        "agent_killed_of_restarted",
        |_| am_root(),
        |p, u, rng| agent_killed(p, u, true, rng),
    );
    target.by_user(
        "asker_killed",
        |_| am_root(),
        |p, u, rng| asker::killed(p, u, (("", ""), 30_000), rng),
    );
    target.by_user(
        "asker_of_slow_driver_killed",
        |_| am_root(),
        |p, u, rng| asker::killed(p, u, (("", "slow"), 300_000), rng),
    );
    target.by_user(
        "asker_of_one_that_looks_killed",
        |_| am_root(),
        |p, u, rng| asker::killed(p, u, (("watch", "slow"), 300_000), rng),
    );
    target.by_user(
        "asker_killed_and_stopped",
        |_| am_root(),
        |p, u, _| asker::killed_and_stopped(p, u),
    );
    target.by_user("asker_killed_for_long", |_| am_root(), |p, u, _| asker::killed_for_long(p, u));
    target.by_user("asker_killed_at_restart", |_| am_root(), asker::killed_at_restart);
    target.by_user("stopped_meanwhile", |_| am_root(), stopped_meanwhile);
    target.by_user("crashes", |_| am_root(), |p, u, _| crashes(p, u));
    target.by_user("stopped_before", |_| am_root(), |p, u, _| stopped_before(p, u));
    target.by_user("killed_meanwhile", |_| am_root(), |p, u, _| killed_meanwhile(p, u));
    target.by_user("shared", |_| am_root(), |p, u, _| shared::refuses(p, u));
    target.by_user("shared_without_agent", |_| am_root(), |p, u, _| shared::without_agent(p, u));
    if am_root() {
        target.once("request_that_lasts", |p, _| request_that_lasts(p));
    }
    let forked = ["gpu driver", "was forked by a process that had begun to use the gpu"];
    target.by_user(
        "forked_late",
        |_| am_root(),
        move |p, u, _| refuses(p, u, ("late", ""), &forked),
    );
    if am_root() && belay_tests::hosts::unavailable().is_none() {
        target.once("together", |p, _| hosts::together(p, "", false));
        target.once("together_refused", |p, _| hosts::together(p, "short:1", true));
        target.once("together_after_long", |p, _| hosts::together(p, "long:1", false));
        target.once("together_on_one_host", |p, _| hosts::apart_on_one_host(p));
        target.once("lost_elsewhere", |p, _| hosts::lost_elsewhere(p, false));
        target.once("lost_elsewhere_by_run", |p, _| hosts::lost_elsewhere(p, true));
        target.once("together_or_not_at_all", |p, _| hosts::none_before_all(p));
    }
    target.run()
}
