//! Mappings: what each one is, and which of its pages must be stored.

use crate::memory::flags;
use crate::memory::held::{self, Inode, DELETED};
use belay_abi::TASK_SIZE;
use belay_image::identity;
use belay_image::model::{FileIdentity, ObjectId, Vma, VmaKind};
use belay_kernel::hugepages;
use belay_kernel::proc::Map;
use belay_plugins::{infiniband, SharedMapping};
use std::collections::{BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Why there is no checkpoint now.
pub(crate) const LOST: &str = "its file was replaced, removed or closed to readers while the checkpoint was taken";
/// So many mapped files stay open at most until the checkpoint has been written.
const KEPT_OPEN: usize = 128;

/// Identities of mapped files, each computed once.
#[derive(Debug, Default)]
pub(crate) struct Identities {
    looked: HashMap<OsString, Option<Looked>>,
    open: usize,
}

/// A file that has been looked at.
#[derive(Debug)]
struct Looked {
    identity: FileIdentity,
    inode: Inode,
    /// The program may remove it while its checkpoint is being written.
    file: Option<File>,
}

impl Identities {
    /// Identity of the file at `path`, `None` when it cannot be read.
    pub(crate) fn of(&mut self, path: &OsStr) -> Option<FileIdentity> {
        if let Some(known) = self.looked.get(path) {
            return known.as_ref().map(|k| k.identity.clone());
        }
        let mut look = || {
            let file = identity::open(Path::new(path)).or_else(|e| match e.raw_os_error() {
                Some(libc::EMFILE) if self.open > 0 => {
                    self.looked.values_mut().flatten().for_each(|looked| looked.file = None);
                    self.open = 0;
                    identity::open(Path::new(path))
                }
                _ => Err(e),
            })?;
            Ok::<_, std::io::Error>(Looked {
                inode: Inode::of(&file.metadata()?),
                identity: FileIdentity::of_open(&file)?,
                file: (self.open < KEPT_OPEN).then_some(file),
            })
        };
        let looked = look().ok();
        let identity = looked.as_ref().map(|k| k.identity.clone());
        self.open += usize::from(looked.as_ref().is_some_and(|k| k.file.is_some()));
        self.looked.insert(path.to_owned(), looked);
        identity
    }

    /// Identity of the file that `map` shows, where its path still leads to it and it can be read. What has been answered
    /// once is answered again, whatever becomes of the path.
    fn of_map(&mut self, map: &Map) -> Option<FileIdentity> {
        if bare(map) != map.name {
            return None;
        }
        let identity = self.of(&map.name)?;
        (self.inode(&map.name)?.ino == map.ino).then_some(identity)
    }

    /// Which file it was, where it has been looked at.
    pub(crate) fn inode(&self, path: &OsStr) -> Option<Inode> {
        Some(self.looked.get(path)?.as_ref()?.inode)
    }

    /// The file itself, where it is kept open.
    pub(crate) fn file(&self, path: &OsStr) -> Option<&File> {
        self.looked.get(path)?.as_ref()?.file.as_ref()
    }

    /// Whether a restart could not have what is not stored of `map`, which the image calls `vma`: neither does its path
    /// lead to its file, nor is that open.
    pub(crate) fn has_lost(&self, map: &Map, vma: &Vma) -> bool {
        match &vma.kind {
            VmaKind::FilePrivate { identity, .. } => identity.is_none() || self.file(&map.name).is_none() && !file_is_there(map),
            _ => false,
        }
    }
}

/// The one of `maps`, in ascending order, that `address` lies in.
pub(crate) fn at(maps: &[Map], address: u64) -> Option<&Map> {
    let next = maps.partition_point(|m| m.end <= address);
    maps.get(next).filter(|m| m.start <= address)
}

/// How the pages of a mapping are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pages {
    /// The page table knows which ones hold data of the process's own.
    Own,
    /// All of them: the file behind is gone.
    All,
    /// None: nothing private, or the plugins store them.
    None,
}

/// Whether the name of `map` begins so.
fn starts(map: &Map, with: &str) -> bool {
    map.name.as_bytes().starts_with(with.as_bytes())
}

/// Whether `map` is private memory that never has pages of a file, nor any that the kernel has put there.
pub(crate) fn is_anonymous(map: &Map) -> bool {
    let named = ["[heap]", "[stack", "[anon:"].iter().any(|name| starts(map, name));
    map.ino == 0 && !map.shared && (named || map.name.is_empty())
}

/// What the kernel calls `map`, where that is no path of somebody's choice.
fn shown(map: &Map) -> &str {
    map.name.to_str().unwrap_or_default()
}

/// The name of `map` without the mark of a deleted file.
fn bare(map: &Map) -> &OsStr {
    let name = map.name.as_bytes();
    OsStr::from_bytes(name.strip_suffix(DELETED).unwrap_or(name))
}

/// Whether `map` is a ring of native asynchronous I/O.
pub(crate) fn is_ring(map: &Map) -> bool {
    map.shared && starts(map, "/[aio]")
}

pub(crate) fn sysv(map: &Map) -> bool {
    map.shared && starts(map, "/SYSV")
}

