//! What no policy can be better than: bytes that a cache can keep, and time for passes that write and read.
//!
//! Bytes: every byte of a version is a page of its own that is wanted from its put to its get; a cache of `room` bytes
//! keeps at most `room` of them at any time. To drop those with the farthest next read is optimal for pages of one
//! size, so this is exact for bytes, and a bound for whole versions, whose exact optimum is hard to find ([`whole`]
//! tries all subsets).
//!
//! Time: what does not fit above a link has to go through it, and what is put or read last still has its interval after that.

use std::collections::BTreeMap;

/// What a program does, in its order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Writes a version of so many bytes.
    Put(u64, u64),
    /// Reads a version.
    Get(u64),
}

/// Bytes from one use of a version to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Interval {
    from: usize,
    to: usize,
    size: u64,
}

fn intervals(ops: &[Op]) -> Vec<Interval> {
    let mut last: BTreeMap<u64, (usize, u64)> = BTreeMap::new();
    let mut found = Vec::new();
    for (at, op) in ops.iter().enumerate() {
        match *op {
            Op::Put(version, size) => {
                last.insert(version, (at, size));
            }
            Op::Get(version) => {
                if let Some((from, size)) = last.get_mut(&version) {
                    let size = *size;
                    found.push(Interval {
                        from: *from,
                        to: at,
                        size,
                    });
                    *from = at;
                }
            }
        }
    }
    found.sort_by_key(|i| i.from);
    found
}

/// Bytes between uses, and how many of them `room` bytes of cache can keep at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept {
    /// All that is read.
    pub read: u64,
    /// Of which the cache can have kept so much.
    pub kept: u64,
}

impl Kept {
    /// What has to be fetched, and before that to be spilled.
    pub fn fetched(self) -> u64 {
        self.read - self.kept
    }
}

/// The most bytes that a cache of `room` can keep.
pub fn kept(ops: &[Op], room: u64) -> Kept {
    let all = intervals(ops);
    let mut cache: BTreeMap<usize, u64> = BTreeMap::new();
    let (mut used, mut kept) = (0, 0);
    for i in &all {
        // What has been read before this begins. A read and the begin of the next interval of the same version are one moment.
        while let Some((to, size)) = cache.first_key_value().map(|(t, s)| (*t, *s)).filter(|(t, _)| *t <= i.from) {
            cache.remove(&to);
            used -= size;
            kept += size;
        }
        cache.insert(i.to, i.size);
        used += i.size;
        while used > room {
            let Some((to, size)) = cache.pop_last() else { break };
            let gone = size.min(used - room);
            used -= gone;
            if gone < size {
                cache.insert(to, size - gone);
            }
        }
    }
    Kept {
        read: all.iter().map(|i| i.size).sum(),
        kept: kept + used,
    }
}

/// The most bytes that can be kept when a version is kept whole or not at all, by trying every subset. For few versions only.
pub fn whole(ops: &[Op], room: u64) -> u64 {
    let all = intervals(ops);
    let fits = |set: u32| {
        let of = |at: usize| {
            let inside = all
                .iter()
                .enumerate()
                .filter(|(i, v)| set & 1 << i != 0 && v.from <= at && at < v.to);
            inside.map(|(_, v)| v.size).sum::<u64>()
        };
        all.iter().all(|i| of(i.from) <= room)
    };
    let size = |set: u32| {
        all.iter()
            .enumerate()
            .filter(|(i, _)| set & 1 << i != 0)
            .map(|(_, v)| v.size)
            .sum()
    };
    (0..1u32 << all.len()).filter(|s| fits(*s)).map(size).max().unwrap_or(0)
}

/// A link, and the room of all tiers above it together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Bytes per second in the direction of the pass, of all that share it.
    pub rate: f64,
    /// Bytes above, of each program.
    pub room: u64,
    /// So many programs, one after the other in the list, share one link.
    pub shared: usize,
}

/// How a program works.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    /// Seconds of its own before each put and get.
    pub interval: f64,
    /// Bytes per second of a copy within the fastest tier; infinite to leave it out.
    pub copy: f64,
}

/// The least seconds of one pass, all puts or all gets, of several programs that begin together, until the last one is
/// done. Each list has the sizes in the order of the pass; a pass of gets may begin with full tiers.
///
/// Between the begin of put (or get) `l` and the end of `m`, what these are together but for the room above a link has
/// to go through it: before `l` a put's bytes are nowhere, and a get's find at most the room. The programs' own time
/// before `l` and after `m` comes on top. (With `l` = 0 alone this is the limit of the specification.)
pub fn pass(programs: &[Vec<u64>], links: &[Link], pace: Pace) -> f64 {
    let own = |p: &Vec<u64>| p.len() as f64 * pace.interval + p.iter().sum::<u64>() as f64 / pace.copy;
    let alone = programs.iter().map(own).fold(0.0, f64::max);
    let of_link = |link: &Link| {
        let groups = programs.chunks(link.shared.max(1));
        // What several share, one of them alone cannot pass faster.
        let each = groups.flat_map(|g| std::iter::once(g).chain(g.chunks(1)));
        each.map(|g| through(g, link, pace)).fold(0.0, f64::max)
    };
    links.iter().map(of_link).fold(alone, f64::max)
}

