//! How ports and queue pairs are called among the processes of a job.

use crate::real::real;
use crate::shadow::{ShadowContext, ShadowQp};
use belay_ibv::*;

/// A port as its peers address it: by its LID, and by a GID on Ethernet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct PortName(pub(crate) [u8; 16]);

impl PortName {
    pub(crate) fn lid(lid: u16) -> Self {
        let [high, low] = lid.to_be_bytes();
        let mut name = [0; 16];
        (name[14], name[15]) = (high, low);
        PortName(name)
    }

    /// The LID of a port that is called by it.
    pub(crate) fn as_lid(self) -> u16 {
        u16::from_be_bytes([self.0[14], self.0[15]])
    }

    /// The port to which an address leads.
    pub(crate) fn addressed(attr: &AhAttr, ethernet: bool) -> Self {
        if ethernet {
            PortName(attr.grh.dgid.raw)
        } else {
            Self::lid(attr.dlid)
        }
    }
}

/// A port of an open device.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Port {
    pub(crate) number: u8,
    pub(crate) lid: u16,
    pub(crate) sm_lid: u16,
    pub(crate) ethernet: bool,
    pub(crate) gids: Vec<GidEntry>,
    /// Places for GIDs.
    pub(crate) places: i32,
}

/// The bits of a packet's number.
const PSN: u32 = 0xff_ffff;

/// GIDs that are looked at, more than a port has in use.
const GIDS: usize = 512;

impl Port {
    /// The ports of a real device.
    ///
    /// # Safety
    /// An open one.
    pub(crate) unsafe fn all(context: *mut Context) -> Vec<Port> {
        let mut device: DeviceAttr = std::mem::zeroed();
        if (real().ibv_query_device)(context, &mut device) != 0 {
            return Vec::new();
        }
        let gids = Self::gids(context);
        let mut ports = Vec::new();
        for number in 1..=device.phys_port_cnt {
            let mut attr = PortAttr::default();
            if (real().ibv_query_port)(context, number, &mut attr) == 0 {
                let gids = gids.iter().filter(|g| g.port_num == u32::from(number)).copied().collect();
                let ethernet = attr.link_layer == LINK_LAYER_ETHERNET;
                ports.push(Port {
                    number,
                    lid: attr.lid,
                    sm_lid: attr.sm_lid,
                    ethernet,
                    gids,
                    places: attr.gid_tbl_len,
                });
            }
        }
        ports
    }

    unsafe fn gids(context: *mut Context) -> Vec<GidEntry> {
        let none = GidEntry {
            gid: Gid::default(),
            gid_index: 0,
            port_num: 0,
            gid_type: 0,
            ndev_ifindex: 0,
        };
        let mut all = vec![none; GIDS];
        let n = (real()._ibv_query_gid_table)(context, all.as_mut_ptr(), GIDS, 0, size_of::<GidEntry>());
        all.truncate(n.max(0) as usize);
        all
    }

    /// What a place of the table holds, none where it is empty; an error where there is no such place.
    pub(crate) fn place(&self, index: u32) -> Result<Option<&GidEntry>, Int> {
        match i64::from(index) < i64::from(self.places) {
            true => Ok(self.gid(index)),
            false => Err(libc::EINVAL),
        }
    }

    pub(crate) fn gid(&self, index: u32) -> Option<&GidEntry> {
        self.gids.iter().find(|g| g.gid_index == index)
    }

    /// The index of the GID that is here what that of `index` is at `other`: of the same kind, in the same order.
    pub(crate) fn index_like(&self, other: &Port, index: u8) -> u8 {
        let Some(wanted) = other.gid(index.into()) else { return index };
        let same = |g: &&GidEntry| g.gid_type == wanted.gid_type;
        let place = other.gids.iter().filter(same).position(|g| g.gid_index == wanted.gid_index);
        let found = place.and_then(|p| self.gids.iter().filter(same).nth(p));
        found.map_or(index, |g| g.gid_index as u8)
    }

    /// All that it may be called.
    pub(crate) fn names(&self) -> impl Iterator<Item = PortName> + '_ {
        let gids = self.gids.iter().map(|g| g.gid_index as u8).chain([0]);
        gids.map(|index| self.name(index))
    }

    /// What the queue pairs on it are called by, of which this index of a GID is given.
    pub(crate) fn name(&self, index: u8) -> PortName {
        match (self.ethernet, self.gid(index.into())) {
            (true, Some(entry)) => PortName(entry.gid.raw),
            (true, None) => PortName::default(),
            (false, _) => PortName::lid(self.lid),
        }
    }
}

/// A queue pair: unique in a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct QpName {
    pub(crate) port: PortName,
    pub(crate) number: u32,
}

impl QpName {
    /// From the key of a fact, without its first byte.
    pub(crate) fn parse(key: &[u8]) -> Option<Self> {
        let (port, rest) = key.split_first_chunk::<16>()?;
        Some(QpName {
            port: PortName(*port),
            number: u32::from_be_bytes(rest.try_into().ok()?),
        })
    }

    /// The key of what is made known about it.
    pub(crate) fn key(&self, kind: u8) -> [u8; 21] {
        let mut key = [kind; 21];
        key[1..17].copy_from_slice(&self.port.0);
        key[17..].copy_from_slice(&self.number.to_be_bytes());
        key
    }
}

/// The context of a queue pair.
pub(crate) fn context_of(q: &ShadowQp) -> &ShadowContext {
    // SAFETY: a context lives as long as its queue pairs.
    unsafe { ShadowContext::of(q.base.base.context) }
}

