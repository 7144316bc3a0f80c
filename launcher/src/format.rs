//! Numbers, times and tables as people read them.

use belay_coordinator::plain;
use belay_wire::{GenerationStatus, JobState};
use std::io::IsTerminal;
use tabled::builder::Builder;
use tabled::settings::object::Columns;
use tabled::settings::{Alignment, Color, Padding, Style, Width};
use terminal_size::terminal_size_of;
use time::macros::format_description;
use time::OffsetDateTime;

/// `1536` → `1.5 KiB`.
pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 {
        format!("{n} B")
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

pub(crate) use belay_coordinator::counted as count;

/// What a job is doing.
pub(crate) fn state(state: JobState) -> &'static str {
    match state {
        JobState::Running => "running",
        JobState::Checkpointing => "running, checkpoint under way",
        JobState::Background => "command ended, other processes run on",
        JobState::Stopping => "being stopped",
        JobState::Starting => "being launched",
        JobState::Restarting => "being restarted",
        JobState::Unattended => "running without its agent, which was killed: no more checkpoints",
        JobState::Stopped => "stopped after a checkpoint",
        JobState::Finished => "not running",
        JobState::Killed => "not running, was killed",
    }
}

/// Whether a generation can be used, and why not.
pub(crate) fn generation_state(g: &GenerationStatus) -> String {
    let locked = g.tiers.iter().find_map(|t| t.locked.as_ref());
    match (&g.damage, locked) {
        (Some(damage), _) => format!("damaged: {damage}"),
        (None, Some(why)) if !g.whole => format!("locked: {why}"),
        _ => "whole".into(),
    }
}

/// Milliseconds in a unit that suits their size.
pub(crate) fn millis(ms: f64) -> String {
    if ms < 1.0 {
        format!("{:.0} µs", ms * 1e3)
    } else if ms < 100.0 {
        format!("{ms:.1} ms")
    } else if ms < 10_000.0 {
        format!("{ms:.0} ms")
    } else {
        format!("{:.1} s", ms / 1e3)
    }
}

/// Seconds since the epoch as UTC.
pub(crate) fn time(unix_s: u64) -> String {
    let time = i64::try_from(unix_s)
        .ok()
        .and_then(|s| OffsetDateTime::from_unix_timestamp(s).ok());
    let shape = format_description!("[year]-[month]-[day] [hour]:[minute]:[second]Z");
    // What no calendar has is told as it is.
    time.and_then(|t| t.format(shape).ok())
        .unwrap_or_else(|| format!("{unix_s} s"))
}

/// Columns are filled up to this width at most, characters.
const WIDEST: usize = 80;

/// Rows as columns; those whose head begins with `>` are aligned to the right.
pub(crate) fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let titles: Vec<&str> = head.iter().map(|h| h.trim_start_matches('>')).collect();
    // What is longer than others ever are, whoever wrote it into the job directory, does not make every row as long.
    let width = |c: usize| {
        let all = rows.iter().map(|r| r[c].chars().count()).chain([titles[c].len()]);
        all.map(|width| width.min(WIDEST)).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..titles.len()).map(width).collect();
    let line = |cells: Vec<&str>| {
        let mut out = String::new();
        for (c, cell) in cells.iter().enumerate() {
            let pad = " ".repeat(widths[c].saturating_sub(cell.chars().count()));
            match (head[c].starts_with('>'), c + 1 == cells.len()) {
                (true, _) => out += &format!("{pad}{cell}  "),
                (false, true) => out += cell,
                (false, false) => out += &format!("{cell}{pad}  "),
            }
        }
        out.trim_end().to_owned() + "\n"
    };
    let mut out = line(titles.clone());
    for r in rows {
        out += &line(r.iter().map(String::as_str).collect());
    }
    out
}

/// A terminal on standard output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Screen {
    width: usize,
    colours: bool,
}

/// What a cell says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tone {
    Good,
    Bad,
    Doubtful,
}

impl Screen {
    /// The one of this process, if there is one.
    pub(crate) fn here() -> Option<Self> {
        let out = std::io::stdout();
        // One that has not been told its size may have any.
        let width = terminal_size_of(&out).map_or(usize::MAX, |(width, _)| width.0.into());
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        out.is_terminal().then(|| Self {
            width,
            colours: set("NO_COLOR").is_none() && set("TERM").is_some_and(|term| term != "dumb"),
        })
    }
}

