//! A failure as the user meets it: an exit status and one line that names object, reason and next step.

use belay_capture::CaptureError;
use belay_image::ImageError;
use belay_restart::RestartError;
use belay_storage::StorageError;
use belay_wire::{Event, Exit};
use std::io;

/// A failure of a belay command.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}{}", self.next())]
pub struct Failure {
    /// Kind of failure, which is also the exit status.
    pub exit: Exit,
    /// One line. What the user reads is the value as text, which adds what to do.
    pub(crate) message: String,
    /// Whether the reason passes by itself when the program runs on for a moment.
    pub passing: bool,
    /// A library is there that was not asked to come to rest: the next attempt asks.
    pub(crate) not_asked: bool,
    /// Nothing is damaged, but what a tier has would overwrite something here.
    pub(crate) in_the_way: bool,
}

/// What to do where the reason passes by itself.
const AGAIN: &str = "; try again in a moment";

/// What to do where a disk is full.
const ROOM: &str = "make room";

/// Longest message, characters: names and values that it quotes may be of any length.
const LONGEST: usize = 2000;

impl Failure {
    /// A failure of kind `exit`.
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        let mut message = plain(&message.into()).replace('\n', " ");
        if let Some((end, _)) = message.char_indices().nth(LONGEST) {
            message.replace_range(end.., "...");
        }
        Self {
            exit,
            message,
            passing: false,
            not_asked: false,
            in_the_way: false,
        }
    }

    /// A failure of kind `exit`, for a reason that passes by itself.
    pub fn passing(exit: Exit, message: impl Into<String>) -> Self {
        Self {
            passing: true,
            ..Self::new(exit, message)
        }
    }

    /// The next step, where the kind of failure says it.
    fn next(&self) -> String {
        match self.exit {
            _ if self.passing => AGAIN.to_owned(),
            Exit::DiskFull if !self.message.contains(ROOM) => format!("; {ROOM} and try again"),
            _ => String::new(),
        }
    }

    /// As the agent answers it.
    pub(crate) fn event(&self) -> Event {
        Event::Failed {
            exit: self.exit,
            message: self.message.clone(),
            passing: self.passing,
        }
    }

    /// A failed operation on a file.
    pub fn io(step: impl std::fmt::Display, error: &io::Error) -> Self {
        Self::new(exit_of_io(error, Exit::Io), format!("{step}: {}", reason(error)))
    }

    /// A failed step of a checkpoint.
    fn of_capture(step: &str, error: &io::Error) -> Self {
        let exit = exit_of_io(error, Exit::CheckpointFailed);
        let next = match exit {
            Exit::DiskFull => format!("; {ROOM}, the next checkpoint tries again"),
            _ => String::new(),
        };
        Self::new(exit, format!("{step}: {}{next}", without_number(&error.to_string())))
    }

    /// A failed system call that has nothing to do with files.
    pub fn system(step: impl std::fmt::Display, error: &io::Error) -> Self {
        Self::new(Exit::System, format!("{step}: {}", reason(error)))
    }
}

/// `text` without what commands a terminal or turns the direction of writing, other than the ends of its lines: names
/// of files, programs and tiers that it quotes may hold any character, may be another user's, and go to somebody's
/// terminal.
pub fn plain(text: &str) -> String {
    let turns = |c: char| matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let shown = |c: char| match c {
        '\n' => c,
        c if c.is_control() || turns(c) => char::REPLACEMENT_CHARACTER,
        c => c,
    };
    text.chars().map(shown).collect()
}

/// The system's reason without the number that `io::Error` appends.
pub(crate) fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    let reason = without_number(&text);
    if reason.len() < text.len() {
        reason.to_lowercase()
    } else {
        text
    }
}

/// `1 process`, `2 processes`: `plural` is what is added for another number than one.
pub fn counted(n: u32, noun: &str, plural: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { plural })
}

fn without_number(text: &str) -> &str {
    text.find(" (os error").map_or(text, |at| &text[..at])
}

fn exit_of_io(error: &io::Error, otherwise: Exit) -> Exit {
    match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => Exit::DiskFull,
        _ => otherwise,
    }
}

/// Whether a file may be as it was, and could not be looked at this time: nothing says that it is damaged.
fn is_out_of_reach(error: &io::Error) -> bool {
    const OF_THE_CALLER: [i32; 8] = [
        libc::EACCES,
        libc::EPERM,
        libc::EMFILE,
        libc::ENFILE,
        libc::ENOMEM,
        libc::ESTALE,
        libc::ETIMEDOUT,
        libc::ENOTCONN,
    ];
    error.raw_os_error().is_some_and(|number| OF_THE_CALLER.contains(&number))
}

pub(crate) fn exit_of_image(error: &ImageError, io: Exit) -> Exit {
    match error {
        ImageError::Io { source, .. } if io == Exit::Damaged && is_out_of_reach(source) => Exit::Io,
        ImageError::Io { source, .. } if !error.is_damage() => exit_of_io(source, io),
        ImageError::Io { .. } | ImageError::Damaged { .. } | ImageError::Elsewhere { .. } => Exit::Damaged,
        ImageError::Version { .. } => Exit::ImageVersion,
        ImageError::Architecture { .. } => Exit::ImageArchitecture,
    }
}

