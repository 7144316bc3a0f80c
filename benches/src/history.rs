//! Histories of checkpoints in virtual time: the planner that decides in the library, asked by simulated programs on
//! simulated devices with the figures of the HPDC 2023 paper (eight programs, two devices to a link), beside what is
//! published, what is common, and what no policy can be better than.

mod node;
mod revolve;
mod sweeps;
mod work;

use crate::Plan;
use belay_history::choose::Choice;
use belay_history::limits::{self, Pace};
use belay_history::plan::{Flush, Rules};
use node::{Machine, Node, Policy, Run, GIB, SHARED};
use work::{Hints, Random, Reads, Sizes, VERSIONS};

const PROGRAMS: usize = 8;
const INTERVAL: f64 = 0.01;
const MACHINE: Machine = Machine {
    device: 4 * GIB,
    host: 32 * GIB,
    copy: 1e12,
    link: 25e9,
    disk: 16e9,
};

const fn paged(name: &'static str, rules: Rules) -> Policy {
    Policy {
        name,
        rules,
        contiguous: false,
        device: true,
        by_need: false,
    }
}

const OURS: Policy = Policy {
    by_need: true,
    ..paged("ours", Rules::OURS)
};
const SCORE: Policy = Policy {
    contiguous: true,
    ..paged("score", Rules::SCORE)
};
const UVM: Policy = paged(
    "uvm-like",
    Rules {
        choice: Choice::Lru,
        flush: Flush::Late,
        exclusive: false,
        past: false,
        prefetch: true,
        migrate: true,
    },
);
const POLICIES: [Policy; 7] = [
    OURS,
    Policy {
        name: "contiguous",
        contiguous: true,
        ..OURS
    },
    SCORE,
    paged("lru", Rules::LRU),
    paged("belady", Rules::BELADY),
    UVM,
    Policy {
        name: "adios-like",
        device: false,
        ..paged(
            "",
            Rules {
                past: true,
                prefetch: false,
                ..Rules::LRU
            },
        )
    },
];

/// A cell of the comparison.
#[derive(Debug, Clone, Copy)]
struct Cell {
    machine: Machine,
    interval: f64,
    reads: Reads,
    sizes: Sizes,
    wait: bool,
    hints: Hints,
}

/// A cell with its numbers drawn: sizes and order of each program.
struct Drawn {
    cell: Cell,
    sizes: Vec<Vec<u64>>,
    orders: Vec<Vec<u64>>,
}

impl Cell {
    fn draw(self, seed: u64) -> Drawn {
        let mut sizes = Vec::new();
        let mut orders = Vec::new();
        for p in 0..PROGRAMS as u64 {
            let mut random = Random::new(1 + seed * 1000 + p);
            sizes.push(self.sizes.of(&mut random));
            orders.push(self.reads.of(&mut random));
        }
        Drawn {
            cell: self,
            sizes,
            orders,
        }
    }
}

impl Drawn {
    /// The least seconds of both passes together, and of the stall in them.
    fn limit(&self) -> [f64; 2] {
        let all = self.limits().iter().sum();
        [all, all - self.own()]
    }

    /// The least seconds of each pass.
    fn limits(&self) -> [f64; 2] {
        let m = &self.cell.machine;
        let links = |_| {
            [
                limits::Link {
                    rate: m.link,
                    room: m.device,
                    shared: SHARED,
                },
                limits::Link {
                    rate: m.disk,
                    room: m.device + m.host,
                    shared: PROGRAMS,
                },
            ]
        };
        let pace = Pace {
            interval: self.cell.interval,
            copy: m.copy,
        };
        let read = |(sizes, order): (&Vec<u64>, &Vec<u64>)| order.iter().map(|v| sizes[*v as usize]).collect::<Vec<u64>>();
        let back: Vec<Vec<u64>> = self.sizes.iter().zip(&self.orders).map(read).collect();
        [
            limits::pass(&self.sizes, &links(()), pace),
            limits::pass(&back, &links(()), pace),
        ]
    }

