//! Test harness: builds the self-checking programs and runs each of them natively, launched, checkpointed and restarted.
//!
//! ```text
//! expect   conditions, and refusals in belay's own form
//! place    a world-readable directory with copies of belay and of the test programs; work directories
//! build    compiles tests/programs
//! case     what to run: one line of a table
//! catalogue what the kernel lets a program set (tests/catalogue.txt), and which case looks at it
//! procs    finds and kills the processes of one job, and nothing else
//! beat     heartbeats of the programs
//! job      a running job: launch, checkpoint, kill, restart, heartbeat, verdict
//! outcome  what a program's run came to, and how two runs differ
//! ways     the four ways in which each case is run
//! stepper  the agent's system calls during a checkpoint, one by one
//! calls    those of all its threads that change files or make them durable
//! witness  what a command changes, and whom it connects to
//! disk     what a power cut leaves of these files
//! filler   takes all the room of a disk
//! terminal a pseudo-terminal for tests of job control
//! runner   filters, workers, one line per check, summary
//! hosts    hosts made of namespaces, joined by a bridge
//! across   a job over several of them
//! fabric   InfiniBand without adapters: tests/fake-verbs
//! s3       an S3 server
//! slurm    a real Slurm on such hosts
//! ```
//!
//! The harness knows Belay only through its command line.

pub mod across;
pub mod agents;
pub mod beat;
pub mod build;
pub mod calls;
pub mod case;
pub mod catalogue;
pub mod disk;
pub mod edges;
pub mod expect;
pub mod fabric;
pub mod filler;
pub mod gpu;
pub mod group;
pub mod hosts;
pub mod job;
pub mod orders;
pub mod outcome;
pub mod place;
pub mod procs;
pub mod rng;
pub mod runner;
pub mod s3;
pub mod slurm;
pub mod stepper;
pub mod target;
pub mod terminal;
pub mod traced;
pub mod ways;
pub mod witness;

/// What went wrong, for the reader of the test's output.
pub type Failure = String;
