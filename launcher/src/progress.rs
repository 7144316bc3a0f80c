//! Progress of a command. Where standard error is a terminal, a bar on it, which comes when a second has passed and is
//! gone before the result; elsewhere plain lines on standard output, as part of the command's report (standard error is
//! for failures): of a checkpoint only where it takes long, a line now and then.

use crate::format;
use belay_coordinator::{plain, sys};
use belay_wire::{Event, Phase, Progress};
use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Shows how far a command has come.
pub(crate) struct Show {
    how: How,
    /// When the last line was due.
    last: Instant,
}

enum How {
    Quiet,
    /// Lines on standard output.
    Lines,
    Bar(Bar),
}

/// Without a terminal a checkpoint is told of after so long, and again each time so much has passed.
const SELDOM: Duration = Duration::from_secs(10);

impl Show {
    /// Progress for this process's standard error. Where that is a terminal, a thread keeps the bar moving.
    pub(crate) fn new(quiet: bool) -> Self {
        let how = match (quiet, is_able_terminal()) {
            (true, _) => How::Quiet,
            (_, false) => How::Lines,
            (_, true) => How::Bar(Bar::new().with_thread()),
        };
        Self::of(how)
    }

    /// The same for a command that never said how far it is to those without a terminal.
    pub(crate) fn on_terminals() -> Self {
        match Self::new(false) {
            Self { how: How::Lines, .. } => Self::of(How::Quiet),
            show => show,
        }
    }

    fn of(how: How) -> Self {
        Self {
            how,
            last: Instant::now(),
        }
    }

    /// Shows an event that is not the result.
    pub(crate) fn event(&mut self, event: &Event) {
        match (&mut self.how, event) {
            (How::Quiet, _) => {}
            (How::Bar(bar), Event::Phase { phase }) => bar.phase(phase.name()),
            (How::Bar(bar), Event::Progress(p)) => bar.bytes(p.phase.name(), p.bytes, p.bytes_expected),
            (How::Lines, Event::Phase { phase }) => self.seldom(&phase_line(*phase)),
            (How::Lines, Event::Progress(p)) => self.seldom(&progress_line(p)),
            _ => {}
        }
    }

    fn seldom(&mut self, line: &str) {
        if self.last.elapsed() >= SELDOM {
            self.last = Instant::now();
            self.line(line);
        }
    }

    /// Shows `text` as the current state.
    pub(crate) fn line(&mut self, text: &str) {
        match &mut self.how {
            How::Quiet => {}
            // Nobody to read progress is no failure.
            How::Lines => drop(writeln!(std::io::stdout(), "{}", plain(text))),
            How::Bar(bar) => bar.phase(text.strip_prefix("belay: ").unwrap_or(text)),
        }
    }

    /// Says what is to stay there.
    pub(crate) fn note(&self, text: &str) {
        if !matches!(self.how, How::Quiet) {
            self.aside(|| drop(writeln!(std::io::stdout(), "{}", plain(text))));
        }
    }

    /// On a terminal: until there is other news, `source` says how many bytes of what `name` says are done, and expected.
    pub(crate) fn watch(&mut self, name: &str, source: impl Fn() -> (u64, u64) + Send + 'static) {
        if let How::Bar(bar) = &mut self.how {
            bar.watch(name, Box::new(source));
        }
    }

    /// On a terminal: what is being done, when it is not known how much there is to do.
    pub(crate) fn state(&mut self, name: &str) {
        if let How::Bar(bar) = &mut self.how {
            bar.phase(name);
        }
    }

    /// On a terminal: `done` of `expected` steps of what `name` says.
    pub(crate) fn steps(&mut self, name: &str, done: u64, expected: u64) {
        if let How::Bar(bar) = &mut self.how {
            bar.steps(name, done, expected);
        }
    }

    /// Whether there is a bar, or will be one.
    pub(crate) fn is_bar(&self) -> bool {
        matches!(self.how, How::Bar(_))
    }

    /// Does `work`, which may write to the terminal, while no bar is there.
    pub(crate) fn aside<T>(&self, work: impl FnOnce() -> T) -> T {
        match &self.how {
            How::Bar(bar) => undisturbed(|| bar.bar.suspend(work)),
            _ => work(),
        }
    }

    /// Takes the bar away for good, before the result is printed.
    pub(crate) fn clear(&mut self) {
        if let How::Bar(bar) = &self.how {
            bar.erase();
        }
    }
}

/// Whether standard error is a terminal on which a line can be written anew.
pub(crate) fn is_able_terminal() -> bool {
    let able = std::env::var_os("TERM").is_some_and(|term| !term.is_empty() && term != "dumb");
    able && std::io::stderr().is_terminal()
}

/// What is over by then has had no bar.
const FIRST: Duration = Duration::from_secs(1);
/// How often it moves though nothing is heard.
const MOVES: Duration = Duration::from_millis(200);

