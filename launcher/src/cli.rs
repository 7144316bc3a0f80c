//! The command line, as one table: parsing, help, man pages and completions come from it.

mod inner;
mod values;

use belay_coordinator::config::{Pace, SavedFiles, Size};
use belay_coordinator::exporter::Place;
use belay_coordinator::interval::{parse_duration, Interval};
use belay_coordinator::redundancy::Redundancy;
use belay_storage::place::rule::Policy;
use clap::builder::Resettable;
use clap::{Arg, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
pub(crate) use inner::{Agent, Gpu, Rank, Store, Upkeep};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;
pub(crate) use values::{Access, Differential};

/// Checkpoint and restart of unmodified Linux programs.
///
/// A job lives in a job directory (./belay-job unless given, or $BELAY_DIR). `belay launch` runs a command there,
/// `belay checkpoint` saves it, and `belay restart` continues it from the newest checkpoint.
#[derive(Debug, Parser)]
#[command(name = "belay", version, max_term_width = 100, disable_help_subcommand = false)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Parses the command line. A variable that is empty counts as one that is not set.
pub(crate) fn parse() -> Result<Cli, clap::Error> {
    let is_empty = |a: &Arg| a.get_env().and_then(std::env::var_os).is_some_and(|value| value.is_empty());
    let heed = move |a: Arg| if is_empty(&a) { a.env(Resettable::Reset) } else { a };
    let command = Cli::command().mut_subcommands(|c| c.mut_args(heed));
    Cli::from_arg_matches(&command.try_get_matches()?)
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command so that it can be checkpointed
    ///
    /// The command gets the launcher's own standard input, output and error, terminal, process group, signals and
    /// environment. The exit status is the command's; when a signal ended it, launch ends by the same signal.
    Launch(Launch),
    /// Take a checkpoint of a running job
    ///
    /// Exits 0 when the checkpoint is safe on disk. A script can checkpoint the job that it is part of; restarted from
    /// that checkpoint, it goes on behind this command.
    Checkpoint(Checkpoint),
    /// Continue a job from a checkpoint, in the foreground
    ///
    /// Uses the newest generation that is whole. The exit status is the program's. Needs root, or unprivileged user
    /// namespaces, or the capability cap_checkpoint_restore on the program file; with the last, the job's old process
    /// numbers must be free.
    Restart(Restart),
    /// Restart the job if it has a checkpoint, else launch it: one command for batch scripts
    ///
    /// With a whole checkpoint in the job directory this is `belay restart`, without one `belay launch`; the options
    /// hold for both. A job that has ended with exit status 0 is not run again, so a script that a batch system starts
    /// anew can have several of these in a row, each with a directory of its own (--ckpt-dir). Another command than the
    /// one whose checkpoints the directory holds, or that has ended there with exit status 0, is refused.
    Run(Run),
    /// Show what a job is doing
    Status(Status),
    /// List a job's checkpoints
    List(List),
    /// Write a page about a job: its checkpoints over time, how long they stopped it, what they wrote
    ///
    /// One HTML file that needs nothing else, on standard output or in FILE.
    Report(Report),
    /// Copy the newest checkpoint to the durable tiers and wait for it
    ///
    /// The agent of a running job does that by itself after every checkpoint. Exits 0 when a tier of kind pfs or object
    /// holds the checkpoint.
    Flush(Flush),
    /// Measure the local tiers, so that chunks go where they are written fastest
    ///
    /// Writes and removes some files in each tier of kind memory or local, with 1 to 9 writers at a time, or up to
    /// the number of processors, and keeps the result there. Do it once, while nothing else uses the tiers.
    ///
    /// With --predict it measures no tier: it tells how long a checkpoint of this node's memory will take, to stop the
    /// program, to write it, to copy it to durable tiers and to restart from it, and what limits each. A running job
    /// corrects this by what it observes (belay status).
    Calibrate(Calibrate),
    /// Read every byte of a job's checkpoints and compare it with its checksums
    ///
    /// Also what the other hosts of the job have, as far as it lies in the job directory or on this host. What lies
    /// elsewhere is named, and not read.
    Verify(Target),
    /// Show what an image file or a generation holds
    Inspect(Inspect),
    /// Write the arrays that a program has declared (belay_access.h) into files
    ///
    /// Into a new directory: a file of raw elements for each array of each process, the first dimension changing
    /// fastest, and datasets.json, which says what they are. Arrays that are parts of global ones become one file, from
    /// which another number of processes can start (launch --from); the checkpoint must have been taken while all of them
    /// waited in belay_point. Also of the parts on other hosts, where what they have stored lies in the job directory or
    /// on this host; otherwise nothing is written.
    Export(Export),
    /// End a running job
    ///
    /// Every process gets SIGTERM, and SIGKILL after the grace period. Checkpoints stay.
    Stop(Stop),
    /// Remove checkpoints that are no longer needed
    ///
    /// Removes left-overs of interrupted checkpoints, and generations older than the newest whole ones that are kept.
    /// Also what the other hosts of the job have in the job directory; what lies elsewhere is named, and stays.
    Gc(Gc),
    /// Be the agent of a job on another host (started by belay itself)
    #[command(hide = true)]
    Agent(Agent),
    /// Be a rank of a program in the place of a task of srun (started by belay itself)
    #[command(hide = true)]
    Rank(Rank),
    /// Look after what one host holds of a job on several hosts (started by belay itself)
    #[command(hide = true)]
    Store(Store),
    /// Have the GPU driver bring programs to rest (started by belay itself)
    #[command(hide = true)]
    Gpu(Gpu),
    /// Write man pages or shell completions
    #[command(hide = true)]
    Generate(Generate),
}

/// The job directory of most commands.
#[derive(Debug, Args)]
pub(crate) struct Target {
    /// Job directory
    #[arg(value_name = "DIR", env = "BELAY_DIR", default_value = "belay-job")]
    pub(crate) dir: PathBuf,
}

/// Log level of the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub(crate) enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

/// `belay launch`.
#[derive(Debug, Args)]
pub(crate) struct Launch {
    /// Take a checkpoint this often: 2, 2s, 500ms, 5m, 1h, auto (as often as loses the least time), or never
    #[arg(long, value_name = "DUR", env = "BELAY_CKPT_INTERVAL")]
    pub(crate) ckpt_interval: Option<Interval>,
    /// For auto: mean time to interrupt [default: observed]
    #[arg(long, value_name = "DUR", value_parser = parse_duration)]
    pub(crate) mtti: Option<Duration>,
    /// For auto: shortest time between two checkpoints
    #[arg(long, value_name = "DUR", default_value = "30s", value_parser = parse_duration)]
    pub(crate) min_gap: Duration,
    /// Job directory; where belay.toml names roots, below one of them
    #[arg(long, value_name = "DIR", env = "BELAY_DIR", default_value = "belay-job")]
    pub(crate) ckpt_dir: PathBuf,
    /// Name of the job [default: the command's]
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Checkpoints to keep [default: keep in belay.toml, else 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) keep: Option<u32>,
    /// Most bytes that the checkpoints may take: 500M, 20G; older ones are removed first, the newest whole one never
    /// [default: max_bytes in belay.toml; a site's is also the most]
    #[arg(long, value_name = "BYTES", value_parser = size)]
    pub(crate) max_bytes: Option<u64>,
    /// How to find what need not be stored again
    #[arg(long, value_name = "HOW", default_value = "hash")]
    pub(crate) differential: Differential,
    /// Largest file whose contents are saved where it is open and may differ at a restart, because the job overwrites
    /// it or has created it: 64M, all, none; without =SIZE: all [default: save_open_files in belay.toml, else 64M]
    #[arg(long, value_name = "SIZE", num_args = 0..=1, require_equals = true, default_missing_value = "all")]
    pub(crate) save_open_files: Option<SavedFiles>,
    /// What becomes of data of which programs have declared what they do to it
    #[arg(long, value_name = "HOW", default_value = "off")]
    pub(crate) access: Access,
    /// Do not save the programs and libraries that the job has mapped: a restart then needs the same ones (also
    /// save_code = false in belay.toml)
    #[arg(long)]
    pub(crate) no_save_code: bool,
    /// Take what the command starts on other hosts through ssh, rsh or srun into the job; the job directory must be on
    /// a file system that all hosts share
    #[arg(long)]
    pub(crate) across_hosts: bool,
    /// With --across-hosts: make checkpoints survive the loss of hosts: partner, xor or reed-solomon, then :HOSTS of a
    /// group, then :LOSSES (docs/redundancy.md)
    #[arg(long, value_name = "SCHEME", value_parser = Redundancy::parse)]
    pub(crate) redundancy: Option<Redundancy>,
    /// With --redundancy: a directory on every host's own disk, where the checkpoints go
    #[arg(long, value_name = "DIR")]
    pub(crate) local_dir: Option<PathBuf>,
    /// With --redundancy: one of N checkpoints, or one in so much time, becomes redundant; auto: as often as loses the
    /// least time [default: redundant in [levels] of belay.toml, else every one for which there is time]
    #[arg(long, value_name = "N|DUR|auto")]
    pub(crate) redundant_every: Option<Pace>,
    /// One of N checkpoints, or one in so much time, is copied to the durable tiers; auto: as often as loses the least
    /// time [default: durable in [levels] of belay.toml, else every one for which there is time]
    #[arg(long, value_name = "N|DUR|auto")]
    pub(crate) durable_every: Option<Pace>,
    /// Tiers, flushing and all else of the configuration, over what /etc/belay/belay.toml and
    /// ~/.config/belay/belay.toml say (docs/tiers.md)
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Seal what goes to tiers of kind pfs and object with the keys in FILE, over what [encryption] of the
    /// configuration says (docs/tiers.md)
    #[arg(long, value_name = "FILE", env = "BELAY_KEY_FILE")]
    pub(crate) key_file: Option<PathBuf>,
    /// How a local tier is chosen for a chunk, over what the configuration says: adaptive, fastest-only, local-only or naive
    #[arg(long, value_name = "POLICY")]
    pub(crate) placement: Option<Policy>,
    /// How much goes to the log in the job directory
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub(crate) log_level: LogLevel,
    /// Serve numbers for Prometheus over HTTP at HOST:PORT or unix:PATH, or write them to file:PATH after each checkpoint
    #[arg(long, value_name = "WHERE", value_parser = metrics)]
    pub(crate) metrics: Option<String>,
    /// Arrays to start from, as export has written them: for programs that call belay_fastforward, with any number of
    /// processes
    #[arg(long, value_name = "DIR")]
    pub(crate) from: Option<PathBuf>,
    /// The command and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "COMMAND"
    )]
    pub(crate) command: Vec<OsString>,
}

