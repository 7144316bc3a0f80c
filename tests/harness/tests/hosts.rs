//! Jobs over several hosts: Open MPI and MPICH through ssh, checkpointed at random moments, killed everywhere,
//! restarted on the same and on other hosts.
//!
//! BELAY_HOSTS_ROUNDS (3) restarts in each test.

use belay_tests::across::{files, Job};
use belay_tests::build::Kind;
use belay_tests::expect::{io, metric, want};
use belay_tests::job::{show, text};
use belay_tests::outcome::take_unless_ended;
use belay_tests::place::{Place, User, NOBODY};
use belay_tests::procs::signal;
use belay_tests::rng::Rng;
use belay_tests::runner::until_hit;
use belay_tests::s3::Server;
use belay_tests::target::{or_end, Target};
use belay_tests::Failure;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

#[path = "hosts/durable.rs"]
mod durable;
#[path = "hosts/listening.rs"]
mod listening;
#[path = "hosts/local.rs"]
mod local;
#[path = "hosts/parts.rs"]
mod parts;
#[path = "hosts/relays.rs"]
mod relays;
#[path = "hosts/standins.rs"]
mod standins;

fn rounds_wanted() -> usize {
    let count = std::env::var("BELAY_HOSTS_ROUNDS").ok();
    count.and_then(|v| v.parse().ok()).unwrap_or(3)
}

/// Rounds of checkpoint, crash and restart of a job on `used` of `all` hosts; each restart moves every part to the next host.
fn rounds(place: &Place, name: &str, used: usize, all: usize, rng: &mut Rng) -> Result<(), Failure> {
    rounds_of(place, Kind::OpenMpi, name, used, all, rng)
}

fn rounds_of(place: &Place, kind: Kind, name: &str, used: usize, all: usize, rng: &mut Rng) -> Result<(), Failure> {
    let label = format!("hosts-{}{}", name.replace('/', "-"), kind.suffix());
    let mut job = Job::of(place, &label, kind, used, all)?;
    let program = job.program(place, name)?;
    job.launch(&program)?;
    for n in 0..rounds_wanted() {
        std::thread::sleep(Duration::from_millis(rng.below(700)));
        job.checkpoint().map_err(|e| format!("round {n}: {e}"))?;
        std::thread::sleep(Duration::from_millis(rng.below(300)));
        job.crash();
        let restarted = if used == all {
            job.restart(&[])
        } else {
            job.shift(n + 1);
            job.restart_at(&[])
        };
        restarted.map_err(|e| format!("round {n}: restart: {e}"))?;
        let at = job.hosts_in_use();
        want(BTreeSet::from_iter(job.at.clone()).into_iter().eq(at.clone()), || {
            format!("round {n}: the job is on hosts {at:?}, not {:?}", job.at)
        })?;
    }
    job.verdict()
}

/// Two parts on one host share memory, which each would restore for itself: the checkpoint is refused, and they go on.
fn shared_memory(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "hosts-memory", 2, 2)?;
    let program = job.program(place, "net/net_memory")?;
    let object = format!("/belay-test-{}", std::process::id());
    let ended = job.launch_words(&[&program, "start", "h2", &object]).and_then(|()| {
        job.says("0 shares").and_then(|()| job.says("1 shares"))?;
        let code = Cell::new(None);
        let taking = || {
            job.belay(&["checkpoint", "--quiet", &job.dir()])
                .inspect(|o| code.set(o.status.code()))
        };
        let said = take_unless_ended(taking, || Ok(false)).err().unwrap_or_default();
        want(
            code.get() == Some(80) && said.contains(&object) && said.contains("shares this memory"),
            || format!("the checkpoint: {said}"),
        )?;
        job.progress().and_then(|()| job.verdict())
    });
    drop(std::fs::remove_file(format!("/dev/shm{object}")));
    ended
}

