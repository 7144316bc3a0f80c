//! Restart: choose the generation, hand it to the restart flow, and serve the restarted job as after a launch.

use crate::agent::{Agent, Fallback, Setup};
use crate::failure::counted;
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
use belay_image::files;
use belay_image::manifest::{Manifest, MANIFEST_FILE, MAX_BYTES};
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
    /// How far it has come: bytes done, and expected.
    Bytes(u64, u64),
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
    let mut attempts = Attempts::new(setup, gathered, (options, hosts))?;
    let mut damaged: Vec<(u64, Failure)> = Vec::new();
    let mut numbers = numbers.into_iter();
    while let Some(number) = numbers.next() {
        if let Some(last) = damaged.last() {
            attempts.turn_to(number, last, tell);
        }
        let failure = match attempts.with(number, tell) {
            Ok(end) => {
                if matches!(end, End::Interrupted(_)) {
                    attempts.take_back();
                }
                return Ok(end);
            }
            Err(failure) => failure,
        };
        tracing::error!(generation = number, error = %failure, "restart failed");
        if !attempts.is_damage(&failure) {
            damaged.push((number, attempts.with_older(failure, numbers.next())));
            break;
        }
        attempts.note_damage(number, &failure);
        damaged.push((number, failure));
    }
    Err(attempts.give_up(damaged))
}

/// What the attempts with one generation after the other have in common.
struct Attempts<'a> {
    dir: JobDir,
    description: Description,
    /// What was recorded of the job.
    before: Description,
    redundant: bool,
    gathered: &'a Gathered,
    options: &'a Options,
    hosts: &'a [String],
    fallback: Fallback,
    /// Something of the generation had to be rebuilt: it survives no further loss.
    rebuilt: bool,
    /// The last one that was read.
    read: Option<u64>,
    /// Who serves the job; none here once it does.
    agent: Option<Agent>,
}

impl<'a> Attempts<'a> {
    fn new(setup: Setup, gathered: &'a Gathered, (options, hosts): (&'a Options, &'a [String])) -> Result<Self, Failure> {
        // Remote shells keep their numbers until they have been waited for.
        Disposition::set_default(libc::SIGCHLD);
        let (dir, description) = (setup.dir.clone(), setup.description.clone());
        let before = Description {
            history: description.history,
            wait_status: description.wait_status,
            ..dir.description()?
        };
        let attempts = Self {
            dir,
            before,
            redundant: description.config.redundancy.settings()?.is_some(),
            description,
            gathered,
            options,
            hosts,
            fallback: Fallback::of(&setup),
            rebuilt: false,
            read: None,
            agent: Some(Agent::new(setup)?),
        };
        attempts.record(&attempts.description);
        Ok(attempts)
    }

    /// Records `d`, which parts of the job on other hosts read. A full disk is no reason not to go on from a checkpoint.
    fn record(&self, d: &Description) {
        if let Err(failure) = self.dir.describe(d) {
            sys::say(&failure.to_string());
        }
    }

    /// The restart is given up: unless the job has run meanwhile, what was recorded of it before is recorded again.
    fn take_back(&self) {
        if self.dir.description().is_ok_and(|d| d.history == self.before.history) {
            self.record(&self.before);
        }
    }

    /// The last one that was tried is damaged: says which is next.
    fn turn_to(&self, number: u64, (damaged, failure): &(u64, Failure), tell: &mut dyn FnMut(Notice, &str)) {
        let age = age(&self.dir, number);
        let what = if failure.in_the_way { "is left out" } else { "is damaged" };
        tell(
            Notice::Warning,
            &format!("generation {damaged} {what} ({failure}); using generation {number}{age}"),
        );
    }

    /// Restarts generation `number`. What is not whole here is brought from a durable tier, where one has it, and tried again.
    fn with(&mut self, number: u64, tell: &mut dyn FnMut(Notice, &str)) -> Result<End, Failure> {
        let failure = match self.prepare(number, tell).and_then(|()| self.attempt(number, tell)) {
            Ok(end) => return Ok(end),
            Err(failure) => failure,
        };
        let damage = self.is_damage(&failure);
        if !(damage || self.is_suspect(number, &failure)) || !tiers::is_on_a_tier(&self.dir, &self.description, number) {
            return Err(failure);
        }
        tracing::warn!(generation = number, error = %failure, "not whole here");
        let was_here = self.dir.generations().join(generations::name(number)).exists();
        let items = match bring(&self.dir, &self.description, number, tell) {
            // It is another one than that here.
            Err(other) if was_here && other.in_the_way => {
                return Err(Failure::new(failure.exit, format!("{failure}; {other}")));
            }
            brought => brought?,
        };
        if items == 0 && !damage {
            return Err(failure);
        }
        if items > 0 && was_here {
            let line = format!(
                "generation {number} was not whole here ({failure}); chunks and files brought from a durable tier: {items}"
            );
            tell(Notice::Warning, &line);
        }
        if self.redundant {
            self.prepare(number, tell)?;
        }
        self.attempt(number, tell)
    }

