//! Runs a list of checks with some workers: filters, one line per check, a summary in cargo's words.

use crate::build::{build, Kind};
use crate::case::Case;
use crate::place::{am_root, clear_away, Place, User};
use crate::rng::{run_seed, Rng};
use crate::ways::{self, Way};
use crate::Failure;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Checks that run at the same time, where a target does not say otherwise.
pub(crate) const WORKERS: usize = 2;

/// One line of output: a name and what to do.
pub struct Check {
    /// Its name.
    pub name: String,
    /// What it does.
    pub run: Box<dyn Fn() -> Result<(), Failure> + Send + Sync>,
}

/// Filters from the command line: any of these words in the name (all names when there is none); `--exact` and other
/// flags are ignored.
fn selected(name: &str, words: &[String]) -> bool {
    words.is_empty() || words.iter().any(|w| name.contains(w.as_str()))
}

/// Words of a list in an environment variable.
fn listed(var: &str, word: &str) -> bool {
    std::env::var(var).map_or(true, |v| v.split(',').any(|w| w == word))
}

/// Users that this run tests.
pub fn users() -> Vec<User> {
    let all = if am_root() {
        vec![User::Root, User::Ordinary]
    } else {
        vec![User::Ordinary]
    };
    all.into_iter().filter(|u| listed("BELAY_USERS", u.name())).collect()
}

/// Is this way selected by BELAY_WAYS?
pub fn way_selected(w: Way) -> bool {
    listed("BELAY_WAYS", w.name())
}

/// Rounds of a repeated check: BELAY_STRESS, else `usual`.
pub fn rounds(usual: u64) -> u64 {
    let asked = std::env::var("BELAY_STRESS").ok().and_then(|v| v.parse().ok());
    asked.unwrap_or(usual)
}

/// Rounds of a check that hits what it is about by chance: each says whether it did. At least the usual number, and on
/// until one has, for a quarter of an hour.
pub fn until_hit(usual: u64, mut round: impl FnMut(u64) -> Result<bool, Failure>) -> Result<(), Failure> {
    let begin = Instant::now();
    let mut hit = false;
    for n in 0.. {
        if n >= rounds(usual) && (hit || begin.elapsed() > Duration::from_secs(900)) {
            break;
        }
        hit |= round(n).map_err(|e| format!("round {n}: {e}"))?;
    }
    hit.then_some(())
        .ok_or_else(|| "no round hit what this check is about".into())
}

/// Version of the running kernel: major, minor.
fn kernel() -> (u32, u32) {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|n| n.parse().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// `all`, or with BELAY_DRAW one of them, by chance: a part of the checks in a part of the time.
pub(crate) fn drawn<T: Copy>(all: &[T], name: &str, seed: u64) -> Vec<T> {
    match std::env::var_os("BELAY_DRAW") {
        Some(_) if all.len() > 1 => vec![all[Rng::new(seed, name).below(all.len() as u64) as usize]],
        _ => all.to_vec(),
    }
}

/// The ways of a case that are run: those that are selected, or with BELAY_DRAW the one that restarts it and one of the
/// others, each of which that one does too, but for what a program without belay shows.
fn ways_of(case: &Case, seed: u64) -> Vec<Way> {
    let selected = Way::ALL.into_iter().filter(|w| way_selected(*w));
    let (restarts, others): (Vec<Way>, Vec<Way>) = selected.partition(|w| *w == Way::Restarted);
    let mut ways = drawn(&others, &case.name, seed);
    ways.extend(restarts);
    ways
}

/// Whether this processor has memory protection keys, and the kernel uses them.
fn has_protection_keys() -> bool {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    info.split_whitespace().any(|word| word == "ospke")
}

/// The checks of a table of cases: each in four ways as each user.
pub fn checks(place: &Arc<Place>, cases: Vec<Case>) -> Vec<Check> {
    let seed = run_seed();
    println!("seed {seed} (repeat with BELAY_SEED={seed})");
    let mut out = Vec::new();
    let kernel = kernel();
    let keys = has_protection_keys();
    for case in cases.into_iter().filter(|c| c.since <= kernel && (keys || !c.keys)) {
        let case = Arc::new(case);
        let mut users = users();
        users.retain(|user| if *user == User::Root { case.as_root } else { case.as_user });
        for way in ways_of(&case, seed) {
            for user in drawn(&users, &format!("{}::{}", case.name, way.name()), seed) {
                let (case, place) = (Arc::clone(&case), Arc::clone(place));
                out.push(Check {
                    name: check_name(&case, way, user),
                    run: Box::new(move || ways::run(&case, way, user, &place, seed)),
                });
            }
        }
    }
    out
}

fn check_name(case: &Case, way: Way, user: User) -> String {
    format!("{}::{}::{}", case.name, way.name(), user.name())
}

/// Compiles what the selected checks need, several programs at a time.
pub fn build_all(place: &Place, cases: &[Case], more: &[(&str, Kind)]) -> Result<(), Failure> {
    let words: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let mut done = BTreeSet::new();
    let runs = |case: &Case, way: Way| users().into_iter().any(|user| selected(&check_name(case, way, user), &words));
    let wanted = cases
        .iter()
        .filter(|c| c.kind != Kind::Ready && Way::ALL.into_iter().any(|way| runs(c, way)));
    let wanted = wanted.map(|c| (c.program.as_str(), c.kind)).chain(more.iter().copied());
    let wanted: Vec<_> = wanted
        .filter(|(program, kind)| done.insert(format!("{program}{}", kind.suffix())))
        .collect();
    let next = AtomicUsize::new(0);
    let some = || {
        while let Some((program, kind)) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
            build(place, program, *kind)?;
        }
        Ok(())
    };
    std::thread::scope(|s| {
        let compilers: Vec<_> = (0..workers(WORKERS)).map(|_| s.spawn(some)).collect();
        let ended = compilers
            .into_iter()
            .map(|c| c.join().unwrap_or_else(|_| Err("a compiling thread has ended".into())));
        ended.fold(Ok(()), Result::and)
    })
}