/// The launcher is told to use another remote shell.
fn by_rsh(place: &Place, kind: Kind, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::of(place, &format!("hosts-rsh{}", kind.suffix()), kind, 2, 4)?;
    let program = job.program(place, "mpi/mpi_p2p")?;
    let mut words = job.mpirun(&program);
    match kind {
        Kind::Mpich => words.iter_mut().filter(|w| *w == "ssh").for_each(|w| "rsh".clone_into(w)),
        _ => drop(words.splice(1..1, ["--mca", "plm_rsh_agent", "rsh"].map(str::to_owned))),
    }
    job.launch_words(&words.iter().map(String::as_str).collect::<Vec<_>>())?;
    job.settle()?;
    std::thread::sleep(Duration::from_millis(rng.below(500)));
    job.checkpoint()?;
    job.crash();
    job.shift(2);
    job.restart_at(&[])?;
    let shells = job.hosts.find(job.at[0], "/rsh/rsh ");
    want(!shells.is_empty(), || "rsh has not started the other part".into())?;
    job.verdict()
}

/// Connections to addresses of before several restarts, which move both processes, the first time to where other
/// programs have taken the ports.
fn late_connections(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "hosts-late", 2, 4)?;
    let program = job.program(place, "net/net_late")?;
    let (ports, ready) = (job.work.join("ports"), job.work.join("ready"));
    job.launch_words(&[&program, "serve", "10.99.0.1", "h2", &ports.display().to_string()])?;
    for n in 0..3 {
        std::thread::sleep(Duration::from_millis(rng.below(100)));
        job.checkpoint().map_err(|e| format!("round {n}: {e}"))?;
        job.crash();
        let mut squatter = None;
        if n == 0 {
            let taken = std::fs::read_to_string(&ports).map_err(|e| e.to_string())?;
            let ready = ready.display().to_string();
            let words: Vec<&str> = [&program, "squat", &ready]
                .into_iter()
                .chain(taken.split_whitespace())
                .collect();
            squatter = Some(job.command(2, &words).spawn().map_err(|e| e.to_string())?);
            job.comes_true("the ports are taken", || Path::new(&ready).exists())?;
        }
        job.shift(n + 1);
        job.restart_at(&[]).map_err(|e| format!("round {n}: restart: {e}"))?;
        if let Some(mut squatter) = squatter {
            // A crash that comes kills it too.
            if squatter.try_wait().map_err(|e| e.to_string())?.is_some() {
                return Err("the program that had taken the ports has ended".into());
            }
            std::thread::spawn(move || squatter.wait());
        }
    }
    job.verdict()
}

/// Three parts (with mpirun's) come back on two hosts, on one, and again on three of the four.
fn other_numbers(place: &Place, kind: Kind, name: &str, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::of(place, &format!("hosts-numbers{}", kind.suffix()), kind, 3, 4)?;
    let program = job.program(place, name)?;
    job.launch(&program)?;
    let file = job.work.join("hostfile");
    std::fs::write(&file, "# spares last\nh2 slots=1\nh3\nh1:4\n").map_err(|e| e.to_string())?;
    let file = file.display().to_string();
    let places: [(usize, [&str; 2], &[usize]); 3] = [
        (1, ["--hosts", "h2"], &[1, 2]),
        (3, ["--hosts", "h3"], &[3]),
        (4, ["--hostfile", &file], &[2, 3, 4]),
    ];
    for (root, hosts, used) in places {
        std::thread::sleep(Duration::from_millis(rng.below(300)));
        job.checkpoint().map_err(|e| format!("before {hosts:?}: {e}"))?;
        job.crash();
        job.at[0] = root;
        job.restart(&hosts).map_err(|e| format!("{hosts:?}: restart: {e}"))?;
        // What the job opens now goes where everything is now.
        (0..5).try_for_each(|_| job.progress())?;
        let at = job.hosts_in_use();
        want(at == used, || format!("{hosts:?}: the job is on hosts {at:?}"))?;
    }
    job.verdict()
}

/// Parts that share a host now open connections, and who accepts them must know from whom they are.
fn packed(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "hosts-packed", 4, 4)?;
    let program = job.program(place, "mpi/mpi_lazy")?;
    job.launch(&program)?;
    // Three of the four parts on one host, and all on one.
    for (root, host) in [(1, "h2"), (3, "h3")] {
        std::thread::sleep(Duration::from_millis(rng.below(300)));
        job.checkpoint()?;
        job.crash();
        job.at[0] = root;
        job.restart(&["--hosts", host]).map_err(|e| format!("{host}: restart: {e}"))?;
        job.progress()?;
    }
    job.verdict()
}

