//! A part of a job of which the root is on another host.

use super::restart_options;
use crate::cli::Agent;
use crate::logging;
use belay_coordinator::agent::Setup;
use belay_coordinator::jobdir::{Access, Description, JobDir, Lock};
use belay_coordinator::nodes::again::{LOCK_LIMIT, LOCK_LIMIT_BY_HAND};
use belay_coordinator::nodes::{is_daemon, Nodes};
use belay_coordinator::redundancy::{local, record};
use belay_coordinator::tiers::gather;
use belay_coordinator::{launch, restart, sys, tiers, End, Failure};
use belay_image::name::Name;
use belay_wire::Exit;
use std::ffi::OsString;
use std::path::Path;

/// Runs a part of a job of which the root is on another host; ends this process as its command ended.
pub(crate) fn agent(args: Agent) -> Result<u8, Failure> {
    let end = match args.generation {
        Some(number) => restart_part(&args, number)?,
        None => launch_part(args)?,
    };
    // What the user is told, the root says.
    sys::exit_like(end.status())
}

/// The part goes on from generation `number`.
fn restart_part(args: &Agent, number: u64) -> Result<End, Failure> {
    sys::close_inherited();
    let dir = JobDir::open(&args.dir, Access::Own)?;
    let mut description = dir.description()?;
    // The root has its lock: whoever holds this one has no root any more.
    let lock = dir.lock_after(match args.ends_with_root {
        true => LOCK_LIMIT,
        false => LOCK_LIMIT_BY_HAND,
    })?;
    logging::start(&dir, &description.log_level)?;
    let job = args.dir.parent().and_then(Path::parent).unwrap_or(&args.dir);
    record::drop_uncommitted(job, &dir.generations(), number)?;
    let root = JobDir::open(job, Access::Own)?.description()?;
    tiers::local::adopt(&mut description, &root);
    let setup = part(args, dir, lock, description)?;
    let options = restart_options(false, root.any_cpu, args.ends_with_root, &root)?;
    restart::restart(
        setup,
        (vec![number], &gather::Gathered::default()),
        (&options, &[]),
        &mut |_, _| {},
    )
}

/// The part begins with its command.
fn launch_part(mut args: Agent) -> Result<End, Failure> {
    if args.by_shell {
        args.command = [shell(), "-c".into()].into_iter().chain(args.command).collect();
    }
    launch::check(&args.command)?;
    refuse_plugin_of_srun(&args.command)?;
    if let Some(parts) = args.dir.parent() {
        JobDir::make_parts(parts)?;
    }
    let dir = JobDir::create(&args.dir)?;
    let words = args.command.iter().cloned().map(Name::from).collect();
    let mut description = Description::new(None, words);
    if let Some(job) = args.dir.parent().and_then(Path::parent) {
        let root = JobDir::open(job, Access::Own)?.description()?;
        if let Some(s) = root.config.redundancy.settings()? {
            local::lay(&s, job, (&root.id, args.tag), true)?;
        }
        tiers::local::adopt(&mut description, &root);
        tiers::check(&description)?;
        description.differential = root.differential;
        description.log_level = root.log_level;
        description.config.verbs = root.config.verbs;
        description.from = root.from;
    }
    let lock = dir.lock()?;
    dir.describe(&description)?;
    logging::start(&dir, &description.log_level)?;
    let setup = part(&args, dir, lock, description)?;
    launch::launch(args.command, setup)
}

/// By which a remote shell's daemon would have executed the command.
fn shell() -> OsString {
    let own = std::env::var_os("SHELL").filter(|shell| Path::new(shell).is_absolute());
    own.unwrap_or_else(|| "sh".into())
}

/// What the agent of the part is given; the root knows of it from now on.
fn part(args: &Agent, dir: JobDir, lock: Lock, description: Description) -> Result<Setup, Failure> {
    Ok(Setup {
        dir,
        lock,
        description,
        nodes: Some(Nodes::part(&args.key, &args.join, args.tag, args.called.clone())?),
        restarts: args.ends_with_root,
    })
}

/// The rank of a program that `srun --mpi=pmix` or `--mpi=pmi2` starts would be connected to Slurm's own daemon, which
/// is in no checkpoint. (Where the stand-in for `srun` knows of the plugin, it has become `mpirun` instead.)
fn refuse_plugin_of_srun(command: &[OsString]) -> Result<(), Failure> {
    let program = command.first().map(Path::new).unwrap_or(Path::new(""));
    let offered = ["PMIX_NAMESPACE", "PMI_FD"].iter().any(|v| std::env::var_os(v).is_some());
    if !offered || std::env::var_os("SLURM_STEP_ID").is_none() || is_daemon(program) {
        return Ok(());
    }
    Err(Failure::new(
        Exit::Usage,
        format!(
            "srun connects {} to Slurm's own MPI server (--mpi), which cannot be checkpointed; start it with mpirun, or with srun --mpi=none",
            program.display()
        ),
    ))
}
