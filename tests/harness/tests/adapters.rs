//! Programs of the verbs under belay, on the stand-in for libibverbs: whenever they are checkpointed, and wherever they
//! come back, their own checks find nothing.

#[path = "adapters/checks.rs"]
mod checks;
#[path = "adapters/pairs.rs"]
mod pairs;

use belay_tests::build::{build, Kind};
use belay_tests::expect::want;
use belay_tests::fabric::{Fabric, ON_HOSTS, WITH_DEVICE};
use belay_tests::job::{show, text, Job};
use belay_tests::place::{am_root, with_devices, Place, User};
use belay_tests::rng::Rng;
use belay_tests::runner::rounds;
use belay_tests::target::Target;
use belay_tests::Failure;
use std::net::TcpListener;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(90);

/// A job on a fabric of its own.
struct Run {
    fabric: Fabric,
    job: Job,
    /// How the fabric is started.
    options: Vec<String>,
}

/// What is run, and where its ranks are in each epoch of the fabric: pairs of a rank's host and the host on which it is.
struct Case<'a> {
    words: &'a [&'a str],
    options: &'a [&'a str],
    gid: Option<&'a str>,
    moves: [&'a [(&'a str, &'a str)]; 3],
}

impl<'a> Case<'a> {
    fn of(words: &'a [&'a str], options: &'a [&'a str]) -> Self {
        Case {
            words,
            options,
            gid: None,
            moves: [&[]; 3],
        }
    }
}

impl Run {
    /// Starts a program, which must come so far that it beats.
    fn new(place: &Place, user: User, case: &Case) -> Result<Self, Failure> {
        let words = case.words;
        let label = format!("adapters-{}", words.join("-"));
        let fabric = Fabric::new(place, &format!("{label}-fabric"), user, case.options)?;
        let mut job = Job::new(place, &label, user)?;
        // There may be any number of rounds.
        job.set("BELAY_TEST_LONG", "1");
        for (name, value) in fabric.environment() {
            job.set(name, &value.display().to_string());
        }
        if let Some(gid) = case.gid {
            job.set("VERBS_GID", gid);
        }
        let program = build(place, &format!("verbs/{}", words[0]), Kind::Verbs)?
            .display()
            .to_string();
        let argv: Vec<String> = std::iter::once(program)
            .chain(words[1..].iter().map(|w| (*w).to_owned()))
            .collect();
        let config = with_library(&job)?;
        for (from, to) in case.moves[0] {
            fabric.ask("move", &[from, to])?;
        }
        job.launch(&["--config".into(), config], &argv)?;
        let options = case.options.iter().map(|o| (*o).to_owned()).collect();
        let mut run = Self { fabric, job, options };
        run.job.progress(LIMIT)?;
        Ok(run)
    }

    /// Lets it run for a moment, so that each checkpoint finds it somewhere else.
    fn a_moment(rng: &mut Rng) {
        std::thread::sleep(Duration::from_micros(rng.below(40_000)));
    }

    /// Two checkpoints and progress after each.
    fn checkpoints(&mut self, rng: &mut Rng, count: u64) -> Result<(), Failure> {
        for _ in 0..count {
            Self::a_moment(rng);
            self.job.checkpoint()?;
            self.job.progress(LIMIT)?;
        }
        Ok(())
    }

    /// Killed after a checkpoint, it comes back where every host has another address, and all have other numbers.
    fn comes_back(&mut self, rng: &mut Rng, moves: &[(&str, &str)]) -> Result<(), Failure> {
        self.checkpoints(rng, 1)?;
        Self::a_moment(rng);
        self.job.kill_all()?;
        let options: Vec<&str> = self.options.iter().map(String::as_str).collect();
        self.fabric.again(&options)?;
        for (from, to) in moves {
            self.fabric.ask("move", &[from, to])?;
        }
        self.job.clear_beat()?;
        self.job.restart(&[])?;
        self.job.progress(LIMIT)
    }

    fn ends_well(mut self) -> Result<(), Failure> {
        self.job.verdict(false, LIMIT)?;
        let left = self.fabric.counter("overruns")?;
        if left == 0 {
            Ok(())
        } else {
            Err(format!("{left} completion queues were overrun"))
        }
    }
}

