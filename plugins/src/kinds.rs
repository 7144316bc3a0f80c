//! The table of all kinds of resources, and how the flows go through it.

use crate::builder::{Builder, Built};
use crate::fault::{Fault, Refusal};
use crate::kind::{Candidate, Kind, Look, Place, Ways};
use crate::model::{DescId, Description, Descriptors, Slot, Stored};
use crate::session::Session;
use crate::state::{Described, Part, Parts};
use serde_json::Value;
use std::collections::BTreeMap;
use std::os::fd::{OwnedFd, RawFd};

/// All kinds. The first that recognises a description has it. The steps of a checkpoint go through them in this order,
/// those of a restart in the reverse one: what is captured last (contents of files) is made first.
pub(crate) static KINDS: &[Entry] = &[
    entry::<crate::launcher::Launcher>(),
    entry::<crate::eventfd::Eventfd>(),
    entry::<crate::signalfd::Signalfd>(),
    entry::<crate::timerfd::Timerfd>(),
    entry::<crate::epoll::Epoll>(),
    entry::<crate::inotify::Inotify>(),
    entry::<crate::pidfd::Pidfd>(),
    entry::<crate::perf::Perf>(),
    entry::<crate::infiniband::Infiniband>(),
    entry::<crate::cuda::Cuda>(),
    entry::<crate::pipes::Pipes>(),
    entry::<crate::terminals::Terminal>(),
    entry::<crate::shm::Mappings>(),
    entry::<crate::shm::claims::Claims>(),
    entry::<crate::sockets::netlink::Netlink>(),
    entry::<crate::sockets::udp::Udp>(),
    entry::<crate::sockets::tcp::Tcp>(),
    entry::<crate::sockets::unix::Unix>(),
    entry::<crate::sockets::options::Ahead>(),
    entry::<crate::locks::PosixLocks>(),
    entry::<crate::mqueue::Queues>(),
    entry::<crate::files::path::Paths>(),
    entry::<crate::shm::sysv::SystemV>(),
    entry::<crate::files::Files>(),
];

