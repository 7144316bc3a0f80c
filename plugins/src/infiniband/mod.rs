//! InfiniBand: devices that the verbs library in the process opens again after a restart.

use crate::builder::Builder;
use crate::fault::{refuse, At, Fault};
use crate::kind::{nothing, Candidate, Kind, Look, NoPart};
use crate::model::Description;
use crate::session::Session;
use crate::sys::fd;
use belay_kernel::proc::Map;
use serde::{Deserialize, Serialize};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The library that makes again what a device has forgotten.
pub const LIBRARY: &str = "libbelay_verbs.so";

/// What a user can do about a device without it.
pub const WITHOUT: &str = "InfiniBand verbs without Belay's library: launch the job where libbelay_verbs.so is installed and [verbs] in the configuration has `enable = \"auto\"` or `\"on\"`, or let MPI use TCP (UCX_TLS=tcp,sm,self)";

/// The kernel's name of anonymous files for events: of completions, and asynchronous ones.
const EVENTS: &str = "infinibandevent";

/// Whether `map` is of such a device.
pub fn is_mapping(map: &Map) -> bool {
    map.name.as_bytes().starts_with(b"/dev/infiniband/")
}

/// Whether the character device with this number is one.
fn is_device(major: u32, minor: u32) -> bool {
    let of = Path::new("/sys/dev/char").join(format!("{major}:{minor}"));
    let subsystem = std::fs::canonicalize(of.join("subsystem")).unwrap_or_default();
    let name = std::fs::canonicalize(&of).unwrap_or_default();
    subsystem.ends_with("infiniband_verbs") || name.ends_with("misc/rdma_cm")
}

/// A device, or where its events are heard.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct DeviceState {}

/// The kind.
pub(crate) struct Infiniband;

impl Kind for Infiniband {
    const NAME: &'static str = "Infiniband";
    const VERSION: u32 = 1;
    type State = DeviceState;
    type Part = NoPart;

    fn recognise(look: &Look<'_>) -> bool {
        match look {
            Look::Anonymous(name) => *name == EVENTS,
            Look::Device(major, minor) => is_device(*major, *minor),
            _ => false,
        }
    }

    fn capture(s: &mut Session<'_>, seen: &Candidate<'_>) -> Result<DeviceState, Fault> {
        let pid = s.found[seen.id].holder.pid;
        // Children that have inherited it do without: who has opened it comes first.
        let mut holders = s.processes.iter().filter(|p| p.pid == pid);
        match holders.any(|p| p.libraries.iter().any(|l| l == LIBRARY)) {
            true => Ok(DeviceState {}),
            false => refuse(WITHOUT),
        }
    }

    fn rebuild(_: &mut Builder<'_>, d: &Description, _: &DeviceState) -> Result<Option<OwnedFd>, Fault> {
        fd::eventfd(0, d.flags & libc::O_NONBLOCK).at("eventfd").map(Some)
    }

    nothing!(survey, finish, contents, check, check_part, numbers, ways, prepare, join, refill);
    nothing!(install, install_late, settle, install_own, complete);
}
