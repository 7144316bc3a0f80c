//! Work that needs nothing of each other, spread over the processors.

use std::sync::atomic::{AtomicUsize, Ordering};

/// A thread is not worth its start for fewer items.
const WORTH: usize = 4;

/// What `work` makes of each item, in their order.
pub(crate) fn each<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let share = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(at) else { return done };
            done.push((at, work(item)));
        }
    };
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let helpers = processors.min(items.len().div_ceil(WORTH)).saturating_sub(1);
    let mut done = std::thread::scope(|scope| {
        let helpers: Vec<_> = (0..helpers).map(|_| scope.spawn(share)).collect();
        let mut done = share();
        done.extend(helpers.into_iter().flat_map(|h| h.join().unwrap_or_default()));
        done
    });
    done.sort_unstable_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn results_come_in_the_order_of_the_items() {
        let items: Vec<usize> = (0..1000).collect();
        assert_eq!(
            super::each(&items, |n| n * 2),
            items.iter().map(|n| n * 2).collect::<Vec<_>>()
        );
        assert!(super::each(&[], |n: &usize| *n).is_empty());
    }
}
