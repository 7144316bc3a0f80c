//! The launcher's standard input, output and error, in whose place a restart has its own.

use crate::builder::{Builder, Built};
use crate::fault::{At, Fault};
use crate::keep::Lent;
use crate::kind::{nothing, Candidate, Kind, Look, NoPart};
use crate::model::{DescId, Description, Descriptors};
use crate::session::{place, Session};
use crate::sys::fd;
use belay_kernel::kcmp;
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// The kind.
pub(crate) struct Launcher;

/// All numbers that the launcher has it at.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Numbers(pub(crate) Vec<RawFd>);

/// For each description that the agent has as descriptor 0, 1 or 2: those numbers.
#[derive(Debug, Default)]
pub(crate) struct Streams(HashMap<DescId, Vec<RawFd>>);

impl Streams {
    /// Whether description `id` is one of them.
    pub(crate) fn has(&self, id: DescId) -> bool {
        self.0.contains_key(&id)
    }
}

impl Kind for Launcher {
    const NAME: &'static str = "LauncherStdio";
    const VERSION: u32 = 1;
    type State = Numbers;
    type Part = NoPart;

    fn survey(s: &mut Session<'_>) {
        let me = std::process::id().cast_signed();
        let mut out = Streams::default();
        for number in 0..3 {
            let Ok(stat) = fd::fstat(number) else { continue };
            let same = |id: &DescId| {
                let found = &s.found[*id];
                let (task, held) = place(found, &s.doors);
                let alike = (found.stat.st_dev, found.stat.st_ino) == (stat.st_dev, stat.st_ino);
                alike && kcmp::compare_files(task, held, me, number).is_ok_and(Ordering::is_eq)
            };
            if let Some(id) = (0..s.found.len()).find(same) {
                out.0.entry(id).or_default().push(number);
            }
        }
        s.sets.put(out);
    }

    fn recognise(look: &Look<'_>) -> bool {
        matches!(look, Look::Launcher)
    }

    fn capture(s: &mut Session<'_>, seen: &Candidate<'_>) -> Result<Numbers, Fault> {
        Ok(Numbers(s.sets.of::<Streams>().0.remove(&seen.id).unwrap_or_default()))
    }

    fn check(Numbers(numbers): &Numbers, _: &Descriptors) -> Result<(), String> {
        if !numbers.is_empty() && numbers.iter().all(|n| (0..3).contains(n)) {
            Ok(())
        } else {
            Err("is none of the three of a launcher".into())
        }
    }

    fn rebuild(b: &mut Builder<'_>, _: &Description, numbers: &Numbers) -> Result<Option<OwnedFd>, Fault> {
        // Also for what refers to it from elsewhere: a message in flight, an epoll instance.
        let held = numbers
            .0
            .iter()
            .find_map(|n| b.stdio.get(usize::try_from(*n).ok()?)?.as_ref());
        held.map(|fd| fd::dup_from(fd.as_raw_fd(), 0).at("duplicate")).transpose()
    }

    nothing!(finish, contents, check_part, numbers, ways, prepare, join, refill);
    nothing!(install, install_late, settle, install_own, complete);
}

impl Numbers {
    /// The stream that is put at descriptor `number`: that of this number, if it is one of them.
    pub(crate) fn at(&self, number: RawFd, built: &Built) -> Option<Lent> {
        let of = |n: RawFd| built.stdio.get(usize::try_from(n).ok()?)?.as_ref();
        let held = if self.0.contains(&number) {
            of(number)
        } else {
            self.0.iter().find_map(|n| of(*n))
        };
        held.map(|fd| Lent::Own(fd.as_raw_fd()))
    }
}
