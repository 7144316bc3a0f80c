//! Posting and polling.

mod extended_poll;
mod extended_send;
mod poll;
mod recv;
mod send;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use extended_poll::extend_cq;
pub(crate) use extended_send::{extend_qp, send_operations};
pub(crate) use poll::{collect, forget_saved, poll_cq, req_notify_cq, takes_receive};
pub(crate) use recv::{post_recv, post_srq_recv, repost, repost_shared};
pub(crate) use send::{give, mark, post_send};