/// A configuration with the library, in the job's work directory.
fn with_library(job: &Job) -> Result<String, Failure> {
    let config = job.work.join("belay.toml");
    let text = "[verbs]\nenable = \"on\"\n[gate]\nlimit = \"30s\"\n";
    std::fs::write(&config, text).map_err(|e| format!("write {}: {e}", config.display()))?;
    Ok(config.display().to_string())
}

const PROGRAMS: [&[&str]; 7] = [
    &["verbs_rc", "3"],
    &["verbs_rc", "3", "event"],
    &["verbs_rc", "3", "ex"],
    &["verbs_rc", "3", "srq", "event"],
    &["verbs_rc", "4", "event", "ex", "srq"],
    &["verbs_ud", "3"],
    &["verbs_ud", "3", "event", "mcast"],
];

/// Checkpoints at any moment, after which the program goes on.
fn goes_on(place: &Place, user: User, rng: &mut Rng, faults: &[&str]) -> Result<(), Failure> {
    for words in PROGRAMS {
        let mut run = Run::new(place, user, &Case::of(words, faults))?;
        let step = run.checkpoints(rng, rounds(6));
        step.and_then(|()| run.ends_well()).map_err(|e| format!("{words:?}: {e}"))?;
    }
    Ok(())
}

const FAULTS: [&str; 6] = [
    "latency_us=100",
    "jitter_us=200",
    "ack_drop=10",
    "retry_us=2000",
    "rnr=10",
    "ud_drop=10",
];

/// Killed and restarted, twice or more often.
fn twice(place: &Place, user: User, rng: &mut Rng, case: &Case) -> Result<(), Failure> {
    let mut run = Run::new(place, user, case)?;
    let mut step = || -> Result<(), Failure> {
        for _ in 0..rounds(1) {
            run.comes_back(rng, case.moves[1])?;
            run.checkpoints(rng, 2)?;
            run.comes_back(rng, case.moves[2])?;
        }
        Ok(())
    };
    let moves = case.moves;
    step()
        .and_then(|()| run.ends_well())
        .map_err(|e| format!("{:?} {:?} {moves:?}: {e}", case.words, case.gid))
}

fn comes_back(place: &Place, user: User, rng: &mut Rng, faults: &[&str]) -> Result<(), Failure> {
    PROGRAMS
        .iter()
        .try_for_each(|words| twice(place, user, rng, &Case::of(words, faults)))
}

/// With queue pairs, regions and address handles that are made after a restart.
const RENEWING: [&[&str]; 3] = [
    &["verbs_rc", "3", "event", "renew"],
    &["verbs_rc", "3", "srq", "ex", "renew"],
    &["verbs_ud", "3", "mcast", "renew"],
];

/// Hosts that change places, come together, and part again.
fn comes_back_elsewhere(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let swapped: &[_] = &[("host0", "host1"), ("host1", "host0")];
    let merged: &[_] = &[("host1", "host0"), ("host2", "host0")];
    let other: &[_] = &[("host0", "host9"), ("host2", "host1")];
    for words in RENEWING {
        for moves in [[&[], swapped, merged], [merged, &[], other], [other, merged, swapped]] {
            twice(
                place,
                user,
                rng,
                &Case {
                    moves,
                    ..Case::of(words, &[])
                },
            )?;
        }
    }
    Ok(())
}

/// Connections by librdmacm, in every state.
fn managed(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let swapped: &[_] = &[("host0", "host1"), ("host1", "host0")];
    let merged: &[_] = &[("host1", "host0")];
    let faults: &[_] = &["--roce", "latency_us=100", "jitter_us=200", "ack_drop=5", "retry_us=2000"];
    for (options, moves) in [
        (&[][..], [&[][..], swapped, merged]),
        (&["--roce"], [merged, &[], swapped]),
        (faults, [&[], merged, swapped]),
    ] {
        let port = pairs::free_port()?.to_string();
        let words = ["verbs_cm", &port];
        let case = Case {
            moves,
            ..Case::of(&words, options)
        };
        twice(place, user, rng, &case)?;
    }
    Ok(())
}

/// Requests for which the program does not ask keep no checkpoint out, and are there after a restart.
fn unheard(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let port = pairs::free_port()?.to_string();
    let words = ["verbs_cm_rules", "unheard", &port];
    let mut run = Run::new(place, user, &Case::of(&words, &[]))?;
    run.checkpoints(rng, 2)?;
    run.comes_back(rng, &[])?;
    run.ends_well()
}

