//! Job directories: who may use them, what is in them, what becomes of it.

use crate::common::{am_root, assert_failed, kill, pid, require_helpers, wait_until, Scratch, BELAY};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;

fn chmod(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn directories_of_others_and_open_ones_are_refused() {
    let s = Scratch::new("owner");
    assert!(s.belay(&["launch", "true"]).status.success());
    chmod(&s.job(), 0o755);
    for args in [&["launch", "true"][..], &["restart"], &["status"], &["checkpoint"], &["gc"]] {
        assert_failed(&s.belay(args), 77, "has mode 755");
    }
    chmod(&s.job(), 0o700);
    assert_failed(
        &s.belay(&["launch", "--ckpt-dir", "/proc/no/such", "true"]),
        73,
        "/proc/no/such",
    );
    // Not one that anybody has made for this: its mode is not spoken of.
    assert_failed(
        &s.belay(&["launch", "--ckpt-dir", &s.0.display().to_string(), "true"]),
        73,
        "holds other things",
    );
    if !am_root() {
        return;
    }
    let nobody = |args: &[&str]| {
        let all = [&["--reuid=65534", "--regid=65534", "--clear-groups", "--", BELAY], args].concat();
        s.command("setpriv", &all).output().unwrap()
    };
    assert_failed(&nobody(&["status"]), 77, "belongs to user 0");
    let give = |user| {
        let inside = std::fs::read_dir(s.job()).unwrap().map(|e| e.unwrap().path());
        for path in inside.chain([s.job()]) {
            std::os::unix::fs::lchown(path, Some(user), Some(user)).unwrap();
        }
    };
    give(65534);
    assert_failed(&s.belay(&["launch", "true"]), 77, "belongs to user 65534");
    assert_failed(&s.belay(&["restart"]), 77, "belongs to user 65534");
    assert!(s.belay(&["status"]).status.success(), "root may look");
    give(0);
}

#[test]
fn a_long_path_and_an_empty_directory_work() {
    let s = Scratch::new("long");
    let deep = s.0.join("x".repeat(100)).join("y".repeat(100));
    std::fs::create_dir_all(&deep).unwrap();
    let dir = deep.display().to_string();
    let mut job = s.launch(&["--ckpt-dir", &dir], "echo ready; while [ ! -e go ]; do sleep 0.01; done");
    s.wait_for("ready");
    assert_eq!(std::fs::metadata(&deep).unwrap().mode() & 0o777, 0o700);
    let o = s.belay(&["status", "--json", &dir]);
    assert!(String::from_utf8_lossy(&o.stdout).contains("\"state\": \"running\""), "{o:?}");
    s.go();
    assert!(job.wait().unwrap().success());
}

#[test]
fn checkpoints_are_never_overwritten_by_a_launch() {
    require_helpers();
    let s = Scratch::new("holds some");
    let mut job = s.launch(
        &["--keep", "1", "--name", "mine"],
        "echo ready; while [ ! -e go ]; do sleep 0.01; done",
    );
    s.wait_for("ready");
    for n in 1..=3 {
        let o = s.belay(&["checkpoint", "--json"]);
        let c: serde_json::Value = serde_json::from_slice(&o.stdout).unwrap();
        assert_eq!((c["generation"].as_u64(), c["whole"].as_bool()), (Some(n), Some(true)), "{c}");
    }
    assert_eq!(std::fs::read_dir(s.job().join("gen")).unwrap().count(), 1, "--keep 1");
    let status = s.status();
    assert_eq!(
        (status["name"].as_str(), status["generations"][0]["generation"].as_u64()),
        (Some("mine"), Some(3))
    );
    assert_failed(&s.belay(&["gc", "--all"]), 69, "already running");
    s.go();
    assert!(job.wait().unwrap().success());
    // A command that is suggested can be typed as it is.
    let suggested = format!(
        "holds 1 checkpoint of an earlier job; continue it with belay restart '{}',",
        s.job().display()
    );
    assert_failed(&s.belay(&["launch", "true"]), 72, &suggested);
    // A variable that is empty is none.
    let o = s.command(BELAY, &["list"]).env("BELAY_DIR", "").output().unwrap();
    assert!(o.status.success(), "{o:?}");
    let elsewhere = s.0.join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    assert_failed(
        &s.belay(&["inspect", "elsewhere"]),
        78,
        "neither a generation nor a job directory",
    );
    let chunk = std::fs::read_dir(s.job().join("chunks")).unwrap().next().unwrap().unwrap();
    assert_failed(
        &s.belay(&["inspect", chunk.path().to_str().unwrap()]),
        64,
        "name the generation's directory",
    );
    assert_failed(&s.belay(&["restart", "--generation", "1"]), 67, "no generation 1");
    assert!(s.belay(&["verify"]).status.success());
    let said = String::from_utf8_lossy(&s.belay(&["gc", "--all"]).stdout).into_owned();
    assert!(said.starts_with("removed 1 generations, 0 left-overs and "), "{said}");
    assert_eq!(std::fs::read_dir(s.job().join("chunks")).unwrap().count(), 0);
    assert_failed(&s.belay(&["verify"]), 66, "no checkpoint");
    assert!(s.belay(&["launch", "true"]).status.success());
}

/// Flips a bit in the chunk that was written last; the file. Generations before that chunk do not need it.
fn damage_memory(job: &Path) -> PathBuf {
    let files = std::fs::read_dir(job.join("chunks")).unwrap().map(|e| e.unwrap().path());
    let pages = files.max().unwrap();
    let mut bytes = std::fs::read(&pages).unwrap();
    bytes[100] ^= 1;
    std::fs::write(&pages, bytes).unwrap();
    pages
}

#[test]
fn verify_names_every_fault() {
    require_helpers();
    let s = Scratch::new("verify");
    let mut job = s.launch(&[], "echo ready; while [ ! -e go ]; do sleep 0.01; done");
    s.wait_for("ready");
    assert!(s.belay(&["checkpoint"]).status.success());
    assert!(s.belay(&["checkpoint"]).status.success());
    s.go();
    job.wait().unwrap();
    let pages = damage_memory(&s.job());
    let o = s.belay(&["verify"]);
    assert_failed(&o, 88, "1 of 2 generations are damaged");
    let said = String::from_utf8_lossy(&o.stdout);
    assert!(
        said.contains("generation 1: whole") && said.contains(&pages.display().to_string()),
        "{said}"
    );
}

#[test]
fn an_interval_shorter_than_the_writing_is_left_out_and_the_program_goes_on() {
    require_helpers();
    let s = Scratch::new("skip");
    let mut job = s.launch(
        &["--ckpt-interval", "1ms"],
        "echo ready; while [ ! -e go ]; do sleep 0.01; done; exit 8",
    );
    s.wait_for("ready");
    wait_until("left-out checkpoints", || s.status()["skipped"].as_u64() > Some(3));
    wait_until("generations", || s.status()["generations"].as_array().unwrap().len() >= 2);
    s.go();
    assert_eq!(job.wait().unwrap().code(), Some(8));
    assert_eq!(s.out(), "ready\n");
}

#[test]
fn left_overs_of_a_killed_checkpoint_are_cleared() {
    require_helpers();
    let s = Scratch::new("leftovers");
    let mut job = s.launch(&[], "echo ready; while :; do sleep 0.01; done");
    s.wait_for("ready");
    assert!(s.belay(&["checkpoint"]).status.success());
    let (front, agent) = (job.id().cast_signed(), s.agent());
    kill(agent, libc::SIGKILL);
    kill(-front, libc::SIGKILL);
    job.wait().unwrap();
    std::fs::create_dir(s.job().join("gen/.tmp-000002")).unwrap();
    std::fs::write(s.job().join("gen/.tmp-000002/job.bimg"), "half").unwrap();
    std::fs::write(s.job().join("chunks/.tmp-pages-00000fff.bpg"), "half").unwrap();
    std::fs::write(s.job().join("chunks/pages-00000ffe.bpg"), "whole, but of no generation").unwrap();
    // The processes that held the lock may still be on their way out: gc waits for them.
    assert_eq!(
        String::from_utf8_lossy(&s.belay(&["gc"]).stdout),
        "removed 0 generations, 1 left-overs and 2 chunks (31 B)\n"
    );
    assert_eq!(s.status()["generations"].as_array().unwrap().len(), 1);
}

#[test]
fn a_damaged_description_is_read_from_its_copy() {
    require_helpers();
    let s = Scratch::new("described");
    let mut job = s.launch(&[], "echo ready; while [ ! -e go ]; do sleep 0.01; done");
    s.wait_for("ready");
    assert!(s.belay(&["checkpoint", "--then", "stop"]).status.success());
    assert_eq!(job.wait().unwrap().code(), Some(85));
    let file = s.job().join("job.json");
    let good = std::fs::read(&file).unwrap();
    let damaged = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 1 << (at % 8);
        bytes
    };
    for at in (0..good.len()).step_by(29) {
        std::fs::write(&file, damaged(at)).unwrap();
        let o = s.belay(&["list"]);
        let said = String::from_utf8_lossy(&o.stderr).into_owned();
        // What the last line is called says nothing.
        let matters = at + 28 < good.len();
        assert!(
            o.status.success() && (!matters || said.contains("damaged")),
            "bit of byte {at}: {o:?}"
        );
    }
    std::fs::remove_file(&file).unwrap();
    let o = s.belay(&["list"]);
    let said = String::from_utf8_lossy(&o.stderr).into_owned();
    assert!(o.status.success() && said.contains("job.json.copy is used"), "{o:?}");
    std::fs::write(&file, &good[..100]).unwrap();
    s.go();
    let o = s.belay(&["restart"]);
    assert!(
        o.status.success() && String::from_utf8_lossy(&o.stderr).contains("job.json.copy is used"),
        "{o:?}"
    );
    // It is whole again.
    assert!(s.belay(&["list"]).stderr.is_empty());
    for name in ["job.json", "job.json.copy"] {
        std::fs::write(s.job().join(name), "{").unwrap();
    }
    assert_failed(&s.belay(&["list"]), 65, "put it back from a copy");
}

