//! Links of strangers on the way to what a command was to look at, to end, or to write.

use super::{killed, mode, LIMIT, STRANGER};
use belay_tests::expect::{io, refused, want};
use belay_tests::job::{output, text, Job};
use belay_tests::place::{Place, User};
use belay_tests::Failure;
use std::os::unix::fs::{chown, lchown, symlink};
use std::path::{Path, PathBuf};

/// A directory of the stranger's in `work`, and a link of theirs in it to `to`.
fn link_to(work: &Path, to: &Path) -> Result<PathBuf, Failure> {
    let theirs = work.join("theirs");
    io("make a directory", std::fs::create_dir(&theirs))?;
    mode(&theirs, 0o755)?;
    let link = theirs.join("w");
    io("link", symlink(to, &link))?;
    io("chown", lchown(&link, Some(STRANGER), Some(STRANGER)))?;
    io("chown", chown(&theirs, Some(STRANGER), Some(STRANGER)))?;
    Ok(link)
}

/// Root, or the user, is asked to end a stranger's job, whose directory lies behind a link to the user's.
pub(crate) fn commands(place: &Place, user: User) -> Result<(), Failure> {
    let (mut job, _) = killed(place, user, "astray")?;
    let root = Job::new(place, "astray-root", User::Root)?;
    mode(&job.work, 0o755)?;
    let named = link_to(&root.work, &job.work)?.join("job").display().to_string();
    job.restart(&[])?;
    want(job.answers(LIMIT)?, || job.output_text())?;
    for who in [&root, &job] {
        for verb in ["status", "list", "verify", "checkpoint", "stop"] {
            let o = output(who.belay(&[verb, &named]), LIMIT)?;
            refused(&o, &["theirs", &STRANGER.to_string()]).map_err(|e| format!("belay {verb}: {e}"))?;
        }
    }
    // A link of the owner's is not a stranger's.
    let own = job.work.join("own");
    io("link", symlink(&job.work, &own))?;
    if user == User::Ordinary {
        let id = belay_tests::place::NOBODY;
        io("chown", lchown(&own, Some(id), Some(id)))?;
    }
    let o = output(root.belay(&["stop", &own.join("job").display().to_string()]), LIMIT)?;
    want(o.status.success(), || text(&o))?;
    job.wait(LIMIT).map(drop)
}

/// What is measured is a tier that nobody can have put elsewhere; what root looks at as root is root's.
pub(crate) fn places(place: &Place, _: User) -> Result<(), Failure> {
    let root = Job::new(place, "astray-places", User::Root)?;
    let victim = root.work.join("victim");
    io("make a directory", std::fs::create_dir(&victim))?;
    let link = link_to(&root.work, &victim)?;
    let config = root.work.join("belay.toml");
    let text_of = format!("[[tier]]\nname = \"d\"\nkind = \"local\"\npath = \"{}\"\n", link.display());
    io("write", std::fs::write(&config, text_of))?;
    let o = output(root.belay(&["calibrate", "--config", &config.display().to_string()]), LIMIT)?;
    refused(&o, &["tier d", "theirs"])?;
    let left = io("list", std::fs::read_dir(&victim))?.count();
    want(left == 0, || format!("{left} names in the directory behind the link"))?;
    let image = victim.join("job.bimg");
    io("write", std::fs::write(&image, "no image"))?;
    let o = output(root.belay(&["inspect", &link.join("job.bimg").display().to_string()]), LIMIT)?;
    refused(&o, &["root's, but", "theirs"])
}