pub(crate) fn object(map: &Map) -> ObjectId {
    ObjectId {
        dev: map.dev,
        ino: map.ino,
    }
}

/// Whether the file of a private file mapping can still be had: its path leads to it, or the agent has it open.
fn file_is_there(map: &Map) -> bool {
    held::is_held(map) || is_at_path(map)
}

/// The same at the stop, where it has been noted.
fn was_there(map: &Map) -> bool {
    held::is_held(map) || map.reached.unwrap_or_else(|| is_at_path(map))
}

/// Whether the path of `map` leads to its file now.
fn is_at_path(map: &Map) -> bool {
    bare(map) == map.name && std::fs::metadata(&map.name).is_ok_and(|m| m.ino() == map.ino)
}

/// Which mapped files have been found at their paths, of all processes: several mappings show each, and are asked about
/// at several steps.
#[derive(Debug, Default)]
pub(crate) struct Reached(HashMap<(OsString, u64), bool>);

impl Reached {
    /// Notes of each of `maps` whether its path leads to its file.
    pub(crate) fn note(&mut self, maps: &mut [Map]) {
        for map in maps.iter_mut().filter(|m| !m.shared && m.ino != 0) {
            let known = self.0.entry((map.name.clone(), map.ino));
            map.reached = Some(*known.or_insert_with(|| is_at_path(map)));
        }
    }
}

/// Which pages of `map` are stored in chunks.
pub(crate) fn pages(map: &Map) -> Pages {
    match shown(map) {
        "[vdso]" | "[vvar]" | "[vvar_vclock]" | "[vsyscall]" => Pages::None,
        _ if map.shared || infiniband::is_mapping(map) => Pages::None,
        _ if map.restored => Pages::Own,
        _ if map.ino != 0 && !was_there(map) && !starts(map, "/anon_hugepage") => Pages::All,
        _ => Pages::Own,
    }
}

/// Which pages of `map` are stored, when it is also known what will be said of it in the image: of a file that the
/// restart will not have all of them are.
pub(crate) fn pages_with(map: &Map, identities: &mut Identities) -> Pages {
    match pages(map) {
        Pages::Own if is_of_path(map) && identities.of_map(map).is_none() => Pages::All,
        pages => pages,
    }
}

/// The same before anything has been said of it: the identity of a file is not computed while the program is stopped.
pub(crate) fn pages_early(map: &Map) -> Pages {
    let can_be_read = |map: &Map| {
        let file = identity::open(Path::new(bare(map))).and_then(|f| f.metadata());
        file.is_ok_and(|m| m.ino() == map.ino)
    };
    match pages(map) {
        Pages::Own if is_of_path(map) && !can_be_read(map) => Pages::All,
        pages => pages,
    }
}

/// Whether the image says of `map` that it is private memory of the file at a path.
fn is_of_path(map: &Map) -> bool {
    let special = map.restored || infiniband::is_mapping(map) || huge(map).is_some();
    !map.shared && map.ino != 0 && !special && !held::is_held(map)
}

/// Whether `map` is a private mapping of a file to which no path leads: a memfd, a deleted file.
pub(crate) fn is_nameless(map: &Map) -> bool {
    !map.shared && bare(map) != map.name && pages(map) == Pages::All && huge(map).is_none()
}

/// The files of such mappings.
pub(crate) fn nameless(maps: &[Map]) -> Vec<ObjectId> {
    maps.iter().filter(|m| is_nameless(m)).map(object).collect()
}

/// Whether a page of `map` that holds only zeros must be stored: without it the file behind the mapping would show.
pub(crate) fn zeros_count(map: &Map) -> bool {
    map.ino != 0 && pages(map) == Pages::Own && huge(map).is_none()
}

/// The mapping for the image, or why it cannot be restored. It was `seen` in `smaps`, if at all.
pub(crate) fn vma(map: &Map, seen: Option<&Map>, identities: &mut Identities) -> Result<Vma, String> {
    let (flags, key) = seen.map_or((&[][..], 0), |seen| (seen.flags.as_slice(), seen.key));
    let name = shown(map);
    let kind = match name {
        "[vdso]" | "[vvar]" | "[vvar_vclock]" => VmaKind::Vdso(name.trim_matches(['[', ']']).to_owned()),
        "[vsyscall]" => VmaKind::Vsyscall,
        "[stack]" => VmaKind::Stack,
        "[heap]" => VmaKind::Heap,
        _ if sysv(map) => VmaKind::SysvShm {
            shmid: i32::try_from(map.ino).unwrap_or(-1),
            object: object(map),
            offset: map.offset,
        },
        _ if is_ring(map) => VmaKind::Ring,
        _ if infiniband::is_mapping(map) => VmaKind::Device(bare(map).to_owned().into()),
        _ if map.shared => VmaKind::Shared {
            object: object(map),
            offset: map.offset,
            may_write: flags.iter().any(|f| f == "mw"),
        },
        _ if huge(map).is_some() => VmaKind::HugeTlb {
            page_bytes: huge(map).unwrap_or_default(),
        },
        _ if map.restored => VmaKind::PrivateObject {
            object: object(map),
            offset: map.offset,
        },
        _ if map.ino == 0 => VmaKind::Anonymous {
            name: name
                .strip_prefix("[anon:")
                .and_then(|n| n.strip_suffix(']'))
                .map(str::to_owned),
        },
        _ => {
            let (path, identity) = match held::of_map(map) {
                Some((path, identity)) => (path, Some(identity)),
                None => (bare(map).to_owned().into(), identities.of_map(map)),
            };
            let offset = map.offset;
            VmaKind::FilePrivate { path, offset, identity }
        }
    };
    Ok(Vma {
        start: map.start,
        end: map.end,
        // Only the place of a device's memory is kept.
        prot: if matches!(kind, VmaKind::Device(_)) { 0 } else { map.prot },
        flags: flags::kept(flags, &kind)?,
        key,
        kind,
        guards: Vec::new(),
    })
}