/// A job that is killed while it is being started, its daemons, the ranks, of which one comes late, MPI_Init, and
/// restarted on other hosts, where it is killed once more: what was started there knows other addresses than what was
/// started before.
fn starts(place: &Place, kind: Kind, name: &str, used: usize, rng: &mut Rng) -> Result<(), Failure> {
    for round in 0..rounds_wanted() {
        let label = format!("hosts-starts-{used}{}", kind.suffix());
        let mut job = Job::of(place, &label, kind, used, 3 * used)?;
        let program = job.program(place, name)?;
        let words = job.mpirun(&late(&job, &program)?);
        job.start_launch(&words.iter().map(String::as_str).collect::<Vec<_>>())?;
        want(job.answers()?, || format!("round {round}: ended: {}", job.said()))?;
        let ms = rng.below(1500);
        std::thread::sleep(Duration::from_millis(ms));
        for restart in 1..=2 {
            let at = |e| format!("round {round}, {ms} ms after the start, restart {restart}: {e}");
            want(job.take().map_err(at)?, || at(format!("ended: {}", job.said())))?;
            job.crash();
            job.shift(restart * used);
            job.restart_at(&[]).map_err(at)?;
            std::thread::sleep(Duration::from_millis(rng.below(200)));
        }
        job.settle()
            .and_then(|()| job.verdict())
            .map_err(|e| format!("round {round}, {ms} ms after the start: {e}"))?;
    }
    Ok(())
}

/// A job that is checkpointed at some moment of the first two seconds, and restarted where it was or with all its parts
/// on one host: what is started there later is as what was there before, and stays apart from the other part.
fn begins(place: &Place, user: User, kind: Kind, rng: &mut Rng) -> Result<(), Failure> {
    for round in 0..rounds_wanted() {
        let label = format!("hosts-begins-{}{}", user.name(), kind.suffix());
        let mut job = Job::by(user, place, &label, kind, 2, 3)?;
        let program = job.program(place, "mpi/mpi_p2p")?;
        let words = job.mpirun(&late(&job, &program)?);
        job.start_launch(&words.iter().map(String::as_str).collect::<Vec<_>>())?;
        want(job.answers()?, || format!("round {round}: ended: {}", job.said()))?;
        let (ms, together) = (rng.below(2000), rng.below(3) > 0);
        std::thread::sleep(Duration::from_millis(ms));
        let at = |e| format!("round {round}, {ms} ms after the start, together: {together}: {e}");
        want(job.take().map_err(at)?, || at(format!("ended: {}", job.said())))?;
        job.crash();
        job.at = if together { vec![3, 3] } else { vec![1, 2] };
        job.restart_at(&[])
            .and_then(|()| job.settle())
            .and_then(|()| job.verdict())
            .map_err(at)?;
        // Ranks of before and after the restart see the same namespaces.
        want(!job.said().contains("CMA is not available"), || at(job.said()))?;
    }
    Ok(())
}

