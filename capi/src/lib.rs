//! `libbelay.so`: the functions of `include/belay.h` and `belay_access.h`. They convert, guard and delegate; what they
//! do is in `belay-recall` and `belay-tracker`.
//!
//! Every function returns 0 or a negative errno value, and leaves the words for `belay_error`. A null pointer where one
//! is needed is EINVAL.

mod access;
mod call;
mod door;
mod error;
mod history;
mod options;
mod regions;
