//! Libraries that take part in checkpoints: nobody is inside when the program stands still, and the program goes on
//! whatever the library does and whoever is killed at whatever edge.

use belay_tests::expect::{refused, want};
use belay_tests::job::{text, Job};
use belay_tests::place::{Place, User};
use belay_tests::rng::Rng;
use belay_tests::target::Target;
use belay_tests::{edges, Failure};
use std::time::{Duration, Instant};

const PROGRAM: &str = "gate_work";
const PLAIN: &str = "mem_private";
const LIMIT: Duration = Duration::from_secs(60);
/// Calls of an agent in a phase at which it is killed.
const SAMPLE: u64 = 5;

/// A job whose library does this; one of which something goes wrong has half a second to come to rest.
fn launched(place: &Place, user: User, words: &str) -> Result<Job, Failure> {
    let mut job = Job::new(place, &format!("gates-{}", words.replace(' ', "-")), user)?;
    job.set("BELAY_TEST_QUIET_PARENT", "1");
    let config = job.work.join("belay.toml");
    // Where nothing goes wrong, a busy machine may take longer.
    let limit = if ["", "alone", "kids", "talks", "talks kids"].contains(&words) {
        "30s"
    } else {
        "500ms"
    };
    std::fs::write(&config, format!("[gate]\nlimit = \"{limit}\"\nrebuild = \"{limit}\"\n"))
        .map_err(|e| format!("write {}: {e}", config.display()))?;
    let program = place.programs().join(PROGRAM).display().to_string();
    let argv: Vec<String> = std::iter::once(program)
        .chain(words.split_whitespace().map(str::to_owned))
        .collect();
    let options = ["--config", &config.display().to_string(), "--log-level", "debug"].map(str::to_owned);
    job.launch(&options, &argv)?;
    job.progress(LIMIT)?;
    Ok(job)
}

/// What the newest generation says of itself.
fn newest(job: &Job) -> Result<serde_json::Value, Failure> {
    let status = job.status()?;
    let last = status["generations"].as_array().and_then(|g| g.last());
    last.cloned().ok_or_else(|| format!("no generation: {status}"))
}

/// Checkpoints, and restarts from two of them; the time at the gates is counted.
fn taken(place: &Place, user: User, words: &str) -> Result<(), Failure> {
    let mut job = launched(place, user, words)?;
    for round in 0..2 {
        for _ in 0..3 {
            job.checkpoint()?;
            job.progress(LIMIT)?;
        }
        let last = newest(&job)?;
        let phase = |name: &str| {
            last["phases_ms"][name]
                .as_f64()
                .ok_or_else(|| format!("round {round}: no time of {name}: {last}"))
        };
        let parts = phase("gate")? + phase("suspend")? + phase("snapshot")? + phase("reopen")?;
        let blocked = last["blocked_ms"].as_f64().unwrap_or(0.0);
        want(blocked >= parts, || format!("round {round}: the gates do not count: {last}"))?;
        job.crash_and_restart(LIMIT)?;
    }
    job.checkpoint()?;
    let o = job.checkpoint_raw(&["--then", "stop"])?;
    want(o.status.success(), || text(&o))?;
    job.wait(LIMIT)?;
    job.clear_beat()?;
    job.restart(&[])?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)?;
    let said = job.output_text();
    want(said.contains("rebuilt 3 orphaned 0"), || {
        format!("not rebuilt three times: {said}")
    })
}

/// The program sees a library that says that it is at rest, and is not: so it would see one that was not asked.
fn careless(place: &Place, user: User) -> Result<(), Failure> {
    let job = launched(place, user, "careless")?;
    let end = Instant::now() + LIMIT;
    while !job.output_text().contains("FAIL gate_work: before it opens") {
        want(Instant::now() < end, || format!("nobody notices: {}", job.output_text()))?;
        drop(job.checkpoint_raw(&[])?);
    }
    Ok(())
}

/// Nothing is asked, and nothing counted, where no library takes part.
fn nothing(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = Job::new(place, "gates-none", user)?;
    let program = place.programs().join(PLAIN).display().to_string();
    job.launch(&[], &[program])?;
    job.progress(LIMIT)?;
    job.checkpoint()?;
    let last = newest(&job)?;
    want(last["phases_ms"]["suspend"].is_number(), || format!("no phases: {last}"))?;
    for phase in ["gate", "reopen"] {
        want(last["phases_ms"][phase].is_null(), || format!("there is {phase}: {last}"))?;
    }
    job.verdict(false, LIMIT)
}

