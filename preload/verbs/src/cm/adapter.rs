//! Adapters, and which of them an address is on.
//!
//! On Ethernet addresses are entries of the table of GIDs. On InfiniBand they are of an interface, whose hardware address
//! ends with the GID of its port. After a restart programs know the addresses of before, by which the shadows call ports
//! still, and the kernel those of today: both are looked for.

use crate::api;
use crate::gate::{is_keeper, Whole};
use crate::lock::Lock;
use crate::names::Port;
use crate::shadow::ShadowContext;
use belay_ibv::*;
use std::collections::BTreeMap;
use std::ffi::CStr;
use std::mem::zeroed;
use std::net::{IpAddr, Ipv6Addr};
use std::ptr::null_mut;
use std::time::Duration;

/// An adapter, open from when it is first looked for until the program ends.
pub(super) struct Adapter {
    pub(super) context: *mut Context,
    pub(super) pd: *mut Pd,
    pub(super) max_initiator_depth: u8,
    pub(super) max_responder_resources: u8,
}

// SAFETY: the pointers are to shadows, which any thread may use.
unsafe impl Send for Adapter {}
// SAFETY: as above, and nothing changes.
unsafe impl Sync for Adapter {}

/// Where an address is.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) adapter: &'static Adapter,
    pub(super) port: u8,
    pub(super) gid_index: u8,
}

struct Adapters {
    all: Vec<&'static Adapter>,
    /// A thread is opening them.
    opening: bool,
    /// Where addresses were found: those of interfaces that another host has now are known nowhere else.
    found: BTreeMap<IpAddr, Place>,
}

/// Nobody holds it while calling the verbs, or anything else that may wait.
static ADAPTERS: Lock<Adapters> = Lock::new(NONE);
const NONE: Adapters = Adapters {
    all: Vec::new(),
    opening: false,
    found: BTreeMap::new(),
};

/// In the child of a fork, which has none of its own yet.
///
/// # Safety
/// No other thread is there.
pub(super) unsafe fn after_fork() {
    ADAPTERS.reset(NONE);
}

/// Those that can be opened; none where there are none.
fn adapters() -> Vec<&'static Adapter> {
    let _whole = Whole::begin();
    loop {
        let mut known = ADAPTERS.lock();
        if !known.all.is_empty() {
            return known.all.clone();
        }
        if !std::mem::replace(&mut known.opening, true) {
            break;
        }
        drop(known);
        std::thread::sleep(Duration::from_millis(1));
    }
    let opened = open_all();
    let mut known = ADAPTERS.lock();
    known.opening = false;
    known.all.clone_from(&opened);
    opened
}

fn open_all() -> Vec<&'static Adapter> {
    // SAFETY: a list that is freed when it has been looked through.
    unsafe {
        let mut n = 0;
        let list = api::ibv_get_device_list(&mut n);
        if list.is_null() {
            return Vec::new();
        }
        let all = (0..n.max(0) as usize).filter_map(|i| open(*list.add(i))).collect();
        api::ibv_free_device_list(list);
        all
    }
}

unsafe fn open(device: *mut Device) -> Option<&'static Adapter> {
    let context = api::ibv_open_device(device);
    let mut attr: DeviceAttr = zeroed();
    if context.is_null() || api::ibv_query_device(context, &mut attr) != 0 {
        return None;
    }
    let pd = api::ibv_alloc_pd(context);
    let most = |n: i32| n.clamp(0, u8::MAX.into()) as u8;
    Some(Box::leak(Box::new(Adapter {
        context,
        pd,
        max_initiator_depth: most(attr.limits[5]),
        max_responder_resources: most(attr.limits[2]),
    })))
}

/// Whether there is any.
pub(super) fn are_there() -> bool {
    !adapters().is_empty()
}

/// All contexts.
pub(super) fn contexts() -> Vec<*mut Context> {
    adapters().iter().map(|a| a.context).collect()
}

/// An address as an entry of a table of GIDs.
pub(super) fn gid_of(ip: IpAddr) -> Gid {
    let raw = match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    };
    Gid { raw }
}

/// The kind of GID with which packets of RoCE v2 are sent: of an address that is there in several, this one is taken.
const ROCE_V2: u32 = 2;

/// The entry of a port's table.
fn entry(port: &Port, gid: &Gid) -> Option<GidEntry> {
    let same = |g: &&GidEntry| g.gid == *gid;
    let all = port.gids.iter().filter(same);
    all.max_by_key(|g| g.gid_type == ROCE_V2).copied()
}

impl Adapter {
    pub(super) fn shadow(&self) -> &ShadowContext {
        // SAFETY: it is never closed.
        unsafe { ShadowContext::of(self.context) }
    }

    /// The port as the program sees it.
    pub(super) fn port(&self, number: u8) -> Option<&Port> {
        self.shadow().ports().iter().find(|p| p.number == number)
    }

    fn at(&'static self, shown: &Port, gid_index: u32) -> Place {
        Place {
            adapter: self,
            port: shown.number,
            gid_index: gid_index as u8,
        }
    }

    /// A port, by an address of IPv4 where it has one.
    fn first(&'static self) -> Option<Place> {
        let port = self.shadow().ports().first()?;
        let best = |g: &&GidEntry| (Ipv6Addr::from(g.gid.raw).to_ipv4_mapped().is_some(), g.gid_type);
        Some(self.at(port, port.gids.iter().max_by_key(best)?.gid_index))
    }

    /// The port that has this GID by its name.
    fn known_as(&'static self, gid: &Gid) -> Option<Place> {
        let found = |shown| Some(self.at(shown, entry(shown, gid)?.gid_index));
        self.shadow().ports().iter().find_map(found)
    }

