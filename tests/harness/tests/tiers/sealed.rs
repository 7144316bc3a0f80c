//! Tiers on which everything is sealed: what others see there, what they can put there, and what becomes of a job whose
//! keys are missing, wrong or rotated.

use super::*;

/// In the memory of the program, by way of its environment.
const SECRET: &str = "words-that-nobody-else-may-read";

/// Writes the keys of these digits, one in each line, to the job's key file.
fn keys(job: &Job, user: User, digits: &str) -> Result<PathBuf, Failure> {
    use std::os::unix::fs::{chown, PermissionsExt};
    let path = job.work.join("keys");
    let lines: Vec<String> = digits.chars().map(|d| d.to_string().repeat(64)).collect();
    io("write the keys", std::fs::write(&path, lines.join("\n") + "\n"))?;
    io(
        "close the keys",
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)),
    )?;
    if user == User::Ordinary && am_root() {
        io("give the keys away", chown(&path, Some(NOBODY), Some(NOBODY)))?;
    }
    Ok(path)
}

fn encryption(keys: &Path) -> String {
    format!("[encryption]\nkey_file = \"{}\"\n", keys.display())
}

/// A job with one sealed tier in a directory, and that directory.
fn sealed(place: &Place, user: User, label: &str) -> Result<(Job, PathBuf), Failure> {
    let mut job = Job::new(place, label, user)?;
    let scratch = directory(&job, user, "scratch")?;
    let config = pfs("scratch", &scratch) + &encryption(&keys(&job, user, "a")?);
    job.set("BELAY_TEST_SECRET", SECRET);
    target(&mut job, place, &config, "4")?;
    Ok((job, scratch))
}

/// A restart that is refused with this status, and says these words.
fn says_no(job: &Job, options: &[&str], status: i32, words: &[&str]) -> Result<(), Failure> {
    let dir = job.dir().display().to_string();
    let args = [&["restart", &*dir], options].concat();
    let o = output(job.belay(&args), LIMIT)?;
    let said = text(&o);
    want(
        o.status.code() == Some(status) && words.iter().all(|w| said.contains(w)),
        || {
            format!(
                "restart {options:?}, to be refused with {status} and {words:?}: {}: {said}",
                show(o.status)
            )
        },
    )
}

/// The same, and nothing of belay's or of the job is left.
fn refused(job: &Job, options: &[&str], status: i32, words: &[&str]) -> Result<(), Failure> {
    says_no(job, options, status, words)?;
    job.left_behind()
}

/// Fails where the program's secret, or anything that belay itself writes in plain, is to be seen below `dir`; but it
/// is in the job directory.
fn hides(job: &Job, dir: &Path) -> Result<(), Failure> {
    let holds =
        |path: &PathBuf, words: &str| std::fs::read(path).is_ok_and(|b| b.windows(words.len()).any(|w| w == words.as_bytes()));
    want(files(&job.dir()).iter().any(|f| holds(f, SECRET)), || {
        "the secret is not even in the job directory".into()
    })?;
    for file in files(dir) {
        for plain in [SECRET, "fault_target", "BELAYPCK", "manifest", "chunk/"] {
            want(!holds(&file, plain), || {
                format!("{plain} is to be read in {}", file.display())
            })?;
        }
    }
    Ok(())
}

fn config(job: &Job) -> String {
    job.work.join("belay.toml").display().to_string()
}

/// As on a host that has nothing but the tier and the key; and without the key, or with another one, nothing but a
/// refusal, and nothing is lost.
pub(super) fn lost(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let (mut job, scratch) = sealed(place, user, "sealed")?;
    durable(&job)?;
    hides(&job, &scratch)?;
    job.kill_all()?;
    let dir = job.dir().display().to_string();
    belay(&job, &["verify", &dir])?;
    io("remove", std::fs::remove_dir_all(job.dir()))?;
    let before = files(&scratch);
    let (with, without) = (config(&job), job.work.join("plain.toml"));
    io("write", std::fs::write(&without, pfs("scratch", &scratch)))?;
    let unkeyed = without.display().to_string();
    refused(
        &job,
        &["--config", &unkeyed],
        94,
        &["tier scratch", "job.json", "no key is configured", "[encryption]"],
    )?;
    keys(&job, user, "b")?;
    refused(
        &job,
        &["--config", &with],
        94,
        &["tier scratch", "job.json", "the only key at hand"],
    )?;
    io("remove", std::fs::remove_file(job.work.join("keys")))?;
    refused(&job, &["--config", &with], 94, &["key file", "no such file", "--key-file"])?;
    want(files(&scratch) == before, || {
        format!("{before:?} has become {:?}", files(&scratch))
    })?;
    let moved = job.work.join("moved");
    io("rename", std::fs::rename(keys(&job, user, "a")?, &moved))?;
    job.clear_beat()?;
    job.restart(&["--config", &unkeyed, "--key-file", &moved.display().to_string()])?;
    job.progress(LIMIT).map_err(|e| format!("restart from the tier alone: {e}"))?;
    durable(&job)?;
    job.verdict(false, LIMIT)?;
    refused(&job, &["--config", &unkeyed], 94, &["is sealed", "--key-file"])
}