/// What follows a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Then {
    /// End the program.
    Stop,
}

/// How safe a checkpoint must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Level {
    /// Committed in the job directory
    Local,
    /// Also encoded across the hosts of the job, so that it survives the loss of one, see --redundancy of launch
    Redundant,
    /// Also on a tier of kind pfs or object, see --config of launch
    Durable,
}

/// `belay checkpoint`.
#[derive(Debug, Args)]
pub(crate) struct Checkpoint {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub(crate) target: Target,
    /// End the program once the checkpoint is safe; it does not run past it
    #[arg(long)]
    pub(crate) then: Option<Then>,
    /// Level to reach
    #[arg(long, default_value = "local")]
    pub(crate) level: Level,
    /// Wait where the job is just starting, or a checkpoint cannot be taken for another reason that passes by itself
    #[arg(long)]
    pub(crate) wait: bool,
    /// Print one JSON document
    #[arg(long)]
    pub(crate) json: bool,
    /// No progress
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

/// `belay restart`.
#[derive(Debug, Args)]
pub(crate) struct Restart {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub(crate) target: Target,
    /// Restart this generation instead of the newest whole one
    #[arg(long, value_name = "N")]
    pub(crate) generation: Option<u64>,
    /// Fill memory while the program runs, so that it goes on at once whatever its size: on one host, as root; otherwise
    /// all is read first
    #[arg(long)]
    pub(crate) lazy: bool,
    /// Restart although this processor lacks instructions that the job may have chosen to use: right where none of its
    /// programs does
    #[arg(long)]
    pub(crate) any_cpu: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub(crate) hosts: Hosts,
    /// Change the checkpoint interval (never: none)
    #[arg(long, value_name = "DUR")]
    pub(crate) ckpt_interval: Option<Interval>,
    /// Read the configuration anew, with FILE over what /etc/belay/belay.toml and ~/.config/belay/belay.toml say
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// The file of the keys that seal what lies on tiers of kind pfs and object, where that is another one by now
    #[arg(long, value_name = "FILE", env = "BELAY_KEY_FILE")]
    pub(crate) key_file: Option<PathBuf>,
    /// Change how much goes to the log
    #[arg(long, value_name = "LEVEL")]
    pub(crate) log_level: Option<LogLevel>,
    /// Change where numbers for Prometheus are to be had (off: nowhere)
    #[arg(long, value_name = "WHERE", value_parser = metrics)]
    pub(crate) metrics: Option<String>,
    /// Say nothing but errors
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

/// Where the parts of a job on several hosts go at a restart.
#[derive(Debug, Args)]
pub(crate) struct Hosts {
    /// At a restart: hosts for the parts of a job on several hosts (all but that of belay itself), in the order in
    /// which these were started; fewer hosts get several parts each. Without this the nodes of Slurm's allocation where
    /// belay is in one, else the hosts of before
    #[arg(long = "hosts", value_name = "HOST", value_delimiter = ',')]
    pub(crate) list: Vec<String>,
    /// At a restart: the same from a file, one host in each line
    #[arg(long, value_name = "FILE", conflicts_with = "list")]
    pub(crate) hostfile: Option<PathBuf>,
}

/// `belay run`.
#[derive(Debug, Args)]
pub(crate) struct Run {
    /// When a part of the job is lost (with --across-hosts), or the GPU driver cannot put a program back after a
    /// checkpoint: end what is left and restart the job from the newest checkpoint, on those of --hosts that answer, N
    /// times at most
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(crate) restarts: u32,
    /// Which of these restarts this is (said by belay itself)
    #[arg(long, hide = true, default_value_t = 0)]
    pub(crate) again: u32,
    /// At a restart: fill memory while the program runs (on one host, as root)
    #[arg(long)]
    pub(crate) lazy: bool,
    /// At a restart: go on although this processor lacks instructions that the job may have chosen to use: right where
    /// none of its programs does
    #[arg(long)]
    pub(crate) any_cpu: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub(crate) hosts: Hosts,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub(crate) launch: Launch,
}

/// `belay flush`.
#[derive(Debug, Args)]
pub(crate) struct Flush {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub(crate) target: Target,
    /// First read all that the tiers hold, and remove what is damaged there, so that it is copied again; not while the job runs
    #[arg(long)]
    pub(crate) check: bool,
    /// No progress
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

/// `belay calibrate`.
#[derive(Debug, Args)]
pub(crate) struct Calibrate {
    /// Tiers, over what /etc/belay/belay.toml and ~/.config/belay/belay.toml say (docs/tiers.md)
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Tell how long a checkpoint of this node will take, by what was measured before
    #[arg(long)]
    pub(crate) predict: bool,
    /// Memory of the program's processes together [default: this node's]
    #[arg(long, value_name = "SIZE", value_parser = size, requires = "predict")]
    pub(crate) memory: Option<u64>,
    /// Processes (ranks) on this node
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..), requires = "predict")]
    pub(crate) ranks: u32,
    /// Share of the memory that has changed since the checkpoint before, percent
    #[arg(long, value_name = "PERCENT", default_value = "100", value_parser = percent, requires = "predict")]
    pub(crate) changed: f64,
    /// Bytes per second of the link to durable tiers: 12G [default: that of the fastest network interface that tells]
    #[arg(long, value_name = "RATE", value_parser = size, requires = "predict")]
    pub(crate) link: Option<u64>,
    /// Bytes per second that durable tiers take of this node [default: assumed]
    #[arg(long, value_name = "RATE", value_parser = size, requires = "predict")]
    pub(crate) durable_rate: Option<u64>,
    /// Print one JSON document
    #[arg(long, requires = "predict")]
    pub(crate) json: bool,
}

