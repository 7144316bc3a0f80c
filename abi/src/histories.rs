//! How checkpoints and histories (`libbelay.so`) know of each other: by notes in the directory of a history.
//!
//! ```text
//! DIR/NAME/lock                              open in the process that has the history
//! DIR/NAME/belay.generations/NOTE -> JOB/gen/000007
//! ```
//! The agent leaves a note before a process that it has captured goes on; the name of a note is never used twice. A note
//! holds while the generation is there, or `JOB/gen/.tmp-000007`, which it is called before. Notes that do not hold are
//! removed by the library.

/// Name of the file that is open while a history is.
pub const LOCK: &str = "lock";
/// Name of the directory of the notes.
pub const NOTES: &str = "belay.generations";
/// What the name of a generation begins with before its commit, and while it is being removed.
pub const TEMPORARY: &str = ".tmp-";
