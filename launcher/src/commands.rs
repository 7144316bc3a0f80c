//! The subcommands that look at a job or command it.

use crate::cli::{self, Command, Generated};
use crate::client::{call, status};
use crate::progress::Show;
use crate::{format, inspect, start};
use belay_coordinator::jobdir::{Access, JobDir};
use belay_coordinator::{generations, verify, Failure};
use belay_storage::store::{Removed, Store};
use belay_wire::{Checkpointed, Event, Exit, GenerationStatus, JobState, Level, Request, Status};
use clap::CommandFactory;
use std::io::{IsTerminal, Write};
use std::time::Duration;

/// Runs one command; its exit status.
pub(crate) fn run(command: Command) -> Result<u8, Failure> {
    match command {
        Command::Launch(args) => start::launch(args),
        Command::Restart(args) => start::restart(args),
        Command::Run(args) => start::run(args),
        Command::Checkpoint(args) => checkpoint(&args),
        Command::Status(args) => show_status(&args),
        Command::List(args) => list(&args),
        Command::Verify(args) => verify_all(&args),
        Command::Inspect(args) => print(&format::plain(&inspect::describe(&args.image)?)),
        Command::Stop(args) => stop(&args),
        Command::Gc(args) => gc(&args),
        Command::Agent(args) => start::agent(args),
        Command::Generate(args) => generate(&args),
    }
}

/// Writes to standard output. A reader that has gone away is no failure.
fn print(text: &str) -> Result<u8, Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Failure::io("write to standard output", &e)),
        _ => Ok(0),
    }
}

fn json<T: serde::Serialize>(value: &T, pretty: bool) -> Result<String, Failure> {
    let text = if pretty {
        serde_json::to_string_pretty(value)
    } else {
        serde_json::to_string(value)
    };
    text.map(|t| t + "\n")
        .map_err(|e| Failure::new(Exit::Internal, format!("encode the answer: {e}")))
}

fn checkpoint(args: &cli::Checkpoint) -> Result<u8, Failure> {
    let cli::Level::Local = args.level;
    let request = Request::Checkpoint {
        then_stop: args.then == Some(cli::Then::Stop),
        level: Level::Local,
    };
    let mut call = call(&args.target.dir, &request)?;
    let mut show = Show::new(args.quiet || args.json);
    let result = call.expect(&mut |e| show.event(e), |e| match e {
        Event::Checkpointed(c) => Ok(c),
        other => Err(Box::new(other)),
    });
    show.clear();
    let done = result?;
    if args.json {
        return print(&json(&done, true)?);
    }
    print(&format::plain(&checkpoint_line(&done)))
}

fn checkpoint_line(c: &Checkpointed) -> String {
    let g = &c.generation;
    let mut notes: String = c.notes.iter().map(|n| format!("note: {n}\n")).collect();
    match &g.snapshot {
        Some(s) if s.mode == "write_before_resume" && !c.stopped => {
            notes += &format!("note: the memory was written while the program stood still: {}\n", s.reason);
        }
        Some(s) if s.stops > 0 => {
            notes += &format!(
                "note: memory became short, so the program was stopped meanwhile: {}\n",
                s.reason
            )
        }
        _ => {}
    }
    notes
        + &format!(
            "generation {}: {} ({} new), {}, {}, blocked {}, took {}{}\n",
            g.generation,
            format::bytes(g.bytes),
            format::bytes(g.new_bytes),
            format::count(g.ranks, "process", "es"),
            format::count(g.threads, "thread", "s"),
            format::millis(g.blocked_ms),
            format::millis(c.total_ms),
            if c.stopped { "; program stopped" } else { "" }
        )
}

