//! What is predicted of checkpoints, and what came of it: in the status document, on the page, before there is a job.

use super::{running, LIMIT};
use belay_tests::expect::{io, want};
use belay_tests::job::{output, text, Job};
use belay_tests::place::{Place, User};
use belay_tests::Failure;
use serde_json::Value;

/// Every number in it is a time, a factor or a count.
fn sane(v: &Value) -> Result<(), Failure> {
    match v {
        Value::Object(all) => all.values().try_for_each(sane),
        Value::Array(all) => all.iter().try_for_each(sane),
        Value::Number(n) => want(n.as_f64().is_some_and(|n| (-1e9..=1e19).contains(&n)), || {
            format!("it says {n}")
        }),
        _ => Ok(()),
    }
}

/// Whether both say the same. The last digit of a number may change on its way through JSON.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => a.len() == b.len() && a.iter().all(|(k, v)| b.get(k).is_some_and(|w| same(v, w))),
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(v, w)| same(v, w)),
        (Value::Number(a), Value::Number(b)) => match (a.as_f64(), b.as_f64()) {
            (Some(a), Some(b)) => (a - b).abs() <= 1e-9 * a.abs().max(b.abs()),
            _ => false,
        },
        _ => a == b,
    }
}

/// Of generation `number`, what was predicted and observed of `what`.
fn compared(status: &Value, number: u64, what: &str) -> (Option<f64>, Option<f64>) {
    let all = status["compared"].as_array().cloned().unwrap_or_default();
    let one = all.iter().find(|g| g["generation"] == number).cloned().unwrap_or_default();
    (one[what]["predicted_s"].as_f64(), one[what]["observed_s"].as_f64())
}

/// The factors are learnt from generation to generation, outlive the agent, and are shown; what a file says is not taken
/// for more than it can be.
pub(super) fn learnt(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = running(place, user, "predicted", &["--keep", "1"], &["fault_target", "8"])?;
    let before = job.status()?;
    let p = &before["predicted"];
    want(
        p["generations"] == 0 && p["factors"]["local"].is_null() && p["local_s"].as_f64() > Some(0.0),
        || format!("before the first: {p}"),
    )?;
    for _ in 0..4 {
        job.checkpoint()?;
    }
    let s = job.status()?;
    let p = &s["predicted"];
    let of = |what: &str| p["factors"][what].as_f64();
    want(
        p["generations"] == 4 && of("stop") > Some(0.0) && of("local") > Some(0.0) && p["durable_s"].is_null(),
        || format!("after four: {p}"),
    )?;
    sane(&s["predicted"])?;
    // Only the newest is kept, and all are compared.
    want(s["generations"].as_array().map(Vec::len) == Some(1), || s.to_string())?;
    let first = compared(&s, 1, "local");
    want(first.0.is_none() && first.1 > Some(0.0), || format!("the first: {first:?}"))?;
    for what in ["stop", "local"] {
        let last = compared(&s, 4, what);
        want(last.0 > Some(0.0) && last.1 > Some(0.0), || {
            format!("{what} of the last: {last:?}")
        })?;
    }
    // A child that does nothing, beside its parent, which changes all the time.
    let dirty = &s["generations"][0]["dirty"];
    let share = |of: &str| dirty[of].as_f64().unwrap_or(-1.0);
    want(
        0.0 <= share("min") && share("min") < share("max") && share("max") <= 1.0,
        || format!("new of each process: {dirty}"),
    )?;
    let dir = job.dir().display().to_string();
    let said = text(&output(job.belay(&["status", &dir]), LIMIT)?);
    want(
        said.contains("predicted   stop ") && said.contains("last 4 generations"),
        || said.clone(),
    )?;
    job.kill_all()?;
    let at_rest = job.status()?;
    want(
        same(&at_rest["predicted"], &s["predicted"]) && same(&at_rest["compared"], &s["compared"]),
        || format!("without an agent: {} {}", at_rest["predicted"], at_rest["compared"]),
    )?;
    job.clear_beat()?;
    job.restart(&[])?;
    job.progress(LIMIT)?;
    job.checkpoint()?;
    let s = job.status()?;
    let restarted = compared(&s, 4, "restart");
    want(
        restarted.0 > Some(0.0) && restarted.1 > Some(0.0) && s["predicted"]["generations"] == 5,
        || format!("after a restart: {restarted:?}, {}", s["predicted"]),
    )?;
    let o = output(job.belay(&["report", &dir]), LIMIT)?;
    let page = String::from_utf8_lossy(&o.stdout).into_owned();
    want(
        page.contains("Predicted and observed") && page.contains("least / median / greatest"),
        || page.clone(),
    )?;
    let table = page
        .split("class=\"predicted\"")
        .nth(1)
        .and_then(|t| t.split("</table>").next())
        .unwrap_or_default();
    want(table.matches("<tr>").count() == 6, || {
        format!("not a head and five generations: {table}")
    })?;
    job.verdict(false, LIMIT)?;
    hostile(&job)
}

