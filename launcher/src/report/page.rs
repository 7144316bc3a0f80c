//! The page. Everything in it that comes from the job is escaped by the markup's maker, and made harmless as on a terminal.

use super::charts::{columns, life, Column, Mark};
use super::log::{Happened, Taken, Told};
use super::predicted;
use crate::format;
use belay_coordinator::plain;
use belay_wire::{GenerationStatus, JobState, Level, Status};
use maud::{html, Markup, DOCTYPE};

/// More checkpoints than can be told apart are not drawn one by one.
const MOST_COLUMNS: usize = 200;
/// Of what has failed the newest.
const MOST_FAILURES: usize = 50;

const STYLE: &str = "
:root { color-scheme: light dark; --ink: #1c2733; --soft: #5b6b7b; --line: #d8dee5; --paper: #fff; --a: #2f6db5; --b: #9fc3e8; --good: #2e8b57; --bad: #c0392b; --warm: #d98a29 }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ee; --soft: #9aa8b6; --line: #35414d; --paper: #161c22; --a: #6aa5e8; --b: #34557a; --good: #58b983; --bad: #ea7164; --warm: #e6a54e } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1000px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em; margin: 0 } h2 { font-size: 1.1em; margin: 2em 0 .5em }
code { font-size: .9em; overflow-wrap: anywhere } .soft { color: var(--soft) }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11em, 1fr)); gap: .8em; margin: 1.2em 0 }
.tile { border: 1px solid var(--line); border-radius: .5em; padding: .6em .8em } .tile b { display: block; font-size: 1.35em }
svg { width: 100%; height: auto; display: block } .grid { stroke: var(--line) } .axis { font-size: 11px; fill: var(--soft) }
.new { fill: var(--a) } .kept { fill: var(--b) } .run { fill: var(--b) } .took { stroke: var(--a); stroke-width: 2 }
.begun { stroke: var(--good); stroke-width: 2.5 } .ended { stroke: var(--soft); stroke-width: 2.5 } .failed { stroke: var(--bad); stroke-width: 2.5 }
.gate { fill: #8e6bbf } .suspend { fill: #c0563b } .capture { fill: #d98a29 } .drain { fill: #e0c34a } .snapshot { fill: #2f6db5 } .resume { fill: #58b983 } .reopen { fill: #3a9c9c } .blocked { fill: var(--a) }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .3em .6em; border-bottom: 1px solid var(--line) } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
.key span { margin-right: 1.2em; white-space: nowrap } .key svg { display: inline; width: .8em; height: .8em; vertical-align: -.05em }
.wide { overflow-x: auto }
";

/// Phases of a checkpoint in which the program stands still, in their order.
const STOPPED: [&str; 7] = ["gate", "suspend", "capture", "drain", "snapshot", "resume", "reopen"];

/// The page about a job.
pub(super) fn page(status: &Status, told: &Told) -> Markup {
    let title = plain(&format!("{} - belay", status.name));
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                style { (maud::PreEscaped(STYLE)) }
            }
            body {
                (head(status))
                (tiles(status, told))
                @if !told.taken.is_empty() || !told.events.is_empty() { (whole_life(status, told)) }
                @if !told.taken.is_empty() { (stops(told)) (bytes(told)) }
                (predicted::section(status))
                (kept(&status.generations))
                (failures(told))
                p.soft { "Written by belay " (env!("CARGO_PKG_VERSION")) " from the log and the checkpoints in the job directory." }
            }
        }
    }
}

fn head(status: &Status) -> Markup {
    let command = plain(&status.command.join(" "));
    html! {
        h1 { (plain(&status.name)) }
        p { code { (command) } }
        p.soft {
            (state(status)) " · " (plain(&status.dir))
            @if let Some(interval) = &status.interval { " · a checkpoint every " (plain(interval)) }
            @if let Some(auto) = &status.auto_interval { " (" (format::millis(auto.interval_s * 1e3)) " by itself)" }
        }
    }
}

fn state(status: &Status) -> &'static str {
    match status.state {
        JobState::Finished if status.wait_status == Some(0) => "has ended well",
        JobState::Finished => "has ended with a failure",
        other => format::state(other),
    }
}

