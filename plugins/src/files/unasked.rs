//! Files that are saved though the user has not asked for it and they would outlive the job: those that the program may
//! find otherwise after a restart than they were at the checkpoint.
//!
//! | open file | what a restart would find without its contents |
//! |---|---|
//! | written where there are bytes already, or may be | what was written after the checkpoint |
//! | made since the launch | nothing, where the program has renamed or removed it since |
//!
//! They are read while the job stands still, so there is a limit for one file, and one for all of a node. Where not all
//! of them can be had, those that may be overwritten come first, and of these the smallest.

use super::named::is_volatile;
use super::sought::{FileSet, Sought};
use super::Origin;
use crate::session::Session;
use std::collections::BTreeSet;

/// The limit for all files of a node is so many times that for one.
const TOGETHER: u64 = 4;
/// Most files of a node: each costs some time, however small it is.
const MOST: usize = 512;
/// So many names are in a note.
const NAMED: usize = 3;

/// File systems that may show a file differently on different hosts for some seconds (NFS, SMB, 9P, those in user space).
const NOT_COHERENT: [i64; 5] = [0x6969, 0xff53_4d42, 0xfe53_4d42, 0x0102_1997, 0x6573_5546];

/// Numbers of those in `set`. Notes down which are too large and may be overwritten.
pub(super) fn choose(s: &mut Session<'_>, set: &FileSet) -> BTreeSet<usize> {
    let limit = s.saved_up_to;
    if limit == 0 || s.saves_all() {
        return BTreeSet::new();
    }
    let together = s.group.is_some();
    let wanted = |(at, sought): (usize, &Sought)| {
        let open = sought.open.filter(|_| sought.object.origin == Origin::Named)?;
        let may_differ = open.overwrites || open.made;
        let is_wanted = may_differ && !is_volatile(sought.object.path.as_path(), Some(open.file_system));
        (is_wanted && !(together && NOT_COHERENT.contains(&open.file_system))).then_some((
            !open.overwrites,
            sought.object.bytes,
            at,
        ))
    };
    let mut all: Vec<_> = set.objects.iter().enumerate().filter_map(wanted).collect();
    all.sort_unstable();
    let mut left = limit.saturating_mul(TOGETHER);
    let (mut chosen, mut too_large) = (BTreeSet::new(), Vec::new());
    for (only_made, bytes, at) in all {
        if bytes <= limit.min(left) && chosen.len() < MOST {
            left -= bytes;
            chosen.insert(at);
        } else if !only_made {
            too_large.push(at);
        }
    }
    note(s, set, &too_large);
    chosen
}

fn note(s: &mut Session<'_>, set: &FileSet, too_large: &[usize]) {
    let names = too_large.iter().take(NAMED).map(|at| {
        let object = &set.objects[*at].object;
        format!("{} ({} MiB)", object.path, object.bytes >> 20)
    });
    let names: Vec<_> = names.collect();
    let more = match too_large.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    if !names.is_empty() {
        s.notes.push(format!(
            "not saved, since too much would have to be read while the job stands still: {}{more}; what the job overwrites there after the checkpoint stays so at a restart (--save-open-files=SIZE saves larger ones)",
            names.join(", ")
        ));
    }
}
