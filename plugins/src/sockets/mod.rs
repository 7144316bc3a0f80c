//! Sockets: one folder per family, options common to all here.

pub(crate) mod names;
pub(crate) mod netlink;
pub(crate) mod options;
pub(crate) mod queue;
mod send_buffer;
pub(crate) mod tcp;
pub(crate) mod udp;
pub(crate) mod unix;
