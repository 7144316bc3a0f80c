//! What a job on several hosts takes for its host: each part keeps its own, on whatever host it goes on.
//!
//! Programs of a part tell what is theirs from what is others' by the name of the host (Open MPI's ranks share memory
//! in `/dev/shm/vader_segment.HOST...`), by the number of its boot (those of MPICH, to know who is on their host), or
//! only by numbers that are unique on a host (PIDs, which two parts on one host have both). So a part that comes to
//! another host keeps the name and the boot of its own, and parts of several hosts that come to one get each a
//! `/dev/shm` of their own.

use crate::fail::{Outcome, RestartError};
use crate::namespace::{self, Way};
use belay_image::model::Job;
use belay_kernel::namespaces::enter_new;
use belay_plugins::{Brought, Facts, Group};
use rustix::thread::LinkNameSpaceType;
use std::collections::BTreeSet;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Where programs share memory by names.
const SHARED: &str = "/dev/shm";
const BOOT: &str = "/proc/sys/kernel/random/boot_id";
const NAME: &str = "/proc/sys/kernel/hostname";

/// What the part was on, empty where that is not kept.
#[derive(Debug, Default)]
pub(crate) struct Identity {
    name: String,
    boot: String,
    /// Parts of other hosts are on this one.
    apart: bool,
}

impl Identity {
    /// In the front of a part, before there are namespaces: finds out together with the others.
    pub(crate) fn of(job: &Job, group: &dyn Group) -> Outcome<Self> {
        let fail = |e: io::Error| RestartError::at("see what this host is", e);
        let boot = std::fs::read_to_string(BOOT).map_err(fail)?;
        let shared = std::fs::metadata(SHARED).map_or(0, |m| m.dev());
        let own = std::fs::metadata("/proc/self/ns/pid").map_err(fail)?.ino();
        let place = format!("host {} {shared}", boot.trim_end());
        let met = group.meet(Brought {
            publish: Facts::from([(format!("{place} {own} {}", std::process::id()), job.host.clone())]),
            want: BTreeSet::from([format!("{place} *")]),
            ..Brought::default()
        });
        let here: Vec<String> = met
            .map_err(|e| RestartError::at("restart together with the other nodes", e))?
            .into_values()
            .collect();
        Ok(Self {
            name: job.host.clone(),
            boot: job.boot_id.clone(),
            apart: is_apart(&here, &job.host),
        })
    }

    /// The directory in whose place the part gets one of its own.
    pub(crate) fn own_directory(&self) -> Option<&'static Path> {
        self.apart.then(|| Path::new(SHARED))
    }

    /// In PID 1 of the part, which has a `/proc`.
    pub(crate) fn keep(&self, way: Way) -> Outcome<()> {
        if way == Way::Initial {
            return Ok(());
        }
        tracing::info!(identity = ?self, "what the part keeps of its host");
        let failed = |what: &'static str| move |e: io::Error| RestartError::at(what, e);
        let differs =
            |was: &str, file: &str| !was.is_empty() && std::fs::read_to_string(file).is_ok_and(|now| now.trim_end() != was);
        let (name, boot) = (&self.name, &self.boot);
        if differs(name, NAME) {
            let apart = enter_new(LinkNameSpaceType::HostNameAndNISDomainName);
            let named = apart.and_then(|()| Ok(rustix::system::sethostname(name.as_bytes())?));
            named.map_err(failed("keep the name of the host"))?;
        }
        if differs(boot, BOOT) {
            namespace::show_text(&format!("{boot}\n"), BOOT).map_err(failed("keep the number of the host's boot"))?;
        }
        if self.apart {
            namespace::mount_memory(SHARED).map_err(failed("mount a /dev/shm for the part"))?;
        }
        Ok(())
    }
}

/// Whether a part of `host` needs a `/dev/shm` for itself, where the parts here are of these hosts. Those of one host
/// go on sharing what they share, so they stay in what the machine has.
fn is_apart(here: &[String], host: &str) -> bool {
    let of_it = here.iter().filter(|h| *h == host).count();
    of_it < 2 && here.len() > of_it
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_several_hosts_are_kept_apart_and_those_of_one_are_not() {
        let apart = |here: &str, host| is_apart(&here.split_whitespace().map(str::to_owned).collect::<Vec<_>>(), host);
        assert!(!apart("a", "a"));
        assert!(!apart("a a", "a"));
        assert!(apart("a b", "a") && apart("a b", "b"));
        assert!(!apart("a a b", "a") && apart("a a b", "b"));
    }
}