#[test]
fn help_man_pages_and_completions_come_from_one_table() {
    let s = Scratch::new("generate");
    assert!(s.belay(&["generate", "man", "man"]).status.success());
    assert!(s.belay(&["generate", "completions", "complete"]).status.success());
    let page = std::fs::read_to_string(s.0.join("man/belay-launch.1")).unwrap();
    assert!(page.contains("ckpt\\-interval") && page.contains("EXIT STATUS"), "{page}");
    let page = std::fs::read_to_string(s.0.join("man/belay.1")).unwrap();
    assert!(
        page.contains("holds no checkpoint") && page.contains("belay\\-restart"),
        "{page}"
    );
    for file in ["belay.bash", "_belay", "belay.fish"] {
        assert!(std::fs::read_to_string(s.0.join("complete").join(file))
            .unwrap()
            .contains("ckpt-interval"));
    }
    assert!(String::from_utf8_lossy(&s.belay(&["help", "launch"]).stdout).contains("--ckpt-interval"));
    let full = std::fs::File::create("/dev/full").unwrap();
    let o = s.command(BELAY, &["--help"]).stdout(full).output().unwrap();
    assert_failed(&o, 74, "No space left");
}

#[test]
fn restart_falls_back_when_the_memory_of_the_newest_generation_is_damaged() {
    require_helpers();
    let s = Scratch::new("fallback");
    let mut job = s.launch(&[], "echo ready; while [ ! -e go ]; do sleep 0.01; done; exit 9");
    s.wait_for("ready");
    assert!(s.belay(&["checkpoint"]).status.success());
    assert!(s.belay(&["checkpoint", "--then", "stop"]).status.success());
    assert_eq!(job.wait().unwrap().code(), Some(85));
    damage_memory(&s.job());
    s.go();
    let o = s.belay(&["restart"]);
    let said = String::from_utf8_lossy(&o.stderr);
    assert_eq!(o.status.code(), Some(9), "{said}");
    assert!(
        said.contains("generation 2 is damaged") && said.contains("using generation 1"),
        "{said}"
    );
    assert_failed(&s.belay(&["restart", "--generation", "2"]), 65, "checksum");
}

