//! The GPUs of a host, and which of them takes the place of which.

use std::fmt;
use std::str::FromStr;

/// A GPU, as `UUID NAME`: the UUID in hexadecimal digits, then the name of its kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    pub(crate) uuid: [u8; 16],
    pub(crate) name: String,
}

/// A GPU of before and the one that takes its place (`CUcheckpointGpuPair`).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pair {
    old: [u8; 16],
    new: [u8; 16],
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.uuid.iter().try_for_each(|b| write!(f, "{b:02x}"))?;
        write!(f, " {}", self.name.replace(char::is_control, " "))
    }
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no GPU: UUID NAME");
        let (digits, name) = text.split_once(' ').ok_or_else(wrong)?;
        let number = (digits.len() == 32 && digits.bytes().all(|b| b.is_ascii_hexdigit()))
            .then(|| u128::from_str_radix(digits, 16))
            .and_then(Result::ok);
        Ok(Self {
            uuid: number.ok_or_else(wrong)?.to_be_bytes(),
            name: name.to_owned(),
        })
    }
}

/// Which GPU of those that the host has takes the place of each that a job `had`: the same one, or else another of its
/// kind, each for one only. None at all where all are the same.
pub(crate) fn pairs(had: &[Device], has: &[Device]) -> Result<Vec<Pair>, String> {
    let is_here = |d: &Device| has.iter().any(|h| h.uuid == d.uuid);
    if had.iter().all(is_here) {
        return Ok(Vec::new());
    }
    let mut free: Vec<&Device> = has.iter().filter(|h| !had.iter().any(|d| d.uuid == h.uuid)).collect();
    let find = |d: &Device| {
        if is_here(d) {
            return Ok(Pair {
                old: d.uuid,
                new: d.uuid,
            });
        }
        let Some(at) = free.iter().position(|f| f.name == d.name) else {
            let names: Vec<&str> = has.iter().map(|h| h.name.as_str()).collect();
            return Err(format!(
                "the job had a GPU {} ({d}), and none of this kind is free here, where there are: {}; restart where there is one",
                d.name,
                names.join(", ")
            ));
        };
        Ok(Pair {
            old: d.uuid,
            new: free.swap_remove(at).uuid,
        })
    };
    had.iter().map(find).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(number: u8, name: &str) -> Device {
        Device {
            uuid: [number; 16],
            name: name.into(),
        }
    }

    #[test]
    fn each_gets_its_own_or_one_of_its_kind() {
        let [a, b, c, other] = [device(1, "A"), device(2, "A"), device(3, "A"), device(4, "B")];
        let of = |had: &[&Device], has: &[&Device]| {
            let own = |d: &[&Device]| d.iter().map(|d| (*d).clone()).collect::<Vec<_>>();
            let pairs = pairs(&own(had), &own(has))?;
            Ok::<_, String>(pairs.iter().map(|p| (p.old[0], p.new[0])).collect::<Vec<_>>())
        };
        assert_eq!(of(&[&a], &[&b, &a]), Ok(vec![]));
        assert_eq!(of(&[&a, &b], &[&c, &a, &other]), Ok(vec![(1, 1), (2, 3)]));
        assert_eq!(of(&[&a, &b], &[&other, &c]).unwrap_err().matches('A').count(), 3);
        assert!(of(&[&other], &[&a]).is_err() && of(&[&a], &[]).is_err());
        assert_eq!(of(&[], &[&a]), Ok(vec![]));
    }

    #[test]
    fn what_is_written_is_read() {
        let d = device(0xab, "NVIDIA H100 80GB HBM3");
        assert_eq!(d.to_string().parse(), Ok(d));
        for text in ["", "ab", "+babababababababababababababababa x", "zz x"] {
            assert!(text.parse::<Device>().is_err(), "{text}");
        }
    }
}
