//! The exported functions, and those behind the tables of a context: each converts, guards and delegates.

mod ah;
mod cq;
mod device;
mod event;
mod memory;
mod qp;
mod query;
mod srq;

pub(crate) use cq::{create_cq_ex, make_extended, make_plain, modify_cq};
pub(crate) use device::open_real;
pub(crate) use event::next_async;
pub(crate) use memory::{advise_mr, alloc_parent_domain, alloc_td, dealloc_td, real_parent_domain, register_again};
pub(crate) use qp::{create_qp_ex, real_init, real_init_ex, roomy};
pub(crate) use query::{query_device_ex, query_port_sized, query_rt_values};
pub(crate) use srq::get_srq_num;

use crate::gate;
use crate::shadow::ShadowContext;
use belay_ibv::{Context, Opaque};

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

/// Says why there is no object.
fn none<T>(error: i32) -> *mut T {
    crate::set_errno(error);
    std::ptr::null_mut()
}

/// A pointer that a program keeps with an object, in which a real object keeps its shadow.
pub(crate) fn keeps<T>(shadow: *mut T) -> *mut Opaque {
    shadow.cast()
}