#[test]
fn a_restart_without_a_whole_generation_says_what_is_wrong_with_each() {
    require_helpers();
    let s = Scratch::new("nonewhole");
    let mut job = s.launch(&["--keep", "3"], "echo ready; while [ ! -e go ]; do sleep 0.01; done; exit 9");
    s.wait_for("ready");
    assert!(s.belay(&["checkpoint"]).status.success());
    assert!(s.belay(&["checkpoint"]).status.success());
    assert!(s.belay(&["checkpoint", "--then", "stop"]).status.success());
    assert_eq!(job.wait().unwrap().code(), Some(85));
    // The newest lacks its manifest, the others have other damage.
    let good: Vec<_> = [(1, "job.bimg"), (2, "job.bimg"), (3, "manifest.json")]
        .map(|(n, name)| s.job().join(format!("gen/{n:06}/{name}")))
        .map(|path| (path.clone(), std::fs::read(path).unwrap()))
        .into();
    for (path, bytes) in &good {
        std::fs::write(path, &bytes[1..]).unwrap();
    }
    let o = s.belay(&["restart"]);
    let said = String::from_utf8_lossy(&o.stderr);
    assert_eq!(o.status.code(), Some(65), "{said}");
    let last = said.lines().last().unwrap();
    for what in [
        "no generation in ",
        "generation 1: ",
        "generation 2: ",
        "generation 3: ",
        "belay verify",
    ] {
        assert!(last.contains(what), "{what}: {said}");
    }
    // The only whole one is taken, wherever it is among the damaged ones, with its age.
    std::fs::write(&good[1].0, &good[1].1).unwrap();
    s.go();
    let o = s.belay(&["restart"]);
    let said = String::from_utf8_lossy(&o.stderr);
    assert_eq!(o.status.code(), Some(9), "{said}");
    assert!(said.contains("using generation 2, made "), "{said}");
}

