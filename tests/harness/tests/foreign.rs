//! Programs that nobody here wrote, as a user starts them: what they print and how they end must be the same natively,
//! checkpointed, killed and restarted at random moments, and under one checkpoint after the other. The table is
//! tests/suites/foreign.txt; programs that are not installed are left out, and said so.
//!
//! Each program runs as one of the users, by chance. With BELAY_FOREIGN=N it runs as each, N rounds of the first two
//! ways. With BELAY_FOREIGN_MINUTES=N it lives for N minutes, again and again, under checkpoints that begin
//! BELAY_FOREIGN_EVERY_MS (100) after the one before has ended; else once. BELAY_FOREIGN_TABLE names another table.

use belay_tests::job::{show, Job};
use belay_tests::outcome::{compare, tail, take_unless_ended, Outcome};
use belay_tests::place::{installed, repository, Place, User};
use belay_tests::rng::{run_seed, Rng};
use belay_tests::runner::{self, Check};
use belay_tests::terminal::take_names;
use belay_tests::ways::open_mpi_ports;
use belay_tests::Failure;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest run of any program, disturbed or not, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(150);

/// Lives of a program until it must have lived long enough for a checkpoint.
const LIVES: u64 = 20;

/// What every script begins with.
const HEAD: &str = r#"exec >result 2>&1 </dev/null
answers() {
    for socket; do
        until python3 -c 'import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])' "$socket" 2>>refused; do sleep 0.05; done
    done
}
"#;

/// One entry of the table.
struct Program {
    name: String,
    /// Run under `belay launch --save-open-files`: it overwrites files in place.
    save: bool,
    /// Ended at the checkpoint itself (`--then stop`) instead of killed later: it does not bear to find files that it
    /// is about to make.
    stop: bool,
    as_user: bool,
    as_root: bool,
    /// It uses Open MPI, whose ports are the same for all jobs of a machine.
    open_mpi: bool,
    preparation: Option<String>,
    script: String,
}

/// Reads the table. An entry is a line `== NAME COMMAND... [+save] [+stop] [+root] [+user]`, with the commands that it
/// needs, and a script for sh; what stands above a line `---` is done before it is launched.
fn parse(text: &str) -> Vec<Program> {
    let mut out: Vec<Program> = Vec::new();
    let mut wanted = false;
    for line in text.lines() {
        if let Some(head) = line.strip_prefix("== ") {
            let (options, words): (Vec<&str>, Vec<&str>) = head.split_whitespace().partition(|w| w.starts_with('+'));
            let missing: Vec<&str> = words[1..].iter().copied().filter(|w| !installed(w)).collect();
            wanted = missing.is_empty();
            if !wanted {
                println!("left out: {} ({} not installed)", words[0], missing.join(", "));
                continue;
            }
            out.push(Program {
                name: words[0].to_owned(),
                save: options.contains(&"+save"),
                stop: options.contains(&"+stop"),
                as_user: !options.contains(&"+root"),
                as_root: !options.contains(&"+user"),
                open_mpi: words.contains(&"mpirun.openmpi"),
                preparation: None,
                script: String::from(HEAD),
            });
        } else if let Some(program) = out.last_mut().filter(|_| wanted) {
            if line == "---" {
                program.preparation = Some(std::mem::replace(&mut program.script, HEAD.into()));
                continue;
            }
            program.script.push_str(line);
            program.script.push('\n');
        }
    }
    out
}

struct Run<'a> {
    program: &'a Program,
    place: &'a Place,
    user: User,
}

