//! Who makes room where more connect than can be attended to before they have proved that they know the job key.

use std::collections::HashMap;
use std::net::IpAddr;

/// Where somebody comes from: an IPv4 address, or the network of an IPv6 one, within which a host has as many as it likes.
fn origin(address: IpAddr) -> u128 {
    match address.to_canonical() {
        IpAddr::V4(v4) => u32::from(v4).into(),
        IpAddr::V6(v6) => u128::from(v6) >> 64 << 64,
    }
}

/// Which of those who come from `addresses`, oldest first, makes room for one more: the oldest from where most come. So nobody is kept out by those of one address.
pub fn who_goes(addresses: &[IpAddr]) -> Option<usize> {
    let mut count: HashMap<u128, usize> = HashMap::new();
    for a in addresses {
        *count.entry(origin(*a)).or_default() += 1;
    }
    let most = count.values().max()?;
    addresses.iter().position(|a| count[&origin(*a)] == *most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_of_the_largest_crowd_makes_room() {
        let goes = |texts: &[&str]| who_goes(&texts.iter().map(|t| t.parse().unwrap()).collect::<Vec<_>>());
        assert_eq!(goes(&[]), None);
        assert_eq!(goes(&["10.0.0.1", "10.0.0.2", "10.0.0.2"]), Some(1));
        assert_eq!(goes(&["10.0.0.1", "10.0.0.2"]), Some(0));
        // Addresses of one network of version 6 are one host's, and those of version 4 in the other form the same.
        assert_eq!(goes(&["2001:db8::1", "fe80::1", "fe80::2"]), Some(1));
        assert_eq!(goes(&["10.0.0.9", "::ffff:10.0.0.2", "10.0.0.2"]), Some(1));
        assert_eq!(goes(&["10.0.0.9", "::ffff:10.0.0.1", "10.0.0.2"]), Some(0));
    }
}
