//! How much memory is free: on the node (`/proc/meminfo`) and at every level of the control groups of a process,
//! version 2 (`memory.max`, `memory.high`, `memory.current`) and version 1 (`memory.limit_in_bytes`, `memory.memsw.*`).
//!
//! What can be had at once counts as free: besides what nobody uses, the page cache of files that is neither mapped,
//! dirty nor on its way to the disk. Swap does not count.

use crate::mounts::{self, Mount};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// A limit of this size or more is none.
const UNLIMITED: u64 = 1 << 60;

/// Free memory at the tightest place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Free {
    /// Bytes.
    pub bytes: u64,
    /// Whose limit that is.
    pub place: String,
}

/// One level of the control groups: its directory, and which version's files it has.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Level {
    dir: PathBuf,
    version: u8,
}

/// Everything that limits the memory of some processes, to be read as often as needed.
#[derive(Debug, Clone, Default)]
pub struct Gauges {
    levels: BTreeSet<Level>,
}

impl Gauges {
    /// Of what limits the memory of processes `pids`.
    pub fn of(pids: impl IntoIterator<Item = i32>) -> io::Result<Self> {
        let read = |pid| crate::proc::read_whole(format!("/proc/{pid}/cgroup"));
        // Most are in one group.
        let groups = pids.into_iter().map(read).collect::<io::Result<BTreeSet<_>>>()?;
        let mounts = mounts::all()?;
        let levels = groups.iter().flat_map(|groups| levels(&mounts, groups)).collect();
        Ok(Self { levels })
    }

    /// The tightest place now; `None` where nothing can be read.
    pub fn free(&self) -> Option<Free> {
        let node = meminfo("MemAvailable").map(|bytes| Free {
            bytes,
            place: "the node".into(),
        });
        let groups = self.levels.iter().filter_map(Level::free);
        node.into_iter().chain(groups).min_by_key(|f| f.bytes)
    }
}

impl Level {
    fn value(&self, file: &str) -> Option<u64> {
        crate::proc::text(self.dir.join(file)).ok()?.trim().parse().ok()
    }

    /// What is free under the limits of this level; `None` where it has none.
    fn free(&self) -> Option<Free> {
        let pairs: &[(&str, &str)] = if self.version == 2 {
            &[("memory.max", "memory.current"), ("memory.high", "memory.current")]
        } else {
            &[
                ("memory.limit_in_bytes", "memory.usage_in_bytes"),
                ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
            ]
        };
        let unused = pairs
            .iter()
            .filter_map(|(limit, used)| {
                let limit = self.value(limit).filter(|l| *l < UNLIMITED)?;
                Some(limit.saturating_sub(self.value(used)?))
            })
            .min()?;
        let stat = crate::proc::text(self.dir.join("memory.stat")).unwrap_or_default();
        Some(Free {
            bytes: unused + reclaimable(&stat),
            place: format!("control group {}", self.dir.display()),
        })
    }
}

/// Page cache that can be dropped at once, from the text of a `memory.stat` of either version.
fn reclaimable(stat: &str) -> u64 {
    let value = |names: [&str; 2]| {
        let line = |name: &str| {
            stat.lines()
                .find_map(|l| l.strip_prefix(name)?.strip_prefix(' ')?.trim().parse::<u64>().ok())
        };
        // Those of version 1 with `total_` include the levels below.
        names.into_iter().find_map(line).unwrap_or(0)
    };
    let cache = value(["total_inactive_file", "inactive_file"]) + value(["total_active_file", "active_file"]);
    let busy = value(["total_mapped_file", "file_mapped"])
        + value(["total_dirty", "file_dirty"])
        + value(["total_writeback", "file_writeback"]);
    cache.saturating_sub(busy)
}

/// Whether files in `dir` lie in memory.
pub fn in_memory(dir: &Path) -> bool {
    const RAMFS_MAGIC: i64 = 0x8584_58f6;
    let Ok(path) = std::ffi::CString::new(dir.as_os_str().as_bytes()) else {
        return false;
    };
    // SAFETY: all zeros is a value of this plain C struct.
    let mut s: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: path and result are live.
    let r = unsafe { libc::statfs(path.as_ptr(), &mut s) };
    r == 0 && [libc::TMPFS_MAGIC, RAMFS_MAGIC].contains(&s.f_type)
}

/// The levels that limit a process, by what is mounted and the contents of its `cgroup` file.
fn levels(mounts: &[Mount], groups: &[u8]) -> Vec<Level> {
    let mut out = Vec::new();
    for line in groups.split(|b| *b == b'\n') {
        let mut fields = line.splitn(3, |b| *b == b':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let version = match controllers {
            b"" => 2,
            c if c.split(|b| *b == b',').any(|c| c == b"memory") => 1,
            _ => continue,
        };
        for (root, at) in mounts_of(mounts, version) {
            let path = Path::new(OsStr::from_bytes(path));
            // In a container the mount can show a part of the hierarchy only, perhaps not the one that the path names.
            let below = path.strip_prefix(root).ok().or_else(|| path.strip_prefix("/").ok());
            let mut dir = below
                .map(|b| at.join(b))
                .filter(|d| d.is_dir())
                .unwrap_or_else(|| at.to_owned());
            loop {
                out.push(Level {
                    dir: dir.clone(),
                    version,
                });
                if dir == at || !dir.pop() {
                    break;
                }
            }
        }
    }
    out
}

