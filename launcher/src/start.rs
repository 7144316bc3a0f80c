//! `belay launch`, `belay restart` and `belay run`: prepare the job directory, then become the front of the job.

mod another;
mod from;
pub(crate) mod part;

use crate::cli::{self, Gpu, Launch, Rank, Restart, Run, Store, Upkeep};
use crate::logging;
use crate::progress::{is_able_terminal, Bar};
use belay_coordinator::agent::Setup;
use belay_coordinator::config::{Config, Encryption, Levels, Limits, Use};
use belay_coordinator::jobdir::{Access, Description, Differential, JobDir, Lock};
use belay_coordinator::keys;
use belay_coordinator::nodes::alive;
use belay_coordinator::nodes::allocation::Allocation;
use belay_coordinator::nodes::hosts::read_file;
use belay_coordinator::nodes::{step, Nodes};
use belay_coordinator::redundancy::{heal, local, serve, Redundancy};
use belay_coordinator::restart::Notice;
use belay_coordinator::tiers::gather;
use belay_coordinator::{agent, launch, removal, restart, sys, tiers, End, Failure};
use belay_image::name::Name;
use belay_wire::{Exit, Phase};
use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Runs the command; ends this process as the command ended.
pub(crate) fn launch(args: Launch) -> Result<u8, Failure> {
    let modes = sys::TerminalModes::found();
    launch::check(&args.command)?;
    let (config, redundancy, limits) = configured(&args)?;
    let config = config.of_job(redundancy);
    limits.check_tiers(&config, Use::New)?;
    let description = described(&args, &limits)?;
    from::check(args.from.as_deref())?;
    let dir = JobDir::create(&args.ckpt_dir)?;
    let lock = dir.lock()?;
    another::refuse_earlier(&dir, tiers::held(&dir)?)?;
    let end = launch_in(&dir, lock, (config, description), args, false)?;
    finish(&dir, end.status(), modes)
}

/// The configuration files, with what the options of a launch say instead, and how the job is to be made redundant. A
/// job directory that they do not allow is refused.
fn configured(args: &Launch) -> Result<(Config, Redundancy, Limits), Failure> {
    let (mut config, limits) = Config::load(args.config.as_deref())?;
    limits.check_job(&args.ckpt_dir, Use::New)?;
    if args.across_hosts {
        Nodes::check_place(&args.ckpt_dir)?;
    }
    if let Some(policy) = args.placement {
        config.placement.policy = policy;
    }
    if let Some(file) = &args.key_file {
        config.encryption = Encryption::by_file(file)?;
    }
    config.levels.add(Levels {
        redundant: args.redundant_every,
        durable: args.durable_every,
        ..Levels::default()
    });
    config
        .levels
        .check()
        .map_err(|what| Failure::new(Exit::Usage, format!("levels: {what}")))?;
    let redundancy = redundancy(&config, args)?;
    Ok((config, redundancy, limits))
}

/// What the options of a launch say about the job, within these limits.
fn described(args: &Launch, limits: &Limits) -> Result<Description, Failure> {
    let words = args.command.iter().cloned().map(Name::from).collect();
    Ok(Description {
        interval: args.ckpt_interval.unwrap_or_default(),
        mtti_s: args.mtti.map(|d| d.as_secs_f64()),
        min_gap_s: args.min_gap.as_secs_f64(),
        keep: limits.keep(args.keep),
        max_bytes: limits.max_bytes(args.max_bytes)?,
        differential: match args.differential {
            cli::Differential::Hash => Differential::Hash,
            cli::Differential::Written => Differential::Written,
            cli::Differential::Off => Differential::Off,
        },
        save_open_files: limits.save_open_files(args.save_open_files),
        save_code: limits.save_code(args.no_save_code),
        leave_out: matches!(args.access, cli::Access::Deferred | cli::Access::Certain),
        certain: args.access == cli::Access::Certain,
        report: args.access == cli::Access::Report,
        from: from::absolute(args.from.as_ref())?,
        across_hosts: args.across_hosts,
        log_level: logging::level_name(args.log_level),
        metrics: args.metrics.clone().filter(|m| m != "off"),
        ..Description::new(args.name.clone(), words)
    })
}