fn through(group: &[Vec<u64>], link: &Link, pace: Pace) -> f64 {
    let count = group.iter().map(Vec::len).min().unwrap_or(0);
    // Sums of bytes before each version, of each program.
    let sums = |p: &Vec<u64>| {
        let before = p.iter().scan(0, |sum, s| Some(std::mem::replace(sum, *sum + s)));
        before.chain([p.iter().sum()]).collect::<Vec<u64>>()
    };
    let sums: Vec<Vec<u64>> = group.iter().map(sums).collect();
    let own = |p: &Vec<u64>, from: usize, to: usize| (to - from) as f64 * pace.interval + (p[to] - p[from]) as f64 / pace.copy;
    let least = |from: usize, to: usize| sums.iter().map(|p| own(p, from, to)).fold(f64::INFINITY, f64::min);
    let rest: Vec<f64> = (0..=count).map(|m| least(m, count)).collect();
    let mut best = 0.0;
    for l in 0..count {
        let before = least(0, l) + pace.interval;
        for (m, rest) in rest.iter().enumerate().skip(l + 1) {
            let over = |p: &Vec<u64>| (p[m] - p[l]).saturating_sub(link.room);
            let bytes: u64 = sums.iter().map(over).sum();
            if bytes > 0 {
                best = f64::max(best, before + bytes as f64 / link.rate + rest);
            }
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// All puts, then all gets.
    fn passes(sizes: &[u64], order: &[u64]) -> Vec<Op> {
        let puts = sizes.iter().enumerate().map(|(v, s)| Op::Put(v as u64, *s));
        puts.chain(order.iter().map(|v| Op::Get(*v))).collect()
    }

    /// Whole versions; the one with the farthest read goes.
    fn belady(ops: &[Op], room: u64) -> u64 {
        let mut cache: BTreeMap<usize, u64> = BTreeMap::new();
        let mut kept = 0;
        for i in intervals(ops) {
            let later = cache.split_off(&(i.from + 1));
            kept += cache.values().sum::<u64>();
            cache = later;
            cache.insert(i.to, i.size);
            while cache.values().sum::<u64>() > room {
                cache.pop_last();
            }
        }
        kept + cache.values().sum::<u64>()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(150))]
        /// Bytes >= whole versions >= a policy, with puts and gets in any order.
        #[test]
        fn the_bound_holds_for_the_exact_optimum(
            sizes in prop::collection::vec(1u64..60, 8),
            moments in Just((0u64..16).collect::<Vec<_>>()).prop_shuffle(),
            room in 10u64..200,
        ) {
            let mut seen = [false; 8];
            let ops: Vec<Op> = moments.iter().map(|m| {
                let v = m % 8;
                if std::mem::replace(&mut seen[v as usize], true) { Op::Get(v) } else { Op::Put(v, sizes[v as usize]) }
            }).collect();
            let (bytes, exact, policy) = (kept(&ops, room).kept, whole(&ops, room), belady(&ops, room));
            prop_assert!(bytes >= exact && exact >= policy, "{bytes} {exact} {policy}");
        }
    }

    #[test]
    fn versions_of_one_size_are_kept_exactly() {
        let ops = passes(&[10; 12], &[11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]);
        assert_eq!(kept(&ops, 40), Kept { read: 120, kept: 40 });
        assert_eq!(whole(&ops, 40), 40);
        assert_eq!(kept(&ops, 0).fetched(), 120);
        assert_eq!(kept(&ops, 1000).fetched(), 0);
    }

    #[test]
    fn a_version_that_is_read_twice_can_be_kept_twice() {
        let ops = [Op::Put(1, 7), Op::Get(1), Op::Put(2, 7), Op::Get(2), Op::Get(1)];
        assert_eq!(kept(&ops, 14), Kept { read: 21, kept: 21 });
        assert_eq!(kept(&ops, 7), Kept { read: 21, kept: 14 });
    }

    /// The worked example of the specification: 12.9 GB have to touch the disk each way.
    #[test]
    fn the_worked_example() {
        const GIB: u64 = 1 << 30;
        let ssd = Link {
            rate: 2e9,
            room: 36 * GIB,
            shared: 1,
        };
        let pace = Pace {
            interval: 0.01,
            copy: f64::INFINITY,
        };
        let t = pass(&[vec![128 << 20; 384]], &[ssd], pace);
        assert!((t - 6.45).abs() < 0.01, "{t}");
        // Eight that share eight times as much.
        let shared = Link {
            rate: 16e9,
            shared: 8,
            ..ssd
        };
        let all = pass(&vec![vec![128 << 20; 384]; 8], &[shared], pace);
        assert!((all - t).abs() < 1e-9, "{all}");
    }

    #[test]
    fn a_burst_in_the_middle_counts_with_what_follows() {
        let mut sizes = vec![1; 100];
        sizes[50..60].fill(1000);
        let link = Link {
            rate: 1000.0,
            room: 0,
            shared: 1,
        };
        let pace = Pace {
            interval: 0.1,
            copy: f64::INFINITY,
        };
        let t = pass(&[sizes], &[link], pace);
        // Nothing of it is there before 51 intervals have passed.
        assert!((t - (5.1 + 10.0 + 4.0)).abs() < 1e-6, "{t}");
    }
}
