//! A program of the verbs on several hosts: belay's library comes to rest on all of them, and makes everything again
//! where the job is restarted.

use belay_tests::across::Job;
use belay_tests::build::{build, Kind};
use belay_tests::fabric::{Fabric, LIBRARY};
use belay_tests::place::{Place, User};
use belay_tests::rng::Rng;
use belay_tests::Failure;

/// Starts the ranks of `$3` one by one, the others through remote shells, all on one fabric.
const START: &str =
    "i=$1; while [ $i -gt 1 ]; do i=$((i - 1)); ssh h$((i + 1)) \"env $2 FAKE_VERBS_HOST=host$i VERBS_RANK=$i $3\" & done
    env $2 FAKE_VERBS_HOST=host0 VERBS_RANK=0 $3; status=$?; wait; exit $status";

/// Checkpoints, and restarts on other hosts, with another epoch of the fabric.
pub(super) fn on_hosts(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::of(place, "together-verbs", Kind::C, 3, 4)?;
    let built = build(place, "verbs/verbs_rc", Kind::Verbs)?;
    let program = job.work.join("verbs_rc").display().to_string();
    std::fs::copy(built, &program).map_err(|e| format!("copy {program}: {e}"))?;
    // What the hosts share lies below one directory.
    let (shared, bin) = (job.work.join("fabric"), job.work.join("bin"));
    std::fs::create_dir(&shared).map_err(|e| format!("create {}: {e}", shared.display()))?;
    let mut fabric = Fabric::in_dir(place, shared, User::Root, &[])?;
    for library in [place.bin().join("libbelay_verbs.so"), fabric.libs.join(LIBRARY)] {
        let to = bin.join(library.file_name().unwrap_or_default());
        std::fs::copy(&library, &to).map_err(|e| format!("copy {}: {e}", library.display()))?;
    }
    let config = job.work.join("verbs.toml").display().to_string();
    std::fs::write(&config, "[verbs]\nenable = \"on\"\n[gate]\nlimit = \"30s\"\n").map_err(|e| format!("write {config}: {e}"))?;
    job.options = vec!["--config".into(), config];
    let mut variables = vec![
        format!("LD_LIBRARY_PATH={}", bin.display()),
        format!("FAKE_VERBS_DIR={}", fabric.dir.display()),
        "VERBS_SIZE=3".into(),
        "VERBS_ROOT=10.99.0.1:7471".into(),
    ];
    for name in ["go", "beat"] {
        variables.push(format!(
            "BELAY_TEST_{}={}",
            name.to_uppercase(),
            job.work.join(name).display()
        ));
    }
    let command = format!("{program} event renew");
    job.launch_words(&["sh", "-c", START, "-", "3", &variables.join(" "), &command])?;
    job.progress()?;
    for shift in [1, 2] {
        for _ in 0..2 {
            rng.pause(40);
            job.checkpoint()?;
            job.progress()?;
        }
        job.crash();
        fabric.again(&[])?;
        job.shift(shift);
        job.restart(&[])?;
        job.progress()?;
    }
    job.verdict()
}
