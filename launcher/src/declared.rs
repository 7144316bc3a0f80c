//! What programs have declared of their loops, as text.

use crate::format::{self, Screen};
use belay_wire::DeclaredStatus;

/// The best sites, and how much is alive there. What may be shown on `screen` as it is.
pub(crate) fn text(d: &DeclaredStatus, screen: Option<Screen>) -> String {
    let of_all = |bytes: u64| format!("{:.0} %", bytes as f64 / d.bytes.max(1) as f64 * 100.0);
    let mut out = format!(
        "declared arrays: {}, of which {} ({}) are alive at the best place to stop\n",
        format::bytes(d.bytes),
        format::bytes(d.at_best),
        of_all(d.at_best)
    );
    let rows: Vec<Vec<String>> = d
        .best
        .iter()
        .map(|s| {
            vec![
                s.name.clone(),
                s.visits.to_string(),
                format::bytes(s.alive),
                of_all(s.alive),
                s.chosen.to_string(),
            ]
        })
        .collect();
    let heads = ["before loop", ">visits", ">alive", ">of all", ">waited for"];
    out += &format::table_on(screen, &heads, &rows, (0, &[]));
    let more = (d.sites as usize).saturating_sub(d.best.len());
    if more > 0 {
        out += &format!(
            "and {}\n",
            format::count(u32::try_from(more).unwrap_or(u32::MAX), "more loop", "s")
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use belay_wire::DeclaredSite;

    #[test]
    fn the_best_loops_are_told_and_command_no_terminal() {
        let site = |name: &str, alive| DeclaredSite {
            name: name.into(),
            visits: 120,
            alive,
            chosen: u32::from(name == "second"),
        };
        let d = DeclaredStatus {
            bytes: 8 << 20,
            at_best: 2 << 20,
            sites: 5,
            best: vec![site("first\x1b[2J\nloop", 2 << 20), site("second", 8 << 20)],
        };
        let said = text(&d, None);
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(
            lines[0],
            "declared arrays: 8.0 MiB, of which 2.0 MiB (25 %) are alive at the best place to stop"
        );
        assert_eq!((lines.len(), lines[4]), (5, "and 3 more loops"));
        let words: Vec<&str> = lines[3].split_whitespace().collect();
        assert_eq!(words, ["second", "120", "8.0", "MiB", "100", "%", "1"]);
        assert!(!said.contains('\x1b') && lines[2].contains("loop") && lines[2].ends_with(" 0"));
    }
}