/// `belay status`.
#[derive(Debug, Args)]
pub(crate) struct Status {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub(crate) target: Target,
    /// Print one JSON document (with --watch: one per line)
    #[arg(long)]
    pub(crate) json: bool,
    /// Repeat every second until the job ends
    #[arg(long)]
    pub(crate) watch: bool,
}

/// `belay list`.
#[derive(Debug, Args)]
pub(crate) struct List {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub(crate) target: Target,
    /// Print one JSON document
    #[arg(long)]
    pub(crate) json: bool,
}

/// `belay report`.
#[derive(Debug, Args)]
pub(crate) struct Report {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub(crate) target: Target,
    /// The file to write
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}

/// `belay inspect`.
#[derive(Debug, Args)]
pub(crate) struct Inspect {
    /// A generation's directory, an image file (.bimg, .bidx, .bpar), or a job directory (its newest generation)
    pub(crate) image: PathBuf,
}

/// `belay export`.
#[derive(Debug, Args)]
pub(crate) struct Export {
    /// A generation's directory, or a job directory (its newest generation)
    pub(crate) image: PathBuf,
    /// The directory to make
    #[arg(short, long, value_name = "DIR", default_value = "datasets")]
    pub(crate) output: PathBuf,
    /// Write what each process has of global arrays by itself, ghosts too, whatever the processes were doing
    #[arg(long)]
    pub(crate) by_process: bool,
}

