//! What is left of a checkpoint when the power is cut, or the agent killed, at any call by which it is written: the one
//! before, or this one, whole.

use belay_tests::calls::watch;
use belay_tests::disk::{Recorder, State};
use belay_tests::expect::{io, want};
use belay_tests::job::{output, text, Job};
use belay_tests::orders::{give, order};
use belay_tests::place::{Place, User};
use belay_tests::rng::Rng;
use belay_tests::stepper::Verdict;
use belay_tests::target::Target;
use belay_tests::{procs, Failure};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
const PROGRAM: &str = "gen_steps";

fn launched(place: &Place, label: &str, keep: &str, user: User) -> Result<(Job, i32), Failure> {
    let mut job = Job::new(place, label, user)?;
    job.set("BELAY_TEST_LONG", "1");
    let program = place.programs().join(PROGRAM).display().to_string();
    job.launch(&["--keep".into(), keep.into()], &[program, "1".into()])?;
    job.progress(LIMIT)?;
    let agent = agent(&job)?;
    Ok((job, agent))
}

fn agent(job: &Job) -> Result<i32, Failure> {
    let front = job.pid().ok_or("no job")?;
    let found = procs::program_and_agent(front, PROGRAM);
    found
        .map(|(_, agent)| agent)
        .ok_or_else(|| format!("no agent: {}", job.output_text()))
}

/// The generations in job directory `dir`, and whether `belay verify` finds each whole, none where it finds fault with
/// the job; what it said.
fn verified(place: &Place, dir: &Path) -> Result<(BTreeMap<u64, bool>, String), Failure> {
    let mut c = Command::new(place.belay());
    let o = output(
        {
            c.arg("verify").arg(dir).env_clear();
            c
        },
        LIMIT,
    )?;
    let said = text(&o);
    let mut found = BTreeMap::new();
    for line in String::from_utf8_lossy(&o.stdout).lines() {
        let parts = line.strip_prefix("generation ").and_then(|l| l.split_once(": "));
        let (number, rest) = parts.ok_or_else(|| format!("belay verify: {said}"))?;
        let number = number.parse().map_err(|e| format!("{line}: {e}"))?;
        found.insert(number, rest.starts_with("whole"));
    }
    // Something else is damaged.
    if !o.status.success() && found.values().all(|whole| *whole) {
        found.clear();
    }
    Ok((found, said))
}

/// What of the work directory counts: what a restart and `belay verify` read.
fn matters(path: &Path) -> bool {
    let mut names = path.iter().map(|n| n.to_string_lossy()).skip_while(|n| n != "job");
    names.next().is_some()
        && names
            .next()
            .is_none_or(|n| n == "chunks" || n == "gen" || n.contains("job.json"))
}

/// Checks every state that a power cut can leave, each once.
struct Checker<'a> {
    place: &'a Place,
    at: std::path::PathBuf,
    known: BTreeMap<State, (BTreeMap<u64, bool>, String)>,
}

impl Checker<'_> {
    /// All generations are whole, and the newest is not older than `promised`.
    fn check(&mut self, promised: u64, state: &State) -> Result<(), Failure> {
        if !self.known.contains_key(state) {
            let found = if state.has(Path::new("job/job.json")) {
                state.make(&self.at)?;
                let found = verified(self.place, &self.at.join("job"));
                io("remove what was made", std::fs::remove_dir_all(&self.at))?;
                found?
            } else {
                (BTreeMap::new(), "there is no job".into())
            };
            self.known.insert(state.clone(), found);
        }
        let (found, said) = &self.known[state];
        let newest = found.last_key_value().map_or(0, |(n, _)| *n);
        want(newest >= promised && found.values().all(|whole| *whole), || {
            format!("generation {promised} had been committed, there are (and whole are) {found:?}: {said}\n{state:#?}")
        })
    }
}

