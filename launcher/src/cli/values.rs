//! Words that options of a launch take.

use clap::ValueEnum;

/// How a checkpoint finds out what the ones before have stored already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Differential {
    /// By the contents of its pages
    Hash,
    /// Also by the kernel's record of written pages, where it has one: a program could notice (see docs/limits.md)
    Written,
    /// Not at all: every checkpoint stores everything
    Off,
}

/// What becomes of data of which programs have declared what they do to it (`belay_access.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Access {
    /// What the program overwrites after the checkpoint before it reads it is not stored
    Deferred,
    /// Leaves out less: only what is overwritten by the loop before which the program is stopped
    Certain,
    /// All of it is stored, and belay status says what could be left out
    Report,
    /// All of it is stored
    Off,
}
