//! One thing varied at a time: the machine, hints and bandwidths that are wrong, and schedules that mix puts and gets.

use super::node::{Machine, Node, Policy, Step, GIB, MIB, SHARED};
use super::revolve::revolve;
use super::work::{self, Hints, Random, Reads, Sizes, VERSIONS};
use super::{Cell, INTERVAL, MACHINE, OURS, POLICIES, PROGRAMS, SCORE, UVM};
use belay_history::limits::{self, Op};
use belay_history::plan::{Config, Link, Planner, Rules};
use belay_history::table::Room;
use belay_history::Version;
use std::time::Instant;

/// Least recently used.
const LRU: Policy = POLICIES[3];

fn cell(sizes: Sizes, reads: Reads) -> Cell {
    Cell {
        machine: MACHINE,
        interval: INTERVAL,
        reads,
        sizes,
        wait: false,
        hints: Hints::All,
    }
}

/// Stalls of a cell: the limit, then ours, score and uvm-like.
fn stalls(cell: Cell) -> Result<[f64; 4], String> {
    let drawn = cell.draw(1);
    let mut found = [drawn.limit()[1], 0.0, 0.0, 0.0];
    for (stall, policy) in found[1..].iter_mut().zip([OURS, SCORE, UVM]) {
        *stall = drawn.run(&policy)?.seconds() - drawn.own();
    }
    Ok(found)
}

/// Interval and caches.
pub(super) fn machines() -> Result<(), String> {
    println!("irregular order, no-wait, all hints; stall, s: limit, ours, score, uvm-like");
    for sizes in Sizes::ALL {
        let base = cell(sizes, Reads::Irregular);
        let intervals = [5.0, 10.0, 15.0, 20.0, 30.0, 40.0].map(|ms| {
            let interval = ms / 1e3;
            (format!("interval {ms} ms"), Cell { interval, ..base })
        });
        let on = |machine| Cell { machine, ..base };
        let devices = [1, 2, 4, 8, 16].map(|gib| {
            let device = gib * GIB;
            (format!("device cache {gib} GiB"), on(Machine { device, ..MACHINE }))
        });
        let hosts = [0, 8, 16, 32, 48, 64].map(|gib| {
            let host = gib * GIB;
            (format!("host cache {gib} GiB"), on(Machine { host, ..MACHINE }))
        });
        for sweep in [&intervals[..], &devices, &hosts] {
            let (mut last, mut becomes_less) = (f64::INFINITY, true);
            for (name, cell) in sweep {
                let [limit, ours, score, uvm] = stalls(*cell)?;
                println!(
                    "    {:<9}{name:<22}{limit:>8.2}{ours:>8.2}{score:>8.2}{uvm:>8.2}",
                    sizes.name()
                );
                becomes_less &= ours <= last * 1.01 + 0.01;
                last = ours;
            }
            println!("    ours becomes less all the way: {becomes_less}");
        }
    }
    Ok(())
}

/// Hints that are wrong or missing, and bandwidths that are not what the planner begins with.
pub(super) fn wrong() -> Result<(), String> {
    println!("no-wait, hints wrong or missing; stall, s: ours, lru with the same hints");
    for sizes in Sizes::ALL {
        for reads in Reads::ALL {
            let drawn = cell(sizes, reads).draw(1);
            print!("    {:<9}{:<11}", sizes.name(), reads.name());
            for percent in [0, 5, 20, 50, 100] {
                let mut random = Random::new(7);
                let told = drawn.orders.iter().map(|o| work::mistold(o, percent, &mut random));
                let told: Vec<Vec<u64>> = told.collect();
                let stall = |p: &Policy| drawn.run_told(p, &told, 1.0).map(|r| r.seconds() - drawn.own());
                print!("  {percent:>3} %: {:>5.2} {:>5.2}", stall(&OURS)?, stall(&LRU)?);
            }
            for error in [0.5, 2.0] {
                let run = drawn.run_told(&OURS, &drawn.orders, error)?;
                print!("  bandwidth x {error}: {:>5.2}", run.seconds() - drawn.own());
            }
            println!();
        }
    }
    Ok(())
}