fn launch_in(
    dir: &JobDir,
    lock: Lock,
    (config, mut description): (Config, Description),
    args: Launch,
    restarts: bool,
) -> Result<End, Failure> {
    removal::refuse_living(dir)?;
    description.dir = dir.path().to_owned().into();
    match config.redundancy.settings()? {
        Some(s) => local::lay(&s, dir.path(), (&description.id, 0), true)?,
        None => local::unlay(dir.path())?,
    }
    description.config = config;
    tiers::begin(dir, &description)?;
    keys::prepare(&description.config)?;
    description.history.begin(sys::now_unix_s());
    dir.describe(&description)?;
    logging::start(dir, &description.log_level)?;
    let tree = &description.config.tree;
    let nodes = args.across_hosts.then(|| Nodes::root(dir, tree)).transpose()?;
    launch::launch(
        args.command,
        Setup {
            dir: dir.clone(),
            lock,
            description,
            nodes,
            restarts,
        },
    )
}

/// How a job is to be made redundant: on one host it is not.
fn redundancy(config: &Config, args: &Launch) -> Result<Redundancy, Failure> {
    if !args.across_hosts {
        if args.redundancy.is_some() || args.local_dir.is_some() {
            return Err(Failure::new(
                Exit::Usage,
                "--redundancy and --local-dir are for jobs launched with --across-hosts",
            ));
        }
        return Ok(Redundancy::default());
    }
    let mut all = config.redundancy.clone();
    all.add(args.redundancy.clone().unwrap_or_default());
    all.add(Redundancy {
        local: args.local_dir.clone(),
        ..Redundancy::default()
    });
    all.check()
        .map_err(|what| Failure::new(Exit::Usage, format!("redundancy: {what}")))?;
    Ok(all)
}

/// What one host holds of a job on several hosts.
pub(crate) fn store(args: Store) -> Result<u8, Failure> {
    sys::close_inherited();
    let dir = JobDir::open(&args.dir, Access::Own)?;
    let none = || Failure::new(Exit::Usage, "the job was not launched with --redundancy");
    let settings = || dir.description()?.config.redundancy.settings()?.ok_or_else(none);
    match args.what {
        Upkeep::Look => gather::run(&dir, args.tag, gather::How::Look)?,
        Upkeep::Home => gather::run(&dir, args.tag, gather::How::Home)?,
        Upkeep::Flush => tiers::hosts::run(&dir, (args.tag, args.generation), &args.sources)?,
        Upkeep::Serve => serve::run(&dir, &settings()?, args.generation)?,
        Upkeep::Heal => {
            let sources: Vec<Vec<String>> = args
                .sources
                .iter()
                .filter(|s| !s.is_empty())
                .map(|s| s.split('+').map(str::to_owned).collect())
                .collect();
            heal::run(&dir, &settings()?, args.tag, args.generation, &sources)?;
        }
    }
    Ok(0)
}

/// Asks the GPU driver. What goes wrong is said on standard output, where the agent listens.
pub(crate) fn gpu(args: Gpu) -> Result<u8, Failure> {
    sys::close_inherited();
    let task = belay_gpu::Task {
        pids: args.processes,
        limit: Duration::from_millis(args.limit),
        restarted: args.restarted,
        had: args.had,
        hidden: args.hidden,
        visible: args.visible,
        list: args.list,
        recover: args.recover,
    };
    match belay_gpu::serve(task) {
        Ok(()) => Ok(0),
        Err(why) => {
            // Nobody may listen any more.
            let _ = writeln!(std::io::stdout(), "{why}");
            Ok(1)
        }
    }
}

