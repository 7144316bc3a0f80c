//! Stand-ins for remote shells: what goes past them, when they are started, and how they end.

use super::*;

/// A daemon of MPI that no stand-in has started, be it by what does not look like a remote shell or by another daemon,
/// is named by the checkpoint, which is refused.
pub(super) fn past_standins(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "hosts-past-standins", 3, 3)?.unhurried();
    let program = job.program(place, "mpi/mpi_p2p")?;
    // A site's own remote shell, whose command line does not tell what it runs.
    let [own, shell] = ["own", "rsh/ssh"].map(|f| job.work.join(f));
    let script = format!(
        "#!/bin/sh\nhost=$1; shift; echo \"$@\" > {0}.$host; exec {1} $host sh {0}.$host\n",
        own.display(),
        shell.display()
    );
    let written =
        std::fs::write(&own, script).and_then(|()| std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o755)));
    written.map_err(|e| e.to_string())?;
    let run = job.mpirun(&program);
    for (agent, each, named) in [
        (own.display().to_string(), "64", "orterun is connected to 10.99.0."),
        // Each daemon starts the next one.
        ("rsh".into(), "1", "orted on another host (rsh h"),
    ] {
        let options = ["--mca", "plm_rsh_agent", &agent, "--mca", "routed_radix", each];
        let (first, rest) = run.split_at(1);
        let rest = rest.iter().map(String::as_str);
        let words: Vec<&str> = [first[0].as_str()].into_iter().chain(options).chain(rest).collect();
        job.launch_words(&words)?;
        let o = job.belay(&["checkpoint", "--quiet", &job.dir()])?;
        want(o.status.code() == Some(80) && text(&o).contains(named), || {
            format!("{agent}: {}: {}", show(o.status), text(&o))
        })?;
        job.crash();
        std::fs::remove_dir_all(job.dir()).map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// What mpirun has prepared before it starts anything would be missing on another host: a checkpoint waits for its
/// first child, and says so when that takes long.
pub(super) fn launcher_starts(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "hosts-starting", 1, 1)?;
    let (orterun, start) = (job.work.join("orterun"), job.work.join("start"));
    std::fs::copy("/bin/sh", &orterun).map_err(|e| e.to_string())?;
    let start = start.display().to_string();
    job.on_host(1, &["mkfifo", &start])?;
    // The shell itself reads, and has no child meanwhile.
    let script = format!("read x < {start}; while [ ! -e $BELAY_TEST_GO ]; do sleep 0.05; done; echo PASS");
    job.start_launch(&[&orterun.display().to_string(), "-c", &script])?;
    want(job.answers()?, || format!("it has ended: {}", job.said()))?;
    let o = job.belay(&["checkpoint", "--quiet", &job.dir()])?;
    let said = text(&o);
    want(
        o.status.code() == Some(80) && said.contains("orterun -c") && said.contains("is just starting"),
        || format!("a checkpoint at the start: {}: {said}", show(o.status)),
    )?;
    // Who waits gets one as soon as it can be taken.
    let mut waiting = job.command(1, &[&job.belay, "checkpoint", "--quiet", "--wait", &job.dir()]);
    let mut waiting = waiting.spawn().map_err(|e| e.to_string())?;
    std::thread::sleep(Duration::from_secs(2));
    want(waiting.try_wait().is_ok_and(|ended| ended.is_none()), || {
        "nobody waits".into()
    })?;
    job.on_host(1, &["sh", "-c", &format!("echo > {start}")])?;
    let status = waiting.wait().map_err(|e| e.to_string())?;
    want(status.success(), || {
        format!("the checkpoint that was waited for: {}", show(status))
    })?;
    job.verdict()
}

/// A stand-in ends when its remote shell has, also after a restart: what the shell prints after its part has ended
/// comes before what the program prints then.
pub(super) fn last_words(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::of(place, "hosts-last-words", Kind::C, 2, 3)?;
    let program = job.program(place, "net/net_alone")?;
    let [shell, real, go, beat] = ["rsh/ssh", "real", "go", "beat"].map(|f| job.work.join(f));
    let slow = format!(
        "#!/bin/sh\n{}/ssh \"$@\"; status=$?; sleep 2; echo last words; exit $status\n",
        real.display()
    );
    let replaced = std::fs::create_dir(&real)
        .and_then(|()| std::fs::rename(&shell, real.join("ssh")))
        .and_then(|()| std::fs::write(&shell, slow))
        .and_then(|()| std::fs::set_permissions(&shell, std::fs::Permissions::from_mode(0o755)));
    replaced.map_err(|e| format!("replace ssh: {e}"))?;
    let script = format!(
        "ssh h2 '{program} below {} {}; exit 7'; echo PASS after $?",
        go.display(),
        beat.display()
    );
    job.launch_words(&["sh", "-c", &script])?;
    job.checkpoint()?;
    job.crash();
    job.shift(1);
    job.restart_at(&[])?;
    std::fs::write(&go, "").map_err(|e| e.to_string())?;
    job.says("PASS net_alone below")?;
    // What restarts from a checkpoint of now would wait for a shell that nobody starts again.
    let mut refused = false;
    while !refused {
        let o = job.belay(&["checkpoint", "--quiet", &job.dir()])?;
        refused = o.status.code() == Some(80) && text(&o).contains("about to end with it");
        want(refused || o.status.success(), || text(&o))?;
    }
    job.verdict()?;
    let said = job.said();
    let at = |words: &str| said.find(words).ok_or_else(|| format!("no {words:?}: {said}"));
    want(at("last words")? < at("PASS after 7")?, || said.clone())
}

