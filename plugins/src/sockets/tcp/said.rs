//! What a process of its own says that has taken data out of connections and put it back: it does so because what the
//! agent held would be lost when it is killed.

use crate::fault::{not_now, refuse, At, Fault};
use belay_kernel::apart;

/// What it says: byte strings, or why there are none.
#[derive(Debug, PartialEq, Eq)]
enum Said {
    Data(Vec<Vec<u8>>),
    Refused(String),
    Passing(String),
}

/// Does `work` in such a process; `step` says what that is, and is told whether the agent is still there.
pub(super) fn apart(
    step: &str,
    work: impl FnOnce(&dyn Fn() -> bool) -> Result<Vec<Vec<u8>>, Fault>,
) -> Result<Vec<Vec<u8>>, Fault> {
    let agent = std::process::id();
    let is_there = || std::os::unix::process::parent_id() == agent;
    let said = apart::fork(|| Said::of(work(&is_there)).encode()).at(step)?;
    match Said::decode(&said) {
        Some(Said::Data(data)) => Ok(data),
        Some(Said::Refused(reason)) => refuse(reason),
        Some(Said::Passing(reason)) => not_now(reason),
        None => refuse(format!("{step}: not understood")),
    }
}

impl Said {
    fn of(done: Result<Vec<Vec<u8>>, Fault>) -> Self {
        match done {
            Ok(data) => Self::Data(data),
            Err(Fault::Passing(reason)) => Self::Passing(reason),
            Err(fault) => Self::Refused(fault.to_string()),
        }
    }

    /// A letter, then byte strings, each after its length.
    fn encode(&self) -> Vec<u8> {
        let strings = |kind: u8, all: &[&[u8]]| {
            let mut out = vec![kind];
            for one in all {
                out.extend_from_slice(&(one.len() as u64).to_le_bytes());
                out.extend_from_slice(one);
            }
            out
        };
        match self {
            Self::Data(all) => strings(b'd', &all.iter().map(Vec::as_slice).collect::<Vec<_>>()),
            Self::Refused(reason) => strings(b'r', &[reason.as_bytes()]),
            Self::Passing(reason) => strings(b'p', &[reason.as_bytes()]),
        }
    }

    fn decode(said: &[u8]) -> Option<Self> {
        let (kind, mut rest) = said.split_first()?;
        let mut all = Vec::new();
        while let Some((length, behind)) = rest.split_first_chunk() {
            let (one, next) = behind.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
            all.push(one.to_vec());
            rest = next;
        }
        let reason = || Some(String::from_utf8_lossy(all.first()?).into_owned());
        match kind {
            b'd' => Some(Self::Data(all)),
            b'r' => reason().map(Self::Refused),
            b'p' => reason().map(Self::Passing),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_understood() {
        for said in [
            Said::Data(vec![b"some".to_vec(), Vec::new(), b"more".to_vec()]),
            Said::Data(Vec::new()),
            Said::Refused("no".into()),
            Said::Passing("not now".into()),
        ] {
            assert_eq!(Said::decode(&said.encode()), Some(said));
        }
        assert_eq!(Said::decode(b""), None);
        assert_eq!(Said::decode(b"d\x09\0\0\0\0\0\0\0short"), None);
    }
}
