//! What the simulated programs write and read: sizes, orders, and schedules.

use super::node::{Step, GIB, MIB};
use belay_history::life::After;
use belay_history::Version;

/// Versions of a program.
pub(super) const VERSIONS: usize = 384;

/// Numbers that look random, the same each time.
#[derive(Debug, Clone)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        let mut r = Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        (0..8).for_each(|_| {
            r.next();
        });
        r
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Between 0 and 1.
    pub(super) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.unit() * n as f64) as usize
    }

    /// Normally distributed.
    fn normal(&mut self) -> f64 {
        let (a, b) = (1.0 - self.unit(), self.unit());
        (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()
    }

    pub(super) fn shuffle<T>(&mut self, list: &mut [T]) {
        for i in (1..list.len()).rev() {
            list.swap(i, self.below(i + 1));
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Sizes {
    Uniform,
    Variable,
}

impl Sizes {
    pub(super) const ALL: [Sizes; 2] = [Sizes::Uniform, Sizes::Variable];

    pub(super) fn name(self) -> &'static str {
        match self {
            Sizes::Uniform => "uniform",
            Sizes::Variable => "variable",
        }
    }

    /// Sizes of a program's versions. Variable ones are log-normal, begin small, and are 38 to 50 GB together.
    pub(super) fn of(self, random: &mut Random) -> Vec<u64> {
        if self == Sizes::Uniform {
            return vec![128 * MIB; VERSIONS];
        }
        let ramp = |i: usize| (0.1 + 0.9 * (4.0 * i as f64 / VERSIONS as f64)).min(1.0);
        let raw: Vec<f64> = (0..VERSIONS).map(|i| ramp(i) * (0.4 * random.normal()).exp()).collect();
        let all = 38e9 + 12e9 * random.unit();
        let scale = all / raw.iter().sum::<f64>();
        raw.into_iter().map(|s| ((s * scale) as u64).clamp(MIB, GIB)).collect()
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Reads {
    Same,
    Reverse,
    Irregular,
}

impl Reads {
    pub(super) const ALL: [Reads; 3] = [Reads::Same, Reads::Reverse, Reads::Irregular];

    pub(super) fn name(self) -> &'static str {
        match self {
            Reads::Same => "same order",
            Reads::Reverse => "reverse",
            Reads::Irregular => "irregular",
        }
    }

    pub(super) fn of(self, random: &mut Random) -> Vec<u64> {
        let mut order: Vec<u64> = (0..VERSIONS as u64).collect();
        match self {
            Reads::Same => {}
            Reads::Reverse => order.reverse(),
            Reads::Irregular => random.shuffle(&mut order),
        }
        order
    }
}

/// What a program tells of its reads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Hints {
    None,
    One,
    All,
    /// All, and how large they will be.
    Sized,
}

impl Hints {
    pub(super) const ALL: [Hints; 4] = [Hints::None, Hints::One, Hints::All, Hints::Sized];

    pub(super) fn name(self) -> &'static str {
        match self {
            Hints::None => "none",
            Hints::One => "one",
            Hints::All => "all",
            Hints::Sized => "sized",
        }
    }
}

/// A program that writes all versions and then reads each once; `told` is the order that it tells.
pub(super) fn passes(sizes: &[u64], order: &[u64], told: &[u64], hints: Hints, wait: bool, interval: f64) -> Vec<Step> {
    let version = |v: &u64| (Version(*v), None);
    let mut steps = Vec::new();
    match hints {
        Hints::All => steps.push(Step::Hint(told.iter().map(version).collect())),
        Hints::Sized => {
            let sized = told.iter().map(|v| (Version(*v), Some(sizes[*v as usize])));
            steps.push(Step::Hint(sized.collect()));
        }
        Hints::None | Hints::One => {}
    }
    let puts = sizes
        .iter()
        .enumerate()
        .map(|(v, s)| Step::Put(interval, Version(v as u64), *s));
    steps.extend(puts);
    steps.push(if wait { Step::Flush } else { Step::Barrier });
    if hints == Hints::One {
        steps.push(Step::Hint(told.iter().take(1).map(version).collect()));
    }
    for (i, v) in order.iter().enumerate() {
        if hints == Hints::One {
            steps.extend(told.get(i + 1).map(|next| Step::Hint(vec![(Version(*next), None)])));
        }
        steps.push(Step::Get(interval, Version(*v), After::Discard));
    }
    steps
}

/// What a program tells of `order`, so many of a hundred hints being wrong: half of these missing, half exchanged with others.
pub(super) fn mistold(order: &[u64], percent: usize, random: &mut Random) -> Vec<u64> {
    let mut told = order.to_vec();
    for at in 0..told.len() {
        if random.below(200) < percent {
            let other = random.below(told.len());
            told.swap(at, other);
        }
    }
    told.retain(|_| random.below(200) >= percent);
    told
}
