//! Numbers, times and tables as people read them.

use belay_wire::JobState;
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

/// `1 process`, `2 processes`: `plural` is what is added for another number than one.
pub(crate) fn count(n: u32, noun: &str, plural: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { plural })
}

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
    fn long_text_is_cut_at_a_character() {
        assert_eq!(cut("äöüß", 3), "äö…");
        assert_eq!(cut("abc", 3), "abc");
    }
}
