//! What is alive: what is read before it is overwritten.

use crate::block::{Block, Region};
use crate::shape::Shape;
use crate::trace::{Event, Loop, Mode, Use};
use std::collections::BTreeMap;

/// Most address ranges of dead bytes: a dataset that is dead in more pieces is kept.
const MOST_ROWS: u64 = 1 << 22;

/// The datasets of a program, by number.
pub type Datasets = BTreeMap<u32, Shape>;

/// Bytes of declared data that are alive before each loop of `trace`. What the rest of the trace does not use counts as
/// alive: so does what its last loops leave.
pub fn alive(datasets: &Datasets, trace: &[Loop]) -> Vec<u64> {
    sweep(datasets, trace).into_iter().map(|(before, _)| before).collect()
}

/// The same in the midst of each loop, all of whose data is alive then.
pub fn alive_inside(datasets: &Datasets, trace: &[Loop]) -> Vec<u64> {
    sweep(datasets, trace).into_iter().map(|(_, inside)| inside).collect()
}

/// What is alive before each loop, and inside of it.
fn sweep(datasets: &Datasets, trace: &[Loop]) -> Vec<(u64, u64)> {
    let all: u64 = datasets.values().map(Shape::bytes).sum();
    let mut dead: BTreeMap<u32, Region> = BTreeMap::new();
    let mut dead_bytes = 0;
    let mut out = vec![(0, 0); trace.len()];
    for (at, one) in trace.iter().enumerate().rev() {
        for used in &one.uses {
            let Some(shape) = datasets.get(&used.dataset) else { continue };
            let Some(block) = part(used, shape) else { continue };
            let dead = dead.entry(used.dataset).or_default();
            dead_bytes -= dead.take(&block).elements() * shape.elem;
        }
        out[at].1 = all - dead_bytes;
        // Backwards: what a loop reads is alive before it, even if it then overwrites it.
        for used in one.in_order().rev() {
            let Some(shape) = datasets.get(&used.dataset) else { continue };
            let Some(block) = part(used, shape) else { continue };
            let dead = dead.entry(used.dataset).or_default();
            dead_bytes -= dead.take(&block).elements() * shape.elem;
            if used.mode == Mode::Write {
                dead.append(Region::of(block));
                dead_bytes += block.elements() * shape.elem;
            }
            if dead.is_too_fine() {
                // For the choice of a site it may count as alive.
                dead_bytes -= dead.elements() * shape.elem;
                *dead = Region::default();
            }
        }
        out[at].0 = all - dead_bytes;
    }
    out
}

/// The same where only what the loop itself overwrites counts as dead, and not what those after it do.
pub fn alive_but_next(datasets: &Datasets, trace: &[Loop]) -> Vec<u64> {
    let all: u64 = datasets.values().map(Shape::bytes).sum();
    let overwritten = |one: &Loop| {
        let used = |id: &u32| one.uses.iter().any(|u| u.dataset == *id);
        let its = datasets.iter().filter(|(id, _)| used(id));
        let mut verdict = Verdict::new(&its.map(|(id, shape)| (*id, *shape)).collect());
        verdict.enter(one);
        verdict.dead_bytes()
    };
    trace.iter().map(|one| all - overwritten(one)).collect()
}

/// The elements of a use.
fn part(used: &Use, shape: &Shape) -> Option<Block> {
    let whole = shape.whole();
    used.block.map_or(Some(whole), |block| block.common(&whole))
}

/// What becomes of the data that there was at a stop in one place.
#[derive(Debug, Clone)]
struct Fate {
    shape: Shape,
    /// Elements that nothing has used since.
    open: Region,
    /// Elements that were overwritten first.
    dead: Region,
}

/// What a program does to its datasets after it has been stopped.
#[derive(Debug, Clone, Default)]
pub struct Verdict {
    /// By address.
    fates: BTreeMap<u64, Fate>,
    /// Where each dataset lies now, as far as that is a place where one lay at the stop.
    places: BTreeMap<u32, u64>,
    /// Places that a dataset has left, and which, since the last loop: another one may come there, in exchange.
    left: BTreeMap<u64, u32>,
    /// Where the loops look that come now.
    shapes: Datasets,
}

impl Verdict {
    /// Nothing is decided.
    pub fn new(datasets: &Datasets) -> Self {
        let fate = |shape: &Shape| Fate {
            shape: *shape,
            open: Region::of(shape.whole()),
            dead: Region::default(),
        };
        Self {
            fates: datasets.values().map(|shape| (shape.address, fate(shape))).collect(),
            places: datasets.iter().map(|(id, shape)| (*id, shape.address)).collect(),
            left: BTreeMap::new(),
            shapes: datasets.clone(),
        }
    }