/// Continues a job; ends this process as its command ended.
pub(crate) fn restart(args: Restart) -> Result<u8, Failure> {
    let modes = sys::TerminalModes::found();
    // The job's descriptors come from the checkpoint; what this process inherited would only be held open.
    sys::close_inherited();
    let (mut config, limits) = Config::load(args.config.as_deref())?;
    let by_file = args.key_file.as_deref().map(Encryption::by_file).transpose()?;
    config.encryption = by_file.clone().unwrap_or(config.encryption);
    let dir = match JobDir::open(&args.target.dir, Access::Own) {
        // The whole directory may be lost.
        Err(f) if f.exit == Exit::NoJob && tiers::find_job(&args.target.dir, (&config, &limits), &|_| true, &|_| true)? => {
            JobDir::open(&args.target.dir, Access::Own)?
        }
        other => other?,
    };
    limits.check_job(&args.target.dir, Use::Old)?;
    let mut description = dir.description()?;
    let mut what = Use::Old;
    if args.config.is_some() {
        keys::check_goes_on(&description.config, &config)?;
        // Where the checkpoints of a redundant job lie does not change.
        description.config = config.of_job(description.config.redundancy);
        what = Use::Anew;
    }
    description.config.encryption = by_file.unwrap_or(description.config.encryption);
    limits.check_tiers(&description.config, what)?;
    if let Some((most, why)) = limits.lowered(description.max_bytes) {
        if !args.quiet {
            sys::say(&why);
        }
        description.allowed_bytes = Some(most);
    }
    let named = named(args.hosts)?;
    let lock = dir.lock()?;
    let allocation = allocation(&description, &named)?;
    let hosts = allocation.map_or(Ok(named), |a| in_allocation(&dir, &a, args.generation, args.quiet))?;
    if let Some(i) = args.ckpt_interval {
        description.interval = i;
    }
    if let Some(l) = args.log_level {
        description.log_level = logging::level_name(l);
    }
    if let Some(place) = args.metrics {
        description.metrics = Some(place).filter(|m| m != "off");
    }
    let how = How {
        generation: args.generation,
        lazy: args.lazy,
        any_cpu: args.any_cpu,
        hosts,
        quiet: args.quiet,
        restarts: false,
        ends_remains: false,
    };
    let end = restart_in(&dir, lock, description, how)?;
    finish(&dir, end.status(), modes)
}

