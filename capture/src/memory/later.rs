//! Pages of declared datasets are stored last: by then the program may have overwritten them without having read them,
//! and whoever restarts does the same again. Those are left out; of pages that hold little else, that little is packed.
//!
//! The copy of the process waits as long as that takes, but no longer than [`horizon`] from the stop on. What nothing
//! has been said of by then is stored.

use crate::access::{Declared, Waits};
use crate::memory::mappings;
use crate::memory::tracking::without;
use crate::CaptureError;
use belay_abi::inject::{Range, BATCH_BYTES};
use belay_access::pages::Spared;
use belay_access::site::Reach;
use belay_image::extents::Extent;
use belay_image::model::{LeftOut, Vma};
use belay_image::packed;
use belay_kernel::proc::Map;
use belay_kernel::vm::Memory;
use belay_storage::session::Session;
use std::time::{Duration, Instant};

const PAGE: u64 = 4096;
const READ_WRITE: u32 = (libc::PROT_READ | libc::PROT_WRITE) as u32;

/// How long after the stop uses of datasets are waited for, at least.
const HORIZON: Duration = Duration::from_secs(2);

/// Most bytes of packed pages: where there are more, the pages are stored whole.
const MOST_PACKED: u64 = 256 << 20;

/// How often they are looked for. The program does not wait; what it keeps meanwhile is its copy.
const TURN: Duration = Duration::from_millis(2);

/// The datasets of a process.
#[derive(Debug)]
pub(crate) struct Later {
    declared: Declared,
    /// Pages of theirs that may be left out, in ascending order.
    pages: Vec<(u64, u64)>,
    stopped: Instant,
    horizon: Duration,
}

/// How long after the stop uses of datasets are waited for, where the program goes around in `period`: once, and a quarter
/// more, as it runs beside the writers.
pub(crate) fn horizon(period: Duration) -> Duration {
    HORIZON.max(period * 5 / 4)
}

impl Later {
    /// Of a process that is stopped now, where it has declared some in memory that can be left out.
    pub(crate) fn of(pid: i32, maps: &[Map], (reach, horizon): (Reach, Duration), waits: Waits<'_>) -> Option<Self> {
        let declared = Declared::take(pid, maps, reach, waits)?;
        let plain = maps.iter().filter(|m| is_plain(m)).map(|m| (m.start, m.end));
        let plain: Vec<(u64, u64)> = plain.collect();
        let mut outside = Vec::new();
        let mut pages: Vec<(u64, u64)> = Vec::new();
        for (start, end) in declared.ranges() {
            let (start, end) = (start & !(PAGE - 1), end.next_multiple_of(PAGE));
            let start = pages.last().map_or(start, |last| start.max(last.1));
            outside.clear();
            without((start, end), &plain, &mut outside);
            without((start, end), &outside, &mut pages);
        }
        (!pages.is_empty()).then(|| Self {
            declared,
            pages,
            stopped: Instant::now(),
            horizon,
        })
    }

    /// Takes what is to be stored later out of `found`, as far as it lies where it `may` be left out.
    pub(crate) fn split(&self, found: Vec<Range>, may: impl Fn(&Range) -> bool) -> (Vec<Range>, Vec<Range>) {
        let (mut now, mut later) = (Vec::with_capacity(found.len()), Vec::new());
        let (mut left, mut rest) = (Vec::new(), Vec::new());
        for r in found {
            // What is not stored shows what the mapping has behind it: here, zeros.
            if r.flags != 0 || !may(&r) {
                now.push(r);
                continue;
            }
            let piece = |(start, end): &(u64, u64)| Range {
                start: *start,
                end: *end,
                ..r
            };
            left.clear();
            without((r.start, r.end), &self.pages, &mut left);
            now.extend(left.iter().map(piece));
            rest.clear();
            without((r.start, r.end), &left, &mut rest);
            later.extend(rest.iter().map(piece));
        }
        (now, later)
    }

    /// Waits until the program has used all of its datasets, or long enough. What need not be stored of `later`.
    pub(crate) fn wait(&mut self, later: &[Range], goes_on: &dyn Fn() -> bool) -> Spared {
        let ranges: Vec<(u64, u64)> = later.iter().map(|r| (r.start, r.end)).collect();
        while !ranges.is_empty() {
            match self.declared.look() {
                Ok(verdict) => {
                    if verdict.open_bytes() == 0 || self.stopped.elapsed() >= self.horizon || !goes_on() {
                        let mut spared = Spared::find(&ranges, &verdict.dead());
                        let bytes = spared.packed_bytes();
                        let most = |bytes: u64| bytes <= MOST_PACKED && bytes + places(&spared) <= packed::MOST_BYTES;
                        if !most(bytes) {
                            spared.packed.clear();
                        }
                        return spared;
                    }
                }
                Err(lost) => {
                    tracing::warn!(%lost, "what the program does with its datasets is not known: all of them are stored");
                    break;
                }
            }
            std::thread::sleep(TURN);
        }
        Spared::default()
    }

