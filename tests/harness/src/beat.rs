//! Heartbeats: a program writes the number of its round into a file.

use crate::Failure;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Length of what the test programs in C write, in bytes: the length of their file never changes.
const LENGTH: usize = 20;
/// Time between two looks.
const LOOK: Duration = Duration::from_millis(3);

/// The heartbeats of one program.
#[derive(Debug)]
pub struct Beats {
    file: PathBuf,
    last: u64,
    new: u32,
}

/// The number in `file`; 0 where there is none. A restart gives the file the length that it had at the checkpoint,
/// which is no heartbeat.
fn number(file: &Path) -> u64 {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

impl Beats {
    /// Those in `file` after this call.
    pub fn from_now(file: PathBuf) -> Self {
        let last = number(&file);
        Self { file, last, new: 0 }
    }

    /// How many different ones have been seen.
    fn count(&mut self) -> u32 {
        let now = number(&self.file);
        if now != self.last && now != 0 {
            self.new += 1;
            self.last = now;
        }
        self.new
    }

    /// Waits for two: the round in which the second was made has begun after the call of [`Beats::from_now`]. `look` is
    /// called between two looks, and its failure ends the waiting.
    pub fn wait(mut self, mut look: impl FnMut() -> Result<(), Failure>) -> Result<(), Failure> {
        while self.count() < 2 {
            look()?;
            std::thread::sleep(LOOK);
        }
        Ok(())
    }
}

/// Forgets those in `file`, which keeps its length and inode.
pub fn forget(file: &Path) -> Result<(), Failure> {
    let Ok(f) = std::fs::OpenOptions::new().write(true).open(file) else {
        return Ok(());
    };
    f.write_all_at(&[b'0'; LENGTH - 1], 0)
        .map_err(|e| format!("clear heartbeat: {e}"))
}