/// The same with an object store.
pub(super) fn object_store(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "sealeds3", user)?;
    CREDENTIALS.iter().for_each(|(key, value)| job.set(key, value));
    job.set("BELAY_TEST_SECRET", SECRET);
    let store = job.work.join("store");
    let server = Server::start(Command::new(Server::program(place)), &store, "127.0.0.1:0")?;
    // At the end the server is gone, and asked again for so long.
    let config_text = server.tier() + "timeout = \"10s\"\n[flush]\nzstd = 1\n" + &encryption(&keys(&job, user, "a")?);
    target(&mut job, place, &config_text, "24")?;
    durable(&job)?;
    hides(&job, &store)?;
    job.kill_all()?;
    io("remove", std::fs::remove_dir_all(job.dir()))?;
    let with = config(&job);
    keys(&job, user, "b")?;
    says_no(&job, &["--config", &with], 94, &["tier cloud", "job.json"])?;
    keys(&job, user, "a")?;
    job.clear_beat()?;
    job.restart(&["--config", &with])?;
    job.progress(LIMIT)
        .map_err(|e| format!("restart from the store alone: {e}"))?;
    durable(&job)?;
    job.kill_all()?;
    lose_local(&job)?;
    goes_on(&mut job)?;
    drop(server);
    job.verdict(false, LIMIT)
}

/// Who can write to the tier changes bits, moves objects to other names, puts plain ones there, or puts back what was
/// there before: nothing of it runs, each is named.
pub(super) fn hostile(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let (mut job, scratch) = sealed(place, user, "hostile")?;
    durable(&job)?;
    let first = files(&scratch);
    let kept: Vec<(PathBuf, Vec<u8>)> = first
        .iter()
        .map(|f| (f.clone(), std::fs::read(f).unwrap_or_default()))
        .collect();
    durable(&job)?;
    job.kill_all()?;
    lose_local(&job)?;
    let mut names = files(&scratch);
    names.sort();
    let good: Vec<(PathBuf, Vec<u8>)> = names
        .into_iter()
        .map(|f| (f.clone(), std::fs::read(f).unwrap_or_default()))
        .collect();
    let put = |all: &[(PathBuf, Vec<u8>)]| -> Result<(), Failure> {
        for f in files(&scratch) {
            io("remove", std::fs::remove_file(f))?;
        }
        all.iter()
            .try_for_each(|(path, bytes)| io("write", std::fs::write(path, bytes)))
    };
    let of = |kind: &str| {
        good.iter()
            .filter(|(p, _)| p.to_string_lossy().contains(kind))
            .collect::<Vec<_>>()
    };
    let (packs, records) = (of("/packs/"), of("/gen/"));
    want(packs.len() >= 2 && records.len() == 2, || format!("on the tier: {packs:?}"))?;
    // A bit of everything but the salt is another object's: each pack.
    for (path, bytes) in &packs {
        let mut bytes = bytes.clone();
        let at = 52 + rng.below(bytes.len() as u64 - 52) as usize;
        bytes[at] ^= 1 << rng.below(8);
        io("write", std::fs::write(path, bytes))?;
    }
    refused(&job, &[], 65, &["tier scratch: packs/", "not what was sealed"])?;
    // Packs under each other's names.
    put(&good)?;
    io("write", std::fs::write(&packs[0].0, &packs[1].1))?;
    io("write", std::fs::write(&packs[1].0, &packs[0].1))?;
    refused(&job, &[], 65, &["tier scratch: packs/", "moved here from another name"])?;
    // The record of an older generation as that of the newest.
    put(&good)?;
    io("write", std::fs::write(&records[1].0, &records[0].1))?;
    refused(
        &job,
        &["--generation", "2"],
        67,
        &["gen/000002-", "moved here from another name"],
    )?;
    // A generation that is whole, but was not sealed here.
    put(&good)?;
    for (path, _) in &packs {
        io("write", std::fs::write(path, b"{\"format\":1,\"xxh3\":0,\"body\":\"\"}"))?;
    }
    refused(&job, &[], 65, &["tier scratch: packs/", "it is not sealed"])?;
    // What was there before, without what came later: that is genuine, so it is only said.
    put(&kept)?;
    refused(&job, &["--generation", "2"], 67, &["no generation 2"])?;
    job.clear_beat()?;
    job.restart(&[])?;
    job.progress(LIMIT)
        .map_err(|e| format!("restart of what was put back: {e}"))?;
    let said = job.output_text();
    want(said.contains("it held generation 2, and now generation 1"), || {
        format!("not noticed: {said}")
    })?;
    job.verdict(false, LIMIT)
}

