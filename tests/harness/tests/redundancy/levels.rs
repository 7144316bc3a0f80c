//! Redundancy and a durable tier in one job.

use super::*;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// In memory of every host.
pub(super) const RAM: &str = "/tmp/ram";

/// The configuration of a tier there.
fn ram(mib: u32) -> String {
    format!("[[tier]]\nname = \"ram\"\nkind = \"memory\"\npath = \"{RAM}\"\ncapacity = \"{mib}M\"\n")
}

/// A launched job with four parts on six hosts, the directory that is its durable tier, and its configuration, which ends so.
fn launched(place: &Place, label: &str, end: &str, more: &[&str]) -> Result<(Job, PathBuf, String), Failure> {
    let mut job = Job::new(place, label, 4, 6)?.unhurried();
    let program = job.program(place, "mpi/mpi_p2p")?;
    for host in 1..=6 {
        job.on_host(host, &["mkdir", LOCAL, RAM])?;
    }
    let scratch = job.work.join("scratch");
    std::fs::create_dir(&scratch).map_err(|e| e.to_string())?;
    let config = job.work.join("belay.toml");
    let at = scratch.display();
    let redundancy = format!("[redundancy]\nscheme = \"xor\"\ngroup = 4\nlocal = \"{LOCAL}\"\n");
    let tier = format!("[[tier]]\nname = \"scratch\"\nkind = \"pfs\"\npath = \"{at}\"\n");
    std::fs::write(&config, format!("{redundancy}{tier}{end}")).map_err(|e| e.to_string())?;
    let config = config.display().to_string();
    job.options = vec!["--config".into(), config.clone()];
    job.options.extend(more.iter().map(|o| (*o).to_owned()));
    job.launch(&program)?;
    Ok((job, scratch, config))
}

/// The number of a checkpoint that is on this level when this returns.
fn taken(job: &Job, level: &str) -> Result<u64, Failure> {
    let said = job.must(&["checkpoint", "--json", "--level", level])?;
    let taken: serde_json::Value = serde_json::from_str(&said).map_err(|e| format!("{e}: {said}"))?;
    want(taken["level"] == level, || format!("not {level}: {said}"))?;
    taken["generation"].as_u64().ok_or(said)
}

/// From which generation the job was restarted last.
fn restarted(job: &Job) -> Result<u64, Failure> {
    let script = format!("grep -h '\"restarting\"' {}/log/*.jsonl | tail -n 1", job.dir());
    let log = job.on_host(job.at[0], &["sh", "-c", &script])?;
    let entry: serde_json::Value = serde_json::from_str(&log).map_err(|e| format!("{e}: {log}"))?;
    entry["fields"]["generation"].as_u64().ok_or(log)
}

/// Wants chunks in memory of these hosts, or none.
fn in_memory(job: &Job, hosts: &[usize], some: bool) -> Result<(), Failure> {
    for host in hosts {
        let found = job.on_host(*host, &["find", RAM, "-name", "*.bpg"])?;
        want(found.is_empty() != some, || format!("in memory of h{host}: {found:?}"))?;
    }
    Ok(())
}

/// Checkpoints lie in memory of the hosts, from where they are hardly moved, and are redundant there: one host loses
/// its memory, one all it had, one its part to another host. Each time the job goes on from its newest checkpoint.
pub(super) fn memory(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let slow = "[levels]\ndurable = \"every 100\"\n[placement]\npolicy = \"fastest-only\"\n[flush]\nrate = \"1K\"\n";
    let (mut job, ..) = launched(place, "redundancy-memory", &(ram(512) + slow), &[])?;
    for round in 0..3 {
        // What is little may be moved at once, the next one not.
        taken(&job, "redundant").map_err(|e| format!("round {round}: {e}"))?;
        let newest = taken(&job, "redundant").map_err(|e| format!("round {round}: {e}"))?;
        in_memory(&job, &job.at, true)?;
        std::thread::sleep(Duration::from_millis(rng.below(300)));
        job.crash();
        match round {
            0 => drop(job.on_host(2, &["sh", "-c", &format!("rm -r {RAM}/*")])?),
            1 => {
                lose(&job, 4)?;
                job.at[3] = 5;
            }
            _ => job.at[0] = 6,
        }
        let used = job.restart_at(&[]).and_then(|()| restarted(&job));
        let used = used.map_err(|e| format!("round {round}: {e}"))?;
        want(used == newest, || {
            format!("round {round}: generation {used}, not {newest}: {}", job.said())
        })?;
    }
    in_memory(&job, &[1], false)?;
    taken(&job, "redundant")?;
    job.verdict()?;
    in_memory(&job, &[1, 2, 3, 5, 6], false)
}