impl Run<'_> {
    fn job(&self, way: &str) -> Result<(Job, Vec<String>), Failure> {
        let label = format!("{}-{way}-{}", self.program.name, self.user.name());
        let mut job = Job::new(self.place, &label, self.user)?;
        let write = |job: &Job, name: &str, text: &str| {
            let path = job.work.join(name);
            std::fs::write(&path, text).map_err(|e| format!("write {}: {e}", path.display()))?;
            Ok::<_, Failure>(vec!["sh".to_owned(), path.display().to_string()])
        };
        if let Some(text) = &self.program.preparation {
            let argv = write(&job, "preparation", text)?;
            job.native(&argv)?;
            let status = job.wait(PATIENCE)?;
            if !status.success() {
                let said = std::fs::read_to_string(job.work.join("result")).unwrap_or_default();
                return Err(format!("its preparation: {}; its output:\n{}", show(status), tail(&said)));
            }
        }
        let argv = write(&job, "script", &self.program.script)?;
        Ok((job, argv))
    }

    fn options(&self) -> Vec<String> {
        self.program
            .save
            .then(|| "--save-open-files".to_owned())
            .into_iter()
            .collect()
    }

    fn outcome(&self, job: &mut Job) -> Result<Outcome, Failure> {
        let written = job.work.join("result");
        let status = job.wait(PATIENCE).map_err(|e| {
            let said = std::fs::read_to_string(&written).unwrap_or_default();
            format!("{e}; it has written:\n{}", tail(&said))
        })?;
        let result = std::fs::read(written).unwrap_or_default();
        job.left_behind()?;
        let said = job.output_text();
        // What the killed job had connected after the checkpoint keeps its port for a minute; a checkpoint may come
        // when the program has ended, but not yet its helpers.
        let expected = ["(TIME_WAIT)", "holds what the command left behind"];
        if said.lines().any(|l| !expected.iter().any(|e| l.contains(e))) {
            return Err(format!("belay said: {said}"));
        }
        Ok((show(status), result))
    }

    fn native(&self) -> Result<(Outcome, Duration), Failure> {
        let (mut job, argv) = self.job("native")?;
        let begin = Instant::now();
        job.native(&argv)?;
        let outcome = self.outcome(&mut job)?;
        Ok((outcome, begin.elapsed()))
    }

    /// Takes a checkpoint; `false` when the program has ended before it.
    fn checkpoint(&self, job: &mut Job, options: &[&str]) -> Result<bool, Failure> {
        let job = std::cell::RefCell::new(job);
        take_unless_ended(|| job.borrow().checkpoint_raw(options), || job.borrow_mut().has_ended())
    }

    fn checkpointed(&self, rng: &mut Rng, whole: Duration) -> Result<Outcome, Failure> {
        let (mut job, argv) = self.job("checkpointed")?;
        job.launch(&self.options(), &argv)?;
        job.answers(PATIENCE)?;
        for _ in 0..3 {
            rng.pause(u64::try_from(whole.as_millis() / 3).unwrap_or(1000));
            if !self.checkpoint(&mut job, &[])? {
                break;
            }
        }
        self.outcome(&mut job)
    }

    /// One life under one checkpoint after the other, `every` between them; returns how many there were.
    fn incessantly(&self, every: Duration) -> Result<(Outcome, u64), Failure> {
        let (mut job, argv) = self.job("incessantly")?;
        job.launch(&self.options(), &argv)?;
        job.answers(PATIENCE)?;
        let mut taken = 0;
        while self.checkpoint(&mut job, &[])? {
            taken += 1;
            std::thread::sleep(every);
        }
        Ok((self.outcome(&mut job)?, taken))
    }

    fn restarted(&self, rng: &mut Rng, whole: Duration) -> Result<Outcome, Failure> {
        let (mut job, argv) = self.job("restarted")?;
        job.launch(&self.options(), &argv)?;
        job.answers(PATIENCE)?;
        let ms = u64::try_from(whole.as_millis()).unwrap_or(1000);
        for share in [2, 4] {
            rng.pause(ms / share);
            let then: &[&str] = if self.program.stop { &["--then", "stop"] } else { &[] };
            if !self.checkpoint(&mut job, then)? {
                break;
            }
            if self.program.stop {
                job.wait(PATIENCE)?;
            } else {
                rng.pause(ms / 4);
            }
            job.kill_all()?;
            job.left_behind()?;
            // Terminals of others have the names of those of the job, until it goes on.
            let _others = (share == 4).then(|| take_names(15)).transpose()?;
            job.restart(&[])?;
            job.answers(PATIENCE)?;
        }
        self.outcome(&mut job)
    }
}

