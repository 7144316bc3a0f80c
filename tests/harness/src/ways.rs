//! The four ways in which each case is run, and what is expected of a refused one.

use crate::build::Kind;
use crate::case::Case;
use crate::job::{show, text, Job};
use crate::place::{Place, User};
use crate::rng::Rng;
use crate::Failure;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How a case is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Without belay: the program itself is sound.
    Native,
    /// Under `belay launch`.
    Launched,
    /// Checkpointed and continued three times.
    Checkpointed,
    /// Killed and restarted three times, with a checkpoint after each restart.
    Restarted,
}

impl Way {
    /// All ways in order.
    pub const ALL: [Way; 4] = [Way::Native, Way::Launched, Way::Checkpointed, Way::Restarted];

    /// Name in the output and in BELAY_WAYS.
    pub fn name(self) -> &'static str {
        match self {
            Way::Native => "native",
            Way::Launched => "launched",
            Way::Checkpointed => "checkpointed",
            Way::Restarted => "restarted",
        }
    }
}

/// A TCP server outside of every job that sends back what it gets.
fn echo_server() -> Result<u16, Failure> {
    use std::io::{Read, Write};
    let l = std::net::TcpListener::bind("127.0.0.1:0").map_err(|e| format!("outside server: {e}"))?;
    let port = l.local_addr().map_err(|e| format!("outside server: {e}"))?.port();
    std::thread::spawn(move || {
        for mut s in l.incoming().flatten() {
            std::thread::spawn(move || {
                let mut b = [0u8; 4096];
                while let Ok(n) = s.read(&mut b) {
                    if n == 0 || s.write_all(&b[..n]).is_err() {
                        break;
                    }
                }
            });
        }
    });
    Ok(port)
}

/// Lets the kernel give huge pages on demand as long as one of these exists.
struct HugePages;

const OVERCOMMIT: &str = "/proc/sys/vm/nr_overcommit_hugepages";
/// How many there are, and the setting before the first.
static POOL: Mutex<(u32, String)> = Mutex::new((0, String::new()));

impl HugePages {
    fn allow() -> Self {
        let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
        if pool.0 == 0 {
            pool.1 = std::fs::read_to_string(OVERCOMMIT).unwrap_or_default();
            // Not allowed everywhere: the program then has nothing to check.
            let _ = std::fs::write(OVERCOMMIT, "128");
        }
        pool.0 += 1;
        Self
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
        pool.0 -= 1;
        if pool.0 == 0 {
            let _ = std::fs::write(OVERCOMMIT, &pool.1);
        }
    }
}

/// A word of a command line of a case.
fn fill(word: &str, place: &Place, work: &Path) -> String {
    word.replace("{programs}", &place.programs().display().to_string())
        .replace("{suites}", &place.suites().display().to_string())
        .replace("{work}", &work.display().to_string())
}

/// The command line of `case`.
fn argv(case: &Case, place: &Place, work: &Path) -> Vec<String> {
    let fill = |s: &String| fill(s, place, work);
    let mut v: Vec<String> = case.under.iter().map(fill).collect();
    if case.kind == Kind::Ready {
        v.push(fill(&case.program));
    } else {
        let name = Path::new(&case.program)
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        v.push(
            place
                .programs()
                .join(format!("{name}{}", case.kind.suffix()))
                .display()
                .to_string(),
        );
    }
    v.extend(case.args.iter().map(fill));
    v
}

/// `belay checkpoint`, tried again while it is refused for a reason that the case declares as passing.
fn checkpoint(job: &Job, case: &Case, rng: &mut Rng) -> Result<(), Failure> {
    for _ in 0..100 {
        let r = job.checkpoint();
        match (&r, case.transient) {
            (Err(e), Some(reason)) if e.contains(reason) => rng.pause(10),
            _ => return r,
        }
    }
    Err("refused 100 times for a reason that should pass".into())
}

/// The turn of one job of Open MPI, which takes the first free port from 1024 on: a second job could sit on a port that
/// a killed one needs again.
pub fn open_mpi_ports() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `case` in one way as one user.
pub fn run(case: &Case, way: Way, user: User, place: &Place, seed: u64) -> Result<(), Failure> {
    let alone = (case.kind == Kind::OpenMpi).then(open_mpi_ports);
    let r = run_now(case, way, user, place, seed);
    drop(alone);
    r
}

fn run_now(case: &Case, way: Way, user: User, place: &Place, seed: u64) -> Result<(), Failure> {
    let label = format!("{}-{}-{}", case.name, way.name(), user.name());
    let mut rng = Rng::new(seed, &label);
    let _pool = case.huge_pages.then(HugePages::allow);
    let mut job = Job::new(place, &label, user)?;
    for (k, v) in &case.env {
        job.set(k, v);
    }
    if case.own_ipc {
        job.in_own_ipc();
    }
    if case.outside {
        let port = echo_server()?;
        job.set("BELAY_TEST_OUTSIDE", &port.to_string());
    }
    let argv = argv(case, place, &job.work);
    let under = |words: &[String]| -> Vec<String> { words.iter().map(|w| fill(w, place, &job.work)).collect() };
    let (launch_under, restart_under) = (under(&case.launch_under), under(&case.restart_under));
    let patience = Duration::from_secs(case.patience_s);
    match way {
        Way::Native => job.native(&argv)?,
        Way::Launched | Way::Checkpointed | Way::Restarted => job.launch_under(&launch_under, &case.launch_args, &argv)?,
    }
    job.progress(patience)?;
    match (way, case.refused) {
        (Way::Native | Way::Launched, _) => {}
        (Way::Checkpointed | Way::Restarted, Some(object)) => {
            for _ in 0..3 {
                rng.pause(case.spread_ms);
                let o = job.checkpoint_raw(&[])?;
                if o.status.success() {
                    return Err(format!(
                        "the checkpoint was expected to be refused because of {object}, but it was taken"
                    ));
                }
                if !text(&o).to_lowercase().contains(object) {
                    return Err(format!(
                        "the refusal ({}) does not name {object}: {}",
                        show(o.status),
                        text(&o)
                    ));
                }
                job.progress(patience)
                    .map_err(|e| format!("after the refused checkpoint: {e}"))?;
            }
        }
        (Way::Checkpointed, None) => {
            for n in 1..=3 {
                rng.pause(case.spread_ms);
                checkpoint(&job, case, &mut rng).map_err(|e| format!("checkpoint {n}: {e}; its output:\n{}", job.output_text()))?;
                job.progress(patience).map_err(|e| format!("after checkpoint {n}: {e}"))?;
            }
        }
        (Way::Restarted, None) => {
            rng.pause(case.spread_ms);
            checkpoint(&job, case, &mut rng).map_err(|e| format!("first checkpoint: {e}"))?;
            for n in 1..=3 {
                rng.pause(60);
                job.kill_all()?;
                job.left_behind().map_err(|e| format!("after kill {n}: {e}"))?;
                job.clear_beat()?;
                job.restart_under(&restart_under, &[])?;
                job.progress(patience).map_err(|e| format!("restart {n}: {e}"))?;
                rng.pause(case.spread_ms);
                checkpoint(&job, case, &mut rng)
                    .map_err(|e| format!("checkpoint after restart {n}: {e}; its output:\n{}", job.output_text()))?;
                job.progress(patience)
                    .map_err(|e| format!("after the checkpoint of restart {n}: {e}"))?;
            }
        }
    }
    job.verdict(case.verdict_file, patience)
}