    /// The stop was inside this loop: what it uses is alive, the part that it has already overwritten too.
    pub fn inside(&mut self, one: &Loop) {
        for used in &one.uses {
            self.first(used, |_, _| ());
        }
    }

    /// What has happened since the stop; whether there is something more that need not be kept.
    pub fn happened(&mut self, event: &Event) -> bool {
        match event {
            Event::Enter(one) => {
                self.leave();
                return self.enter(one);
            }
            Event::Move { dataset, address } => self.moved(*dataset, *address),
            Event::Reset { inside: true } => self.fates.clear(),
            Event::Reset { inside: false } => self.close(),
        }
        false
    }

    /// A loop begins; whether it overwrites something of which nothing was known.
    fn enter(&mut self, one: &Loop) -> bool {
        let mut more = false;
        one.in_order().for_each(|used| {
            self.first(used, |fate, first| {
                if used.mode == Mode::Write {
                    more |= first.elements() > 0;
                    fate.dead.append(first);
                }
            });
        });
        more
    }

    /// No other dataset has come where one lay: that memory is none, and anybody may read it, from now on.
    fn leave(&mut self) {
        for place in std::mem::take(&mut self.left).into_keys() {
            self.give_up(place);
        }
    }

    /// What is open there stays alive.
    fn give_up(&mut self, place: u64) {
        if let Some(fate) = self.fates.get_mut(&place) {
            fate.open = Region::default();
        }
    }

    /// Takes out what is used for the first time.
    fn first(&mut self, used: &Use, what: impl FnOnce(&mut Fate, Region)) {
        let Some(place) = self.places.get(&used.dataset) else { return };
        let Some(fate) = self.fates.get_mut(place) else { return };
        let Some(block) = part(used, &fate.shape) else { return };
        let first = fate.open.take(&block);
        what(fate, first);
        if fate.open.is_too_fine() || fate.dead.is_too_fine() {
            self.fates.remove(place);
        }
    }

    /// What is open stays alive, whatever uses it.
    pub fn close(&mut self) {
        self.fates.values_mut().for_each(|f| f.open = Region::default());
    }

    /// A dataset lies elsewhere: where another one of its shape lay at the stop, what it does there decides; anywhere
    /// else it does nothing to what there was.
    fn moved(&mut self, dataset: u32, address: u64) {
        let place = self.places.remove(&dataset);
        if place == Some(address) {
            self.places.insert(dataset, address);
            return;
        }
        match place.filter(|place| !self.places.values().any(|p| p == place)) {
            Some(place) if address == 0 => self.give_up(place),
            Some(place) => drop(self.left.insert(place, dataset)),
            None => {}
        }
        if address == 0 {
            return;
        }
        // One that returns was nothing meanwhile.
        if self.left.remove(&address) == Some(dataset) {
            self.give_up(address);
        }
        // One that is not followed can come anywhere, and what it does there is not known.
        let now = self.shapes.get(&dataset);
        let now = now.and_then(|s| Shape::new(address, s.elem, s.extent, s.stride).ok());
        let Some(now) = now else {
            return self.close();
        };
        if self.fates.get(&address).is_some_and(|f| f.shape == now) {
            self.places.insert(dataset, address);
            return;
        }
        // Over a part of others: what they were is not followed any more.
        let (start, end) = now.range();
        self.fates.retain(|_, f| {
            let (first, behind) = f.shape.range();
            behind <= start || end <= first
        });
    }

    /// Bytes of which nothing is known yet.
    pub fn open_bytes(&self) -> u64 {
        self.fates.values().map(|f| f.open.elements() * f.shape.elem).sum()
    }

    /// Bytes that need not be kept.
    pub fn dead_bytes(&self) -> u64 {
        self.fates.values().map(|f| f.dead.elements() * f.shape.elem).sum()
    }

    /// Addresses of the bytes that need not be kept, in ascending order, neighbours joined.
    pub fn dead(&self) -> Vec<(u64, u64)> {
        let mut out = Vec::new();
        let mut rows = 0u64;
        for fate in self.fates.values() {
            let more = fate.dead.blocks().iter().map(|b| fate.shape.rows(b));
            let all = more.fold(rows, u64::saturating_add);
            if all <= MOST_ROWS {
                rows = all;
                fate.dead.blocks().iter().for_each(|b| fate.shape.spans(b, &mut out));
            }
        }
        join(&mut out);
        out
    }
}

