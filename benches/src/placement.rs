//! The experiment of the VELOC paper with as many writers as a large node has, in virtual time: the desk that gives
//! places in the agent, asked by simulated writers and flushers of simulated devices.
//!
//! Writers that have more to write than memory holds, a slow local tier that loses throughput when many write it at
//! once, and an external tier. The desk knows the tiers by a calibration of the simulated devices. All who use a device
//! at a time get equal shares of what it gives then (max-min fair over all devices that a move uses), so a run is
//! exact, and the same each time. No policy can be faster than
//!
//! ```text
//! local phase   (data - memory) / (external + slow)      with the slow tier at its best number of writers
//! flush         data / external
//! ```

use crate::Plan;
use belay_storage::place::calibrate;
use belay_storage::place::desk::{Desk, Place, Spec, Ticket};
use belay_storage::place::model::Model;
use belay_storage::place::rule::Policy;
use std::time::Duration;

const CHUNK: u64 = 64 << 20;
/// Of each writer.
const CHUNKS: u64 = 2;
/// The data are so many times as large as memory.
const DATA_PER_MEMORY: u64 = 4;
/// Moves at a time, as in the agent.
const FLUSHERS: usize = 2;
const MIB: f64 = 1048576.0;
/// Most bytes per second of the slow tier.
const SLOW: f64 = 500.0 * MIB;
const MEMORY: f64 = 10_000.0 * MIB;
/// Users that a device needs to give all it can, and what it gives to one alone (measured: a virtual disk with `O_DIRECT`).
const ENOUGH: f64 = 2.0;
const ALONE: f64 = 0.75;
/// Errors of a calibration, in both directions.
const ERROR: f64 = 0.2;

/// A device: what it gives to all its users together.
#[derive(Debug, Clone, Copy)]
struct Device {
    /// Most bytes per second.
    best: f64,
    /// What is lost with each user more than enough: with 1/62, 64 users get half of the best.
    loss: f64,
}

impl Device {
    /// Bytes per second of `users` together.
    fn total(self, users: usize) -> f64 {
        let users = users as f64;
        let used = if users < ENOUGH { ALONE } else { 1.0 };
        self.best * used / (1.0 + self.loss * (users - ENOUGH).max(0.0))
    }

    /// What a calibration up to `writers` finds, each sample wrong by the next of `errors`.
    fn calibrated(self, writers: u64, errors: &mut impl FnMut() -> f64) -> Result<Model, String> {
        let plan = calibrate::Plan::up_to(writers as u32);
        let sample = |i: u32| {
            let n = (1 + i * plan.step) as usize;
            self.total(n) / n as f64
        };
        let samples = (0..plan.samples).map(|i| sample(i) * (1.0 + errors())).collect();
        Model::new(plan.step, samples).ok_or_else(|| "calibrate: no throughput".into())
    }
}

/// The tiers and the work of a cell.
#[derive(Debug, Clone, Copy)]
struct Cell {
    writers: u64,
    slow: Device,
    /// Bytes per second of the external tier,
    external: f64,
    /// and from the middle of the shortest possible local phase on.
    later: f64,
}

impl Cell {
    fn data(&self) -> u64 {
        self.writers * CHUNKS * CHUNK
    }

    fn memory(&self) -> u64 {
        self.data() / DATA_PER_MEMORY
    }

    /// When the external tier changes.
    fn change(&self) -> f64 {
        (self.data() - self.memory()) as f64 / (self.external + self.slow.best) / 2.0
    }

    /// The least time to get `bytes` away through the external tier and `beside` it.
    fn least(&self, bytes: u64, beside: f64) -> f64 {
        let (bytes, change) = (bytes as f64, self.change());
        let early = bytes / (self.external + beside);
        if early <= change {
            return early;
        }
        change + (bytes - change * (self.external + beside)) / (self.later + beside)
    }

