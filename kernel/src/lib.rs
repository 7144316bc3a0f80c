//! Typed access to the kernel interfaces that capture and restart need.
//!
//! Each module wraps one interface and nothing more; decisions are made by the callers.
