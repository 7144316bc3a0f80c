//! Fuzzing of every decoder of bytes that come from disk or network, on stable Rust.
//!
//! ```text
//! corpus (real files) ──> mutate ──> wrap (checksums made right) ──> target ──> panic, hang or memory: the input is kept
//!    └──────────────── inputs that reached new code, where the build counts that ────────────┘
//! ```
//! `cargo test -p belay-fuzz` runs the targets of manifests, chunks and images for 30 s each and the others for one.
//! `scripts/fuzz` builds with coverage counters (`-C passes=sancov-module`, which stable has) and runs each for ten
//! minutes.

pub mod coverage;
pub mod engine;
pub mod guard;
pub mod mutate;
pub mod targets;
mod values;
