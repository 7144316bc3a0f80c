//! What a power cut leaves of a directory: what has been synced, and of the rest whatever the disk has got to by chance.
//!
//! ```text
//! calls ──> Recorder: after each call, which names have changed; at each fsync, what was in the file or directory ──> cuts: the states that a cut after each call can leave ──> State::make
//! ```
//! - The contents of a file are those of its last fsync. Without one it holds zeros, as long as it is: its length may
//!   be on the disk before its contents.
//! - The names in a directory are those of its last fsync. Of later changes none may have reached the disk, or all, one
//!   alone, all but one, or the earlier ones. What one call has changed is there as a whole or not at all.

use crate::calls::Call;
use crate::Failure;
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// A file or directory: its inode's number, which is used again, and when it was made.
type Id = (u64, Option<SystemTime>);

/// A directory's names.
type Names = BTreeMap<String, Id>;

/// All directories below one, and the lengths of the files.
#[derive(Debug, Clone, Default)]
struct View {
    dirs: BTreeMap<Id, Names>,
    lengths: BTreeMap<Id, u64>,
}

/// A change of a name.
#[derive(Debug, Clone)]
struct Change {
    dir: Id,
    name: String,
    now: Option<Id>,
}

/// What has become durable.
#[derive(Debug, Clone)]
enum Synced {
    /// A file, as the copy has it.
    File(Id, PathBuf),
    /// The names in a directory, as far as the first so many calls had changed them.
    Directory(Id, usize),
}

/// A call that has ended, and what had become of the files by then.
#[derive(Debug)]
struct Event {
    what: String,
    /// What had been promised when it began.
    promised: u64,
    changes: Vec<Change>,
    lengths: BTreeMap<Id, u64>,
    synced: Option<Synced>,
}

/// Records what calls do below a directory.
#[derive(Debug)]
pub struct Recorder {
    root: PathBuf,
    /// Entries of the directory and names below it that do not matter.
    wanted: fn(&Path) -> bool,
    copies: PathBuf,
    root_id: Id,
    last: View,
    /// By thread: what had been promised when its call began, and what the call makes durable.
    begun: BTreeMap<i32, (u64, Option<Synced>)>,
    events: Vec<Event>,
}

fn id(path: &Path) -> Option<(Id, std::fs::Metadata)> {
    let m = std::fs::symlink_metadata(path).ok()?;
    Some(((m.ino(), m.created().ok()), m))
}

impl Recorder {
    /// Begins with what is below `root` and `wanted`, of which nothing counts as synced; `copies` is an empty directory.
    pub fn new(root: &Path, wanted: fn(&Path) -> bool, copies: PathBuf) -> Result<Self, Failure> {
        std::fs::create_dir(&copies).map_err(|e| format!("make {}: {e}", copies.display()))?;
        let (root_id, _) = id(root).ok_or("no directory to record")?;
        let mut new = Self {
            root: root.to_owned(),
            wanted,
            copies,
            root_id,
            last: View::default(),
            begun: BTreeMap::new(),
            events: Vec::new(),
        };
        new.record("what was there before".into(), 0, None);
        Ok(new)
    }

    /// What is there. Names that vanish meanwhile are left out.
    fn look(&self) -> View {
        let mut view = View::default();
        let mut left = vec![(self.root.clone(), self.root_id)];
        while let Some((path, dir)) = left.pop() {
            let names = view.dirs.entry(dir).or_default();
            for e in std::fs::read_dir(&path).into_iter().flatten().flatten() {
                let path = e.path();
                let (Some((id, m)), true) = (id(&path), (self.wanted)(&path)) else {
                    continue;
                };
                names.insert(e.file_name().to_string_lossy().into_owned(), id);
                if m.is_dir() {
                    left.push((path, id));
                } else {
                    view.lengths.insert(id, m.len());
                }
            }
        }
        view
    }

    fn record(&mut self, what: String, promised: u64, synced: Option<Synced>) {
        let view = self.look();
        let mut changes = Vec::new();
        let none = Names::new();
        for dir in view.dirs.keys().chain(self.last.dirs.keys()).collect::<BTreeSet<_>>() {
            // What becomes of the names in a directory that is gone does not matter.
            let Some(now) = view.dirs.get(dir) else { continue };
            let before = self.last.dirs.get(dir).unwrap_or(&none);
            for name in now.keys().chain(before.keys()).collect::<BTreeSet<_>>() {
                if now.get(name) != before.get(name) {
                    changes.push(Change {
                        dir: *dir,
                        name: name.clone(),
                        now: now.get(name).copied(),
                    });
                }
            }
        }
        self.events.push(Event {
            what,
            promised,
            changes,
            lengths: view.lengths.clone(),
            synced,
        });
        self.last = view;
    }

    /// A call begins, or ends. `promised` is what the job has promised by now.
    pub fn call(&mut self, call: &Call, promised: u64) -> Result<(), Failure> {
        let Some(result) = call.result else {
            let synced = if call.name == "fsync" { self.sync(&call.path)? } else { None };
            self.begun.insert(call.tid, (promised, synced));
            return Ok(());
        };
        let (promised, synced) = self.begun.remove(&call.tid).unwrap_or((promised, None));
        let path = call.path.strip_prefix(&self.root).unwrap_or(&call.path);
        let what = format!("{} {}", call.name, path.display());
        self.record(what, promised, synced.filter(|_| result == 0));
        Ok(())
    }

