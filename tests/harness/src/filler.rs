//! A file that takes all the room there is on a disk, and gives it back when it is removed.

use crate::expect::want;
use crate::job::{output, text};
use crate::Failure;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Longer than writing takes, also where much else runs.
const LIMIT: Duration = Duration::from_secs(180);

/// Writes to `file` until nothing more can be written.
///
/// Another process does that. What this one has open, the children that other checks start at that moment have open
/// too, until they execute their programs. That takes long for a child which has to free its copy of a large memory
/// first; then the room would come back only when it is done, some time after the file was removed.
pub fn fill(file: &Path) -> Result<(), Failure> {
    let mut c = Command::new("sh");
    c.args(["-c", "exec cat /dev/zero > \"$0\""]).arg(file).env("LC_ALL", "C");
    let o = output(c, LIMIT)?;
    want(text(&o).contains("No space left"), || {
        format!("the disk is not full: {}", text(&o))
    })
}
