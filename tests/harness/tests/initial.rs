//! Restart without user namespaces: belay has cap_checkpoint_restore and puts the job into the PID namespace that it finds.
//!
//! The checks run as an ordinary user in a sandbox, where user namespaces are forbidden and the machine's own setting
//! stays as it is: this program starts itself again in a user and PID namespace made for the purpose, which takes root.
//! One check runs at a time, because numbers must stay free between kill and restart.

use belay_tests::build::{build, Kind};
use belay_tests::case::{prog, Case};
use belay_tests::job::{output, show, text, Job};
use belay_tests::place::{am_root, Place, User};
use belay_tests::procs;
use belay_tests::runner::{self, Check};
use belay_tests::Failure;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Test = fn(&Place) -> Result<(), Failure>;

/// Longer than anything takes here, also where much else runs.
const LIMIT: Duration = Duration::from_secs(120);
/// Set inside the sandbox.
const INSIDE: &str = "BELAY_TEST_INSIDE";
/// The shell stays PID 1 of the sandbox and collects orphans.
const SANDBOX: &str = "echo 0 > /proc/sys/user/max_user_namespaces && \"$0\" \"$@\"; exit $?";

fn cases() -> Vec<Case> {
    let lines = [
        "compute_mem",
        "thr_many 8",
        "thr_many 512",
        "thr_leader_gone",
        "thr_locks",
        "thr_files",
        "blocked condvar 8",
        "blocked nanosleep 8",
        "proc_tree",
        "proc_forkexec fork",
        "proc_forkexec vfork",
        "proc_vmshare deep",
        "proc_zombie",
        "proc_session",
        "proc_daemon",
        "proc_stopped",
        "proc_subreaper",
        "sig_pending",
        "timer_posix",
        "attr_process",
        "attr_identity",
        "mem_private",
        "mem_shared memfd",
        "mem_huge",
        "fd_pipe",
        "fd_unix rights",
        "fd_tcp flow",
        "fd_pty",
        "fd_locks",
        "fd_events pidfd",
        "ipc_posix sem",
        // Semaphores that may be anybody's.
        "ipc_undo left",
    ];
    lines.into_iter().map(prog).collect()
}

/// A launched program with a checkpoint, killed.
fn killed(place: &Place, line: &[&str]) -> Result<Job, Failure> {
    build(place, line[0], Kind::C)?;
    let mut job = Job::new(place, &line.join("-"), User::Ordinary)?;
    let mut argv = vec![place.programs().join(line[0]).display().to_string()];
    argv.extend(line[1..].iter().map(|w| (*w).to_owned()));
    job.launch(&[], &argv)?;
    job.progress(LIMIT)?;
    job.checkpoint()?;
    Ok(job)
}

/// `belay restart` ends with status 90 and names `words`.
fn forbidden(job: &Job, words: &[&str]) -> Result<(), Failure> {
    let dir = job.dir().display().to_string();
    let o = output(job.belay(&["restart", &dir]), LIMIT)?;
    let said = text(&o);
    if o.status.code() != Some(90) || words.iter().any(|w| !said.contains(w)) {
        return Err(format!("{}, expected 90 and all of {words:?}: {said}", show(o.status)));
    }
    job.left_behind()
}

/// PID of the program below launcher and agent.
fn program_pid(job: &Job) -> Result<i32, Failure> {
    let dir = job.dir().display().to_string();
    let o = output(job.belay(&["status", &dir, "--json"]), LIMIT)?;
    let status: serde_json::Value = serde_json::from_slice(&o.stdout).map_err(|e| format!("{e}: {}", text(&o)))?;
    let pid = status["root_pid"].as_i64().and_then(|p| i32::try_from(p).ok());
    pid.ok_or_else(|| format!("no root_pid: {status}"))
}

/// Another program has taken the number: the message names both, and when it has ended the job comes back.
fn number_in_use(place: &Place) -> Result<(), Failure> {
    let mut job = killed(place, &["compute_mem"])?;
    let pid = program_pid(&job)?;
    job.kill_all()?;
    let mut other = None;
    // Whoever else starts a process meanwhile gets the number, which is soon free again.
    for _ in 0..2000 {
        std::fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string()).map_err(|e| format!("ns_last_pid: {e}"))?;
        let mut child = Command::new("sleep").arg("1000").spawn().map_err(|e| format!("sleep: {e}"))?;
        if child.id().cast_signed() == pid {
            other = Some(child);
            break;
        }
        let _ = child.kill();
        child.wait().map_err(|e| format!("sleep: {e}"))?;
    }
    let mut other = other.ok_or("no process could be given the number")?;
    let refused = forbidden(&job, &[&pid.to_string(), "sleep"]);
    other.kill().map_err(|e| format!("kill sleep: {e}"))?;
    other.wait().map_err(|e| format!("sleep: {e}"))?;
    refused?;
    job.clear_beat()?;
    job.restart(&[])?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// What belongs to an IPC namespace cannot come back in one that others use.
