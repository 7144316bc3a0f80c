//! A memory control group of a test's own, of whichever version this kernel offers. Needs root.

use crate::Failure;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// A control group that limits memory. Its processes must be gone when it is dropped.
#[derive(Debug)]
pub struct Group {
    dir: PathBuf,
    version: u8,
}

/// Mount point of a hierarchy that can limit memory, and its version.
fn hierarchy() -> Option<(PathBuf, u8)> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").ok()?;
    let find = |fits: &dyn Fn(&str, &str) -> bool| {
        mounts.lines().find_map(|l| {
            let f: Vec<&str> = l.split(' ').collect();
            fits(f.get(2)?, f.get(3)?).then(|| PathBuf::from(f[1]))
        })
    };
    let old = find(&|kind, options| kind == "cgroup" && options.split(',').any(|o| o == "memory"));
    let new = || {
        let dir = find(&|kind, _| kind == "cgroup2")?;
        let control = dir.join("cgroup.subtree_control");
        let has = |file: &Path| std::fs::read_to_string(file).is_ok_and(|t| t.split_whitespace().any(|w| w == "memory"));
        (has(&control) || std::fs::write(&control, "+memory").is_ok()).then_some(dir)
    };
    old.map(|dir| (dir, 1)).or_else(|| Some((new()?, 2)))
}

impl Group {
    /// A group with this limit; `None` where the machine does not allow it.
    pub fn new(limit: u64) -> Result<Option<Self>, Failure> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let Some((mount, version)) = hierarchy() else {
            return Ok(None);
        };
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = mount.join(format!("belay-test-{}-{number}", std::process::id()));
        if std::fs::create_dir(&dir).is_err() {
            return Ok(None);
        }
        let group = Self { dir, version };
        let file = if version == 2 { "memory.max" } else { "memory.limit_in_bytes" };
        group.write(file, &limit.to_string())?;
        Ok(Some(group))
    }

    fn write(&self, file: &str, text: &str) -> Result<(), Failure> {
        let path = self.dir.join(file);
        std::fs::write(&path, text).map_err(|e| format!("write {}: {e}", path.display()))
    }

    /// Lets `c` run in the group, with all that it starts.
    pub fn enter(&self, c: &mut Command) {
        let procs = self.dir.join("cgroup.procs");
        // SAFETY: the closure allocates little, in a process whose other threads hold no lock while it starts another one.
        unsafe { c.pre_exec(move || std::fs::write(&procs, "0")) };
    }

    /// How many processes have been killed because the group had no memory left.
    pub fn kills(&self) -> Result<u64, Failure> {
        let file = if self.version == 2 {
            "memory.events"
        } else {
            "memory.oom_control"
        };
        let text = std::fs::read_to_string(self.dir.join(file)).map_err(|e| format!("read {file}: {e}"))?;
        let line = text.lines().find_map(|l| l.strip_prefix("oom_kill "));
        line.and_then(|v| v.trim().parse().ok())
            .ok_or_else(|| format!("no count in {file}: {text}"))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // What was just killed can take a moment to leave the group.
        for _ in 0..500 {
            if std::fs::remove_dir(&self.dir).is_ok() || !self.dir.exists() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}
