//! What the log of a job tells of its life. It is the job owner's, so it may say anything.

use crate::format::cut;
use belay_coordinator::Failure;
use belay_image::files;
use serde::Deserialize;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::Path;
use time::format_description::well_known::Rfc3339;
use time::OffsetDateTime;

/// Of each file its end, of so many bytes.
const MOST_BYTES: u64 = 16 << 20;
/// Of all files the newest.
const MOST_FILES: usize = 64;
/// Longest line.
const MOST_LINE: u64 = 64 << 10;
/// Longest reason, characters: as long as belay writes them.
const MOST_SAID: usize = 2000;
/// Of each sort of event the newest.
const MOST_EVENTS: usize = 5000;

/// A checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Taken {
    pub(super) at: f64,
    pub(super) generation: u64,
    pub(super) bytes: u64,
    pub(super) new_bytes: u64,
    pub(super) blocked_ms: f64,
    pub(super) write_ms: f64,
}

/// Something else that has happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Happened {
    /// An agent serves the job, `true` after a restart.
    Begun(bool),
    /// The command has ended.
    Ended,
    /// Something has failed.
    Failed(String),
}

/// All of it, oldest first.
#[derive(Debug, Default)]
pub(super) struct Told {
    pub(super) taken: Vec<Taken>,
    /// When, in seconds since the epoch.
    pub(super) events: Vec<(f64, Happened)>,
}

#[derive(Deserialize)]
struct Line {
    timestamp: String,
    level: String,
    fields: Fields,
}

#[derive(Deserialize)]
struct Fields {
    message: String,
    #[serde(default)]
    generation: Option<u64>,
    #[serde(default)]
    bytes: u64,
    #[serde(default)]
    new_bytes: u64,
    #[serde(default)]
    blocked_ms: f64,
    #[serde(default)]
    write_ms: f64,
    #[serde(default)]
    error: Option<String>,
}

/// Reads the files in `dir`.
pub(super) fn read(dir: &Path) -> Result<Told, Failure> {
    let entries = match std::fs::read_dir(dir) {
        Err(e) => return Err(Failure::io(format!("read {}", dir.display()), &e)),
        Ok(entries) => entries,
    };
    let mut names: Vec<_> = entries.flatten().map(|e| e.path()).collect();
    names.retain(|p| p.extension().is_some_and(|e| e == "jsonl"));
    names.sort();
    let mut told = Told::default();
    for path in names.iter().rev().take(MOST_FILES).rev() {
        // One that cannot be read tells nothing.
        let Ok((mut file, length)) = files::open(path) else { continue };
        if file.seek(SeekFrom::Start(length.saturating_sub(MOST_BYTES))).is_ok() {
            told.hear(BufReader::new(file.take(MOST_BYTES)));
            told.keep_newest();
        }
    }
    Ok(told)
}

fn newest<T>(events: &mut Vec<T>) {
    events.drain(..events.len().saturating_sub(MOST_EVENTS));
}

impl Told {
    fn keep_newest(&mut self) {
        self.taken.sort_by(|a, b| a.at.total_cmp(&b.at));
        self.events.sort_by(|a, b| a.0.total_cmp(&b.0));
        newest(&mut self.taken);
        newest(&mut self.events);
    }

    fn hear(&mut self, mut file: impl BufRead) {
        let mut restarts = false;
        let mut bytes = Vec::new();
        loop {
            bytes.clear();
            match file.by_ref().take(MOST_LINE).read_until(b'\n', &mut bytes) {
                Ok(n) if n > 0 => {}
                _ => return,
            }
            // The end of a line that is too long, or that was cut, is none.
            if let Some((line, at)) = parse(&bytes) {
                self.add(line, at, &mut restarts);
            }
        }
    }

    fn add(&mut self, line: Line, at: f64, restarts: &mut bool) {
        let fields = line.fields;
        match (fields.message.as_str(), fields.generation, line.level.as_str()) {
            ("checkpoint committed", Some(generation), _) => self.taken.push(Taken {
                at,
                generation,
                bytes: fields.bytes,
                new_bytes: fields.new_bytes,
                blocked_ms: fields.blocked_ms.max(0.0),
                write_ms: fields.write_ms.max(0.0),
            }),
            ("restarting", ..) => *restarts = true,
            ("serving", ..) => self.events.push((at, Happened::Begun(std::mem::take(restarts)))),
            ("command ended", ..) => self.events.push((at, Happened::Ended)),
            (message, _, "ERROR") => {
                let error = fields.error.map_or(String::new(), |e| format!(": {e}"));
                let why = cut(&format!("{message}{error}"), MOST_SAID);
                self.events.push((at, Happened::Failed(why)));
            }
            _ => {}
        }
    }
}

fn parse(bytes: &[u8]) -> Option<(Line, f64)> {
    let line: Line = serde_json::from_slice(bytes).ok()?;
    let at = OffsetDateTime::parse(&line.timestamp, &Rfc3339).ok()?;
    let finite = line.fields.blocked_ms.is_finite() && line.fields.write_ms.is_finite();
    finite.then_some((line, at.unix_timestamp_nanos() as f64 / 1e9))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_line_of_the_log_is_passed_over() {
        let text = concat!(
            "cut off}\n",
            r#"{"timestamp":"2026-01-01T00:00:00.5Z","level":"INFO","fields":{"message":"restarting","generation":1}}"#,
            "\n",
            r#"{"timestamp":"2026-01-01T00:00:01Z","level":"INFO","fields":{"message":"serving"}}"#,
            "\n\n[1]\n\"x\"\n",
            r#"{"timestamp":"2026-01-01T00:00:02Z","level":"INFO","fields":{"message":"checkpoint committed","generation":2,"bytes":-1}}"#,
            "\n",
            r#"{"timestamp":"2026-01-01T00:00:02Z","level":"INFO","fields":{"message":"checkpoint committed","generation":3,"bytes":7,"blocked_ms":-4}}"#,
            "\n",
            r#"{"timestamp":"yesterday","level":"INFO","fields":{"message":"command ended"}}"#,
            "\n",
            r#"{"timestamp":"2026-01-01T00:00:03Z","level":"ERROR","fields":{"message":"checkpoint failed","error":"no room"}}"#,
        );
        let mut told = Told::default();
        told.hear(text.as_bytes());
        let begin = 1_767_225_600.0;
        assert_eq!(
            told.events,
            [
                (begin + 1.0, Happened::Begun(true)),
                (begin + 3.0, Happened::Failed("checkpoint failed: no room".into()))
            ]
        );
        let taken: Vec<_> = told
            .taken
            .iter()
            .map(|t| (t.at, t.generation, t.bytes, t.blocked_ms))
            .collect();
        assert_eq!(taken, [(begin + 2.0, 3, 7, 0.0)]);
        // The reason is cut where belay would have cut it.
        let long = "&".repeat(60 << 10);
        let line = format!(r#"{{"timestamp":"2026-01-01T00:00:03Z","level":"ERROR","fields":{{"message":"x","error":"{long}"}}}}"#);
        told.hear(line.as_bytes());
        assert!(matches!(&told.events[2].1, Happened::Failed(why) if why.len() < 2 * MOST_SAID));
        // A line without end takes no memory.
        Told::default().hear(BufReader::new(std::io::repeat(b'x').take(10 << 20)));
    }
}