/// Continues the job in the directory if it has a checkpoint, else launches it.
pub(crate) fn run(args: Run) -> Result<u8, Failure> {
    let modes = sys::TerminalModes::found();
    let (config, redundancy, limits) = configured(&args.launch)?;
    let launched = config.clone().of_job(redundancy);
    let new = described(&args.launch, &limits)?;
    let found = found_again(&args.launch.ckpt_dir, &new, (&config, &limits))?;
    if !found && JobDir::open(&args.launch.ckpt_dir, Access::Own).is_err() {
        // This will be a launch: nothing is made before it is allowed and possible.
        launch::check(&args.launch.command)?;
        limits.check_tiers(&launched, Use::New)?;
    }
    let dir = JobDir::create(&args.launch.ckpt_dir)?;
    let lock = dir.lock()?;
    let old = if dir.is_described() { Some(dir.description()?) } else { None };
    let held = match &old {
        Some(old) if old.command == new.command && old.wait_status != Some(0) => held_anywhere(&dir, old)?,
        _ => tiers::held(&dir)?,
    };
    old.as_ref()
        .map_or(Ok(()), |old| another::refuse_other(&dir, (old, &new), held))?;
    let at = dir.shown();
    let (across, restarts) = (args.launch.across_hosts, args.again < args.restarts);
    let end = match old {
        Some(old) if old.wait_status == Some(0) => {
            sys::say(&format!(
                "the job in {at} has ended with exit status 0 and is not run again; to begin anew, belay gc --all {at} and belay launch"
            ));
            return Ok(0);
        }
        Some(old) if held > 0 => {
            sys::close_inherited();
            keys::check_goes_on(&old.config, &config)?;
            // Where, when and as what it was launched stays; the choices are those of this command line.
            let description = Description {
                cwd: old.cwd,
                host: old.host,
                created_unix_s: old.created_unix_s,
                created_ns: old.created_ns,
                history: old.history,
                lost: old.lost.clone(),
                wait_status: old.wait_status,
                id: old.id,
                astray: old.astray,
                page_key: old.page_key,
                dir: old.dir,
                config: config.of_job(old.config.redundancy),
                ..new
            };
            limits.check_tiers(&description.config, Use::Anew)?;
            let (named, old_lost) = (named(args.hosts)?, old.lost);
            let allocation = allocation(&description, &named)?;
            let how = How {
                generation: None,
                lazy: args.lazy,
                any_cpu: args.any_cpu,
                hosts: match (args.again, allocation) {
                    (0, None) => named,
                    (0, Some(a)) => in_allocation(&dir, &a, None, false)?,
                    (n, _) if !across => {
                        sys::say(&format!("restarting ({n} of {} restarts)", args.restarts));
                        Vec::new()
                    }
                    (n, allocation) => {
                        alive::await_fence(old_lost.last().map_or(0, |(_, noticed)| *noticed));
                        let given = allocation.map_or(named, |a| a.others);
                        without_lost(&dir, &given, (n, args.restarts))?
                    }
                },
                quiet: false,
                restarts,
                ends_remains: true,
            };
            match restart_in(&dir, lock, description, how) {
                // A further host may be gone.
                Err(f) if f.exit == Exit::RestartFailed && args.again > 0 && restarts && across => {
                    sys::say(&format!("{f}; trying again"));
                    return Err(begin_again(args.again + 1));
                }
                other => other?,
            }
        }
        _ => {
            launch::check(&args.launch.command)?;
            from::check(args.launch.from.as_deref())?;
            sys::drop_file_capabilities().map_err(|e| Failure::system("give up the capabilities of the program file", &e))?;
            limits.check_tiers(&launched, Use::New)?;
            launch_in(&dir, lock, (launched, new), args.launch, restarts)?
        }
    };
    let lost = match end {
        End::Agent(_) => {
            note_loss(&dir);
            true
        }
        End::ByUser(_) | End::Interrupted(_) => false,
        End::Command(status) => restarts && status != 0 && !dir.description()?.lost.is_empty(),
    };
    if lost {
        return Err(begin_again(args.again + 1));
    }
    finish(&dir, end.status(), modes)
}

/// How many generations the job has. Where none is known here, its tiers are asked, and one that does not answer, or of
/// which something cannot be read, is not taken for none.
fn held_anywhere(dir: &JobDir, d: &Description) -> Result<usize, Failure> {
    let held = tiers::held(dir)?;
    if held > 0 || d.config.durable().next().is_none() {
        return Ok(held);
    }
    let problems = tiers::refresh(dir, d)?;
    problems.iter().for_each(|(_, problem)| sys::say(problem));
    match (tiers::held(dir)?, problems.into_iter().next()) {
        (0, Some((exit, problem))) => Err(Failure::new(
            exit,
            format!(
                "{} has no checkpoint, and it cannot be seen whether a tier has one: {problem}; belay launch begins anew",
                dir.shown()
            ),
        )),
        (held, _) => Ok(held),
    }
}