/// `belay stop`.
#[derive(Debug, Args)]
pub(crate) struct Stop {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub(crate) target: Target,
    /// Time between SIGTERM and SIGKILL (0: SIGKILL at once)
    #[arg(long, value_name = "DUR", default_value = "10s", value_parser = grace)]
    pub(crate) grace: Duration,
}

/// A number of bytes, with an optional unit of 1024.
fn size(s: &str) -> Result<u64, String> {
    s.parse::<Size>().map(|s| s.0)
}

/// A share of 100.
fn percent(s: &str) -> Result<f64, String> {
    let share = s.trim_end_matches('%').trim_end().parse().ok();
    share
        .filter(|p| (0.0..=100.0).contains(p))
        .ok_or_else(|| format!("{s} is no percentage from 0 to 100"))
}

/// A place for metrics. Paths are made absolute: a restart may begin elsewhere.
fn metrics(s: &str) -> Result<String, String> {
    if s == "off" {
        return Ok(s.to_owned());
    }
    Ok(match s.parse::<Place>()? {
        Place::Tcp(_) => s.to_owned(),
        Place::Unix(p) => format!("unix:{}", p.display()),
        Place::File(p) => format!("file:{}", p.display()),
    })
}

fn grace(s: &str) -> Result<Duration, String> {
    if s == "0" {
        return Ok(Duration::ZERO);
    }
    parse_duration(s)
}