/// A cell that has as many characters on a terminal is cut: whoever wrote it into the job directory does not fill the
/// screen with it.
const MOST: usize = 400;
/// Words are given so much room on a terminal, however narrow that is.
const NARROWEST: usize = 16;
/// Between two columns.
const GAP: usize = 2;

/// The same within the width of `screen`: what is not a number is wrapped. Without a screen each row has one line.
/// `tones` says what a row has to say in column `of`. Nothing that it holds commands the terminal but its colours.
pub(crate) fn table_on(screen: Option<Screen>, head: &[&str], rows: &[Vec<String>], (of, tones): (usize, &[Tone])) -> String {
    let rows: Vec<Vec<String>> = rows
        .iter()
        .map(|row| row.iter().map(|cell| one_line(cell)).collect())
        .collect();
    let Some(screen) = screen else {
        return table(head, &rows);
    };
    let mut builder = Builder::new();
    builder.push_record(head.iter().map(|h| h.trim_start_matches('>')));
    for row in &rows {
        builder.push_record(row.iter().map(|cell| cut(cell, MOST)));
    }
    let mut table = builder.build();
    table.with(Style::empty()).with(Padding::new(0, GAP, 0, 0));
    let is_number = |c: usize| head[c].starts_with('>');
    let widest = |c: usize| {
        rows.iter()
            .map(|row| row[c].chars().count())
            .max()
            .unwrap_or(0)
            .max(head[c].len())
    };
    let widths: Vec<usize> = (0..head.len()).map(widest).collect();
    let words: Vec<usize> = (0..head.len()).filter(|c| !is_number(*c)).collect();
    let taken: usize = (0..head.len()).map(|c| GAP + if is_number(c) { widths[c] } else { 0 }).sum();
    let room = screen.width.saturating_sub(taken - GAP);
    let most = level(&words.iter().map(|c| widths[*c]).collect::<Vec<_>>(), room).max(NARROWEST);
    for c in 0..head.len() {
        if is_number(c) {
            table.modify(Columns::one(c), Alignment::right());
        } else {
            table.modify(Columns::one(c), Width::wrap(most).keep_words(true));
        }
    }
    for (row, tone) in tones.iter().enumerate().filter(|_| screen.colours) {
        let colour = match tone {
            Tone::Good => Color::FG_GREEN,
            Tone::Bad => Color::FG_RED,
            Tone::Doubtful => Color::FG_YELLOW,
        };
        table.modify((row + 1, of), colour);
    }
    table
        .to_string()
        .lines()
        .map(|line| line.trim_end().to_owned() + "\n")
        .collect()
}

/// The width that each of `widths` may have at most so that they have `room` together.
fn level(widths: &[usize], room: usize) -> usize {
    let (mut sorted, mut room) = (widths.to_vec(), room);
    sorted.sort_unstable();
    for (i, width) in sorted.iter().enumerate() {
        let each = room / (sorted.len() - i);
        if *width > each {
            return each;
        }
        room -= width;
    }
    sorted.last().copied().unwrap_or(0)
}

/// `json` with all escaped that [`plain`] would replace: the encoder leaves some of it as it is. It stands within strings only.
pub(crate) fn escaped(json: &str) -> String {
    let one = |(c, shown): (char, char)| match c == shown {
        true => c.to_string(),
        false => format!("\\u{:04x}", u32::from(c)),
    };
    json.chars().zip(plain(json).chars()).map(one).collect()
}

/// `text` as a part of a line: names and commands may have ends of lines in them.
pub(crate) fn one_line(text: &str) -> String {
    plain(text).replace('\n', " ")
}

/// Cuts `text` to at most `max` characters.
pub(crate) fn cut(text: &str, max: usize) -> String {
    if text.chars().count() <= max {
        return text.to_owned();
    }
    let kept: String = text.chars().take(max.saturating_sub(1)).collect();
    kept + "…"
}