#[test]
fn pages_that_were_not_written_are_not_looked_at_again() {
    require_helpers();
    let s = Scratch::new("clean");
    let mut job = s.launch(
        &["--differential", "written"],
        "echo ready; while [ ! -e go ]; do sleep 0.01; done",
    );
    s.wait_for("ready");
    for _ in 0..2 {
        assert!(s.belay(&["checkpoint"]).status.success());
    }
    let status = s.status();
    s.go();
    job.wait().unwrap();
    let differential = status["differential"].as_str().unwrap();
    if differential.starts_with("hash:") {
        return; // this kernel cannot tell
    }
    assert!(
        ["userfaultfd and hash", "soft-dirty bits and hash"].contains(&differential),
        "{differential}"
    );
    let log = std::fs::read_dir(s.job().join("log"))
        .unwrap()
        .map(|e| std::fs::read_to_string(e.unwrap().path()).unwrap());
    let clean: Vec<u64> = log
        .flat_map(|l| l.lines().map(str::to_owned).collect::<Vec<_>>())
        .filter_map(|l| serde_json::from_str::<serde_json::Value>(&l).unwrap()["fields"]["pages_clean"].as_u64())
        .collect();
    assert!(clean.len() == 2 && clean[0] == 0 && clean[1] > 0, "{clean:?}");
}

#[test]
fn soft_dirty_bits_taken_away_by_another_program_are_missed() {
    require_helpers();
    let s = Scratch::new("soft-dirty");
    let mut job = s.launch(
        &["--differential", "written"],
        "echo ready; while [ ! -e go ]; do sleep 0.01; done",
    );
    s.wait_for("ready");
    let differential = || {
        assert!(s.belay(&["checkpoint"]).status.success());
        s.status()["differential"].as_str().unwrap().to_owned()
    };
    let before = [differential(), differential()];
    let root = s.status()["root_pid"].as_i64().unwrap();
    std::fs::write(format!("/proc/{root}/clear_refs"), "4").unwrap();
    let after = [differential(), differential()];
    s.go();
    job.wait().unwrap();
    if before[0].starts_with("soft-dirty") {
        let missed = "hash: another program takes away the soft-dirty bits of processes of the job";
        assert_eq!([&before[1], &after[0], &after[1]], [&before[0], missed, &before[0]]);
    }
}

#[test]
fn an_allocation_that_cannot_be_read_is_refused_where_no_hosts_are_named() {
    require_helpers();
    let s = Scratch::new("allocation");
    let mut job = s.launch(&["--across-hosts"], "echo ready; while [ ! -e go ]; do sleep 0.01; done");
    s.wait_for("ready");
    assert!(s.belay(&["checkpoint", "--then", "stop"]).status.success());
    job.wait().unwrap();
    let restart = |options: &[&str]| {
        let mut c = s.command(BELAY, &[&["restart"], options].concat());
        c.env("SLURM_JOB_NODELIST", "n[1-2").output().unwrap()
    };
    assert_failed(&restart(&[]), 64, "SLURM_JOB_NODELIST=n[1-2 is no list of nodes");
    s.go();
    let o = restart(&["--hosts", "n1"]);
    assert!(o.status.success() && o.stderr.is_empty(), "{o:?}");
}

