//! The launched command cannot tell that it was launched: signals, dispositions, descriptors, exit statuses, processes
//! that it leaves behind.

use crate::common::{assert_failed, kill, pid, require_helpers, wait_until, Scratch, BELAY};
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

const COUNTS: &str = "trap 'echo got term' TERM; trap 'echo got usr1; exit 6' USR1; echo ready; while :; do sleep 0.01; done";

#[test]
fn a_signal_to_the_group_arrives_once_and_one_to_the_launcher_or_the_agent_arrives() {
    let s = Scratch::new("group");
    let mut job = s.launch(&[], COUNTS);
    let front = job.id().cast_signed();
    s.wait_for("ready");
    for (n, target) in [(1, -front), (2, front), (3, s.agent())] {
        kill(target, libc::SIGTERM);
        wait_until("signal", || s.out().matches("got term").count() >= n);
    }
    // What was sent before this has arrived before it, however often.
    kill(front, libc::SIGUSR1);
    assert_eq!(job.wait().unwrap().code(), Some(6));
    assert_eq!(s.out().matches("got term").count(), 3, "{}", s.out());
}

#[test]
fn mask_dispositions_and_descriptors_are_the_callers() {
    let s = Scratch::new("inherit");
    for (prepare, command) in [
        ("", "grep -E Sig(Blk|Ign|Cgt) /proc/self/status"),
        ("trap '' HUP CHLD PIPE INT;", "grep -E Sig(Blk|Ign|Cgt) /proc/self/status"),
        ("exec 7</dev/null <&-;", "ls /proc/self/fd"),
        ("exec >/dev/full 2>&1;", "sh -c :"),
        (
            "cd /; umask 027; ulimit -c 5; ulimit -n 77;",
            "sh -c pwd;umask;ulimit${IFS}-c;ulimit${IFS}-n",
        ),
    ] {
        let quoted: Vec<String> = command.split(' ').map(|w| format!("'{w}'")).collect();
        let run = |launcher: &str| {
            let script = format!("{prepare} exec {launcher} {}", quoted.join(" "));
            s.command("bash", &["-c", &script]).output().unwrap()
        };
        let native = run("");
        let launched = run(&format!("{BELAY} launch --ckpt-dir {} --", s.job().display()));
        assert_eq!(native.status, launched.status, "{command}");
        assert_eq!(
            String::from_utf8_lossy(&native.stdout),
            String::from_utf8_lossy(&launched.stdout),
            "{prepare} {command}"
        );
        assert_eq!(native.stderr, launched.stderr, "{command}");
    }
}

#[test]
fn the_end_by_a_signal_is_an_end_by_that_signal() {
    let s = Scratch::new("signal");
    for signal in [
        libc::SIGINT,
        libc::SIGTERM,
        libc::SIGKILL,
        libc::SIGSEGV,
        libc::SIGRTMIN() + 3,
    ] {
        let mut job = s.launch(&[], &format!("kill -{signal} $$"));
        let status = job.wait().unwrap();
        assert_eq!(status.signal(), Some(signal), "{status}");
        assert!(!status.core_dumped());
        assert_eq!(s.out(), "");
    }
}

#[test]
fn missing_and_unusable_commands_have_the_shells_statuses() {
    let s = Scratch::new("missing");
    std::fs::write(s.0.join("text"), "no program").unwrap();
    assert_failed(
        &s.belay(&["launch", "no-such-command"]),
        127,
        "no-such-command: command not found",
    );
    assert_failed(&s.belay(&["launch", "./no/such"]), 127, "./no/such");
    assert_failed(
        &s.belay(&["launch", "--no-such-option", "true"]),
        64,
        "--no-such-option: no option",
    );
    assert_failed(&s.belay(&["launch", "./text"]), 126, "./text: not executable");
    assert_failed(&s.belay(&["launch", "/"]), 126, "not executable");
    assert!(!s.job().exists(), "nothing is made for a command that cannot run");
    let o = s.belay(&["launch", "--keep", "none", "true"]);
    assert_eq!(o.status.code(), Some(64));
    let o = s.belay(&["launch", "--ckpt-interval", "5x", "true"]);
    assert!(
        o.status.code() == Some(64) && String::from_utf8_lossy(&o.stderr).contains("unknown unit"),
        "{o:?}"
    );
}

#[test]
fn what_the_command_leaves_behind_runs_on_and_can_be_checkpointed() {
    require_helpers();
    let s = Scratch::new("background");
    let start = Instant::now();
    let o = s.belay(&[
        "launch",
        "sh",
        "-c",
        "sleep 1000 </dev/null >/dev/null 2>&1 & echo $!; exit 3",
    ]);
    // Standard output has ended, although the agent lives on.
    assert!(start.elapsed() < Duration::from_secs(10));
    assert_eq!(o.status.code(), Some(3));
    let left: i32 = String::from_utf8_lossy(&o.stdout).trim().parse().unwrap();
    let status = s.status();
    assert_eq!(
        (status["state"].as_str(), status["wait_status"].as_i64()),
        (Some("background"), Some(3 << 8))
    );
    assert_eq!(pid(&status["processes"][0]["pid"]), left);
    let o = s.belay(&["checkpoint", "--then", "stop"]);
    assert!(o.status.success(), "{o:?}");
    assert_eq!(s.status()["state"], "stopped");
    let o = s.belay(&["restart"]);
    assert_eq!(o.status.code(), Some(3), "{o:?}");
    let status = s.status();
    assert_eq!(
        (status["state"].as_str(), pid(&status["processes"][0]["pid"])),
        (Some("background"), left)
    );
    assert!(s.belay(&["stop"]).status.success());
    assert_eq!(s.status()["state"], "finished");
}

