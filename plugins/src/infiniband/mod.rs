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

/// What a user can do about connections that the kernel's manager makes.
const MANAGER: &str = "connections by librdmacm (rdma_connect, rdma_listen) without Belay's library: launch the job where libbelay_verbs.so is installed and [verbs] in the configuration has `enable = \"auto\"` or `\"on\"`, or use TCP";

/// The kernel's name of anonymous files for events: of completions, and asynchronous ones.
const EVENTS: &str = "infinibandevent";

/// Whether `map` is of such a device.
pub fn is_mapping(map: &Map) -> bool {
    map.name.as_bytes().starts_with(b"/dev/infiniband/")
}

/// A device in `/dev/infiniband`.
#[derive(Debug, PartialEq)]
enum Device {
    /// `uverbsN`.
    Verbs,
    /// `rdma_cm`.
    Manager,
}

impl Device {
    /// The character device with this number, by the directory that describes all of them.
    fn find(all: &Path, (major, minor): (u32, u32)) -> Option<Self> {
        let of = all.join(format!("{major}:{minor}"));
        let subsystem = std::fs::canonicalize(of.join("subsystem")).unwrap_or_default();
        let name = std::fs::canonicalize(&of).unwrap_or_default();
        match (subsystem.ends_with("infiniband_verbs"), name.ends_with("misc/rdma_cm")) {
            (true, _) => Some(Device::Verbs),
            (_, true) => Some(Device::Manager),
            _ => None,
        }
    }

    fn numbered(major: u32, minor: u32) -> Option<Self> {
        Self::find(Path::new("/sys/dev/char"), (major, minor))
    }
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
            Look::Device(major, minor) => Device::numbered(*major, *minor).is_some(),
            _ => false,
        }
    }

    fn capture(s: &mut Session<'_>, seen: &Candidate<'_>) -> Result<DeviceState, Fault> {
        if let Look::Device(major, minor) = seen.look {
            if Device::numbered(major, minor) == Some(Device::Manager) {
                return refuse(MANAGER);
            }
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn the_connection_manager_is_no_adapter() {
        let sys = std::env::temp_dir().join(format!("belay-char-{}", std::process::id()));
        let put = |name: &str, (device, subsystem): (&str, &str)| {
            let [device, subsystem] = [device, subsystem].map(|p| sys.join(p));
            std::fs::create_dir_all(&device).unwrap();
            std::fs::create_dir_all(&subsystem).unwrap();
            symlink(subsystem, device.join("subsystem")).unwrap();
            symlink(device, sys.join(name)).unwrap();
        };
        put("231:192", ("pci/infiniband_verbs/uverbs0", "class/infiniband_verbs"));
        put("10:121", ("virtual/misc/rdma_cm", "class/misc"));
        put("10:200", ("virtual/misc/tun", "class/misc"));
        let found = |number| Device::find(&sys, number);
        assert_eq!(found((231, 192)), Some(Device::Verbs));
        assert_eq!(found((10, 121)), Some(Device::Manager));
        assert_eq!((found((10, 200)), found((1, 3))), (None, None));
        std::fs::remove_dir_all(sys).unwrap();
    }
}
