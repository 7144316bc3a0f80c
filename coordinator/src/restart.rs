//! Restart: choose the generation, hand it to the restart flow, and serve the restarted job as after a launch.

use crate::agent::{Agent, Fallback, Setup};
use crate::generations::{self, Generation};
use crate::jobdir::{Description, JobDir};
use crate::nodes::again::Reunion;
use crate::nodes::remote::{end_standin, shell_code};
use crate::nodes::table;
use crate::redundancy::{again, record};
use crate::sys::{self, Disposition};
use crate::tiers::gather::Gathered;
use crate::tiers::{self, Known};
use crate::{front, state, Failure};
use belay_plugins::Group;
use belay_restart::{End, News, Options, Restored, WithoutAgent};
use belay_wire::{Exit, Phase};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::time::{Duration, Instant, UNIX_EPOCH};

/// What a line for the user is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// What is being done.
    Progress,
    /// Something is not as the user expects.
    Warning,
}

/// Restarts the first of generations `numbers` that is whole; how the job ended. `tell` receives lines for the user.
pub fn restart(
    setup: Setup,
    (numbers, gathered): (Vec<u64>, &Gathered),
    (options, hosts): (&Options, &[String]),
    tell: &mut dyn FnMut(Notice, &str),
) -> Result<End, Failure> {
    // Remote shells keep their numbers until they have been waited for.
    Disposition::replace(libc::SIGCHLD, libc::SIG_DFL);
    let (dir, description) = (setup.dir.clone(), setup.description.clone());
    let fallback = Fallback::of(&setup);
    let redundant = description.config.redundancy.settings()?;
    let mut agent = Some(Agent::new(setup)?);
    let mut damaged: Vec<(u64, Failure)> = Vec::new();
    for number in numbers {
        if let Some((damaged, failure)) = damaged.last() {
            let age = age(&dir, number);
            tell(
                Notice::Warning,
                &format!("generation {damaged} is damaged ({failure}); using generation {number}{age}"),
            );
        }
        let try_it = |agent: &mut Option<Agent>, tell: &mut dyn FnMut(Notice, &str)| {
            let g = Generation::at(&dir.generations(), number);
            attempt(&g, (options, hosts, &fallback), agent, tell)
        };
        let prepared = match &redundant {
            Some(_) => again::prepare(&dir, number, hosts, &mut |line| tell(Notice::Progress, line)),
            None => Ok(()),
        };
        // Where chunks lie on their hosts, those have been asked by now.
        let there = |r: Result<(), Failure>| match &redundant {
            None => r.and_then(|()| gathered.check(&dir, number)),
            Some(_) => r,
        };
        let mut result = there(prepared).and_then(|()| try_it(&mut agent, tell));
        if let Err(failure) = &result {
            let damage = is_damage(failure, &agent);
            // A part may have found what is damaged, and this process not know it.
            let suspicion = failure.exit == Exit::RestartFailed && agent.is_some() && has_parts(&dir, number);
            if (damage || suspicion) && is_on_a_tier(&dir, &description, number) {
                tracing::warn!(generation = number, error = %failure, "not whole here");
                match bring(&dir, &description, number, tell) {
                    Ok(0) if !damage => {}
                    Ok(_) => result = try_it(&mut agent, tell),
                    Err(failure) => result = Err(failure),
                }
            }
        }
        let failure = match result {
            Ok(end) => return Ok(end),
            Err(failure) => failure,
        };
        tracing::error!(generation = number, error = %failure, "restart failed");
        let go_on = is_damage(&failure, &agent);
        damaged.push((number, failure));
        if !go_on {
            break;
        }
    }
    let all_damaged = damaged.iter().all(|(_, failure)| is_damage(failure, &agent));
    if let Some(agent) = agent {
        agent.abandon();
    }
    if all_damaged && damaged.len() > 1 {
        return Err(none_whole(&dir, &damaged));
    }
    let last = damaged.pop().map(|(_, failure)| failure);
    Err(last.unwrap_or_else(|| Failure::new(Exit::NoCheckpoint, "no checkpoint")))
}