/// A bar on standard error.
pub(crate) struct Bar {
    bar: ProgressBar,
    begun: Instant,
    shown: bool,
    /// What it tells of, and in which shape.
    now: Option<(String, Shape)>,
    /// Where its thread finds how far it is.
    source: Arc<Mutex<Option<Source>>>,
}

/// Bytes done, and expected.
type Source = Box<dyn Fn() -> (u64, u64) + Send>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    /// How much there is to do is not known.
    Open,
    Bytes,
    Steps,
}

impl Shape {
    /// Without colours.
    fn template(self) -> &'static str {
        match self {
            Shape::Open => "{spinner} belay: {msg} ({elapsed})",
            // 80 columns are enough for a phase.
            Shape::Bytes => "belay: {msg} [{bar:16}] {percent} % of {binary_total_bytes}, {binary_bytes_per_sec}{left}",
            Shape::Steps => "belay: {msg} [{bar:16}] {percent} %{left}",
        }
    }

    fn style(self) -> ProgressStyle {
        // The templates above are right: a test makes each.
        ProgressStyle::with_template(self.template())
            .unwrap_or_else(|_| ProgressStyle::default_bar())
            .with_key("left", left)
            .progress_chars("=> ")
    }
}

/// The time left, where something has been done by which it can be told.
fn left(state: &ProgressState, out: &mut dyn std::fmt::Write) {
    if state.per_sec() > 0.0 {
        // Nothing is written to but memory.
        let _ = write!(out, ", {:#} left", HumanDuration(state.eta()));
    }
}

impl Bar {
    /// A bar that appears with the first news after a second: a process that will fork must have one thread.
    pub(crate) fn new() -> Self {
        Self {
            bar: ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden()),
            begun: Instant::now(),
            shown: false,
            now: None,
            source: Arc::default(),
        }
    }

    /// The same, which also appears and moves while nothing is heard.
    fn with_thread(mut self) -> Self {
        let (bar, source) = (self.bar.downgrade(), self.source.clone());
        let work = move || {
            sys::SignalSet::of([libc::SIGTTOU]).block();
            std::thread::sleep(FIRST);
            let mut hidden = true;
            while let Some(bar) = bar.upgrade().filter(|bar| !bar.is_finished()) {
                if std::mem::take(&mut hidden) {
                    bar.set_draw_target(ProgressDrawTarget::stderr());
                }
                if let Some(source) = &*source.lock().unwrap_or_else(PoisonError::into_inner) {
                    let (done, expected) = source();
                    bar.set_length(expected.max(done));
                    bar.set_position(done);
                }
                bar.tick();
                drop(bar);
                std::thread::sleep(MOVES);
            }
        };
        // Without it, it moves with what is heard.
        self.shown = std::thread::Builder::new().spawn(work).is_ok();
        self
    }

    fn look_at(&self, source: Option<Source>) {
        *self.source.lock().unwrap_or_else(PoisonError::into_inner) = source;
    }

    /// From now on `source` says how many bytes of what `name` says are done, and expected.
    fn watch(&mut self, name: &str, source: Source) {
        let (done, expected) = source();
        self.set(name, Shape::Bytes, done, expected);
        self.look_at(Some(source));
    }

    fn phase(&mut self, name: &str) {
        self.set(name, Shape::Open, 0, 0);
    }

    pub(crate) fn bytes(&mut self, name: &str, done: u64, expected: u64) {
        let shape = if expected == 0 { Shape::Open } else { Shape::Bytes };
        self.set(name, shape, done, expected);
    }

    fn steps(&mut self, name: &str, done: u64, expected: u64) {
        self.set(name, Shape::Steps, done, expected);
    }

    fn set(&mut self, name: &str, shape: Shape, done: u64, expected: u64) {
        self.look_at(None);
        undisturbed(|| {
            if !self.shown && self.begun.elapsed() >= FIRST {
                self.shown = true;
                self.bar.set_draw_target(ProgressDrawTarget::stderr());
            }
            let is_new = !self.now.as_ref().is_some_and(|(n, s)| n == name && *s == shape);
            if is_new {
                self.now = Some((name.to_owned(), shape));
                self.bar.set_style(shape.style());
                // It may come from the agent, with names of the job's in it. A bar has one line.
                self.bar.set_message(format::one_line(name));
                self.bar.reset();
            }
            if shape != Shape::Open {
                self.bar.set_length(expected.max(done));
                self.bar.set_position(done);
            }
            if is_new {
                // What was done before was not done in no time.
                self.bar.reset_eta();
            }
            self.bar.tick();
        });
    }

    /// Takes it away for good.
    fn erase(&self) {
        undisturbed(|| self.bar.finish_and_clear());
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.erase();
    }
}

