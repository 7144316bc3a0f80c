//! The exported functions, and those behind the tables of a context: each converts, guards and delegates.

mod ah;
mod cq;
mod device;
mod event;
mod memory;
mod qp;
mod query;
mod srq;

pub(crate) use cq::{create_cq_ex, ibv_create_cq, ibv_destroy_cq, make_extended, make_plain, moderate_again, modify_cq, SPARE};
pub(crate) use device::{ibv_free_device_list, ibv_get_device_list, ibv_open_device, open_real};
pub(crate) use event::{ibv_create_comp_channel, ibv_destroy_comp_channel, save_events};
pub(crate) use memory::{advise_mr, alloc_parent_domain, alloc_td, dealloc_td, ibv_alloc_pd, real_parent_domain, register_again};
pub(crate) use qp::{create_qp_ex, ibv_create_qp, ibv_destroy_qp, ibv_modify_qp, real_init, real_init_ex, roomy};
pub(crate) use query::{ibv_get_pkey_index, ibv_query_device, query_device_ex, query_port_sized, query_rt_values};
pub(crate) use srq::{get_srq_num, ibv_create_srq, ibv_destroy_srq};

use crate::gate;
use crate::shadow::ShadowContext;
use belay_ibv::{Context, Int, Opaque};
use std::ptr::null_mut;

/// Whether a call about this context (null: about none) comes from a real function, and means the real one. Those may
/// call the program's functions too, as its allocator, which has shadows.
unsafe fn means_real(context: *mut Context) -> bool {
    gate::nested() && (gate::is_keeper() || !ShadowContext::is_one(context))
}

/// Goes in, unless the call comes from a real function: then the real function that it means is called in turn.
macro_rules! enter {
    ($context:expr, $real:expr) => {{
        if $crate::api::means_real($context) {
            return $real;
        }
        $crate::gate::Call::enter()
    }};
}
use enter;

/// Makes an object of which `fits` says yes, whose number the program is going to see. One that does not fit goes at once,
/// and small ones of its kind take the numbers until one fits: they are held, and none of the program's size. At most so
/// many are made.
fn make_fitting<T>(
    most: usize,
    mut make: impl FnMut() -> *mut T,
    mut make_small: impl FnMut() -> *mut T,
    destroy: impl Fn(*mut T) -> Int,
    fits: impl Fn(*mut T) -> bool,
) -> *mut T {
    let (mut held, mut left) = (Vec::new(), most);
    let mut search = |left: &mut usize| loop {
        let small = if *left > 0 { make_small() } else { none(libc::ENOMEM) };
        *left = left.saturating_sub(1);
        if small.is_null() {
            return false;
        }
        if fits(small) {
            destroy(small);
            return true;
        }
        held.push(small);
    };
    let made = 'made: {
        for round in 1.. {
            // One adapter gives the number next that has become free; another goes on counting, so that more than one
            // try is worth while.
            for _ in 0..round {
                let made = make();
                if made.is_null() || fits(made) {
                    break 'made made;
                }
                destroy(made);
                left = left.saturating_sub(1);
            }
            if !search(&mut left) {
                break;
            }
        }
        null_mut()
    };
    let error = crate::errno();
    for small in held {
        destroy(small);
    }
    crate::set_errno(error);
    made
}

/// Says why there is no object.
fn none<T>(error: i32) -> *mut T {
    crate::set_errno(error);
    null_mut()
}

/// A pointer that a program keeps with an object, in which a real object keeps its shadow.
pub(crate) fn keeps<T>(shadow: *mut T) -> *mut Opaque {
    shadow.cast()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};
    use std::collections::BTreeSet;

    /// An adapter's numbers: the first free one, or always the next.
    #[derive(Default)]
    struct Numbers {
        used: RefCell<BTreeSet<usize>>,
        next: Cell<usize>,
        counts: bool,
    }

    impl Numbers {
        fn take(&self) -> *mut u8 {
            let mut used = self.used.borrow_mut();
            let mut number = if self.counts { self.next.get() } else { 1 };
            number = (number.max(1)..).find(|n| !used.contains(n)).unwrap();
            used.insert(number);
            self.next.set(number + 1);
            number as *mut u8
        }

        fn give(&self, object: *mut u8) -> Int {
            assert!(self.used.borrow_mut().remove(&(object as usize)));
            0
        }
    }

    #[test]
    fn many_numbers_that_do_not_fit_are_passed_and_held_by_small_objects() {
        for counts in [false, true] {
            let numbers = Numbers {
                counts,
                ..Numbers::default()
            };
            let (large, most_large) = (Cell::new(0), Cell::new(0));
            let make = || {
                large.set(large.get() + 1);
                most_large.set(most_large.get().max(large.get()));
                numbers.take()
            };
            // Shared out as in `translate`.
            let fits = |object: *mut u8| object as usize > 3000 && (object as u32).wrapping_mul(0x9e37_79b1) >> 8 & 3 == 1;
            // What is made large goes before the next is made.
            let destroy = |object| {
                large.set(0);
                numbers.give(object)
            };
            let made = make_fitting(10_000, make, || numbers.take(), destroy, fits);
            assert!(fits(made) && most_large.get() == 1, "{counts}");
            assert_eq!(numbers.used.borrow().len(), 1);
            let none = make_fitting(10, || numbers.take(), || numbers.take(), |o| numbers.give(o), |_| false);
            assert!(none.is_null() && crate::errno() == libc::ENOMEM);
            assert_eq!(numbers.used.borrow().len(), 1);
        }
    }
}
