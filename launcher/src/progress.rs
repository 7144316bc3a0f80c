//! Progress of a command: where standard error is a terminal, one line on it that is updated; elsewhere plain lines on
//! standard output, as part of the command's report (standard error is for failures): of a checkpoint only where it
//! takes long, a line now and then.

use crate::format;
use belay_coordinator::plain;
use belay_wire::{Event, Phase, Progress};
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Shows the phases of a checkpoint.
#[derive(Debug)]
pub(crate) struct Show {
    terminal: bool,
    quiet: bool,
    shown: bool,
    /// When the last line was due.
    last: Instant,
}

/// Without a terminal a checkpoint is told of after so long, and again each time so much has passed.
const SELDOM: Duration = Duration::from_secs(10);

impl Show {
    /// Progress for this process's standard error.
    pub(crate) fn new(quiet: bool) -> Self {
        Self {
            terminal: std::io::stderr().is_terminal(),
            quiet,
            shown: false,
            last: Instant::now(),
        }
    }

    /// Shows an event that is not the result.
    pub(crate) fn event(&mut self, event: &Event) {
        let line = match event {
            Event::Phase { phase } => phase_line(*phase),
            Event::Progress(p) => progress_line(p),
            _ => return,
        };
        if !self.terminal && self.last.elapsed() < SELDOM {
            return;
        }
        self.last = Instant::now();
        self.line(&line);
    }

    /// Shows `text` as the current state.
    pub(crate) fn line(&mut self, text: &str) {
        if self.quiet {
            return;
        }
        let text = plain(text);
        let mut err = std::io::stderr().lock();
        // Nobody to read progress is no failure.
        if self.terminal {
            self.shown = true;
            drop(write!(err, "\r\x1b[K{text}").and_then(|()| err.flush()));
        } else {
            drop(writeln!(std::io::stdout(), "{text}"));
        }
    }

    /// Takes the updated line away, before the result is printed.
    pub(crate) fn clear(&mut self) {
        if std::mem::take(&mut self.shown) {
            let mut err = std::io::stderr().lock();
            drop(write!(err, "\r\x1b[K").and_then(|()| err.flush()));
        }
    }
}

fn phase_line(phase: Phase) -> String {
    format!("belay: {}", phase.name())
}

fn progress_line(p: &Progress) -> String {
    let percent = (p.bytes.min(p.bytes_expected) * 100)
        .checked_div(p.bytes_expected)
        .unwrap_or(0);
    format!(
        "belay: {} {percent} % ({} of {}, {}/s, {})",
        p.phase.name(),
        format::bytes(p.bytes),
        format::bytes(p.bytes_expected),
        format::bytes(p.bytes_per_s as u64),
        format::count(p.processes, "process", "es")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_name_phase_bytes_and_rate() {
        let p = Progress {
            phase: Phase::Write,
            processes: 4,
            bytes: 512 << 20,
            bytes_expected: 1 << 30,
            bytes_per_s: 1.5e9,
        };
        assert_eq!(
            progress_line(&p),
            "belay: write 50 % (512.0 MiB of 1.0 GiB, 1.4 GiB/s, 4 processes)"
        );
        let none = Progress { bytes_expected: 0, ..p };
        assert!(progress_line(&none).contains(" 0 %"));
        assert_eq!(phase_line(Phase::Suspend), "belay: suspend");
    }
}
