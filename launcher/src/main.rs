//! The `belay` command line: what the user typed becomes a call into the coordinator, and its outcome an exit status.
//!
//! There is no Rust `main`: the runtime's start would set SIGPIPE to be ignored and open closed standard descriptors,
//! and the launched command must inherit both exactly as the launcher was given them.

#![cfg_attr(not(test), no_main)]

mod cli;
mod client;
mod commands;
mod declared;
mod export;
mod format;
mod inspect;
mod logging;
mod manual;
mod predicted;
mod progress;
mod report;
mod start;

use belay_coordinator::nodes::standin;
use belay_coordinator::{sys, Failure};
use belay_wire::Exit;
use std::ffi::OsString;

/// Entry, called by the C runtime.
#[cfg_attr(not(test), no_mangle)]
pub extern "C" fn main(_argc: i32, _argv: *const *const u8) -> i32 {
    sys::fill_standard_descriptors();
    if let Some(path) = standin::executed_as() {
        let words: Result<Vec<String>, _> = std::env::args_os().skip(1).map(OsString::into_string).collect();
        let refused = |word: OsString| {
            let what = format!(
                "{}: the argument {word:?} is no UTF-8; use other names, or call the remote shell by its path",
                path.display()
            );
            Failure::new(Exit::Usage, what)
        };
        return match words.map_err(refused).and_then(|words| standin::run(&path, &words)) {
            Ok(code) => code.into(),
            Err(failure) => {
                sys::say(&failure.to_string());
                255
            }
        };
    }
    let cli = match cli::parse() {
        Ok(cli) => cli,
        Err(e) if e.use_stderr() => {
            // There is nobody left to tell.
            drop(e.print());
            return Exit::Usage.code().into();
        }
        Err(help) => {
            return match help.print() {
                // A reader that has gone away is no reason to fail.
                Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => {
                    sys::say(&format!("write to standard output: {e}"));
                    Exit::Io.code().into()
                }
                _ => 0,
            };
        }
    };
    // With cap_checkpoint_restore only a restart can do anything, and the job's agent must be like its processes.
    if !matches!(cli.command, cli::Command::Restart(_) | cli::Command::Run(_)) {
        if let Err(e) = sys::drop_file_capabilities() {
            sys::say(&format!("give up the capabilities of the program file: {e}"));
            return Exit::System.code().into();
        }
    }
    match commands::run(cli.command) {
        Ok(code) => code.into(),
        Err(failure) => {
            tracing::error!(exit = failure.exit.code(), error = %failure, "failed");
            sys::say(&failure.to_string());
            failure.exit.code().into()
        }
    }
}