/// Programs that a part starts see the same host, namespaces and shared memory after restarts with the other part on
/// one host as before.
fn identity(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::by(user, place, &format!("hosts-identity-{}", user.name()), Kind::C, 2, 3)?;
    if user == User::Root {
        // Test hosts have one kernel. (Where a part of /proc is hidden, an ordinary user cannot restart.)
        let other = "echo another > /tmp/boot; mount --bind /tmp/boot /proc/sys/kernel/random/boot_id";
        job.on_host(2, &["sh", "-c", other])?;
    }
    let seen = |part: usize| job.work.join(format!("seen.{part}"));
    let seen = [seen(1), seen(2)];
    let look = |part: usize| {
        // The shell is older than what it starts. Of two looks a restart on a host with other numbers may lie in the middle of one.
        format!(
            "exec 5< /proc/sys/kernel/random/boot_id; numbers() {{ stat -Lc %i /proc/$1/ns/user /proc/$1/ns/ipc /proc/$1/ns/pid; }}; while [ ! -e {go} ]; do touch /dev/shm/part.{part}; \
             [ \"$(numbers self)\" = \"$(numbers $$)\" ] || [ \"$(numbers self)\" = \"$(numbers $$)\" ]; status=$?; echo $(hostname) $status $(cat /proc/sys/kernel/random/boot_id) $(ls /dev/shm | grep -v part.{part}) >> {seen}; sleep 0.02; done; cat <&5 > {seen}.open",
            go = job.work.join("go").display(),
            seen = seen[part - 1].display()
        )
    };
    let own = |part: usize| job.work.join(format!("look.{part}"));
    for part in 1..=2 {
        std::fs::write(own(part), look(part)).map_err(|e| e.to_string())?;
    }
    let script = format!("sh {} & ssh h2 sh {}; wait; echo PASS", own(1).display(), own(2).display());
    job.start_launch(&["sh", "-c", &script])?;
    let lines = |part: usize| -> Vec<String> {
        let text = std::fs::read_to_string(&seen[part]).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    };
    let more = |job: &mut Job, than: usize| {
        job.comes_true("both parts look again", || (0..2).all(|part| lines(part).len() > than + 20))?;
        Ok::<_, Failure>(())
    };
    more(&mut job, 0)?;
    for at in [[3, 3], [2, 2], [1, 2]] {
        std::thread::sleep(Duration::from_millis(rng.below(100)));
        want(job.take()?, || format!("ended: {}", job.said()))?;
        job.crash();
        job.at = at.to_vec();
        let before = lines(0).len().max(lines(1).len());
        job.start_restart()?;
        more(&mut job, before)?;
        for part in 0..2 {
            let all: BTreeSet<String> = lines(part).into_iter().collect();
            want(all.len() == 1, || format!("{at:?}: part {part} has seen {all:?}"))?;
        }
    }
    job.verdict()?;
    // What was open all the time, and is read now.
    for (part, all) in seen.iter().enumerate() {
        let open = std::fs::read_to_string(format!("{}.open", all.display())).map_err(|e| e.to_string())?;
        let boot = open.trim_end();
        want(lines(part)[0].contains(boot) && !boot.is_empty(), || {
            format!("part {part} reads {open:?}")
        })?;
    }
    Ok(())
}

/// A program that becomes `program`, as rank 1 only after a while.
fn late(job: &Job, program: &str) -> Result<String, Failure> {
    let late = job.work.join("late");
    let script = format!("#!/bin/sh\n[ \"${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}\" != 1 ] || sleep 0.7\nexec {program}\n");
    let written = std::fs::write(&late, script);
    written
        .and_then(|()| std::fs::set_permissions(&late, std::fs::Permissions::from_mode(0o755)))
        .map_err(|e| e.to_string())?;
    Ok(late.display().to_string())
}

/// What the agents of the parts say of a checkpoint, in their own words, is in the numbers that the root tells; also
/// after a restart on other hosts.
fn numbers(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "hosts-numbers-told", 3, 4)?;
    let program = job.program(place, "mpi/mpi_p2p")?;
    let file = job.work.join("job.prom");
    let metrics = format!("file:{}", file.display());
    job.options = ["--differential", "off", "--metrics", &metrics].map(str::to_owned).to_vec();
    job.launch(&program)?;
    for n in 0..2 {
        std::thread::sleep(Duration::from_millis(rng.below(300)));
        job.checkpoint()?;
        let newest = |part: usize| {
            let said = job.on_host(job.at[part], &[&job.belay, "list", "--json", &job.dir_of(part)])?;
            let list: serde_json::Value = serde_json::from_str(&said).map_err(|e| format!("{e}: {said}"))?;
            let newest = list["generations"].as_array().and_then(|all| all.last()).cloned();
            newest.ok_or(format!("no generation: {said}"))
        };
        // The root's list counts all hosts, that of a part what is there.
        let all = newest(0)?;
        let of = |g: &serde_json::Value, field: &str| g[field].as_f64().ok_or(format!("no {field}: {g}"));
        let (new, size, ranks) = (of(&all, "new_bytes")?, of(&all, "bytes")?, of(&all, "ranks")?);
        let mut blocked = of(&all, "blocked_ms")? / 1e3;
        let doc = job.on_host(job.at[0], &[&job.belay, "status", "--json", &job.dir()])?;
        let doc: serde_json::Value = serde_json::from_str(&doc).map_err(|e| format!("{e}: {doc}"))?;
        let (mut told, mut on) = (0.0, BTreeSet::new());
        for part in 0..3 {
            on.insert(job.on_host(job.at[part], &["hostname"])?.trim().to_owned());
            let share = &all["hosts"][part];
            let live = doc["processes"].as_array().into_iter().flatten();
            let live = live.filter(|p| p["host"] == share["host"] && p["part"] == part).count() as f64;
            let own = if part == 0 {
                of(share, "ranks")?
            } else {
                let g = newest(part)?;
                blocked = blocked.max(of(&g, "blocked_ms")? / 1e3);
                of(&g, "ranks")?
            };
            told += own;
            want(share["ranks"].as_f64() == Some(own) && live == own, || {
                format!("round {n}: part {part} has {own} processes, of which the status shows {live}: {share}: {doc}")
            })?;
        }
        let shares = all["hosts"].as_array().into_iter().flatten();
        let listed: BTreeSet<String> = shares.filter_map(|h| Some(h["host"].as_str()?.to_owned())).collect();
        want(listed == on, || format!("round {n}: on {on:?}, not {listed:?}"))?;
        want(told == ranks && doc["unheard"].is_null(), || {
            format!("round {n}: {told} of {ranks} processes: {doc}")
        })?;
        // The parts are told not to look for what is stored already.
        want(new > 0.8 * size, || format!("round {n}: {new} bytes are new of {size}"))?;
        let text = std::fs::read_to_string(&file).map_err(|e| e.to_string())?;
        for (name, expected) in [
            ("belay_parts", 3.0),
            ("belay_processes", ranks),
            ("belay_written_bytes_total", new),
            ("belay_newest_generation_size_bytes", size),
            ("belay_checkpoint_blocked_seconds_sum", blocked),
        ] {
            let told = metric(&text, name, "")?;
            // Times travel in microseconds.
            want((told - expected).abs() < 1e-5, || {
                format!("round {n}: {name} is {told}, the parts say {expected}:\n{text}")
            })?;
        }
        let resident = metric(&text, "belay_resident_bytes", "")?;
        want(
            resident > 3.0 * 1e6 && metric(&text, "belay_stored_bytes", "")? >= size,
            || text,
        )?;
        job.crash();
        job.shift(n + 1);
        job.restart_at(&[]).map_err(|e| format!("round {n}: restart: {e}"))?;
    }
    job.verdict()
}

