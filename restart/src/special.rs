//! The kernel's own mappings.

use crate::layout::Range;
use belay_kernel::proc;

/// One of the kernel's own mappings (`vdso`, `vvar`, ...) in the process that becomes the restored one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Special {
    pub(crate) name: String,
    pub(crate) range: Range,
}

/// Those of process `pid`, which are the same in all its forks.
pub(crate) fn of(pid: i32) -> std::io::Result<Vec<Special>> {
    let maps = proc::maps(pid)?;
    let kernel = maps
        .into_iter()
        .filter(|m| m.name.as_encoded_bytes().starts_with(b"[v") && m.name != "[vsyscall]");
    Ok(kernel
        .map(|m| Special {
            name: m.name.to_string_lossy().trim_matches(['[', ']']).to_owned(),
            range: m.start..m.end,
        })
        .collect())
}
