//! The plan, carried out on a model of memory that forks, must give every process exactly its own pages, whatever they
//! have in common.

use super::*;
use crate::tree::tests::{agent, running};
use std::collections::{BTreeMap, BTreeSet};

/// Where each page is stored.
type Pages = BTreeMap<u64, (u32, u32)>;

const FIRST: u64 = 0x10_0000;

struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }
}

fn vma(from: u64, to: u64, kind: VmaKind, flags: &[&str]) -> Vma {
    Vma {
        start: from * PAGE,
        end: to * PAGE,
        prot: 3,
        kind,
        flags: flags.iter().map(|f| (*f).to_owned()).collect(),
        guards: Vec::new(),
        key: 0,
    }
}

fn memory() -> VmaKind {
    VmaKind::Anonymous { name: None }
}

fn extents(pages: &Pages) -> Vec<Extent> {
    let mut out: Vec<Extent> = Vec::new();
    for (at, (chunk, page)) in pages {
        match out.last_mut() {
            Some(e) if e.end() == at * PAGE && e.chunk == *chunk && e.page + e.pages() as u32 == *page && e.pages() < 300 => {
                e.bytes += PAGE
            }
            _ => out.push(Extent {
                vaddr: at * PAGE,
                bytes: PAGE,
                chunk: *chunk,
                page: *page,
            }),
        }
    }
    out
}

fn put(pages: &mut Pages, list: &[Extent]) {
    for e in list {
        for i in 0..e.pages() {
            pages.insert(e.vaddr / PAGE + i, (e.chunk, e.page + i as u32));
        }
    }
}

fn all(ranges: &[Range]) -> impl Iterator<Item = u64> + '_ {
    ranges.iter().flat_map(|r| r.start / PAGE..r.end / PAGE)
}

/// Processes that fork each other and write, give back and map.
fn history(dice: &mut Dice) -> Vec<(Process, Pages)> {
    let mut out: Vec<(Process, Pages)> = Vec::new();
    for n in 0..1 + dice.below(7) {
        let maker = dice.below(n + 1) as usize;
        let pid = 101 + n as i32;
        let (mut p, mut pages) = match out.get(maker) {
            Some((maker, pages)) => {
                let mut p = running(pid, maker.pid);
                p.vmas.clone_from(&maker.vmas);
                (p, pages.clone())
            }
            None => (running(pid, agent().pid), Pages::new()),
        };
        for _ in 0..dice.below(4) {
            let from = FIRST + dice.below(6) * 2000;
            let kind = [memory(), VmaKind::Heap, VmaKind::Stack][dice.below(3) as usize].clone();
            let flags: &[&str] = [&[][..], &["nr"], &["dp"]][dice.below(3) as usize];
            let to = from + 100 + dice.below(1900);
            p.vmas.retain(|v| v.end <= from * PAGE || v.start >= to * PAGE);
            pages.retain(|at, _| *at < from || *at >= to);
            p.vmas.push(vma(from, to, kind, flags));
            p.vmas.sort_by_key(|v| v.start);
        }
        for v in &p.vmas {
            let (from, length) = (v.start / PAGE, (v.end - v.start) / PAGE);
            for _ in 0..dice.below(4) {
                let first = from + dice.below(length);
                let run = first..(first + dice.below(1200)).min(from + length);
                let place = (1 + dice.below(3) as u32, dice.below(1 << 20) as u32);
                let written = dice.below(3) > 0;
                for at in run.clone() {
                    if written {
                        pages.insert(at, (place.0, place.1 + (at - run.start) as u32));
                    } else {
                        pages.remove(&at);
                    }
                }
            }
        }
        let of = p.vmas.clone();
        pages.retain(|at, _| of.iter().any(|v| v.start <= at * PAGE && at * PAGE < v.end));
        out.push((p, pages));
    }
    out
}