/// Sorts runs of addresses, and makes one of those that touch.
pub fn join(runs: &mut Vec<(u64, u64)>) {
    runs.sort_unstable();
    runs.dedup_by(|next, last| {
        let joined = next.0 <= last.1;
        if joined {
            last.1 = last.1.max(next.1);
        }
        joined
    });
}

/// Those of `datasets` that lie apart from all others: what two of them have in common is followed in neither.
pub fn apart(datasets: &Datasets) -> Datasets {
    let mut ranges: Vec<(u64, u64, u32)> = datasets.iter().map(|(id, s)| (s.range().0, s.range().1, *id)).collect();
    ranges.sort_unstable();
    let mut out = datasets.clone();
    let mut last: Option<(u64, u32)> = None;
    for (start, end, id) in ranges {
        if let Some((_, before)) = last.filter(|(behind, _)| start < *behind) {
            out.remove(&id);
            out.remove(&before);
        }
        if last.is_none_or(|(behind, _)| behind < end) {
            last = Some((end, id));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SIDE: i64 = 5;
    const ELEM: u64 = 3;

    fn datasets() -> Datasets {
        let one = |id: u32| {
            (
                id,
                Shape::dense(u64::from(id) * 1000 + 1000, ELEM, &[SIDE as u64; 2]).unwrap(),
            )
        };
        (0..3).map(one).collect()
    }

    fn used() -> impl Strategy<Value = Use> {
        let mode = prop_oneof![Just(Mode::Read), Just(Mode::Write), Just(Mode::Write), Just(Mode::Both)];
        let side = || (0..SIDE, 1..=SIDE + 1);
        // Number 3 was never declared.
        (0..4u32, mode, side(), side()).prop_map(|(dataset, mode, x, y)| Use {
            dataset,
            mode,
            block: Some(Block::new(&[x.0, y.0], &[x.1, y.1])),
        })
    }

    fn trace() -> impl Strategy<Value = Vec<Loop>> {
        let one = (0..4u32, prop::collection::vec(used(), 0..4));
        let one = one.prop_map(|(site, uses)| Loop { site, ticks: 0, uses });
        prop::collection::vec(one, 0..12)
    }

    /// Whether the first use of an element from loop `at` on overwrites it: element by element, straight from the definition.
    fn is_dead(trace: &[Loop], at: usize, dataset: u32, x: i64, y: i64) -> bool {
        let here = |u: &&Use| u.dataset == dataset && u.block.unwrap().common(&Block::new(&[x, y], &[x + 1, y + 1])).is_some();
        let first = trace[at..].iter().find(|l| l.uses.iter().any(|u| here(&u)));
        first.is_some_and(|l| l.uses.iter().filter(here).all(|u| u.mode == Mode::Write))
    }

    fn count(trace: &[Loop], at: usize) -> u64 {
        let mut dead = 0;
        for dataset in 0..3 {
            for x in 0..SIDE {
                for y in 0..SIDE {
                    dead += u64::from(is_dead(trace, at, dataset, x, y));
                }
            }
        }
        dead
    }

    proptest! {
        #[test]
        fn the_sweep_agrees_with_the_definition(trace in trace()) {
            let all = 3 * (SIDE * SIDE) as u64;
            let expected: Vec<u64> = (0..trace.len()).map(|at| (all - count(&trace, at)) * ELEM).collect();
            prop_assert_eq!(alive(&datasets(), &trace), expected);
        }

        #[test]
        fn after_a_stop_as_much_is_dead(trace in trace(), at in 0..12usize) {
            let at = at.min(trace.len());
            let mut verdict = Verdict::new(&datasets());
            play(&mut verdict, trace[at..].iter().map(|l| Event::Enter(l.clone())));
            prop_assert_eq!(verdict.dead_bytes(), count(&trace, at) * ELEM);
            let spans = verdict.dead();
            prop_assert_eq!(spans.iter().map(|s| s.1 - s.0).sum::<u64>(), verdict.dead_bytes());
            prop_assert!(spans.windows(2).all(|w| w[0].1 < w[1].0));
            for (start, end) in spans {
                for address in start..end {
                    let (dataset, element) = (u32::try_from(address / 1000 - 1).unwrap(), (address % 1000 / ELEM) as i64);
                    prop_assert!(is_dead(&trace, at, dataset, element % SIDE, element / SIDE));
                }
            }
        }

        #[test]
        fn what_the_loop_of_the_stop_uses_is_alive(trace in trace(), at in 0..12usize) {
            prop_assume!(at < trace.len());
            let mut verdict = Verdict::new(&datasets());
            verdict.inside(&trace[at]);
            play(&mut verdict, trace[at + 1..].iter().map(|l| Event::Enter(l.clone())));
            for used in &trace[at].uses {
                let mut its = Vec::new();
                if let Some(shape) = datasets().get(&used.dataset) {
                    shape.spans(&used.block.unwrap(), &mut its);
                }
                let dead = verdict.dead();
                let common = |a: &(u64, u64)| dead.iter().any(|b| a.0 < b.1 && b.0 < a.1);
                prop_assert!(!its.iter().any(common));
            }
        }
    }

    fn play(verdict: &mut Verdict, events: impl IntoIterator<Item = Event>) {
        for event in events {
            verdict.happened(&event);
        }
    }

    fn enter(dataset: u32, mode: Mode) -> Event {
        let block = None;
        let uses = vec![Use { dataset, mode, block }];
        Event::Enter(Loop { site: 1, ticks: 0, uses })
    }

    #[test]
    fn exchanged_buffers_are_followed() {
        let (datasets, bytes) = (datasets(), (SIDE * SIDE) as u64 * ELEM);
        let to = |dataset, address| Event::Move { dataset, address };
        // 1 and 2 change places; what was 2 is overwritten as 1, what was 1 is read as 2.
        let events = [
            to(1, 3000),
            to(2, 2000),
            enter(1, Mode::Write),
            enter(2, Mode::Read),
            enter(2, Mode::Write),
        ];
        let mut verdict = Verdict::new(&datasets);
        play(&mut verdict, events);
        assert_eq!((verdict.dead(), verdict.open_bytes()), (vec![(3000, 3000 + bytes)], bytes));
        // Whoever was not there at the stop, or is not followed, may use anything.
        let mut verdict = Verdict::new(&datasets);
        let more = [enter(0, Mode::Write), to(7, 9000), enter(1, Mode::Write)].map(|e| verdict.happened(&e));
        assert_eq!(more, [true, false, false]);
        assert_eq!((verdict.dead_bytes(), verdict.open_bytes()), (bytes, 0));
        verdict.happened(&Event::Reset { inside: true });
        assert_eq!((verdict.dead_bytes(), verdict.open_bytes()), (0, 0));
        // New memory is not that of the stop.
        let mut verdict = Verdict::new(&datasets);
        for event in [to(0, 9000), enter(0, Mode::Write)] {
            assert!(!verdict.happened(&event));
        }
        assert_eq!((verdict.dead_bytes(), verdict.open_bytes()), (0, 2 * bytes));
        // Nor is what lies across others.
        let mut verdict = Verdict::new(&datasets);
        play(&mut verdict, [to(0, 2010), enter(0, Mode::Write), enter(1, Mode::Write)]);
        assert_eq!((verdict.dead_bytes(), verdict.open_bytes()), (0, bytes));
        // What was none for a while may have been read meanwhile; not where it is only said again where it is.
        for events in [
            [to(1, 0), to(1, 2000)],
            [to(1, 9000), to(1, 2000)],
            [to(1, 9000), enter(0, Mode::Read)],
        ] {
            let mut verdict = Verdict::new(&datasets);
            play(&mut verdict, events.clone());
            play(&mut verdict, [to(1, 2000), enter(1, Mode::Write)]);
            assert_eq!(verdict.dead_bytes(), 0, "{events:?}");
        }
        let mut verdict = Verdict::new(&datasets);
        play(&mut verdict, [to(1, 2000), enter(1, Mode::Write)]);
        assert_eq!(verdict.dead_bytes(), bytes);
        // What was given up is used no more.
        let mut verdict = Verdict::new(&datasets);
        play(&mut verdict, [to(1, 0), enter(1, Mode::Write)]);
        assert_eq!(verdict.dead_bytes(), 0);
    }

    #[test]
    fn what_is_dead_in_too_many_pieces_is_kept() {
        let scattered = Shape::new(1 << 20, 1, [1 << 40, 1, 1, 1, 1], [2, 0, 0, 0, 0]).unwrap();
        let dense = Shape::dense(0, 8, &[10]).unwrap();
        let mut verdict = Verdict::new(&[(1, scattered), (2, dense)].into());
        play(&mut verdict, [enter(1, Mode::Write), enter(2, Mode::Write)]);
        assert_eq!(verdict.dead(), [(0, 80)]);
    }

    #[test]
    fn datasets_that_overlap_are_not_followed() {
        let at = |address| Shape::dense(address, 10, &[10]).unwrap();
        let all: Datasets = [
            (1, at(0)),
            (2, at(100)),
            (3, at(150)),
            (4, at(160)),
            (5, at(300)),
            (6, at(300)),
        ]
        .into();
        assert_eq!(apart(&all).into_keys().collect::<Vec<_>>(), [1]);
    }
}