/// A mapping in words.
pub(crate) fn named(map: &Map) -> String {
    let name = if map.name.is_empty() {
        "memory".into()
    } else {
        map.name.to_string_lossy()
    };
    format!("{name} at {:#x}", map.start)
}

/// The shared mappings, for the plugins.
pub(crate) fn shared_mappings(maps: &[Map]) -> Vec<SharedMapping> {
    maps.iter()
        .filter(|m| m.shared && m.ino != 0 && !is_ring(m) && !infiniband::is_mapping(m))
        .map(|m| SharedMapping {
            start: m.start,
            end: m.end,
            offset: m.offset,
            prot: m.prot,
            object: object(m),
            name: m.name.clone(),
            sysv_shmid: sysv(m).then(|| i32::try_from(m.ino).unwrap_or(-1)),
        })
        .collect()
}

/// Page size of private memory in explicit huge pages, `None` for other memory.
pub(crate) fn huge(map: &Map) -> Option<u64> {
    let internal = || starts(map, "/anon_hugepage") || starts(map, "/memfd:");
    (!map.shared && internal()).then(|| hugepages::page_bytes(map.dev)).flatten()
}

/// Whether the snapshot child must not inherit `map`. It would be counted at System V segments. And explicit huge pages
/// come from a pool that may have none left for a process that writes to a page which it shares with the child: the
/// kernel would kill it.
pub(crate) fn not_for_child(map: &Map) -> bool {
    sysv(map) || huge(map).is_some()
}

/// Whether a program is being written through `map`, as linkers do: while anybody maps it so, nobody can execute it, and
/// the snapshot child would do so longer than the linker.
pub(crate) fn writes_program(map: &Map) -> bool {
    let is_it = |m: &Metadata| m.is_file() && m.ino() == map.ino && m.mode() & 0o111 != 0;
    let can_be = map.shared && map.ino != 0 && map.prot & libc::PROT_WRITE as u32 != 0 && bare(map) == map.name;
    can_be && !held::is_held(map) && std::fs::metadata(&map.name).is_ok_and(|m| is_it(&m))
}

/// Mappings that cannot be restored: (name, reason), each once. Those of devices are cared for by `libraries` in the process.
pub(crate) fn unsupported(maps: &[Map], libraries: &[String]) -> BTreeSet<(String, &'static str)> {
    let reason = |m: &Map| {
        match shown(m) {
        n if n.contains("[io_uring]") => Some(
            "io_uring cannot be saved; turn it off in the program (MariaDB: innodb_use_native_aio=0; libuv before 1.50, and with it uvloop up to 0.22: UV_USE_IO_URING=0; later ones heed no variable: asyncio's own loop instead of uvloop), or for all with sysctl kernel.io_uring_disabled=2",
        ),
        n if m.end > TASK_SIZE && n != "[vsyscall]" => {
            Some("memory above 128 TiB (57-bit addresses) cannot be restored yet; the program asks for it by a hint to mmap")
        }
        _ if infiniband::is_mapping(m) => (!libraries.iter().any(|l| l == infiniband::LIBRARY)).then_some(infiniband::WITHOUT),
        n if n.starts_with("/dev/kfd") || n.starts_with("/dev/dri") => {
            Some("the state of this GPU cannot be saved: its driver has no checkpoints (NVIDIA's has); run without the GPU")
        }
        // Nothing can be opened again by such a name: a restart would fail.
        n if n.starts_with("anon_inode:") => {
            Some("memory of an object of the kernel cannot be saved; run the program without what maps it (perf_event: a profiler)")
        }
        n if n.starts_with("socket:[") => Some("memory of a socket (TCP_ZEROCOPY_RECEIVE, packet rings) cannot be saved; unmap it before the checkpoint"),
        "[uprobes]" => Some("the process is being probed (uprobes); end the probe (perf, bpftrace, systemtap)"),
        _ => None,
    }
    };
    let segment = |m: &Map| {
        let huge = sysv(m) && hugepages::page_bytes(m.dev).is_some();
        huge.then_some("a System V segment in huge pages (SHM_HUGETLB) cannot be saved; use MAP_HUGETLB or ordinary pages")
    };
    maps.iter()
        .filter_map(|m| Some((m.name.display().to_string(), reason(m).or_else(|| segment(m))?)))
        .collect()
}
