//! A node in virtual time: programs that write and read histories, planners that say what is copied, and links that all
//! who use them share (max-min fair).

use belay_history::life::After;
use belay_history::plan::{Config, Copy, Job, Link, Planner, Rules};
use belay_history::table::Room;
use belay_history::Version;

pub(super) const MIB: u64 = 1 << 20;
pub(super) const GIB: u64 = 1 << 30;
const EXTENT: u64 = 4 * MIB;

/// What the hardware gives, in bytes and bytes per second.
#[derive(Debug, Clone, Copy)]
pub(super) struct Machine {
    /// Of each program.
    pub(super) device: u64,
    pub(super) host: u64,
    /// Copies in device memory, of each program.
    pub(super) copy: f64,
    /// Each direction of the link of two devices.
    pub(super) link: f64,
    /// Both directions together, of all programs.
    pub(super) disk: f64,
}

/// Devices that share a link.
pub(super) const SHARED: usize = 2;

/// A policy of the comparison.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Policy {
    pub(super) name: &'static str,
    pub(super) rules: Rules,
    pub(super) contiguous: bool,
    /// It has a cache in device memory.
    pub(super) device: bool,
    /// Programs that share the disk get what they need, as the agent has it; otherwise equal shares.
    pub(super) by_need: bool,
}

impl Policy {
    /// A planner for one of `programs` on a machine.
    fn planner(&self, m: &Machine, programs: usize, error: f64) -> Planner {
        let room = |bytes| match self.contiguous {
            true => Room::Contiguous { bytes },
            false => Room::Paged { bytes, extent: EXTENT },
        };
        let share = |rate: f64, by: usize| rate / by as f64 * error;
        let (link, disk) = (share(m.link, SHARED), share(m.disk, programs));
        Planner::new(&Config {
            rules: self.rules,
            rooms: vec![room(if self.device { m.device } else { 0 }), room(m.host), Room::Endless],
            links: vec![
                Link {
                    down: link,
                    up: link,
                    duplex: true,
                },
                Link {
                    down: disk,
                    up: disk,
                    duplex: false,
                },
            ],
            copy: m.copy,
        })
    }
}

/// A step of a program, after so many seconds of its own work.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Step {
    Put(f64, Version, u64),
    Get(f64, Version, After),
    /// The program says what it will read.
    Hint(Vec<(Version, Option<u64>)>),
    /// All programs have come here: a phase ends.
    Barrier,
    /// The same, and everything is flushed.
    Flush,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Doing {
    Works(f64),
    /// Since when.
    Waits(f64),
    AtBarrier,
    Ended,
}

struct Program {
    planner: Planner,
    steps: Vec<Step>,
    next: usize,
    doing: Doing,
}

struct Flow {
    program: usize,
    job: Job,
    left: f64,
    rate: f64,
    need: f64,
    /// Numbers of the links that it uses.
    uses: [usize; 2],
    many: usize,
}

/// What a run has shown.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Run {
    /// When each phase began, and when the last program was through.
    pub(super) phases: Vec<[f64; 2]>,
    /// Seconds for which programs were blocked in puts and gets, all together.
    pub(super) put: f64,
    pub(super) get: f64,
    /// Bytes through links down and up, all together.
    pub(super) down: [u64; 2],
    pub(super) up: [u64; 2],
}

impl Run {
    /// Seconds of all phases, without waits for flushes between them.
    pub(super) fn seconds(&self) -> f64 {
        self.phases.iter().map(|p| p[1] - p[0]).sum()
    }
}

/// Several programs on a machine.
pub(super) struct Node {
    machine: Machine,
    by_need: bool,
    programs: Vec<Program>,
    flows: Vec<Flow>,
    now: f64,
    run: Run,
    flushing: bool,
}

impl Node {
    pub(super) fn new(machine: Machine, policy: &Policy, programs: Vec<Vec<Step>>, error: f64) -> Self {
        let n = programs.len();
        let program = |steps: Vec<Step>| Program {
            planner: policy.planner(&machine, n, error),
            steps,
            next: 0,
            doing: Doing::Works(0.0),
        };
        Self {
            machine,
            by_need: policy.by_need,
            programs: programs.into_iter().map(program).collect(),
            flows: Vec::new(),
            now: 0.0,
            run: Run {
                phases: vec![[0.0; 2]],
                ..Run::default()
            },
            flushing: false,
        }
    }

