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

/// Why there is no place for a GPU,
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    /// which the job had,
    Had(String),
    /// or which was hidden from it.
    Hidden(String),
}

impl Pair {
    fn of(old: &Device, new: &Device) -> Self {
        Self {
            old: old.uuid,
            new: new.uuid,
        }
    }
}

impl Device {
    /// As nvidia-smi names it, with its kind.
    fn told(&self) -> String {
        let digits = self.uuid();
        let [a, b, c, d, e] = [0..8, 8..12, 12..16, 16..20, 20..32].map(|part| &digits[part]);
        format!("{} (GPU-{a}-{b}-{c}-{d}-{e})", self.name)
    }

    /// Its UUID in hexadecimal digits.
    pub(crate) fn uuid(&self) -> String {
        self.uuid.iter().map(|b| format!("{b:02x}")).collect()
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.uuid(), self.name.replace(char::is_control, " "))
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

/// Those of `all` that `named` names, as the driver reads `CUDA_VISIBLE_DEVICES`: places and the beginnings of UUIDs, up to the
/// first that names none.
pub(crate) fn visible(all: &[Device], named: &str) -> Vec<Device> {
    let mut found: Vec<Device> = Vec::new();
    for word in named.split(',').map(str::trim) {
        let by_uuid = || {
            let digits = word.strip_prefix("GPU-")?.replace('-', "").to_ascii_lowercase();
            all.iter().find(|d| !digits.is_empty() && d.uuid().starts_with(&digits))
        };
        let device = match word.parse::<usize>() {
            Ok(place) => all.get(place),
            Err(_) => by_uuid(),
        };
        match device {
            Some(device) if !found.contains(device) => found.push(device.clone()),
            _ => break,
        }
    }
    found
}

/// Which GPU takes the place of each that the driver has shown a job: of those that the job `had`, one of those that it
/// `may` use, the same one, or else another of its kind, each for one only; where there are several, one that can be
/// claimed, since others may restart here at the same time. What was `hidden` from it gets what is left: the driver wants a
/// place for every GPU that it had seen itself, and is not told of `CUDA_VISIBLE_DEVICES`. None at all where those that it
/// had are all the same.
pub(crate) fn pairs(
    (had, hidden): (&[Device], &[Device]),
    (all, may): (&[Device], &[Device]),
    claim: &mut dyn FnMut(&Device) -> bool,
) -> Result<Vec<Pair>, Missing> {
    let is_in = |devices: &[Device], d: &Device| devices.iter().any(|h| h.uuid == d.uuid);
    for own in had.iter().filter(|d| is_in(may, d)) {
        // Others go elsewhere, where they can.
        claim(own);
    }
    if had.iter().all(|d| is_in(may, d)) {
        return Ok(Vec::new());
    }
    let mut free: Vec<&Device> = may.iter().filter(|h| !is_in(had, h)).collect();
    let mut find = |d: &Device| {
        if is_in(may, d) {
            return Ok(Pair::of(d, d));
        }
        let of_kind = |f: &&Device| f.name == d.name;
        let claimed = free.iter().position(|f| of_kind(f) && claim(f));
        let Some(at) = claimed.or_else(|| free.iter().position(of_kind)) else {
            let (d, there) = (d.told(), listed(may));
            return Err(Missing::Had(format!(
                "the job had a GPU {d}, and none of this kind is free here, {there}"
            )));
        };
        Ok(Pair::of(d, free.remove(at)))
    };
    let mut pairs = had.iter().map(&mut find).collect::<Result<Vec<_>, _>>()?;
    // Those that stay come first: their places are not for others.
    let (stay, go): (Vec<_>, Vec<_>) = hidden
        .iter()
        .partition(|d| is_in(all, d) && !pairs.iter().any(|p| p.new == d.uuid));
    pairs.extend(stay.iter().map(|d| Pair::of(d, d)));
    for d in go {
        let place = all
            .iter()
            .find(|f| f.name == d.name && !pairs.iter().any(|p| p.new == f.uuid));
        let place = place.ok_or_else(|| {
            let (d, there) = (d.told(), listed(all));
            Missing::Hidden(format!(
                "the driver had counted a GPU {d} too, which the job was not to see, and wants a place for it; none of this kind is left here, {there}"
            ))
        })?;
        pairs.push(Pair::of(d, place));
    }
    Ok(pairs)
}

/// The kinds of `devices`, for who wants another one.
fn listed(devices: &[Device]) -> String {
    let names: Vec<&str> = devices.iter().map(|h| h.name.as_str()).collect();
    match names.as_slice() {
        [] => "where there are none".to_owned(),
        names => format!("where there are: {}", names.join(", ")),
    }
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
            let pairs = pairs((&own(had), &[]), (&own(has), &own(has)), &mut |_| true)?;
            Ok::<_, Missing>(pairs.iter().map(|p| (p.old[0], p.new[0])).collect::<Vec<_>>())
        };
        assert_eq!(of(&[&a], &[&b, &a]), Ok(vec![]));
        assert_eq!(of(&[&a, &b], &[&c, &a, &other]), Ok(vec![(1, 1), (2, 3)]));
        let missing = of(&[&a, &b], &[&other, &c]);
        assert!(matches!(missing, Err(Missing::Had(why)) if why.contains("GPU A (GPU-02020202-") && why.ends_with("B, A")));
        assert!(of(&[&other], &[&a]).is_err() && of(&[&a], &[]).is_err());
        assert_eq!(of(&[], &[&a]), Ok(vec![]));
        // In their order.
        let d = device(5, "A");
        assert_eq!(of(&[&a, &b], &[&c, &d]), Ok(vec![(1, 3), (2, 5)]));
        assert_eq!(of(&[&other, &a, &b], &[&other, &c, &d]), Ok(vec![(4, 4), (1, 3), (2, 5)]));
    }

    #[test]
    fn what_was_hidden_gets_what_is_left() {
        let [a, b, c, d] = [1, 2, 3, 4].map(|n| device(n, "A"));
        let other = device(5, "B");
        let of = |hidden: &[&Device], all: &[&Device], may: &[&Device]| {
            let [hidden, all, may] = [hidden, all, may].map(|d| d.iter().map(|d| (*d).clone()).collect::<Vec<_>>());
            let pairs = pairs((std::slice::from_ref(&a), &hidden), (&all, &may), &mut |_| true)?;
            Ok::<_, Missing>(pairs.iter().map(|p| (p.old[0], p.new[0])).collect::<Vec<_>>())
        };
        assert_eq!(of(&[&b], &[&a, &b], &[&a]), Ok(vec![]));
        // What the job may use now was hidden before.
        assert_eq!(of(&[&b, &other], &[&a, &b, &other], &[&b]), Ok(vec![(1, 2), (5, 5), (2, 1)]));
        // On another host, which has more.
        assert_eq!(of(&[&b], &[&c, &d, &other], &[&d]), Ok(vec![(1, 4), (2, 3)]));
        let is_missing = |missing, words: &str| matches!(missing, Err(Missing::Hidden(why)) if why.contains(words));
        let whole = "B (GPU-05050505-0505-0505-0505-050505050505)";
        assert!(is_missing(of(&[&b, &other], &[&c, &d], &[&d]), whole));
        assert!(is_missing(of(&[&b], &[&c], &[&c]), "GPU-02020202"));
    }

    #[test]
    fn what_others_have_claimed_is_taken_last() {
        let [a, b, c, d] = [1, 2, 3, 4].map(|n| device(n, "A"));
        let of = |had: &[Device], may: &[Device], taken: &[u8]| {
            let mut claimed = Vec::new();
            let pairs = pairs((had, &[]), (may, may), &mut |d| {
                let free = !taken.contains(&d.uuid[0]);
                claimed.extend(free.then_some(d.uuid[0]));
                free
            });
            (pairs.unwrap().iter().map(|p| p.new[0]).collect::<Vec<_>>(), claimed)
        };
        let both = [c.clone(), d.clone()];
        assert_eq!(of(std::slice::from_ref(&a), &both, &[]), (vec![3], vec![3]));
        assert_eq!(of(std::slice::from_ref(&a), &both, &[3]), (vec![4], vec![4]));
        assert_eq!(of(std::slice::from_ref(&a), &both, &[3, 4]), (vec![3], vec![]));
        assert_eq!(of(&[a.clone(), b], &[a, c], &[]), (vec![1, 3], vec![1, 3]));
    }

    #[test]
    fn those_that_the_environment_names_are_used() {
        let all: Vec<Device> = (0u8..3).map(|n| device(n * 17, "A")).collect();
        let named = |text| visible(&all, text).iter().map(|d| d.uuid[0] / 17).collect::<Vec<_>>();
        assert_eq!(named("2, 0"), [2, 0]);
        assert_eq!(named("GPU-11111111-1111,GPU-22"), [1, 2]);
        for (text, those) in [
            ("", &[][..]),
            ("-1,0", &[]),
            ("1,7,0", &[1]),
            ("0,0", &[0]),
            ("GPU-", &[]),
            ("x", &[]),
        ] {
            assert_eq!(named(text), those, "{text}");
        }
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
