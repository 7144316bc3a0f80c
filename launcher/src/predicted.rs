//! What is predicted of a job, as text.

use crate::format;
use belay_wire::PredictedStatus;

/// A time in words.
pub(crate) fn time(seconds: f64) -> String {
    format::millis(seconds * 1e3)
}

/// One line about the next checkpoint.
pub(crate) fn line(p: &PredictedStatus) -> String {
    let durable = p.durable_s.map_or_else(String::new, |s| format!(", durable {}", time(s)));
    let learnt = match p.generations {
        0 => "before anything was observed".to_owned(),
        n => format!("corrected by the last {}", format::count(n, "generation", "s")),
    };
    format!(
        "stop {}, local {}{durable}, restart {} ({learnt})",
        time(p.stop_s),
        time(p.local_s),
        time(p.restart_s)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_comes_and_what_it_is_worth() {
        let mut p = PredictedStatus {
            stop_s: 0.012,
            local_s: 1.5,
            restart_s: 20.0,
            ..PredictedStatus::default()
        };
        assert_eq!(
            line(&p),
            "stop 12.0 ms, local 1500 ms, restart 20.0 s (before anything was observed)"
        );
        (p.durable_s, p.generations) = (Some(30.0), 1);
        assert_eq!(
            line(&p),
            "stop 12.0 ms, local 1500 ms, durable 30.0 s, restart 20.0 s (corrected by the last 1 generation)"
        );
    }
}
