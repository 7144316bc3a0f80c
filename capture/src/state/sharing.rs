//! Processes that share their memory (CLONE_VM without CLONE_THREAD). One of each group, the *first*, stands for the
//! memory: it is captured there and stored once. And those that share descriptors or directories, which only who makes a
//! process can share with it.

use crate::inject::rescue;
use crate::state::draft::Draft;
use crate::stop::stopped::{Guest, Process};
use crate::CaptureError;
use belay_kernel::kcmp::{self, Object};
use std::cmp::Ordering;

/// Finds the groups and notes in each process but the first what it shares.
pub(crate) fn find(processes: &mut [Process], drafts: &[Draft]) -> Result<(), CaptureError> {
    for group in groups(processes, Object::Vm)? {
        let pid = |i: usize| processes[i].pid;
        let inside = |i: usize| group.iter().any(|g| pid(*g) == processes[i].ppid);
        let Some(first) = first_of(&group, processes) else { continue };
        if drafts[first].has_rings() {
            let reason =
                "is used by processes that share their memory (CLONE_VM), which could not all be kept from it while it is replaced";
            return Err(CaptureError::refuse(pid(first), "asynchronous I/O (io_setup)", reason));
        }
        let guests: Vec<usize> = group.iter().copied().filter(|i| *i != first).collect();
        let mut found = Vec::new();
        for (i, place) in guests.into_iter().zip(1..) {
            let refuse = |reason: &str| {
                let reason = format!("shares its memory with process {} (CLONE_VM), {reason}", pid(first));
                CaptureError::refuse(pid(i), drafts[i].stat.comm.to_string_lossy(), reason)
            };
            let as_first = is_as(&processes[i], &drafts[i], &processes[first], &drafts[first]);
            if !inside(i) && !as_first {
                return Err(refuse(
                    "which is neither its parent nor a sibling made in its place (CLONE_PARENT)",
                ));
            }
            let maker = group.iter().copied().find(|g| pid(*g) == processes[i].ppid).unwrap_or(first);
            let handlers = same(&processes[i], &processes[maker], Object::Sighand)?;
            for other in group.iter().filter(|g| **g != i && **g != maker && !handlers) {
                let child = processes[*other].ppid == pid(i);
                if !child && same(&processes[i], &processes[*other], Object::Sighand)? {
                    return Err(refuse(
                        "and its signal dispositions with another that has not made it (CLONE_SIGHAND)",
                    ));
                }
            }
            let first = pid(first);
            found.push((i, Guest { first, place, handlers }));
        }
        let crowded = is_crowded(processes, &group, &drafts[first])?;
        for (i, guest) in found {
            processes[i].guest = Some(guest);
        }
        for i in group {
            processes[i].crowded = crowded;
        }
    }
    check_makers(processes, drafts)
}

/// Refuses who shares descriptors or directories with others, none of which a restart can have it made by.
fn check_makers(processes: &[Process], drafts: &[Draft]) -> Result<(), CaptureError> {
    let (pid, ppid) = (|i: usize| processes[i].pid, |i: usize| processes[i].ppid);
    let refuse = |i: usize, others: &[usize], what: &str, who: &str| {
        let other = others.iter().copied().find(|other| *other != i).unwrap_or(i);
        let reason = format!("shares its {what} with process {}, which is {who}", pid(other));
        Err(CaptureError::refuse(pid(i), drafts[i].stat.comm.to_string_lossy(), reason))
    };
    for group in groups(processes, Object::Files)? {
        let Some(first) = first_of(&group, processes) else { continue };
        for i in group.iter().copied().filter(|i| *i != first) {
            let by_parent = group.iter().any(|g| pid(*g) == ppid(i));
            let fits = match processes[i].guest {
                Some(guest) => by_parent || group.iter().any(|g| pid(*g) == guest.first),
                None => by_parent || is_as(&processes[i], &drafts[i], &processes[first], &drafts[first]),
            };
            if !fits {
                let who = "neither its parent nor a sibling made in its place (CLONE_PARENT)";
                return refuse(i, &group, "descriptors (CLONE_FILES)", who);
            }
        }
    }
    for group in groups(processes, Object::Fs)? {
        let Some(first) = first_of(&group, processes) else { continue };
        for i in group.iter().copied().filter(|i| *i != first) {
            if !group.iter().any(|g| pid(*g) == ppid(i)) {
                return refuse(i, &group, "working directory (CLONE_FS)", "not its parent");
            }
        }
    }
    Ok(())
}

/// The one of a group that none of the others has made as its child.
fn first_of(group: &[usize], processes: &[Process]) -> Option<usize> {
    let inside = |i: usize| group.iter().any(|g| processes[*g].pid == processes[i].ppid);
    group.iter().copied().find(|i| !inside(*i))
}

/// Whether `first` can make the process as a sibling of its own (CLONE_PARENT).
fn is_as(process: &Process, draft: &Draft, first: &Process, firsts: &Draft) -> bool {
    let (own, firsts) = (&draft.stat, &firsts.stat);
    let session = own.session == process.pid || own.session == firsts.session;
    process.ppid == first.ppid && own.exit_signal == firsts.exit_signal && session
}

/// Whether a thread of the group has its stack where their frames would lie (see `rescue`), which go into the image as
/// they stand there.
fn is_crowded(processes: &[Process], group: &[usize], first: &Draft) -> Result<bool, CaptureError> {
    let Some(stack) = first.maps.iter().find(|m| m.name == "[stack]") else {
        return Ok(true);
    };
    let tasks = || group.iter().flat_map(|i| &processes[*i].tasks);
    let bytes = tasks().map(|t| rescue::frame_bytes(t.xstate.len())).max().unwrap_or(0);
    let most = (stack.end - stack.start).saturating_sub(rescue::MARGIN) / bytes.max(1);
    if group.len() as u64 > most {
        let reason = format!(
            "is shared by {} processes (CLONE_VM), of which {most} could find their way back",
            group.len()
        );
        return Err(CaptureError::refuse(first.pid, "memory", reason));
    }
    let room = stack.start..stack.start + bytes * group.len() as u64 + rescue::MARGIN;
    Ok(tasks().any(|t| room.contains(&t.regs.rsp)))
}

fn compare(a: &Process, b: &Process, object: Object) -> Result<Ordering, CaptureError> {
    let fail = |e| CaptureError::system(format!("compare processes {} and {} (kcmp)", a.pid, b.pid), e);
    kcmp::compare(a.task(), b.task(), object).map_err(fail)
}

fn same(a: &Process, b: &Process, object: Object) -> Result<bool, CaptureError> {
    compare(a, b, object).map(Ordering::is_eq)
}

/// The groups of more than one, as indices in ascending order. `kcmp` has an order, so each look-up is a binary search.
fn groups(processes: &[Process], object: Object) -> Result<Vec<Vec<usize>>, CaptureError> {
    let mut known: Vec<Vec<usize>> = Vec::new();
    for (i, process) in processes.iter().enumerate() {
        let mut failed = None;
        let place = known.binary_search_by(|group| {
            compare(&processes[group[0]], process, object).unwrap_or_else(|e| {
                failed = Some(e);
                Ordering::Less
            })
        });
        match (failed, place) {
            (Some(e), _) => return Err(e),
            (None, Ok(at)) => known[at].push(i),
            (None, Err(at)) => known.insert(at, vec![i]),
        }
    }
    known.retain(|group| group.len() > 1);
    Ok(known)
}
