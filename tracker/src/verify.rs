//! Verification (`BELAY_ACCESS=verify`): finds declarations that are not true, whether an agent is there or not.
//!
//! What a loop says that it overwrites is filled with a pattern before it, and none of that may be left after it. The
//! pattern is not a number for who takes it for one, so whoever reads it first computes nonsense. Whole pages of a dataset
//! have the access rights of the parts that lie on them, as the loop has declared, and none between loops: a touch is
//! noted, and the program goes on. A touch between two loops is told when a loop then overwrites the page before any has
//! read it, since a checkpoint would lack it.

mod guard;
mod pattern;
mod touches;

use crate::writer::Writer;
use crate::{say, segv, Handle, Part};
use belay_abi::access::{Dataset, MOST_USES};
use belay_access::block::{Block, Region};
use belay_access::live;
use belay_access::shape::Shape;
use belay_access::trace::Mode;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use touches::Touch;

/// The variable and its value.
const VARIABLE: &str = "BELAY_ACCESS";
const VALUE: &str = "verify";

const UNKNOWN: u8 = 0;
const OFF: u8 = 1;
const ON: u8 = 2;

/// Whether it is switched on; not known before the first declaration.
static MODE: AtomicU8 = AtomicU8::new(UNKNOWN);

/// Most runs of pages with access rights of their own in a loop: each can take two mappings, of which a process has 65530.
const MOST_RUNS: usize = 1 << 13;

static STATE: Mutex<State> = Mutex::new(State::new());

/// Whether declarations are verified.
#[inline]
pub(crate) fn is_on() -> bool {
    MODE.load(Ordering::Relaxed) == ON
}

/// Looks whether it is switched on. At the first declaration.
pub(crate) fn begin() {
    if MODE.load(Ordering::Relaxed) != UNKNOWN {
        return;
    }
    let wanted = std::env::var_os(VARIABLE).is_some_and(|v| v == VALUE) && segv::install(touches::note);
    MODE.store(if wanted { ON } else { OFF }, Ordering::Relaxed);
}

/// A dataset that a loop may use.
#[derive(Debug, Clone)]
struct Known {
    name: String,
    shape: Shape,
    dims: usize,
}

/// What the loop that the program is in may do to a dataset.
#[derive(Debug, Default)]
struct Granted {
    /// Whether any part of it is written.
    writes: bool,
    /// What it overwrites without having read it.
    overwrites: Region,
    /// Pages on which its parts lie, and those of them that it may write.
    used: Vec<(u64, u64)>,
    written: Vec<(u64, u64)>,
}

impl Granted {
    fn new(parts: Vec<(Mode, Block)>, shape: &Shape) -> Self {
        let blocks = |is: fn(Mode) -> bool| parts.iter().filter(move |(mode, _)| is(*mode)).map(|(_, block)| block);
        let mut overwrites = Region::default();
        // What is read is not overwritten first, whatever else is said of it.
        blocks(|mode| mode == Mode::Write).for_each(|block| overwrites.add(block));
        blocks(|mode| mode != Mode::Write).for_each(|block| drop(overwrites.take(block)));
        Self {
            writes: parts.iter().any(|(mode, _)| *mode != Mode::Read),
            overwrites,
            used: guard::pages(shape, blocks(|_| true)),
            written: guard::pages(shape, blocks(|mode| mode != Mode::Read)),
        }
    }

    /// Takes all of the dataset for used, as any of it is.
    fn widen(&mut self, inner: (u64, u64)) {
        self.used = vec![inner];
        self.written = self.writes.then_some(inner).into_iter().collect();
    }
}

#[derive(Debug)]
struct Inside {
    site: String,
    thread: libc::pid_t,
    granted: BTreeMap<u32, Granted>,
    key: u64,
    /// It began in another one, which has been told.
    is_nested: bool,
}

