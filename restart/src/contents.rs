//! Contents of shared memory and files, read from the chunks of the generation.

use belay_image::extents::{self, Extent};
use belay_image::ImageError;
use belay_kernel::direct::Buffer;
use belay_plugins::{Group, PageSource};
use belay_storage::chunk::Chunk;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ops::Range;
use std::time::{Duration, Instant};

/// How often other nodes hear, while contents are read, that this one is there.
const PAUSE: Duration = Duration::from_millis(50);

/// Where the contents of a generation lie.
#[derive(Debug)]
pub(crate) struct Contents<'a> {
    table: &'a [Extent],
    chunks: &'a HashMap<u32, Chunk>,
    group: Option<&'a dyn Group>,
    attended: Cell<Option<Instant>>,
    /// What has been read, and so found to be what was written.
    read: RefCell<Vec<Pages>>,
}

/// Pages of a chunk.
pub type Pages = (u32, Range<u32>);

impl<'a> Contents<'a> {
    /// What `table` places in `chunks`. To read all of it may take this node much longer than others of `group`, which
    /// wait at the next meeting.
    pub(crate) fn new(table: &'a [Extent], chunks: &'a HashMap<u32, Chunk>, group: Option<&'a dyn Group>) -> Self {
        Self {
            table,
            chunks,
            group,
            attended: Cell::new(None),
            read: RefCell::default(),
        }
    }

    /// What nobody has read: files are left alone that are as they were.
    pub(crate) fn unread(&self) -> Vec<Pages> {
        let mut read = self.read.borrow().clone();
        read.sort_unstable_by_key(|(chunk, pages)| (*chunk, pages.start));
        let mut out = Vec::new();
        for e in self.table {
            let pages = u32::try_from(e.pages()).unwrap_or(u32::MAX);
            let (mut at, end) = (e.page, e.page.saturating_add(pages));
            let of_chunk = read.partition_point(|(chunk, _)| *chunk < e.chunk);
            for (_, r) in read[of_chunk..]
                .iter()
                .take_while(|(chunk, r)| *chunk == e.chunk && r.start < end)
            {
                if at < r.start {
                    out.push((e.chunk, at..r.start));
                }
                at = at.max(r.end);
            }
            if at < end {
                out.push((e.chunk, at..end));
            }
        }
        out
    }

    fn attend(&self) {
        let Some(group) = self.group else { return };
        if self.attended.get().is_none_or(|at| at.elapsed() >= PAUSE) {
            group.attend();
            self.attended.set(Some(Instant::now()));
        }
    }
}

impl PageSource for Contents<'_> {
    fn within(&self, range: Range<u64>) -> Vec<Extent> {
        let mut out = Vec::new();
        // What begins in one page too many is cut by whoever knows the length.
        let end = range.end.checked_next_multiple_of(extents::PAGE).unwrap_or(range.end);
        extents::within(self.table, range.start, end, &mut out);
        out
    }

    fn read(&self, part: &Extent, into: &mut Buffer) -> Result<(), ImageError> {
        self.attend();
        let pages = u32::try_from(part.pages()).unwrap_or(u32::MAX);
        let chunk = self.chunks.get(&part.chunk).ok_or_else(|| ImageError::Damaged {
            path: format!("chunk {}", part.chunk),
            reason: "it is not in the manifest".into(),
        })?;
        chunk.read(part.page, pages, into)?;
        self.read
            .borrow_mut()
            .push((part.chunk, part.page..part.page.saturating_add(pages)));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use belay_plugins::{Brought, Facts};
    use std::fs::File;

    const PAGE: usize = extents::PAGE as usize;

    /// Counts how often it is attended to.
    #[derive(Debug, Default)]
    struct Counter(Cell<u32>);

    impl Group for Counter {
        fn meet(&self, _: Brought) -> Result<Facts, String> {
            unreachable!("nobody meets while contents are read")
        }

        fn job(&self) -> u64 {
            0
        }

        fn attend(&self) {
            self.0.set(self.0.get() + 1);
        }
    }

    #[test]
    fn what_lies_between_what_was_read_is_unread() {
        let extent = |chunk, page, pages| Extent {
            vaddr: u64::from(page) << 20,
            bytes: pages * extents::PAGE,
            chunk,
            page,
        };
        let (table, chunks) = ([extent(3, 0, 10), extent(4, 0, 2), extent(3, 20, 5)], HashMap::new());
        let contents = Contents::new(&table, &chunks, None);
        contents
            .read
            .replace(vec![(3, 22..30), (5, 0..9), (3, 2..4), (3, 3..6), (3, 0..1)]);
        assert_eq!(contents.unread(), [(3, 1..2), (3, 6..10), (4, 0..2), (3, 20..22)]);
    }

    #[test]
    fn other_nodes_hear_of_this_one_while_contents_are_read() {
        let path = std::env::temp_dir().join(format!("belay-contents-{}", std::process::id()));
        std::fs::write(&path, [5; PAGE]).unwrap();
        let chunk = Chunk {
            file: File::open(&path).unwrap(),
            path: path.clone(),
            hashes: vec![belay_storage::page_checksum(&[5; PAGE]).into()],
        };
        std::fs::remove_file(path).unwrap();
        let chunks = HashMap::from([(7, chunk)]);
        let page = Extent {
            vaddr: 0,
            bytes: extents::PAGE,
            chunk: 7,
            page: 0,
        };
        let (table, counter) = ([page], Counter::default());
        let contents = Contents::new(&table, &chunks, Some(&counter));
        assert_eq!(contents.unread(), [(7, 0..1)]);
        let (begin, mut buf) = (Instant::now(), Buffer::default());
        while counter.0.get() < 3 {
            contents.read(&page, &mut buf).unwrap();
            assert!(begin.elapsed() < 100 * PAUSE, "heard {} times", counter.0.get());
        }
        assert_eq!(buf[..], [5; PAGE]);
        assert!(contents.unread().is_empty());
        // Not with each of the pages, which may be millions.
        assert!(begin.elapsed() >= 2 * PAUSE);
    }
}
