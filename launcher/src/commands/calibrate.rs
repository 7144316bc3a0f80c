//! `belay calibrate`: measures local tiers, and tells what checkpoints of this node will take.

use super::{json, print};
use crate::cli;
use crate::format;
use crate::progress::Show;
use belay_coordinator::config::{Config, Use};
use belay_coordinator::redundancy::Redundancy;
use belay_coordinator::tiers::local;
use belay_coordinator::{forecast, Failure};
use belay_kernel::room::meminfo;
use belay_storage::predict::{fill_time, times, Costs, Limit, Node, Time, Times, Work};
use belay_wire::Exit;
use serde::Serialize;

/// Measures each local tier, or predicts.
pub(super) fn calibrate(args: &cli::Calibrate) -> Result<u8, Failure> {
    let (config, limits) = Config::load(args.config.as_deref())?;
    let config = config.of_job(Redundancy::default());
    limits.check_tiers(&config, Use::New)?;
    if args.predict {
        return predict(args, &config);
    }
    if config.local().next().is_none() {
        return Err(Failure::new(
            Exit::NoTier,
            "no tier of kind memory or local is configured; name one in belay.toml (docs/tiers.md)",
        ));
    }
    let mut show = Show::on_terminals();
    for t in config.local() {
        let mut line = format!("tier {}:", t.name);
        if !show.is_bar() {
            print(&line)?;
        }
        local::measure(t, |(done, of), writers, rate| {
            let more = format!("  {writers} writers {}/s each", format::bytes(rate as u64));
            if show.is_bar() {
                show.steps(&format!("calibrate tier {}", t.name), done.into(), of.into());
            } else {
                // The measurement goes on without a reader.
                drop(print(&more));
            }
            line += &more;
        })?;
        if show.is_bar() {
            show.aside(|| print(&line))?;
        }
        print("\n")?;
    }
    Ok(0)
}

/// A tier, as far as it matters here.
#[derive(Debug, Serialize)]
struct TierLine {
    name: String,
    kind: &'static str,
    /// Whether it has been calibrated; its rate is assumed otherwise.
    measured: bool,
    /// What all writers get together.
    bytes_per_s: f64,
}

/// One of the times.
#[derive(Debug, Serialize)]
struct TimeLine {
    seconds: f64,
    /// In words.
    limit: String,
}

#[derive(Debug, Serialize)]
struct TimesOf {
    stop: TimeLine,
    local: TimeLine,
    durable: Option<TimeLine>,
    restart: TimeLine,
}

#[derive(Debug, Serialize)]
struct FillTimes {
    local: TimeLine,
    durable: Option<TimeLine>,
}

/// All that is told.
#[derive(Debug, Serialize)]
struct Prediction {
    memory_bytes: u64,
    ranks: u32,
    changed: f64,
    writers: u32,
    tiers: Vec<TierLine>,
    durable_tiers: u32,
    fork_page_ns: f64,
    predicted: TimesOf,
    fill_time: FillTimes,
    /// What nobody has measured.
    assumed: Vec<String>,
}

/// The words for what limits a time.
struct Words<'a> {
    node: &'a Node,
    tiers: &'a [TierLine],
    link: Option<&'a str>,
    assumed_flush: bool,
}

impl Words<'_> {
    fn line(&self, t: Time) -> TimeLine {
        let rate = |r: f64| format!("{}/s", format::bytes(r as u64));
        let costs = &self.node.costs;
        let durable = self.node.durable;
        let limit = match t.limit {
            Limit::Processes => format!("{} for each process", format::millis(costs.process_s * 1e3)),
            Limit::Fork => format!("fork, {:.0} ns a page", costs.fork_page_s * 1e9),
            Limit::Scan => format!("looking at pages, {:.1} µs each", costs.scan_page_s * 1e6),
            Limit::Tier(i) => self.tiers.get(i).map_or_else(String::new, |tier| {
                let assumed = if tier.measured { "" } else { ", assumed" };
                format!("tier {}, {}{assumed}", tier.name, rate(tier.bytes_per_s))
            }),
            Limit::Moves => format!("moves to the job directory, {}, assumed", rate(self.node.moves)),
            Limit::Home => format!("job directory, {}, assumed", rate(self.node.home.total(self.node.writers))),
            Limit::Link => {
                let of = durable.and_then(|d| d.link).unwrap_or_default();
                format!(
                    "link {}{}",
                    self.link.map_or(String::new(), |name| format!("{name}, ")),
                    rate(of)
                )
            }
            Limit::Flush => {
                let assumed = if self.assumed_flush { ", assumed" } else { "" };
                format!("durable tiers, {}{assumed}", rate(durable.map_or(0.0, |d| d.rate)))
            }
            Limit::Files => "files on durable tiers".into(),
            Limit::Read => format!("reading, {}, assumed", rate(costs.read)),
        };
        TimeLine {
            seconds: t.seconds,
            limit,
        }
    }
}