#[derive(Debug)]
struct State {
    datasets: BTreeMap<u32, Known>,
    /// Those that overlap each other, which are not among them.
    overlap: BTreeSet<u32>,
    inside: Option<Inside>,
    /// The loop before.
    last: String,
    /// Pages touched between loops, and the loop before.
    touched: Vec<(Touch, String)>,
    /// Short pieces of the pattern that were left once: by chance, perhaps.
    suspects: BTreeSet<(String, u32, u64)>,
    /// What has been told.
    told: BTreeSet<String>,
    visits: u64,
}

impl State {
    const fn new() -> Self {
        Self {
            datasets: BTreeMap::new(),
            overlap: BTreeSet::new(),
            inside: None,
            last: String::new(),
            touched: Vec::new(),
            suspects: BTreeSet::new(),
            told: BTreeSet::new(),
            visits: 0,
        }
    }

    /// Tells once what is wrong.
    fn tell(&mut self, what: String) {
        if self.told.insert(what.clone()) {
            say(&mut std::io::stderr(), &format!("verify: {what}"));
        }
    }
}

fn text(name: &[u8; 32]) -> String {
    String::from_utf8_lossy(name.split(|b| *b == 0).next().unwrap_or_default()).into_owned()
}

fn site_name(page: Handle, site: u32) -> String {
    page.site_name(site).map_or_else(|| "without a name".into(), |s| text(&s))
}

fn known(dataset: &Dataset) -> Option<Known> {
    let shape = Shape::new(dataset.address, dataset.elem, dataset.extent, dataset.stride).ok()?;
    (dataset.address != 0).then(|| Known {
        name: text(&dataset.name),
        shape,
        dims: dataset.dims as usize,
    })
}

/// Datasets have changed: those there are now.
pub(crate) fn declared(writer: &Writer) {
    if !is_on() {
        return;
    }
    let mut state = state();
    let count = writer.page.dataset_count().load(Ordering::Relaxed);
    let now = (1..=count).filter_map(|n| Some((n, known(&writer.known(n).ok()?)?)));
    let now: BTreeMap<u32, Known> = now.collect();
    // What is none any more, or elsewhere, is anybody's.
    for (n, old) in &state.datasets {
        if now.get(n).is_none_or(|new| new.shape != old.shape) {
            guard::allow(guard::inner(&old.shape), true, true).ok();
        }
    }
    state
        .touched
        .retain(|(t, _)| now.get(&t.dataset).is_some_and(|d| guard::holds(&d.shape, t.page)));
    state.datasets = now;
    state.overlap.clear();
    state.watch();
}

/// Before a loop.
pub(crate) fn enter<'a>(page: Handle, site: u32, parts: impl Iterator<Item = Part<'a>>) {
    let mut state = state();
    let state = &mut *state;
    let site = site_name(page, site);
    let is_nested = state.inside.is_some();
    if let Some(inside) = state.inside.take() {
        let other = if inside.thread == thread() {
            ""
        } else {
            ", by another thread"
        };
        state.tell(format!("loop {site} begins in loop {}{other}", inside.site));
        state.leave(inside);
    }
    state.without_overlaps();
    let mut used: BTreeMap<u32, Vec<(Mode, Block)>> = BTreeMap::new();
    for (at, part) in parts.enumerate() {
        if at == MOST_USES {
            state.tell(format!("loop {site} has more than {MOST_USES} uses"));
        }
        let Some(dataset) = state.datasets.get(&part.dataset).cloned() else {
            if state.overlap.contains(&part.dataset) {
                continue;
            }
            state.tell(format!(
                "loop {site} uses dataset number {}, which is none, or none any more",
                part.dataset
            ));
            continue;
        };
        let whole = dataset.shape.whole();
        let name = &dataset.name;
        if let Some((lo, hi)) = part.bounds {
            let block = Block::new(lo, hi);
            let sides = || (0..dataset.dims).map(|d| (block.lo[d], block.hi[d], whole.hi[d]));
            if sides().any(|(lo, hi, _)| hi < lo) {
                state.tell(format!(
                    "loop {site} uses a part of dataset {name} that ends before it begins, or has not as many dimensions: all \
                     of it counts as used"
                ));
            } else if sides().any(|(lo, hi, most)| lo < 0 || hi > most) {
                state.tell(format!("loop {site} uses elements of dataset {name} that it does not have"));
            } else if block.is_empty() {
                state.tell(format!("note: loop {site} uses a part of dataset {name} without elements"));
            }
        }
        let part = part.heard();
        let block = part.bounds.map_or(Some(whole), |(lo, hi)| Block::new(lo, hi).common(&whole));
        used.entry(part.dataset).or_default().extend(block.map(|b| (part.mode, b)));
    }
    let granted = used.into_iter().filter_map(|(n, parts)| {
        let dataset = state.datasets.get(&n)?;
        Some((n, Granted::new(parts, &dataset.shape)))
    });
    let granted = granted.collect();
    state.visits += 1;
    let mut inside = Inside {
        site,
        thread: thread(),
        granted,
        key: pattern::mix(state.visits),
        is_nested,
    };
    state.grant(&mut inside);
    state.tell_touched(&inside);
    state.fill(&inside);
    state.inside = Some(inside);
}

