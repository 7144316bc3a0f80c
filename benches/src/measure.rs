//! Samples with their spread, child processes, and the job that is measured.

use crate::Plan;
use belay_kernel::pages::Pages;
use belay_kernel::room::Gauges;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

pub(crate) const PAGE: usize = 4096;

/// Values of one figure.
#[derive(Debug, Default)]
pub(crate) struct Samples(Vec<f64>);

impl Samples {
    /// Adds a value.
    pub(crate) fn push(&mut self, v: f64) {
        self.0.push(v);
    }

    /// The median: of an even number of values the mean of the two in the middle. The upper one of them would be too
    /// large on average, by a per cent for six pieces of a loop.
    pub(crate) fn median(&self) -> f64 {
        let mut v = self.0.clone();
        v.sort_by(f64::total_cmp);
        let at = |i: usize| v.get(i).copied().unwrap_or(f64::NAN);
        (at(v.len().saturating_sub(1) / 2) + at(v.len() / 2)) / 2.0
    }

    /// The smallest.
    pub(crate) fn least(&self) -> f64 {
        self.0.iter().copied().fold(f64::NAN, f64::min)
    }

    /// The largest.
    pub(crate) fn most(&self) -> f64 {
        self.0.iter().copied().fold(f64::NAN, f64::max)
    }

    /// Bounds that hold the median of the distribution with 95 % confidence: order statistics by the binomial
    /// distribution (Conover, Practical Nonparametric Statistics, 3.2), no assumption about its shape.
    pub(crate) fn confidence(&self) -> (f64, f64) {
        let mut v = self.0.clone();
        v.sort_by(f64::total_cmp);
        let n = v.len() as f64;
        let below = ((n - 1.96 * n.sqrt()) / 2.0).floor().max(0.0) as usize;
        let at = |i: usize| v.get(i).copied().unwrap_or(f64::NAN);
        (at(below), at(v.len().saturating_sub(below + 1)))
    }

    /// `name: median (min .. max) unit`.
    pub(crate) fn print(&self, name: &str, unit: &str) {
        println!(
            "{name:<58} {:>10.3} {unit:<5} (min {:.3}, max {:.3}, n {})",
            self.median(),
            self.least(),
            self.most(),
            self.0.len()
        );
    }
}

/// Prints the ratio of two medians and the goal.
pub(crate) fn ratio(name: &str, a: &Samples, b: &Samples, goal: &str) {
    println!("{name:<58} {:>10.3}       goal {goal}", a.median() / b.median());
}

/// The machine's load in the last minute, 5 and 15 minutes.
pub(crate) fn load() -> String {
    let all = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    all.split_whitespace().take(3).collect::<Vec<_>>().join(" ")
}

/// Milliseconds that `f` takes.
pub(crate) fn ms<T>(f: impl FnOnce() -> Result<T, String>) -> Result<(f64, T), String> {
    let t = Instant::now();
    let v = f()?;
    Ok((t.elapsed().as_secs_f64() * 1000.0, v))
}

/// Free memory that is not fetched.
const LEFT_FREE: usize = 1 << 30;
const HUGE_PAGE: usize = 2 << 20;

/// Has the host of a virtual machine give back the memory that it has taken since it became free (free page reporting
/// of the balloon device): to whom it is given first it would cost more than the work that is measured. On this machine
/// 1 GiB that was free for half a minute takes 2.4 s to touch, in huge pages; before that, 0.06 s.
pub(crate) fn fetch_memory() -> Result<(), String> {
    let text = std::fs::read_to_string("/proc/meminfo").map_err(|e| e.to_string())?;
    let free = text.lines().find_map(|l| l.strip_prefix("MemFree:"));
    let free = free
        .and_then(|l| l.trim().strip_suffix("kB"))
        .ok_or("no MemFree in /proc/meminfo")?;
    let free = free.trim().parse::<usize>().map_err(|e| e.to_string())? << 10;
    // A control group may allow less.
    let gauges = Gauges::of([std::process::id().cast_signed()]).map_err(|e| e.to_string())?;
    let allowed = gauges.free().map_or(free, |f| f.bytes as usize);
    let half = free.min(allowed).saturating_sub(LEFT_FREE) / 2;
    let touch = || {
        // Under strict overcommit there is none; then memory is as it is.
        let Ok(mut m) = Pages::unreserved(half) else { return };
        m.huge(true);
        m.chunks_mut(PAGE).for_each(|page| page[0] = 1);
        std::hint::black_box(&m);
    };
    if half >= HUGE_PAGE {
        std::thread::scope(|s| {
            s.spawn(touch);
            touch();
        });
    }
    Ok(())
}

/// Runs a command that must succeed; its standard output.
pub(crate) fn run(c: &mut Command) -> Result<String, String> {
    let o = c
        .stdin(Stdio::null())
        .output()
        .map_err(|e| format!("{:?}: {e}", c.get_program()))?;
    if o.status.success() {
        return Ok(String::from_utf8_lossy(&o.stdout).into_owned());
    }
    Err(format!(
        "{:?}: {}: {}",
        c.get_program(),
        o.status,
        String::from_utf8_lossy(&o.stderr)
    ))
}

/// A launched or restarted worker whose lines can be read.
pub(crate) struct Job {
    front: Child,
    input: ChildStdin,
    lines: BufReader<ChildStdout>,
}