#[test]
fn run_goes_on_from_a_checkpoint_of_a_command_whose_file_is_gone() {
    require_helpers();
    let s = Scratch::new("gone");
    let command = s.0.join("command");
    std::fs::copy("/bin/sh", &command).unwrap();
    let script = "echo ready; while [ ! -e go ]; do sleep 0.01; done; exit 9";
    let words = ["run", "--", "./command", "-c", script];
    let out = std::fs::File::create(s.0.join("out")).unwrap();
    let mut job = s.command(BELAY, &words).stdout(out).spawn().unwrap();
    s.wait_for("ready");
    assert!(s.belay(&["checkpoint", "--then", "stop"]).status.success());
    assert_eq!(job.wait().unwrap().code(), Some(85));
    std::fs::remove_file(&command).unwrap();
    s.go();
    let o = s.belay(&words);
    assert_eq!(o.status.code(), Some(9), "{o:?}");
    // A launch needs it, whether the job directory is there or not.
    assert!(s.belay(&["gc", "--all"]).status.success());
    assert_failed(&s.belay(&words), 127, "./command: command not found");
    std::fs::remove_dir_all(s.job()).unwrap();
    assert_failed(&s.belay(&words), 127, "./command: command not found");
    assert!(!s.job().exists(), "nothing is made for a command that cannot run");
}

#[test]
fn a_restart_that_fails_leaves_what_is_recorded_of_the_job() {
    require_helpers();
    let s = Scratch::new("record");
    let script = "echo ready; while [ ! -e go ]; do sleep 0.01; done";
    let mut job = s.launch(&[], script);
    s.wait_for("ready");
    assert!(s.belay(&["checkpoint"]).status.success());
    // One that was killed is interrupted once, however often it is tried.
    let agent = s.agent();
    for pid in [agent, pid(&s.status()["root_pid"])] {
        kill(pid, libc::SIGKILL);
    }
    job.wait().unwrap();
    let record = || -> serde_json::Value {
        let text = std::fs::read(s.job().join("job.json")).unwrap();
        let mut all: serde_json::Value = serde_json::from_slice(&text).unwrap();
        // Of the rest.
        all.as_object_mut().unwrap().remove("xxh3");
        all
    };
    let file = s.job().join("gen/000001/job.bimg");
    let good = std::fs::read(&file).unwrap();
    let before = record();
    for _ in 0..2 {
        std::fs::write(&file, &good[1..]).unwrap();
        assert_eq!(
            s.belay(&["restart", "--ckpt-interval", "7m", "--any-cpu"]).status.code(),
            Some(65)
        );
        let mut after = record();
        assert_eq!(after["history"]["interrupts"], 1, "{after}");
        assert!(s.status()["state"] == "killed", "{}", s.status());
        after["history"] = before["history"].clone();
        assert_eq!(after, before);
    }
    std::fs::write(&file, &good).unwrap();
    s.go();
    assert_eq!(s.belay(&["restart"]).status.code(), Some(0));
    let ended = record();
    assert_eq!(
        (&ended["wait_status"], &ended["history"]["interrupts"]),
        (&0.into(), &1.into()),
        "{ended}"
    );
    std::fs::write(&file, &good[1..]).unwrap();
    assert_eq!(s.belay(&["restart", "--ckpt-interval", "7m"]).status.code(), Some(65));
    assert_eq!(record(), ended);
    assert_eq!(s.status()["state"], "finished");
    let o = s.belay(&["run", "--", "sh", "-c", script]);
    let said = String::from_utf8_lossy(&o.stderr);
    assert!(o.status.success() && said.contains("is not run again"), "{said}");
}