/// Does `work`, which writes to the terminal: one in `tostop` mode must not stop this process for it.
fn undisturbed<T>(work: impl FnOnce() -> T) -> T {
    let mask = sys::SignalSet::of([libc::SIGTTOU]).block();
    let result = work();
    mask.set_mask();
    result
}

fn phase_line(phase: Phase) -> String {
    format!("belay: {}", phase.name())
}

fn progress_line(p: &Progress) -> String {
    let percent = (u128::from(p.bytes.min(p.bytes_expected)) * 100)
        .checked_div(p.bytes_expected.into())
        .unwrap_or(0);
    format!(
        "belay: {} {percent} % ({} of {}, {}/s, {})",
        p.phase.name(),
        format::bytes(p.bytes),
        format::bytes(p.bytes_expected),
        format::bytes(p.bytes_per_s as u64),
        format::count(p.processes, "process", "es")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use indicatif::TermLike;
    use std::io;

    const HALF: Progress = Progress {
        phase: Phase::Write,
        processes: 4,
        bytes: 512 << 20,
        bytes_expected: 1 << 30,
        bytes_per_s: 1.5e9,
    };

    /// What a terminal of 200 columns was told to show.
    #[derive(Debug, Clone, Default)]
    struct Paper(Arc<Mutex<String>>);

    impl Paper {
        fn write(&self, s: &str) -> io::Result<()> {
            self.0.lock().unwrap().push_str(s);
            Ok(())
        }

        fn text(&self) -> String {
            self.0.lock().unwrap().clone()
        }
    }

    impl TermLike for Paper {
        fn width(&self) -> u16 {
            200
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, s: &str) -> io::Result<()> {
            self.write(s)
        }
        fn write_str(&self, s: &str) -> io::Result<()> {
            self.write(s)
        }
        fn clear_line(&self) -> io::Result<()> {
            self.0.lock().unwrap().clear();
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    fn on(paper: &Paper) -> Bar {
        let mut bar = Bar::new();
        bar.shown = true;
        bar.bar
            .set_draw_target(ProgressDrawTarget::term_like(Box::new(paper.clone())));
        bar
    }

    #[test]
    fn lines_name_phase_bytes_and_rate() {
        assert_eq!(
            progress_line(&HALF),
            "belay: write 50 % (512.0 MiB of 1.0 GiB, 1.4 GiB/s, 4 processes)"
        );
        let none = Progress {
            bytes_expected: 0,
            ..HALF
        };
        assert!(progress_line(&none).contains(" 0 %"));
        let endless = Progress {
            bytes: u64::MAX,
            bytes_expected: u64::MAX,
            ..HALF
        };
        assert!(progress_line(&endless).contains(" 100 %"));
        assert_eq!(phase_line(Phase::Suspend), "belay: suspend");
    }

    #[test]
    fn a_bar_tells_how_far_it_is_and_leaves_nothing() {
        let paper = Paper::default();
        let mut show = Show::of(How::Bar(on(&paper)));
        show.event(&Event::Phase { phase: Phase::Suspend });
        assert!(paper.text().contains("belay: suspend (0s)"), "{:?}", paper.text());
        show.event(&Event::Progress(HALF));
        let text = paper.text();
        assert!(
            text.starts_with("belay: write [========>       ] 50 % of 1.00 GiB, 0 B/s"),
            "{text:?}"
        );
        assert!(text.trim_end().chars().count() < 80, "{text:?}");
        let more = Progress {
            bytes: 768 << 20,
            ..HALF
        };
        std::thread::sleep(Duration::from_millis(20));
        show.event(&Event::Progress(more));
        assert!(paper.text().contains("iB/s, 0s left"), "{:?}", paper.text());
        show.steps("calibrate", 3, 4);
        assert!(paper.text().contains("75 %"), "{:?}", paper.text());
        // More than was expected, and from an agent that would command the terminal.
        show.watch("a\x1b[2J\nb", || (7, 5));
        let text = paper.text();
        assert!(
            text.contains("100 %") && !text.contains("\x1b[2J") && !text.contains('\n'),
            "{text:?}"
        );
        assert!(show.aside(|| paper.text()).is_empty());
        assert!(paper.text().contains("100 %"));
        show.clear();
        assert_eq!(paper.text(), "");
        show.event(&Event::Progress(HALF));
        drop(show);
    }

    #[test]
    fn what_is_over_at_once_has_no_bar() {
        let mut bar = Bar::new();
        bar.bytes("fetch", 1, 2);
        assert!(bar.bar.is_hidden());
        bar.begun -= FIRST;
        bar.bytes("fetch", 2, 2);
        // Nor has it one outside a terminal.
        assert!(bar.shown && (bar.bar.is_hidden() || is_able_terminal()));
    }

    #[test]
    fn every_shape_has_a_style() {
        for shape in [Shape::Open, Shape::Bytes, Shape::Steps] {
            assert!(ProgressStyle::with_template(shape.template()).is_ok(), "{shape:?}");
        }
    }
}