impl Job {
    fn start(mut c: Command) -> Result<Self, String> {
        let mut front = c
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| format!("start: {e}"))?;
        let lines = BufReader::new(front.stdout.take().ok_or("no standard output")?);
        let input = front.stdin.take().ok_or("no standard input")?;
        Ok(Job { front, input, lines })
    }

    /// The worker with `args`, without belay.
    pub(crate) fn native(p: &Plan, args: &[&str]) -> Result<Self, String> {
        let mut c = Command::new(&p.me);
        c.arg("worker").args(args);
        Self::start(c)
    }

    /// `belay launch` of the worker with `args`.
    pub(crate) fn launch(p: &Plan, args: &[&str]) -> Result<Self, String> {
        Self::launch_with(p, &[], args)
    }

    /// The same with further options of `belay launch`.
    pub(crate) fn launch_with(p: &Plan, options: &[&str], args: &[&str]) -> Result<Self, String> {
        Self::launch_by(Command::new(&p.belay), p, options, args)
    }

    /// `belay launch` of the worker with `args` in a session of its own: what it computes and what is asked from here
    /// share the processors as two users' shells do.
    pub(crate) fn launch_apart(p: &Plan, args: &[&str]) -> Result<Self, String> {
        let mut c = Command::new("setsid");
        c.arg("--wait").arg(&p.belay);
        Self::launch_by(c, p, &[], args)
    }

    /// `belay launch` of another program, which answers to lines as the worker does.
    pub(crate) fn launch_program(p: &Plan, options: &[&str], program: &Path) -> Result<Self, String> {
        let mut c = Self::launching(Command::new(&p.belay), p, options);
        c.arg(program);
        Self::start(c)
    }

    fn launch_by(c: Command, p: &Plan, options: &[&str], args: &[&str]) -> Result<Self, String> {
        let mut c = Self::launching(c, p, options);
        c.arg(&p.me).arg("worker").args(args);
        Self::start(c)
    }

    fn launching(mut c: Command, p: &Plan, options: &[&str]) -> Command {
        c.arg("launch")
            .arg("--ckpt-dir")
            .arg(p.dir.join("job"))
            .args(["--keep", "1"])
            .args(options)
            .arg("--");
        c
    }

    /// `belay restart`.
    pub(crate) fn restart(p: &Plan, args: &[&str]) -> Result<Self, String> {
        let mut c = Command::new(&p.belay);
        c.arg("restart").arg(p.dir.join("job")).args(args);
        Self::start(c)
    }

    /// The next line that the worker prints.
    pub(crate) fn line(&mut self) -> Result<String, String> {
        let mut s = String::new();
        match self.lines.read_line(&mut s) {
            Ok(n) if n > 0 => Ok(s.trim().to_owned()),
            Ok(_) => Err("the worker ended".into()),
            Err(e) => Err(format!("read from the worker: {e}")),
        }
    }

    /// The worker's answer to an empty line.
    pub(crate) fn ask(&mut self) -> Result<String, String> {
        self.tell("")
    }

    /// The worker's answer to a line.
    pub(crate) fn tell(&mut self, line: &str) -> Result<String, String> {
        let line = format!("{line}\n");
        self.input
            .write_all(line.as_bytes())
            .map_err(|e| format!("ask the worker: {e}"))?;
        self.line()
    }

    /// `belay checkpoint --json`: time of the command in ms, and what it said.
    pub(crate) fn checkpoint(p: &Plan) -> Result<(f64, serde_json::Value), String> {
        let mut c = Command::new(&p.belay);
        c.arg("checkpoint").arg(p.dir.join("job")).arg("--json");
        let (t, out) = ms(|| run(&mut c))?;
        let v: serde_json::Value = serde_json::from_str(&out).map_err(|e| format!("checkpoint --json: {e}"))?;
        if v["blocked_ms"].is_number() {
            Ok((t, v))
        } else {
            Err(format!("checkpoint --json has no blocked_ms: {v}"))
        }
    }

    /// Waits for the end of a worker that ends when nothing is asked any more.
    pub(crate) fn end(self) -> Result<(), String> {
        let Job { mut front, input, lines } = self;
        drop((input, lines));
        front.wait().map_err(|e| format!("wait: {e}")).map(drop)
    }

    /// The process that was started.
    pub(crate) fn pid(&self) -> i32 {
        self.front.id().cast_signed()
    }

    /// Ends a native worker.
    pub(crate) fn kill(mut self) -> Result<(), String> {
        self.front.kill().map_err(|e| format!("kill: {e}"))?;
        self.front.wait().map_err(|e| format!("wait: {e}")).map(drop)
    }

    /// Ends the job with `belay stop`.
    pub(crate) fn stop(mut self, p: &Plan) -> Result<(), String> {
        run(Command::new(&p.belay).arg("stop").arg(p.dir.join("job")))?;
        self.front.wait().map_err(|e| format!("wait: {e}"))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_lies_in_the_middle() {
        assert_eq!(Samples(vec![4.0, 1.0, 2.0]).median(), 2.0);
        assert_eq!(Samples(vec![4.0, 1.0, 2.0, 3.0]).median(), 2.5);
        assert!(Samples::default().median().is_nan());
    }
}