/// After it.
pub(crate) fn leave(page: Handle, site: u32) {
    let mut state = state();
    match state.inside.take() {
        Some(inside) => {
            let site = site_name(page, site);
            if site != inside.site && !inside.is_nested {
                state.tell(format!("loop {site} is left in loop {}", inside.site));
            }
            state.leave(inside);
        }
        None => {
            let what = format!("a loop is left after loop {}, and none has begun", state.last);
            state.tell(what);
        }
    }
}

impl State {
    /// Datasets that overlap others are stored whole, whatever is said of them: nothing of it is verified.
    fn without_overlaps(&mut self) {
        let shapes = self.datasets.iter().map(|(n, d)| (*n, d.shape)).collect();
        let apart = live::apart(&shapes);
        let (apart, overlap) = std::mem::take(&mut self.datasets)
            .into_iter()
            .partition(|(n, _)| apart.contains_key(n));
        self.datasets = apart;
        for (n, dataset) in overlap {
            guard::allow(guard::inner(&dataset.shape), true, true).ok();
            let name = &dataset.name;
            self.tell(format!("note: dataset {name} overlaps another: belay stores it whole"));
            self.overlap.insert(n);
        }
        self.watch();
    }

    /// Has touches of the datasets noted, and of nothing else.
    fn watch(&self) {
        let pages = |n| self.datasets.get(&n).map(|d| guard::inner(&d.shape));
        touches::watch(|n| pages(n).unwrap_or_default());
    }

    /// Gives each dataset's pages the access rights that the loop has declared.
    fn grant(&mut self, inside: &mut Inside) {
        let mut gone = Vec::new();
        let mut runs = 0;
        for (n, dataset) in &self.datasets {
            let inner = guard::inner(&dataset.shape);
            let mut is_there = guard::allow(inner, false, false).is_ok();
            if let Some(grant) = inside.granted.get_mut(n) {
                let more = grant.used.len() + grant.written.len();
                if runs + more > MOST_RUNS {
                    grant.widen(inner);
                } else {
                    runs += more;
                }
                is_there &= !grant.writes || guard::is_mapped(dataset.shape.range());
                is_there &= grant.used.iter().all(|run| guard::allow(*run, true, false).is_ok());
                is_there &= grant.written.iter().all(|run| guard::allow(*run, true, true).is_ok());
            }
            if !is_there {
                gone.push(dataset.name.clone());
                inside.granted.remove(n);
            }
        }
        for name in gone {
            self.tell(format!(
                "dataset {name} lies in memory that is not there any more: say where it is now, or that it is none, before"
            ));
        }
    }