fn show_status(args: &cli::Status) -> Result<u8, Failure> {
    let terminal = std::io::stdout().is_terminal();
    loop {
        let s = status(&args.target.dir)?;
        let text = if args.json {
            json(&s, !args.watch)?
        } else {
            format::plain(&status_text(&s))
        };
        if args.watch && terminal && !args.json {
            print("\x1b[H\x1b[2J")?;
        }
        print(&text)?;
        if !args.watch || !s.running {
            return Ok(0);
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn status_text(s: &Status) -> String {
    let state = match s.state {
        JobState::Running => "running",
        JobState::Checkpointing => "running, checkpoint under way",
        JobState::Background => "command ended, other processes run on",
        JobState::Stopping => "being stopped",
        JobState::Ended => "not running",
    };
    let mut out = format!("{}: {state}", s.name);
    if let Some(a) = &s.agent {
        out += &format!(", agent {}", a.host_pid.unwrap_or(a.pid));
    }
    if let Some(w) = s.wait_status {
        out += &format!(", command {}", format::wait_status(w));
    }
    out += &format!(
        "\n  command     {}\n  directory   {}\n",
        format::cut(&s.command.join(" "), 100),
        s.dir
    );
    out += &format!("  interval    {}", s.interval.as_deref().unwrap_or("none"));
    if s.skipped > 0 {
        out += &format!(" ({} left out while one was being written)", s.skipped);
    }
    out.push('\n');
    out += &format!("  differential {}\n", s.differential);
    if let Some(p) = s.phase {
        out += &format!("  phase       {}", p.name());
        if let Some(p) = s.progress {
            out += &format!(" {} of {}", format::bytes(p.bytes), format::bytes(p.bytes_expected));
        }
        out.push('\n');
    }
    if let Some(e) = &s.last_error {
        out += &format!("  last error  {}: {}\n", format::time(e.time_unix_s), e.message);
    }
    out.push('\n');
    out += &generations_text(&s.generations);
    if !s.processes.is_empty() {
        let rows: Vec<Vec<String>> = s
            .processes
            .iter()
            .map(|p| {
                let host = p.host_pid.map_or("?".into(), |h| h.to_string());
                vec![
                    p.pid.to_string(),
                    host,
                    p.threads.to_string(),
                    format::bytes(p.resident_bytes),
                    p.host.clone(),
                    format::cut(&p.command, 60),
                ]
            })
            .collect();
        out += "\n";
        out += &format::table(&[">pid", ">host pid", ">threads", ">resident", "host", "command"], &rows);
    }
    out
}

fn generations_text(generations: &[GenerationStatus]) -> String {
    if generations.is_empty() {
        return "no checkpoints yet\n".into();
    }
    let rows: Vec<Vec<String>> = generations
        .iter()
        .map(|g| {
            vec![
                g.generation.to_string(),
                format::time(g.time_unix_s),
                g.ranks.to_string(),
                g.threads.to_string(),
                format::bytes(g.bytes),
                format::bytes(g.new_bytes),
                format::millis(g.blocked_ms),
                g.damage.as_ref().map_or("whole".into(), |d| format!("damaged: {d}")),
            ]
        })
        .collect();
    format::table(
        &[
            ">generation",
            "time",
            ">processes",
            ">threads",
            ">size",
            ">new",
            ">blocked",
            "state",
        ],
        &rows,
    )
}

fn list(args: &cli::List) -> Result<u8, Failure> {
    let dir = JobDir::open(&args.target.dir, Access::OwnOrRoot)?;
    let found: Vec<GenerationStatus> = generations::list(&dir.generations())?
        .iter()
        .map(generations::Generation::status)
        .collect();
    if args.json {
        return print(&json(&serde_json::json!({ "generations": found }), true)?);
    }
    print(&format::plain(&generations_text(&found)))
}

fn verify_all(args: &cli::Target) -> Result<u8, Failure> {
    let dir = JobDir::open(&args.dir, Access::OwnOrRoot)?;
    let found = generations::list(&dir.generations())?;
    let (mut whole, mut first_fault) = (0, None);
    let mut known = verify::Known::default();
    for g in &found {
        match verify::generation(&g.path, &mut known) {
            Ok(v) => {
                whole += 1;
                print(&format!(
                    "generation {}: whole ({} files, {} compared, {} extents, {} byte strings)\n",
                    g.number,
                    v.files,
                    format::bytes(v.bytes),
                    v.extents,
                    v.blobs
                ))?;
            }
            Err(faults) => {
                for f in &faults {
                    print(&format::plain(&format!("generation {}: {f}\n", g.number)))?;
                }
                first_fault = first_fault.or(faults.into_iter().next());
            }
        }
    }
    let at = dir.path().display();
    match (whole, first_fault) {
        (0, None) => Err(Failure::new(Exit::NoCheckpoint, format!("{at} holds no checkpoint"))),
        (_, None) => Ok(0),
        (0, Some(f)) => Err(f.into()),
        (n, Some(f)) => Err(Failure::new(
            Exit::Incomplete,
            format!("{} of {} generations are damaged: {f}", found.len() - n, found.len()),
        )),
    }
}

fn stop(args: &cli::Stop) -> Result<u8, Failure> {
    let request = Request::Stop {
        grace_ms: u64::try_from(args.grace.as_millis()).unwrap_or(u64::MAX),
    };
    let mut call = call(&args.target.dir, &request)?;
    let wait_status = call.expect(&mut |_| {}, |e| match e {
        Event::Stopped { wait_status } => Ok(wait_status),
        other => Err(Box::new(other)),
    })?;
    let how = wait_status.map_or("ended".into(), format::wait_status);
    print(&format!("command {how}\n"))
}

fn gc(args: &cli::Gc) -> Result<u8, Failure> {
    let dir = JobDir::open(&args.target.dir, Access::Own)?;
    let keep = args.keep.unwrap_or(dir.description()?.keep);
    let _lock = dir.lock()?;
    let gen = dir.generations();
    let left_overs = generations::clear_leftovers(&gen)?;
    let gone = if args.all {
        let all: Vec<u64> = generations::list(&gen)?.iter().map(|g| g.number).collect();
        for n in &all {
            generations::remove(&gen, *n)?;
        }
        all
    } else {
        generations::retain(&gen, keep)?
    };
    let removed = match generations::needed_chunks(&gen)? {
        Some(needed) => Store::of_job(dir.path()).collect(&needed)?,
        None => Removed::default(),
    };
    print(&format!(
        "removed {} generations, {left_overs} left-overs and {} chunks ({})\n",
        gone.len(),
        removed.chunks,
        format::bytes(removed.bytes)
    ))
}

fn generate(args: &cli::Generate) -> Result<u8, Failure> {
    let fail = |e| Failure::io(format!("write into {}", args.dir.display()), &e);
    std::fs::create_dir_all(&args.dir).map_err(fail)?;
    match args.what {
        Generated::Man => clap_mangen::generate_to(cli::Cli::command(), &args.dir).map_err(fail)?,
        Generated::Completions => {
            use clap_complete::Shell::{Bash, Fish, Zsh};
            for shell in [Bash, Zsh, Fish] {
                clap_complete::generate_to(shell, &mut cli::Cli::command(), "belay", &args.dir).map_err(fail)?;
            }
        }
    }
    Ok(0)
}
