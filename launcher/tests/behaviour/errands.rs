//! What stand-ins for `srun` have asked outside of the job.

use crate::common::{assert_failed, kill, pid, require_helpers, wait_until, Scratch, BELAY};
use std::os::unix::fs::PermissionsExt;
use std::process::Child;

/// Starts a job in whose PATH there are these programs of Slurm, which are scripts.
fn launch(s: &Scratch, programs: &[(&str, &str)], script: &str) -> Child {
    let bin = s.0.join("bin");
    std::fs::create_dir_all(&bin).unwrap();
    for (name, text) in programs {
        std::fs::write(bin.join(name), format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(bin.join(name), PermissionsExt::from_mode(0o755)).unwrap();
    }
    let out = std::fs::File::create(s.0.join("out")).unwrap();
    let err = out.try_clone().unwrap();
    let mut c = s.command(BELAY, &["launch", "--across-hosts", "--", "sh", "-c", script]);
    c.env("PATH", format!("{}:/usr/bin:/bin", bin.display()));
    c.stdout(out).stderr(err).spawn().unwrap()
}

fn number(s: &Scratch, file: &str) -> i32 {
    let read = || std::fs::read_to_string(s.0.join(file)).unwrap_or_default();
    wait_until(file, || read().ends_with('\n'));
    pid(&read().trim().parse().unwrap())
}

fn lives(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !stat.is_empty() && !stat.contains(") Z ")
}

#[test]
fn what_is_asked_for_a_standin_ends_with_it() {
    require_helpers();
    let s = Scratch::new("errands");
    // It never answers.
    let silent = ("scontrol", "echo $$ > asked; exec sleep 100000");
    let again = "ask() { srun -n 2 ./program & echo $! > standin; }; ask; while [ ! -e go ]; do sleep 0.01; done; ask; wait";
    let mut job = launch(&s, &[("srun", ""), silent], again);
    let (asked, standin) = (number(&s, "asked"), number(&s, "standin"));
    assert_failed(&s.belay(&["checkpoint"]), 81, "is being asked about the tasks of srun");
    kill(standin, libc::SIGKILL);
    wait_until("end of the stand-in", || !lives(standin));
    let o = s.belay(&["checkpoint"]);
    assert!(o.status.success(), "{o:?}");
    wait_until("end of what was asked", || !lives(asked));
    // The job is ended while another is under way.
    std::fs::remove_file(s.0.join("asked")).unwrap();
    s.go();
    let asked = number(&s, "asked");
    let o = s.belay(&["stop", "--grace", "0"]);
    assert!(o.status.success(), "{o:?}");
    assert!(!lives(asked));
    job.wait().unwrap();
}

#[test]
fn an_argument_that_is_no_text_is_refused() {
    use std::os::unix::process::ExitStatusExt;
    let s = Scratch::new("nottext");
    let mut job = launch(
        &s,
        &[("srun", "")],
        r#"srun -n 2 ./program "$(printf '\377')"; echo "status $?""#,
    );
    let status = job.wait().unwrap();
    assert_eq!((status.code(), status.signal()), (Some(0), None));
    let out = s.out();
    assert!(out.contains("status 255") && out.contains("is no UTF-8"), "{out}");
}