/// Puts and gets mixed.
pub(super) fn binomial() -> Result<(), String> {
    println!("binomial schedules of {VERSIONS} steps, versions of 128 MiB; seconds: limit, ours, score, uvm-like; ours by limit");
    for slots in [32, 64, 128] {
        let steps = revolve(VERSIONS as u64, slots, 128 * MIB, INTERVAL);
        let limit = mixed_limit(&steps);
        let mut seconds = [0.0; 3];
        for (s, policy) in seconds.iter_mut().zip([OURS, SCORE, UVM]) {
            *s = Node::new(MACHINE, &policy, vec![steps.clone(); PROGRAMS], 1.0)
                .run()?
                .seconds();
        }
        let puts = steps.iter().filter(|s| matches!(s, Step::Put(..))).count();
        println!(
            "    {slots:>3} slots, {puts} puts, {} gets: {limit:>7.3}{:>8.3}{:>8.3}{:>8.3}  {:.3}",
            steps.len() - puts - 1,
            seconds[0],
            seconds[1],
            seconds[2],
            seconds[0] / limit
        );
    }
    Ok(())
}

/// The least seconds of a schedule that all programs run.
fn mixed_limit(steps: &[Step]) -> f64 {
    let (mut own, mut ops) = (0.0, Vec::new());
    for step in steps {
        match step {
            Step::Put(work, version, size) => {
                own += work + *size as f64 / MACHINE.copy;
                ops.push(Op::Put(version.0, *size));
            }
            Step::Get(work, version, _) => {
                own += work + (128 * MIB) as f64 / MACHINE.copy;
                ops.push(Op::Get(version.0));
            }
            Step::Hint(_) | Step::Barrier | Step::Flush => {}
        }
    }
    let fetched = |room| limits::kept(&ops, room).fetched() as f64;
    let link = fetched(MACHINE.device) * SHARED as f64 / MACHINE.link;
    // Down and up.
    let disk = 2.0 * fetched(MACHINE.device + MACHINE.host) * PROGRAMS as f64 / MACHINE.disk;
    f64::max(own, link).max(disk)
}

/// What a decision costs with so many versions of an extent each in the fastest tier: the largest and the median of the
/// calls that have to choose.
pub(super) fn choice() -> Result<(), String> {
    const COUNT: u64 = 10_000;
    let link = Link {
        down: 1e9,
        up: 1e9,
        duplex: true,
    };
    let room = |extents| Room::Paged {
        bytes: extents * MIB,
        extent: MIB,
    };
    let mut planner = Planner::new(&Config {
        rules: Rules::OURS,
        rooms: vec![room(COUNT), room(4 * COUNT), Room::Endless],
        links: vec![link; 2],
        copy: 1e12,
    });
    planner.hint((0..2 * COUNT).map(Version));
    let mut took = Vec::new();
    for v in 0..2 * COUNT {
        let error = |e: belay_history::plan::PlanError| e.to_string();
        planner.put(v as f64, Version(v), MIB).map_err(error)?;
        let begun = Instant::now();
        let mut jobs = planner.poll(v as f64).map_err(error)?;
        if v >= COUNT {
            took.push(begun.elapsed().as_secs_f64() * 1e6);
        }
        while let Some(job) = jobs.pop() {
            planner.done(v as f64, job.id).map_err(error)?;
            jobs.extend(planner.poll(v as f64).map_err(error)?);
        }
    }
    took.sort_by(f64::total_cmp);
    let at = |part: usize| took[(took.len() - 1) * part / 100];
    println!(
        "a put that needs room among {COUNT} versions: {:.1} us in the median, {:.1} in 99 of 100",
        at(50),
        at(99)
    );
    Ok(())
}