/// A job of an ordinary user's comes back on two other hosts, then on one that nobody has used.
fn of_a_user(place: &Place, kind: Kind, name: &str, rng: &mut Rng) -> Result<(), Failure> {
    let label = format!("hosts-user{}", kind.suffix());
    let mut job = Job::by(User::Ordinary, place, &label, kind, 2, 5)?;
    let program = job.program(place, name)?;
    job.launch(&program)?;
    for at in [[3, 4], [5, 5]] {
        std::thread::sleep(Duration::from_millis(rng.below(700)));
        let taken = job.take().map_err(|e| format!("before {at:?}: {e}"))?;
        want(taken, || format!("before {at:?}: ended: {}", job.said()))?;
        job.crash();
        job.at = at.to_vec();
        job.restart_at(&[]).map_err(|e| format!("{at:?}: restart: {e}"))?;
        job.progress()?;
        want(
            job.hosts_in_use() == BTreeSet::from(at).into_iter().collect::<Vec<_>>(),
            || format!("{at:?}: the job is on hosts {:?}", job.hosts_in_use()),
        )?;
        let ranks = job.hosts.find(at[1], &program);
        let namespace = |pid: i32| std::fs::read_link(format!("/proc/{pid}/ns/user")).ok();
        let owner = |pid: i32| std::fs::metadata(format!("/proc/{pid}")).map(|m| m.uid()).ok();
        let own = std::process::id().cast_signed();
        let confined = ranks
            .iter()
            .all(|p| owner(*p) == Some(NOBODY) && namespace(*p) != namespace(own));
        want(!ranks.is_empty() && confined, || {
            format!("{at:?}: not the user's, in a user namespace: {ranks:?}")
        })?;
    }
    job.verdict()
}