    /// What lies on other hosts is made again or asked for there.
    fn prepare(&mut self, number: u64, tell: &mut dyn FnMut(Notice, &str)) -> Result<(), Failure> {
        if !self.redundant {
            // Where chunks lie on their hosts, those have been asked by now.
            return self.gathered.check(&self.dir, number);
        }
        self.rebuilt |= again::prepare(&self.dir, number, self.hosts, &mut |line| tell(Notice::Progress, line))?;
        Ok(())
    }

    /// Generation `number` is damaged here, and nothing elsewhere could help: who looks next is to know. Not where it
    /// was not even read, because something of it is on a host that does not answer.
    fn note_damage(&self, number: u64, failure: &Failure) {
        if self.read == Some(number) {
            Generation::at(&self.dir.generations(), number).is_damaged(&failure.to_string());
        }
    }

    /// Whether the failed attempt leaves others to be tried.
    fn is_damage(&self, failure: &Failure) -> bool {
        failure.exit == Exit::Damaged && self.agent.is_some()
    }

    /// What could not be read now may be whole: nothing older is used, but where it is asked for.
    fn with_older(&self, failure: Failure, older: Option<u64>) -> Failure {
        match older.filter(|_| self.agent.is_some() && matches!(failure.exit, Exit::Io | Exit::NoKey)) {
            Some(older) => Failure::new(
                failure.exit,
                format!("{failure}; belay restart --generation {older} goes on from an older one"),
            ),
            None => failure,
        }
    }

    /// A part may have found what is damaged, and this process not know it.
    fn is_suspect(&self, number: u64, failure: &Failure) -> bool {
        failure.exit == Exit::RestartFailed && self.agent.is_some() && has_parts(&self.dir, number)
    }

    fn attempt(&mut self, number: u64, tell: &mut dyn FnMut(Notice, &str)) -> Result<End, Failure> {
        self.read = Some(number);
        let g = Generation::at(&self.dir.generations(), number);
        let m = g.manifest()?;
        if let Some(a) = &mut self.agent {
            a.number_from(m.next_chunk);
            a.goes_back_to(g.number)?;
        }
        g.check_owner()?;
        let ended = state::read(&g.path)?;
        announce(&g, m, ended.is_some(), tell);
        tracing::info!(generation = g.number, lazy = self.options.lazy, "restarting");
        let reunion = match &mut self.agent {
            Some(a) => a.other_nodes(&g.path, g.number, self.hosts)?,
            None => None,
        };
        self.hand_over(&g, ended, reunion.as_ref())
    }

    /// Has the processes made again; the agent goes to serve them.
    fn hand_over(&mut self, g: &Generation, ended: Option<i32>, reunion: Option<&Reunion>) -> Result<End, Failure> {
        let shells = self.agent.as_ref().map(Agent::shells).unwrap_or_default();
        let (agent, fallback, rebuilt) = (RefCell::new(&mut self.agent), &self.fallback, self.rebuilt);
        let options = Options {
            ended: ended.is_some(),
            ..self.options.clone()
        };
        // Whoever sees the program run can command it.
        let mut listen = || {
            if let Some(Err(failure)) = agent.borrow_mut().as_mut().map(Agent::listen) {
                tracing::error!(error = %failure, "no control socket");
                sys::say(&format!("{failure}; the program cannot be commanded"));
            }
        };
        let mut serve = |mut restored: Restored, report: &dyn Fn(News)| {
            let agent = agent.borrow_mut().take();
            agent.map_or(0, |mut a| {
                a.begins();
                a.goes_on_from(g);
                let filling = restored.filling.take();
                // What is filled later takes another time than what is predicted.
                if filling.is_none() {
                    a.restart_took(g, &restored.phases);
                }
                a.has_memory(g, filling, std::mem::take(&mut restored.unread));
                if let Some(joining) = reunion.and_then(Reunion::take_joining) {
                    a.rejoin(joining);
                }
                if let Err(failure) = a.becomes_redundant_again(g.number, rebuilt) {
                    tracing::error!(generation = g.number, error = %failure, "not made redundant again");
                }
                agent_main(a, g.number, restored, ended, report)
            })
        };
        // The job may not call it so.
        tracing::debug!(host = sys::host(), "this host");
        let group = reunion.map(|r| -> &dyn Group { r });
        let without_agent = WithoutAgent {
            ends: &|| fallback.is_there(),
            shells: &shells,
            farewell: &|standin, status| end_standin(standin, shell_code(status)),
        };
        belay_restart::restart(&g.path, &options, group, &mut listen, &mut serve, &without_agent).map_err(Failure::from)
    }