fn tiles(status: &Status, told: &Told) -> Markup {
    let stopped: f64 = told.taken.iter().map(|t| t.blocked_ms).sum();
    let longest = told.taken.iter().map(|t| t.blocked_ms).fold(0.0, f64::max);
    let (all, new): (f64, f64) = told
        .taken
        .iter()
        .fold((0.0, 0.0), |(all, new), t| (all + t.bytes as f64, new + t.new_bytes as f64));
    let run: f64 = runs(status, told).iter().map(|(from, to)| to - from).sum();
    let restarts = told.events.iter().filter(|(_, e)| *e == Happened::Begun(true)).count();
    let newest = status.generations.iter().rfind(|g| g.whole);
    html! {
        div.tiles {
            (tile(&told.taken.len().to_string(), "checkpoints taken"))
            (tile(&restarts.to_string(), "restarts"))
            (tile(&format::millis(stopped), &match run > 0.0 {
                true => format!("stopped in all, {:.3} % of {}; the longest {}", stopped / run / 10.0, format::millis(run * 1e3), format::millis(longest)),
                false => "stopped in all".into(),
            }))
            @if all > 0.0 {
                (tile(&format::bytes(new as u64), &format!("written for {}: {:.1} % of it", format::bytes(all as u64), new / all * 100.0)))
            }
            @if let Some(g) = newest {
                (tile(&format!("generation {}", g.generation), &format!("the newest to restart from, of {}, level {}", format::time(g.time_unix_s), level(g.level))))
            } @else {
                (tile("none", "to restart from"))
            }
        }
    }
}

fn tile(what: &str, of: &str) -> Markup {
    html! { div.tile { b { (what) } span.soft { (of) } } }
}

fn level(level: Level) -> &'static str {
    match level {
        Level::Local => "local",
        Level::Redundant => "redundant",
        Level::Durable => "durable",
    }
}

/// The times in which an agent has served the job.
fn runs(status: &Status, told: &Told) -> Vec<(f64, f64)> {
    let mut all = Vec::new();
    let mut since = None;
    let mut last = 0.0f64;
    let marks = told.taken.iter().map(|t| (t.at, None));
    let mut marks: Vec<(f64, Option<&Happened>)> = marks.chain(told.events.iter().map(|(at, e)| (*at, Some(e)))).collect();
    marks.sort_by(|a, b| a.0.total_cmp(&b.0));
    for (at, event) in marks {
        match event {
            Some(Happened::Begun(_)) => {
                all.extend(since.replace(at).map(|from| (from, last)));
            }
            Some(Happened::Ended) => all.extend(since.take().map(|from| (from, at))),
            _ => {}
        }
        last = at;
    }
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now = now.map_or(last, |d| d.as_secs_f64()).max(last);
    all.extend(since.map(|from| (from, if status.running { now } else { last })));
    all
}

fn whole_life(status: &Status, told: &Told) -> Markup {
    let runs = runs(status, told);
    let taken = told.taken.iter().map(|t| Mark {
        at: t.at,
        class: "took",
        title: about(t),
    });
    let events = told.events.iter().map(|(at, e)| {
        let when = format::time(*at as u64);
        let (class, what) = match e {
            Happened::Begun(false) => ("begun", "begun".to_owned()),
            Happened::Begun(true) => ("begun", "restarted".to_owned()),
            Happened::Ended => ("ended", "the command has ended".to_owned()),
            Happened::Failed(why) => ("failed", plain(why)),
        };
        Mark {
            at: *at,
            class,
            title: format!("{when} {what}"),
        }
    });
    let marks: Vec<Mark> = taken.chain(events).collect();
    let ends = marks.iter().map(|m| m.at).chain(runs.iter().flat_map(|r| [r.0, r.1]));
    let span = ends.fold((f64::MAX, f64::MIN), |(a, b), at| (a.min(at), b.max(at)));
    html! {
        h2 { "Its life" }
        p.soft { (format::time(span.0 as u64)) " to " (format::time(span.1 as u64)) }
        (life(span, &runs, &marks))
        p.key {
            (key("run", "running")) (key("new", "checkpoint"))
            span { "green: begun or restarted, red: something has failed" }
        }
    }
}

fn about(t: &Taken) -> String {
    format!(
        "generation {} at {}: stopped {}, written in {}, {} of {} new",
        t.generation,
        format::time(t.at as u64),
        format::millis(t.blocked_ms),
        format::millis(t.write_ms),
        format::bytes(t.new_bytes),
        format::bytes(t.bytes)
    )
}

fn newest(told: &Told) -> &[Taken] {
    &told.taken[told.taken.len().saturating_sub(MOST_COLUMNS)..]
}

fn only(told: &Told) -> Markup {
    html! { @if told.taken.len() > MOST_COLUMNS { " (the newest " (MOST_COLUMNS) ")" } }
}

