//! A test target whose checks are functions: the place where they run, the programs that they need, and who runs each.

use crate::build::{build, Kind};
use crate::place::{Place, User};
use crate::rng::{run_seed, Rng};
use crate::runner::{self, Check};
use crate::Failure;
use std::sync::{Arc, Mutex, PoisonError};

/// A target with the checks added so far, each called `TARGET::CHECK`.
pub struct Target {
    name: &'static str,
    place: Arc<Place>,
    seed: u64,
    /// Held by the check that runs, where only one may.
    turn: Option<Arc<Mutex<()>>>,
    workers: usize,
    every_user: bool,
    checks: Vec<Check>,
}

impl Target {
    /// A target in a place of its own, with these C programs compiled. Where that cannot be had, the process ends.
    pub fn new(name: &'static str, programs: &[&str]) -> Self {
        let place = or_end(Place::new(name));
        for program in programs {
            or_end(build(&place, program, Kind::C));
        }
        let seed = run_seed();
        println!("seed {seed}");
        let checks = Vec::new();
        Self {
            name,
            place: Arc::new(place),
            seed,
            turn: None,
            workers: runner::WORKERS,
            every_user: false,
            checks,
        }
    }

    /// A target of checks on test hosts, which those of another check do not see. Where there can be no test hosts the
    /// process says so and ends.
    pub fn over_hosts(name: &'static str) -> Self {
        crate::hosts::serve_if_asked();
        if let Some(why) = crate::hosts::unavailable() {
            println!("skipped: no test hosts here: {why}");
            std::process::exit(0);
        }
        Self::new(name, &[])
    }

    /// Lets the checks added from here on run one after the other.
    pub fn in_turn(&mut self) {
        self.turn = Some(Arc::default());
    }

    /// Lets the checks added from here on run as every user also with BELAY_DRAW: users are what they are about.
    pub fn as_every_user(&mut self) {
        self.every_user = true;
    }

    /// Lets so many checks run at the same time: more than usual where they wait for most of it.
    pub fn at_a_time(&mut self, workers: usize) {
        self.workers = workers;
    }

    /// Lets these checks, as any user, begin first, because they take longest: what begins last is waited for alone.
    pub fn first(&mut self, checks: &[&str]) {
        let place_of = |name: &str| {
            let name = name.split_once("::").map_or(name, |(_, check)| check);
            let is = |check: &&str| {
                name.strip_prefix(*check)
                    .is_some_and(|user| user.is_empty() || user.starts_with("::"))
            };
            checks.iter().position(is).unwrap_or(checks.len())
        };
        self.checks.sort_by_key(|check| place_of(&check.name));
    }

    /// Where the checks run.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Adds a check `CHECK::USER` for each user that is tested and `wanted`; with BELAY_DRAW for one of them, by chance.
    pub fn by_user<F>(&mut self, check: &str, wanted: impl Fn(User) -> bool, test: F)
    where
        F: Fn(&Place, User, &mut Rng) -> Result<(), Failure> + Copy + Send + Sync + 'static,
    {
        let mut users: Vec<User> = runner::users().into_iter().filter(|u| wanted(*u)).collect();
        if !self.every_user {
            users = runner::drawn(&users, &format!("{}::{check}", self.name), self.seed);
        }
        for user in users {
            self.once(&format!("{check}::{}", user.name()), move |place, rng| test(place, user, rng));
        }
    }

    /// Adds a check.
    pub fn once<F>(&mut self, check: &str, test: F)
    where
        F: Fn(&Place, &mut Rng) -> Result<(), Failure> + Send + Sync + 'static,
    {
        let (name, place, seed) = (format!("{}::{check}", self.name), Arc::clone(&self.place), self.seed);
        let (label, turn) = (name.clone(), self.turn.clone());
        let run = move || {
            let _turn = turn.as_ref().map(|turn| turn.lock().unwrap_or_else(PoisonError::into_inner));
            test(&place, &mut Rng::new(seed, &label))
        };
        self.checks.push(Check {
            name,
            run: Box::new(run),
        });
    }

    /// Runs the checks that are asked for and ends the process.
    pub fn run(self) -> ! {
        let Self {
            place, checks, workers, ..
        } = self;
        // The last check removes it.
        drop(place);
        runner::main_with(workers, checks)
    }
}

/// What was to be had; else its reason is printed and the process ends.
pub fn or_end<T>(r: Result<T, Failure>) -> T {
    r.unwrap_or_else(|e| {
        println!("{e}");
        std::process::exit(1)
    })
}