    /// The least times of the local phase and until all is flushed, where the slow tier gives `slow`.
    fn limits(&self, slow: f64) -> [f64; 2] {
        [self.least(self.data() - self.memory(), slow), self.least(self.data(), 0.0)]
    }
}

/// What is moved.
#[derive(Debug)]
enum Move {
    /// A writer's chunk to its place.
    Write(usize, Place),
    /// A chunk from a tier to the external one, since when.
    Flush(usize, f64),
}

impl Move {
    /// Which of memory, the slow tier and the external one it uses.
    fn uses(&self) -> [bool; 3] {
        match self {
            Move::Write(_, Place::Tier(tier)) => [*tier == 0, *tier == 1, false],
            Move::Write(_, Place::Home) => [false, false, true],
            Move::Flush(tier, _) => [*tier == 0, *tier == 1, true],
        }
    }
}

/// Equal shares for all moves, and more for those whose devices have some left.
fn rates(moves: &[(Move, f64)], cell: &Cell, external: f64) -> Vec<f64> {
    let users = |device: usize| moves.iter().filter(|m| m.0.uses()[device]).count();
    let memory = Device { best: MEMORY, loss: 0.0 };
    let mut left = [memory.total(users(0)), cell.slow.total(users(1)), external];
    let mut rates = vec![None; moves.len()];
    while rates.contains(&None) {
        let share = |device: usize| {
            let open = moves.iter().zip(&rates).filter(|(m, r)| r.is_none() && m.0.uses()[device]);
            match open.count() {
                0 => f64::INFINITY,
                open => left[device] / open as f64,
            }
        };
        let shares = [share(0), share(1), share(2)];
        let scarce = (0..3).min_by(|a, b| shares[*a].total_cmp(&shares[*b])).unwrap_or(0);
        for (m, r) in moves.iter().zip(&mut rates) {
            if r.is_none() && m.0.uses()[scarce] {
                *r = Some(shares[scarce]);
                (0..3).filter(|d| m.0.uses()[*d]).for_each(|d| left[d] -= shares[scarce]);
            }
        }
    }
    rates.into_iter().flatten().collect()
}

/// A writer between two chunks.
#[derive(Debug)]
struct Writer {
    /// Chunks that it has not asked a place for.
    left: u64,
    waits: Option<Ticket>,
}

/// One run: seconds until all is written, and until all is on the external tier.
fn run(policy: Policy, cell: &Cell, models: &[Model; 2]) -> Result<[f64; 2], String> {
    let spec = |tier: usize, capacity| Spec {
        capacity,
        memory: tier == 0,
        model: models[tier].clone(),
        shared: None,
    };
    let desk = Desk::new(policy, vec![spec(0, cell.memory()), spec(1, u64::MAX)]);
    let mut writers: Vec<Writer> = (0..cell.writers)
        .map(|_| Writer {
            left: CHUNKS - 1,
            waits: Some(desk.ask(CHUNK)),
        })
        .collect();
    let mut moves: Vec<(Move, f64)> = Vec::new();
    let (mut now, mut local, mut arrived) = (0.0, 0.0, 0);
    loop {
        for (w, writer) in writers.iter_mut().enumerate() {
            if let Some(place) = writer.waits.as_ref().and_then(|t| desk.granted(t)) {
                writer.waits = None;
                moves.push((Move::Write(w, place), CHUNK as f64));
            }
        }
        let flushing = moves.iter().filter(|m| matches!(m.0, Move::Flush(..))).count();
        for (tier, _, _) in std::iter::from_fn(|| desk.try_take()).take(FLUSHERS - flushing) {
            moves.push((Move::Flush(tier, now), CHUNK as f64));
        }
        let (external, until) = if now < cell.change() {
            (cell.external, cell.change())
        } else {
            (cell.later, f64::INFINITY)
        };
        let rates = rates(&moves, cell, external);
        let ends = moves.iter().zip(&rates).map(|(m, r)| m.1 / r);
        let Some((first, step)) = ends.enumerate().min_by(|a, b| a.1.total_cmp(&b.1)) else {
            break;
        };
        let is_over = step <= until - now;
        let step = step.min(until - now);
        now = if is_over { now + step } else { until };
        moves.iter_mut().zip(&rates).for_each(|(m, r)| m.1 -= r * step);
        if !is_over {
            continue;
        }
        match moves.swap_remove(first).0 {
            Move::Flush(tier, since) => {
                desk.observe(CHUNK, Duration::from_secs_f64(now - since));
                desk.flushed(tier, CHUNK, true);
                arrived += 1;
            }
            Move::Write(w, place) => {
                match place {
                    Place::Tier(tier) => desk.written(tier, w as u64, CHUNK, CHUNK),
                    Place::Home => arrived += 1,
                }
                local = now;
                let writer = &mut writers[w];
                if writer.left > 0 {
                    writer.left -= 1;
                    writer.waits = Some(desk.ask(CHUNK));
                }
            }
        }
    }
    if arrived != cell.writers * CHUNKS {
        return Err(format!("{}: {arrived} chunks have arrived", policy.name()));
    }
    Ok([local, now])
}