/// Each checkpoint is refused with these words, and the program goes on.
fn refuses(place: &Place, user: User, words: &str, reasons: &[&str]) -> Result<(), Failure> {
    let mut job = launched(place, user, words)?;
    for n in 0..2 {
        let o = job.checkpoint_raw(&["--quiet"])?;
        refused(&o, reasons).map_err(|e| format!("checkpoint {n}: {e}"))?;
        job.progress(LIMIT).map_err(|e| format!("after checkpoint {n}: {e}"))?;
    }
    job.verdict(false, LIMIT)
}

/// The first checkpoint is refused, the second one is taken.
fn put_off(place: &Place, user: User, words: &str, reasons: &[&str]) -> Result<(), Failure> {
    let mut job = launched(place, user, words)?;
    let o = job.checkpoint_raw(&["--quiet"])?;
    refused(&o, reasons)?;
    job.progress(LIMIT)?;
    // It may still be about to answer.
    std::thread::sleep(Duration::from_millis(1500));
    job.checkpoint()?;
    job.progress(LIMIT)?;
    job.crash_and_restart(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// What passes by itself does so in the checkpoint.
fn passes_by(place: &Place, user: User, words: &str) -> Result<(), Failure> {
    let mut job = launched(place, user, words)?;
    job.checkpoint()?;
    job.progress(LIMIT)?;
    job.crash_and_restart(LIMIT)?;
    job.checkpoint()?;
    job.verdict(false, LIMIT)
}

/// A child dies, or its library's thread, while a checkpoint is taken: it is taken all the same, or refused by name;
/// the others go on.
fn dies(place: &Place, user: User, words: &str) -> Result<(), Failure> {
    let mut job = launched(place, user, words)?;
    for n in 0..3 {
        let o = job.checkpoint_raw(&["--quiet"])?;
        if !o.status.success() {
            refused(&o, &["libgate_test.so", "has ended"]).map_err(|e| format!("checkpoint {n}: {e}"))?;
        }
        job.progress(LIMIT).map_err(|e| format!("after checkpoint {n}: {e}"))?;
    }
    want(
        job.output_text().contains(
            words
                .split_whitespace()
                .nth(usize::from(words.starts_with("kids")))
                .unwrap_or_default(),
        ),
        || format!("it has not happened: {}", job.output_text()),
    )?;
    job.verdict(false, LIMIT)
}

fn program_and_agent(job: &Job) -> Result<(i32, i32), Failure> {
    edges::program_and_agent(job, PROGRAM)
}

fn passes_alone(job: &Job, program: i32) -> Result<(), Failure> {
    edges::passes_alone(job, program, PROGRAM)
}

/// The library kills the agent at an edge: the gates open.
fn agent_dies(place: &Place, user: User, words: &str) -> Result<(), Failure> {
    let job = launched(place, user, words)?;
    let (program, _) = program_and_agent(&job)?;
    drop(job.checkpoint_raw(&["--quiet"])?);
    want(job.output_text().contains("agent in"), || {
        format!("it lives: {}", job.output_text())
    })?;
    passes_alone(&job, program)
}

/// The library kills the agent of the restarted job while it rebuilds: nothing is left of that, and the next restart
/// works.
fn agent_dies_in_restart(place: &Place, user: User, words: &str) -> Result<(), Failure> {
    let mut job = launched(place, user, words)?;
    job.checkpoint()?;
    job.kill_all()?;
    job.restart(&[])?;
    let status = job.wait(LIMIT)?;
    want(!status.success(), || {
        format!("restarted without an agent: {}", job.output_text())
    })?;
    job.left_behind()?;
    let spare = job.work.join("spare");
    std::fs::write(&spare, "").map_err(|e| format!("create {}: {e}", spare.display()))?;
    job.clear_beat()?;
    job.restart(&[])?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// The library cannot rebuild: the restart fails with its reason, and nothing is left of it.
fn rebuild_refused(place: &Place, user: User, words: &str, reason: &str) -> Result<(), Failure> {
    let mut job = launched(place, user, words)?;
    job.checkpoint()?;
    job.kill_all()?;
    job.restart(&[])?;
    let status = job.wait(LIMIT)?;
    let said = job.output_text();
    want(
        !status.success() && said.contains("libgate_test.so") && said.contains(reason),
        || said.clone(),
    )?;
    job.left_behind()
}

/// The agent is killed at some of its calls in the phases of the gate, also in a restarted job.
fn agent_killed(place: &Place, user: User, (restarted, words): (bool, &str), rng: &mut Rng) -> Result<(), Failure> {
    let prepare = || -> Result<Job, Failure> {
        let mut job = launched(place, user, words)?;
        // It is known by now that there is a library.
        job.checkpoint()?;
        if restarted {
            job.crash_and_restart(LIMIT)?;
        }
        Ok(job)
    };
    edges::agent_killed(PROGRAM, &prepare, SAMPLE, rng)
}

fn main() {
    let mut target = Target::new("gates", &[PROGRAM, PLAIN]);
    target.in_turn();
    target.by_user("taken", |_| true, |p, u, _| taken(p, u, ""));
    target.by_user("taken_of_several", |_| true, |p, u, _| taken(p, u, "kids"));
    target.by_user("taken_in_rounds", |_| true, |p, u, _| taken(p, u, "talks"));
    target.by_user("taken_in_rounds_of_several", |_| true, |p, u, _| taken(p, u, "talks kids"));
    target.by_user("taken_without_main_thread", |_| true, |p, u, _| taken(p, u, "alone"));
    target.by_user("careless", |_| true, |p, u, _| careless(p, u));
    target.by_user("none", |_| true, |p, u, _| nothing(p, u));
    let late = ["libgate_test.so", "has not come to rest within 0.5 s", "[gate]"];
    target.by_user("mute", |_| true, move |p, u, _| refuses(p, u, "mute close ready", &late));
    target.by_user("deaf", |_| true, move |p, u, _| refuses(p, u, "mute close asked", &late));
    target.by_user("late", |_| true, move |p, u, _| put_off(p, u, "late close ready", &late));
    let says = ["libgate_test.so: the test library has something better to do"];
    target.by_user(
        "says_no",
        |_| true,
        move |p, u, _| refuses(p, u, "refuses close ready 9", &says),
    );
    target.by_user("says_later", |_| true, |p, u, _| passes_by(p, u, "busy close ready 3"));
    type Lie = (&'static str, &'static [&'static str]);
    let lies: [Lie; 11] = [
        (
            "talks wide close ready 9",
            &["libgate_test.so", "an entry with a key of 300 bytes"],
        ),
        (
            "talks endless close ready 9",
            &["libgate_test.so", "what it tells cannot be read"],
        ),
        ("talks narrow close ready 9", &["libgate_test.so", "has room for 5 bytes"]),
        ("huge close ready 9", &["libgate_test.so", "does not say why", "bytes"]),
        ("wild close ready 9", &["libgate_test.so", "does not say why", "bad address"]),
        ("early close asked 9", &["libgate_test.so", "answered what it was not asked"]),
        ("forges close ready 9", &["libgate_test.so", "changed its control page"]),
        ("magic", &["control page", "does not begin"]),
        ("version", &["control page", "version 77"]),
        ("closes", &["libgate_test.so", "not behind descriptor"]),
        ("swaps", &["libgate_test.so", "control page"]),
    ];
    for (words, reasons) in lies {
        let name = words.trim_start_matches("talks ").split(' ').next().unwrap_or_default();
        target.by_user(
            &format!("lies::{name}"),
            |_| true,
            move |p, u, _| refuses(p, u, words, reasons),
        );
    }
    target.by_user("lies::owner", |_| true, |p, u, _| passes_by(p, u, "owner"));
    for edge in [
        "close asked",
        "close ready",
        "close answered",
        "open asked",
        "open ready",
        "open answered",
    ] {
        let name = edge.replace(' ', "_");
        for (who, words) in [
            ("child_dies", format!("kids dies {edge}")),
            ("thread_ends", format!("ends {edge}")),
        ] {
            let words: &'static str = words.leak();
            target.by_user(&format!("{who}::{name}"), |_| true, move |p, u, _| dies(p, u, words));
        }
        for (how, who) in [("", "kids"), ("in_rounds::", "talks kids")] {
            let words: &'static str = format!("{who} agent {edge}").leak();
            target.by_user(
                &format!("agent_dies::{how}{name}"),
                |_| true,
                move |p, u, _| agent_dies(p, u, words),
            );
        }
    }
    for edge in ["asked", "ready"] {
        let words: &'static str = format!("agent rebuild {edge}").leak();
        target.by_user(
            &format!("agent_dies::rebuild_{edge}"),
            |_| true,
            move |p, u, _| agent_dies_in_restart(p, u, words),
        );
    }
    target.by_user(
        "rebuild_refused",
        |_| true,
        |p, u, _| rebuild_refused(p, u, "refuses rebuild ready 9", "something better to do"),
    );
    target.by_user(
        "rebuild_ends",
        |_| true,
        |p, u, _| rebuild_refused(p, u, "ends rebuild ready", "has ended"),
    );
    target.by_user(
        "rebuild_late",
        |_| true,
        |p, u, _| rebuild_refused(p, u, "mute rebuild ready", "has not made again"),
    );
    target.by_user("agent_killed", |_| true, |p, u, r| agent_killed(p, u, (false, "kids"), r));
    target.by_user(
        "agent_killed_in_rounds",
        |_| true,
        |p, u, r| agent_killed(p, u, (false, "talks kids"), r),
    );
    target.by_user(
        "agent_of_restarted_job_killed",
        |_| true,
        |p, u, r| agent_killed(p, u, (true, "kids"), r),
    );
    target.run();
}
