//! `belay launch` and `belay restart`: prepare the job directory, then become the front of the job.

use crate::cli::{self, Launch, Restart};
use crate::logging;
use belay_coordinator::agent::Setup;
use belay_coordinator::jobdir::{Access, Description, Differential, JobDir};
use belay_coordinator::restart::Notice;
use belay_coordinator::{agent, generations, launch, restart, sys, Failure};
use belay_wire::Exit;
use std::io::IsTerminal;

/// Runs the command; ends this process as the command ended.
pub(crate) fn launch(args: Launch) -> Result<u8, Failure> {
    launch::check(&args.command)?;
    let dir = JobDir::create(&args.ckpt_dir)?;
    let lock = dir.lock()?;
    let held = generations::list(&dir.generations())?.len();
    if held > 0 {
        let at = dir.path().display();
        return Err(Failure::new(
            Exit::HoldsCheckpoints,
            format!(
                "{at} holds {held} checkpoints of an earlier job; continue it with belay restart {at}, remove them with belay gc --all {at}, or use another directory"
            ),
        ));
    }
    let words = args.command.iter().map(|w| w.to_string_lossy().into_owned()).collect();
    let description = Description {
        interval: args.ckpt_interval.unwrap_or_default(),
        keep: args.keep,
        max_bytes: args.max_bytes,
        differential: match args.differential {
            cli::Differential::Hash => Differential::Hash,
            cli::Differential::Written => Differential::Written,
            cli::Differential::Off => Differential::Off,
        },
        save_open_files: args.save_open_files,
        log_level: logging::level_name(args.log_level),
        ..Description::new(args.name, words)
    };
    dir.describe(&description)?;
    logging::start(&dir, &description.log_level)?;
    let status = launch::launch(
        args.command,
        Setup {
            dir: dir.clone(),
            lock,
            description,
        },
    )?;
    finish(&dir, status)
}

/// Continues a job; ends this process as its command ended.
pub(crate) fn restart(args: Restart) -> Result<u8, Failure> {
    // The job's descriptors come from the checkpoint; what this process inherited would only be held open.
    sys::close_inherited();
    let dir = JobDir::open(&args.target.dir, Access::Own)?;
    let mut description = dir.description()?;
    let lock = dir.lock()?;
    restart::candidates(&dir, args.generation)?;
    if let Some(i) = args.ckpt_interval {
        description.interval = i;
    }
    if let Some(l) = args.log_level {
        description.log_level = logging::level_name(l);
    }
    description.wait_status = None;
    // A full disk is no reason not to go on from a checkpoint.
    for failure in [dir.describe(&description), logging::start(&dir, &description.log_level)]
        .into_iter()
        .filter_map(Result::err)
    {
        sys::say(&failure.message);
    }
    let options = belay_restart::Options {
        lazy: args.lazy,
        restorer: belay_kernel::blob::find("belay-restorer")
            .map_err(|e| Failure::new(Exit::System, format!("{e}; install belay completely")))?,
    };
    let terminal = std::io::stderr().is_terminal();
    let mut tell = |notice: Notice, line: &str| {
        if !args.quiet && (terminal || notice == Notice::Warning) {
            sys::say(line);
        }
    };
    let status = restart::restart(
        Setup {
            dir: dir.clone(),
            lock,
            description,
        },
        args.generation,
        &options,
        &mut tell,
    )?;
    finish(&dir, status)
}

fn finish(dir: &JobDir, status: i32) -> Result<u8, Failure> {
    if status == agent::stopped_after_checkpoint() {
        let at = dir.path().display();
        sys::say(&format!("stopped after a checkpoint; continue with belay restart {at}"));
    }
    sys::exit_like(status)
}