/// What a cell has shown.
#[derive(Debug)]
struct Outcome {
    limits: [f64; 2],
    /// In the order of [`Policy::ALL`].
    times: [[f64; 2]; 4],
    /// What naive must lose in the local phase, by the limits alone: all its writers but for a few are at the slow tier.
    allowed: f64,
}

impl Outcome {
    fn of(cell: &Cell, errors: &mut impl FnMut() -> f64) -> Result<Self, String> {
        let memory = Device { best: MEMORY, loss: 0.0 };
        let models = [
            memory.calibrated(cell.writers, errors)?,
            cell.slow.calibrated(cell.writers, errors)?,
        ];
        let mut times = [[0.0; 2]; 4];
        for (t, policy) in times.iter_mut().zip(Policy::ALL) {
            *t = run(policy, cell, &models)?;
        }
        let limits = cell.limits(cell.slow.best);
        Ok(Self {
            allowed: cell.limits(cell.slow.total(cell.writers as usize))[0] / limits[0],
            limits,
            times,
        })
    }

    /// Adaptive by the better of naive and local-only.
    fn by_others(&self, phase: usize) -> f64 {
        let [adaptive, _, local_only, naive] = self.times.map(|t| t[phase]);
        adaptive / local_only.min(naive)
    }

    fn by_limit(&self, phase: usize) -> f64 {
        self.times[0][phase] / self.limits[phase]
    }

    /// Naive's local phase by adaptive's.
    fn gain(&self) -> f64 {
        self.times[3][0] / self.times[0][0]
    }
}

/// Errors of calibrations, equally distributed within what is allowed.
fn errors(seed: u64) -> impl FnMut() -> f64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 11) as f64 / (1u64 << 53) as f64 * 2.0 - 1.0) * ERROR
    }
}

const WRITERS: [u64; 3] = [64, 128, 256];
/// So that the slow tier gives to 64 users all, three quarters, or half of its best.
const LOSSES: [f64; 3] = [0.0, 1.0 / 186.0, 1.0 / 62.0];
/// Speed of the external tier by that of the slow one.
const EXTERNAL: [f64; 3] = [0.5, 1.0, 2.0];
/// Wrong calibrations of each cell.
const WRONG: u64 = 10;

fn cells() -> impl Iterator<Item = Cell> {
    let cell = |writers, loss, factor: f64| Cell {
        writers,
        slow: Device { best: SLOW, loss },
        external: SLOW * factor,
        later: SLOW * factor,
    };
    let of = move |writers| {
        LOSSES
            .into_iter()
            .flat_map(move |loss| EXTERNAL.map(|f| cell(writers, loss, f)))
    };
    WRITERS.into_iter().flat_map(of)
}

/// The largest of `values`.
fn most(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(0.0, f64::max)
}