    /// The programs' own time.
    fn own(&self) -> f64 {
        2.0 * VERSIONS as f64 * self.cell.interval
    }

    fn run(&self, policy: &Policy) -> Result<Run, String> {
        self.run_told(policy, &self.orders, 1.0)
    }

    /// With other hints than what is read, and planners that take the links to be so many times as fast as they are.
    fn run_told(&self, policy: &Policy, told: &[Vec<u64>], error: f64) -> Result<Run, String> {
        let c = &self.cell;
        let each = self.sizes.iter().zip(&self.orders).zip(told);
        let programs = each.map(|((s, order), told)| work::passes(s, order, told, c.hints, c.wait, c.interval));
        let node = Node::new(c.machine, policy, programs.collect(), error);
        node.run().map_err(|e| format!("{}: {c:?}: {e}", policy.name))
    }
}

fn cells() -> impl Iterator<Item = Cell> {
    let waits = |w| Sizes::ALL.map(|s| (w, s));
    let kinds = [true, false].into_iter().flat_map(waits);
    let reads = kinds.flat_map(|(w, s)| Reads::ALL.map(|r| (w, s, r)));
    reads.flat_map(|(wait, sizes, reads)| {
        Hints::ALL.map(|hints| Cell {
            machine: MACHINE,
            interval: INTERVAL,
            reads,
            sizes,
            wait,
            hints,
        })
    })
}

/// The median; 0 of none.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Stall of each policy in a cell, and the limits, of each seed.
struct Outcome {
    cell: Cell,
    /// Seconds of both passes that no policy can be better than, and of these the stall.
    limits: Vec<[f64; 2]>,
    /// In the order of [`POLICIES`], for each seed.
    stalls: Vec<Vec<f64>>,
}

impl Outcome {
    fn of(cell: Cell, seeds: u64) -> Result<Self, String> {
        let mut outcome = Self {
            cell,
            limits: Vec::new(),
            stalls: vec![Vec::new(); POLICIES.len()],
        };
        for seed in 1..=seeds {
            let drawn = cell.draw(seed);
            outcome.limits.push(drawn.limit());
            for (policy, stalls) in POLICIES.iter().zip(&mut outcome.stalls) {
                stalls.push(drawn.run(policy)?.seconds() - drawn.own());
            }
        }
        Ok(outcome)
    }

    fn print(&self) {
        let limit = |i: usize| median(self.limits.iter().map(|l| l[i]).collect());
        print!(
            "{:<8}{:<9}{:<11}{:<6}{:>7.2} |{:>6.2} ",
            if self.cell.wait { "wait" } else { "no-wait" },
            self.cell.sizes.name(),
            self.cell.reads.name(),
            self.cell.hints.name(),
            limit(0),
            limit(1)
        );
        self.stalls.iter().for_each(|s| print!("{:>11.2}", median(s.clone())));
        println!("{:>8.3}{:>8.2}", self.by_limit(0), self.by_limit(1));
    }

    /// Time, or the stall in it, of ours by its limit: the worst seed.
    fn by_limit(&self, which: usize) -> f64 {
        let own = |l: &[f64; 2]| if which == 0 { l[0] - l[1] } else { 0.0 };
        let ratios = self.stalls[0].iter().zip(&self.limits).map(|(s, l)| (s + own(l)) / l[which]);
        ratios.fold(0.0, f64::max)
    }

    /// The median of one policy's stall by another's.
    fn ratio(&self, of: &Policy, by: &Policy) -> f64 {
        let at = |p: &Policy| {
            POLICIES
                .iter()
                .position(|q| q == p)
                .map_or(&[] as &[f64], |i| &self.stalls[i])
        };
        median(at(of).iter().zip(at(by)).map(|(a, b)| a / b).collect())
    }
}

