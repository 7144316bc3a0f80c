//! The subcommands that look at a job or command it.

mod calibrate;
mod verify;

use crate::cli::{self, Command, Generated};
use crate::client::{call, status};
use crate::format::{Screen, Tone};
use crate::progress::Show;
use crate::{declared, export, format, inspect, manual, predicted, report, start};
use belay_coordinator::jobdir::{is_foreign, Access, JobDir};
use belay_coordinator::tiers::To;
use belay_coordinator::{generations, plain, removal, sys, tiers, Failure};
use belay_wire::{Checkpointed, Event, Exit, GenerationStatus, HostShare, JobState, Level, OnTier, Request, Status};
use clap::CommandFactory;
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long a job that cannot be taken yet runs on before it is asked again.
const PAUSE: Duration = Duration::from_millis(200);

/// How long the directory of a job that is just starting is waited for.
const START: Duration = Duration::from_secs(5);

/// Runs one command; its exit status.
pub(crate) fn run(command: Command) -> Result<u8, Failure> {
    if matches!(command, Command::Flush(_) | Command::Verify(_) | Command::Gc(_)) {
        // A store that closes a connection is an error of the call, and not the end.
        sys::Disposition::set_ignored(libc::SIGPIPE);
    }
    match command {
        Command::Launch(args) => start::launch(args),
        Command::Restart(args) => start::restart(args),
        Command::Run(args) => start::run(args),
        Command::Checkpoint(args) => checkpoint(&args),
        Command::Status(args) => show_status(&args),
        Command::List(args) => list(&args),
        Command::Report(args) => report::report(&args),
        Command::Flush(args) => flush(&args),
        Command::Calibrate(args) => calibrate::calibrate(&args),
        Command::Verify(args) => verify::all(&args),
        Command::Inspect(args) => print(&inspect::describe(&args.image)?),
        Command::Export(args) => export(&args),
        Command::Stop(args) => stop(&args),
        Command::Gc(args) => gc(&args),
        Command::Agent(args) => start::part::agent(args),
        Command::Rank(args) => start::rank(&args),
        Command::Store(args) => start::store(args),
        Command::Gpu(args) => start::gpu(args),
        Command::Generate(args) => generate(&args),
    }
}

/// Writes to standard output, without what would command the terminal. A reader that has gone away is no failure.
fn print(text: &str) -> Result<u8, Failure> {
    print_raw(&plain(text)).map(|_| 0)
}

/// The same with what commands the terminal; whether the reader is there.
fn print_raw(text: &str) -> Result<bool, Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(e) => Err(Failure::io("write to standard output", &e)),
        Ok(()) => Ok(true),
    }
}

fn json<T: serde::Serialize>(value: &T, pretty: bool) -> Result<String, Failure> {
    let text = if pretty {
        serde_json::to_string_pretty(value)
    } else {
        serde_json::to_string(value)
    };
    text.map(|t| format::escaped(&t) + "\n")
        .map_err(|e| Failure::new(Exit::Internal, format!("encode the answer: {e}")))
}

fn export(args: &cli::Export) -> Result<u8, Failure> {
    let done = export::export(&args.image, &args.output, args.by_process)?;
    for why in &done.left {
        sys::say(&format!("not exported: {}", format::one_line(why)));
    }
    let text = match (done.arrays, done.left.len()) {
        (0, 0) => "no program has declared arrays (belay_access.h)\n".to_owned(),
        (0, _) => String::new(),
        (arrays, _) => format!(
            "{arrays} arrays, {}, in {}\n",
            format::bytes(done.bytes),
            args.output.display()
        ),
    };
    print(&text)?;
    match done.left.len() {
        0 => Ok(0),
        n => Err(Failure::new(Exit::Refused, format!("{n} arrays are not exported"))),
    }
}

