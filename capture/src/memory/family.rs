//! Which of the copies of a checkpoint have memory in common: a process and those that it has forked.

use crate::memory::kin::Kin;
use crate::memory::snapshot::Child;
use belay_image::model::Process;
use belay_kernel::pagemap::Pagemap;
use std::collections::{HashMap, HashSet};
use std::io;

/// Processes with fewer pages are not worth a look.
const WORTH: u64 = 256;

/// Finds out what each of `children` has in common with one before it.
pub(crate) fn find(children: &mut [Child], processes: &[Process]) {
    let makers: HashMap<i32, i32> = processes.iter().map(|p| (p.pid, p.ppid)).collect();
    let mut before: HashMap<i32, i32> = HashMap::new();
    let mut referred = HashSet::new();
    for child in &mut *children {
        let Some(copy) = child.copy() else { continue };
        let maker = makers.get(&child.pid()).copied().unwrap_or_default();
        if let Some(makers_copy) = before.get(&maker).filter(|_| child.pages() >= WORTH) {
            match common(child, copy, *makers_copy) {
                // It has called exec, as a rule.
                Ok(ranges) if ranges.is_empty() => {}
                Ok(ranges) => {
                    referred.insert(maker);
                    child.shares(Kin { maker, ranges });
                }
                // It reads what it has.
                Err(error) => tracing::debug!(pid = child.pid(), %error, "what it shares with its maker is not known"),
            }
        }
        before.insert(child.pid(), copy);
    }
    let makers = children.iter_mut().filter(|c| referred.contains(&c.pid()));
    makers.for_each(Child::store_all);
}

fn common(child: &Child, copy: i32, makers: i32) -> io::Result<Vec<(u64, u64)>> {
    let (mut own, other) = (Pagemap::open(copy)?, Pagemap::open(makers)?);
    let (mut data, mut out) = (Vec::new(), Vec::new());
    for (start, end) in child.anonymous() {
        own.data_ranges(start, end, &mut data)?;
    }
    for (start, end) in data {
        own.common(&other, start, end, &mut out)?;
    }
    Ok(out)
}