#[test]
fn a_watch_ends_when_its_reader_is_gone() {
    let s = Scratch::new("watch");
    let mut job = s.launch(&[], "echo ready; while [ ! -e go ]; do sleep 0.05; done");
    s.wait_for("ready");
    let script = format!("trap '' PIPE; exec {BELAY} status --watch --json");
    let mut watch = s.command("sh", &["-c", &script]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(watch.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("\"running\":true"), "{line}");
    wait_until("the watch ends", || watch.try_wait().unwrap().is_some());
    assert!(watch.wait().unwrap().success());
    s.go();
    assert!(job.wait().unwrap().success());
}

#[test]
fn root_looks_at_nothing_whose_way_cannot_be_checked() {
    if !am_root() {
        return;
    }
    let s = Scratch::new("way");
    assert!(s.belay(&["launch", "true"]).status.success());
    // Enough to read what is there, and not to go the way to it.
    let script = format!("ulimit -n 5; exec {BELAY} inspect belay-job");
    let o = s.command("sh", &["-c", &script]).output().unwrap();
    assert_failed(&o, 74, "too many open files");
}

/// The root's host is gone, and parts on other hosts go on: neither does another job begin beside them, nor go their checkpoints.
#[test]
fn a_part_that_still_runs_keeps_others_out() {
    require_helpers();
    let s = Scratch::new("living-part");
    let mut job = s.launch(&[], "echo ready; while [ ! -e go ]; do sleep 0.01; done");
    s.wait_for("ready");
    assert!(s.belay(&["checkpoint"]).status.success());
    s.go();
    job.wait().unwrap();
    let part = s.job().join("nodes/1");
    std::fs::create_dir_all(&part).unwrap();
    chmod(&part, 0o700);
    std::fs::copy(s.job().join("job.json"), part.join("job.json")).unwrap();
    std::fs::write(part.join("lock"), "belay agent (process 7 on h2), serving").unwrap();
    let lock = std::fs::File::open(part.join("lock")).unwrap();
    lock.lock().unwrap();
    let told = "part 1: belay agent (process 7 on h2) still serves";
    assert_failed(&s.belay(&["gc", "--all"]), 69, told);
    assert!(s.belay(&["list"]).status.success());
    assert_eq!(std::fs::read_dir(s.job().join("gen")).unwrap().count(), 1);
    std::fs::remove_dir_all(s.job().join("gen")).unwrap();
    assert_failed(&s.belay(&["launch", "--across-hosts", "true"]), 69, told);
    assert!(part.join("lock").exists());
    drop(lock);
    assert!(s.belay(&["launch", "--across-hosts", "true"]).status.success());
    assert!(!part.exists());
}

#[test]
fn a_page_is_replaced_only_when_there_is_another() {
    let s = Scratch::new("page");
    assert!(s.belay(&["launch", "true"]).status.success());
    let (page, old) = (s.0.join("page.html"), "old ".repeat(1 << 20));
    std::fs::write(&page, &old).unwrap();
    assert_failed(&s.belay(&["report", "no-such-dir", "-o", "page.html"]), 78, "no-such-dir");
    assert!(std::fs::read_to_string(&page).unwrap() == old, "the old page is gone");
    assert!(s.belay(&["report", "-o", "page.html"]).status.success());
    let new = std::fs::read_to_string(&page).unwrap();
    assert!(new.starts_with("<!DOCTYPE html>") && new.ends_with("</html>"), "{new}");
    assert!(s.belay(&["report", "-o", "new.html"]).status.success());
    let mode = s.0.join("new.html").metadata().unwrap().mode();
    assert_eq!(mode & 0o777, 0o600, "it tells what the job directory does");
    let o = s.belay(&["report", "-o", "/dev/stdout"]);
    assert!(o.status.success() && o.stdout.ends_with(b"</html>"), "{o:?}");
}

#[test]
fn generations_that_cannot_be_listed_are_not_none() {
    require_helpers();
    let s = Scratch::new("no list");
    let (tier, config) = (s.0.join("tier"), s.0.join("t.toml"));
    std::fs::create_dir(&tier).unwrap();
    let text = format!("[[tier]]\nname = \"t\"\nkind = \"pfs\"\npath = \"{}\"\n", tier.display());
    std::fs::write(config, text).unwrap();
    let mut job = s.launch(&["--config", "t.toml"], "echo ready; while [ ! -e go ]; do sleep 0.01; done");
    s.wait_for("ready");
    std::fs::rename(s.job().join("gen"), s.0.join("away")).unwrap();
    std::fs::write(s.job().join("gen"), "").unwrap();
    let refused = || {
        for verb in ["flush", "list"] {
            assert_failed(&s.belay(&[verb]), 74, "belay-job/gen: not a directory");
        }
    };
    refused();
    s.go();
    job.wait().unwrap();
    refused();
}