/// `belay gc`.
#[derive(Debug, Args)]
pub(crate) struct Gc {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub(crate) target: Target,
    /// Remove every checkpoint
    #[arg(long)]
    pub(crate) all: bool,
    /// Checkpoints to keep [default: as given at launch]
    #[arg(long, value_name = "N", conflicts_with = "all", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) keep: Option<u32>,
}

/// `belay generate`.
#[derive(Debug, Args)]
pub(crate) struct Generate {
    /// What to write
    pub(crate) what: Generated,
    /// Directory to write into
    pub(crate) dir: PathBuf,
}

/// What `belay generate` writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Generated {
    /// Man pages.
    Man,
    /// Completions for bash, zsh and fish.
    Completions,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_table_is_consistent() {
        Cli::command().debug_assert();
    }

    fn launch(words: &[&str]) -> Launch {
        match Cli::try_parse_from([&["belay", "launch"], words].concat()).unwrap().command {
            Command::Launch(l) => l,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn everything_behind_the_command_belongs_to_it() {
        let l = launch(&["--ckpt-interval", "2", "mpirun", "-n", "4", "--keep", "7", "--", "x"]);
        assert_eq!(l.command, ["mpirun", "-n", "4", "--keep", "7", "--", "x"]);
        assert_eq!(
            (l.keep, l.ckpt_interval),
            (None, Some(Interval::Every(Duration::from_secs(2))))
        );
        let l = launch(&["--", "--odd-name", "-x"]);
        assert_eq!(l.command, ["--odd-name", "-x"]);
        assert_eq!(launch(&["--max-bytes", "3G", "x"]).max_bytes, Some(3 << 30));
        for bad in ["0", "G", "3X", "99999999999T", "-1"] {
            assert!(size(bad).is_err(), "{bad}");
        }
        assert!(Cli::try_parse_from(["belay", "launch"]).is_err());
        assert!(Cli::try_parse_from(["belay", "launch", "--keep", "0", "true"]).is_err());
    }

    #[test]
    fn run_takes_the_options_of_launch() {
        let line = [
            "belay",
            "run",
            "--keep",
            "3",
            "--hosts",
            "a,b",
            "--across-hosts",
            "mpirun",
            "--lazy",
        ];
        let Command::Run(r) = Cli::try_parse_from(line).unwrap().command else {
            panic!("not understood as run");
        };
        assert_eq!((r.launch.keep, r.launch.across_hosts, r.lazy), (Some(3), true, false));
        assert_eq!(r.hosts.list, ["a", "b"]);
        assert_eq!(r.launch.command, ["mpirun", "--lazy"]);
    }
}
