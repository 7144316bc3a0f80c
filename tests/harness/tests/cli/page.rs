//! The page that `belay report` writes, as a browser sees it.

use super::{running, LIMIT};
use belay_tests::expect::{io, refused, want};
use belay_tests::job::{output, text};
use belay_tests::place::{Place, User};
use belay_tests::Failure;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// A browser on a busy machine.
const BROWSER: Duration = Duration::from_secs(120);

/// The page after everything in it has been read and carried out.
fn rendered(place: &Place, page: &Path, home: &Path) -> Result<String, Failure> {
    let mut browser = Command::new("chromium");
    // Nothing of it concerns the user it runs as.
    browser.args(["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]);
    browser.arg(format!("--user-data-dir={}", home.display()));
    browser
        .arg(format!("file://{}", page.display()))
        .current_dir(place.programs());
    let o = output(browser, BROWSER)?;
    want(o.status.success(), || text(&o))?;
    Ok(String::from_utf8_lossy(&o.stdout).into_owned())
}

/// Checkpoints, a kill and a restart are on the page; what the job says of itself does nothing there.
pub(super) fn report(place: &Place, user: User) -> Result<(), Failure> {
    let hostile = "<script>document.title = 'evil'</script>";
    let mut job = running(place, user, "page", &["--name", hostile], &["fault_target", "1"])?;
    for _ in 0..2 {
        job.checkpoint()?;
    }
    job.kill_all()?;
    job.clear_beat()?;
    job.restart(&[])?;
    job.progress(LIMIT)?;
    job.checkpoint()?;
    job.verdict(false, LIMIT)?;
    let dir = job.dir().display().to_string();
    let page = job.work.join("page.html");
    let o = output(job.belay(&["report", &dir, "--output", &page.display().to_string()]), LIMIT)?;
    want(o.status.success() && o.stdout.is_empty(), || text(&o))?;
    let written = io("read the page", std::fs::read_to_string(&page))?;
    let to_stdout = output(job.belay(&["report", &dir]), LIMIT)?;
    want(to_stdout.status.success() && to_stdout.stdout.len() == written.len(), || {
        format!(
            "{} bytes on standard output, {} in the file",
            to_stdout.stdout.len(),
            written.len()
        )
    })?;
    for elsewhere in ["http:", "https:", "src=", "url(", "@import", "<script"] {
        want(!written.contains(elsewhere), || format!("the page has {elsewhere}"))?;
    }
    let seen = rendered(place, &page, &job.work.join("browser"))?;
    want(seen.contains("<h1>&lt;script&gt;") && !seen.contains("<title>evil"), || {
        seen.clone()
    })?;
    for (what, count) in [
        ("class=\"blocked\"", 3),
        ("class=\"took\"", 3),
        ("class=\"begun\"", 2),
        ("class=\"ended\"", 1),
    ] {
        let found = seen.matches(what).count();
        want(found == count, || format!("{what} {found} times, expected {count}: {seen}"))?;
    }
    want(seen.contains("<b>1</b><span class=\"soft\">restarts"), || {
        format!("not one restart: {seen}")
    })?;
    want(seen.contains("has ended well") && seen.contains("generation 3"), || {
        seen.clone()
    })?;
    refused(&output(job.belay(&["report", "no-such-dir"]), LIMIT)?, &["no-such-dir"])
}