/// Where hierarchies that can limit memory are mounted: (root within the hierarchy, mount point).
fn mounts_of(mounts: &[Mount], version: u8) -> impl Iterator<Item = (&Path, &Path)> {
    let fits = move |m: &&Mount| match version {
        2 => m.kind == "cgroup2",
        _ => m.kind == "cgroup" && m.options.split(',').any(|o| o == "memory"),
    };
    mounts.iter().filter(fits).map(|m| (m.root.as_path(), m.place.as_path()))
}

/// A value of `/proc/meminfo`, bytes.
pub fn meminfo(name: &str) -> Option<u64> {
    value_of(&crate::proc::text("/proc/meminfo").ok()?, name)
}

fn value_of(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

/// Under strict overcommit (`vm.overcommit_memory` = 2): what can still be promised to processes, bytes.
pub fn commit_left() -> Option<u64> {
    let mode = crate::proc::text("/proc/sys/vm/overcommit_memory").ok()?;
    if mode.trim() != "2" {
        return None;
    }
    Some(meminfo("CommitLimit")?.saturating_sub(meminfo("Committed_AS")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory with files, removed at the end.
    struct Tree(PathBuf);

    impl Tree {
        fn new(test: &str, files: &[(&str, &str)]) -> Self {
            let dir = std::env::temp_dir().join(format!("belay-room-{test}-{}", std::process::id()));
            for (file, text) in files {
                let path = dir.join(file);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            }
            Self(dir)
        }

        /// Free bytes and the last part of the tightest level's name.
        fn free(&self, mount: &str, groups: &str) -> Option<(u64, String)> {
            let mounts = format!("35 31 0:32 / {} rw,relatime - {mount}\n", self.0.display());
            let levels = levels(&mounts::parse(mounts.as_bytes()), groups.as_bytes())
                .into_iter()
                .collect::<BTreeSet<_>>();
            let free = levels.iter().filter_map(Level::free).min_by_key(|f| f.bytes)?;
            Some((free.bytes, free.place.rsplit('/').next().unwrap().to_owned()))
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn every_level_of_version_2_counts() {
        let tree = Tree::new(
            "v2",
            &[
                ("a/memory.max", "1000\n"),
                ("a/memory.current", "400\n"),
                (
                    "a/memory.stat",
                    "anon 1\nfile 9\nfile_mapped 10\nfile_dirty 5\nfile_writeback 5\ninactive_file 60\nactive_file 40\n",
                ),
                ("a/b/memory.max", "max\n"),
                ("a/b/memory.high", "700\n"),
                ("a/b/memory.current", "300\n"),
                ("a/b/c/memory.max", "max\n"),
                ("a/b/c/memory.high", "max\n"),
                ("a/b/c/memory.current", "300\n"),
            ],
        );
        let mount = "cgroup2 cgroup2 rw";
        assert_eq!(tree.free(mount, "0::/a\n"), Some((600 + 80, "a".into())));
        assert_eq!(
            tree.free(mount, "0::/a/b/c\n"),
            Some((400, "b".into())),
            "memory.high of the level above"
        );
        assert_eq!(tree.free(mount, "4:cpu:/a\n"), None);
        std::fs::write(tree.0.join("a/b/memory.current"), "900").unwrap();
        assert_eq!(tree.free(mount, "0::/a/b\n"), Some((0, "b".into())), "above memory.high");
    }

    #[test]
    fn version_1_counts_with_and_without_swap() {
        let tree = Tree::new(
            "v1",
            &[
                ("memory.limit_in_bytes", "9223372036854771712\n"),
                ("memory.usage_in_bytes", "5\n"),
                ("job/memory.limit_in_bytes", "1000\n"),
                ("job/memory.usage_in_bytes", "100\n"),
                ("job/memory.memsw.limit_in_bytes", "1000\n"),
                ("job/memory.memsw.usage_in_bytes", "300\n"),
                (
                    "job/memory.stat",
                    "inactive_file 1\nactive_file 1\ntotal_inactive_file 30\ntotal_active_file 20\ntotal_dirty 10\ntotal_writeback 0\ntotal_mapped_file 0\n",
                ),
            ],
        );
        let mount = "cgroup cgroup rw,memory";
        assert_eq!(tree.free(mount, "4:memory:/job\n0::/x\n"), Some((740, "job".into())));
        assert_eq!(tree.free(mount, "4:cpu,memory:/\n"), None, "no limit at the root");
        // A container sees only its own group, which the path does not lead to.
        assert_eq!(tree.free(mount, "4:memory:/docker/123\n"), None);
        assert_eq!(tree.free("cgroup cgroup rw,cpu", "4:memory:/job\n"), None);
    }

    #[test]
    fn the_part_of_the_hierarchy_that_is_mounted() {
        let mounts = mounts::parse(b"1 2 0:3 /docker/1 /nowhere/cg rw - cgroup2 cgroup2 rw\n");
        let found = levels(&mounts, b"0::/docker/1/x\n");
        assert_eq!(
            found.len(),
            1,
            "the group itself is not to be seen: the mount point stands for it"
        );
        assert_eq!(found[0].dir, Path::new("/nowhere/cg"));
    }

    #[test]
    fn this_machine_has_memory() {
        let free = Gauges::of([std::process::id().cast_signed()]).unwrap().free().unwrap();
        assert!(free.bytes > 1 << 20 && free.bytes <= meminfo("MemTotal").unwrap(), "{free:?}");
        assert_eq!(value_of("A: 5 kB\nAB:   7 kB\n", "AB"), Some(7168));
    }
}