    /// The port that has this GID today.
    fn today(&'static self, gid: &Gid) -> Option<Place> {
        self.shadow().today().iter().find_map(|now| {
            let entry = entry(now, gid)?;
            let shown = self.port(now.number)?;
            let index = shown.index_like(now, entry.gid_index as u8);
            Some(self.at(shown, index.into()))
        })
    }
}

/// Whether an address is that of any adapter, as for the kernel's manager.
pub(super) fn is_any(ip: IpAddr) -> bool {
    ip.is_unspecified() || ip.is_loopback()
}

/// Where an address of this host is, by which `program` knows it, or the kernel.
pub(super) fn find(ip: IpAddr, program: bool) -> Option<Place> {
    let adapters = adapters();
    let found = look(&adapters, ip, program);
    let known = {
        let mut known = ADAPTERS.lock();
        match found {
            Some(place) => {
                known.found.insert(ip, place);
                found
            }
            None => known.found.get(&ip).copied(),
        }
    };
    known.or_else(|| adapters.iter().find_map(|a| a.first()).filter(|_| is_any(ip)))
}

fn look(adapters: &[&'static Adapter], ip: IpAddr, program: bool) -> Option<Place> {
    let gid = gid_of(ip);
    let all = || adapters.iter().copied();
    let known = || all().find_map(|a| a.known_as(&gid));
    let today = || all().find_map(|a| a.today(&gid));
    let found = match program {
        true => known().or_else(today),
        false => today().or_else(known),
    };
    // The C library takes memory for that, of which a thread at the gate may have the lock.
    found.or_else(|| {
        let port = (!is_keeper()).then(|| hardware_gid(ip))??;
        all().find_map(|a| a.today(&port))
    })
}

/// The GID in the hardware address of the interface that has this address, where that is one over InfiniBand.
fn hardware_gid(ip: IpAddr) -> Option<Gid> {
    let mut first = null_mut();
    // SAFETY: a list that is freed below; names end in a zero byte, and addresses are as long as their families say.
    unsafe {
        if libc::getifaddrs(&mut first) != 0 {
            return None;
        }
        let mut all = std::iter::successors(first.as_ref(), |i| i.ifa_next.as_ref());
        let has = |i: &&libc::ifaddrs| super::socket::read_address(i.ifa_addr).is_some_and(|a| a.ip() == ip);
        let name = all.find(has).map(|i| CStr::from_ptr(i.ifa_name).to_owned());
        libc::freeifaddrs(first);
        let path = format!("/sys/class/net/{}/address", name?.to_str().ok()?);
        port_gid(&std::fs::read_to_string(path).ok()?)
    }
}

/// From a hardware address of InfiniBand as text: four bytes of flags and a number, then the GID.
fn port_gid(text: &str) -> Option<Gid> {
    let bytes: Option<Vec<u8>> = text.trim().split(':').map(|b| u8::from_str_radix(b, 16).ok()).collect();
    let raw = bytes?.get(4..)?.try_into().ok()?;
    Some(Gid { raw })
}

impl Place {
    /// The port's entry, as the program sees it.
    pub(super) fn gid(&self) -> GidEntry {
        let none = GidEntry {
            gid: Gid::default(),
            gid_index: self.gid_index.into(),
            port_num: self.port.into(),
            gid_type: 0,
            ndev_ifindex: 0,
        };
        let shown = self.adapter.port(self.port).and_then(|p| p.gid(self.gid_index.into()));
        shown.copied().unwrap_or(none)
    }

    pub(super) fn is_ethernet(&self) -> bool {
        self.adapter.port(self.port).is_some_and(|p| p.ethernet)
    }

    pub(super) fn lid(&self) -> u16 {
        self.adapter.port(self.port).map_or(0, |p| p.lid)
    }

    /// The entry of the same address in another type, where there is one.
    pub(super) fn of_type(mut self, gid_type: u8) -> Option<Place> {
        let gid = self.gid().gid;
        let port = self.adapter.port(self.port)?;
        let found = port.gids.iter().find(|g| g.gid == gid && g.gid_type == gid_type.into())?;
        self.gid_index = found.gid_index as u8;
        Some(self)
    }

    /// The largest packet of today.
    pub(super) fn mtu(&self) -> u8 {
        let mut attr = PortAttr::default();
        // SAFETY: an open context.
        let error = unsafe { api::query_port_sized(self.adapter.context, self.port, &mut attr, size_of::<PortAttr>()) };
        match error {
            0 => attr.active_mtu.clamp(1, 5) as u8,
            _ => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The child has no thread that would give it back.
    #[test]
    fn a_lock_that_is_held_at_a_fork_is_free_in_the_child() {
        // With its place a thread lets the child know that it is one.
        crate::gate::slot();
        let held = ADAPTERS.lock();
        // SAFETY: the child does no more than is asked here, and ends.
        let child = unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::alarm(20);
                drop(ADAPTERS.lock());
                libc::_exit(7);
            }
            child
        };
        drop(held);
        let mut status = 0;
        // SAFETY: a child of this process, and room for a number.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 7), "{status:#x}");
    }

    #[test]
    fn hardware_addresses_of_infiniband_end_with_the_gid() {
        let text = "80:00:02:08:fe:80:00:00:00:00:00:00:24:8a:07:03:00:1d:4e:5a\n";
        let raw = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0x24, 0x8a, 7, 3, 0, 0x1d, 0x4e, 0x5a];
        assert_eq!(port_gid(text), Some(Gid { raw }));
        assert_eq!(port_gid("02:42:ac:11:00:02\n"), None);
        assert_eq!(port_gid(""), None);
    }
}
