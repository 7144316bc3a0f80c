//! Work that needs nothing of each other, spread over the processors.

use std::sync::{Mutex, PoisonError};

/// A thread is not worth its start for fewer items.
const WORTH: usize = 4;

/// What `work` makes of each item, in their order. Where it panics, so does this.
pub fn each<T: Send, R: Send>(items: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    let count = items.len();
    let items = Mutex::new(items.into_iter().enumerate());
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    let share = || {
        let mut done = Vec::new();
        while let Some((at, item)) = next() {
            done.push((at, work(item)));
        }
        done
    };
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let helpers = processors.min(count.div_ceil(WORTH)).saturating_sub(1);
    let mut done = std::thread::scope(|scope| {
        let thread = || std::thread::Builder::new().name("belay-spread".into());
        // Fewer are no failure.
        let helpers: Vec<_> = (0..helpers).map_while(|_| thread().spawn_scoped(scope, share).ok()).collect();
        let mut done = share();
        for helper in helpers {
            done.extend(helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
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
            super::each(items.clone(), |n| n * 2),
            items.iter().map(|n| n * 2).collect::<Vec<_>>()
        );
        assert!(super::each(Vec::new(), |n: usize| n).is_empty());
    }
}
