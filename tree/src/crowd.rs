//! Things that come from somewhere, in crowds: where there are too many, the oldest from where most come makes room, so
//! that nobody is kept out by those of one address.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;

/// Where somebody comes from: an IPv4 address, or the network of an IPv6 one, within which a host has as many as it likes.
fn origin(address: IpAddr) -> u128 {
    match address.to_canonical() {
        IpAddr::V4(v4) => u32::from(v4).into(),
        IpAddr::V6(v6) => u128::from(v6) >> 64 << 64,
    }
}

/// The crowds: of each origin what has come, oldest first, with numbers in the order of coming.
#[derive(Debug)]
pub(crate) struct Crowds<T> {
    crowds: HashMap<u128, VecDeque<(u64, T)>>,
    count: usize,
    next: u64,
}

impl<T> Default for Crowds<T> {
    fn default() -> Self {
        Self {
            crowds: HashMap::new(),
            count: 0,
            next: 0,
        }
    }
}

impl<T> Crowds<T> {
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.crowds.values().flatten().map(|(_, one)| one)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.crowds.values_mut().flatten().map(|(_, one)| one)
    }

    pub(crate) fn add(&mut self, from: IpAddr, one: T) {
        self.crowds.entry(origin(from)).or_default().push_back((self.next, one));
        self.next += 1;
        self.count += 1;
    }

    /// Takes out the oldest of the largest crowd; of several that are as large, the oldest of all.
    pub(crate) fn make_room(&mut self) -> Option<T> {
        let rank = |crowd: &VecDeque<(u64, T)>| (crowd.len(), std::cmp::Reverse(crowd.front().map(|f| f.0)));
        let largest = self
            .crowds
            .iter()
            .max_by_key(|(_, crowd)| rank(crowd))
            .map(|(from, _)| *from)?;
        let crowd = self.crowds.get_mut(&largest)?;
        let (_, one) = crowd.pop_front()?;
        if crowd.is_empty() {
            self.crowds.remove(&largest);
        }
        self.count -= 1;
        Some(one)
    }

    /// Keeps those that `stays` gives back.
    pub(crate) fn sift(&mut self, mut stays: impl FnMut(T) -> Option<T>) {
        for crowd in self.crowds.values_mut() {
            let those = std::mem::take(crowd);
            crowd.extend(those.into_iter().filter_map(|(n, one)| Some((n, stays(one)?))));
        }
        self.crowds.retain(|_, crowd| !crowd.is_empty());
        self.count = self.crowds.values().map(VecDeque::len).sum();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_of_the_largest_crowd_makes_room() {
        let goes = |texts: &[&str]| {
            let mut crowds = Crowds::default();
            for (n, text) in texts.iter().enumerate() {
                crowds.add(text.parse().unwrap(), n);
            }
            let goes = crowds.make_room();
            assert_eq!(crowds.len(), texts.len() - usize::from(goes.is_some()));
            goes
        };
        assert_eq!(goes(&[]), None);
        assert_eq!(goes(&["10.0.0.1", "10.0.0.2", "10.0.0.2"]), Some(1));
        assert_eq!(goes(&["10.0.0.1", "10.0.0.2"]), Some(0));
        // Addresses of one network of version 6 are one host's, and those of version 4 in the other form the same.
        assert_eq!(goes(&["2001:db8::1", "fe80::1", "fe80::2"]), Some(1));
        assert_eq!(goes(&["10.0.0.9", "::ffff:10.0.0.2", "10.0.0.2"]), Some(1));
        assert_eq!(goes(&["10.0.0.9", "::ffff:10.0.0.1", "10.0.0.2"]), Some(0));
    }

    #[test]
    fn who_stays_keeps_the_place() {
        let mut crowds = Crowds::default();
        for n in 0..6 {
            crowds.add(format!("10.0.0.{}", n % 2).parse().unwrap(), n);
        }
        crowds.sift(|n| (n != 0).then_some(n));
        assert_eq!(crowds.len(), 5);
        assert_eq!(std::iter::from_fn(|| crowds.make_room()).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
    }
}