/// Checks that run at the same time: BELAY_TEST_WORKERS, else `usual`.
fn workers(usual: usize) -> usize {
    let asked = std::env::var("BELAY_TEST_WORKERS").ok().and_then(|v| v.parse().ok());
    asked.unwrap_or(usual)
}

/// The checks that took longest, of these and their seconds.
fn slowest(mut took: Vec<(u64, String)>) -> String {
    took.sort_by(|a, b| b.cmp(a));
    let most: Vec<String> = took
        .iter()
        .take(5)
        .map(|(seconds, name)| format!("{name} {seconds} s"))
        .collect();
    format!("slowest: {}", most.join(", "))
}

/// Runs the selected checks and ends the process: 0 when all passed.
pub fn main(checks: Vec<Check>) -> ! {
    main_with(WORKERS, checks)
}

/// The same, so many of them at the same time.
pub fn main_with(usual: usize, checks: Vec<Check>) -> ! {
    let words: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let list = std::env::args().any(|a| a == "--list");
    let checks: Vec<Check> = checks.into_iter().filter(|c| selected(&c.name, &words)).collect();
    if list {
        checks.iter().for_each(|c| println!("{}: test", c.name));
        std::process::exit(0);
    }
    println!("running {} tests", checks.len());
    let begin = Instant::now();
    let (next, failed, took) = (AtomicUsize::new(0), Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    std::thread::scope(|s| {
        for _ in 0..workers(usual) {
            s.spawn(|| {
                while let Some(c) = checks.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let t0 = Instant::now();
                    let run = std::panic::AssertUnwindSafe(|| (c.run)());
                    let r = std::panic::catch_unwind(run).unwrap_or_else(|_| Err("it has panicked: see above".into()));
                    clear_away(r.is_ok());
                    let ms = t0.elapsed().as_millis();
                    let seconds = t0.elapsed().as_secs();
                    took.lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push((seconds, c.name.clone()));
                    match r {
                        Ok(()) => println!("test {} ... ok ({ms} ms)", c.name),
                        Err(e) => {
                            println!("test {} ... FAILED ({ms} ms)\n    {}", c.name, e.replace('\n', "\n    "));
                            failed.lock().unwrap_or_else(PoisonError::into_inner).push(c.name.clone());
                        }
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    if !failed.is_empty() {
        println!("\nfailures:\n    {}", failed.join("\n    "));
    }
    let took = took.into_inner().unwrap_or_else(PoisonError::into_inner);
    println!("\n{} s; {}", begin.elapsed().as_secs(), slowest(took));
    let verdict = if failed.is_empty() { "ok" } else { "FAILED" };
    println!(
        "\ntest result: {verdict}. {} passed; {} failed; 0 ignored",
        checks.len() - failed.len(),
        failed.len()
    );
    drop(checks); // the last user of the place removes it
    std::process::exit(i32::from(!failed.is_empty()));
}