    /// Until all programs have ended.
    pub(super) fn run(mut self) -> Result<Run, String> {
        (0..self.programs.len()).try_for_each(|p| self.go_on(p))?;
        loop {
            self.share();
            let ends = self.flows.iter().filter(|f| f.rate > 0.0).map(|f| f.left / f.rate);
            let step = ends.fold(f64::INFINITY, f64::min);
            let works = |p: &Program| match p.doing {
                Doing::Works(until) => until - self.now,
                _ => f64::INFINITY,
            };
            let wakes = self.programs.iter().map(works).fold(f64::INFINITY, f64::min);
            let step = step.min(wakes).max(0.0);
            if step == f64::INFINITY {
                break;
            }
            self.now += step;
            self.flows.iter_mut().for_each(|f| f.left -= f.rate * step);
            self.arrive()?;
            for p in 0..self.programs.len() {
                if matches!(self.programs[p].doing, Doing::Works(until) if until <= self.now + 1e-12) {
                    self.call(p)?;
                }
            }
        }
        if self.programs.iter().any(|p| p.doing != Doing::Ended) {
            return Err(format!("nothing moves any more at {:.3} s", self.now));
        }
        for p in &self.programs {
            let stats = p.planner.stats();
            for link in 0..2 {
                self.run.down[link] += stats.down[link];
                self.run.up[link] += stats.up[link];
            }
        }
        Ok(self.run)
    }

    /// Flows that are through.
    fn arrive(&mut self) -> Result<(), String> {
        while let Some(at) = self.flows.iter().position(|f| f.left <= 1e-3) {
            let flow = self.flows.remove(at);
            let p = flow.program;
            let planner = &mut self.programs[p].planner;
            planner.done(self.now, flow.job.id).map_err(|e| e.to_string())?;
            self.poll(p)?;
            if let Doing::Waits(since) = self.programs[p].doing {
                if !self.programs[p].planner.is_blocked() {
                    self.returned(p, since)?;
                }
            }
        }
        Ok(())
    }

    fn returned(&mut self, p: usize, since: f64) -> Result<(), String> {
        let program = &mut self.programs[p];
        let blocked = self.now - since;
        match program.steps[program.next] {
            Step::Put(..) => self.run.put += blocked,
            _ => self.run.get += blocked,
        }
        program.next += 1;
        self.go_on(p)
    }

    /// The program works, up to its next call.
    fn go_on(&mut self, p: usize) -> Result<(), String> {
        loop {
            let program = &mut self.programs[p];
            match program.steps.get(program.next) {
                None => program.doing = Doing::Ended,
                Some(Step::Put(work, ..) | Step::Get(work, ..)) => program.doing = Doing::Works(self.now + work),
                Some(Step::Hint(versions)) => {
                    program.planner.hint_sized(versions.iter().copied());
                    program.next += 1;
                    self.poll(p)?;
                    continue;
                }
                Some(Step::Barrier | Step::Flush) => program.doing = Doing::AtBarrier,
            }
            break;
        }
        if let Some(last) = self.run.phases.last_mut() {
            last[1] = self.now;
        }
        self.pass_barrier()
    }

    fn pass_barrier(&mut self) -> Result<(), String> {
        if self.programs.iter().any(|p| p.doing != Doing::AtBarrier) {
            return Ok(());
        }
        let is_flush = |p: &Program| p.steps.get(p.next) == Some(&Step::Flush);
        if self.programs.iter().any(is_flush) {
            if !self.flushing {
                self.flushing = true;
                for p in 0..self.programs.len() {
                    self.programs[p].planner.flush(true);
                    self.poll(p)?;
                }
            }
            if !self.programs.iter().all(|p| p.planner.is_flushed(2)) {
                return Ok(());
            }
            self.programs.iter_mut().for_each(|p| p.planner.flush(false));
            self.flushing = false;
        }
        self.run.phases.push([self.now; 2]);
        for p in 0..self.programs.len() {
            self.programs[p].next += 1;
            self.programs[p].doing = Doing::Works(f64::INFINITY);
        }
        (0..self.programs.len()).try_for_each(|p| self.go_on(p))
    }