    /// What the image says of it.
    pub(crate) fn left_out(&self) -> LeftOut {
        let (way, whole_at) = self.declared.way();
        LeftOut {
            page: self.declared.address(),
            whole_at,
            way: way.to_vec(),
            ..LeftOut::default()
        }
    }
}

/// Bytes by which the stream of packed pages says where they lie.
fn places(spared: &Spared) -> u64 {
    packed::encode(&spared.packed).len() as u64
}

/// Whether memory can come back without its contents and its access rights, as ordinary memory of the program.
fn is_plain(map: &Map) -> bool {
    let named = map.name.to_str().unwrap_or_default();
    let private = !map.shared && map.ino == 0 && map.prot == READ_WRITE;
    private && mappings::pages(map) == mappings::Pages::Own && named != "[stack]" && mappings::huge(map).is_none()
}

/// Those of `later` that are stored although `spared` is known.
pub(crate) fn rest(later: &[Range], spared: &Spared) -> Vec<Range> {
    let gone = spared.gone();
    let (mut out, mut left) = (Vec::new(), Vec::new());
    for r in later {
        left.clear();
        without((r.start, r.end), &gone, &mut left);
        out.extend(left.iter().map(|(start, end)| Range {
            start: *start,
            end: *end,
            ..*r
        }));
    }
    out
}

/// Stores what is alive of packed pages of the copy whose `memory` this is; how long the stream is.
pub(crate) fn pack(session: &mut Session, memory: &Memory, spared: &Spared, table: &mut Vec<Extent>) -> Result<u64, CaptureError> {
    if spared.packed.is_empty() {
        return Ok(0);
    }
    let fail = |e| CaptureError::system("read packed pages", e);
    let mut stream = packed::encode(&spared.packed);
    let mut buf = vec![0; BATCH_BYTES as usize];
    let mut pieces = spared.packed.iter().peekable();
    for (start, end) in spared.packed_pages() {
        let mut at = start;
        while at < end {
            let n = (end - at).min(BATCH_BYTES);
            let read = &mut buf[..usize::try_from(n).unwrap_or_default()];
            memory.read(at, read).map_err(fail)?;
            // No piece reaches over the end of a page, and so of what was read.
            while let Some((from, to)) = pieces.next_if(|p| p.0 < at + n) {
                let place = |address: u64| usize::try_from(address - at).unwrap_or_default();
                stream.extend_from_slice(&read[place(*from)..place(*to)]);
            }
            at += n;
        }
    }
    let bytes = stream.len();
    stream.resize(bytes.next_multiple_of(PAGE as usize), 0);
    session.store_pages(packed::BASE, &stream, table)?;
    Ok(bytes as u64)
}

/// Takes the access rights of `dead` pages, in ascending order, out of the mappings; which they were.
pub(crate) fn without_rights(vmas: Vec<Vma>, dead: &[(u64, u64)]) -> (Vec<Vma>, Vec<(u64, u64, u32)>) {
    let (mut out, mut rights) = (Vec::with_capacity(vmas.len()), Vec::new());
    for vma in vmas {
        let its = |d: &&(u64, u64)| d.0 < vma.end && vma.start < d.1;
        if !dead.iter().any(|d| its(&d)) {
            out.push(vma);
            continue;
        }
        let piece = |start: u64, end: u64, prot: u32| Vma {
            start,
            end,
            prot,
            ..vma.clone()
        };
        let mut at = vma.start;
        for (start, end) in dead.iter().filter(its) {
            let (start, end) = ((*start).max(at), (*end).min(vma.end));
            if at < start {
                out.push(piece(at, start, vma.prot));
            }
            out.push(piece(start, end, 0));
            rights.push((start, end, vma.prot));
            at = end;
        }
        if at < vma.end {
            out.push(piece(at, vma.end, vma.prot));
        }
    }
    (out, rights)
}

#[cfg(test)]
mod tests {
    use super::*;
    use belay_image::model::VmaKind;

    #[test]
    fn who_goes_around_slowly_is_waited_for() {
        let ms = Duration::from_millis;
        assert_eq!([0, 300, 4000].map(|n| horizon(ms(n))), [ms(2000), ms(2000), ms(5000)]);
    }

    #[test]
    fn dead_pages_lose_their_rights() {
        let vma = |start: u64, end: u64, prot| Vma {
            start: start * PAGE,
            end: end * PAGE,
            prot,
            kind: VmaKind::Anonymous { name: None },
            flags: vec!["hg".into()],
            guards: Vec::new(),
            key: 0,
        };
        let dead = [(12, 14), (16, 20), (22, 24)].map(|(a, b)| (a * PAGE, b * PAGE));
        let (vmas, rights) = without_rights(vec![vma(0, 10, 1), vma(10, 20, 3), vma(22, 24, 3)], &dead);
        let expected = [
            vma(0, 10, 1),
            vma(10, 12, 3),
            vma(12, 14, 0),
            vma(14, 16, 3),
            vma(16, 20, 0),
            vma(22, 24, 0),
        ];
        assert_eq!(vmas, expected);
        assert_eq!(rights, dead.map(|(a, b)| (a, b, 3)));
    }
}
