//! Whether what is told of descriptors can be so: what the rebuild takes for granted, checked before anything is made. Pure.

use crate::model::{Descriptors, Kind};
use crate::terminals::Side;
use std::collections::{BTreeSet, HashMap};

/// Largest number of a descriptor: the kernel's limit of limits (`fs.nr_open`).
const MOST: i32 = 0x7fff_ffc0;

impl Descriptors {
    /// What is wrong with them, where the threads of the job are `threads`, by process.
    pub fn check(&self, threads: &HashMap<i32, i32>) -> Result<(), String> {
        self.check_tables(threads)?;
        self.check_slots()?;
        self.descriptions.iter().enumerate().try_for_each(|(id, d)| {
            let checked = self.check_kind(&d.kind);
            checked.map_err(|what| format!("description {id} ({}): {what}", d.name))
        })?;
        for file in &self.files {
            if file.path.as_path().as_os_str().as_encoded_bytes().contains(&0) {
                return Err(format!("file {}: no path of a file", file.path));
            }
            let bytes = file.content.map_or(file.bytes, |content| content.bytes.max(file.bytes));
            if i64::try_from(bytes).is_err() || file.content.is_some_and(|content| !content.is_possible()) {
                return Err(format!("file {}: {bytes} bytes, more than any file", file.path));
            }
        }
        Ok(())
    }

    /// Each number stands once in its table, for a description that there is.
    fn check_slots(&self) -> Result<(), String> {
        for table in &self.tables {
            let of = table.pids.first().copied().unwrap_or_default();
            let mut behind = 0;
            for slot in &table.slots {
                if slot.fd < behind || slot.fd >= MOST {
                    return Err(format!(
                        "task {of}: descriptor {} is out of order, or no possible number",
                        slot.fd
                    ));
                }
                behind = slot.fd + 1;
                self.is_description(slot.desc)
                    .map_err(|what| format!("task {of}: descriptor {}: {what}", slot.fd))?;
            }
        }
        Ok(())
    }

    fn is_description(&self, id: usize) -> Result<(), String> {
        match self.descriptions.get(id) {
            Some(_) => Ok(()),
            None => Err(format!("description {id} is unknown")),
        }
    }

    /// What a description refers to is there.
    fn check_kind(&self, kind: &Kind) -> Result<(), String> {
        let one_of = |at: usize, there: usize| {
            if at < there {
                Ok(())
            } else {
                Err("refers to an object that is unknown".to_owned())
            }
        };
        match kind {
            Kind::File(at) => one_of(*at, self.files.len()),
            Kind::Pipe(at) => one_of(*at, self.pipes.len()),
            Kind::Queue(at) => one_of(*at, self.queues.len()),
            Kind::Terminal(Side::Master(at) | Side::Slave(at)) => one_of(*at, self.terminals.ptys.len()),
            Kind::LauncherStdio(numbers) => {
                let known: BTreeSet<i32> = [0, 1, 2].into();
                let any = !numbers.is_empty() && numbers.iter().all(|n| known.contains(n));
                if any {
                    Ok(())
                } else {
                    Err("is none of the three of a launcher".into())
                }
            }
            Kind::Unix(u) => u
                .queue
                .iter()
                .flat_map(|m| &m.fds)
                .try_for_each(|id| self.is_description(*id)),
            Kind::Tcp(t) => t.refers_to().map_or(Ok(()), |id| self.is_description(id)),
            Kind::Epoll(e) => e.watched().try_for_each(|id| self.is_description(id)),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Description, FsPath, Holder, Slot, Table};

    /// A process whose descriptors 0 and 5 are one end of a pipe.
    fn descriptors() -> Descriptors {
        let slot = |fd| Slot {
            fd,
            desc: 0,
            cloexec: false,
        };
        Descriptors {
            tables: vec![Table {
                pids: vec![10],
                slots: vec![slot(0), slot(5)],
            }],
            descriptions: vec![Description {
                holder: Holder { pid: 10, fd: 0 },
                name: FsPath::default(),
                flags: 0,
                pos: 0,
                owner: None,
                locks: Vec::new(),
                kind: Kind::LauncherStdio(vec![0]),
            }],
            ..Descriptors::default()
        }
    }

    #[test]
    fn descriptors_that_lead_nowhere_are_refused() {
        let check = |change: &dyn Fn(&mut Descriptors)| {
            let mut d = descriptors();
            change(&mut d);
            d.check(&HashMap::from([(10, 10)]))
        };
        assert_eq!(check(&|_| ()), Ok(()));
        type Change<'a> = &'a dyn Fn(&mut Descriptors);
        let bad: [(&str, Change<'_>); 8] = [
            ("unknown", &|d| d.tables[0].slots[1].desc = 1),
            ("out of order", &|d| d.tables[0].slots[1].fd = 0),
            ("no possible number", &|d| d.tables[0].slots[1].fd = i32::MAX),
            ("no possible number", &|d| d.tables[0].slots[0].fd = -1),
            ("no descriptor table", &|d| d.tables.clear()),
            ("unknown", &|d| d.descriptions[0].kind = Kind::Pipe(0)),
            ("unknown", &|d| d.descriptions[0].kind = Kind::Terminal(Side::Slave(3))),
            ("none of the three", &|d| {
                d.descriptions[0].kind = Kind::LauncherStdio(vec![3])
            }),
        ];
        for (part, change) in bad {
            let why = check(change).unwrap_err();
            assert!(why.contains(part), "{why} lacks {part}");
        }
    }
}