/// The port of a queue pair that has one.
pub(crate) fn port_of(q: &ShadowQp) -> Option<&Port> {
    context_of(q).ports().iter().find(|p| p.number == q.port())
}

/// The names of a connected queue pair and of its peer.
pub(crate) fn both_ends(q: &ShadowQp) -> Option<(QpName, QpName)> {
    let port = port_of(q)?;
    let attr = q.shown.lock().attr;
    let own = QpName {
        port: port.name(attr.ah_attr.grh.sgid_index),
        number: q.number(),
    };
    let peer = QpName {
        port: PortName::addressed(&attr.ah_attr, port.ethernet),
        number: attr.dest_qp_num,
    };
    Some((own, peer))
}

/// What a reliable queue pair makes known when it comes to rest, and after a restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QpFact {
    /// The name of whom it is connected to.
    pub(crate) peer: QpName,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    /// Messages that have taken a receive.
    pub(crate) received: u64,
    /// Requests that have taken one at the peer, as is known.
    pub(crate) acknowledged: u64,
    /// Receives that are left.
    pub(crate) available: u64,
    /// Markers may be written to it.
    pub(crate) marks: bool,
}

impl QpFact {
    /// Of a queue pair that is connected.
    pub(crate) fn of(q: &ShadowQp) -> Option<(QpName, QpFact)> {
        use std::sync::atomic::Ordering::Acquire;
        let (own, peer) = both_ends(q)?;
        let shown = *q.shown.lock();
        // SAFETY: a shared queue lives as long as its queue pairs.
        let available = match unsafe { q.srq().as_ref() } {
            Some(srq) => srq.requests.lock().posted() as u64,
            None => q.recv.posted(),
        };
        let fact = QpFact {
            peer,
            // Adapters take 24 bits, of whatever a program gives.
            rq_psn: shown.attr.rq_psn & PSN,
            sq_psn: shown.attr.sq_psn & PSN,
            received: q.received.load(Acquire),
            acknowledged: q.acknowledged.load(Acquire),
            available,
            marks: shown.write_added || shown.attr.qp_access_flags & ACCESS_REMOTE_WRITE != 0,
        };
        Some((own, fact))
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = self.peer.key(u8::from(self.marks)).to_vec();
        bytes.extend([self.rq_psn, self.sq_psn].iter().flat_map(|n| n.to_le_bytes()));
        bytes.extend(
            [self.received, self.acknowledged, self.available]
                .iter()
                .flat_map(|n| n.to_le_bytes()),
        );
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (marks, rest) = bytes.split_first()?;
        let (port, rest) = rest.split_first_chunk::<16>()?;
        let (number, rest) = rest.split_first_chunk::<4>()?;
        let (rq_psn, rest) = rest.split_first_chunk::<4>()?;
        let (sq_psn, rest) = rest.split_first_chunk::<4>()?;
        let (received, rest) = rest.split_first_chunk::<8>()?;
        let (acknowledged, rest) = rest.split_first_chunk::<8>()?;
        let (available, _) = rest.split_first_chunk::<8>()?;
        Some(QpFact {
            peer: QpName {
                port: PortName(*port),
                number: u32::from_be_bytes(*number),
            },
            rq_psn: u32::from_le_bytes(*rq_psn),
            sq_psn: u32::from_le_bytes(*sq_psn),
            received: u64::from_le_bytes(*received),
            acknowledged: u64::from_le_bytes(*acknowledged),
            available: u64::from_le_bytes(*available),
            marks: *marks != 0,
        })
    }
}

/// Where a queue pair is after a restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NameFact {
    pub(crate) port: PortName,
    pub(crate) number: u32,
    pub(crate) received: u64,
}

impl NameFact {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = self.port.0.to_vec();
        bytes.extend(self.number.to_le_bytes());
        bytes.extend(self.received.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (port, rest) = bytes.split_first_chunk::<16>()?;
        let (number, rest) = rest.split_first_chunk::<4>()?;
        let (received, _) = rest.split_first_chunk::<8>()?;
        Some(NameFact {
            port: PortName(*port),
            number: u32::from_le_bytes(*number),
            received: u64::from_le_bytes(*received),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beyond_the_table_there_is_no_gid() {
        let entry = GidEntry {
            gid: Gid { raw: [7; 16] },
            gid_index: 1,
            port_num: 1,
            gid_type: 0,
            ndev_ifindex: 0,
        };
        let port = Port {
            number: 1,
            lid: 1,
            sm_lid: 1,
            ethernet: true,
            gids: vec![entry],
            places: 3,
        };
        assert_eq!(port.place(1), Ok(Some(&entry)));
        assert_eq!(port.place(2), Ok(None));
        assert_eq!([3, u32::MAX].map(|i| port.place(i)), [Err(libc::EINVAL); 2]);
    }

    #[test]
    fn facts_travel() {
        let peer = QpName {
            port: PortName::lid(0x1234),
            number: 0xabcdef,
        };
        let fact = QpFact {
            peer,
            rq_psn: 1,
            sq_psn: 2,
            received: 3,
            acknowledged: 4,
            available: 5,
            marks: true,
        };
        assert_eq!(QpFact::decode(&fact.encode()), Some(fact));
        assert_eq!(QpFact::decode(&fact.encode()[1..]), None);
        assert_eq!(
            peer.key(b'q')[..],
            [&b"q"[..], &peer.port.0, &[0, 0xab, 0xcd, 0xef]].concat()[..]
        );
    }
}