fn checkpoint(args: &cli::Checkpoint) -> Result<u8, Failure> {
    let request = Request::Checkpoint {
        then_stop: args.then == Some(cli::Then::Stop),
        level: match args.level {
            cli::Level::Local => Level::Local,
            cli::Level::Redundant => Level::Redundant,
            cli::Level::Durable => Level::Durable,
        },
    };
    let mut show = Show::new(args.quiet || args.json);
    let mut once = || {
        call(&args.target.dir, &request)?.expect(&mut |e| show.event(e), |e| match e {
            Event::Checkpointed(c) => Ok(*c),
            other => Err(Box::new(other)),
        })
    };
    let begun = own_start();
    let mut result = once();
    let since = Instant::now();
    let passes = |f: &Failure| f.passing || f.exit == Exit::NoJob && since.elapsed() < START;
    while args.wait && result.as_ref().is_err_and(passes) {
        std::thread::sleep(PAUSE);
        result = once();
    }
    show.clear();
    match result {
        // A program of the job itself had called this, and waits again in what has been restarted.
        Err(_) if own_start() != begun => restarted(args),
        Err(failure) => Err(failure),
        Ok(done) if args.json => print(&json(&done, true)?),
        Ok(done) => print(&checkpoint_line(&done)),
    }
}

/// When this process began. One that is restarted begins once more.
fn own_start() -> Option<u64> {
    let own = belay_kernel::proc::stat(std::process::id().cast_signed());
    own.ok().map(|stat| stat.starttime)
}

/// What was asked for has been taken: this process goes on from it.
fn restarted(args: &cli::Checkpoint) -> Result<u8, Failure> {
    match args.level {
        cli::Level::Local if args.json => print("{\"restarted\": true}\n"),
        cli::Level::Local => print("restarted from a checkpoint that was taken while this command waited for one\n"),
        cli::Level::Redundant | cli::Level::Durable => Err(Failure::new(
            Exit::NotDurable,
            "the job was restarted while this command waited, and what level its checkpoint has is not known; see belay list",
        )),
    }
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
    if let Some(why) = &g.without_hashes {
        notes += &format!("note: pages stored before were not looked for: {why}\n");
    }
    notes
        + &format!(
            "generation {}: {} ({} new{}), {}, {}, blocked {}, took {}{}{}\n",
            g.generation,
            format::bytes(g.bytes),
            format::bytes(g.new_bytes),
            g.left_out
                .map_or_else(String::new, |n| format!(", {} left out", format::bytes(n))),
            format::count(g.ranks, "process", "es"),
            format::count(g.threads, "thread", "s"),
            format::millis(g.blocked_ms),
            format::millis(c.total_ms),
            match g.level {
                Level::Local => "",
                Level::Redundant => ", redundant",
                Level::Durable => ", durable",
            },
            if c.stopped { "; program stopped" } else { "" }
        )
}

