//! Programs that use a GPU: a process of belay's own asks the driver to bring them to rest, and takes part for all of them as
//! a library would (the crate `belay-gpu`).

use super::page::{head_of, refuse, Page, Standing};
use super::stranded::{self, Program};
use super::DRIVER;
use crate::fault::{At, Fault, Refusal};
use crate::sys::fd;
use belay_abi::control::{DRIVER_LIMIT, NAME};
use belay_abi::PAGE;
use belay_kernel::proc::{self, Map};
use rustix::fs::SealFlags;
use std::cell::Cell;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// So much time the driver has to take states off devices, or to put them back.
pub const LIMIT: Duration = DRIVER_LIMIT;
/// More is no list of GPUs, bytes.
const MOST_SAID: usize = 64 << 10;
/// Which GPUs a program is to see.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
/// How long the driver may take to begin.
const BEGIN: Duration = Duration::from_secs(120);

/// How long a process may be stopped, or dead, while the driver is to do something there.
const GRACE: Duration = Duration::from_secs(1);
/// Between two looks at it.
const TURN: Duration = Duration::from_millis(50);
/// What the kernel tells of a thread that job control has stopped.
const STOPPED: char = 'T';

/// What becomes of a program that is not put back,
const WAITS: &str = "the program waits in its next call of the GPU";
/// and what is to be done.
const LOST: &str = "restart the job from its last checkpoint (belay restart)";

/// Those that go on by themselves when a process is continued.
static LEFT: Mutex<Vec<Left>> = Mutex::new(Vec::new());
/// Children of the agent that ask the driver, each with when it was started.
static ASKERS: Mutex<Vec<(i32, Option<u64>)>> = Mutex::new(Vec::new());
/// Programs that the driver can never take off their GPUs, each with what it has said: whoever asks r580 again has it lose
/// the program.
static UNABLE: Mutex<Vec<(Program, String)>> = Mutex::new(Vec::new());

/// Refuses those of these processes that the driver has refused for good.
fn refuse_unable(pids: &[i32]) -> Result<(), Refusal> {
    let mut unable = list(&UNABLE);
    unable.retain(|(program, _)| program.is_there());
    match unable.iter().find(|(program, _)| pids.contains(&program.pid)) {
        None => Ok(()),
        Some((program, why)) => Err(refuse(
            program.pid,
            DRIVER,
            format!("{why}; it is not asked again while the program runs"),
            false,
        )),
    }
}

fn list<T>(of: &Mutex<Vec<T>>) -> MutexGuard<'_, Vec<T>> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Children of the agent that ask the driver, and are no part of the job.
pub fn askers() -> Vec<i32> {
    let mut askers = list(&ASKERS);
    askers.retain(|(pid, born)| proc::born(*pid) == *born);
    askers.iter().map(|(pid, _)| *pid).collect()
}

/// Whether the process is off its GPU since a checkpoint, and has not been put back.
pub(super) fn is_stranded(pid: i32) -> bool {
    !stranded::of(&[pid]).is_empty()
}

/// Has those of these processes go on that could not before. The driver of r580 never puts back what it once could not; and a
/// process that is off its GPU, and stays there, is not what a checkpoint is to be taken of.
fn put_back_stranded(pids: &[i32]) -> Result<(), Refusal> {
    let all = stranded::of(pids);
    let Some(first) = all.first() else {
        return Ok(());
    };
    let its: Vec<i32> = all.iter().map(stranded::Stranded::pid).collect();
    recover(&its, &Devices::default(), &|| ()).map_err(|again| {
        tracing::warn!(error = %again, pids = ?its, "asked once more, the GPU driver cannot put these processes back: {WAITS}");
        let why = format!(
            "could not put back what it has taken off the GPU ({}): {WAITS}; {LOST}",
            first.why
        );
        refuse(first.pid(), DRIVER, why, false)
    })?;
    stranded::forget(&its);
    Ok(())
}

/// Why process `pid`, whose main thread has exited, is not taken off its GPU.
pub(super) fn headless(pid: i32) -> Refusal {
    let why = "is asked about a process by its main thread, which has exited here; let that wait for the others (pthread_join)";
    refuse(pid, DRIVER, why, false)
}