/// A number in an environment variable.
fn number(var: &str) -> Option<u64> {
    std::env::var(var).ok().and_then(|v| v.parse().ok())
}

/// Lives of a program under checkpoints without end: as many minutes of them as BELAY_FOREIGN_MINUTES says, and until
/// there has been a checkpoint.
fn lives(run: &Run, expected: &Outcome) -> Result<(), Failure> {
    let every = Duration::from_millis(number("BELAY_FOREIGN_EVERY_MS").unwrap_or(100));
    let begin = Instant::now();
    let minutes = Duration::from_secs(60 * number("BELAY_FOREIGN_MINUTES").unwrap_or(0));
    let mut taken = 0;
    for life in 1.. {
        let (got, n) = run.incessantly(every).map_err(|e| format!("life {life}: {e}"))?;
        compare(expected, &got, &format!("life {life} with {n} checkpoints"))?;
        taken += n;
        if begin.elapsed() >= minutes && (taken > 0 || life >= LIVES) {
            break;
        }
    }
    (taken > 0)
        .then_some(())
        .ok_or_else(|| format!("no checkpoint fell into {LIVES} lives"))
}

fn check(program: &Program, place: &Place, user: User, rounds: u64, seed: u64) -> Result<(), Failure> {
    let _alone = program.open_mpi.then(open_mpi_ports);
    let run = Run { program, place, user };
    let (expected, whole) = run.native()?;
    if expected.0 != "exit 0" {
        return Err(format!(
            "natively: ended with {}; its output:\n{}",
            expected.0,
            tail(&String::from_utf8_lossy(&expected.1))
        ));
    }
    let mut rng = Rng::new(seed, &format!("{}-{}", program.name, user.name()));
    for _ in 0..rounds {
        compare(
            &expected,
            &run.checkpointed(&mut rng, whole).map_err(|e| format!("checkpointed: {e}"))?,
            "checkpointed",
        )?;
        compare(
            &expected,
            &run.restarted(&mut rng, whole).map_err(|e| format!("restarted: {e}"))?,
            "restarted",
        )?;
    }
    lives(&run, &expected)
}

fn main() {
    let rounds = number("BELAY_FOREIGN");
    let fail = |e: Failure| -> ! {
        println!("{e}");
        std::process::exit(1);
    };
    let place = Arc::new(Place::new("foreign").unwrap_or_else(|e| fail(e)));
    let seed = run_seed();
    println!("seed {seed} (repeat with BELAY_SEED={seed})");
    let path = std::env::var_os("BELAY_FOREIGN_TABLE").map_or_else(|| repository().join("tests/suites/foreign.txt"), PathBuf::from);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| fail(format!("read {}: {e}", path.display())));
    let programs: Vec<Arc<Program>> = parse(&text).into_iter().map(Arc::new).collect();
    let mut checks = Vec::new();
    for (i, program) in (0..).zip(&programs) {
        let mut users = runner::users();
        users.retain(|u| if *u == User::Root { program.as_root } else { program.as_user });
        if rounds.is_none() && users.len() > 1 {
            users.remove(usize::from((seed + i).is_multiple_of(2)));
        }
        for user in users {
            let (place, program) = (Arc::clone(&place), Arc::clone(program));
            checks.push(Check {
                name: format!("foreign::{}::{}", program.name, user.name()),
                run: Box::new(move || check(&program, &place, user, rounds.unwrap_or(1), seed)),
            });
        }
    }
    drop(place);
    runner::main(checks);
}