fn ipc_objects(place: &Place, line: &[&str], object: &str) -> Result<(), Failure> {
    let mut job = killed(place, line)?;
    job.kill_all()?;
    forbidden(&job, &[object, "IPC namespace"])
}

/// Without the capability there is no second way; the message says which setting forbids the first, and names the second.
fn no_capability(place: &Place) -> Result<(), Failure> {
    let mut job = killed(place, &["compute_mem"])?;
    job.kill_all()?;
    let plain = place.bin().join("belay-plain");
    std::fs::copy(place.belay(), &plain).map_err(|e| format!("copy belay: {e}"))?;
    let dir = job.dir().display().to_string();
    let o = output(job.command(&[plain.display().to_string(), "restart".into(), dir]), LIMIT)?;
    let said = text(&o);
    if o.status.code() != Some(90) || !said.contains("user.max_user_namespaces = 0") || !said.contains("cap_checkpoint_restore") {
        return Err(format!("{}: {said}", show(o.status)));
    }
    Ok(())
}

/// A restart that fails when processes exist already ends them itself: here is no PID 1 whose end would.
fn damaged_pages(place: &Place) -> Result<(), Failure> {
    let mut job = killed(place, &["proc_tree"])?;
    job.kill_all()?;
    let dir = job.dir().join("chunks");
    let files = std::fs::read_dir(&dir).map_err(|e| format!("list {}: {e}", dir.display()))?;
    for file in files
        .flatten()
        .map(|f| f.path())
        .filter(|f| f.extension().is_some_and(|e| e == "bpg"))
    {
        let mut bytes = std::fs::read(&file).map_err(|e| format!("read {}: {e}", file.display()))?;
        // The pages come first, their checksums last.
        let half = bytes.len() / 2;
        bytes[..half].iter_mut().step_by(64).for_each(|b| *b ^= 1);
        std::fs::write(&file, bytes).map_err(|e| format!("write {}: {e}", file.display()))?;
    }
    let dir = job.dir().display().to_string();
    let o = output(job.belay(&["restart", &dir]), LIMIT)?;
    if o.status.code() != Some(65) {
        return Err(format!("{}, expected 65: {}", show(o.status), text(&o)));
    }
    job.left_behind()
}