    /// What the user is told when none of `damaged` could be restarted.
    fn give_up(self, mut damaged: Vec<(u64, Failure)>) -> Failure {
        let all_damaged = damaged.iter().all(|(_, failure)| self.is_damage(failure));
        self.take_back();
        if let Some(agent) = self.agent {
            agent.abandon();
        }
        if all_damaged && damaged.len() > 1 {
            return none_whole(&self.dir, &damaged);
        }
        let last = damaged.pop().map(|(_, failure)| failure);
        last.unwrap_or_else(|| Failure::new(Exit::NoCheckpoint, "no checkpoint"))
    }
}

/// Says which generation is restarted, and what of the job it holds.
fn announce(g: &Generation, m: &Manifest, ended: bool, tell: &mut dyn FnMut(Notice, &str)) {
    tell(
        Notice::Progress,
        &format!(
            "restarting generation {} ({}, {})",
            g.number,
            counted(m.processes, "process", "es"),
            counted(m.threads, "thread", "s")
        ),
    );
    if ended {
        tell(
            Notice::Warning,
            &format!(
                "generation {} holds what the command left behind when it ended; it goes on in the background",
                g.number
            ),
        );
    }
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
    let at = dir.shown();
    let each: Vec<String> = damaged.iter().map(|(n, why)| format!("generation {n}: {why}")).collect();
    Failure::new(
        Exit::Damaged,
        format!(
            "no generation in {at} is whole: {}; belay verify {at} shows all that is damaged, and a copy of that or of {at} is needed",
            each.join("; ")
        ),
    )
}

fn has_parts(dir: &JobDir, number: u64) -> bool {
    let path = dir.generations().join(generations::name(number));
    table::read(&path).is_ok_and(|rows| !rows.is_empty())
}

