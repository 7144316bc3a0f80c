//! The numbers of a running job, scraped as a site would: over HTTP, from a UNIX socket, from a file; also after a restart.

use belay_tests::expect::{io, metric as value, refused, want};
use belay_tests::job::{output, Job};
use belay_tests::place::{repository, Place, User};
use belay_tests::target::Target;
use belay_tests::Failure;
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);

type Test = fn(&Place, User) -> Result<(), Failure>;

fn start(place: &Place, user: User, label: &str, at: impl FnOnce(&Path) -> String) -> Result<Job, Failure> {
    let mut job = Job::new(place, label, user)?;
    let at = at(&job.work);
    let program = place.programs().join("fault_target").display().to_string();
    job.launch(
        &["--metrics".into(), at, "--name".into(), "sim \"x\"".into()],
        &[program, "1".into()],
    )?;
    job.progress(LIMIT)?;
    Ok(job)
}

/// What `ask` gets, as soon as it gets something: the program may run before its agent serves.
fn when_served<T>(ask: impl Fn() -> Result<T, Failure>) -> Result<T, Failure> {
    let begin = Instant::now();
    loop {
        match ask() {
            Err(_) if begin.elapsed() < LIMIT => std::thread::sleep(Duration::from_millis(5)),
            got => return got,
        }
    }
}

/// What a reader gets who asks for `path`: status line and body.
fn get(stream: &mut (impl Read + Write), path: &str) -> Result<(String, String), Failure> {
    io("ask", write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n"))?;
    let mut answer = String::new();
    io("read the answer", stream.read_to_string(&mut answer))?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or(format!("no HTTP answer: {answer}"))?;
    let status = head.lines().next().unwrap_or_default().to_owned();
    let length: usize = head
        .lines()
        .find_map(|l| l.strip_prefix("Content-Length: "))
        .and_then(|n| n.parse().ok())
        .ok_or("no length")?;
    want(length == body.len(), || {
        format!("{length} bytes announced, {} sent", body.len())
    })?;
    Ok((status, body.to_owned()))
}

/// Every line of the text has the form that Prometheus reads, and the job's name is in each value's labels.
fn well_formed(text: &str) -> Result<(), Failure> {
    want(text.ends_with("# EOF\n"), || format!("it has no end:\n{text}"))?;
    for line in text.lines().filter(|l| !l.starts_with('#')) {
        let (name, rest) = line.split_once('{').ok_or(format!("no labels: {line}"))?;
        let good = name.starts_with("belay_")
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
            && rest.contains("belay_job=\"sim \\\"x\\\"\"")
            && rest.rsplit_once("} ").is_some_and(|(_, v)| v.parse::<f64>().is_ok());
        want(good, || format!("not a sample: {line}"))?;
    }
    Ok(())
}

/// What must be true of the numbers after `taken` checkpoints by this agent and `kept` on disk.
fn check(text: &str, taken: f64, kept: f64) -> Result<(), Failure> {
    well_formed(text)?;
    for (name, label, expected) in [
        ("belay_checkpoints_total", "", taken),
        ("belay_generations", "", kept),
        ("belay_checkpoint_blocked_seconds_count", "", taken),
        ("belay_checkpoint_in_progress", "", 0.0),
        ("belay_processes", "", 2.0),
    ] {
        let got = value(text, name, label)?;
        want(got == expected, || format!("{name} is {got}, expected {expected}:\n{text}"))?;
    }
    if taken > 0.0 {
        for phase in ["suspend", "capture", "snapshot", "write"] {
            let n = value(text, "belay_checkpoint_phase_seconds_count", &format!("phase=\"{phase}\""))?;
            want(n == taken, || format!("phase {phase} was counted {n} times:\n{text}"))?;
        }
        // Of the program and its child, which does nothing.
        let share = |of: &str| value(text, "belay_checkpoint_dirty_share", &format!("of=\"{of}\""));
        let (min, median, max) = (share("min")?, share("median")?, share("max")?);
        want(
            (0.0..=median).contains(&min) && (median..=1.0).contains(&max) && max > 0.0,
            || format!("shares {min}, {median}, {max}:\n{text}"),
        )?;
        want(value(text, "belay_written_bytes_total", "")? > 0.0, || text.to_owned())?;
    }
    if kept > 0.0 {
        let age = belay_now() - value(text, "belay_newest_generation_timestamp_seconds", "")?;
        want((-5.0..600.0).contains(&age), || {
            format!("the newest generation is {age} s old")
        })?;
        want(value(text, "belay_stored_bytes", "")? > 4096.0, || text.to_owned())?;
    }
    Ok(())
}

/// The names of numbers in `text`, without what Prometheus adds to those of counters and histograms.
fn names(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let ours = words.filter(|w| w.starts_with("belay_") && *w != "belay_job");
    let bare = |w: &str| {
        ["_bucket", "_sum", "_count", "_total"]
            .iter()
            .find_map(|end| w.strip_suffix(end))
            .unwrap_or(w)
            .to_owned()
    };
    ours.map(bare).collect()
}

/// What a site is given asks for numbers that there are, with labels that they have, and shows all that there are.
fn site(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = start(place, user, "site", |work| format!("file:{}/job.prom", work.display()))?;
    job.checkpoint()?;
    let text = io("read the metrics", std::fs::read_to_string(job.work.join("job.prom")))?;
    job.verdict(false, LIMIT)?;
    let mut told = names(&text);
    // It is told of kinds that there have been.
    told.insert("belay_checkpoint_failures".into());
    let read = |file: &str| io("read", std::fs::read_to_string(repository().join(file)));
    let dashboard = read("scripts/site/grafana.json")?;
    let parsed: serde_json::Value = serde_json::from_str(&dashboard).map_err(|e| format!("the dashboard: {e}"))?;
    let panels = parsed["panels"].as_array().ok_or("a dashboard without panels")?;
    let asks = |p: &serde_json::Value| p["targets"].as_array().is_some_and(|t| !t.is_empty());
    want(!panels.is_empty() && panels.iter().all(asks), || {
        "a panel asks for nothing".into()
    })?;
    let shown = names(&dashboard);
    want(shown.len() > 10, || format!("the dashboard shows {shown:?}"))?;
    for (file, asked) in [
        ("the dashboard", shown.clone()),
        ("the alerts", names(&read("scripts/site/alerts.yml")?)),
        ("metrics.md", names(&read("docs/metrics.md")?)),
    ] {
        let unknown: Vec<_> = asked.difference(&told).collect();
        want(!asked.is_empty() && unknown.is_empty(), || {
            format!("{file}: nobody tells {unknown:?}")
        })?;
    }
    let hidden: Vec<_> = told.difference(&shown).collect();
    let live = ["belay_checkpoint_in_progress"];
    want(hidden.iter().all(|n| live.contains(&n.as_str())), || {
        format!("not on the dashboard: {hidden:?}")
    })?;
    Ok(())
}

fn belay_now() -> f64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0.0, |d| d.as_secs_f64())
}

