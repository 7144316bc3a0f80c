//! What was predicted of the checkpoints, and what came of it.

use crate::predicted::{line, time};
use belay_wire::{ComparedTime, DifferentialStatus, DirtyShare, Factors, Status};
use maud::{html, Markup};

/// The section of the page; nothing where nothing was predicted.
pub(super) fn section(status: &Status) -> Markup {
    html! {
        @if !status.compared.is_empty() {
            h2 { "Predicted and observed" }
            @if let Some(p) = &status.predicted {
                p { "The next one: " (line(p)) "." }
                p.soft { "Observed by predicted: " (factors(&p.factors)) "." }
            }
            div.wide { table.predicted {
                tr { th.n { "generation" } @for what in ["stopped", "written", "durable", "restarted"] { th.n { (what) ", predicted" } th.n { "observed" } } }
                @for g in status.compared.iter().rev() {
                    tr { td.n { (g.generation) } @for t in [g.stop, g.local, g.durable, g.restart] { (cells(t)) } }
                }
            } }
        }
        @if let Some(d) = &status.differential_model { p { (worth(d)) } }
    }
}

fn cells(t: ComparedTime) -> Markup {
    let cell = |s: Option<f64>| s.map_or_else(|| "-".to_owned(), time);
    html! { td.n { (cell(t.predicted_s)) } td.n { (cell(t.observed_s)) } }
}

fn factors(f: &Factors) -> String {
    let all = [
        ("stop", f.stop),
        ("local", f.local),
        ("durable", f.durable),
        ("restart", f.restart),
    ];
    let known = all
        .iter()
        .filter_map(|(what, factor)| Some(format!("{what} {:.2}", (*factor)?)));
    known.collect::<Vec<_>>().join(", ")
}

/// What it is worth to look for changes.
fn worth(d: &DifferentialStatus) -> String {
    let how = if d.delta_hashed_once <= 0.0 { "shorter" } else { "longer" };
    format!(
        "Looking for changes: to hash a page and look for it takes {:.2} of the time to write it (κ), and {:.1} % of the pages had changed. So a checkpoint is {:.0} % {how} than one that writes all; it pays while less than {:.0} % change.",
        d.kappa,
        d.dirty_share * 100.0,
        d.delta_hashed_once.abs() * 100.0,
        d.break_even_hashed_once * 100.0
    )
}

/// `0 / 12 / 100 %`: what was new of the processes.
pub(super) fn dirty(d: Option<&DirtyShare>) -> String {
    let percent = |share: f64| format!("{:.0}", share * 100.0);
    d.map_or_else(
        || "-".into(),
        |d| format!("{} / {} / {} %", percent(d.min), percent(d.median), percent(d.max)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use belay_wire::{ComparedStatus, PredictedStatus};

    #[test]
    fn each_generation_has_what_was_predicted_beside_what_was_observed() {
        let time = |predicted_s, observed_s| ComparedTime { predicted_s, observed_s };
        let mut status: Status = serde_json::from_value(serde_json::json!({
            "name": "x", "command": [], "dir": "/x", "state": "running", "running": true, "agent": null, "root_pid": null,
            "wait_status": null, "interval": null, "phase": null, "progress": null, "skipped": 0, "differential": "hash",
            "last_error": null, "generations": [], "processes": []
        }))
        .unwrap();
        assert_eq!(section(&status).into_string(), "", "a job of before has none");
        status.compared = vec![ComparedStatus {
            generation: 7,
            stop: time(None, Some(0.01)),
            local: time(Some(2.0), Some(2.5)),
            ..ComparedStatus::default()
        }];
        status.predicted = Some(Box::new(PredictedStatus {
            factors: Factors {
                local: Some(1.25),
                ..Factors::default()
            },
            ..PredictedStatus::default()
        }));
        status.differential_model = Some(Box::new(DifferentialStatus {
            kappa: 0.2,
            dirty_share: 0.1,
            delta_hashed_once: -0.7,
            break_even_hashed_once: 0.8,
            ..DifferentialStatus::default()
        }));
        let text = section(&status).into_string();
        let row = "<td class=\"n\">7</td><td class=\"n\">-</td><td class=\"n\">10.0 ms</td><td class=\"n\">2000 ms</td><td class=\"n\">2500 ms</td><td class=\"n\">-</td>";
        assert!(text.contains(row) && text.contains("local 1.25."), "{text}");
        assert!(text.contains("70 % shorter") && text.contains("less than 80 %"), "{text}");
    }

    #[test]
    fn what_is_new_of_each_process() {
        let d = DirtyShare {
            min: 0.0,
            median: 0.125,
            max: 1.0,
        };
        assert_eq!(dirty(Some(&d)), "0 / 12 / 100 %");
        assert_eq!(dirty(None), "-");
    }
}