/// The smallest and the largest.
fn range(values: impl Iterator<Item = f64>) -> String {
    let (low, high) = values.fold((f64::INFINITY, 0.0), |(l, h), v| (f64::min(l, v), f64::max(h, v)));
    format!("{low:.2} to {high:.2}")
}

/// All policies in all cells.
fn policies(seeds: u64) -> Result<(), String> {
    println!(
        "stall of puts and gets, s (medians of {seeds} seeds); ours by the limit of both passes and of the stall (worst seed)"
    );
    print!("{:<34}{:>7} |{:>6} ", "", "limit", "stall");
    POLICIES.iter().for_each(|p| print!("{:>11}", p.name));
    println!("{:>8}{:>8}", "passes", "stall");
    let mut found = Vec::new();
    for cell in cells() {
        let outcome = Outcome::of(cell, seeds)?;
        outcome.print();
        found.push(outcome);
    }
    let told = |o: &&Outcome| matches!(o.cell.hints, Hints::All | Hints::Sized);
    println!(
        "all hints: ours by the limit of both passes {}",
        range(found.iter().filter(told).map(|o| o.by_limit(0)))
    );
    println!(
        "all hints: ours by the limit of the stall   {}",
        range(found.iter().filter(told).map(|o| o.by_limit(1)))
    );
    println!(
        "ours by score                               {}",
        range(found.iter().map(|o| o.ratio(&OURS, &SCORE)))
    );
    let hard = |o: &&Outcome| !o.cell.wait && o.cell.sizes == Sizes::Variable && o.cell.reads == Reads::Irregular;
    println!(
        "the same, no-wait variable irregular        {}",
        range(found.iter().filter(hard).map(|o| o.ratio(&OURS, &SCORE)))
    );
    for (wait, sizes, published) in [
        (true, Sizes::Uniform, "2 to 74"),
        (true, Sizes::Variable, "1.6 to 52"),
        (false, Sizes::Uniform, "1.8 to 3.6"),
        (false, Sizes::Variable, "2.9 to 22.8"),
    ] {
        let of = |o: &&Outcome| o.cell.wait == wait && o.cell.sizes == sizes;
        println!(
            "throughput by uvm-like, {} {}: score {}, ours {} (published {published})",
            if wait { "wait" } else { "no-wait" },
            sizes.name(),
            range(found.iter().filter(of).map(|o| 1.0 / o.ratio(&SCORE, &UVM))),
            range(found.iter().filter(of).map(|o| 1.0 / o.ratio(&OURS, &UVM)))
        );
    }
    Ok(())
}

/// See the module.
pub(crate) fn history(plan: &Plan) -> Result<(), String> {
    policies(plan.seeds)?;
    sweeps::machines()?;
    sweeps::wrong()?;
    sweeps::binomial()?;
    sweeps::choice()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_is_near_the_limit_and_the_same_each_time() {
        for reads in Reads::ALL {
            let cell = Cell {
                machine: MACHINE,
                interval: INTERVAL,
                reads,
                sizes: Sizes::Uniform,
                wait: false,
                hints: Hints::All,
            };
            let drawn = cell.draw(1);
            let run = drawn.run(&OURS).unwrap();
            let ratio = (run.seconds() - drawn.own()) / drawn.limit()[1];
            assert!((1.0..1.1).contains(&ratio), "{reads:?}: {ratio}");
            assert_eq!(run, drawn.run(&OURS).unwrap());
        }
    }

    /// A limit is one for everybody.
    #[test]
    fn nobody_is_below_the_limit() {
        let cell = Cell {
            machine: MACHINE,
            interval: INTERVAL,
            reads: Reads::Reverse,
            sizes: Sizes::Variable,
            wait: false,
            hints: Hints::All,
        };
        let drawn = cell.draw(1);
        for policy in [OURS, POLICIES[3], UVM] {
            let stall = drawn.run(&policy).unwrap().seconds() - drawn.own();
            assert!(stall >= drawn.limit()[1], "{}: {stall} {:?}", policy.name, drawn.limit());
        }
    }
}