/// The agent is killed, and nothing else: without a PID 1 whose end would end the rest, the front does it, and nothing
/// that is no part of the job; the job is restarted.
fn agent_killed(place: &Place) -> Result<(), Failure> {
    let program = build(place, "compute_mem", Kind::C)?.display().to_string();
    let mut job = Job::new(place, "agent_killed", User::Ordinary)?;
    // Without its agent the program has another parent.
    job.set("BELAY_TEST_QUIET_PARENT", "1");
    job.launch(&[], std::slice::from_ref(&program))?;
    job.progress(LIMIT)?;
    job.checkpoint()?;
    job.kill_all()?;
    job.clear_beat()?;
    let (dir, belay) = (job.dir().display().to_string(), place.belay().display().to_string());
    let script = r#"sleep 100000 & echo "beside $!"; exec "$0" "$@""#;
    let run = ["run", "--across-hosts", "--ckpt-dir", &dir, "--", &program];
    let words = ["sh", "-c", script, &belay].into_iter().chain(run).map(str::to_owned);
    job.start(job.command(&words.collect::<Vec<_>>()))?;
    job.progress(LIMIT)?;
    let agent = job.status()?["agent"]["host_pid"].as_i64().ok_or("no agent")?;
    procs::signal(i32::try_from(agent).map_err(|e| e.to_string())?, libc::SIGKILL);
    let begin = Instant::now();
    while !job.output_text().contains("(1 of 3 restarts)") {
        if begin.elapsed() > 3 * LIMIT || job.has_ended()? {
            return Err(format!("not restarted: {}", job.output_text()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    job.clear_beat()?;
    job.progress(LIMIT)?;
    let said = job.output_text();
    let beside = said.lines().find_map(|l| l.strip_prefix("beside ")?.parse().ok());
    let beside = beside.ok_or_else(|| format!("no process beside the job: {said}"))?;
    if !procs::tree(beside).contains(&beside) {
        return Err("a process that is no part of the job was ended".into());
    }
    procs::signal(beside, libc::SIGKILL);
    job.verdict(false, LIMIT)
}

fn fail(e: &str) -> ! {
    println!("{e}");
    std::process::exit(1);
}

/// In the child, before exec: a user namespace with the same users. Only a process outside may say so, hence the helper.
fn own_user_namespace() -> std::io::Result<()> {
    let check = |r: i32| {
        if r < 0 {
            Err(std::io::Error::last_os_error())
        } else {
            Ok(r)
        }
    };
    let mut ends = [0; 2];
    // SAFETY: room for two numbers.
    check(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) })?;
    let me = std::process::id();
    // SAFETY: the child has one thread.
    let helper = check(unsafe { libc::fork() })?;
    if helper == 0 {
        let mut byte = 0u8;
        // SAFETY: room for one byte.
        let told = unsafe { libc::read(ends[0], (&raw mut byte).cast(), 1) } == 1;
        let map = |file: &str| std::fs::write(format!("/proc/{me}/{file}"), "0 0 65536").is_ok();
        // SAFETY: ends the helper.
        unsafe { libc::_exit(i32::from(!(told && map("uid_map") && map("gid_map")))) };
    }
    // SAFETY: takes a number.
    check(unsafe { libc::unshare(libc::CLONE_NEWUSER) })?;
    // SAFETY: one live byte.
    check(unsafe { libc::write(ends[1], [1u8].as_ptr().cast(), 1) } as i32)?;
    let mut status = 0;
    // SAFETY: `status` is valid for writing.
    check(unsafe { libc::waitpid(helper, &mut status, 0) })?;
    if status == 0 {
        Ok(())
    } else {
        Err(std::io::Error::other("the users could not be mapped"))
    }
}

/// `unshare` in a user namespace of its own.
fn sandbox(command: &[&str]) -> Command {
    let mut c = Command::new("unshare");
    c.args(["--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--ipc", "--"])
        .args(command)
        .env(INSIDE, "1");
    // SAFETY: the closure allocates little, in a process whose other threads hold no lock while it starts another one.
    unsafe { c.pre_exec(own_user_namespace) };
    c
}

/// Starts this program in the sandbox and ends like it.
fn enter() -> ! {
    if !am_root() || !sandbox(&["true"]).status().is_ok_and(|s| s.success()) {
        println!("skipped: needs root and the right to make user namespaces");
        std::process::exit(0);
    }
    let program = std::env::current_exe().unwrap_or_else(|e| fail(&e.to_string()));
    // Process numbers of the sandbox name no directory outside it.
    let home = std::env::temp_dir().join(format!("belay-sandbox-{}", std::process::id()));
    if let Err(e) = std::fs::create_dir(&home) {
        fail(&format!("create {}: {e}", home.display()));
    }
    let status = sandbox(&["bash", "-c", SANDBOX])
        .arg(program)
        .args(std::env::args_os().skip(1))
        .envs([("BELAY_TEST_WORKERS", "1"), ("BELAY_TEST_FILE_CAPABILITY", "1")])
        .env("BELAY_USERS", "user")
        .env("BELAY_TEST_TMP", &home)
        .status();
    if std::env::var_os("BELAY_KEEP").is_none() {
        std::fs::remove_dir_all(&home).ok();
    }
    match status {
        Ok(s) => std::process::exit(s.code().unwrap_or(1)),
        Err(e) => fail(&format!("unshare: {e}")),
    }
}

fn main() {
    if std::env::var_os(INSIDE).is_none() {
        enter();
    }
    if std::env::var_os("BELAY_WAYS").is_none() {
        std::env::set_var("BELAY_WAYS", "restarted");
    }
    let place = Arc::new(Place::new("initial").unwrap_or_else(|e| fail(&e)));
    let cases = cases();
    if let Err(e) = runner::build_all(&place, &cases, &[]) {
        fail(&e);
    }
    let mut checks = runner::checks(&place, cases);
    let mut add = |name: &str, run: Test| {
        let place = Arc::clone(&place);
        checks.push(Check {
            name: name.into(),
            run: Box::new(move || run(&place)),
        });
    };
    add("number_in_use", number_in_use);
    add("no_capability", no_capability);
    add("damaged_pages", damaged_pages);
    add("agent_killed", agent_killed);
    add("system_v_objects", |p| ipc_objects(p, &["ipc_sysv"], "System V"));
    add("semaphores_held", |p| ipc_objects(p, &["ipc_undo", "ended"], "System V"));
    add("message_queues", |p| ipc_objects(p, &["ipc_posix", "mq"], "message queues"));
    drop(place);
    runner::main(checks);
}
