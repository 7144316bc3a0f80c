//! Declared accesses: a program says of each of its loops which parts of which datasets it reads and which it
//! overwrites. What is overwritten before it is read again is dead, and a checkpoint does not need it. Pure: no I/O, no
//! clock; time is an argument.
//!
//! | module | contents |
//! |---|---|
//! | `block` | parts of a dataset as boxes of elements, and sets of them |
//! | `shape` | where the elements of a dataset lie in memory |
//! | `trace` | loops and what they use |
//! | `live` | what is alive at each point of a trace, and what becomes of it after a stop |
//! | `pages` | which pages that leaves out, and which hold little that is alive |
//! | `site` | where to stop |
//! | `global` | arrays that processes have in parts |
//! | `index` | what an export says of them |
//!
//! The idea is from Reguly, Mudalige, Giles and Maheswaran, *Improving Resilience of Scientific Software through a
//! Domain-Specific Approach*. What is decided after the stop, by what the program does, is ours.

pub mod block;
pub mod global;
pub mod index;
pub mod live;
pub mod pages;
pub mod shape;
pub mod site;
pub mod trace;
