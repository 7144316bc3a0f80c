//! Limits of an IPC namespace: a new one has the kernel's defaults.

use crate::fault::{At, Fault};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What they are called below `/proc/sys/kernel`.
const NAMES: [&str; 7] = ["msgmax", "msgmnb", "msgmni", "sem", "shmall", "shmmax", "shmmni"];

/// The numbers of each.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Limits(BTreeMap<String, Vec<u64>>);

fn path(name: &str) -> PathBuf {
    Path::new("/proc/sys/kernel").join(name)
}

/// None where the kernel has no such limit.
fn read(name: &str) -> Option<Vec<u64>> {
    let text = std::fs::read_to_string(path(name)).ok()?;
    text.split_whitespace().map(|number| number.parse().ok()).collect()
}

impl Limits {
    /// Those of the present namespace.
    pub(super) fn here() -> Self {
        let all = NAMES.iter().filter_map(|name| Some(((*name).to_owned(), read(name)?)));
        Self(all.collect())
    }

    /// Makes them those of the present namespace, as far as they may be set here: what then has no room says so.
    pub(super) fn set(&self) {
        for name in NAMES {
            let Some(wanted) = self.0.get(name).filter(|wanted| read(name).as_ref() != Some(*wanted)) else {
                continue;
            };
            let words: Vec<String> = wanted.iter().map(u64::to_string).collect();
            if let Err(error) = std::fs::write(path(name), words.join(" ")) {
                tracing::warn!(%error, name, ?wanted, "a limit of System V objects stays as it is here");
            }
        }
    }
}

/// The most that a message may hold here, and a queue that is new.
pub(super) fn of_messages() -> Result<(u64, u64), Fault> {
    let one = |name: &str| -> Result<u64, Fault> {
        let numbers = read(name).ok_or(std::io::ErrorKind::InvalidData);
        let numbers = numbers.map_err(std::io::Error::from).at(format!("read kernel.{name}"))?;
        Ok(numbers.first().copied().unwrap_or_default())
    };
    Ok((one("msgmax")?, one("msgmnb")?))
}