/// Files of an ended job that say what cannot be, and none, as in a job of before.
fn hostile(job: &Job) -> Result<(), Failure> {
    let file = job.dir().join("predictions.json");
    let good = io("read", std::fs::read_to_string(&file))?;
    let mut v: Value = serde_json::from_str(&good).map_err(|e| e.to_string())?;
    for bad in [1e308, -5.0] {
        for r in v["records"].as_array_mut().into_iter().flatten() {
            for what in ["stop", "local", "restart"] {
                r[what]["observed_s"] = bad.into();
                r[what]["predicted_s"] = bad.into();
            }
            r["measured"]["scan_page_s"] = bad.into();
        }
        io("write", std::fs::write(&file, v.to_string()))?;
        let s = job.status()?;
        sane(&s["predicted"])?;
        sane(&s["compared"])?;
        want(s["predicted"]["factors"]["local"].is_null(), || s["predicted"].to_string())?;
    }
    for of in ["bytes", "new_bytes", "processes"] {
        let mut v: Value = serde_json::from_str(&good).map_err(|e| e.to_string())?;
        for r in v["records"].as_array_mut().into_iter().flatten() {
            r[of] = if of == "processes" { u32::MAX.into() } else { u64::MAX.into() };
        }
        io("write", std::fs::write(&file, v.to_string()))?;
        let s = job.status()?;
        want(s["predicted"].is_null(), || format!("{of}: {}", s["predicted"]))?;
    }
    for bad in ["", "[", "{\"format\":1}", "{\"format\":9,\"job\":\"\",\"records\":[]}"] {
        io("write", std::fs::write(&file, bad))?;
        let s = job.status()?;
        want(s["predicted"].is_null() && s["compared"].is_null(), || {
            format!("{bad}: {}", s["predicted"])
        })?;
    }
    io("remove", std::fs::remove_file(&file))?;
    want(job.status()?["predicted"].is_null(), || "without a file".into())
}

/// Before there is a job: a table and a document, from what a calibration has measured of the tier.
pub(super) fn before(place: &Place, user: User) -> Result<(), Failure> {
    let job = Job::new(place, "predict", user)?;
    let tier = job.work.join("ssd");
    io("create", std::fs::create_dir(&tier))?;
    // 100 MB/s with any number of writers.
    let measured = r#"{"step":8,"samples":[1e8,11111111.111111112]}"#;
    let file = tier.join("belay-calibration.json");
    io("write", std::fs::write(&file, measured))?;
    let at = tier.display();
    let config = job.work.join("belay.toml");
    let text_of = format!(
        "[[tier]]\nname = \"fast\"\nkind = \"local\"\npath = \"{at}\"\n[[tier]]\nname = \"far\"\nkind = \"pfs\"\npath = \"{at}\"\n"
    );
    io("write", std::fs::write(&config, text_of))?;
    let config = config.display().to_string();
    let predict = |more: &[&str]| {
        let args = ["calibrate", "--predict", "--config", &config];
        output(job.belay(&[&args, more].concat()), LIMIT)
    };
    let o = predict(&[
        "--memory",
        "10G",
        "--ranks",
        "4",
        "--changed",
        "50",
        "--link",
        "20M",
        "--json",
    ])?;
    want(o.status.success(), || text(&o))?;
    let v: Value = serde_json::from_slice(&o.stdout).map_err(|e| e.to_string())?;
    sane(&v)?;
    let seconds = |of: &str, what: &str| v[of][what]["seconds"].as_f64().unwrap_or(-1.0);
    let near = |found: f64, expected: f64| (found / expected - 1.0).abs() < 0.1;
    let gib = f64::from(1 << 30);
    want(near(seconds("predicted", "local"), 5.0 * gib / 1e8), || v.to_string())?;
    want(near(seconds("predicted", "durable"), 5.0 * gib / (20 << 20) as f64), || {
        v.to_string()
    })?;
    want(near(seconds("fill_time", "local"), 10.0 * gib / 1e8), || v.to_string())?;
    want(
        v["fill_time"]["local"]["limit"]
            .as_str()
            .is_some_and(|l| l.contains("tier fast"))
            && v["ranks"] == 4,
        || v.to_string(),
    )?;
    let said = text(&predict(&[])?);
    want(
        ["stop", "local", "durable", "restart", "fill time", "tier fast"]
            .iter()
            .all(|w| said.contains(w))
            && !said.contains("not measured"),
        || said.clone(),
    )?;
    // What cannot be a calibration is none, and is said.
    io("write", std::fs::write(&file, measured.replace("1e8", "-1e308")))?;
    let said = text(&predict(&["--memory", "1G"])?);
    want(said.contains("not measured: tier fast"), || said.clone())?;
    for bad in [
        ["--changed", "101"],
        ["--changed", "nan"],
        ["--ranks", "0"],
        ["--memory", "0"],
    ] {
        let o = predict(&bad)?;
        want(o.status.code() == Some(64) && text(&o).contains(bad[0]), || text(&o))?;
    }
    let o = output(job.belay(&["calibrate", "--memory", "1G"]), LIMIT)?;
    want(o.status.code() == Some(64) && text(&o).contains("--predict"), || text(&o))
}
