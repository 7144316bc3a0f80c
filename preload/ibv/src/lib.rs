//! Types and constants of `infiniband/verbs.h` and `rdma/rdma_cma.h` (rdma-core 44), as far as `preload/verbs` needs
//! them. Names and layouts are those of the headers, without the prefix; `tests/layout.rs`
//! compares them with Debian's by compiling C.
//!
//! Enumerations are numbers: what a program or a provider gives may be newer than this.
#![allow(missing_docs)]

mod attr;
mod context;
mod manager;
mod object;
mod queue;
mod work;

pub use attr::*;
pub use context::*;
pub use manager::*;
pub use object::*;
pub use queue::*;
pub use work::*;

use std::ffi::{c_int, c_void};

/// What a C function returns: 0, or -1 or an errno value.
pub type Int = c_int;
/// Something that only passes through.
pub type Opaque = c_void;

/// Length of the global route header in front of a datagram.
pub const GRH_BYTES: usize = 40;
