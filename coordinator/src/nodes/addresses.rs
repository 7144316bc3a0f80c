//! What `listen` in `[tree]` names: addresses, networks and interfaces of this host.

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
