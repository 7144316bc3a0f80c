//! Belay's own exit statuses. `docs/exit-status.md` holds the same table; a test compares them.
//!
//! The numbers are part of the interface: they are only ever added to.

use serde::{Deserialize, Serialize};

/// Why a belay command ended without doing what it was asked to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
#[allow(missing_docs)] // the table below says what each means
pub enum Exit {
    Usage = 64,
    Damaged = 65,
    NoCheckpoint = 66,
    NoGeneration = 67,
    NotRunning = 68,
    AlreadyRunning = 69,
    Internal = 70,
    System = 71,
    HoldsCheckpoints = 72,
    CannotCreate = 73,
    Io = 74,
    Suspended = 75,
    Protocol = 76,
    NotOurs = 77,
    NoJob = 78,
    DiskFull = 79,
    Refused = 80,
    CheckpointFailed = 81,
    RestartFailed = 82,
    ImageVersion = 83,
    ImageArchitecture = 84,
    StoppedAfterCheckpoint = 85,
    ProgramEnded = 86,
    Setuid = 87,
    Incomplete = 88,
    Changed = 89,
    Forbidden = 90,
    NoTier = 91,
    NotDurable = 92,
    NotAllowed = 93,
    NoKey = 94,
    NotExecutable = 126,
    NotFound = 127,
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub struct ExitRow {
    /// The status.
    pub exit: Exit,
    /// What happened.
    pub meaning: &'static str,
    /// What to do next.
    pub next: &'static str,
}

const fn row(exit: Exit, meaning: &'static str, next: &'static str) -> ExitRow {
    ExitRow { exit, meaning, next }
}

impl Exit {
    /// The number.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The status with number `code`.
    pub fn of_code(code: u8) -> Option<Self> {
        Self::TABLE.iter().map(|row| row.exit).find(|exit| exit.code() == code)
    }