/// A signal for a stand-in goes on to its remote shell, which has been started at the launch or at a restart.
pub(super) fn signalled(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    for restarted in [false, true] {
        let mut job = Job::of(place, "hosts-signalled", Kind::C, 2, 3)?;
        let program = job.program(place, "net/net_alone")?;
        let [go, beat] = ["go", "beat"].map(|f| job.work.join(f));
        let command = format!("{program} below {} {}", go.display(), beat.display());
        job.launch_words(&["ssh", "h2", &command])?;
        if restarted {
            job.checkpoint()?;
            job.crash();
            job.shift(1);
            job.restart_at(&[])?;
            // A signal before that gives the restart up.
            want(job.answers()?, || "the job has ended".into())?;
        }
        signal(job.front_pid()?, libc::SIGTERM);
        let status = job.end()?;
        want(status.code() == Some(128 + libc::SIGTERM), || {
            format!("restarted: {restarted}; ended with {}: {}", show(status), job.said())
        })?;
        // Nobody has told the program on the other host to end.
        std::fs::write(&go, "").map_err(|e| e.to_string())?;
        job.comes_true("the program ends", || job.hosts_in_use().is_empty())?;
    }
    Ok(())
}

/// A remote shell has the environment and the directory of the process that called it, and the command the shell of the
/// user there, as without belay.
pub(super) fn like_native(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::of(place, "hosts-like-native", Kind::C, 2, 3)?;
    let program = job.program(place, "net/net_alone")?;
    let [rsh, shell, go, beat, seen, below] = ["rsh/rsh", "rsh/ssh", "go", "beat", "seen", "below"].map(|f| job.work.join(f));
    let told = format!(
        "#!/bin/sh\necho \"$MARK $PWD $PATH\" > {}\nhost=$1; shift\nexec {} $host \"SHELL=/bin/bash; export SHELL; $*\"\n",
        seen.display(),
        rsh.display()
    );
    let replaced = std::fs::create_dir(&below)
        .and_then(|()| std::fs::remove_file(&shell))
        .and_then(|()| std::fs::write(&shell, told))
        .and_then(|()| std::fs::set_permissions(&shell, std::fs::Permissions::from_mode(0o755)));
    io("replace ssh", replaced)?;
    let command = format!(
        "[[ ab == a* ]] && echo matched; {program} below {} {}",
        go.display(),
        beat.display()
    );
    let script = format!(
        "cd {}; PATH=$PATH:/mine; MARK=here; export PATH MARK; ssh h2 '{command}'",
        below.display()
    );
    job.launch_words(&["sh", "-c", &script])?;
    job.says("matched")?;
    let seen = io("read what ssh saw", std::fs::read_to_string(&seen))?;
    let native = seen.starts_with(&format!("here {} ", below.display())) && seen.ends_with(":/mine\n");
    want(native && !seen.contains("standins"), || format!("ssh saw {seen}"))?;
    job.checkpoint()?;
    job.crash();
    job.shift(1);
    job.restart_at(&[])?;
    job.verdict()
}

/// What tells a stand-in of its remote shell's end is not lost behind a signal of the same kind that somebody else has sent.
pub(super) fn farewell(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::of(place, "hosts-farewell", Kind::C, 2, 2)?;
    let program = job.program(place, "net/net_alone")?;
    let [go, beat] = ["go", "beat"].map(|f| job.work.join(f));
    let command = format!("{program} below {} {}", go.display(), beat.display());
    job.launch_words(&["ssh", "h2", &command])?;
    let is_standin = |pid: &i32| std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.starts_with(b"ssh\0h2\0"));
    let standins: Vec<i32> = job.hosts.find(1, "ssh h2").into_iter().filter(is_standin).collect();
    want(standins.len() == 1, || format!("stand-ins: {standins:?}"))?;
    for number in [libc::SIGSTOP, libc::SIGUSR1] {
        signal(standins[0], number);
    }
    io("let the program end", std::fs::write(&go, ""))?;
    job.comes_true("the program ends", || {
        job.hosts.find(2, "net_alone").is_empty() && job.hosts.find(2, "program").is_empty()
    })?;
    job.comes_true("the shell ends", || job.hosts.find(1, "rsh/ssh").is_empty())?;
    signal(standins[0], libc::SIGCONT);
    let status = job.end()?;
    want(status.success(), || format!("ended with {}: {}", show(status), job.said()))
}