/// Whether `map` is of a GPU that the driver can be asked about.
pub fn is_mapping(map: &Map) -> bool {
    map.name.as_bytes().starts_with(b"/dev/nvidia")
}

/// The process that asks the driver.
#[derive(Debug)]
pub(super) struct Gpus {
    /// Those that use a GPU.
    pub(super) pids: Vec<i32>,
    /// The driver's thread in each of those that it knows: process, thread.
    pub(super) threads: Vec<(i32, i32)>,
    /// The GPUs of this host,
    pub(super) devices: Devices,
    /// and those that a restart has them take the places of.
    had: Devices,
    /// An order has been given: what it does is to be waited for, and may be left to others.
    pub(super) is_asked: bool,
    /// Why they could not be put back.
    pub(super) away: Option<String>,
    asker: Asker,
}

/// A child that asks the driver.
#[derive(Debug)]
struct Asker(Child);

impl Asker {
    fn start(command: &mut Command) -> Result<Self, Fault> {
        let child = command.spawn().at("start the process that asks it")?;
        let pid = child.id().cast_signed();
        list(&ASKERS).push((pid, proc::born(pid)));
        Ok(Self(child))
    }

    fn pid(&self) -> i32 {
        self.0.id().cast_signed()
    }

    /// Waits for its end, for so long at most, and does `meanwhile` again and again; whether it has done what it was to do.
    /// None: it goes on.
    fn end(&mut self, limit: Duration, meanwhile: &dyn Fn()) -> Option<bool> {
        let end = Instant::now() + limit;
        let mut pause = Duration::from_micros(100);
        loop {
            meanwhile();
            match self.0.try_wait() {
                Ok(None) if Instant::now() < end => std::thread::sleep(pause),
                Ok(None) => return None,
                ended => {
                    return Some(ended.is_ok_and(|status| status.is_some_and(|s| s.success())));
                }
            }
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }

    /// Ends one that has nothing in hand.
    fn kill(&mut self) {
        let _ = self.0.kill();
        self.end(BEGIN, &|| ());
    }
}

/// One that nobody waits for: it lets these processes go on when one that is stopped is continued.
#[derive(Debug)]
struct Left {
    asker: i32,
    born: Option<u64>,
    pids: Vec<i32>,
    had: Devices,
}

impl Left {
    fn to(asker: &Asker, pids: &[i32], had: &Devices) -> Self {
        Self {
            asker: asker.pid(),
            born: proc::born(asker.pid()),
            pids: pids.to_vec(),
            had: had.clone(),
        }
    }
}

/// Waits for a moment until all that were left have done their work, before another one begins.
fn await_left() -> Result<(), Refusal> {
    let end = Instant::now() + GRACE;
    loop {
        let Some(last) = list(&LEFT).pop() else { return Ok(()) };
        let first = last.pids.first().copied().unwrap_or(0);
        if last.born.is_none() || proc::born(last.asker) != last.born {
            // What it has not done, if anything.
            recover(&last.pids, &last.had, &|| ()).map_err(|f| f.of(first, DRIVER))?;
            stranded::forget(&last.pids);
        } else {
            list(&LEFT).push(last);
            if Instant::now() > end {
                return Err(refuse(first, DRIVER, "is still being let go on after a checkpoint", true));
            }
            std::thread::sleep(TURN);
        }
    }
}

/// Whether job control has stopped the process.
fn is_stopped(pid: i32) -> bool {
    let tids = proc::tasks(pid).unwrap_or_default();
    tids.into_iter()
        .any(|tid| proc::task_stat(pid, tid).is_ok_and(|s| s.state == STOPPED))
}

/// Whether any thread of the process lives.
fn lives(pid: i32) -> bool {
    let tids = proc::tasks(pid).unwrap_or_default();
    tids.into_iter().any(|tid| proc::thread_lives(pid, tid))
}

/// Refuses a stopped process, in which the driver can do nothing.
fn stopped(pid: i32) -> Refusal {
    let why = "is stopped, and its GPU driver can do nothing there: continue it (kill -CONT) and try again";
    refuse(pid, DRIVER, why, false)
}

/// Looks, while an answer of the driver is waited for, at those that have to do something for it.
#[derive(Debug)]
pub(super) struct Watch {
    threads: Vec<(i32, i32)>,
    /// All of the job runs, unless job control has stopped it.
    all_run: bool,
    since: Cell<Option<Instant>>,
}

impl Watch {
    /// Fails when one has been stopped or dead for a while: nobody may answer any more.
    pub(super) fn look(&self) -> Result<(), Refusal> {
        let dead = self.threads.iter().find(|(pid, tid)| !proc::thread_lives(*pid, *tid));
        let still = || self.threads.iter().find(|(pid, _)| self.all_run && is_stopped(*pid));
        let why = match (dead, dead.or_else(still)) {
            (Some((pid, _)), _) => refuse(*pid, DRIVER, "has ended while the driver was asked about it", true),
            (None, Some((pid, _))) => stopped(*pid),
            (None, None) => {
                self.since.set(None);
                return Ok(());
            }
        };
        let since = self.since.get().unwrap_or_else(Instant::now);
        self.since.set(Some(since));
        if since.elapsed() < GRACE {
            Ok(())
        } else {
            Err(why)
        }
    }
}

/// How they stand when the process begins.
#[derive(Debug)]
pub(super) enum Stand {
    /// They run.
    Run,
    /// They were restarted, and are off these devices; the driver's thread in each.
    Rest(Devices, Vec<(i32, i32)>),
}

/// The GPUs of a host, as `UUID NAME`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Devices {
    /// Those that a job may use,
    pub seen: Vec<String>,
    /// and those that `CUDA_VISIBLE_DEVICES` hides from it. The driver counts them too.
    pub hidden: Vec<String>,
}