fn main() {
    let mut target = Target::over_hosts("hosts");
    or_end(Server::prepare(target.place()));
    type Run = fn(&Place, &mut Rng) -> Result<(), Failure>;
    let tests: [(&str, Run); 56] = [
        ("same_hosts::mpi_p2p", |p, r| rounds(p, "mpi/mpi_p2p", 2, 2, r)),
        ("same_hosts::mpi_cg", |p, r| rounds(p, "mpi/mpi_cg", 2, 2, r)),
        ("other_hosts::mpi_p2p", |p, r| rounds(p, "mpi/mpi_p2p", 2, 3, r)),
        ("three_hosts::mpi_alltoall", |p, r| rounds(p, "mpi/mpi_alltoall", 3, 4, r)),
        ("four_hosts::mpi_p2p", |p, r| rounds(p, "mpi/mpi_p2p", 4, 5, r)),
        ("mpich::same_hosts::mpi_p2p", |p, r| {
            rounds_of(p, Kind::Mpich, "mpi/mpi_p2p", 2, 2, r)
        }),
        ("mpich::other_hosts::mpi_cg", |p, r| {
            rounds_of(p, Kind::Mpich, "mpi/mpi_cg", 2, 3, r)
        }),
        ("mpich::four_hosts::mpi_p2p", |p, r| {
            rounds_of(p, Kind::Mpich, "mpi/mpi_p2p", 4, 5, r)
        }),
        ("other_numbers::mpi_alltoall", |p, r| {
            other_numbers(p, Kind::OpenMpi, "mpi/mpi_alltoall", r)
        }),
        ("mpich::other_numbers::mpi_p2p", |p, r| {
            other_numbers(p, Kind::Mpich, "mpi/mpi_p2p", r)
        }),
        ("rsh", |p, r| by_rsh(p, Kind::OpenMpi, r)),
        ("mpich::rsh", |p, r| by_rsh(p, Kind::Mpich, r)),
        ("late_connections::net_late", late_connections),
        ("late_connections::mpi_lazy", |p, r| rounds(p, "mpi/mpi_lazy", 4, 5, r)),
        ("late_connections::packed", packed),
        ("user::mpi_p2p", |p, r| of_a_user(p, Kind::OpenMpi, "mpi/mpi_p2p", r)),
        ("user::mpich::mpi_cg", |p, r| of_a_user(p, Kind::Mpich, "mpi/mpi_cg", r)),
        ("relays::chain", |p, r| relays::rounds(p, 1, r)),
        ("relays::two_each", |p, r| relays::rounds(p, 2, r)),
        ("listening::where_reached", listening::where_reached),
        ("listening::configured", listening::configured),
        ("shared_memory", shared_memory),
        ("numbers", numbers),
        ("past_standins", standins::past_standins),
        ("launcher_starts", standins::launcher_starts),
        ("last_words", standins::last_words),
        ("signalled", standins::signalled),
        ("like_native", standins::like_native),
        ("farewell", standins::farewell),
        ("starts::mpi_p2p", |p, r| starts(p, Kind::OpenMpi, "mpi/mpi_p2p", 2, r)),
        ("starts::mpi_lazy", |p, r| starts(p, Kind::OpenMpi, "mpi/mpi_lazy", 4, r)),
        ("mpich::starts::mpi_p2p", |p, r| starts(p, Kind::Mpich, "mpi/mpi_p2p", 2, r)),
        ("identity::root", |p, r| identity(p, User::Root, r)),
        ("identity::user", |p, r| identity(p, User::Ordinary, r)),
        ("begins::root", |p, r| begins(p, User::Root, Kind::OpenMpi, r)),
        ("begins::user", |p, r| begins(p, User::Ordinary, Kind::OpenMpi, r)),
        ("begins::mpich::root", |p, r| begins(p, User::Root, Kind::Mpich, r)),
        ("begins::mpich::user", |p, r| begins(p, User::Ordinary, Kind::Mpich, r)),
        ("parts::verify", parts::verify),
        ("parts::gc", parts::gc),
        ("parts::damaged", parts::damaged),
        ("parts::ended", parts::ended),
        ("parts::unaware", parts::unaware),
        ("parts::suspended", parts::suspended),
        ("durable", durable::directory),
        ("durable_objects", durable::objects),
        ("durable_server_lost", durable::server_lost),
        ("local::restarts::root", |p, r| local::restarts(p, User::Root, r)),
        ("local::restarts::user", |p, r| local::restarts(p, User::Ordinary, r)),
        ("local::host_gone", local::host_gone),
        ("local::host_dies", local::host_dies),
        ("local::durable", local::durable),
        ("local::small_and_killed", local::small_and_killed),
        ("local::shared", local::shared),
        ("local::not_there", local::not_there),
        ("local::moved_twice", local::moved_twice),
    ];
    for (name, test) in tests {
        target.once(name, test);
    }
    target.at_a_time(3);
    target.first(&["durable_server_lost", "durable_objects", "local::host_dies"]);
    target.run();
}