/// Carries out the plan for the process of node `id`, which has inherited these mappings and pages, and for those that it makes.
fn live(tree: &Tree, id: NodeId, job: &[(Process, Pages)], plan: &HashMap<i32, Share>, mut maps: BTreeSet<u64>, mut pages: Pages) {
    let node = &tree.nodes[id];
    let Role::Process(i) = node.role else {
        panic!("only processes")
    };
    let (p, wanted) = &job[i];
    let share = &plan[&p.pid];
    for at in all(&share.maps.iter().map(|m| m.range.clone()).collect::<Vec<_>>()) {
        assert!(maps.insert(at), "maps over something");
    }
    assert!(
        all(&places(&share.reads)).all(|at| maps.contains(&at)),
        "reads where nothing is mapped"
    );
    put(&mut pages, &share.reads);
    for child in node.before.iter().chain(&node.after) {
        live(tree, *child, job, plan, maps.clone(), pages.clone());
    }
    let kept: BTreeSet<u64> = all(&share.kept).collect();
    assert!(kept.is_subset(&maps));
    let own = |at: &u64| {
        p.vmas
            .iter()
            .any(|v| v.start <= at * PAGE && at * PAGE < v.end && !v.flags.iter().any(|f| f == "dp"))
    };
    assert!(kept.iter().all(own), "keeps what is not its own");
    pages.retain(|at, _| kept.contains(at));
    for at in all(&share.drops) {
        pages.remove(&at);
    }
    put(&mut pages, &share.rest);
    assert!(pages == *wanted, "process {}", p.pid);
}

fn planned(job: &[(Process, Pages)], own: &[Range]) -> (Tree, HashMap<i32, Share>) {
    let processes: Vec<Process> = job.iter().map(|(p, _)| p.clone()).collect();
    let tree = tree::plan(&agent(), &processes, 0, (1 << 22, None), &BTreeSet::new(), &HashMap::new()).unwrap();
    let table = job.iter().map(|(p, pages)| (p.pid, extents(pages))).collect();
    let plan = plan(&tree, &processes, &table, own);
    (tree, plan)
}

#[test]
fn every_process_ends_with_its_own_pages() {
    let mut read = 0;
    for seed in 1..200u64 {
        let job = history(&mut Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1));
        let (tree, plan) = planned(&job, &[]);
        for child in tree.nodes[AGENT].before.iter().chain(&tree.nodes[AGENT].after) {
            live(&tree, *child, &job, &plan, BTreeSet::new(), Pages::new());
        }
        read += plan.values().map(|s| s.reads.len()).sum::<usize>();
    }
    assert!(read > 100, "{read}");
}

/// A maker and two children with the same full mapping.
fn alike() -> Vec<(Process, Pages)> {
    let pages: Pages = (0..1000).map(|i| (FIRST + i, (1, i as u32))).collect();
    let process = |pid, ppid| {
        let mut p = running(pid, ppid);
        p.vmas.push(vma(FIRST, FIRST + 1000, memory(), &[]));
        (p, pages.clone())
    };
    vec![process(101, agent().pid), process(102, 101), process(103, 102)]
}

#[test]
fn what_is_common_is_read_once() {
    let (_, plan) = planned(&alike(), &[]);
    let read = |s: &Share| s.reads.iter().chain(&s.rest).map(Extent::pages).sum::<u64>();
    assert_eq!([101, 102, 103].map(|pid| read(&plan[&pid])), [1000, 0, 0]);
    let whole = FIRST * PAGE..(FIRST + 1000) * PAGE;
    assert!(plan
        .values()
        .all(|s| s.drops.is_empty() && s.kept == std::slice::from_ref(&whole)));
}

#[test]
fn memory_without_huge_pages_is_inherited_as_such() {
    let mut job = alike();
    job[0].0.vmas[0].flags.push("nh".into());
    job[1].0.vmas[0].flags.push("nh".into());
    let (_, plan) = planned(&job, &[]);
    assert!(plan[&101].maps.iter().all(|m| m.small) && !plan[&101].reads.is_empty());
    assert!(
        !plan[&102].kept.is_empty() && plan[&103].kept.is_empty(),
        "the last may have some"
    );
}

#[test]
fn nothing_is_mapped_beside_what_the_restart_has() {
    let beside = (FIRST + 1000) * PAGE + MARGIN - PAGE;
    for own in [
        beside..beside + PAGE,
        FIRST * PAGE..FIRST * PAGE + PAGE,
        0..FIRST * PAGE - MARGIN + PAGE,
    ] {
        let (_, plan) = planned(&alike(), &[own]);
        assert!(plan.values().all(|s| s.maps.is_empty() && s.kept.is_empty()));
    }
    let (_, plan) = planned(
        &alike(),
        &[beside + PAGE..beside + 2 * PAGE, 0xffff_ffff_ff60_0000..0xffff_ffff_ff60_1000],
    );
    assert!(!plan[&101].maps.is_empty());
}