fn show_status(args: &cli::Status) -> Result<u8, Failure> {
    loop {
        let s = status(&args.target.dir)?;
        let is_read = if args.json {
            print_raw(&plain(&json(&s, !args.watch)?))?
        } else {
            // It may have another size by now.
            let screen = Screen::here();
            if args.watch && screen.is_some() {
                print_raw("\x1b[H\x1b[2J")?;
            }
            print_raw(&status_text(&s, screen))?
        };
        if !args.watch || !s.running || !is_read {
            return Ok(0);
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// What may be shown on `screen` as it is.
fn status_text(s: &Status, screen: Option<Screen>) -> String {
    let mut out = format!("{}: {}", format::one_line(&s.name), format::state(s.state));
    if let Some(a) = &s.agent {
        out += &format!(", agent {}", a.host_pid.unwrap_or(a.pid));
    }
    // What was stopped has not ended: that status is belay's.
    if let Some(w) = s.wait_status.filter(|_| s.state != JobState::Stopped) {
        out += &format!(", command {}", format::wait_status(w));
    }
    out += &format!(
        "\n  command     {}\n  directory   {}\n",
        format::cut(&format::one_line(&s.command.join(" ")), 100),
        format::one_line(&s.dir)
    );
    out += &format!("  interval    {}", s.interval.as_deref().unwrap_or("none"));
    if s.skipped > 0 {
        out += &format!(" ({} left out while one was being written)", s.skipped);
    }
    out.push('\n');
    out += &format!("  differential {}\n", s.differential);
    if let Some(p) = &s.predicted {
        out += &format!("  predicted   {}\n", predicted::line(p));
    }
    if let Some(p) = s.phase {
        out += &format!("  phase       {}", p.name());
        if let Some(p) = s.progress {
            out += &format!(" {} of {}", format::bytes(p.bytes), format::bytes(p.bytes_expected));
        }
        out.push('\n');
    }
    if let Some(e) = &s.last_error {
        out += &format!(
            "  last error  {}: {}\n",
            format::time(e.time_unix_s),
            format::one_line(&e.message)
        );
    }
    if !s.unheard.is_empty() {
        out += &format!(
            "  no answer   {}: processes there are not listed\n",
            format::one_line(&s.unheard.join(", "))
        );
    }
    out.push('\n');
    let mut out = plain(&out);
    out += &generations_text(&s.generations, screen);
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
        let heads = [">pid", ">host pid", ">threads", ">resident", "host", "command"];
        out += &format::table_on(screen, &heads, &rows, (0, &[]));
    }
    out
}

/// What may be shown on `screen` as it is.
fn generations_text(generations: &[GenerationStatus], screen: Option<Screen>) -> String {
    if generations.is_empty() {
        return "no checkpoints yet\n".into();
    }
    let rows: Vec<Vec<String>> = generations
        .iter()
        .map(|g| {
            // Of one whose manifest cannot be read nothing is known.
            let known = |cell: String| if g.time_unix_s == 0 { "-".to_owned() } else { cell };
            vec![
                g.generation.to_string(),
                known(format::time(g.time_unix_s)),
                known(g.ranks.to_string()),
                known(g.threads.to_string()),
                known(format::bytes(g.bytes)),
                known(format::bytes(g.new_bytes)),
                known(format::millis(g.blocked_ms)),
                format::generation_state(g),
                where_text(g),
                hosts_text(&g.hosts),
            ]
        })
        .collect();
    let mut heads = vec![
        ">generation",
        "time",
        ">processes",
        ">threads",
        ">size",
        ">new",
        ">blocked",
        STATE,
        "where",
        "processes on",
    ];
    // A job on one host has no need to say on which.
    let shown = heads.len() - usize::from(generations.iter().all(|g| g.hosts.is_empty()));
    heads.truncate(shown);
    let mut rows: Vec<Vec<String>> = rows.into_iter().map(|r| r.into_iter().take(shown).collect()).collect();
    // Nor has one that declares nothing, what is left out.
    if generations.iter().any(|g| g.left_out.is_some()) {
        const BEHIND_NEW: usize = 6;
        heads.insert(BEHIND_NEW, ">left out");
        for (row, g) in rows.iter_mut().zip(generations) {
            row.insert(BEHIND_NEW, g.left_out.map_or_else(|| "-".into(), format::bytes));
        }
    }
    let tones: Vec<Tone> = generations.iter().map(tone).collect();
    let state = heads.iter().position(|head| *head == STATE).unwrap_or(0);
    let table = format::table_on(screen, &heads, &rows, (state, &tones));
    let newest = generations.iter().rev().find_map(|g| g.declared.as_deref());
    table + &newest.map_or_else(String::new, |d| format!("\n{}", declared::text(d, screen)))
}

const STATE: &str = "state";

/// Whether a generation can be used, at once and here.
fn tone(g: &GenerationStatus) -> Tone {
    let is_elsewhere = |t: &OnTier| t.host.as_ref().is_some_and(|host| *host != sys::host());
    match &g.damage {
        Some(_) => Tone::Bad,
        None if g.tiers.iter().any(|t| t.locked.is_some() || is_elsewhere(t)) => Tone::Doubtful,
        None => Tone::Good,
    }
}

/// `n1 4, n2 4, n3 ?`: the processes of each host.
fn hosts_text(hosts: &[HostShare]) -> String {
    let mut by_host: BTreeMap<&str, Option<u32>> = BTreeMap::new();
    for h in hosts {
        by_host
            .entry(&h.host)
            .and_modify(|all| *all = all.zip(h.ranks).map(|(a, b)| a.saturating_add(b)))
            .or_insert(h.ranks);
    }
    let one = |(host, n): (&&str, &Option<u32>)| format!("{host} {}", n.map_or("?".into(), |n| n.to_string()));
    by_host.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// `job 1.2 GiB, scratch (durable)`.
fn where_text(g: &GenerationStatus) -> String {
    let durable = |kind: &str| matches!(kind, "pfs" | "object");
    let one = |t: &OnTier| {
        let size = format::bytes(t.bytes);
        let more = match t.kind.as_str() {
            "hosts" => ", redundant",
            kind if durable(kind) => ", durable",
            _ => "",
        };
        let host = t.host.as_ref().map_or(String::new(), |h| format!(" on {h}"));
        if t.locked.is_some() {
            return format!("{}{host} (locked)", t.tier);
        }
        let keys = match &*t.keys {
            [] => String::new(),
            [one] => format!(", key {one}"),
            several => format!(", keys {}", several.join(" and ")),
        };
        format!("{}{host} ({size}{more}{keys})", t.tier)
    };
    g.tiers.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn list(args: &cli::List) -> Result<u8, Failure> {
    let dir = JobDir::open(&args.target.dir, Access::OwnOrRoot)?;
    // What cannot be read is not nothing.
    generations::list(&dir.generations())?;
    let found = tiers::statuses(&dir, &dir.description()?);
    if args.json {
        return print(&json(&serde_json::json!({ "generations": found }), true)?);
    }
    print_raw(&generations_text(&found, Screen::here())).map(|_| 0)
}

/// Has the agent flush, or flushes where there is none.
fn flush(args: &cli::Flush) -> Result<u8, Failure> {
    let mut show = Show::new(args.quiet);
    let running = if args.check {
        Err(Failure::new(Exit::NotRunning, "the agent is not asked"))
    } else {
        call(&args.target.dir, &Request::Flush)
    };
    let result = running.and_then(|mut call| {
        call.expect(&mut |e| show.event(e), |e| match e {
            Event::Flushed { generation, notes } => Ok((generation, notes)),
            other => Err(Box::new(other)),
        })
    });
    let result = match result {
        // Killed before it was asked, or while it flushed. Only the owner opens a job's tiers.
        Err(f) if matches!(f.exit, Exit::NotRunning | Exit::ProgramEnded) && !is_foreign() => flush_here(args, &mut show),
        other => other,
    };
    show.clear();
    let (generation, notes) = result?;
    notes.iter().for_each(|note| sys::say(note));
    print(&format!("generation {generation} is durable\n"))
}

/// The generation that is durable, and what went wrong with other tiers.
fn flush_here(args: &cli::Flush, show: &mut Show) -> Result<(u64, Vec<String>), Failure> {
    let dir = JobDir::open(&args.target.dir, Access::Own)?;
    let description = dir.description()?;
    tiers::check_level(&description, Level::Durable)?;
    let _lock = dir.lock()?;
    let all = generations::list(&dir.generations())?;
    let at = dir.shown();
    let none = || Failure::new(Exit::NoCheckpoint, format!("{at} holds no whole checkpoint"));
    let newest = all.iter().rfind(|g| g.is_whole()).ok_or_else(none)?;
    let flushed = tiers::flush_at_rest(&dir, &description, newest, |durable, control| {
        let what = format!("flush generation {} to {}", newest.number, durable.config.name);
        show.line(&format!("belay: {what}"));
        if args.check {
            for fault in durable.distrust_damaged(&description)? {
                show.note(&format!("belay: {fault}"));
            }
        }
        let control = control.clone();
        show.watch(&what, move || {
            (
                control.bytes.load(Ordering::Relaxed),
                control.expected.load(Ordering::Relaxed),
            )
        });
        Ok(())
    });
    let notes = flushed?.iter().map(Failure::to_string).collect();
    Ok((newest.number, notes))
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
    let keep = (!args.all).then_some(keep);
    if args.all {
        removal::refuse_living(&dir)?;
    }
    let mut gone = removal::of_root(&dir, keep)?;
    let description = dir.description()?;
    let tidied = tiers::for_each(&description, To::Use, |durable| {
        let freed = durable.collect(&dir, keep)?;
        for f in durable.unread() {
            print(&format!("{f}; what it may need stays\n"))?;
        }
        print(&format!("tier {}: {} removed\n", durable.config.name, format::bytes(freed))).map(drop)
    });
    let of_parts = gone.add_parts(&dir, &description, args.all);
    if args.all {
        let forgotten = tiers::local::begin_anew(&dir)?;
        gone.stays.extend(forgotten.iter().filter(|t| t.is_here()).map(|t| {
            let at = t.dir.display();
            format!(
                "tier {}: {at} is not there: what lies in it is forgotten, and may be removed",
                t.name
            )
        }));
    }
    for what in &gone.stays {
        print(&format!("{what}\n"))?;
    }
    print(&format!(
        "removed {} generations, {} left-overs and {} chunks ({})\n",
        gone.generations.len(),
        gone.left_overs,
        gone.chunks.chunks,
        format::bytes(gone.chunks.bytes)
    ))?;
    tiers::joined(tidied).and(of_parts).map(|()| 0)
}

fn generate(args: &cli::Generate) -> Result<u8, Failure> {
    let fail = |e| Failure::io(format!("write into {}", args.dir.display()), &e);
    std::fs::create_dir_all(&args.dir).map_err(fail)?;
    match args.what {
        Generated::Man => manual::write_pages(&args.dir).map_err(fail)?,
        Generated::Completions => {
            use clap_complete::Shell::{Bash, Fish, Zsh};
            for shell in [Bash, Zsh, Fish] {
                clap_complete::generate_to(shell, &mut cli::Cli::command(), "belay", &args.dir).map_err(fail)?;
            }
        }
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_say_what_can_be_used() {
        let on = |host: Option<&str>, locked: Option<&str>| OnTier {
            tier: "ram".into(),
            kind: "memory".into(),
            bytes: 1,
            whole: true,
            host: host.map(str::to_owned),
            keys: Vec::new(),
            locked: locked.map(str::to_owned),
        };
        let of = |damage: Option<&str>, tiers: &[OnTier]| {
            tone(&GenerationStatus {
                damage: damage.map(Into::into),
                tiers: tiers.to_vec(),
                ..GenerationStatus::default()
            })
        };
        assert_eq!(of(None, &[on(None, None), on(Some(&sys::host()), None)]), Tone::Good);
        assert_eq!(of(None, &[on(Some("another"), None)]), Tone::Doubtful);
        assert_eq!(of(None, &[on(None, Some("no key"))]), Tone::Doubtful);
        assert_eq!(of(Some("gone"), &[on(None, Some("no key"))]), Tone::Bad);
    }

    #[test]
    fn json_commands_no_terminal_and_means_the_same() {
        let value = serde_json::json!({ "name": "a\x1b]0;x\x07\u{9b}2J\u{7f}\u{202e}ü\n\"" });
        for pretty in [false, true] {
            let text = json(&value, pretty).unwrap();
            assert_eq!(plain(&text), text);
            assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
        }
    }
}