fn exit_of_storage(error: &StorageError, io: Exit) -> Exit {
    match error {
        StorageError::Image(e) => exit_of_image(e, io),
        StorageError::Quota { .. } | StorageError::Memory { .. } => Exit::DiskFull,
        StorageError::System { source, .. } => exit_of_io(source, Exit::System),
        StorageError::Tier { source, .. } => exit_of_io(source, io),
        StorageError::TierDamaged { .. } => Exit::Damaged,
        StorageError::Locked { .. } => Exit::NoKey,
        StorageError::TierFull { .. } => Exit::DiskFull,
        StorageError::InUse { .. } => Exit::Damaged,
        StorageError::Cancelled => Exit::ProgramEnded,
    }
}

impl From<StorageError> for Failure {
    fn from(e: StorageError) -> Self {
        Self {
            in_the_way: matches!(e, StorageError::InUse { .. }),
            ..Self::new(exit_of_storage(&e, Exit::Io), e.to_string())
        }
    }
}

impl From<ImageError> for Failure {
    fn from(e: ImageError) -> Self {
        Self::new(exit_of_image(&e, Exit::Io), e.to_string())
    }
}

impl From<CaptureError> for Failure {
    fn from(e: CaptureError) -> Self {
        let exit = match &e {
            CaptureError::System { step, source } => return Self::of_capture(step, source),
            CaptureError::Refused(reasons) if reasons.iter().all(|r| r.passing) => {
                return Self::passing(Exit::Refused, e.to_string())
            }
            CaptureError::NotAsked(_) => {
                let not_asked = true;
                return Self {
                    not_asked,
                    ..Self::passing(Exit::Refused, e.to_string())
                };
            }
            CaptureError::Refused(_) | CaptureError::NoMemory(_) => Exit::Refused,
            CaptureError::Ended => Exit::ProgramEnded,
            CaptureError::Failed { .. } => Exit::CheckpointFailed,
            CaptureError::Call { .. } => return Self::new(Exit::CheckpointFailed, without_number(&e.to_string())),
            CaptureError::Image(e) => exit_of_image(e, Exit::CheckpointFailed),
            CaptureError::Storage(e) => exit_of_storage(e, Exit::CheckpointFailed),
        };
        Self::new(exit, e.to_string())
    }
}

impl From<RestartError> for Failure {
    fn from(e: RestartError) -> Self {
        let exit = match &e {
            RestartError::Failed { .. } | RestartError::Reported { .. } => Exit::RestartFailed,
            RestartError::Changed { .. } => Exit::Changed,
            RestartError::Forbidden { .. } => Exit::Forbidden,
            RestartError::Lives { .. } => Exit::AlreadyRunning,
            RestartError::Image(e) => exit_of_image(e, Exit::RestartFailed),
            RestartError::DamagedElsewhere { .. } => Exit::Damaged,
        };
        Self::new(exit, e.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_known_however_it_is_reported() {
        let full = || io::Error::from_raw_os_error(libc::ENOSPC);
        let path = std::path::Path::new("/x");
        assert_eq!(
            Failure::from(CaptureError::Image(ImageError::io("write", path, full()))).exit,
            Exit::DiskFull
        );
        let bad_sector = || io::Error::from_raw_os_error(libc::EIO);
        assert_eq!(Failure::from(ImageError::io("read", path, bad_sector())).exit, Exit::Damaged);
        assert_eq!(Failure::from(ImageError::io("write", path, bad_sector())).exit, Exit::Io);
        let failed = CaptureError::System {
            step: "create control memory".into(),
            source: full(),
        };
        let failed = Failure::from(failed);
        assert_eq!(failed.exit, Exit::DiskFull);
        assert!(
            failed
                .message
                .ends_with("No space left on device; make room, the next checkpoint tries again"),
            "{failed}"
        );
        assert_eq!(failed.to_string(), failed.message);
        let written = Failure::io("write x", &full()).to_string();
        assert_eq!(written, "write x: no space left on device; make room and try again");
        assert_eq!(Failure::io("write x", &full()).message, "write x: no space left on device");
        let other = CaptureError::Failed {
            step: "suspend".into(),
            reason: "task 7 vanished".into(),
        };
        assert_eq!(Failure::from(other).exit, Exit::CheckpointFailed);
    }

    #[test]
    fn nothing_commands_the_terminal() {
        assert_eq!(plain("a\x1b[2Jb\tc\r\nd\u{9b}"), "a\u{fffd}[2Jb\u{fffd}c\u{fffd}\nd\u{fffd}");
        assert_eq!(plain("\u{202e}txt.exe \u{2067}\u{61c}"), "\u{fffd}txt.exe \u{fffd}\u{fffd}");
    }

    #[test]
    fn messages_are_one_line() {
        assert_eq!(Failure::new(Exit::Io, "ü".repeat(9999)).message, "ü".repeat(LONGEST) + "...");
        assert_eq!(Failure::new(Exit::Io, "a\nb").message, "a b");
        assert_eq!(
            Failure::new(Exit::Io, "\x1b]0;x\x07\u{9b}2J").message,
            "\u{fffd}]0;x\u{fffd}\u{fffd}2J"
        );
    }
}