fn stops(told: &Told) -> Markup {
    let column = |t: &Taken| Column {
        name: t.generation.to_string(),
        title: about(t),
        parts: vec![("blocked", t.blocked_ms)],
    };
    let all: Vec<Column> = newest(told).iter().map(column).collect();
    html! { h2 { "How long each checkpoint stopped the program" (only(told)) } (columns(&all, format::millis)) }
}

fn bytes(told: &Told) -> Markup {
    let column = |t: &Taken| Column {
        name: t.generation.to_string(),
        title: about(t),
        parts: vec![
            ("new", t.new_bytes as f64),
            ("kept", t.bytes.saturating_sub(t.new_bytes) as f64),
        ],
    };
    let all: Vec<Column> = newest(told).iter().map(column).collect();
    html! {
        h2 { "What each checkpoint holds" (only(told)) }
        (columns(&all, |n| format::bytes(n as u64)))
        p.key { (key("new", "written for it")) (key("kept", "shared with earlier ones")) }
    }
}

fn key(class: &str, name: &str) -> Markup {
    html! { span { svg viewBox="0 0 10 10" { rect class=(class) width="10" height="10" {} } " " (name) } }
}

/// The checkpoints that are there.
fn kept(generations: &[GenerationStatus]) -> Markup {
    html! {
        h2 { "Checkpoints that are kept" }
        @if generations.is_empty() { p { "None." } } @else {
            (columns(&generations.iter().map(phases).collect::<Vec<_>>(), format::millis))
            p.key { @for name in STOPPED { (key(name, name)) } }
            div.wide { table {
                tr { th.n { "generation" } th { "time" } th.n { "processes" } th.n { "threads" } th.n { "size" } th.n { "new" } th.n { "new of each process: least / median / greatest" } th.n { "stopped" } th { "level" } th { "state" } th { "where" } }
                @for g in generations { (row(g)) }
            } }
        }
    }
}

fn phases(g: &GenerationStatus) -> Column {
    let part = |name: &&'static str| {
        Some((
            *name,
            g.phases_ms.get(*name).copied().filter(|ms| ms.is_finite() && *ms > 0.0)?,
        ))
    };
    Column {
        name: g.generation.to_string(),
        title: g
            .phases_ms
            .iter()
            .map(|(name, ms)| format!("{} {}", plain(name), format::millis(*ms)))
            .collect::<Vec<_>>()
            .join(", "),
        parts: STOPPED.iter().filter_map(part).collect(),
    }
}

fn row(g: &GenerationStatus) -> Markup {
    let on = |t: &belay_wire::OnTier| {
        let host = t.host.as_ref().map_or(String::new(), |h| format!(" on {h}"));
        format!(
            "{}{host} ({}{})",
            t.tier,
            format::bytes(t.bytes),
            if t.whole { "" } else { ", in part" }
        )
    };
    let tiers = g.tiers.iter().map(on).collect::<Vec<_>>().join(", ");
    html! {
        tr {
            td.n { (g.generation) } td { (format::time(g.time_unix_s)) } td.n { (g.ranks) } td.n { (g.threads) }
            td.n { (format::bytes(g.bytes)) } td.n { (format::bytes(g.new_bytes)) } td.n { (predicted::dirty(g.dirty.as_deref())) } td.n { (format::millis(g.blocked_ms)) }
            td { (level(g.level)) }
            td { (plain(&format::generation_state(g))) }
            td { (plain(&tiers)) }
        }
    }
}

fn failures(told: &Told) -> Markup {
    let failed = |(at, e): &(f64, Happened)| match e {
        Happened::Failed(why) => Some((*at, why.clone())),
        _ => None,
    };
    let all: Vec<(f64, String)> = told.events.iter().filter_map(failed).collect();
    html! {
        @if !all.is_empty() {
            h2 { "What has failed" }
            table { @for (at, why) in all.iter().rev().take(MOST_FAILURES) { tr { td { (format::time(*at as u64)) } td { (plain(why)) } } } }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use belay_wire::OnTier;

    #[test]
    fn what_cannot_be_read_for_want_of_a_key_is_not_called_whole() {
        let tier = OnTier {
            tier: "scratch".into(),
            kind: "pfs".into(),
            bytes: 0,
            whole: false,
            host: None,
            keys: Vec::new(),
            locked: Some("key <1> is not at hand".into()),
        };
        let g = GenerationStatus {
            generation: 7,
            tiers: vec![tier],
            ..GenerationStatus::default()
        };
        let text = row(&g).into_string();
        assert!(text.contains("<td>locked: key &lt;1&gt; is not at hand</td>"), "{text}");
    }
}
