//! Shared memory: finds the objects behind shared mappings. Contents are read and rebuilt as those of files are (see `files`).

pub(crate) mod claims;
pub(crate) mod sysv;

use crate::capture::Session;
use crate::content::Window;
use crate::fault::Fault;
use crate::files::{self, Origin, Sought};
use crate::model::Holder;
use crate::SharedMapping;
use belay_kernel::hugepages;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Adds the objects behind all shared mappings to the session's files.
pub(crate) fn finish(s: &mut Session<'_>) -> Result<(), (Holder, String, Fault)> {
    for p in s.processes {
        for m in p.shared.iter().filter(|m| m.sysv_shmid.is_none()) {
            let holder = Holder { pid: p.pid, fd: -1 };
            if is_device(&m.name) {
                let reason = "a mapped device has state that cannot be saved; run without it".to_string();
                return Err((holder, format!("mapping of {}", m.name.display()), Fault::Refused(reason)));
            }
            let at = match s.files.find(m.object) {
                Some(at) => at,
                None => object(s, m, holder),
            };
            let sought = &mut s.files.objects[at];
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
    }
    Ok(())
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
    if origin == Origin::Named {
        // On overlayfs and btrfs `stat` and the maps file disagree about the device: the name decides.
        let by_name = s
            .files
            .objects
            .iter()
            .position(|o| o.object.origin == Origin::Named && o.object.path.as_path() == path);
        if let Some(at) = by_name {
            s.files.alias(m.object, at);
            return at;
        }
    }
    s.files.add(Sought::mapped(m.object, path, origin, holder))
}
