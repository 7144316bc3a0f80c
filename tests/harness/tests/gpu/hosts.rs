//! Programs that use GPUs of several hosts.

use crate::{LIMIT, PROGRAM};
use belay_tests::across::Job;
use belay_tests::build::Kind;
use belay_tests::expect::{io, refused, want};
use belay_tests::gpu;
use belay_tests::job::{output, text};
use belay_tests::place::Place;
use belay_tests::Failure;

const BEATS: [&str; 2] = ["beat", "beat.below"];

/// A job on two of three hosts where agents find the driver, which are started without an environment of ours; the words that
/// start a program of which the driver has these faults on another host.
fn made(place: &Place, label: &str, faults: &str) -> Result<(Job, String), Failure> {
    let job = Job::of(place, label, Kind::C, 2, 3)?;
    let program = job.program(place, PROGRAM)?;
    let work = job.work.display().to_string();
    let library = gpu::build(place)?.join(gpu::LIBRARY);
    io("copy the driver", std::fs::copy(&library, job.work.join(gpu::LIBRARY)))?;
    let known = format!(
        "echo {work} > /tmp/conf; cat /etc/ld.so.conf >> /tmp/conf; ldconfig -X -f /tmp/conf -C /tmp/cache && mount --bind /tmp/cache /etc/ld.so.cache"
    );
    for host in 1..=3 {
        job.on_host(host, &["sh", "-c", &known])?;
    }
    let there = format!(
        "env BELAY_TEST_GO={work}/go BELAY_TEST_BEAT={work}/beat.below BELAY_TEST_LONG=1 BELAY_TEST_QUIET_PARENT=1 FAKE_CUDA_FULL={work}/full FAKE_CUDA={faults} {program}"
    );
    Ok((job, there))
}

/// One on each of two hosts: all are locked before any is taken off, and where one cannot be (`is_refused`), both go on.
pub(crate) fn together(place: &Place, faults: &str, is_refused: bool) -> Result<(), Failure> {
    let (mut job, there) = made(place, &format!("gpu-together-{faults}"), faults)?;
    let program = job.program(place, PROGRAM)?;
    let script = format!("ssh h2 {there} & BELAY_TEST_QUIET_PARENT=1 {program}; wait");
    job.launch_words(&["sh", "-c", &script])?;
    job.progress_of_all(&BEATS)?;
    if is_refused {
        let o = output(job.command(1, &[&job.belay, "checkpoint", "--quiet", &job.dir()]), LIMIT)?;
        refused(&o, &["on h2: ", "process ", "take its state off the gpu", "free memory"])?;
        job.progress_of_all(&BEATS)?;
    }
    for shift in [1, 2] {
        for _ in 0..2 {
            job.checkpoint()?;
            job.progress_of_all(&BEATS)?;
        }
        job.crash_and_shift(shift, &BEATS)?;
    }
    job.checkpoint()?;
    job.verdict()
}

/// At a restart nothing runs on one host before all is back on the GPUs of the other: where that fails there, nothing has run.
pub(crate) fn none_before_all(place: &Place) -> Result<(), Failure> {
    let (mut job, there) = made(place, "gpu-none-before-all", "slow")?;
    let (beat, full) = (job.work.join(BEATS[0]), job.work.join("full"));
    // Without a GPU.
    let here = format!(
        "n=0; while :; do n=$((n+1)); printf '%019d\\n' $n > {}; sleep 0.01; done",
        beat.display()
    );
    job.launch_words(&["sh", "-c", &format!("ssh h2 {there} & {here}")])?;
    job.progress_of_all(&BEATS)?;
    job.checkpoint()?;
    job.progress_of_all(&BEATS)?;
    job.crash();
    io("fill the device", std::fs::write(&full, ""))?;
    io("clear the heartbeat", std::fs::write(&beat, ""))?;
    job.start_restart()?;
    let end = job.end()?;
    let said = job.said();
    let words = ["on h2: ", "process ", "out of memory", "free memory of the GPU"];
    want(!end.success() && words.iter().all(|w| said.contains(w)), || {
        format!("{end}: {said}")
    })?;
    let ran = io("read the heartbeat", std::fs::read_to_string(&beat))?;
    want(ran.is_empty(), || format!("it has run: {ran}; {said}"))?;
    io("empty the device", std::fs::remove_file(&full))?;
    job.start_restart()?;
    job.progress_of_all(&BEATS)
}

/// A program of another host is lost when a checkpoint puts it back: who has asked for the checkpoint is told, and so is who
/// has started the job. `runs`: by `belay run`, which goes on from that checkpoint by itself.
pub(crate) fn lost_elsewhere(place: &Place, runs: bool) -> Result<(), Failure> {
    let (mut job, there) = made(place, &format!("gpu-lost-elsewhere-{runs}"), "")?;
    let program = job.program(place, PROGRAM)?;
    let full = job.work.join("full");
    let script = format!("ssh h2 {there} & BELAY_TEST_QUIET_PARENT=1 {program}; wait");
    let command = ["sh", "-c", &script];
    if runs {
        let (belay, dir) = (job.belay.clone(), job.dir());
        let run = [&belay, "run", "--across-hosts", "--ckpt-dir", &dir, "--hosts", "h2", "--"];
        job.start(&[&run[..], &command].concat())?;
    } else {
        job.launch_words(&command)?;
    }
    job.progress_of_all(&BEATS)?;
    job.checkpoint()?;
    job.progress_of_all(&BEATS)?;
    io("fill the device", std::fs::write(&full, "once"))?;
    let o = output(job.command(1, &[&job.belay, "checkpoint", &job.dir()]), LIMIT)?;
    let words = ["on h2: ", "process ", "out of memory", "belay restart"];
    want(o.status.success() && words.iter().all(|w| text(&o).contains(w)), || text(&o))?;
    job.says("on h2: the GPU driver has not put back")?;
    if runs {
        job.says("(1 of 3 restarts)")?;
        job.progress_of_all(&BEATS)?;
        job.checkpoint()?;
        job.progress_of_all(&BEATS)?;
        return job.verdict();
    }
    want(job.said().contains("belay restart"), || job.said())?;
    job.crash_and_shift(0, &BEATS)?;
    job.verdict()
}

/// Parts of two hosts that restart on one, which has two GPUs: each has room for one of them.
pub(crate) fn apart_on_one_host(place: &Place) -> Result<(), Failure> {
    let (mut job, there) = made(place, "gpu-on-one-host", "single")?;
    let program = job.program(place, PROGRAM)?;
    for (host, gpus) in [(1, "a Fake GPU"), (2, "b Fake GPU"), (3, "c Fake GPU,d Fake GPU")] {
        job.on_host(host, &["sh", "-c", &format!("echo '{gpus}' > /tmp/fake-cuda-gpus")])?;
    }
    let script = format!("ssh h2 {there} & BELAY_TEST_QUIET_PARENT=1 FAKE_CUDA=single {program}; wait");
    job.launch_words(&["sh", "-c", &script])?;
    job.progress_of_all(&BEATS)?;
    job.checkpoint()?;
    job.progress_of_all(&BEATS)?;
    for round in 0..2 {
        job.crash();
        for beat in BEATS {
            belay_tests::beat::forget(&job.work.join(beat))?;
        }
        job.at = vec![3, 3];
        job.start_restart()?;
        job.progress_of_all(&BEATS).map_err(|e| format!("restart {round}: {e}"))?;
        job.checkpoint()?;
        job.progress_of_all(&BEATS)?;
    }
    job.verdict()
}