#[test]
fn a_job_that_has_not_begun_yet_is_waited_for() {
    require_helpers();
    let s = Scratch::new("soon");
    let mut waiting = s.command(BELAY, &["checkpoint", "--quiet", "--wait"]);
    let waiting = waiting.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let mut job = s.launch(&[], "while [ ! -e go ]; do sleep 0.01; done");
    let o = waiting.wait_with_output().unwrap();
    s.go();
    assert!(o.status.success(), "{o:?}");
    assert!(job.wait().unwrap().success());
}

#[test]
fn the_agents_death_harms_nothing_and_keeps_a_second_start_out() {
    let s = Scratch::new("agentdeath");
    let mut job = s.launch(&[], "echo ready; while [ ! -e go ]; do sleep 0.01; done; exit 5");
    s.wait_for("ready");
    kill(s.agent(), libc::SIGKILL);
    s.wait_for("ended unexpectedly; the program goes on");
    assert_failed(&s.belay(&["launch", "true"]), 69, "already at work");
    assert_failed(&s.belay(&["checkpoint"]), 68, "without its agent");
    s.go();
    assert_eq!(job.wait().unwrap().code(), Some(5));
    assert_eq!(s.out().lines().count(), 2, "{}", s.out());
    assert!(s.belay(&["launch", "true"]).status.success());
}

#[test]
fn the_death_of_a_restarted_jobs_agent_harms_nothing() {
    require_helpers();
    let s = Scratch::new("agentdeath2");
    let mut job = s.launch(&[], "echo ready; while [ ! -e go ]; do sleep 0.01; done; exit 5");
    s.wait_for("ready");
    assert!(s.belay(&["checkpoint", "--then", "stop"]).status.success());
    assert_eq!(job.wait().unwrap().code(), Some(85));
    for end in [Some(libc::SIGTERM), None] {
        let out = std::fs::File::create(s.0.join("out")).unwrap();
        let mut restart = s.command(BELAY, &["restart"]);
        let mut job = restart.stdout(Stdio::null()).stderr(out).spawn().unwrap();
        wait_until("agent", || s.status()["running"] == true);
        let command = pid(&s.status()["processes"][0]["host_pid"]);
        kill(s.agent(), libc::SIGKILL);
        s.wait_for("ended unexpectedly; the program goes on");
        assert_failed(&s.belay(&["launch", "true"]), 69, "already at work");
        if let Some(signal) = end {
            kill(job.id().cast_signed(), signal);
            assert_eq!(job.wait().unwrap().signal(), Some(signal));
        } else {
            // A command that stops itself stops the front too, so that the shell notices.
            let front = job.id().cast_signed();
            let state = |pid: i32| std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            kill(command, libc::SIGSTOP);
            wait_until("stopped front", || state(front).contains(") T "));
            kill(front, libc::SIGCONT);
            wait_until("continued command", || !state(command).contains(") T "));
            s.go();
            assert_eq!(job.wait().unwrap().code(), Some(5));
        }
    }
    assert!(s.belay(&["gc", "--all"]).status.success());
}

#[test]
fn the_fronts_death_leaves_a_job_that_can_be_commanded() {
    let s = Scratch::new("frontdeath");
    let mut job = s.launch(&[], "echo ready; while :; do sleep 0.01; done");
    s.wait_for("ready");
    job.kill().unwrap();
    job.wait().unwrap();
    wait_until("agent without a front", || s.status()["agent"]["front_pid"].is_null());
    assert_eq!(s.status()["state"], "running");
    let o = s.belay(&["stop"]);
    assert_eq!(String::from_utf8_lossy(&o.stdout), "command ended by signal 15\n");
    assert_eq!(s.status()["state"], "finished");
}

#[test]
fn stop_kills_what_ignores_sigterm() {
    let s = Scratch::new("stop");
    let mut job = s.launch(&[], "trap '' TERM; echo ready; while :; do sleep 0.01; done");
    s.wait_for("ready");
    assert!(s.belay(&["stop", "--grace", "50ms"]).status.success());
    assert_eq!(job.wait().unwrap().signal(), Some(libc::SIGKILL));
}

#[test]
fn a_suspended_job_says_so() {
    let s = Scratch::new("suspended");
    let mut job = s.launch(&[], "echo ready; while [ ! -e go ]; do sleep 0.01; done");
    s.wait_for("ready");
    let agent = s.agent();
    kill(agent, libc::SIGSTOP);
    wait_until("stopped agent", || {
        std::fs::read_to_string(format!("/proc/{agent}/stat"))
            .unwrap()
            .contains(") T ")
    });
    assert_failed(&s.belay(&["checkpoint"]), 75, "suspended");
    assert_failed(&s.belay(&["launch", "true"]), 69, "already running");
    kill(agent, libc::SIGCONT);
    s.go();
    assert!(job.wait().unwrap().success());
}

#[test]
fn standard_input_reaches_the_command() {
    let s = Scratch::new("stdin");
    let mut c = s.command(BELAY, &["launch", "wc", "-c"]);
    let mut child = c.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), &vec![b'x'; 1 << 20]).unwrap();
    let o = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&o.stdout), "1048576\n");
}
