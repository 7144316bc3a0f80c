//! Work in a child process: clients of object stores have threads, and the process that makes a restart's namespaces
//! must have none.
//!
//! ```text
//! child ── one JSON line each: progress …, then the result ──> pipe ──> this process
//! ```

use crate::{sys, Failure};
use belay_storage::flush::Control;
use belay_wire::Exit;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, BufReader, Write};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How often progress is reported.
const PERIOD: Duration = Duration::from_millis(200);

#[derive(Debug, Serialize, Deserialize)]
enum Line<T> {
    Progress(u64, u64),
    Done(T),
    Failed { exit: Exit, message: String, in_the_way: bool },
}

/// Runs `work` in a child process and returns its result; `tell` receives bytes done and expected. Call from a process
/// with one thread.
pub(super) fn run<T: Serialize + DeserializeOwned>(
    work: impl FnOnce(&Control) -> Result<T, Failure>,
    tell: &mut dyn FnMut(u64, u64),
) -> Result<T, Failure> {
    let system = |step: &'static str| move |e: io::Error| Failure::system(step, &e);
    let (reader, writer) = io::pipe().map_err(system("make a pipe"))?;
    let Some(pid) = sys::fork().map_err(system("fork"))? else {
        drop(reader);
        std::process::exit(i32::from(serve(work, writer).is_err()));
    };
    drop(writer);
    let mut result = None;
    for line in BufReader::new(reader).lines() {
        let line = line.map_err(system("read from a child"))?;
        match serde_json::from_str(&line) {
            Ok(Line::Progress(done, expected)) => tell(done, expected),
            Ok(Line::Done(value)) => result = Some(Ok(value)),
            Ok(Line::Failed {
                exit,
                message,
                in_the_way,
            }) => {
                let failure = Failure::new(exit, message);
                result = Some(Err(Failure { in_the_way, ..failure }));
            }
            Err(e) => result = Some(Err(Failure::new(Exit::Internal, format!("answer of a child: {e}")))),
        }
    }
    let status = sys::wait(pid).map_err(system("wait for a child"))?;
    result.unwrap_or_else(|| {
        Err(Failure::new(
            Exit::System,
            format!("the process that talks to the tiers ended with wait status {status}"),
        ))
    })
}

fn serve<T: Serialize>(work: impl FnOnce(&Control) -> Result<T, Failure>, out: io::PipeWriter) -> io::Result<()> {
    // A store that closes a connection is an error of the call, and not the end.
    sys::Disposition::set_ignored(libc::SIGPIPE);
    // Nobody waits for the result when the parent is gone.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    let out = Arc::new(Mutex::new(out));
    let control = Arc::new(Control::default());
    let (progress, to) = (control.clone(), out.clone());
    // Ends with the process.
    std::thread::Builder::new().spawn(move || loop {
        std::thread::sleep(PERIOD);
        let expected = progress.expected.load(Ordering::Relaxed);
        if expected > 0 {
            let line: Line<()> = Line::Progress(progress.bytes.load(Ordering::Relaxed), expected);
            drop(send(&to, &line));
        }
    })?;
    let result = work(&control);
    let line = match result {
        Ok(value) => Line::Done(value),
        Err(f) => Line::Failed {
            exit: f.exit,
            message: f.message,
            in_the_way: f.in_the_way,
        },
    };
    send(&out, &line)
}

fn send<T: Serialize>(out: &Mutex<io::PipeWriter>, line: &Line<T>) -> io::Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    out.lock().unwrap_or_else(PoisonError::into_inner).write_all(&text)
}