/// Addresses of every kind: GIDs of InfiniBand, and those of RoCE.
fn comes_back_by_gid(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let merged: &[_] = &[("host1", "host0"), ("host2", "host0")];
    for words in RENEWING {
        let gid = Some("0");
        twice(
            place,
            user,
            rng,
            &Case {
                gid,
                ..Case::of(words, &[])
            },
        )?;
    }
    for (i, gid) in ["0", "1", "2", "3", "2"].into_iter().enumerate() {
        let moves: [&[_]; 3] = [&[], merged, &[]];
        let case = Case {
            gid: Some(gid),
            moves,
            ..Case::of(RENEWING[i % RENEWING.len()], &["--roce"])
        };
        twice(place, user, rng, &case)?;
    }
    Ok(())
}

/// Connected to a process outside the job: refused by name, and both go on. What cannot be made again is not offered.
fn refuses(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let fabric = Fabric::new(place, "adapters-refuses-fabric", user, &[])?;
    let port = TcpListener::bind("127.0.0.1:0")
        .and_then(|l| l.local_addr())
        .map_err(|e| e.to_string())?;
    let mut job = Job::new(place, "adapters-refuses", user)?;
    for (name, value) in fabric.environment() {
        job.set(name, &value.display().to_string());
    }
    let rank = |n: u32| {
        [
            ("VERBS_ROOT", port.to_string()),
            ("VERBS_SIZE", "2".into()),
            ("VERBS_RANK", n.to_string()),
            ("FAKE_VERBS_HOST", format!("host{n}")),
        ]
    };
    let program = build(place, "verbs/verbs_rc", Kind::Verbs)?.display().to_string();
    let mut outside = job.command(std::slice::from_ref(&program));
    let mut outside = outside.envs(rank(1)).spawn().map_err(|e| format!("{program}: {e}"))?;
    rank(0).iter().for_each(|(name, value)| job.set(name, value));
    let config = with_library(&job)?;
    job.launch(&["--config".into(), config], &[program])?;
    job.progress(LIMIT)?;
    let o = job.checkpoint_raw(&[])?;
    let said = text(&o);
    want(
        o.status.code() == Some(80) && said.contains("a process outside the job"),
        || format!("{}: {said}", show(o.status)),
    )?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)?;
    let ended = outside.wait().map_err(|e| e.to_string())?;
    want(ended.success(), || format!("the one outside: {}", show(ended)))
}

/// The compiler, the program, how it is started, and the transports of UCX.
type Way<'a> = (Kind, &'a str, &'a [&'a str], &'a str);

