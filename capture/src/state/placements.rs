//! On which memory nodes memory shall lie (`set_mempolicy`, `mbind`), and segments of the program's own (`modify_ldt`):
//! asked of the process itself.

use crate::inject::{self, on_main, Area};
use crate::memory::mappings::{self, Pages};
use crate::state::draft::Draft;
use crate::stop::stopped::Process;
use crate::CaptureError;
use belay_abi::inject::{ThreadTable, NODE_WORDS};
use belay_image::attributes::{Placement, Policy};
use belay_kernel::vm::Memory;

const MPOL_F_ADDR: u64 = 2;
/// Most bytes of segment descriptors.
const SEGMENTS: u64 = 8 * 8192;

/// Private memory of `process` that has a policy of its own.
pub(crate) fn of_memory(process: &mut Process, area: &Area, draft: &Draft) -> Result<Vec<Placement>, CaptureError> {
    let private = draft.maps.iter().filter(|m| mappings::pages(m) != Pages::None);
    let ranges: Vec<(u64, u64)> = private.map(|m| (m.start, m.end)).collect();
    let modes = inject::policies(process, area, &ranges)?;
    let mut out = Vec::new();
    for ((start, end), _) in ranges.into_iter().zip(modes).filter(|(_, mode)| *mode != 0) {
        let (mode, nodes) = (area.scratch(), area.scratch() + 8);
        let bytes = 8 + 8 * NODE_WORDS as u64;
        on_main(
            process,
            libc::SYS_get_mempolicy,
            [mode, nodes, 64 * NODE_WORDS as u64, start, MPOL_F_ADDR, 0],
        )?;
        let told = area.get_scratch(bytes)?;
        let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|i| told[at * 8 + i]));
        // The mode is an `int`.
        let policy = policy((word(0) & 0xffff_ffff) as u32, (1..=NODE_WORDS).map(word));
        out.extend(policy.map(|policy| Placement { start, end, policy }));
    }
    Ok(out)
}

/// The policy of a thread; none where it is left to the kernel.
pub(crate) fn of_thread(table: &ThreadTable) -> Option<Policy> {
    policy(table.policy.cast_unsigned(), table.nodes.into_iter())
}

fn policy(mode: u32, nodes: impl Iterator<Item = u64>) -> Option<Policy> {
    let mut nodes: Vec<u64> = nodes.collect();
    nodes.truncate(nodes.iter().rposition(|w| *w != 0).map_or(0, |last| last + 1));
    (mode != 0).then_some(Policy { mode, nodes })
}

/// The segment descriptors of `process`, which has some.
pub(crate) fn segments(process: &mut Process, task: i32) -> Result<Vec<u64>, CaptureError> {
    let room = inject::memory::map(process, SEGMENTS, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_NORESERVE)?;
    let told = on_main(process, libc::SYS_modify_ldt, [0, room, SEGMENTS, 0, 0, 0]).and_then(|bytes| {
        let fail = |e| CaptureError::system("read segment descriptors of the application", e);
        let mut out = vec![0; usize::try_from(bytes.min(SEGMENTS)).unwrap_or(0)];
        let memory = Memory::open(task).map_err(fail)?;
        memory.read(room, &mut out).map_err(fail)?;
        Ok(out)
    });
    on_main(process, libc::SYS_munmap, [room, SEGMENTS, 0, 0, 0, 0])?;
    let words = told?;
    let words = words.chunks_exact(8);
    Ok(words.map(|w| w.iter().rev().fold(0, |v, b| v << 8 | u64::from(*b))).collect())
}