fn over_http(place: &Place, user: User) -> Result<(), Failure> {
    // A port that is free now, and most likely still is when the agent asks for it.
    let port = io(
        "find a port",
        std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()),
    )?
    .port();
    let address = format!("127.0.0.1:{port}");
    let mut job = start(place, user, "http", |_| address.clone())?;
    let scrape = |path: &str| get(&mut io("connect", TcpStream::connect(&address))?, path);
    check(&when_served(|| scrape("/metrics"))?.1, 0.0, 0.0)?;
    // Readers that say nothing, or rubbish, are in nobody's way.
    let silent: Vec<_> = (0..40).filter_map(|_| TcpStream::connect(&address).ok()).collect();
    want(scrape("/etc/passwd")?.0.contains("404"), || "another path is served".into())?;
    job.checkpoint()?;
    job.checkpoint()?;
    check(&scrape("/metrics")?.1, 2.0, 2.0)?;
    drop(silent);
    job.kill_all()?;
    want(scrape("/metrics").is_err(), || "somebody serves a dead job's numbers".into())?;
    // After a restart at the same place, counted from the beginning.
    job.clear_beat()?;
    job.restart(&[])?;
    job.progress(LIMIT)?;
    check(&when_served(|| scrape("/metrics"))?.1, 0.0, 2.0)?;
    job.checkpoint()?;
    check(&scrape("/metrics")?.1, 1.0, 2.0)?;
    job.verdict(false, LIMIT)
}

fn at_a_socket(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = start(place, user, "socket", |work| format!("unix:{}/metrics.sock", work.display()))?;
    let socket = job.work.join("metrics.sock");
    job.checkpoint()?;
    let (status, text) = get(&mut io("connect", UnixStream::connect(&socket))?, "/metrics")?;
    want(status.ends_with("200 OK"), || status)?;
    check(&text, 1.0, 1.0)?;
    let mode = std::os::unix::fs::PermissionsExt::mode(&io("stat", std::fs::metadata(&socket))?.permissions());
    want(mode & 0o777 == 0o600, || format!("the socket has mode {mode:o}"))?;
    job.verdict(false, LIMIT)?;
    want(!socket.exists(), || "the socket is still there".into())
}

fn in_a_file(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = start(place, user, "file", |work| format!("file:{}/job.prom", work.display()))?;
    let file = job.work.join("job.prom");
    let read = || io("read the metrics", std::fs::read_to_string(&file));
    // Written when the job began, before it had a second process.
    when_served(|| well_formed(&read()?))?;
    job.checkpoint()?;
    check(&read()?, 1.0, 1.0)?;
    let begin = Instant::now();
    job.verdict(false, LIMIT)?;
    while file.exists() {
        want(begin.elapsed() < LIMIT, || "the file is still there".into())?;
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn places_that_cannot_be_had(place: &Place, user: User) -> Result<(), Failure> {
    let job = Job::new(place, "bad", user)?;
    let taken = io("listen", std::net::TcpListener::bind("127.0.0.1:0"))?;
    let taken = io("ask", taken.local_addr().map(|a| (taken, a)))?;
    let launch = |at: &str| output(job.belay(&["launch", "--metrics", at, "--", "true"]), LIMIT);
    refused(&launch(&taken.1.to_string())?, &["metrics", "in use"])?;
    refused(&launch("file:/nonexistent/x.prom")?, &["metrics", "/nonexistent/x.prom"])?;
    let o = launch("nowhere")?;
    want(o.status.code() == Some(64), || format!("{o:?}"))
}

fn main() {
    let mut target = Target::new("metrics", &["fault_target"]);
    let tests: [(&str, Test); 5] = [
        ("site", site),
        ("over_http", over_http),
        ("at_a_socket", at_a_socket),
        ("in_a_file", in_a_file),
        ("places_that_cannot_be_had", places_that_cannot_be_had),
    ];
    for (name, test) in tests {
        target.by_user(name, |_| true, move |place, user, _| test(place, user));
    }
    target.run();
}