/// Where the job directory is gone, with the disk that it was on: whether it could be made again, because a durable tier
/// holds a job of the same command that had it. Another command is none of its business.
fn found_again(dir: &Path, new: &Description, (config, limits): (&Config, &Limits)) -> Result<bool, Failure> {
    match JobDir::open(dir, Access::Own) {
        Err(f) if f.exit == Exit::NoJob && config.durable().next().is_some() => {}
        _ => return Ok(false),
    }
    let at = dir.display();
    let unfinished = |d: &Description| d.command == new.command && d.wait_status != Some(0);
    // Those of jobs with this name.
    let own = new.folder();
    let stem = own.strip_suffix(&new.id).unwrap_or(&own);
    let found = match tiers::find_job(dir, (config, limits), &unfinished, &|folder| folder.starts_with(stem)) {
        // A job with another key: most probably another one.
        Err(f) if f.exit == Exit::NoKey => {
            sys::say(&format!(
                "{f}; {at} is not there, and what is sealed with that is not taken for its"
            ));
            return Ok(false);
        }
        other => other.map_err(|f| {
            let why = "is not there, and a durable tier does not say whether it holds checkpoints of it";
            Failure::new(f.exit, format!("{at} {why}: {f}; belay launch begins anew"))
        })?,
    };
    if found {
        sys::say(&format!(
            "{at} is not there, and a durable tier knows the job: it is made again"
        ));
    }
    Ok(found)
}

/// The agent on this host was killed: parts that have not noticed that yet are waited for as after any loss.
fn note_loss(dir: &JobDir) {
    let noticed = sys::now_unix_s();
    let noted = dir.description().and_then(|mut d| {
        d.lost.push((sys::host(), noticed));
        dir.describe(&d)
    });
    // A full disk is no reason not to go on from a checkpoint.
    if let Err(failure) = noted {
        sys::say(&failure.to_string());
        alive::await_fence(noticed);
    }
}

/// Hosts for a job of which parts were lost; `count` is the number of this restart, and how many there may be.
fn without_lost(dir: &JobDir, given: &[String], count: (u32, u32)) -> Result<Vec<String>, Failure> {
    let mut silent = Vec::new();
    let hosts = alive::choose(dir, given, &mut |host| silent.push(host.to_owned()))?;
    let who = match silent.as_slice() {
        [] => "all hosts answer".to_owned(),
        [one] => format!("{one} does not answer"),
        several => format!("{} do not answer", several.join(", ")),
    };
    sys::say(&format!(
        "{who}; restarting with the other parts on {} ({} of {} restarts)",
        hosts.join(", "),
        count.0,
        count.1
    ));
    Ok(hosts)
}

/// Executes this command line once more in this process, for which the caller waits, as the restart of that number;
/// returns why it could not.
fn begin_again(number: u32) -> Failure {
    let me = match belay_kernel::proc::own_program() {
        Ok(me) => me,
        Err(e) => return Failure::system("find belay", &e),
    };
    let mut words = std::env::args_os();
    let name = words.next().unwrap_or_default();
    let words: Vec<OsString> = words.skip(1).collect();
    // What an earlier one has said stands in front.
    let own = if number > 1 { 2 } else { 0 };
    let number = number.to_string();
    // The front takes signals through a descriptor.
    sys::SignalSet::of([]).set_mask();
    let mut c = Command::new(me);
    c.arg0(name)
        .args(["run", "--again", &number])
        .args(words.into_iter().skip(own));
    Failure::system("begin again", &c.exec())
}

fn named(hosts: cli::Hosts) -> Result<Vec<String>, Failure> {
    hosts.hostfile.map_or(Ok(hosts.list), |file| read_file(&file))
}

/// The allocation in which this is, where no hosts are `named` for a job that may have parts on others.
fn allocation(d: &Description, named: &[String]) -> Result<Option<Allocation>, Failure> {
    if d.across_hosts && named.is_empty() {
        return Allocation::here();
    }
    Ok(None)
}

/// Hosts of the allocation for the parts of the generation to be restarted. Standard error says which.
fn in_allocation(dir: &JobDir, a: &Allocation, generation: Option<u64>, quiet: bool) -> Result<Vec<String>, Failure> {
    let hosts = a.hosts(dir, generation)?;
    if !quiet && !hosts.parts.is_empty() {
        let parts = hosts.parts.join(", ");
        sys::say(&format!(
            "restarting with the other parts on {parts}, in Slurm's allocation; --hosts names others"
        ));
    }
    Ok(hosts.given)
}