/// How long ago generation `number` was made, as the end of a sentence: what the program has done since is lost.
fn age(dir: &JobDir, number: u64) -> String {
    let g = Generation::at(&dir.generations(), number);
    let made = g.manifest().ok().map(|m| Duration::from_secs(m.time_unix_s));
    made.and_then(|t| UNIX_EPOCH.checked_add(t)?.elapsed().ok())
        .map_or_else(String::new, |t| format!(", made {} s ago", t.as_secs()))
}

/// The failure of a restart for which each of `damaged` was tried.
fn none_whole(dir: &JobDir, damaged: &[(u64, Failure)]) -> Failure {
    let at = dir.path().display();
    let each: Vec<String> = damaged.iter().map(|(n, why)| format!("generation {n}: {why}")).collect();
    Failure::new(
        Exit::Damaged,
        format!(
            "no generation in {at} is whole: {}; belay verify {at} shows all that is damaged, and a copy of that or of {at} is needed",
            each.join("; ")
        ),
    )
}

/// Whether a failed attempt leaves others to be tried.
fn is_damage(failure: &Failure, agent: &Option<Agent>) -> bool {
    failure.exit == Exit::Damaged && agent.is_some()
}

fn has_parts(dir: &JobDir, number: u64) -> bool {
    let path = dir.generations().join(generations::name(number));
    table::read(&path).is_ok_and(|rows| !rows.is_empty())
}

pub(crate) fn is_on_a_tier(dir: &JobDir, d: &Description, number: u64) -> bool {
    let known = tiers::known(dir, d);
    let mut held = known.iter().flatten().flat_map(Known::numbers);
    held.any(|n| n == number)
}

/// The fetch phase: what of generation `number` is missing or damaged here comes from the durable tiers; how many chunks and files that was.
fn bring(dir: &JobDir, d: &Description, number: u64, tell: &mut dyn FnMut(Notice, &str)) -> Result<u64, Failure> {
    let phase = Phase::Fetch.name();
    tell(Notice::Progress, &format!("{phase} generation {number}"));
    let begin = Instant::now();
    let mut progress = |done: u64, expected: u64| {
        let percent = (done.min(expected) * 100).checked_div(expected).unwrap_or(0);
        tell(Notice::Progress, &format!("{phase} {percent} %"));
    };
    // An older generation is used only when this one is damaged everywhere, not when a tier that may have it does not answer.
    let (items, bytes) = tiers::fetch(dir, d, number, &mut progress)?;
    tracing::info!(
        generation = number,
        items,
        bytes,
        ms = generations::ms(begin.elapsed()),
        "fetched"
    );
    Ok(items)
}

fn attempt(
    g: &Generation,
    (options, hosts, fallback): (&Options, &[String], &Fallback),
    agent: &mut Option<Agent>,
    tell: &mut dyn FnMut(Notice, &str),
) -> Result<End, Failure> {
    let m = g.manifest()?;
    if let Some(a) = agent {
        a.number_from(m.next_chunk);
        a.goes_back_to(g.number);
    }
    g.check_owner()?;
    tell(
        Notice::Progress,
        &format!(
            "restarting generation {} ({} processes, {} threads)",
            g.number, m.processes, m.threads
        ),
    );
    tracing::info!(generation = g.number, lazy = options.lazy, "restarting");
    let ended = state::read(&g.path)?;
    if ended.is_some() {
        tell(
            Notice::Warning,
            &format!(
                "generation {} holds what the command left behind when it ended; it goes on in the background",
                g.number
            ),
        );
    }
    let reunion = match agent {
        Some(a) => a.other_nodes(&g.path, g.number, hosts)?,
        None => None,
    };
    let shells = agent.as_ref().map(Agent::shells).unwrap_or_default();
    let agent = RefCell::new(agent);
    // Whoever sees the program run can command it.
    let mut listen = || {
        if let Some(Err(failure)) = agent.borrow_mut().as_mut().map(Agent::listen) {
            tracing::error!(error = %failure, "no control socket");
            sys::say(&format!("{failure}; the program cannot be commanded"));
        }
    };
    let mut serve = |restored: Restored, report: &dyn Fn(News)| {
        let agent = agent.borrow_mut().take();
        agent.map_or(0, |mut a| {
            // Pages that are only mapped have not been compared with their checksums: damage must not spread to the generations that follow.
            if !options.lazy {
                a.build_on(&g.path);
            }
            if let Some(joining) = reunion.as_ref().and_then(Reunion::take_joining) {
                a.rejoin(joining);
            }
            agent_main(a, g.number, restored, ended, report)
        })
    };
    // The job may not call it so.
    tracing::debug!(host = sys::host(), "this host");
    let group = reunion.as_ref().map(|r| -> &dyn Group { r });
    let without_agent = WithoutAgent {
        ends: &|| fallback.is_there(),
        shells: &shells,
        farewell: &|standin, status| end_standin(standin, shell_code(status)),
    };
    let options = Options {
        ended: ended.is_some(),
        ..options.clone()
    };
    belay_restart::restart(&g.path, &options, group, &mut listen, &mut serve, &without_agent).map_err(Failure::from)
}