    /// What an fsync of `path` that begins now makes durable: what is written while it works need not be.
    fn sync(&self, path: &Path) -> Result<Option<Synced>, Failure> {
        let Some((id, m)) = id(path) else { return Ok(None) };
        if m.is_dir() {
            return Ok(Some(Synced::Directory(id, self.events.len())));
        }
        let copy = self.copies.join(self.events.len().to_string());
        std::fs::copy(path, &copy).map_err(|e| format!("copy {}: {e}", path.display()))?;
        Ok(Some(Synced::File(id, copy)))
    }

    /// The calls that have made something durable.
    pub fn syncs(&self) -> Vec<usize> {
        let synced = |(n, e): (usize, &Event)| e.synced.is_some().then_some(n);
        self.events.iter().enumerate().filter_map(synced).collect()
    }

    /// Call number `n`, for messages.
    pub fn what(&self, n: usize) -> String {
        format!("call {n} of {} ({})", self.events.len(), self.events[n].what)
    }

    /// Each state that a cut after each call can leave, where the fsync with number `without` is not done: `check` is
    /// given that call's number and what had been promised before the next one.
    pub fn cuts(
        &self,
        without: Option<usize>,
        mut check: impl FnMut(usize, u64, &State) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let mut durable: BTreeMap<Id, Names> = BTreeMap::new();
        let mut contents: BTreeMap<Id, PathBuf> = BTreeMap::new();
        let mut lengths: BTreeMap<Id, u64> = BTreeMap::new();
        // By number of the call.
        let mut pending: BTreeMap<usize, Vec<Change>> = BTreeMap::new();
        for (n, event) in self.events.iter().enumerate() {
            lengths.extend(&event.lengths);
            if !event.changes.is_empty() {
                pending.insert(n, event.changes.clone());
            }
            match event.synced.as_ref().filter(|_| without != Some(n)) {
                Some(Synced::File(id, copy)) => drop(contents.insert(*id, copy.clone())),
                Some(Synced::Directory(dir, before)) => {
                    for (_, changes) in pending.range_mut(..before) {
                        let (now, later) = std::mem::take(changes).into_iter().partition(|c| c.dir == *dir);
                        *changes = later;
                        apply(&mut durable, &now);
                    }
                    pending.retain(|_, changes| !changes.is_empty());
                }
                None => {}
            }
            let promised = self.events.get(n + 1).map_or(u64::MAX, |next| next.promised);
            for chosen in choices(pending.keys().copied().collect()) {
                let mut names = durable.clone();
                for n in &chosen {
                    apply(&mut names, &pending[n]);
                }
                let state = self.state(&names, &contents, &lengths);
                check(n, promised, &state)?;
            }
        }
        Ok(())
    }

    fn state(&self, names: &BTreeMap<Id, Names>, contents: &BTreeMap<Id, PathBuf>, lengths: &BTreeMap<Id, u64>) -> State {
        let mut state = State::default();
        let mut left = vec![(PathBuf::new(), self.root_id)];
        while let Some((path, dir)) = left.pop() {
            for (name, id) in names.get(&dir).into_iter().flatten() {
                let path = path.join(name);
                let node = match (contents.get(id), lengths.get(id)) {
                    (Some(copy), _) => Node::Contents(copy.clone()),
                    (None, Some(length)) => Node::Zeros(*length),
                    (None, None) => {
                        left.push((path.clone(), *id));
                        Node::Directory
                    }
                };
                state.0.insert(path, node);
            }
        }
        state
    }
}

fn apply(names: &mut BTreeMap<Id, Names>, changes: &[Change]) {
    for c in changes {
        let names = names.entry(c.dir).or_default();
        match c.now {
            Some(id) => drop(names.insert(c.name.clone(), id)),
            None => drop(names.remove(&c.name)),
        }
    }
}

/// None of `all`, all, the first ones, each one alone, all but one.
fn choices(all: Vec<usize>) -> BTreeSet<Vec<usize>> {
    let mut out = BTreeSet::from([Vec::new(), all.clone()]);
    for (n, one) in all.iter().enumerate() {
        out.insert(all[..n].to_vec());
        out.insert(vec![*one]);
        out.insert(all.iter().filter(|other| *other != one).copied().collect());
    }
    out
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Node {
    Directory,
    Contents(PathBuf),
    Zeros(u64),
}

/// What a cut has left.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct State(BTreeMap<PathBuf, Node>);

impl State {
    /// Whether there is a file or directory of that name.
    pub fn has(&self, path: &Path) -> bool {
        self.0.contains_key(path)
    }

    /// Makes it in directory `at`, which must not be there; for reading only.
    pub fn make(&self, at: &Path) -> Result<(), Failure> {
        let made = || -> std::io::Result<()> {
            std::fs::create_dir(at)?;
            for (path, node) in &self.0 {
                let path = at.join(path);
                match node {
                    Node::Directory => {
                        std::fs::create_dir(&path)?;
                        let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
                        std::fs::set_permissions(&path, private)?;
                    }
                    Node::Contents(copy) => std::fs::hard_link(copy, &path)?,
                    Node::Zeros(length) => std::fs::File::create(&path)?.set_len(*length)?,
                }
            }
            Ok(())
        };
        made().map_err(|e| format!("make {}: {e}", at.display()))
    }
}