/// The fetch phase: what of generation `number` is missing or damaged here comes from the durable tiers; how many
/// chunks and files that was.
fn bring(dir: &JobDir, d: &Description, number: u64, tell: &mut dyn FnMut(Notice, &str)) -> Result<u64, Failure> {
    let phase = Phase::Fetch.name();
    tell(Notice::Progress, &format!("{phase} generation {number}"));
    let begin = Instant::now();
    let mut progress = |done: u64, expected: u64| {
        let percent = (done.min(expected) * 100).checked_div(expected).unwrap_or(0);
        tell(Notice::Bytes(done, expected), &format!("{phase} {percent} %"));
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

/// Numbers of the generations to try, in this order: `wanted`, or all from the newest, in the job directory and on its
/// durable tiers.
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
    found.extend(record::numbers(dir.path())?);
    if found.is_empty() {
        return Err(no_checkpoint(dir, problems.into_iter().next()));
    }
    for (_, problem) in problems {
        tell(Notice::Warning, &problem);
    }
    if let Some(number) = wanted {
        found.retain(|n| *n == number);
        if found.is_empty() {
            let at = dir.shown();
            return Err(Failure::new(
                Exit::NoGeneration,
                format!("{at} has no generation {number}; see belay list {at}"),
            ));
        }
    }
    let there = known.iter().flatten().flat_map(Known::numbers);
    let elsewhere = there.chain(record::numbers(dir.path())?).collect();
    let mut order = generations::order(&dir.generations(), found, &elsewhere);
    tell_of_damaged(dir, (&here, &order), tell);
    tell_of_leftovers(dir, &order, tell);
    if wanted.is_none() {
        put_back_others(dir, (&here, &known), &mut order, tell);
    }
    if d.astray && wanted.is_none() {
        prefer_complete(dir, &known, &mut order, tell);
    }
    Ok(order)
}

/// Where a generation here is another one than that of its number on a tier, another copy of the job directory has gone
/// on by itself: what the tier has from there on comes after what is here.
fn put_back_others(
    dir: &JobDir,
    (here, known): (&[Generation], &[Option<Known>]),
    order: &mut Vec<u64>,
    tell: &mut dyn FnMut(Notice, &str),
) {
    let is_another = |g: &&Generation| {
        let own = files::read(&g.path.join(MANIFEST_FILE), MAX_BYTES).ok();
        let mut theirs = known.iter().flatten().flat_map(|k| &k.generations);
        let differs = |text: &str| own.as_ref().is_some_and(|own| text.as_bytes() != own);
        g.manifest.is_ok() && theirs.any(|(text, m)| m.generation == g.number && differs(text))
    };
    let Some(parted) = here.iter().find(is_another).map(|g| g.number) else {
        return;
    };
    let newest = order.first().copied();
    let is_ours = |n: &u64| *n < parted || here.iter().any(|g| g.number == *n);
    let (ours, theirs): (Vec<u64>, Vec<u64>) = order.iter().partition(|n| is_ours(n));
    *order = [ours, theirs].concat();
    if let (Some(newest), Some(first)) = (newest, order.first().filter(|first| Some(**first) != newest)) {
        let age = age(dir, *first);
        tell(
            Notice::Warning,
            &format!(
                "another copy of the job directory made generation {newest}, which is on a tier: using generation {first}{age} (--generation {newest} for the other)"
            ),
        );
    }
}

/// Puts generations in which nothing was left out first, in the job directory or on a tier; not those that hold only
/// what the command left behind when it failed.
fn prefer_complete(dir: &JobDir, known: &[Option<Known>], order: &mut Vec<u64>, tell: &mut dyn FnMut(Notice, &str)) {
    let is_complete = |n: &u64| {
        let at = Generation::at(&dir.generations(), *n);
        let mut there = known.iter().flatten().flat_map(|k| &k.generations).map(|(_, m)| m);
        let complete = |m: &Manifest| m.generation == *n && m.left_out.is_none();
        !state::has_failed(&at.path) && (at.whole().is_some_and(complete) || there.any(complete))
    };
    let newest = order.first().copied();
    let (complete, others): (Vec<u64>, Vec<u64>) = order.iter().partition(|n| is_complete(n));
    *order = [complete, others].concat();
    if let (Some(newest), Some(first)) = (newest, order.first()) {
        if *first != newest {
            let age = age(dir, *first);
            tell(
                Notice::Warning,
                &format!(
                    "the program failed after it had gone on from a generation that lacks what it declared that it \
                     overwrites: using generation {first}, which lacks nothing{age} (--generation {newest} for the newest)"
                ),
            );
        }
    }
}

/// The failure where there is nothing to restart, and perhaps a `problem` with a tier.
fn no_checkpoint(dir: &JobDir, problem: Option<(Exit, String)>) -> Failure {
    let at = dir.shown();
    match problem {
        Some((exit, problem)) => Failure::new(exit, format!("{at} holds no checkpoint, and {problem}")),
        None => Failure::new(
            Exit::NoCheckpoint,
            format!("{at} holds no checkpoint; start the program with belay launch"),
        ),
    }
}

/// Says so where the first in `order` is not the newest, in which damage was found before.
fn tell_of_damaged(dir: &JobDir, (here, order): (&[Generation], &[u64]), tell: &mut dyn FnMut(Notice, &str)) {
    let Some(first) = order.first() else { return };
    let newer = here.iter().filter(|g| g.number > *first && order.contains(&g.number));
    for (g, why) in newer.filter_map(|g| Some((g.number, g.damage.as_ref()?))) {
        let age = age(dir, *first);
        let line = format!(
            "generation {g} was found damaged ({why}); using generation {first}{age} (--generation {g} tries it once more)"
        );
        tell(Notice::Warning, &line);
    }
}

/// Says so where the first in `order` is not the newest, which holds only what the command left behind.
fn tell_of_leftovers(dir: &JobDir, order: &[u64], tell: &mut dyn FnMut(Notice, &str)) {
    let has_failed = |n: &&u64| state::has_failed(&dir.generations().join(generations::name(**n)));
    let (Some(first), Some(newest)) = (order.first(), order.iter().filter(has_failed).max()) else {
        return;
    };
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

/// Runs in the agent of the restarted job.
fn agent_main(mut agent: Agent, number: u64, restored: Restored, ended: Option<i32>, report: &dyn Fn(News)) -> i32 {
    // What the front has passed on meanwhile is there yet.
    front::handled().set_mask();
    Disposition::set_default(libc::SIGCHLD);
    Disposition::set_ignored(libc::SIGPIPE);
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