/// The GPUs of this host. Asking for them takes seconds, so it is done once.
static DEVICES: OnceLock<Devices> = OnceLock::new();

impl Gpus {
    /// Starts it for these processes, for whose work the driver may wait so long each; its page.
    pub(super) fn start(pids: Vec<i32>, stand: Stand, limit: Duration) -> Result<(Self, Page), Refusal> {
        if let (Stand::Run, Some(pid)) = (&stand, pids.iter().find(|pid| is_stopped(**pid))) {
            return Err(stopped(*pid));
        }
        await_left()?;
        if matches!(stand, Stand::Run) {
            refuse_unable(&pids)?;
            put_back_stranded(&pids)?;
        }
        let first = pids.first().copied().unwrap_or(0);
        let fault = |f: Fault| f.of(first, DRIVER);
        let page = memory().map_err(fault)?;
        let (had, known, restarted) = match stand {
            Stand::Run => (Devices::default(), Vec::new(), false),
            Stand::Rest(had, threads) => (had, threads, true),
        };
        let mut command = belay(&pids, &had);
        command.arg("--limit").arg(limit.as_millis().to_string());
        if restarted {
            command.arg("--restarted");
        } else if DEVICES.get().is_none() {
            command.arg("--list");
        }
        let stdin = page.try_clone().at("duplicate the control page").map_err(fault)?;
        let mut asker = Asker::start(command.stdin(stdin).stdout(Stdio::piped())).map_err(fault)?;
        let said = asker.0.stdout.take().map(until_ready);
        let Said {
            devices: listed,
            threads,
        } = match said {
            Some(Ok(said)) => said,
            said => {
                asker.kill();
                let why = match said {
                    Some(Err(why)) if !why.is_empty() => why,
                    _ => "the process that asks it has ended".into(),
                };
                return Err(refuse(first, DRIVER, why, false));
            }
        };
        let devices = if restarted {
            listed
        } else {
            DEVICES.get_or_init(|| listed).clone()
        };
        let gpus = Self {
            pids,
            threads: if restarted { known } else { threads },
            devices,
            had,
            is_asked: false,
            away: None,
            asker,
        };
        let pid = gpus.pid();
        let head = head_of(page.as_fd()).map_err(|e| refuse(first, DRIVER, format!("read its control page: {e}"), false))?;
        let page = head
            .map_err(|strange| strange.refusal(pid))
            .and_then(|head| Page::of(pid, head, page.as_fd()))?
            .speaks_for(first);
        if !restarted && gpus.devices.seen.is_empty() {
            return Err(refuse(first, DRIVER, "shows no GPU: look at nvidia-smi", false));
        }
        Ok((gpus, page))
    }