/// The keys of a running job go away, are others, and are rotated: flushes fail by name, the program and its local
/// checkpoints do not care, nothing is lost.
pub(super) fn rotated(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let (mut job, scratch) = sealed(place, user, "rotated")?;
    durable(&job)?;
    let fails = |words: &[&str]| -> Result<(), Failure> {
        let before = files(&scratch);
        let o = job.checkpoint_raw(&["--level", "durable"])?;
        want(
            o.status.code() == Some(92) && words.iter().all(|w| text(&o).contains(w)),
            || format!("{words:?}: {}: {}", show(o.status), text(&o)),
        )?;
        want(files(&scratch) == before, || "something on the tier has changed".into())?;
        job.checkpoint()
    };
    let file = job.work.join("keys");
    io("remove", std::fs::remove_file(&file))?;
    fails(&["committed in the job directory", "key file", "no such file"])?;
    keys(&job, user, "b")?;
    fails(&["tier scratch: ", "is sealed with key", "the only key at hand"])?;
    job.progress(LIMIT)?;
    keys(&job, user, "a")?;
    durable(&job)?;
    let needed = |job: &Job| -> Result<Vec<Vec<String>>, Failure> {
        let all = generations(job)?;
        let on_tier = all.iter().flat_map(|g| g["tiers"].as_array().cloned().unwrap_or_default());
        let keys = on_tier.filter_map(|t| t["keys"].as_array().cloned());
        Ok(keys
            .map(|k| k.iter().filter_map(|k| k.as_str().map(str::to_owned)).collect())
            .collect())
    };
    let old = needed(&job)?;
    want(old.len() == 2 && old.iter().all(|k| *k == old[0] && k.len() == 1), || {
        format!("keys {old:?}")
    })?;
    keys(&job, user, "ab")?;
    durable(&job)?;
    let both = needed(&job)?;
    want(
        both.len() == 2 && both[0] == old[0] && both[1].len() == 1 && both[1] != old[0],
        || format!("keys {both:?}"),
    )?;
    job.kill_all()?;
    lose_local(&job)?;
    // The generation of before needs the old key, the newest does not; both keys open both.
    let newest = generations(&job)?.last().and_then(|g| g["generation"].as_u64()).unwrap_or(0);
    keys(&job, user, "b")?;
    let dir = job.dir().display().to_string();
    let before = files(&scratch);
    let o = output(job.belay(&["verify", &dir]), LIMIT)?;
    want(!o.status.success() && text(&o).contains(&old[0][0]), || {
        format!("verify with the new key alone: {}: {}", show(o.status), text(&o))
    })?;
    let older = all_numbers(&job)?.first().copied().unwrap_or(0).to_string();
    refused(
        &job,
        &["--generation", &older],
        94,
        &[&format!("gen/00000{older}-"), &old[0][0]],
    )?;
    want(files(&scratch) == before, || "something on the tier has changed".into())?;
    goes_on(&mut job)?;
    let from = job.output_text();
    want(!from.contains("using generation"), || from.clone())?;
    keys(&job, user, "ab")?;
    job.kill_all()?;
    io("remove", std::fs::remove_dir_all(job.dir()))?;
    job.clear_beat()?;
    job.restart(&["--config", &config(&job), "--generation", &older])?;
    job.progress(LIMIT)
        .map_err(|e| format!("restart of generation {older} of {newest} with both keys: {e}"))?;
    job.verdict(false, LIMIT)
}

