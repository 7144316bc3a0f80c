//! The `belay` command line.
fn main() {}