/// All policies in all cells; then adaptive with calibrations that are wrong, and with an external tier that becomes
/// slower or faster.
pub(crate) fn placement(_: &Plan) -> Result<(), String> {
    println!(
        "virtual time; each writer {CHUNKS} chunks of {} MiB, memory for a quarter; local phase and flush, s",
        CHUNK >> 20
    );
    for cell in cells() {
        let o = Outcome::of(&cell, &mut || 0.0)?;
        println!(
            "{} writers, of which the slow tier gives {:.2} of its {} MiB/s to 64; external {} x",
            cell.writers,
            cell.slow.total(64) / SLOW,
            SLOW / MIB,
            cell.external / SLOW
        );
        println!("    {:<14} {:>8.2} {:>8.2}", "limit", o.limits[0], o.limits[1]);
        for (policy, t) in Policy::ALL.into_iter().zip(o.times) {
            println!("    {:<14} {:>8.2} {:>8.2}", policy.name(), t[0], t[1]);
        }
        println!(
            "    adaptive is {:.3} and {:.3} of the better of naive and local-only (goal <= 1.05), {:.3} and {:.3} of the limit (goal <= 1.15); naive is {:.3} of it, {:.3} by the limits",
            o.by_others(0),
            o.by_others(1),
            o.by_limit(0),
            o.by_limit(1),
            o.gain(),
            o.allowed
        );
    }
    let report = |what: &str, found: &[Outcome]| {
        let of = |f: &dyn Fn(&Outcome) -> f64| most(found.iter().map(f));
        println!(
            "{what}, {} runs: adaptive at most {:.3} and {:.3} of the better of naive and local-only, {:.3} and {:.3} of the limit",
            found.len(),
            of(&|o| o.by_others(0)),
            of(&|o| o.by_others(1)),
            of(&|o| o.by_limit(0)),
            of(&|o| o.by_limit(1))
        );
    };
    report("calibrations wrong by up to 20 %", &wrong()?);
    report(
        "external tier half or twice as fast from the middle of the local phase",
        &changing()?,
    );
    Ok(())
}

/// Every cell with several wrong calibrations.
fn wrong() -> Result<Vec<Outcome>, String> {
    let runs = cells().flat_map(|cell| (1..=WRONG).map(move |seed| (cell, seed)));
    runs.map(|(cell, seed)| Outcome::of(&cell, &mut errors(seed))).collect()
}

/// Every cell with an external tier that becomes slower, or faster.
fn changing() -> Result<Vec<Outcome>, String> {
    let later = |cell: Cell| {
        [0.5, 2.0].map(|f| Cell {
            later: cell.external * f,
            ..cell
        })
    };
    cells().flat_map(later).map(|cell| Outcome::of(&cell, &mut || 0.0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_adaptive_rule_reaches_its_goals() {
        for cell in cells().filter(|c| c.writers < 256) {
            let o = Outcome::of(&cell, &mut || 0.0).unwrap();
            for phase in [0, 1] {
                assert!(o.by_others(phase) <= 1.05, "phase {phase}: {cell:?}: {o:?}");
                assert!(o.by_limit(phase) <= 1.15, "phase {phase}: {cell:?}: {o:?}");
            }
            // Where the external tier is as fast as the slow one.
            assert!(cell.external != SLOW || o.gain() >= 1.3, "{cell:?}: {o:?}");
            // A limit is one for everybody.
            let beaten = o.times.iter().any(|t| t[0] < o.limits[0] || t[1] < o.limits[1]);
            assert!(!beaten, "{cell:?}: {o:?}");
        }
    }

    #[test]
    fn a_wrong_calibration_costs_little() {
        for cell in cells().filter(|c| c.writers == 64) {
            for seed in 1..=WRONG {
                let o = Outcome::of(&cell, &mut errors(seed)).unwrap();
                assert!(o.by_others(0) <= 1.1 && o.by_others(1) <= 1.1, "seed {seed}: {cell:?}: {o:?}");
                assert!(o.by_limit(0) <= 1.3, "seed {seed}: {cell:?}: {o:?}");
            }
        }
    }
}