    fn call(&mut self, p: usize) -> Result<(), String> {
        let program = &mut self.programs[p];
        let asked = match program.steps[program.next] {
            Step::Put(_, version, size) => program.planner.put(self.now, version, size),
            Step::Get(_, version, after) => program.planner.get(self.now, version, after),
            _ => return Ok(()),
        };
        asked.map_err(|e| e.to_string())?;
        program.doing = Doing::Waits(self.now);
        self.poll(p)
    }

    /// Begins what the planner wants.
    fn poll(&mut self, p: usize) -> Result<(), String> {
        let planner = &mut self.programs[p].planner;
        let jobs = planner.poll(self.now).map_err(|e| e.to_string())?;
        let cancelled = planner.cancelled();
        self.flows.retain(|f| f.program != p || !cancelled.contains(&f.job.id));
        for job in jobs {
            let (uses, many) = self.uses(p, job.copy);
            self.flows.push(Flow {
                program: p,
                job,
                left: job.bytes as f64,
                rate: 0.0,
                need: 1.0,
                uses,
                many,
            });
        }
        if self.by_need {
            let planner = &self.programs[p].planner;
            let of_disk = |f: &&mut Flow| f.program == p && f.uses[f.many - 1] == 0;
            self.flows
                .iter_mut()
                .filter(of_disk)
                .for_each(|f| f.need = planner.need(&f.job));
        }
        if self.flushing {
            self.pass_barrier()?;
        }
        Ok(())
    }

    /// Links: the disk, then for each pair down and up, then each program's copies.
    fn uses(&self, p: usize, copy: Copy) -> ([usize; 2], usize) {
        let (down, up) = (1 + 2 * (p / SHARED), 2 + 2 * (p / SHARED));
        let own = 1 + 2 * self.programs.len().div_ceil(SHARED) + p;
        match copy {
            Copy::Put { to: 0 } | Copy::Read { from: 0 } => ([own, own], 1),
            Copy::Put { to: 1 } | Copy::Down { from: 0 } => ([down, down], 1),
            Copy::Read { from: 1 } | Copy::Up { to: 0 } => ([up, up], 1),
            Copy::Put { .. } => ([down, 0], 2),
            Copy::Read { .. } => ([up, 0], 2),
            Copy::Down { .. } | Copy::Up { .. } => ([0, 0], 1),
        }
    }

    /// Equal shares for all flows of a link, and more for those whose other link has some left. Prefetches stand still
    /// while their program reads straight through the same link.
    fn share(&mut self) {
        let n = self.programs.len();
        let pairs = n.div_ceil(SHARED);
        let mut left = vec![self.machine.link; 1 + 2 * pairs + n];
        left[0] = self.machine.disk;
        left[1 + 2 * pairs..].fill(self.machine.copy);
        let mut users = vec![0.0; left.len()];
        let mut reads = vec![0usize; n];
        for f in &self.flows {
            if let Copy::Read { from } = f.job.copy {
                reads[f.program] = from;
            }
        }
        let mut open = Vec::with_capacity(self.flows.len());
        let (mut needs, mut many) = (0.0, 0.0);
        for (i, f) in self.flows.iter_mut().enumerate() {
            let stands = matches!(f.job.copy, Copy::Up { to } if to < reads[f.program]);
            f.rate = 0.0;
            if !stands {
                open.push(i);
                f.uses[..f.many].iter().for_each(|l| users[*l] += 1.0);
                if f.uses[f.many - 1] == 0 {
                    needs += f.need;
                    many += 1.0;
                }
            }
        }
        let by_need = self.by_need;
        let weight = |f: &Flow, l: usize| if by_need && l == 0 { f.need * many / needs } else { 1.0 };
        while !open.is_empty() {
            let of = |l: usize| left[l] / users[l];
            let used = (0..left.len()).filter(|l| users[*l] > 1e-9);
            let Some(scarce) = used.min_by(|a, b| of(*a).total_cmp(&of(*b))) else {
                break;
            };
            let share = of(scarce);
            open.retain(|i| {
                let f = &mut self.flows[*i];
                let uses = &f.uses[..f.many];
                if !uses.contains(&scarce) {
                    return true;
                }
                let rate = share * weight(f, scarce);
                for l in uses {
                    left[*l] = (left[*l] - rate).max(0.0);
                    users[*l] -= weight(f, *l);
                }
                f.rate = rate;
                false
            });
        }
    }
}
