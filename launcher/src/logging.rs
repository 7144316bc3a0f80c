//! Structured logs in the job directory: one file of JSON lines per launch or restart.

use crate::cli::LogLevel;
use belay_coordinator::{jobdir::JobDir, sys, Failure};
use clap::ValueEnum;
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Mutex;
use tracing_subscriber::filter::LevelFilter;

/// Log files that are kept.
const KEPT: usize = 16;

/// Name of `level` as stored in `job.json`.
pub(crate) fn level_name(level: LogLevel) -> String {
    level.to_possible_value().map(|v| v.get_name().to_owned()).unwrap_or_default()
}

/// Starts logging at `level` (a name of [`LogLevel`]) into the log directory of `dir`.
pub(crate) fn start(dir: &JobDir, level: &str) -> Result<(), Failure> {
    let level = match LogLevel::from_str(level, true) {
        Ok(LogLevel::Error) => LevelFilter::ERROR,
        Ok(LogLevel::Warn) => LevelFilter::WARN,
        Ok(LogLevel::Debug) => LevelFilter::DEBUG,
        Ok(LogLevel::Trace) => LevelFilter::TRACE,
        Ok(LogLevel::Info) | Err(_) => LevelFilter::INFO,
    };
    let path = dir.log().join(format!("{}-{}.jsonl", sys::now_unix_s(), std::process::id()));
    let fail = |e| Failure::io(format!("make log file {}", path.display()), &e);
    let file = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(&path)
        .map_err(fail)?;
    let subscriber = tracing_subscriber::fmt()
        .json()
        .with_max_level(level)
        // Where the disk is full it would say so on standard error, the program's own, and end where that is full too.
        .log_internal_errors(false)
        .with_writer(Mutex::new(file))
        .finish();
    tracing::subscriber::set_global_default(subscriber).map_err(|e| fail(std::io::Error::other(e)))?;
    remove_old(dir);
    Ok(())
}

/// Names begin with the time, so the oldest sort first.
fn remove_old(dir: &JobDir) {
    let Ok(entries) = std::fs::read_dir(dir.log()) else {
        return;
    };
    let mut files: Vec<_> = entries
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| p.extension().is_some_and(|e| e == "jsonl"))
        .collect();
    files.sort();
    for old in files.iter().rev().skip(KEPT) {
        if let Err(e) = std::fs::remove_file(old) {
            tracing::warn!(path = %old.display(), error = %e, "remove an old log file");
        }
    }
}