    /// To be looked at while an answer is waited for; `all_run`: the whole job runs.
    pub(super) fn watch(&self, all_run: bool) -> Watch {
        Watch {
            threads: self.threads.clone(),
            all_run,
            since: Cell::new(None),
        }
    }

    /// After the asker, whose `page` this is, has not done what it was asked, for this reason: notes the processes with which
    /// that can never be done.
    pub(super) fn note_unable(&self, page: &Page, why: &Refusal) {
        let unable = page.unable().into_iter().filter(|pid| self.pids.contains(pid));
        list(&UNABLE).extend(unable.map(|pid| (Program::of(pid), why.reason.clone())));
    }

    /// Ends the asker, whose `page` this is, where it has not answered in time, or may never. Another one cares for the
    /// processes: one call about each, so that where the driver does not answer about one while another is locked, that other
    /// one goes on.
    pub(super) fn leave(&mut self, page: &mut Page) {
        if page.standing == Standing::Late || self.has_dead() {
            self.asker.kill();
            page.standing = Standing::Ended;
        }
    }

    /// Whether a process has ended, about which the driver may never answer.
    fn has_dead(&self) -> bool {
        self.threads.iter().any(|(pid, tid)| !proc::thread_lives(*pid, *tid))
    }

    /// Its number.
    pub(super) fn pid(&self) -> i32 {
        self.asker.pid()
    }

    /// The processes are gone, or will be: nobody is to go on.
    pub(super) fn abandon(&mut self) {
        self.is_asked = false;
    }

    /// What was to be done by the process, which is gone: has another one let those that use a GPU go on. The driver's
    /// threads in them are attended to `meanwhile`, where all else of the job stands still.
    pub(super) fn recover(&self, meanwhile: &dyn Fn()) -> Result<(), Fault> {
        recover(&self.pids, &self.had, meanwhile)
    }
}

/// Has those of these processes that live go on, which had these GPUs.
fn recover(pids: &[i32], had: &Devices, meanwhile: &dyn Fn()) -> Result<(), Fault> {
    let living: Vec<i32> = pids.iter().copied().filter(|pid| lives(*pid)).collect();
    if living.is_empty() {
        return Ok(());
    }
    let mut command = belay(&living, had);
    let command = command.arg("--recover").stdin(Stdio::null()).stdout(Stdio::piped());
    let mut asker = Asker::start(command)?;
    match asker.end(LIMIT, meanwhile) {
        Some(true) => Ok(()),
        Some(false) => {
            let mut why = String::new();
            if let Some(out) = asker.0.stdout.take() {
                let _ = out.take(4096).read_to_string(&mut why);
            }
            crate::fault::refuse(why.trim().to_owned())
        }
        None => {
            // What it can do yet, it does.
            list(&LEFT).push(Left::to(&asker, &living, had));
            crate::fault::refuse("the driver does not return: see whether the GPU hangs (nvidia-smi, dmesg)")
        }
    }
}

impl Gpus {
    /// Waits until the process has ended; whether all that it was to do is done. None: one of those that use a GPU is stopped.
    fn end(&mut self) -> Option<Result<(), Fault>> {
        let end = Instant::now() + LIMIT;
        let watch = self.watch(true);
        loop {
            match self.asker.end(TURN, &|| ()) {
                Some(true) => return Some(Ok(())),
                Some(false) => return Some(self.recover(&|| ())),
                None if Instant::now() > end => {
                    self.asker.kill();
                    return Some(self.recover(&|| ()));
                }
                None => {}
            }
            if watch.look().is_err() {
                if self.has_dead() {
                    self.asker.kill();
                }
                if self.pids.iter().any(|pid| is_stopped(*pid)) {
                    return None;
                }
            }
        }
    }
}

