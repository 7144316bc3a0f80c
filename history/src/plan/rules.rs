//! How a planner is set up, and the copies that it orders.

use crate::choose::Choice;
use crate::table::Room;
use crate::Version;

/// When versions are flushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Flush {
    /// As many bytes as will not fit, the farthest read first; early only where the link would be too slow later.
    Quota,
    /// All, the oldest first.
    All,
    /// When room is needed.
    Late,
}

/// How a history is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rules {
    /// Who makes room.
    pub choice: Choice,
    /// Who is flushed.
    pub flush: Flush,
    /// A version that has been copied up leaves its room below to others.
    pub exclusive: bool,
    /// A put may go past a full tier, and a read comes straight from where the version is.
    pub past: bool,
    /// Versions are fetched ahead in the order of hints.
    pub prefetch: bool,
    /// Pages migrate: what came up is not below any more, and what has been read is moved down like the rest.
    pub migrate: bool,
}

impl Rules {
    /// Ours.
    pub const OURS: Rules = Rules {
        choice: Choice::Stall,
        flush: Flush::Quota,
        exclusive: true,
        past: true,
        prefetch: true,
        migrate: false,
    };
    /// The HPDC 2023 paper.
    pub const SCORE: Rules = Rules {
        choice: Choice::Score,
        flush: Flush::All,
        exclusive: false,
        past: false,
        prefetch: true,
        migrate: false,
    };
    /// The paper's with least recently used.
    pub const LRU: Rules = Rules {
        choice: Choice::Lru,
        ..Rules::SCORE
    };
    /// The paper's with farthest next read.
    pub const BELADY: Rules = Rules {
        choice: Choice::Belady,
        ..Rules::SCORE
    };
}

/// A link between a tier and the one below.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Bytes per second down, as far as is known at the beginning,
    pub down: f64,
    /// and up.
    pub up: f64,
    /// Both directions at once do not disturb each other.
    pub duplex: bool,
}

/// What a planner begins with.
#[derive(Debug, Clone)]
pub struct Config {
    /// How.
    pub rules: Rules,
    /// Tiers, the fastest first; the last one endless.
    pub rooms: Vec<Room>,
    /// Links below each but the last.
    pub links: Vec<Link>,
    /// Bytes per second between the application and the fastest tier.
    pub copy: f64,
}

/// A copy of a version, whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Copy {
    /// From the application to a tier.
    Put {
        /// Which.
        to: usize,
    },
    /// From a tier to the application.
    Read {
        /// Which.
        from: usize,
    },
    /// To the tier below.
    Down {
        /// From this one.
        from: usize,
    },
    /// From the tier below.
    Up {
        /// To this one.
        to: usize,
    },
}

/// A copy that is to begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Job {
    /// Its number, for [`Planner::done`].
    pub id: u64,
    /// What is copied.
    pub version: Version,
    /// How much that is.
    pub bytes: u64,
    /// From where to where.
    pub copy: Copy,
}
