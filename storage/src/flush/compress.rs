//! Whether pieces are compressed, and how hard: by what it brings. Pure but for the clock.
//!
//! A piece costs the time to compress it and the time to move what is left. Both are measured, one level after the
//! other, on the data of this flush; the cheapest wins and the others are measured again from time to time, because
//! data and devices change.

use serde::{Deserialize, Serialize};

/// Levels that are tried; 0 is none.
const LEVELS: [i32; 3] = [0, 1, 3];
/// Pieces after which another level is measured again.
const PERIOD: u32 = 32;
/// Pieces whose moving is measured together: a tier gathers several into one write, so one alone takes no time, or that of all.
const TOGETHER: u32 = 16;
/// Weight of the newest measurement.
const NEW: f64 = 0.3;

/// How pieces are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compression {
    /// Not at all.
    #[default]
    Off,
    /// At this level of zstd.
    Level(i32),
    /// At the level that is measured to be fastest.
    Auto,
}

/// What is known about the levels.
#[derive(Debug, Clone)]
pub struct Chooser {
    how: Compression,
    /// Seconds per byte to compress, and the share of bytes that is left.
    known: [Option<(f64, f64)>; LEVELS.len()],
    /// Seconds per byte to move.
    moving: Option<f64>,
    /// Pieces since that was measured, their bytes, and seconds to move them.
    moved: (u32, f64, f64),
    pieces: u32,
}

fn blend(old: f64, new: f64) -> f64 {
    old + (new - old) * NEW
}

impl Chooser {
    /// Knows nothing yet.
    pub fn new(how: Compression) -> Self {
        Self {
            how,
            known: [Some((0.0, 1.0)), None, None],
            moving: None,
            moved: (0, 0.0, 0.0),
            pieces: 0,
        }
    }

    /// Level for the next piece; 0 is none.
    pub fn level(&mut self) -> i32 {
        match self.how {
            Compression::Off => 0,
            Compression::Level(level) => level,
            Compression::Auto => {
                self.pieces += 1;
                let unknown = self.known.iter().position(Option::is_none);
                let again = self
                    .pieces
                    .is_multiple_of(PERIOD)
                    .then_some((self.pieces / PERIOD) as usize % LEVELS.len());
                LEVELS[unknown.or(again).unwrap_or_else(|| self.best())]
            }
        }
    }

    fn best(&self) -> usize {
        let moving = self.moving.unwrap_or(0.0);
        let cost = |i: &usize| self.known[*i].map_or(f64::INFINITY, |(compress, left)| compress + moving * left);
        (0..LEVELS.len()).min_by(|a, b| cost(a).total_cmp(&cost(b))).unwrap_or(0)
    }

    /// Takes note of a piece of `bytes`, compressed at `level` to `stored` in `compress_s`, and moved in `move_s` seconds.
    pub fn observe(&mut self, level: i32, (bytes, stored): (usize, usize), compress_s: f64, move_s: f64) {
        let (bytes, stored) = (bytes.max(1) as f64, stored.max(1) as f64);
        let (pieces, moved, took) = self.moved;
        self.moved = (pieces + 1, moved + stored, took + move_s);
        if self.moved.0 == TOGETHER {
            let (_, moved, took) = std::mem::take(&mut self.moved);
            let moving = took / moved;
            self.moving = Some(self.moving.map_or(moving, |old| blend(old, moving)));
        }
        if let Some(i) = LEVELS.iter().position(|l| *l == level).filter(|i| *i > 0) {
            let new = (compress_s / bytes, stored / bytes);
            self.known[i] = Some(self.known[i].map_or(new, |old| (blend(old.0, new.0), blend(old.1, new.1))));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of 1000 pieces are compressed when compressing takes `compress` seconds a byte at level 1, thrice that
    /// at level 3, and moving `moving`.
    fn compressed(left: f64, compress: f64, moving: f64) -> u32 {
        let mut c = Chooser::new(Compression::Auto);
        (0..1000)
            .map(|_| {
                let level = c.level();
                let stored = if level == 0 { 1000 } else { (1000.0 * left) as usize };
                c.observe(
                    level,
                    (1000, stored),
                    1000.0 * compress * f64::from(level),
                    moving * stored as f64,
                );
                u32::from(level != 0)
            })
            .sum()
    }

    #[test]
    fn it_compresses_where_that_saves_time() {
        assert!(compressed(0.2, 1.0, 10.0) > 950);
        assert!(compressed(0.99, 1.0, 10.0) < 50);
        assert!(compressed(0.2, 10.0, 1.0) < 50);
    }

    #[test]
    fn pieces_that_are_written_together_are_measured_together() {
        let mut c = Chooser::new(Compression::Auto);
        // To compress takes two thirds of what it saves, to move four pieces all at once, and the first three nothing.
        let levels: Vec<i32> = (0..1000)
            .map(|n| {
                let level = c.level();
                let stored = if level == 0 { 1000 } else { 400 };
                let moving = if n % 4 == 3 { 4.0 * stored as f64 } else { 0.0 };
                c.observe(level, (1000, stored), 400.0 * f64::from(level), moving);
                level
            })
            .collect();
        assert!(levels[500..].iter().filter(|l| **l == 1).count() > 470);
    }

    #[test]
    fn a_fixed_level_stays() {
        let mut c = Chooser::new(Compression::Level(7));
        c.observe(7, (10, 10), 100.0, 0.0);
        assert_eq!((c.level(), Chooser::new(Compression::Off).level()), (7, 0));
    }
}