/// The steps of one kind, with its types put away. See [`Kind`].
pub(crate) struct Entry {
    pub(crate) name: &'static str,
    version: u32,
    part: &'static str,
    pub(crate) survey: fn(&mut Session<'_>),
    recognise: fn(&Look<'_>) -> bool,
    capture: fn(&mut Session<'_>, &Candidate<'_>) -> Result<Described, Fault>,
    pub(crate) finish: fn(&mut Session<'_>, &mut Descriptors, &mut Vec<Refusal>),
    pub(crate) contents: fn(&mut Session<'_>, &mut Descriptors) -> Result<(), Refusal>,
    read: fn(Value) -> Result<Described, serde_json::Error>,
    read_part: fn(Value, &mut Parts) -> Result<(), serde_json::Error>,
    check: fn(&Described, &Descriptors) -> Result<(), String>,
    pub(crate) check_part: fn(&Descriptors) -> Result<(), String>,
    numbers: fn(&Described) -> Vec<RawFd>,
    ways: fn(&Descriptors, &mut Ways),
    pub(crate) prepare: fn(&mut Builder<'_>) -> Result<(), Refusal>,
    rebuild: fn(&mut Builder<'_>, &Description) -> Result<Option<OwnedFd>, Fault>,
    pub(crate) join: fn(&mut Builder<'_>) -> Result<(), Refusal>,
    pub(crate) refill: fn(&mut Builder<'_>) -> Result<(), Refusal>,
    install: fn(&Place<'_>) -> Result<(), Fault>,
    install_late: fn(&Place<'_>, &Slot) -> Result<Option<OwnedFd>, Fault>,
    settle: fn(&Place<'_>) -> Result<(), Fault>,
    pub(crate) install_own: fn(&Descriptors, &Built, i32) -> Result<(), Refusal>,
    pub(crate) complete: fn(&Descriptors, &Built) -> Result<(), Refusal>,
}

/// The state of a description of kind `K`.
fn state<K: Kind>(described: &Described) -> &K::State {
    match described.get() {
        Some(state) => state,
        None => unreachable!("a description has the state of its kind"),
    }
}

const fn entry<K: Kind>() -> Entry {
    Entry {
        name: K::NAME,
        version: K::VERSION,
        part: K::Part::KEY,
        survey: K::survey,
        recognise: K::recognise,
        capture: |s, seen| K::capture(s, seen).map(|state| Described::new(K::NAME, state)),
        finish: K::finish,
        contents: K::contents,
        read: |value| serde_json::from_value::<K::State>(value).map(|state| Described::new(K::NAME, state)),
        read_part: |value, parts| serde_json::from_value::<K::Part>(value).map(|part| parts.put(part)),
        check: |described, d| K::check(state::<K>(described), d),
        check_part: |d| d.parts.get::<K::Part>().map_or(Ok(()), |part| K::check_part(part, d)),
        numbers: |described| K::numbers(state::<K>(described)),
        ways: K::ways,
        prepare: K::prepare,
        rebuild: |b, desc| K::rebuild(b, desc, state::<K>(&desc.kind)),
        join: K::join,
        refill: K::refill,
        install: |at| K::install(at, state::<K>(&at.desc.kind)),
        install_late: |at, slot| K::install_late(at, slot, state::<K>(&at.desc.kind)),
        settle: |at| K::settle(at, state::<K>(&at.desc.kind)),
        install_own: K::install_own,
        complete: K::complete,
    }
}

/// The kind of this name.
fn named(name: &str) -> Option<&'static Entry> {
    KINDS.iter().find(|kind| kind.name == name)
}

impl Described {
    fn entry(&self) -> &'static Entry {
        match named(self.kind()) {
            Some(entry) => entry,
            None => unreachable!("a description has a kind of the table"),
        }
    }

    /// See [`Kind::check`].
    pub(crate) fn check(&self, d: &Descriptors) -> Result<(), String> {
        (self.entry().check)(self, d)
    }

    /// See [`Kind::numbers`].
    pub(crate) fn numbers(&self) -> Vec<RawFd> {
        (self.entry().numbers)(self)
    }
}

/// Captures the description that looks so, by the first kind that recognises it.
pub(crate) fn capture(s: &mut Session<'_>, seen: &Candidate<'_>) -> Option<Result<Described, Fault>> {
    let kind = KINDS.iter().find(|kind| (kind.recognise)(&seen.look))?;
    Some((kind.capture)(s, seen))
}

/// See [`Kind::rebuild`].
pub(crate) fn rebuild(b: &mut Builder<'_>, desc: &Description) -> Result<Option<OwnedFd>, Fault> {
    (desc.kind.entry().rebuild)(b, desc)
}

impl Place<'_> {
    /// See [`Kind::install`].
    pub(crate) fn install(&self) -> Result<(), Fault> {
        (self.desc.kind.entry().install)(self)
    }

    /// See [`Kind::install_late`].
    pub(crate) fn install_late(&self, slot: &Slot) -> Result<Option<OwnedFd>, Fault> {
        (self.desc.kind.entry().install_late)(self, slot)
    }

    /// See [`Kind::settle`].
    pub(crate) fn settle(&self) -> Result<(), Fault> {
        (self.desc.kind.entry().settle)(self)
    }
}

/// See [`Kind::ways`].
pub(crate) fn ways(d: &Descriptors) -> Ways {
    let mut all = Ways::default();
    for kind in KINDS {
        (kind.ways)(d, &mut all);
    }
    all
}

/// For each kind that `d` has anything of, the version of what it writes.
pub(crate) fn versions(d: &Descriptors) -> BTreeMap<&'static str, u32> {
    let occurs = |kind: &&Entry| {
        let is_part = |(key, _)| key == kind.part;
        d.descriptions.iter().any(|desc| desc.kind.kind() == kind.name) || d.parts.all().any(is_part)
    };
    KINDS.iter().filter(occurs).map(|kind| (kind.name, kind.version)).collect()
}

impl TryFrom<Stored> for Descriptors {
    type Error = String;

    fn try_from(stored: Stored) -> Result<Self, String> {
        for (name, version) in &stored.versions {
            let known = named(name).map_or(0, |kind| kind.version);
            if *version > known {
                return Err(format!(
                    "{name} of version {version}, and this belay knows version {known}: use one that is as new as the checkpoint"
                ));
            }
        }
        let mut parts = Parts::default();
        for (key, value) in stored.parts {
            if let Some(kind) = KINDS.iter().find(|kind| kind.part == key && !key.is_empty()) {
                (kind.read_part)(value, &mut parts).map_err(|e| format!("{key}: {e}"))?;
            }
        }
        let read = |(id, desc): (DescId, Description<BTreeMap<String, Value>>)| {
            let kind = described(desc.kind).map_err(|e| format!("description {id} ({}): {e}", desc.name))?;
            Ok(Description {
                holder: desc.holder,
                name: desc.name,
                flags: desc.flags,
                pos: desc.pos,
                owner: desc.owner,
                locks: desc.locks,
                kind,
            })
        };
        let descriptions = stored.descriptions.into_iter().enumerate().map(read);
        let mut d = Self {
            descriptions: descriptions.collect::<Result<_, String>>()?,
            tables: stored.tables,
            working: stored.working,
            sessions: stored.sessions,
            entered: stored.entered,
            parts,
            notes: stored.notes,
            ..Self::default()
        };
        d.versions = versions(&d);
        Ok(d)
    }
}

/// State under the name of its kind.
fn described(stored: BTreeMap<String, Value>) -> Result<Described, String> {
    let mut all = stored.into_iter();
    let (Some((name, state)), None) = (all.next(), all.next()) else {
        return Err("not one kind".into());
    };
    let kind = named(&name).ok_or_else(|| format!("{name} is a kind that this belay does not know"))?;
    (kind.read)(state).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eventfd::Eventfd;
    use crate::mqueue::QueueObject;
    use crate::pipes::{End, Pipes};
    use serde_json::json;
    use std::collections::{HashMap, HashSet};

    fn image(description: &Value, versions: &Value) -> Result<Descriptors, serde_json::Error> {
        let description = json!({
            "holder": {"pid": 1, "fd": 3}, "name": "x", "flags": 0, "pos": 0, "owner": null, "locks": [], "kind": description,
        });
        serde_json::from_value(json!({
            "tables": [], "descriptions": [description], "working": [], "notes": [], "versions": versions,
            "queues": [], "pipes": [{"fifo": null, "capacity": 4096, "data": [], "packets": false}],
        }))
    }

    #[test]
    fn no_two_kinds_have_one_name() {
        let names: HashSet<&str> = KINDS.iter().map(|kind| kind.name).collect();
        let parts: Vec<&str> = KINDS.iter().map(|kind| kind.part).filter(|part| !part.is_empty()).collect();
        assert_eq!(names.len(), KINDS.len());
        assert_eq!(parts.iter().collect::<HashSet<_>>().len(), parts.len());
    }

    #[test]
    fn what_is_written_is_read_as_what_it_was() {
        let d = image(&json!({"Pipe": 0}), &json!({})).unwrap();
        assert_eq!(d.versions, BTreeMap::from([(Pipes::NAME, Pipes::VERSION), ("Queue", 1)]));
        let d: Descriptors = serde_json::from_value(serde_json::to_value(&d).unwrap()).unwrap();
        assert!(matches!(d.descriptions[0].kind.get(), Some(End(0))));
        assert!(d.list::<QueueObject>().is_empty() && d.check(&HashMap::new()).is_ok());
        let d = image(&json!({"Eventfd": {"count": 7, "semaphore": true}}), &json!({"Eventfd": 1})).unwrap();
        let text = serde_json::to_string(&d.descriptions[0].kind).unwrap();
        assert_eq!(text, r#"{"Eventfd":{"count":7,"semaphore":true}}"#);
        assert_eq!(d.clone().descriptions[0].kind.kind(), Eventfd::NAME);
    }

    #[test]
    fn what_a_newer_belay_has_written_is_refused() {
        let pipe = json!({"Pipe": 0});
        for (description, versions, why) in [
            (&pipe, json!({"Pipe": 3}), "Pipe of version 3, and this belay knows version 2"),
            (
                &pipe,
                json!({"Hologram": 1}),
                "Hologram of version 1, and this belay knows version 0",
            ),
            (
                &json!({"Hologram": {}}),
                json!({}),
                "description 0 (x): Hologram is a kind that this belay does not know",
            ),
            (&json!({"Pipe": 0, "Queue": 0}), json!({}), "not one kind"),
            (&json!({"Pipe": -1}), json!({}), "description 0 (x): invalid value"),
        ] {
            let told = image(description, &versions).unwrap_err().to_string();
            assert!(told.contains(why), "{told} lacks {why}");
        }
    }
}