    /// Pages that were touched since the loop before, and that this one overwrites unread.
    fn tell_touched(&mut self, inside: &Inside) {
        let mut wrong = BTreeSet::new();
        let mut used = BTreeSet::new();
        for (Touch { page, dataset, write }, last) in &self.touched {
            let (Some(dataset), Some(grant)) = (self.datasets.get(dataset), inside.granted.get(dataset)) else {
                continue;
            };
            if !guard::has(&grant.used, *page) {
                continue;
            }
            used.insert(*page);
            let mut overwritten = 0;
            for block in grant.overwrites.blocks() {
                dataset
                    .shape
                    .visit(block, &mut |start, end| overwritten += guard::common(*page, start, end));
            }
            if overwritten == guard::PAGE {
                let how = if *write { "written" } else { "read" };
                wrong.insert(format!(
                    "dataset {} is {how} between loop {last} and loop {}, which overwrites it: do that in a loop",
                    dataset.name, inside.site
                ));
            }
        }
        self.touched.retain(|(t, _)| !used.contains(&t.page));
        wrong.into_iter().for_each(|what| self.tell(what));
    }

    fn fill(&self, inside: &Inside) {
        for (n, grant) in &inside.granted {
            let Some(dataset) = self.datasets.get(n) else { continue };
            for block in grant.overwrites.blocks() {
                dataset
                    .shape
                    .visit(block, &mut |start, end| pattern::fill(start, end, inside.key));
            }
        }
    }

    fn leave(&mut self, inside: Inside) {
        let mut wrong = Vec::new();
        for (n, grant) in &inside.granted {
            let Some(dataset) = self.datasets.get(n) else { continue };
            let mut first = None;
            for block in grant.overwrites.blocks() {
                dataset.shape.visit(block, &mut |start, end| {
                    first = first.or_else(|| pattern::left(start, end, inside.key, dataset.shape.elem));
                });
            }
            let Some((start, end)) = first else { continue };
            // Few bytes can have been written so by chance, but not twice.
            let certain = end - start >= pattern::CERTAIN || !self.suspects.insert((inside.site.clone(), *n, start));
            if certain {
                let at = start - dataset.shape.address;
                wrong.push(format!(
                    "loop {} leaves bytes {at} to {} of dataset {} as they were, and has declared that it overwrites them",
                    inside.site,
                    at + (end - start),
                    dataset.name
                ));
            }
        }
        wrong.into_iter().for_each(|what| self.tell(what));
        self.last = inside.site;
        for dataset in self.datasets.values() {
            guard::allow(guard::inner(&dataset.shape), false, false).ok();
        }
        for (Touch { page, .. }, _) in &self.touched {
            guard::allow((*page, *page + guard::PAGE), true, true).ok();
        }
    }

    /// Tells what has been touched in the loop that the program is in, and keeps what was touched between loops.
    fn hear(&mut self) {
        for touch in touches::take() {
            let dataset = self.datasets.get(&touch.dataset);
            let Some(dataset) = dataset.filter(|d| guard::holds(&d.shape, touch.page)) else {
                continue;
            };
            let Some(inside) = &self.inside else {
                self.touched.push((touch, self.last.clone()));
                continue;
            };
            let (site, name) = (&inside.site, &dataset.name);
            let what = match inside.granted.get(&touch.dataset) {
                Some(grant) if guard::has(&grant.written, touch.page) => continue,
                Some(grant) if guard::has(&grant.used, touch.page) => match touch.write {
                    true => format!("loop {site} writes dataset {name}, and has declared that it reads it"),
                    false => continue,
                },
                Some(_) => format!("loop {site} touches dataset {name} outside of the parts that it has declared"),
                None => format!("loop {site} touches dataset {name}, and has not declared that"),
            };
            self.tell(what);
        }
    }
}

/// The state, which has heard of all touches until now.
fn state() -> MutexGuard<'static, State> {
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    state.hear();
    state
}

fn thread() -> libc::pid_t {
    rustix::thread::gettid().as_raw_nonzero().get()
}