    /// Every status in numerical order.
    pub const TABLE: &'static [ExitRow] = &[
        row(
            Exit::Usage,
            "the command line or a configuration file could not be understood",
            "see `belay help COMMAND`, or docs/tiers.md for belay.toml",
        ),
        row(
            Exit::Damaged,
            "the checkpoint is damaged, and no older whole one could be used",
            "`belay verify DIR` names the file; restore it from a copy",
        ),
        row(
            Exit::NoCheckpoint,
            "the job directory holds no checkpoint",
            "start the program with `belay launch`",
        ),
        row(
            Exit::NoGeneration,
            "the generation asked for does not exist",
            "`belay list DIR` shows those that do",
        ),
        row(
            Exit::NotRunning,
            "the job in the job directory is not running",
            "`belay restart DIR` continues it",
        ),
        row(
            Exit::AlreadyRunning,
            "a job is already running in the job directory, or processes of it are left that nobody of belay attends to",
            "`belay status DIR`, `belay stop DIR`, or another directory; end the processes that are named",
        ),
        row(
            Exit::Internal,
            "a fault of belay itself",
            "report it with the file in DIR/log",
        ),
        row(
            Exit::System,
            "the system refused something belay needs",
            "the message names the call and the reason",
        ),
        row(
            Exit::HoldsCheckpoints,
            "launch and run: the job directory holds checkpoints of an earlier job, or of another command; run: it is that of another command, which has ended with exit status 0",
            "`belay restart DIR`, or `belay gc --all DIR`, or another directory",
        ),
        row(
            Exit::CannotCreate,
            "a directory or file that belay is to make cannot be made",
            "the message names it; choose another with --ckpt-dir, --local-dir or --metrics",
        ),
        row(
            Exit::Io,
            "a file could not be read or written",
            "the message names the file and the reason",
        ),
        row(
            Exit::Suspended,
            "the job is suspended (Ctrl-Z) and cannot answer",
            "continue it with `fg` or `bg`",
        ),
        row(
            Exit::Protocol,
            "the agent gave no answer in time, or one that could not be understood",
            "try again; use the same version of belay for both",
        ),
        row(
            Exit::NotOurs,
            "the job directory belongs to another user, or others may enter it or exchange it for another",
            "run as its owner, or `chmod 700 DIR`; the message names a directory above it that others may write",
        ),
        row(
            Exit::NoJob,
            "the directory is not a job directory",
            "name the one given to `belay launch`",
        ),
        row(
            Exit::DiskFull,
            "the disk became full; the checkpoint was dropped, the program goes on",
            "make room; the next checkpoint tries again",
        ),
        row(
            Exit::Refused,
            "something in the program cannot be checkpointed; the program goes on",
            "the message names the object and what to do; see docs/limits.md",
        ),
        row(
            Exit::CheckpointFailed,
            "the checkpoint failed; the program goes on, earlier checkpoints are whole",
            "the message names the step; details are in DIR/log",
        ),
        row(
            Exit::RestartFailed,
            "the program could not be restarted; the checkpoint is untouched",
            "the message names the step and the reason",
        ),
        row(
            Exit::ImageVersion,
            "the checkpoint was written by another version of the format",
            "restart it with the version that wrote it",
        ),
        row(
            Exit::ImageArchitecture,
            "the checkpoint was written on another processor architecture",
            "restart it on such a machine",
        ),
        row(
            Exit::StoppedAfterCheckpoint,
            "launch, restart and run: the program was ended by `belay checkpoint --then stop`",
            "`belay restart DIR` continues it",
        ),
        row(
            Exit::ProgramEnded,
            "the program ended before the checkpoint was complete",
            "nothing to do; earlier checkpoints are whole",
        ),
        row(
            Exit::Setuid,
            "the command is a set-user-ID program, which an ordinary user may not checkpoint",
            "run it without belay, or belay as root",
        ),
        row(
            Exit::Incomplete,
            "verify: at least one generation is damaged, on some host, or has gone from a tier, but a whole one remains",
            "`belay gc DIR` removes damaged ones older than the newest whole one",
        ),
        row(
            Exit::Changed,
            "a file that the program uses is missing or has changed since the checkpoint",
            "put the file named in the message back",
        ),
        row(
            Exit::Forbidden,
            "the system does not allow the namespaces that a restart needs",
            "the message names the setting",
        ),
        row(
            Exit::NoTier,
            "the job has no tier for what was asked",
            "name one in belay.toml; the message says of which kind. Level `redundant`: launch with --across-hosts and --redundancy",
        ),
        row(
            Exit::NotDurable,
            "the checkpoint is committed in the job directory, but could not be copied to a durable tier, or not made redundant",
            "the message names tier or host, and reason; `belay flush DIR` tries again, the next checkpoint is made redundant again",
        ),
        row(
            Exit::NotAllowed,
            "the configuration does not allow checkpoints in that directory, or so many bytes of them",
            "the message names the file, the key and what is allowed; see docs/admin.md",
        ),
        row(
            Exit::NoKey,
            "what lies on a durable tier is sealed, and the key that opens it is not at hand, or the keys cannot be read",
            "the message names the object and the key, or the file; put the key back, or name it in `[encryption]` (docs/tiers.md)",
        ),
        row(
            Exit::NotExecutable,
            "the command was found but cannot be executed",
            "check its mode and interpreter",
        ),
        row(Exit::NotFound, "the command was not found", "check its name and PATH"),
    ];

    /// The table as Markdown, as `docs/exit-status.md` holds it.
    pub fn markdown() -> String {
        let mut out = String::from("| status | name | meaning | what to do |\n|---|---|---|---|\n");
        for r in Self::TABLE {
            let name = serde_json::to_string(&r.exit).unwrap_or_default();
            out += &format!(
                "| {} | `{}` | {} | {} |\n",
                r.exit.code(),
                name.trim_matches('"'),
                r.meaning,
                r.next
            );
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_ascending_and_leave_the_low_ones_to_programs() {
        assert!(Exit::TABLE.iter().all(|r| r.exit.code() >= 64));
        assert!(Exit::TABLE.windows(2).all(|w| w[0].exit.code() < w[1].exit.code()));
    }

    #[test]
    fn the_documentation_holds_this_table() {
        let doc = include_str!("../../docs/exit-status.md");
        assert!(
            doc.contains(&Exit::markdown()),
            "docs/exit-status.md lacks this table:\n{}",
            Exit::markdown()
        );
    }
}
