//! Whether what is told of descriptors can be so: what the rebuild takes for granted, checked before anything is made. Pure.

use crate::kinds::KINDS;
use crate::model::{is_number, Descriptors};
use std::collections::HashMap;

impl Descriptors {
    /// What is wrong with them, where the threads of the job are `threads`, by process.
    pub fn check(&self, threads: &HashMap<i32, i32>) -> Result<(), String> {
        self.check_tables(threads)?;
        self.check_slots()?;
        self.descriptions.iter().enumerate().try_for_each(|(id, d)| {
            let checked = d.kind.check(self);
            checked.map_err(|what| format!("description {id} ({}): {what}", d.name))
        })?;
        KINDS.iter().try_for_each(|kind| (kind.check_part)(self))
    }

    /// Each number stands once in its table, for a description that there is.
    fn check_slots(&self) -> Result<(), String> {
        for table in &self.tables {
            let of = table.pids.first().copied().unwrap_or_default();
            let mut behind = 0;
            for slot in &table.slots {
                if slot.fd < behind || !is_number(slot.fd) {
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::Kind;
    use crate::launcher::{Launcher, Numbers};
    use crate::model::{Description, FsPath, Holder, Slot, Table};
    use crate::pipes::{End, Pipes};
    use crate::state::Described;
    use crate::terminals::{Side, Terminal};

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
                kind: Described::new(Launcher::NAME, Numbers(vec![0])),
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
            ("unknown", &|d| d.descriptions[0].kind = Described::new(Pipes::NAME, End(0))),
            ("unknown", &|d| {
                d.descriptions[0].kind = Described::new(Terminal::NAME, Side::Slave(3))
            }),
            ("none of the three", &|d| {
                d.descriptions[0].kind = Described::new(Launcher::NAME, Numbers(vec![3]))
            }),
        ];
        for (part, change) in bad {
            let why = check(change).unwrap_err();
            assert!(why.contains(part), "{why} lacks {part}");
        }
    }
}