/// One MPI program, killed and restarted with other addresses, numbers and keys.
fn mpi_program(place: &Place, rng: &mut Rng, (kind, source, start, transports): &Way) -> Result<(), Failure> {
    let label = format!("adapters-{source}-{}", start[0]);
    let mut fabric = Fabric::new(place, &format!("{label}-fabric"), User::Root, &[])?;
    let mut job = Job::new(place, &label, User::Root)?;
    for (name, value) in fabric.environment() {
        job.set(name, &value.display().to_string());
    }
    for (name, value) in [
        ("UCX_TLS", *transports),
        ("UCX_RC_VERBS_RX_QUEUE_LEN", "256"),
        ("UCX_UD_VERBS_RX_QUEUE_LEN", "512"),
        ("UCX_WARN_UNUSED_ENV_VARS", "n"),
        ("MPIR_CVAR_NOLOCAL", "1"),
        ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
        ("OMPI_MCA_mpi_yield_when_idle", "1"),
        ("HWLOC_COMPONENTS", "-gl"),
    ] {
        job.set(name, value);
    }
    let program = build(place, &format!("mpi/{source}"), *kind)?.display().to_string();
    // UCX looks for a device file, and does not open it.
    let (belay, dir, config) = (
        place.belay().display().to_string(),
        job.dir().display().to_string(),
        with_library(&job)?,
    );
    let device = with_devices(WITH_DEVICE);
    let before = ["unshare", "-m", "sh", "-c", &device, "-", &belay];
    let ranks = ["-n", "3", "sh", "-c", ON_HOSTS, "-", &program];
    let launch = ["launch", "--ckpt-dir", &dir, "--config", &config, "--"];
    let in_front = |words: &[&str]| -> Vec<String> { before.iter().chain(words).map(|w| (*w).to_owned()).collect() };
    job.start(job.command(&in_front(&[&launch[..], start, &ranks].concat())))?;
    job.progress(LIMIT)?;
    for _ in 0..3 {
        rng.pause(40);
        job.checkpoint()?;
        job.progress(LIMIT)?;
    }
    job.kill_all()?;
    fabric.again(&[])?;
    job.clear_beat()?;
    job.start(job.command(&in_front(&["restart", &dir])))?;
    job.progress(LIMIT)?;
    job.checkpoint()?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// Unmodified MPI libraries over UCX.
fn mpi(place: &Place, _: User, rng: &mut Rng) -> Result<(), Failure> {
    let (rc, ud) = ("rc_verbs,ud_verbs:aux,self", "ud_verbs,self");
    let mpich = &["mpirun.mpich"][..];
    let ucx = &["mpirun.openmpi", "--mca", "pml", "ucx"][..];
    for way in [
        (Kind::Mpich, "mpi_p2p", mpich, rc),
        (Kind::Mpich, "mpi_alltoall", mpich, ud),
        (Kind::OpenMpi, "mpi_p2p", ucx, rc),
        (Kind::OpenMpi, "mpi_alltoall", ucx, ud),
    ] {
        mpi_program(place, rng, &way).map_err(|e| format!("{way:?}: {e}"))?;
    }
    Ok(())
}

fn main() {
    let mut target = Target::new("adapters", &[]);
    target.by_user("goes_on", |_| true, |p, u, r| goes_on(p, u, r, &[]));
    target.by_user("goes_on_with_faults", |_| true, |p, u, r| goes_on(p, u, r, &FAULTS));
    target.by_user("comes_back", |_| true, |place, user, rng| comes_back(place, user, rng, &[]));
    target.by_user(
        "comes_back_with_faults",
        |_| true,
        |place, user, rng| comes_back(place, user, rng, &FAULTS),
    );
    target.by_user("comes_back_elsewhere", |_| true, comes_back_elsewhere);
    target.by_user("comes_back_by_gid", |_| true, comes_back_by_gid);
    target.by_user("refuses", |_| true, refuses);
    target.by_user("many", |_| true, checks::many);
    target.by_user("marked", |_| true, checks::marked);
    target.by_user("locked", |_| true, checks::locked);
    target.by_user("late", |_| true, checks::late);
    for (program, check) in [
        ("verbs_after", "unread"),
        ("verbs_after", "left"),
        ("verbs_after", "alone"),
        ("verbs_held", "counted"),
        ("verbs_told", "ended"),
    ] {
        target.by_user(
            check,
            |_| true,
            move |place, user, _| checks::goes_on_and_comes_back(place, user, [program, check]),
        );
    }
    for (program, check, times) in [
        ("verbs_after", "recycled", 2),
        ("verbs_after", "early", 1),
        ("verbs_after", "joined", 1),
        ("verbs_back", "heard", 1),
        ("verbs_back", "drained", 2),
        ("verbs_back", "interrupted", 1),
        ("verbs_back", "silent", 2),
        ("verbs_back", "keyed", 1),
        ("verbs_back", "held", 1),
        ("verbs_held", "kinds", 8),
        ("verbs_held", "behind", 2),
        ("verbs_held", "astray", 1),
        ("verbs_held", "asked", 1),
    ] {
        target.by_user(
            check,
            |_| true,
            move |place, user, _| checks::restarts(place, user, [program, check], times),
        );
    }
    target.by_user("unknown", |_| true, checks::unknown);
    target.by_user("moderated", |_| true, checks::moderated);
    target.by_user("failed", |_| true, checks::failed);
    target.by_user("told", |_| true, checks::told);
    target.by_user("nowhere", |_| true, checks::nowhere);
    target.by_user("namesake", |_| true, checks::namesake);
    target.by_user("ports", |_| true, checks::ports);
    target.by_user("pingpongs", |_| true, pairs::pingpongs);
    target.by_user("managed_pairs", |_| true, pairs::managed);
    target.by_user("managed", |_| true, managed);
    target.by_user("unheard", |_| true, unheard);
    // The device file takes root.
    target.by_user("mpi", |user| user == User::Root && am_root(), mpi);
    target.run();
}
