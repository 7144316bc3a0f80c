//! Access rights of datasets.

use belay_access::block::Block;
use belay_access::live::join;
use belay_access::shape::Shape;
use belay_kernel::pages::are_mapped;
use std::io;

pub(super) const PAGE: u64 = belay_abi::PAGE;

/// Whole pages of a dataset: nothing else lies there.
pub(super) fn inner(shape: &Shape) -> (u64, u64) {
    let (start, end) = shape.range();
    let (start, end) = (start.next_multiple_of(PAGE), end & !(PAGE - 1));
    (start, end.max(start))
}

/// Whether this page is one of them.
pub(super) fn holds(shape: &Shape, page: u64) -> bool {
    let (start, end) = inner(shape);
    (start..end).contains(&page)
}

/// The whole pages of a dataset on which parts of it lie, as runs in ascending order.
pub(super) fn pages<'a>(shape: &Shape, parts: impl Iterator<Item = &'a Block>) -> Vec<(u64, u64)> {
    let inner = inner(shape);
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for part in parts {
        // With what lies between its elements.
        if *part == shape.whole() {
            return vec![inner];
        }
        shape.visit(part, &mut |start, end| {
            let (start, end) = (start & !(PAGE - 1), end.next_multiple_of(PAGE));
            let run = (start.max(inner.0), end.min(inner.1));
            match runs.last_mut() {
                _ if run.0 >= run.1 => {}
                Some(last) if last.0 <= run.0 && run.0 <= last.1 => last.1 = last.1.max(run.1),
                _ => runs.push(run),
            }
        });
    }
    join(&mut runs);
    runs
}

/// Whether this page is in one of these runs.
pub(super) fn has(runs: &[(u64, u64)], page: u64) -> bool {
    let behind = runs.partition_point(|run| run.0 <= page);
    behind > 0 && page < runs[behind - 1].1
}

/// Bytes of a page that lie between two addresses.
pub(super) fn common(page: u64, start: u64, end: u64) -> u64 {
    (page + PAGE).min(end).saturating_sub(page.max(start))
}

/// Whether there is memory from `start` to `end`, wherever in pages that begins and ends.
pub(super) fn is_mapped((start, end): (u64, u64)) -> bool {
    let start = start & !(PAGE - 1);
    are_mapped(start, end.next_multiple_of(PAGE) - start)
}

/// Allows pages to be read, and to be written.
pub(super) fn allow((start, end): (u64, u64), read: bool, write: bool) -> io::Result<()> {
    if start == end {
        return Ok(());
    }
    let right = |is, right| if is { right } else { libc::PROT_NONE };
    let rights = right(read, libc::PROT_READ) | right(write, libc::PROT_WRITE);
    // SAFETY: whole pages of a dataset that the program has declared; who touches them all the same comes to `segv`.
    match unsafe { libc::mprotect(start as *mut libc::c_void, (end - start) as usize, rights) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_the_pages_that_they_lie_on() {
        let at = |pages: u64| pages * PAGE;
        // Ten rows of two pages, from the middle of a page on: the first and the last page are not whole.
        let shape = Shape::dense(at(8) + PAGE / 2, 8, &[PAGE / 4, 10]).unwrap();
        let of = |parts: &[([i64; 2], [i64; 2])]| {
            let parts: Vec<Block> = parts.iter().map(|(lo, hi)| Block::new(lo, hi)).collect();
            pages(&shape, parts.iter())
        };
        assert_eq!(of(&[([0, 0], [PAGE as i64 / 4, 10])]), [(at(9), at(28))]);
        assert_eq!(of(&[([0, 3], [1, 3])]), []);
        assert_eq!(of(&[([0, 0], [1, 10])])[..2], [(at(10), at(11)), (at(12), at(13))]);
        assert_eq!(of(&[([0, 1], [1024, 3])]), [(at(10), at(15))]);
        // What lies on the first and the last page alone has no whole one.
        assert_eq!(of(&[([0, 0], [1, 1]), ([1023, 9], [1024, 10])]), []);
        let both = of(&[([0, 4], [1024, 5]), ([0, 1], [1024, 2]), ([0, 2], [1, 3])]);
        assert_eq!(both, [(at(10), at(13)), (at(16), at(19))]);
        for (page, is) in [
            (9, false),
            (10, true),
            (12, true),
            (13, false),
            (15, false),
            (18, true),
            (19, false),
        ] {
            assert_eq!(has(&both, at(page)), is, "{page}");
        }
    }
}