impl Drop for Gpus {
    /// Whatever it was told, it ends by itself; one that was killed may have left work.
    fn drop(&mut self) {
        if !self.is_asked {
            self.asker.kill();
            return;
        }
        let gone_on = self.end().unwrap_or_else(|| {
            list(&LEFT).push(Left::to(&self.asker, &self.pids, &self.had));
            crate::fault::refuse("one of them is stopped: they do when it is continued")
        });
        stranded::forget(&self.pids);
        if let Err(error) = gone_on {
            let is_waiting = list(&LEFT)
                .iter()
                .any(|left| left.pids.iter().any(|pid| self.pids.contains(pid)));
            let why = self.away.take().unwrap_or_else(|| error.to_string());
            tracing::error!(%error, pids = ?self.pids, is_waiting, "the GPU driver has not put these processes back: {WAITS}");
            stranded::note(&self.pids, &why, is_waiting);
        }
    }
}

/// What the process says before it is ready.
#[derive(Debug, Default, PartialEq, Eq)]
struct Said {
    /// The GPUs,
    devices: Devices,
    /// and the driver's threads: process, thread.
    threads: Vec<(i32, i32)>,
}

impl Said {
    /// Or else why it is not.
    fn parse(text: &str) -> Result<Self, String> {
        let mut said = Self::default();
        for line in text.lines() {
            let numbers = |rest: &str| {
                let (pid, tid) = rest.split_once(' ')?;
                Some((pid.parse().ok()?, tid.parse().ok()?))
            };
            match line.split_once(' ') {
                _ if line == "ready" => return Ok(said),
                Some(("gpu", device)) => said.devices.seen.push(device.to_owned()),
                Some(("hidden", device)) => said.devices.hidden.push(device.to_owned()),
                Some(("thread", rest)) => said.threads.extend(numbers(rest)),
                _ => return Err(line.to_owned()),
            }
        }
        Err(String::new())
    }
}

/// Waits until the process is ready: what it has said.
fn until_ready(mut from: ChildStdout) -> Result<Said, String> {
    let end = Instant::now() + BEGIN;
    let mut said = Vec::new();
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let left = i32::try_from(left.as_millis()).unwrap_or(i32::MAX);
        if left == 0 || said.len() > MOST_SAID || !fd::wait(from.as_raw_fd(), libc::POLLIN, left).map_err(|e| e.to_string())? {
            return Err("does not begin: look at nvidia-smi".into());
        }
        let mut bytes = [0; 4096];
        let n = from.read(&mut bytes).map_err(|e| e.to_string())?;
        said.extend_from_slice(&bytes[..n]);
        if n == 0 || said.ends_with(b"ready\n") {
            break;
        }
    }
    Said::parse(&String::from_utf8_lossy(&said))
}

/// The command that asks the driver about these processes, which had these GPUs.
fn belay(pids: &[i32], had: &Devices) -> Command {
    let list = pids.iter().map(i32::to_string).collect::<Vec<_>>().join(",");
    // The same program, also where the file has been replaced by a newer one.
    let mut command = Command::new("/proc/self/exe");
    command.args(["gpu", "--processes", &list]).stderr(Stdio::null());
    // The driver shows it all GPUs of the host, and it keeps to those that the agent is to see.
    command.env_remove(VISIBLE);
    if let Ok(named) = std::env::var(VISIBLE) {
        command.args(["--visible", &named]);
    }
    command.args(had.seen.iter().flat_map(|device| ["--had", device]));
    command.args(had.hidden.iter().flat_map(|device| ["--hidden", device]));
    command
}

/// Memory for a control page.
fn memory() -> Result<OwnedFd, Fault> {
    let name = Path::new(OsStr::from_bytes(NAME.to_bytes()));
    let memory = fd::memfd(name, libc::MFD_ALLOW_SEALING).at("make a control page")?;
    let file = File::from(memory);
    file.set_len(PAGE).at("make a control page")?;
    let sealed = rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).map_err(std::io::Error::from);
    sealed.at("seal a control page")?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_process_says_is_read() {
        let said = Said::parse("gpu ab NVIDIA H100\nhidden cd NVIDIA L4\nthread 7 9\nthread x\nready\n").unwrap();
        let devices = Devices {
            seen: vec!["ab NVIDIA H100".to_owned()],
            hidden: vec!["cd NVIDIA L4".to_owned()],
        };
        assert_eq!((said.devices, said.threads), (devices, vec![(7, 9)]));
        assert_eq!(Said::parse("no driver\n"), Err("no driver".into()));
        assert_eq!(Said::parse("gpu ab x\n"), Err(String::new()));
    }
}