/// A job that was launched without keys is restarted with some: from then on what lies there in plain is not trusted,
/// and goes when it is asked for. And when the keys are lost for good, so does everything.
pub(super) fn later(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "later", user)?;
    let scratch = directory(&job, user, "scratch")?;
    let tier = pfs("scratch", &scratch);
    job.set("BELAY_TEST_SECRET", SECRET);
    target(&mut job, place, &tier, "4")?;
    durable(&job)?;
    job.kill_all()?;
    io(
        "write",
        std::fs::write(config(&job), tier + &encryption(&keys(&job, user, "a")?)),
    )?;
    job.clear_beat()?;
    job.restart(&["--config", &config(&job)])?;
    job.progress(LIMIT)?;
    let plain = |path: &PathBuf| !std::fs::read(path).is_ok_and(|b| b.starts_with(b"BELAYSEA"));
    let count = |scratch: &Path| files(scratch).iter().filter(|f| plain(f)).count();
    durable(&job)?;
    want(count(&scratch) > 0, || {
        "who has put the plain ones there is not known, and they have gone".into()
    })?;
    job.kill_all()?;
    let dir = job.dir().display().to_string();
    let o = output(job.belay(&["verify", &dir]), LIMIT)?;
    want(o.status.code() == Some(88) && text(&o).contains("it is not sealed"), || {
        format!("verify: {}: {}", show(o.status), text(&o))
    })?;
    belay(&job, &["flush", "--check", &dir])?;
    want(count(&scratch) == 0, || format!("in plain: {:?}", files(&scratch)))?;
    belay(&job, &["verify", &dir])?;
    lose_local(&job)?;
    goes_on(&mut job)?;
    job.verdict(false, LIMIT)?;
    keys(&job, user, "b")?;
    belay(&job, &["gc", "--all", &dir])?;
    let left = files(&scratch);
    want(left.is_empty(), || format!("left on the tier: {left:?}"))
}

fn all_numbers(job: &Job) -> Result<Vec<u64>, Failure> {
    Ok(generations(job)?.iter().filter_map(|g| g["generation"].as_u64()).collect())
}

/// What cannot be sealed is refused before anything begins, by name.
pub(super) fn refusals(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let job = Job::new(place, "unsealed", user)?;
    let scratch = directory(&job, user, "scratch")?;
    let file = keys(&job, user, "a")?;
    let name = config(&job);
    let tier = pfs("scratch", &scratch);
    let launch = |options: &[&str], text_of: &str, status: i32, words: &[&str]| -> Result<(), Failure> {
        io("write", std::fs::write(&name, text_of))?;
        let dir = job.dir().display().to_string();
        let args = [&["launch", "--config", &name, "--ckpt-dir", &dir], options, &["--", "true"]].concat();
        let o = output(job.belay(&args), LIMIT)?;
        want(
            o.status.code() == Some(status) && words.iter().all(|w| text(&o).contains(w)),
            || format!("{text_of:?}: {}: {}", show(o.status), text(&o)),
        )?;
        io("remove", std::fs::remove_dir_all(job.dir()).or(Ok(())))
    };
    let local = job.work.display().to_string();
    let redundant = ["--across-hosts", "--redundancy", "xor:2", "--local-dir", &local];
    let on = tier.clone() + &encryption(&file);
    launch(&redundant, &on, 64, &["[encryption]", "redundancy"])?;
    launch(
        &[],
        &(tier.clone() + "[encryption]\n"),
        64,
        &["belay.toml", "key_file or key_command"],
    )?;
    launch(
        &[],
        &(tier.clone() + &encryption(Path::new("/no/such/keys"))),
        94,
        &["/no/such/keys"],
    )?;
    let failing = tier.clone() + "[encryption]\nkey_command = [\"false\"]\n";
    launch(&[], &failing, 94, &["key command false", "exit status: 1"])?;
    io(
        "open",
        std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o644)),
    )?;
    launch(&[], &on, 94, &["mode 644", "chmod 600"])
}
