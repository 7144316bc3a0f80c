//! `[redundancy]` of the configuration, and what it amounts to.

use crate::Failure;
use belay_redundancy::{layout, Scheme};
use belay_wire::Exit;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Hosts of a group, where the configuration does not say.
const GROUP: usize = 4;

/// `[redundancy]`; what is not given has its default.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Redundancy {
    /// `partner`, `xor` or `reed-solomon`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheme: Option<Scheme>,
    /// Hosts of a group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<usize>,
    /// How many hosts of a group may be lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parity: Option<usize>,
    /// Directory on every host's own disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local: Option<PathBuf>,
    /// Hosts that fail together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domains: Option<Vec<Vec<String>>>,
}

impl Redundancy {
    /// Lays what `other` says over this.
    pub fn add(&mut self, other: Self) {
        self.scheme = other.scheme.or(self.scheme);
        self.group = other.group.or(self.group);
        self.parity = other.parity.or(self.parity);
        self.local = other.local.or(self.local.take());
        self.domains = other.domains.or(self.domains.take());
    }

    /// Understands `SCHEME[:GROUP[:PARITY]]` of the command line.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut words = text.split(':');
        let scheme = match words.next() {
            Some("partner") => Scheme::Partner,
            Some("xor") => Scheme::Xor,
            Some("reed-solomon") => Scheme::ReedSolomon,
            other => return Err(format!("{}: not partner, xor or reed-solomon", other.unwrap_or_default())),
        };
        let mut number = || {
            words
                .next()
                .map(|w| w.parse().map_err(|_| format!("{w}: not a number of hosts")))
                .transpose()
        };
        let (group, parity) = (number()?, number()?);
        if words.next().is_some() {
            return Err("SCHEME, SCHEME:GROUP or SCHEME:GROUP:PARITY".into());
        }
        let found = Self {
            scheme: Some(scheme),
            group,
            parity,
            ..Self::default()
        };
        found.check().map(|()| found)
    }

    /// What cannot be.
    pub fn check(&self) -> Result<(), String> {
        let parity = self.parity.unwrap_or(1);
        if !(1..layout::MAX_MEMBERS).contains(&parity) {
            return Err(format!("parity: 1 to {} are allowed", layout::MAX_MEMBERS - 1));
        }
        if self.scheme == Some(Scheme::Xor) && parity != 1 {
            return Err("parity: 1 with scheme xor; reed-solomon survives more".into());
        }
        let group = self.group.unwrap_or(layout::MAX_MEMBERS);
        if group <= parity || group > layout::MAX_MEMBERS {
            return Err(format!("group: {} to {} are allowed", parity + 1, layout::MAX_MEMBERS));
        }
        if self.local.as_ref().is_some_and(|p| !p.is_absolute()) {
            return Err("local: an absolute path of a directory on every host's own disk is needed".into());
        }
        Ok(())
    }

    /// What it amounts to; none without a scheme.
    pub fn settings(&self) -> Result<Option<Settings>, Failure> {
        let Some(scheme) = self.scheme else { return Ok(None) };
        let local = self.local.clone().ok_or_else(|| {
            let why = "redundancy: local: a directory on every host's own disk is needed (--local-dir, or local in [redundancy])";
            Failure::new(Exit::Usage, why)
        })?;
        let parity = self.parity.unwrap_or(if scheme == Scheme::ReedSolomon { 2 } else { 1 });
        let settings = Settings {
            scheme,
            group: self.group.unwrap_or(GROUP.max(parity + 2)),
            parity,
            local,
            domains: self.domains.clone().unwrap_or_default(),
        };
        self.check()
            .map_err(|what| Failure::new(Exit::Usage, format!("redundancy: {what}")))?;
        Ok(Some(settings))
    }
}

/// How a job is made redundant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The scheme.
    pub scheme: Scheme,
    /// Hosts of a group.
    pub group: usize,
    /// How many hosts of a group may be lost.
    pub parity: usize,
    /// Directory on every host's own disk.
    pub local: PathBuf,
    /// Hosts that fail together; any other host is a domain of its own.
    pub domains: Vec<Vec<String>>,
}

impl Settings {
    /// The failure domain of a host with these names.
    pub(crate) fn domain(&self, names: [&str; 2]) -> String {
        let at = self
            .domains
            .iter()
            .position(|d| d.iter().any(|h| names.contains(&h.as_str())));
        at.map_or_else(|| format!("host {}", names[0]), |n| format!("domain {}", n + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_the_command_line() {
        let r = Redundancy::parse("reed-solomon:6:2").unwrap();
        assert_eq!((r.scheme, r.group, r.parity), (Some(Scheme::ReedSolomon), Some(6), Some(2)));
        assert_eq!(Redundancy::parse("partner").unwrap().group, None);
        for bad in [
            "",
            "raid",
            "xor:x",
            "xor:4:2",
            "xor:1",
            "partner:2:0",
            "partner:2:2",
            "xor:3:1:1",
            "xor:1000",
        ] {
            assert!(Redundancy::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_place_on_the_hosts_is_needed_and_later_words_count() {
        let mut r = Redundancy::parse("reed-solomon").unwrap();
        assert!(r.settings().unwrap_err().message.contains("--local-dir"));
        r.add(Redundancy {
            local: Some("/x".into()),
            ..Redundancy::default()
        });
        r.add(Redundancy::parse("xor:3").unwrap());
        let s = r.settings().unwrap().unwrap();
        assert_eq!((s.scheme, s.group, s.parity), (Scheme::Xor, 3, 1));
        assert_eq!(Redundancy::default().settings().unwrap(), None);
    }

    #[test]
    fn hosts_of_one_domain() {
        let r = Redundancy {
            local: Some("/x".into()),
            domains: Some(vec![vec!["a".into(), "b".into()], vec!["c".into()]]),
            ..Redundancy::parse("xor").unwrap()
        };
        let s = r.settings().unwrap().unwrap();
        assert_eq!(s.domain(["a", "10.0.0.1"]), s.domain(["10.0.0.2", "b"]));
        assert_ne!(s.domain(["a", "a"]), s.domain(["c", "c"]));
        assert_ne!(s.domain(["d", "d"]), s.domain(["e", "e"]));
    }
}