/// Whenever the power is cut, what was committed is there, and what has the name of a generation is whole. And each
/// fsync is needed for that: without it, it is not so.
fn power_cut(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    const CHECKPOINTS: u64 = 3;
    let (mut job, agent) = launched(place, "power", "1", user)?;
    let work = job.work.clone();
    let mut recorder = Recorder::new(&work, matters, work.join("copies"))?;
    let committed = AtomicU64::new(0);
    let checkpoints = || -> Result<(), Failure> {
        for n in 1..=CHECKPOINTS {
            order(&mut job, &format!("go {n}"))?;
            job.checkpoint()?;
            committed.store(n, Ordering::Release);
        }
        job.verdict(false, LIMIT)
    };
    watch(agent, &work, checkpoints, |call| {
        if matters(&call.path) || call.path == work {
            recorder.call(call, committed.load(Ordering::Acquire))?;
        }
        Ok(Verdict::On)
    })??;
    let mut checker = Checker {
        place,
        // Where nobody else could exchange it: root looks at it.
        at: work.with_extension("cut"),
        known: BTreeMap::new(),
    };
    let mut cuts = 0;
    let promise = |promised: u64| promised.min(CHECKPOINTS);
    recorder.cuts(None, |n, promised, state| {
        cuts += 1;
        let at = |e| format!("a power cut after {}: {e}", recorder.what(n));
        checker.check(promise(promised), state).map_err(at)
    })?;
    let syncs = recorder.syncs();
    for without in &syncs {
        let harm = recorder.cuts(Some(*without), |_, promised, state| checker.check(promise(promised), state));
        want(harm.is_err(), || {
            format!(
                "nothing is lost without {}: it is not needed, or not tested",
                recorder.what(*without)
            )
        })?;
    }
    println!("    {cuts} cuts, {} states, {} syncs", checker.known.len(), syncs.len());
    want(syncs.len() >= 8 * CHECKPOINTS as usize, || "too few calls were seen".into())
}

/// The agent is killed at the `nth` call of a checkpoint that changes a file, in the middle of it where that is a
/// write. Whether there were so many calls.
fn killed_at(job: &Job, nth: u64, rng: &mut Rng) -> Result<bool, Failure> {
    let mut calls = 0;
    let dir = job.dir();
    let taken = watch(
        agent(job)?,
        &dir,
        || job.checkpoint_raw(&[]),
        |call| {
            if call.result.is_some() || call.path.starts_with(dir.join("log")) {
                return Ok(Verdict::On);
            }
            calls += 1;
            if calls < nth {
                return Ok(Verdict::On);
            }
            call.write_part(rng.below(call.bytes() + 1))?;
            Ok(Verdict::Kill)
        },
    )??;
    want(calls >= nth || taken.status.success(), || {
        format!("belay checkpoint: {}", text(&taken))
    })?;
    Ok(calls >= nth)
}

/// Killed at any call of a checkpoint, the agent leaves the generation before or the new one, whole; the job restarts
/// from it, and its next checkpoint leaves nothing unfinished.
fn killed(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let (mut job, _) = launched(place, "killed", "2", user)?;
    let dir = job.dir();
    order(&mut job, "go 1")?;
    job.checkpoint()?;
    // By generation.
    let mut steps = BTreeMap::from([(1, 1)]);
    let (mut kept, mut new) = (0, 0);
    for nth in 1.. {
        let (before, step) = steps.last_key_value().map(|(n, step)| (*n, *step)).ok_or("no generation")?;
        order(&mut job, &format!("go {}", step + 1))?;
        if !killed_at(&job, nth, rng)? {
            break;
        }
        job.kill_all()?;
        let again = |e: Failure| format!("killed at call {nth}: {e}");
        let (found, said) = verified(place, &dir).map_err(again)?;
        let newest = found.keys().last().copied().unwrap_or(0);
        want(newest >= before && found.values().all(|whole| *whole), || again(said))?;
        new += u64::from(newest > before);
        kept += u64::from(newest == before);
        let step = steps.get(&newest).copied().unwrap_or(step + 1);
        steps.insert(newest, step);
        job.clear_beat()?;
        // An order that it has not had, and given before it goes on: it would obey the last one again.
        let compare = format!("compare {step}, killed at {nth}");
        give(&job, &compare)?;
        job.restart(&[])?;
        order(&mut job, &compare).map_err(again)?;
        job.checkpoint().map_err(again)?;
        let (found, said) = verified(place, &dir).map_err(again)?;
        let next = found.keys().last().copied().unwrap_or(0);
        want(
            next > newest && found.len() == 2 && found.values().all(|whole| *whole),
            || again(said),
        )?;
        steps.insert(next, step);
        for sub in ["gen", "chunks"] {
            let unfinished = io("list", std::fs::read_dir(dir.join(sub)))?
                .flatten()
                .find(|e| e.file_name().to_string_lossy().starts_with(".tmp-"));
            want(unfinished.is_none(), || again(format!("{unfinished:?} stays")))?;
        }
    }
    println!("    {kept} kills before the commit, {new} after it");
    want(kept >= 15 && new > 0, || "too few calls were seen".into())?;
    job.verdict(false, LIMIT)
}

fn main() {
    let mut target = Target::new("cuts", &[PROGRAM]);
    target.by_user("power_cut", |u| u == User::Ordinary, power_cut);
    target.by_user("killed", |_| true, killed);
    target.run();
}
