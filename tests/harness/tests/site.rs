//! The site's file, `/etc/belay/belay.toml`, on a test host that has one: defaults for all jobs, and what no user gets beyond.

use belay_tests::across::Job;
use belay_tests::build::Kind;
use belay_tests::expect::{io, refused, want};
use belay_tests::job::{show, text};
use belay_tests::place::{repository, Place, User};
use belay_tests::target::Target;
use belay_tests::Failure;
use std::os::unix::fs::{symlink, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

type Test = fn(&Place, User) -> Result<(), Failure>;

/// Exit status of what the configuration does not allow.
const NOT_ALLOWED: i32 = 93;
const SITE: &str = "/etc/belay/belay.toml, line ";

/// A host of a site; nothing runs yet.
fn host(place: &Place, user: User, label: &str) -> Result<Job, Failure> {
    Job::at_site((user, ""), place, &format!("site-{label}-{}", user.name()), Kind::C, 1, 1)
}

/// A program that makes progress until it may end.
fn program(job: &Job) -> [String; 3] {
    let [go, beat] = ["go", "beat"].map(|f| job.work.join(f).display().to_string());
    let script = format!("while [ ! -e {go} ]; do n=$((n + 1)); echo $n > {beat}; sleep 0.02; done; echo PASS");
    ["sh".into(), "-c".into(), script]
}

/// Starts `belay` with these words.
fn start(job: &mut Job, words: &[&str]) -> Result<(), Failure> {
    let belay = job.belay.clone();
    job.start(&[&[belay.as_str()], words].concat())
}

/// Launches it in this job directory.
fn launch(job: &mut Job, dir: &str, options: &[&str]) -> Result<(), Failure> {
    let program = program(job);
    let program: Vec<&str> = program.iter().map(String::as_str).collect();
    start(job, &[&["launch", "--ckpt-dir", dir], options, &["--"], &program].concat())?;
    job.progress()
}

/// Refused as not allowed, with these words.
fn not_allowed(job: &Job, words: &[&str], said: &[&str]) -> Result<(), Failure> {
    let o = job.belay(words)?;
    refused(&o, said).map_err(|e| format!("{words:?}: {e}"))?;
    want(o.status.code() == Some(NOT_ALLOWED), || {
        format!("{words:?}: {}: {}", show(o.status), text(&o))
    })
}

/// The job directory's description.
fn description(dir: &str) -> Result<serde_json::Value, Failure> {
    let read = io("read", std::fs::read(Path::new(dir).join("job.json")))?;
    serde_json::from_slice(&read).map_err(|e| e.to_string())
}

/// How many checkpoints are kept and how large they may be: the site's file, options instead, and no more than the site
/// allows, also when it changes its mind.
fn retention(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = host(place, user, "retention")?;
    job.configure("[checkpoints]\nkeep = 3\nmax_bytes = \"64M\"\n")?;
    let dir = job.dir();
    for verb in ["launch", "run"] {
        let words = [verb, "--ckpt-dir", &dir, "--max-bytes", "65M", "--", "true"];
        not_allowed(&job, &words, &["--max-bytes", SITE, "line 3", "67108864", "68157440"])?;
        want(!Path::new(&dir).exists(), || format!("{verb}: the job directory was made"))?;
    }
    launch(&mut job, &dir, &[])?;
    for _ in 0..4 {
        job.checkpoint()?;
    }
    let list: serde_json::Value = serde_json::from_str(&job.must(&["list", "--json"])?).map_err(|e| e.to_string())?;
    let kept = list["generations"].as_array().map_or(0, Vec::len);
    want(kept == 3 && description(&dir)?["max_bytes"] == 64 << 20, || {
        format!("{kept} checkpoints are kept: {list}")
    })?;
    job.crash();
    let as_launched = || {
        let d = description(&dir)?;
        want(d["max_bytes"] == 64 << 20 && d["keep"] == 3, || {
            format!("after the restart: {d}")
        })
    };
    job.configure("[checkpoints]\nkeep = 1\nmax_bytes = \"1K\"\n")?;
    job.restart(&[])?;
    job.says("may take 1024 bytes until the next restart")?;
    let o = job.belay(&["checkpoint", "--quiet", &dir])?;
    refused(&o, &["1024"])?;
    as_launched()?;
    job.crash();
    job.configure("[checkpoints]\nmax_bytes = \"1G\"\n")?;
    job.restart(&[])?;
    job.checkpoint()?;
    as_launched()?;
    job.verdict()?;
    job.must(&["gc", "--all"])?;
    io("let it run", std::fs::remove_file(job.work.join("go")))?;
    launch(&mut job, &dir, &["--keep", "2", "--max-bytes", "16M"])?;
    let d = description(&dir)?;
    want(d["max_bytes"] == 16 << 20 && d["keep"] == 2, || format!("with options: {d}"))?;
    job.verdict()
}

/// Makes these directories, which belong to the job's user, in the one that he has.
fn make(job: &Job, names: &[&str]) -> Result<Vec<String>, Failure> {
    let paths = names.iter().map(|name| job.work.join(name).display().to_string());
    paths
        .map(|path| job.on_host(1, &["mkdir", "-p", &path]).map(|_| path))
        .collect()
}

/// Job directories lie below the roots of the site's file, and of the user's own, however they are named; nothing is
/// made elsewhere.
fn roots(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = host(place, user, "roots")?;
    let [root, mine, other]: [String; 3] = make(&job, &["root", "root/mine", "other"])?
        .try_into()
        .map_err(|_| "three were made")?;
    io("link", symlink(&other, Path::new(&root).join("out")))?;
    let link = job.work.join("link").display().to_string();
    io("link", symlink(&mine, &link))?;
    job.configure(&format!(
        "[checkpoints]\n# where there is room\nroots = [\"{root}\", \"/nowhere\"]\n"
    ))?;
    let outside = format!("{other}/job");
    for dir in [
        outside.clone(),
        format!("{root}/out/job"),
        format!("{root}/../other/job"),
        format!("{mine}/../../other/job"),
    ] {
        for verb in ["launch", "run"] {
            not_allowed(
                &job,
                &[verb, "--ckpt-dir", &dir, "--", "true"],
                &[
                    "job directory",
                    &outside,
                    SITE,
                    "line 3, roots",
                    &root,
                    "/nowhere (no such file or directory)",
                    "--ckpt-dir",
                ],
            )?;
        }
        let o = job.belay(&["restart", &dir])?;
        refused(&o, &["is no job directory", "it does not exist"])?;
    }
    // Nobody can tell where these will lie.
    io("link", symlink(Path::new(&root).join("new"), Path::new(&root).join("later")))?;
    for dir in [format!("{root}/later/job"), format!("{root}/new/../job")] {
        let words = ["launch", "--ckpt-dir", &dir, "--", "true"];
        not_allowed(&job, &words, &["job directory", &dir, SITE, "line 3, roots", "--ckpt-dir"])?;
    }
    // The default place.
    let default = format!("cd {other} && {} launch true", job.belay);
    let o = belay_tests::job::output(job.command(1, &["sh", "-c", &default]), belay_tests::across::LIMIT)?;
    refused(&o, &[&format!("{other}/belay-job"), SITE, "--ckpt-dir"])?;
    // What the user has for himself counts too.
    let own = job.work.join("own.toml").display().to_string();
    io(
        "write",
        std::fs::write(&own, format!("[checkpoints]\nroots = [\"{mine}\", \"{other}\"]\n")),
    )?;
    let beside = format!("{root}/job");
    for (dir, file) in [(&beside, &own), (&outside, &SITE.replace(", line ", ""))] {
        let words = ["launch", "--config", &own, "--ckpt-dir", dir, "--", "true"];
        not_allowed(&job, &words, &["job directory", dir, file])?;
    }
    let left: Vec<PathBuf> = [&other, &root, &mine]
        .iter()
        .flat_map(|d| std::fs::read_dir(d).into_iter().flatten().flatten().map(|e| e.path()))
        .filter(|p| !["mine", "out", "later"].iter().any(|made| p.ends_with(made)))
        .collect();
    want(left.is_empty(), || format!("made where nothing may be: {left:?}"))?;
    // Below both, by a link from elsewhere.
    launch(&mut job, &format!("{link}/job"), &["--config", &own])?;
    let there = format!("{mine}/job");
    let o = job.belay(&["checkpoint", "--quiet", &there])?;
    want(o.status.success(), || text(&o))?;
    job.crash();
    job.on_host(1, &["mv", &there, &outside])?;
    not_allowed(
        &job,
        &["restart", &outside],
        &["job directory", &outside, SITE, "move it there"],
    )?;
    let program = program(&job);
    let run = ["run", "--ckpt-dir", &outside, "--", "sh", "-c", &program[2]];
    not_allowed(&job, &run, &["job directory", &outside, SITE])?;
    job.on_host(1, &["mv", &outside, &beside])?;
    start(&mut job, &["restart", &beside])?;
    job.progress()?;
    job.verdict()
}

/// Local directories lie there too, but for those that the site names itself.
fn tiers(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = host(place, user, "tiers")?;
    let [root, disk, other]: [String; 3] = make(&job, &["root", "disk", "other"])?
        .try_into()
        .map_err(|_| "three were made")?;
    let tier = |name: &str, path: &str| format!("[[tier]]\nname = \"{name}\"\nkind = \"local\"\npath = \"{path}\"\n");
    let site = format!("[checkpoints]\nroots = [\"{root}\"]\n");
    job.configure(&format!("{site}{}", tier("ssd", &disk)))?;
    let (own, dir) = (job.work.join("own.toml").display().to_string(), format!("{root}/job"));
    io("write", std::fs::write(&own, tier("mine", &other)))?;
    let launch_own = ["launch", "--config", &own, "--ckpt-dir", &dir, "--", "true"];
    let named = [
        "tier mine:",
        &other,
        SITE,
        "line 2, roots",
        &root,
        "for it in the configuration",
    ];
    not_allowed(&job, &launch_own, &named)?;
    not_allowed(&job, &["run", "--config", &own, "--ckpt-dir", &dir, "--", "true"], &named)?;
    want(!Path::new(&dir).exists(), || "belay run has made the job directory".into())?;
    not_allowed(&job, &["calibrate", "--config", &own], &named)?;
    let redundant = [
        "launch",
        "--across-hosts",
        "--redundancy",
        "xor",
        "--local-dir",
        &other,
        "--ckpt-dir",
        &dir,
        "--",
        "true",
    ];
    not_allowed(&job, &redundant, &["local directory", &other, SITE, "--local-dir"])?;
    want(!Path::new(&dir).exists(), || "the job directory was made".into())?;
    launch(&mut job, &dir, &[])?;
    let o = job.belay(&["checkpoint", "--quiet", &dir])?;
    want(o.status.success(), || text(&o))?;
    job.crash();
    // What the site takes back.
    job.configure(&site)?;
    not_allowed(
        &job,
        &["restart", &dir],
        &["tier ssd:", &disk, SITE, "restart with --config FILE"],
    )?;
    not_allowed(&job, &["restart", "--config", &own, &dir], &named)?;
    io("write", std::fs::write(&own, ""))?;
    start(&mut job, &["restart", "--config", &own, &dir])?;
    job.progress()?;
    job.verdict()
}

/// The site says where the tiers of a redundant job lie too; such a job keeps its local directory, whatever the
/// configuration of its restart names.
fn redundant(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = host(place, user, "redundant")?;
    let [root, local, disk, other]: [String; 4] = make(&job, &["root", "local", "disk", "other"])?
        .try_into()
        .map_err(|_| "four were made")?;
    let site = |roots: &[&String]| format!("[checkpoints]\nroots = {roots:?}\n");
    let all = site(&[&root, &local, &disk]);
    job.configure(&all)?;
    let (own, dir) = (job.work.join("own.toml").display().to_string(), format!("{root}/job"));
    let tier = |path: &str| format!("[[tier]]\nname = \"mine\"\nkind = \"local\"\npath = \"{path}\"\n");
    io("write", std::fs::write(&own, tier(&other)))?;
    let options = [
        "--across-hosts",
        "--redundancy",
        "xor",
        "--local-dir",
        &local,
        "--config",
        &own,
    ];
    let program = program(&job);
    let command = ["--", "sh", "-c", &program[2]];
    let both = |how: &str| {
        let d = description(&dir)?;
        want(d["config"]["redundancy"]["local"] == local.as_str(), || format!("{how}: {d}"))?;
        want(d["config"]["tiers"][0]["path"] == disk.as_str(), || format!("{how}: {d}"))
    };
    let run = [&["run", "--ckpt-dir", &dir][..], &options, &command].concat();
    not_allowed(&job, &run, &["tier mine:", &other, SITE, "for it in the configuration"])?;
    io("write", std::fs::write(&own, tier(&disk)))?;
    for (how, words) in [
        ("launched", run.clone()),
        ("restarted", vec!["restart", "--config", &own, &dir]),
        ("run again", run),
    ] {
        start(&mut job, &words)?;
        job.progress()?;
        both(how)?;
        let o = job.belay(&["checkpoint", "--quiet", &dir])?;
        want(o.status.success(), || format!("{how}: {}", text(&o)))?;
        job.crash();
    }
    // It is not to be had elsewhere.
    job.configure(&site(&[&root, &disk]))?;
    for words in [
        &["restart", &dir][..],
        &["restart", "--config", &own, &dir],
        &["run", "--ckpt-dir", &dir, "--", "sh", "-c", &program[2]],
    ] {
        let said = ["local directory", &local, SITE, "have that file allow it"];
        not_allowed(&job, words, &said)?;
    }
    job.configure(&all)?;
    start(&mut job, &["restart", &dir])?;
    job.progress()?;
    job.verdict()
}

/// A lost job directory is made again from a tier only where it may lie.
fn lost(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = host(place, user, "lost")?;
    let [root, other, disk]: [String; 3] = make(&job, &["root", "other", "disk"])?
        .try_into()
        .map_err(|_| "three were made")?;
    let tier = |path: &str| format!("[[tier]]\nname = \"pfs\"\nkind = \"pfs\"\npath = \"{path}\"\n");
    job.configure(&tier(&disk))?;
    let dir = format!("{other}/job");
    launch(&mut job, &dir, &[])?;
    for words in [["checkpoint", "--quiet", &dir], ["flush", "--quiet", &dir]] {
        let o = job.belay(&words)?;
        want(o.status.success(), || text(&o))?;
    }
    job.crash();
    io("remove", std::fs::remove_dir_all(&dir))?;
    let site = |root: &str| format!("[checkpoints]\nroots = [\"{root}\"]\n{}", tier(&disk));
    job.configure(&site(&root))?;
    let said = ["job directory", &dir, SITE, "line 2, roots", "have that file allow it"];
    not_allowed(&job, &["restart", &dir], &said)?;
    want(!Path::new(&dir).exists(), || "the job directory was made again".into())?;
    job.configure(&site(&other))?;
    let own = job.work.join("own.toml").display().to_string();
    let mine = tier(&root).replace("\"pfs\"\nkind", "\"mine\"\nkind");
    io("write", std::fs::write(&own, mine))?;
    let said = ["tier mine:", &root, SITE, "in the configuration"];
    not_allowed(&job, &["restart", "--config", &own, &dir], &said)?;
    want(!Path::new(&dir).exists(), || {
        "the job directory was made for a refused tier".into()
    })?;
    start(&mut job, &["restart", &dir])?;
    job.progress()?;
    job.verdict()
}

/// A file that cannot be understood is no permission.
fn broken(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = host(place, user, "broken")?;
    let dir = job.dir();
    launch(&mut job, &dir, &[])?;
    job.checkpoint()?;
    job.crash();
    job.configure("[checkpoints]\nroots = \"/scratch\"\n")?;
    for words in [
        &["restart", &dir][..],
        &["launch", "--ckpt-dir", &format!("{dir}2"), "--", "true"],
    ] {
        refused(&job.belay(words)?, &["/etc/belay/belay.toml", "line 2", "roots"])?;
    }
    job.configure("")?;
    job.restart(&[])?;
    job.verdict()
}

/// The site's file that comes with belay can be used as it is, also with all that stands in it as comments.
fn sample(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = host(place, user, "sample")?;
    let [scratch, _] = make(&job, &["scratch", "scratch/belay"])?.try_into().unwrap_or_default();
    let text = io("read", std::fs::read_to_string(repository().join("scripts/site/belay.toml")))?;
    let work = job.work.display().to_string();
    let is_key = |rest: &str| rest.starts_with(|c: char| c == '[' || c.is_ascii_lowercase());
    let on = text
        .lines()
        .map(|line| line.strip_prefix('#').filter(|rest| is_key(rest)).unwrap_or(line));
    let on = on.map(|line| {
        line.replace("\"/local\"", &format!("\"{work}\""))
            .replace("/scratch", &scratch)
            + "\n"
    });
    let on: String = on.collect();
    want(on.contains("\nkeep = 2 ") && on.contains("\n[tree]\n"), || {
        format!("not switched on: {on}")
    })?;
    for configuration in [&text, &on] {
        job.configure(configuration)?;
        let dir = job.dir();
        launch(&mut job, &dir, &[])?;
        job.checkpoint()?;
        job.crash();
        job.must(&["gc", "--all"])?;
        io("remove", std::fs::remove_dir_all(&dir))?;
    }
    Ok(())
}

/// Slurm's sample prolog and epilog: a user's directory is made below a directory of root's alone, and of what lies in it
/// only stores go that nobody has touched for long, whatever they are called and lead to.
fn prolog_and_epilog(place: &Place, user: User) -> Result<(), Failure> {
    let work = place.work("site-slurm", user)?;
    let local = work.join("local");
    // Nobody's: no other test runs belay as this user.
    let id = 60_000 + std::process::id() % 5_000;
    let run = |name: &str, uid: &str| {
        let mut c = std::process::Command::new("sh");
        c.arg(repository().join("scripts/site").join(name));
        c.env("LOCAL", &local)
            .env("SLURM_JOB_UID", uid)
            .env("SLURM_JOB_GID", id.to_string());
        let o = belay_tests::job::output(c, std::time::Duration::from_secs(30))?;
        want(o.status.success(), || format!("{name}: {}: {}", show(o.status), text(&o)))
    };
    let (uid, own) = (id.to_string(), local.join(id.to_string()));
    for (mode, made) in [(0o1777, false), (0o755, true)] {
        drop(std::fs::create_dir(&local));
        io(
            "chmod",
            std::fs::set_permissions(&local, std::fs::Permissions::from_mode(mode)),
        )?;
        for refused in ["", "0", "1/../2", "x"] {
            run("prolog", refused)?;
        }
        run("prolog", &uid)?;
        let names = io("list", std::fs::read_dir(&local))?.count();
        want(own.is_dir() == made && names == usize::from(made), || {
            format!("{mode:o}: {names} directories")
        })?;
    }
    let m = io("stat", std::fs::metadata(&own))?;
    want((m.uid(), m.mode() & 0o7777) == (id, 0o700), || {
        format!("{}, {:o}", m.uid(), m.mode())
    })?;
    // Old stores with names that shells take apart, a young one, other things, and links out of it.
    const MADE: &str = "set -e; umask 022; mkdir -p ../victim 'belay-1 x' 'belay-$(touch bad)' 'belay--rf' 'na me-1/0' ./-rf belay-new mine \"belay-\n\"
touch ../victim/belay-file belay-plain 'na me-1/job-directory' ./-rf/job-directory mine/file
ln -s ../victim belay-link; ln -s ../victim linked; ln -s /etc 'belay-1 x/etc'
ln -s ../mine 'belay-1 x/mine'; mkdir ../victim/sub; touch ../victim/job-directory
find . ../victim -exec touch -h -d '30 days ago' {} +; touch belay-new/chunk; chown -hR \"$0:$0\" .";
    let made = std::process::Command::new("sh")
        .args(["-c", MADE, &uid])
        .current_dir(&own)
        .status();
    want(io("sh", made)?.success(), || "nothing made".into())?;
    run("epilog", "0")?;
    run("epilog", &uid)?;
    let names = |dir: &Path| -> Result<Vec<String>, Failure> {
        let all = io("list", std::fs::read_dir(dir))?.flatten();
        let mut names: Vec<String> = all.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        Ok(names)
    };
    let left = names(&own)?;
    want(left == ["belay-link", "belay-new", "belay-plain", "linked", "mine"], || {
        format!("left: {left:?}")
    })?;
    let left = names(&local.join("victim"))?;
    want(left == ["belay-file", "job-directory", "sub"], || {
        format!("of others: {left:?}")
    })
}

fn main() {
    let mut target = Target::over_hosts("site");
    let tests: [(&str, Test); 7] = [
        ("retention", retention),
        ("roots", roots),
        ("tiers", tiers),
        ("redundant", redundant),
        ("lost", lost),
        ("broken", broken),
        ("sample", sample),
    ];
    for (name, test) in tests {
        target.by_user(name, |_| true, move |place, user, _| test(place, user));
    }
    // Slurm runs them as root.
    target.by_user(
        "prolog_and_epilog",
        |u| u == User::Root,
        |place, user, _| prolog_and_epilog(place, user),
    );
    target.run();
}