/// Choices for one restart.
struct How {
    generation: Option<u64>,
    lazy: bool,
    any_cpu: bool,
    hosts: Vec<String>,
    quiet: bool,
    /// When a part is lost, or a program, the job is ended, and the caller restarts it.
    restarts: bool,
    /// What lives on of the job unattended is ended.
    ends_remains: bool,
}

fn restart_in(dir: &JobDir, lock: Lock, mut description: Description, how: How) -> Result<End, Failure> {
    if description.across_hosts {
        Nodes::check_place(dir.path())?;
    }
    let terminal = std::io::stderr().is_terminal();
    let mut bar = None;
    let mut tell = |notice: Notice, line: &str| match notice {
        _ if how.quiet || !terminal && notice != Notice::Warning => {}
        // This process will fork.
        Notice::Bytes(done, expected) if is_able_terminal() => {
            bar.get_or_insert_with(Bar::new)
                .bytes(&format!("{} generation", Phase::Fetch.name()), done, expected);
        }
        _ => {
            bar = None;
            sys::say(line);
        }
    };
    if let Some(s) = description.config.redundancy.settings()? {
        local::lay(&s, dir.path(), (&description.id, 0), false)?;
    }
    match keys::prepare(&description.config) {
        Err(f) if f.exit == Exit::NoKey => {
            let why = format!("{f}; checkpoints in the job directory can be used, and until then none becomes durable");
            tell(Notice::Warning, &why);
        }
        other => other?,
    }
    let gathered = gather::gather(dir, &description, (how.generation, &how.hosts), &mut |line| {
        tell(Notice::Progress, line);
    })?;
    let numbers = restart::candidates(dir, &description, how.generation, &mut tell)?;
    gathered.check_some(dir, &description, &numbers)?;
    // How it ended is recorded until it runs again; what interrupted it is counted once, however often this is tried.
    if description.history.settle(dir.last_sign_unix_s()) {
        description.wait_status = None;
    }
    description.any_cpu = how.any_cpu;
    // A full disk is no reason not to go on from a checkpoint.
    if let Err(failure) = logging::start(dir, &description.log_level) {
        sys::say(&failure.to_string());
    }
    let options = restart_options(how.lazy, how.any_cpu, how.ends_remains, &description)?;
    restart::restart(
        Setup {
            dir: dir.clone(),
            lock,
            description,
            nodes: None,
            restarts: how.restarts,
        },
        (numbers, &gathered),
        (&options, &how.hosts),
        &mut tell,
    )
}

fn restart_options(
    lazy: bool,
    any_cpu: bool,
    ends_remains: bool,
    description: &Description,
) -> Result<belay_restart::Options, Failure> {
    Ok(belay_restart::Options {
        lazy,
        any_cpu,
        ends_remains,
        ended: false,
        gate_limit: description.config.gate.rebuild(),
        restorer: belay_kernel::blob::find("belay-restorer")
            .map_err(|e| Failure::new(Exit::System, format!("{e}; install belay completely")))?,
    })
}

/// Becomes the program of a rank; ends this process as the program ends.
pub(crate) fn rank(args: &Rank) -> Result<u8, Failure> {
    Err(step::rank::run(&args.spec))
}

/// Ends this process as the command ended. One that was stopped has not put the `modes` of the terminal back.
fn finish(dir: &JobDir, status: i32, modes: Option<sys::TerminalModes>) -> Result<u8, Failure> {
    if status == agent::stopped_after_checkpoint() {
        modes.inspect(sys::TerminalModes::put_back);
        sys::say(&format!(
            "stopped after a checkpoint; continue with belay restart {}",
            dir.shown()
        ));
    }
    sys::exit_like(status)
}
