//! Faults.
fn main() {}