/// One host is lost, and the tier with it: the group has all. Two are lost: what they had comes from the tier. At last
/// all hosts and the job directory are lost.
pub(super) fn cheapest(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let (mut job, scratch, config) = launched(place, "redundancy-durable", "[levels]\ndurable = \"every 100\"\n", &[])?;
    let away = job.work.join("away");
    taken(&job, "durable")?;
    let newest = taken(&job, "redundant")?;
    std::thread::sleep(Duration::from_millis(rng.below(300)));
    job.crash();
    lose(&job, 2)?;
    job.at[1] = 5;
    std::fs::rename(&scratch, &away).map_err(|e| e.to_string())?;
    job.restart_at(&[]).map_err(|e| format!("h2 lost, and the tier: {e}"))?;
    let used = restarted(&job)?;
    want(used == newest, || format!("generation {used}, not {newest}"))?;
    std::fs::rename(&away, &scratch).map_err(|e| e.to_string())?;
    let newest = taken(&job, "durable")?;
    taken(&job, "redundant")?;
    job.crash();
    [1, 3].iter().try_for_each(|host| lose(&job, *host))?;
    job.hosts.show(2)?;
    (job.at[0], job.at[2]) = (2, 6);
    job.restart_at(&[]).map_err(|e| format!("h1 and h3 lost: {e}"))?;
    let used = restarted(&job)?;
    want(used == newest, || format!("generation {used}, not {newest}"))?;
    taken(&job, "durable")?;
    // The parity of hosts that are lost is not here, which it also says.
    let said = text(&job.belay(&["verify", &job.dir()])?);
    want(said.contains("tier scratch: whole"), || format!("verify: {said}"))?;
    job.crash();
    for host in [2, 4, 5, 6] {
        job.on_host(host, &["sh", "-c", &format!("rm -r {LOCAL}/*")])?;
    }
    std::fs::remove_dir_all(job.dir()).map_err(|e| e.to_string())?;
    job.restart_at(&["--config", &config]).map_err(|e| format!("all lost: {e}"))?;
    taken(&job, "durable")?;
    job.verdict()
}

/// What was not copied while the job ran is copied by `belay flush` when it has been killed, and when it was stopped by
/// its last checkpoint: then all hosts are lost. A host that does not answer is named.
pub(super) fn at_rest(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let config = ram(512) + "[levels]\ndurable = \"every 100\"\n";
    let (mut job, ..) = launched(place, "redundancy-at-rest", &config, &[])?;
    taken(&job, "durable")?;
    let newest = taken(&job, "redundant")?;
    job.crash();
    job.hosts.hide(3)?;
    let begin = Instant::now();
    let o = job.belay(&["flush", "--quiet", &job.dir()])?;
    want(o.status.code() == Some(92) && text(&o).contains("h3"), || {
        format!("a host does not answer: {}: {}", show(o.status), text(&o))
    })?;
    want(begin.elapsed() < Duration::from_secs(60), || "it was waited for".into())?;
    job.hosts.show(3)?;
    let said = job.must(&["flush", "--quiet"])?;
    want(said.contains(&format!("generation {newest} is durable")), || said.clone())?;
    job.restart_at(&[])?;
    let said = job.must(&["checkpoint", "--json", "--then", "stop"])?;
    let last: serde_json::Value = serde_json::from_str(&said).map_err(|e| format!("{e}: {said}"))?;
    job.end()?;
    let said = job.must(&["flush", "--quiet"])?;
    want(
        said.contains(&format!("generation {} is durable", last["generation"])),
        || said.clone(),
    )?;
    for host in 1..=4 {
        lose(&job, host)?;
        job.hosts.show(host)?;
    }
    job.restart_at(&[])?;
    let used = restarted(&job)?;
    want(last["generation"] == used, || format!("generation {used}, not {last}"))?;
    job.verdict()
}

/// Everything dies at random moments, of moves out of memory, of encoding and of flushes too, and more and more hosts
/// are lost with all they had: the job goes on from a checkpoint that is not older than the last that was called
/// durable.
pub(super) fn at_random(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let levels = ram(64) + "[levels]\nredundant = \"every 2\"\ndurable = \"every 3\"\n";
    let (mut job, ..) = launched(place, "redundancy-levels", &levels, &["--ckpt-interval", "300ms"])?;
    for losses in 1..=3 {
        let durable = taken(&job, "durable").map_err(|e| format!("before {losses} are lost: {e}"))?;
        std::thread::sleep(Duration::from_millis(rng.below(3000)));
        job.crash();
        let mut used: Vec<usize> = job.at.iter().copied().collect::<BTreeSet<_>>().into_iter().collect();
        let gone: Vec<usize> = (0..losses)
            .map(|_| used.swap_remove(rng.below(used.len() as u64) as usize))
            .collect();
        gone.iter().try_for_each(|host| lose(&job, *host))?;
        let mut spares: Vec<usize> = (1..=6).filter(|h| !gone.contains(h) && !used.contains(h)).collect();
        for part in 0..job.at.len() {
            if gone.contains(&job.at[part]) {
                job.at[part] = spares.pop().unwrap_or(used[0]);
            }
        }
        let begun = job.restart_at(&[]).and_then(|()| restarted(&job));
        let begun = begun.map_err(|e| format!("h{gone:?} lost, durable {durable}: {e}"))?;
        want(begun >= durable, || {
            format!("h{gone:?} lost: from {begun}, although {durable} was durable")
        })?;
        gone.iter().try_for_each(|host| job.hosts.show(*host))?;
    }
    job.verdict()
}