/// Tells how long a checkpoint will take.
fn predict(args: &cli::Calibrate, config: &Config) -> Result<u8, Failure> {
    let (mut node, assumed) = forecast::node(config);
    let link = args
        .link
        .map_or_else(forecast::fastest_link, |rate| Some((String::new(), rate as f64)));
    let forked = forecast::fork_page_s();
    node.costs = Costs {
        fork_page_s: forked.unwrap_or(node.costs.fork_page_s),
        ..node.costs
    };
    if let Some(durable) = &mut node.durable {
        durable.link = link.as_ref().map(|(_, rate)| *rate);
        durable.rate = args.durable_rate.map_or(durable.rate, |rate| rate as f64);
    }
    let Some(memory) = args.memory.or_else(|| meminfo("MemTotal")) else {
        return Err(Failure::new(
            Exit::Usage,
            "/proc/meminfo does not tell the memory of this node: name it with --memory SIZE",
        ));
    };
    let changed = args.changed / 100.0;
    let new_bytes = (memory as f64 * changed) as u64;
    let work = Work {
        processes: args.ranks,
        bytes: memory,
        new_bytes,
        flush_bytes: new_bytes,
    };
    let tiers: Vec<TierLine> = config
        .local()
        .zip(&node.tiers)
        .zip(assumed.tiers)
        .map(|((t, known), assumed)| TierLine {
            name: t.name.clone(),
            kind: t.kind.name(),
            measured: !assumed,
            bytes_per_s: known.model.total(node.writers),
        })
        .collect();
    let words = Words {
        node: &node,
        tiers: &tiers,
        link: link.as_ref().map(|(name, _)| name.as_str()).filter(|name| !name.is_empty()),
        assumed_flush: args.durable_rate.is_none(),
    };
    let of = |t: Times| TimesOf {
        stop: words.line(t.stop),
        local: words.line(t.local),
        durable: t.durable.map(|t| words.line(t)),
        restart: words.line(t.restart),
    };
    let (local, durable) = fill_time(&node, memory);
    let fill_time = FillTimes {
        local: words.line(local),
        durable: durable.map(|t| words.line(t)),
    };
    let predicted = of(times(&node, &work));
    let not_measured = tiers
        .iter()
        .filter(|t| !t.measured)
        .map(|t| format!("tier {} (belay calibrate)", t.name));
    let told = Prediction {
        memory_bytes: memory,
        ranks: args.ranks,
        changed,
        writers: node.writers,
        assumed: not_measured.collect(),
        tiers,
        durable_tiers: node.durable.map_or(0, |d| d.copies),
        fork_page_ns: node.costs.fork_page_s * 1e9,
        predicted,
        fill_time,
    };
    if args.json {
        return print(&json(&told, true)?);
    }
    print(&text(&told))
}

fn text(told: &Prediction) -> String {
    let row = |what: &str, t: &TimeLine| vec![what.to_owned(), format::millis(t.seconds * 1e3), t.limit.clone()];
    let p = &told.predicted;
    let mut rows = vec![row("stop", &p.stop), row("local", &p.local)];
    rows.extend(p.durable.as_ref().map(|t| row("durable", t)));
    rows.push(row("restart", &p.restart));
    rows.push(row("fill time, disks", &told.fill_time.local));
    rows.extend(told.fill_time.durable.as_ref().map(|t| row("fill time, durable", t)));
    let mut out = format!(
        "{} of memory, {}, {:.0} % changed, {}\n",
        format::bytes(told.memory_bytes),
        format::count(told.ranks, "process", "es"),
        told.changed * 100.0,
        format::count(told.writers, "writer", "s"),
    );
    out += &format::table(&["", ">time", "most of it"], &rows);
    if told.durable_tiers == 0 {
        out += "no durable tier is configured (docs/tiers.md)\n";
    }
    for what in &told.assumed {
        out += &format!("not measured: {what}\n");
    }
    out + "belay status shows these for a job, corrected by what its last checkpoints took\n"
}
