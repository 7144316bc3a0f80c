//! Where the agents of a job listen for each other: at the addresses that `listen` in `[tree]` names, or at all of the host while parts are being started, which come to the
//! one that they reach; when all have come, only where they did. Parts listen at the address from which they have reached the root.

use super::remote::Life;
use super::{failure, Nodes};
use crate::Failure;
use belay_kernel::net;
use belay_wire::Exit;
use std::net::IpAddr;

/// Longest name of an interface.
const NAME: usize = 15;

/// What an entry of `listen` names.
enum Place<'a> {
    Network(IpAddr, u32),
    Interface(&'a str),
}

impl<'a> Place<'a> {
    fn parse(text: &'a str) -> Result<Self, String> {
        let (address, bits) = text.split_once('/').map_or((text, None), |(a, b)| (a, Some(b)));
        let Ok(ip) = address.parse::<IpAddr>() else {
            let is_name = !text.is_empty() && text.len() <= NAME && text.chars().all(|c| c.is_ascii_graphic() && c != '/');
            return match is_name {
                true => Ok(Self::Interface(text)),
                false => Err(format!("{text:?} is no name of an interface, no address and no network")),
            };
        };
        let most = if ip.is_ipv4() { 32 } else { 128 };
        match bits.map_or(Ok(most), str::parse) {
            Ok(bits) if bits <= most => Ok(Self::Network(ip, bits)),
            _ => Err(format!("{text:?}: a network has 0 to {most} bits behind the slash")),
        }
    }

    fn holds(&self, name: &str, ip: IpAddr) -> bool {
        match (self, ip) {
            (Self::Interface(wanted), _) => *wanted == name,
            (Self::Network(IpAddr::V4(of), bits), IpAddr::V4(ip)) => {
                (u32::from(*of) ^ u32::from(ip)).checked_shr(32 - bits).unwrap_or(0) == 0
            }
            (Self::Network(IpAddr::V6(of), bits), IpAddr::V6(ip)) => {
                (u128::from(*of) ^ u128::from(ip)).checked_shr(128 - bits).unwrap_or(0) == 0
            }
            (Self::Network(..), _) => false,
        }
    }
}

/// Refuses what names nothing.
pub(crate) fn check(listen: &[String]) -> Result<(), String> {
    listen.iter().try_for_each(|text| Place::parse(text).map(drop))
}

/// The addresses of this host that `listen` names; all, where it names none.
pub(crate) fn addresses(listen: &[String]) -> Result<Vec<IpAddr>, Failure> {
    chosen(listen, net::interfaces())
}

fn chosen(listen: &[String], here: Vec<(String, IpAddr)>) -> Result<Vec<IpAddr>, Failure> {
    let refused = |why: String| Failure::new(Exit::Usage, format!("listen in [tree] of the configuration: {why}"));
    let places: Vec<Place> = listen
        .iter()
        .map(|t| Place::parse(t))
        .collect::<Result<_, _>>()
        .map_err(refused)?;
    let wanted = |(name, ip): &&(String, IpAddr)| places.is_empty() || places.iter().any(|p| p.holds(name, *ip));
    let mut found: Vec<IpAddr> = here.iter().filter(wanted).map(|(_, ip)| *ip).collect();
    found.dedup();
    if found.is_empty() {
        let all: Vec<String> = here.iter().map(|(name, ip)| format!("{ip} ({name})")).collect();
        let why = format!("{} is not here; this host has {}", listen.join(", "), all.join(", "));
        return Err(refused(why));
    }
    Ok(found)
}

impl Nodes {
    /// At the root, before parts are started: listens wherever they may come to.
    pub(crate) fn listen_for_parts(&mut self) -> Result<(), Failure> {
        if !self.listens_widely {
            self.listen_at(&addresses(&self.listen)?)?;
            self.listens_widely = true;
        }
        Ok(())
    }

    /// At the root: when all parts that were started have come, it listens no more where none of them came to.
    pub(crate) fn listen_to_parts(&mut self) {
        if !self.listens_widely || self.remotes.values().any(|r| r.life == Life::Starting) {
            return;
        }
        let reached = match (&self.joining, &self.tree) {
            (Some(joining), _) => joining.reached(),
            (None, Some(tree)) => tree.traffic().reached(),
            (None, None) => Vec::new(),
        };
        if reached.is_empty() {
            return;
        }
        match self.listen_at(&reached) {
            Ok(()) => self.listens_widely = false,
            Err(e) => tracing::warn!(error = %e, "the root listens at more addresses than parts come to"),
        }
    }

    fn listen_at(&mut self, addresses: &[IpAddr]) -> Result<(), Failure> {
        let done = match (&mut self.joining, &mut self.tree) {
            (Some(joining), _) => joining.listen_at(addresses),
            (None, Some(tree)) => tree.listen_at(addresses),
            (None, None) => Ok(()),
        };
        done.map_err(failure)
    }

    /// The addresses of this host at which this node listens, or may.
    pub(crate) fn at(&self) -> Result<Vec<IpAddr>, Failure> {
        let parsed = self
            .addresses()
            .into_iter()
            .filter_map(|a| Some(a.parse::<std::net::SocketAddr>().ok()?.ip()));
        let now: Vec<IpAddr> = parsed.collect();
        if now.is_empty() {
            return addresses(&self.listen);
        }
        Ok(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(listen: &[&str]) -> Result<Vec<String>, Failure> {
        let here = [
            ("eth0", "10.1.2.3"),
            ("ib0", "192.168.7.1"),
            ("ib0", "2001:db8:7::1"),
            ("lo", "127.0.0.1"),
        ];
        let here = here.map(|(name, ip)| (name.to_owned(), ip.parse().unwrap()));
        let listen: Vec<String> = listen.iter().map(ToString::to_string).collect();
        Ok(chosen(&listen, here.into())?.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn interfaces_networks_and_addresses_name_where_to_listen() {
        assert_eq!(of(&[]).unwrap().len(), 4);
        assert_eq!(of(&["ib0"]).unwrap(), ["192.168.7.1", "2001:db8:7::1"]);
        assert_eq!(of(&["10.0.0.0/8", "lo"]).unwrap(), ["10.1.2.3", "127.0.0.1"]);
        assert_eq!(of(&["10.1.2.3"]).unwrap(), ["10.1.2.3"]);
        assert_eq!(of(&["2001:db8::/32"]).unwrap(), ["2001:db8:7::1"]);
        assert_eq!(of(&["0.0.0.0/0"]).unwrap().len(), 3);
        let none = of(&["eth1", "10.9.0.0/16"]).unwrap_err().message;
        assert!(
            none.contains("eth1, 10.9.0.0/16 is not here; this host has 10.1.2.3 (eth0)"),
            "{none}"
        );
        for wrong in ["", "10.0.0.0/33", "10.0.0.0/x", "a/8", "an interface", "\u{1b}[2J"] {
            assert!(check(&[wrong.to_owned()]).is_err(), "{wrong:?}");
        }
    }
}
