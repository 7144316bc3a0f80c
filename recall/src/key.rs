//! Which file of a history, and what it is called.

/// Which file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) version: u64,
    pub(crate) serial: u64,
}

impl Key {
    pub(crate) fn name(self) -> String {
        format!("{:016x}-{:x}.version", self.version, self.serial)
    }

    /// What says that it is no version any more.
    pub(crate) fn gone(self) -> String {
        format!("{:016x}-{:x}.gone", self.version, self.serial)
    }

    /// What it is called while it is written.
    pub(crate) fn draft(self) -> String {
        format!("{:016x}-{:x}.new", self.version, self.serial)
    }

    pub(crate) fn parse(name: &str) -> Option<Self> {
        let (version, serial) = name.strip_suffix(".version")?.split_once('-')?;
        let number = |s: &str| u64::from_str_radix(s, 16).ok();
        let key = Key {
            version: number(version)?,
            serial: number(serial)?,
        };
        (key.name() == name).then_some(key)
    }

    pub(crate) fn parse_gone(name: &str) -> Option<Self> {
        Self::parse(&format!("{}.version", name.strip_suffix(".gone")?))
    }
}