/// Numbers of the generations to try, in this order: `wanted`, or all from the newest, in the job directory and on its durable tiers.
pub fn candidates(
    dir: &JobDir,
    d: &Description,
    wanted: Option<u64>,
    tell: &mut dyn FnMut(Notice, &str),
) -> Result<Vec<u64>, Failure> {
    let here = generations::list(&dir.generations())?;
    let found = |known: &[Option<Known>]| -> BTreeSet<u64> {
        let there = known.iter().flatten().flat_map(Known::numbers);
        here.iter().map(|g| g.number).chain(there).collect()
    };
    let mut known = tiers::known(dir, d);
    let whole = here.iter().any(|g| g.is_whole() && wanted.is_none_or(|w| w == g.number));
    // The notes serve while they are there; the tiers are asked when the answer matters.
    let mut problems = Vec::new();
    if !known.is_empty() && (!whole || known.iter().any(Option::is_none)) {
        problems = tiers::refresh(dir, d)?;
        known = tiers::known(dir, d);
    }
    let mut found = found(&known);
    found.extend(record::numbers(dir.path()));
    let at = dir.path().display();
    if found.is_empty() {
        return Err(match problems.into_iter().next() {
            Some((exit, problem)) => Failure::new(exit, format!("{at} holds no checkpoint, and {problem}")),
            None => Failure::new(
                Exit::NoCheckpoint,
                format!("{at} holds no checkpoint; start the program with belay launch"),
            ),
        });
    }
    for (_, problem) in problems {
        tell(Notice::Warning, &problem);
    }
    if let Some(number) = wanted {
        found.retain(|n| *n == number);
        if found.is_empty() {
            return Err(Failure::new(
                Exit::NoGeneration,
                format!("{at} has no generation {number}; see belay list {at}"),
            ));
        }
    }
    let gen = dir.generations();
    let order = generations::order(&gen, found);
    if let (Some(first), Some(newest)) = (order.first(), order.iter().max()) {
        if first < newest {
            tell(
                Notice::Warning,
                &format!(
                    "generation {newest} holds only what the command left behind when it failed (--generation {newest} restarts that); using generation {first}{}",
                    age(dir, *first)
                ),
            );
        }
    }
    Ok(order)
}

/// Runs in the agent of the restarted job.
fn agent_main(mut agent: Agent, number: u64, restored: Restored, ended: Option<i32>, report: &dyn Fn(News)) -> i32 {
    // What the front has passed on meanwhile is there yet.
    front::handled().set_mask();
    Disposition::replace(libc::SIGCHLD, libc::SIG_DFL);
    Disposition::replace(libc::SIGPIPE, libc::SIG_IGN);
    if let Err(e) = sys::become_subreaper() {
        tracing::error!(error = %e, "become the reaper of the job's processes");
    }
    if let Err(failure) = agent.open_metrics() {
        tracing::error!(error = %failure, "no metrics");
        sys::say(&format!("{failure}; the program runs without"));
    }
    agent.maps(&restored.code);
    agent.is_gated(restored.gated);
    agent.called(restored.names.in_era(number), restored.led);
    agent.serve(restored.root_pid, ended, None, report)
}