/// A wait status in words.
pub(crate) fn wait_status(status: i32) -> String {
    if libc::WIFSIGNALED(status) {
        format!("ended by signal {}", libc::WTERMSIG(status))
    } else {
        format!("ended with status {}", libc::WEXITSTATUS(status))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_json_leaves_as_it_is_is_escaped() {
        assert_eq!(
            escaped("{\"a\u{9b}\":\n\"\u{61c}\u{7f}b\"}"),
            r#"{"a\u009b":"#.to_owned() + "\n" + r#""\u061c\u007fb"}"#
        );
    }

    #[test]
    fn sizes_and_times() {
        assert_eq!(count(1, "process", "es"), "1 process");
        assert_eq!(count(0, "process", "es"), "0 processes");
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(4 << 30), "4.0 GiB");
        assert_eq!(bytes((1 << 20) - 1), "1.0 MiB");
        assert_eq!(bytes(u64::MAX), "16.0 EiB");
        assert_eq!(millis(0.25), "250 µs");
        assert_eq!(millis(12.34), "12.3 ms");
        assert_eq!(millis(480.0), "480 ms");
        assert_eq!(millis(61_000.0), "61.0 s");
        assert_eq!(time(0), "1970-01-01 00:00:00Z");
        assert_eq!(time(951_782_400), "2000-02-29 00:00:00Z");
        assert_eq!(time(1_795_227_896), "2026-11-21 02:24:56Z");
    }

    #[test]
    fn tables_line_up() {
        let rows = vec![vec!["1".into(), "a".into()], vec!["10".into(), "bcd".into()]];
        assert_eq!(table(&[">gen", "x"], &rows), "gen  x\n  1  a\n 10  bcd\n");
    }

    #[test]
    fn one_long_cell_does_not_make_all_rows_long() {
        let mut rows = vec![vec!["x".to_owned(), "y".to_owned()]; 10_000];
        rows[0][0] = "x".repeat(1 << 20);
        let text = table(&["a", ">b"], &rows);
        assert!(text.len() < (1 << 20) + 10_000 * 100, "{} bytes", text.len());
        assert!(text.contains(&rows[0][0]));
    }

    #[test]
    fn a_terminal_is_as_wide_as_it_is() {
        let why = "damaged: gen/000003/job: checksum of section 7 does not match; ".repeat(40);
        let rows = vec![
            vec!["3".to_owned(), why, "job (4.3 MiB)".to_owned()],
            vec!["4".to_owned(), "whole".to_owned(), "a\x1b[2J\tb".to_owned()],
        ];
        let tones = [Tone::Bad, Tone::Good];
        let head = [">generation", "state", "where"];
        let show = |width, colours| table_on(Some(Screen { width, colours }), &head, &rows, (1, &tones));
        for width in [60, 100, 200] {
            let text = show(width, false);
            assert!(text.lines().all(|line| line.chars().count() <= width), "{text}");
            assert!(
                text.lines().count() > 4 && text.contains('…') && !text.contains('\x1b'),
                "{text}"
            );
        }
        // All there is room for, and words are given some.
        assert!(show(100, false).lines().any(|line| line.chars().count() > 90));
        assert!(show(10, false).lines().count() < 60);
        let text = show(100, true);
        assert!(
            text.contains("\x1b[31mdamaged: ") && text.contains("\x1b[32mwhole\x1b[39m"),
            "{text}"
        );
        assert!(!text.contains("\x1b[2J") && text.replace("\x1b[39m", "").matches('\x1b').count() >= 2);
        // Elsewhere it is as it was.
        assert_eq!(table_on(None, &head, &rows, (1, &tones)), plain(&table(&head, &rows)));
        let in_two = vec![vec!["3".to_owned(), "sh -c a\nb".to_owned(), "job".to_owned()]];
        let row = "         3  sh -c a b  job\n";
        assert!(table_on(None, &head, &in_two, (1, &tones)).ends_with(row));
        assert_eq!(table_on(None, &head, &rows, (1, &tones)).lines().count(), 3);
    }

    #[test]
    fn room_is_shared() {
        assert_eq!(level(&[5, 10, 3], 100), 10);
        assert_eq!(level(&[5, 100, 3], 30), 22);
        assert_eq!(level(&[50, 100, 30], 30), 10);
        assert_eq!(level(&[], 30), 0);
    }

    #[test]
    fn long_text_is_cut_at_a_character() {
        assert_eq!(cut("äöüß", 3), "äö…");
        assert_eq!(cut("abc", 3), "abc");
    }
}
