//! What to run. A table of cases is a list of one-line constructor calls.

use crate::build::Kind;

/// One program with its arguments.
#[derive(Debug, Clone)]
pub struct Case {
    /// Name in the output.
    pub name: String,
    /// Source in tests/programs without `.c`, or for `Kind::Ready` the command.
    pub program: String,
    /// How it is built.
    pub kind: Kind,
    /// Its arguments. `{programs}`, `{suites}` and `{work}` are replaced.
    pub args: Vec<String>,
    /// The program runs under this command (mpirun and its arguments).
    pub under: Vec<String>,
    /// `belay launch` runs under this command. `{programs}` is replaced.
    pub launch_under: Vec<String>,
    /// `belay restart` runs under this command, likewise.
    pub restart_under: Vec<String>,
    /// More arguments for `belay launch`.
    pub launch_args: Vec<String>,
    /// Run as root / as an ordinary user.
    pub as_root: bool,
    /// See `as_root`.
    pub as_user: bool,
    /// A checkpoint is refused and the refusal names this object.
    pub refused: Option<&'static str>,
    /// A checkpoint may be refused for the moment with this reason; it is taken when tried again.
    pub transient: Option<&'static str>,
    /// The verdict is in the file `verdict` of the work directory, not on standard output.
    pub verdict_file: bool,
    /// Longest time without a heartbeat, seconds.
    pub patience_s: u64,
    /// Needs a server outside the job.
    pub outside: bool,
    /// Counts on System V objects of which no other job may take notice: it runs in an IPC namespace of its own, where the
    /// harness may make one.
    pub own_ipc: bool,
    /// Needs explicit huge pages; the machine is made to give some while it runs, where the harness may do that.
    pub huge_pages: bool,
    /// The kernel that first has what it is about (major, minor); on older ones there is no such check.
    pub since: (u32, u32),
    /// Needs memory protection keys; on processors without there is no such check.
    pub keys: bool,
    /// At most so many milliseconds pass before a checkpoint, at random.
    pub spread_ms: u64,
    /// More environment.
    pub env: Vec<(String, String)>,
}

fn base(name: &str, program: &str, kind: Kind) -> Case {
    Case {
        name: name.into(),
        program: program.into(),
        kind,
        args: Vec::new(),
        under: Vec::new(),
        launch_under: Vec::new(),
        restart_under: Vec::new(),
        launch_args: Vec::new(),
        as_root: true,
        as_user: true,
        refused: None,
        transient: None,
        verdict_file: false,
        patience_s: 20,
        outside: false,
        own_ipc: false,
        huge_pages: false,
        since: (0, 0),
        keys: false,
        spread_ms: 120,
        env: Vec::new(),
    }
}

/// A C program of tests/programs with arguments: `prog("blocked mutex 8")`.
pub fn prog(line: &str) -> Case {
    let mut words = line.split_whitespace();
    let program = words.next().unwrap_or_default();
    let mut c = base(&line.replace(' ', "-"), program, Kind::C);
    c.args = words.map(str::to_owned).collect();
    c
}

/// The same, linked statically.
pub fn static_prog(line: &str) -> Case {
    let mut c = prog(line);
    c.name.push_str("-static");
    c.kind = Kind::Static;
    c
}

/// An MPI program under `mpirun -n ranks` of the given implementation.
pub fn mpi(kind: Kind, line: &str, ranks: u32) -> Case {
    let mut c = prog(line);
    c.program = format!("mpi/{}", c.program);
    c.kind = kind;
    c.name.push_str(kind.suffix());
    c.under = mpirun(kind, ranks);
    c.patience_s = 60;
    c.spread_ms = 400;
    c
}

/// `mpirun` as a user of a machine with fewer cores than ranks calls it.
pub fn mpirun(kind: Kind, ranks: u32) -> Vec<String> {
    let n = ranks.to_string();
    let words: Vec<&str> = match kind {
        Kind::Mpich => vec!["mpirun.mpich", "-n", &n],
        _ => vec!["mpirun.openmpi", "--oversubscribe", "-n", &n],
    };
    words.into_iter().map(str::to_owned).collect()
}

/// A command of the system with a script of tests/suites: `script("python3", "python_plain.py")`.
pub fn script(command: &str, file: &str) -> Case {
    let name = file.rsplit_once('.').map_or(file, |(stem, _)| stem);
    let mut c = base(name, command, Kind::Ready);
    c.args = vec![format!("{{suites}}/{file}")];
    c.spread_ms = 300;
    c
}

impl Case {
    /// More arguments for `belay launch`.
    pub fn launch(mut self, args: &[&str]) -> Self {
        self.launch_args = args.iter().map(|s| (*s).to_owned()).collect();
        self
    }
    /// Arguments of the program.
    pub fn args(mut self, args: &[&str]) -> Self {
        self.args = args.iter().map(|s| (*s).to_owned()).collect();
        self
    }
    /// One more environment variable.
    pub fn env(mut self, key: &str, value: &str) -> Self {
        self.env.push((key.into(), value.into()));
        self
    }
    /// A checkpoint is refused; the message must name `object`.
    pub fn refused(mut self, object: &'static str) -> Self {
        self.refused = Some(object);
        self
    }
    /// A checkpoint may be refused for the moment; the message says `reason` and to try again.
    pub fn transient(mut self, reason: &'static str) -> Self {
        self.transient = Some(reason);
        self
    }
    /// Only as root.
    pub fn root_only(mut self) -> Self {
        self.as_user = false;
        self
    }
    /// Only as an ordinary user.
    pub fn user_only(mut self) -> Self {
        self.as_root = false;
        self
    }
    /// The verdict is in a file.
    pub fn verdict_file(mut self) -> Self {
        self.verdict_file = true;
        self
    }
    /// Needs a server outside the job; its port is in BELAY_TEST_OUTSIDE.
    pub fn outside(mut self) -> Self {
        self.outside = true;
        self
    }
    /// Runs in an IPC namespace of its own.
    pub fn own_ipc(mut self) -> Self {
        self.own_ipc = true;
        self
    }
    /// `belay launch` runs under this command.
    pub fn launched_under(mut self, words: &[&str]) -> Self {
        self.launch_under = words.iter().map(|w| (*w).to_owned()).collect();
        self
    }
    /// `belay restart` runs under this command.
    pub fn restarted_under(mut self, words: &[&str]) -> Self {
        self.restart_under = words.iter().map(|w| (*w).to_owned()).collect();
        self
    }
    /// Needs explicit huge pages.
    pub fn huge_pages(mut self) -> Self {
        self.huge_pages = true;
        self
    }
    /// Is about what this kernel and later ones have.
    pub fn since(mut self, major: u32, minor: u32) -> Self {
        self.since = (major, minor);
        self
    }
    /// Needs a processor with memory protection keys.
    pub fn keys(mut self) -> Self {
        self.keys = true;
        self
    }
    /// Longest time without a heartbeat.
    pub fn patience(mut self, seconds: u64) -> Self {
        self.patience_s = seconds;
        self
    }
}
