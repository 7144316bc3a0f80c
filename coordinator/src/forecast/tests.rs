use super::*;
use belay_wire::GenerationStatus;
use std::path::PathBuf;

/// A job directory, removed at the end.
struct Scratch(PathBuf, JobDir);

impl Drop for Scratch {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

fn scratch(name: &str) -> Scratch {
    let path = std::env::temp_dir().join(format!("belay-forecast-{name}-{}", std::process::id()));
    let dir = JobDir::create(&path).unwrap();
    Scratch(path, dir)
}

fn job() -> Description {
    Description {
        id: "this".into(),
        ..Description::new(None, vec!["x".into()])
    }
}

/// A checkpoint of 4 processes with 4 GiB, `new` of it new, that was written at `rate` bytes per second.
fn take(f: &mut Forecast, dir: &JobDir, number: u64, new: f64, rate: f64) {
    let bytes = 4u64 << 30;
    let new_bytes = (bytes as f64 * new) as u64;
    let pages = bytes / PAGE;
    let written = (pages as f64 * new) as u64;
    let generation = GenerationStatus {
        generation: number,
        ranks: 4,
        bytes,
        new_bytes,
        phases_ms: [("snapshot".to_owned(), 100.0)].into(),
        ..GenerationStatus::default()
    };
    let write = Duration::from_secs_f64(new_bytes as f64 / rate + 0.5);
    let stats = Stats {
        written,
        found: pages - written,
        timed_pages: 1000,
        hash_ns: 1_000_000,
        look_ns: 200_000,
        write_ns: written * 10_000,
        write_pages: written,
        writers_ns: written * 10_000 + 1_000_000_000,
        ..Stats::default()
    };
    let committed = Committed {
        generation,
        blocked: Duration::from_millis(140),
        write,
        notes: Vec::new(),
        learned: None,
    };
    f.committed(dir, &committed, (&stats, None));
}

fn near(a: f64, b: f64, by: f64) -> bool {
    (a / b - 1.0).abs() <= by
}

#[test]
fn predictions_come_true_after_three_generations_and_survive_the_agent() {
    let s = scratch("learns");
    let d = job();
    let mut f = Forecast::of(&s.1, &d);
    assert_eq!(f.status((0, 0)), None, "nothing is known");
    let before = f.status((2, 1 << 30)).unwrap();
    assert!(before.generations == 0 && before.factors == Factors::default() && before.local_s > 0.0);
    // A disk that is a fifth as fast as is assumed.
    let rate = 8e7;
    take(&mut f, &s.1, 1, 1.0, rate);
    for n in 2..=4 {
        take(&mut f, &s.1, n, 0.1, rate);
    }
    let p = f.status((0, 0)).unwrap();
    let expected = 0.1 * 4.0 * 1024.0 * 1024.0 * 1024.0 / rate + 0.5;
    assert!(near(p.local_s, expected, 0.1), "{p:?}");
    assert!(
        near(p.stop_s, 0.14, 0.01) && near(p.factors.stop.unwrap(), 1.0, 0.05),
        "{p:?}"
    );
    assert!(
        p.generations == 4 && p.factors.local.unwrap() > 2.0 && p.durable_s.is_none(),
        "{p:?}"
    );
    // Another agent of the job knows what this one did.
    let again = Forecast::of(&s.1, &d);
    assert_eq!(again.status((0, 0)), Some(p));
    let compared = again.compared();
    assert_eq!(compared.iter().map(|c| c.generation).collect::<Vec<_>>(), [1, 2, 3, 4]);
    assert!(compared[0].local.predicted_s.is_none() && compared[0].local.observed_s.is_some());
    let last = compared[3].local;
    assert!(near(last.predicted_s.unwrap(), last.observed_s.unwrap(), 0.25), "{last:?}");
    // Another job in its place does not.
    let other = Description { id: "other".into(), ..d };
    assert_eq!(Forecast::of(&s.1, &other).compared(), []);
}

#[test]
fn copies_and_restarts_are_learnt_from_too() {
    let s = scratch("levels");
    let mut d = job();
    let text = format!("[[tier]]\nname = \"t\"\nkind = \"pfs\"\npath = \"{}\"\n", s.0.display());
    d.config.lay(&mut Default::default(), &s.0, &text).unwrap();
    let mut f = Forecast::of(&s.1, &d);
    take(&mut f, &s.1, 1, 1.0, 4e8);
    let model = f.status((0, 0)).unwrap().durable_s.unwrap();
    f.flushed(&s.1, 1, 4 << 30, Duration::from_secs_f64(3.0 * model));
    f.flushed(&s.1, 1, 0, Duration::from_secs(1));
    f.flushed(&s.1, 9, 1 << 30, Duration::from_secs(1));
    let p = f.status((0, 0)).unwrap();
    assert!(
        near(p.factors.durable.unwrap(), 3.0, 0.01) && near(p.durable_s.unwrap(), 3.0 * model, 0.01),
        "{p:?}"
    );
    take(&mut f, &s.1, 2, 0.1, 4e8);
    f.flushed(&s.1, 2, (4 << 30) / 10, Duration::from_secs_f64(0.3 * model));
    let p = f.status((0, 0)).unwrap();
    assert!(
        near(p.durable_s.unwrap(), 0.3 * model, 0.01),
        "what tiers lack is a tenth: {p:?}"
    );
    assert!(
        near(f.compared()[1].durable.predicted_s.unwrap(), 3.0 * model, 0.01),
        "as of before"
    );
}

#[test]
fn what_it_is_worth_to_look_for_changes() {
    let s = scratch("worth");
    let mut f = Forecast::of(&s.1, &job());
    assert_eq!(f.differential(), None);
    take(&mut f, &s.1, 1, 1.0, 4e8);
    take(&mut f, &s.1, 2, 0.25, 4e8);
    // 1.2 µs to hash and look for a page, 10 µs to write one.
    let d = f.differential().unwrap();
    assert!(near(d.kappa, 0.12, 1e-6) && near(d.dirty_share, 0.25, 1e-6), "{d:?}");
    assert!(
        near(d.delta, 0.12 * 1.25 - 0.75, 1e-6) && near(d.break_even, 0.88 / 1.12, 1e-6),
        "{d:?}"
    );
    assert!(near(d.delta_hashed_once, 0.12 - 0.75, 1e-6), "{d:?}");
}

#[test]
fn what_a_file_says_is_believed_where_it_can_be() {
    let s = scratch("files");
    let path = s.0.join("predictions.json");
    let read = |text: &str| {
        std::fs::write(&path, text).unwrap();
        Forecast::of(&s.1, &job())
    };
    let with = |record: &str| format!(r#"{{"format":1,"job":"this","records":[{record}]}}"#);
    let times = |v: &str| {
        let c = format!(r#"{{"predicted_s":{v},"observed_s":{v}}}"#);
        let m = format!(
            r#"{{"process_s":{v},"fork_page_s":{v},"scan_page_s":{v},"hash_page_s":{v},"write_page_s":{v},"dirty":{v},"moves":{v}}}"#
        );
        format!(
            r#"{{"generation":3,"processes":4194304,"bytes":4503599627370496,"new_bytes":4503599627370496,"flushed_bytes":4503599627370496,"stop":{c},"local":{c},"durable":{c},"restart":{c},"measured":{m}}}"#
        )
    };
    for v in ["-1", "1e308", "-1e308", "null", "0", "1e-320", "1e9"] {
        let f = read(&with(&times(v)));
        assert_eq!(f.compared().len(), 1, "{v}");
        let p = f.status((0, 0)).unwrap();
        for t in [p.stop_s, p.local_s, p.restart_s] {
            assert!((0.0..=MOST_S).contains(&t), "{v}: {p:?}");
        }
        f.differential();
        let text = serde_json::to_string(&p).unwrap();
        assert!(
            !text.contains("1e308") && serde_json::from_str::<PredictedStatus>(&text).is_ok(),
            "{text}"
        );
    }
    // No numbers, no records, or too many.
    for bad in [
        "",
        "{",
        "[]",
        &with(&times("1e999")),
        &with(&times("\"x\"")),
        &with(r#"{"generation":18446744073709551615}"#),
        &with(r#"{"generation":1,"bytes":18446744073709551615}"#),
        &with(r#"{"generation":1,"processes":4294967295}"#),
    ] {
        assert_eq!(read(bad).compared(), [], "{bad}");
    }
    let many: Vec<String> = (0..500).map(|n| format!(r#"{{"generation":{n}}}"#)).collect();
    let found = read(&with(&many.join(","))).compared();
    assert!(found.len() == records::MOST && found[0].generation == 500 - records::MOST as u64);
    std::fs::write(&path, vec![b' '; 1 << 20]).unwrap();
    assert_eq!(Forecast::of(&s.1, &job()).compared(), []);
}

#[test]
fn a_job_that_goes_back_forgets_what_was_given_up() {
    let s = scratch("back");
    let mut f = Forecast::of(&s.1, &job());
    for n in [1, 2, 3] {
        take(&mut f, &s.1, n, 1.0, 4e8);
    }
    take(&mut f, &s.1, 2, 1.0, 4e8);
    assert_eq!(f.compared().iter().map(|c| c.generation).collect::<Vec<_>>(), [1, 2]);
}
