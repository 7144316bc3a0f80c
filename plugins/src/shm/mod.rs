//! Shared memory: finds the objects behind shared mappings. Contents are read and rebuilt as those of files are (see `files`).

pub(crate) mod claims;
pub(crate) mod sysv;

use crate::content::Window;
use crate::env::{ProcessView, SharedMapping};
use crate::fault::{Fault, Refusal};
use crate::files::{self, FileSet, Origin, Sought};
use crate::kind::{nothing, Kind, Never, NoPart};
use crate::model::{Descriptors, Holder};
use crate::session::Session;
use belay_kernel::hugepages;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The kind: shared mappings.
pub(crate) struct Mappings;

impl Kind for Mappings {
    const NAME: &'static str = "Mapping";
    const VERSION: u32 = 1;
    type State = Never;
    type Part = NoPart;

    /// Adds the objects behind all of them to the session's files.
    fn finish(s: &mut Session<'_>, _: &mut Descriptors, refusals: &mut Vec<Refusal>) {
        for p in s.processes {
            for m in p.shared.iter().filter(|m| m.sysv_shmid.is_none()) {
                if is_device(&m.name) {
                    let reason = "a mapped device has state that cannot be saved; run without it".to_string();
                    let refusal = Fault::Refused(reason).of(p.pid, format!("mapping of {}", m.name.display()));
                    return refusals.push(refusal);
                }
                add(s, p, m);
            }
        }
    }

    nothing!(survey, recognise, capture, contents, check, check_part, numbers, ways, prepare, rebuild, join, refill);
    nothing!(install, install_late, settle, install_own, complete);
}

/// Adds the object behind mapping `m` of process `p`, and that it is mapped so.
fn add(s: &mut Session<'_>, p: &ProcessView, m: &SharedMapping) {
    let at = match s.sets.of::<FileSet>().find(m.object) {
        Some(at) => at,
        None => object(s, m, Holder { pid: p.pid, fd: -1 }),
    };
    let sought = &mut s.sets.of::<FileSet>().objects[at];
    sought.windows.push(Window {
        pid: p.task,
        address: m.start,
        offset: m.offset,
        bytes: m.end - m.start,
    });
    let writable = m.prot & libc::PROT_WRITE as u32 != 0;
    sought.mapped_writable |= writable;
    sought.object.written |= writable;
    if sought.object.origin == Origin::Anonymous {
        sought.object.bytes = sought.object.bytes.max(m.offset + (m.end - m.start));
    }
}

fn is_device(name: &OsStr) -> bool {
    let starts = |with: &str| name.as_bytes().starts_with(with.as_bytes());
    let shm = starts("/dev/shm/") || starts("/dev/zero") || starts("/dev/hugepages/");
    starts("/dev/") && !shm && !starts("/dev/mqueue/")
}

/// The object behind a mapping that no descriptor leads to.
fn object(s: &mut Session<'_>, m: &SharedMapping, holder: Holder) -> usize {
    let shown = Path::new(&m.name);
    let bare = files::without_deleted(shown);
    let deleted = bare != shown;
    let name = bare.as_os_str().as_bytes();
    let memfd = name.strip_prefix(b"/memfd:").map(OsStr::from_bytes);
    let huge = || hugepages::page_bytes(m.object.dev).map_or(0, |size| libc::MFD_HUGETLB | hugepages::size_flags(size));
    let restored = memfd.is_some_and(|memfd| memfd == files::ANONYMOUS) && hugepages::page_bytes(m.object.dev).is_none();
    let (path, origin) = if m.name.is_empty() || (deleted && (name == b"/dev/zero" || restored)) {
        (PathBuf::from(files::ANONYMOUS), Origin::Anonymous)
    } else if name == b"/anon_hugepage" {
        let memfd = Origin::Memfd { seals: 0, huge: huge() };
        (PathBuf::from("anon_hugepage"), memfd)
    } else if let Some(memfd) = memfd {
        // Nobody holds a descriptor, so nobody can add or ask for seals any more.
        (PathBuf::from(memfd), Origin::Memfd { seals: 0, huge: huge() })
    } else if deleted && !files::is_named(shown, m.object) {
        // A named semaphore gets its name when it has been mapped under another (`sem_open`).
        match s.renamed.of_file(bare, m.object) {
            Some(now) => (now, Origin::Named),
            None => (bare.to_owned(), Origin::Deleted { tmpfile: false }),
        }
    } else {
        (shown.to_owned(), Origin::Named)
    };
    let files: &mut FileSet = s.sets.of();
    if origin == Origin::Named {
        // On overlayfs and btrfs `stat` and the maps file disagree about the device: the name decides.
        let by_name = files
            .objects
            .iter()
            .position(|o| o.object.origin == Origin::Named && o.object.path.as_path() == path);
        if let Some(at) = by_name {
            files.alias(m.object, at);
            return at;
        }
    }
    files.add(Sought::mapped(m.object, path, origin, holder))
}
