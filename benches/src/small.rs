//! A 1 MiB process, and what 512 threads add.

use crate::measure::{ms, run, Job, Samples};
use crate::Plan;
use belay_kernel::{pidfd, proc, ptrace};
use std::io;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Blocked time, checkpoint command and restart of a 1 MiB process.
pub(crate) fn small(p: &Plan) -> Result<(), String> {
    let (mut blocked, mut command, mut restart) = (Samples::default(), Samples::default(), Samples::default());
    std::env::set_var("BELAY_BENCH_TICK", "1");
    let mut job = Job::launch(p, &["memory", "1048576"])?;
    job.line()?;
    for _ in 0..p.runs * 4 {
        let (t, v) = Job::checkpoint(p)?;
        command.push(t);
        blocked.push(v["blocked_ms"].as_f64().unwrap_or(f64::NAN));
    }
    for _ in 0..p.runs * 2 {
        run(Command::new(&p.belay)
            .arg("checkpoint")
            .arg(p.dir.join("job"))
            .args(["--then", "stop"]))?;
        drop(job);
        let (t, j) = ms(|| {
            let mut j = Job::restart(p, &[])?;
            j.line()?;
            Ok(j)
        })?;
        restart.push(t);
        job = j;
    }
    std::env::remove_var("BELAY_BENCH_TICK");
    blocked.print("1 MiB: blocked (goal <= 3)", "ms");
    command.print("1 MiB: checkpoint command (goal <= 60)", "ms");
    restart.print("1 MiB: restart to first output (goal <= 60)", "ms");
    job.stop(p)
}

/// Blocked time with one thread and with 512 more, beside a bare stop of the same threads.
pub(crate) fn threads(p: &Plan) -> Result<(), String> {
    let alone = blocked(p, &["threads", "0"])?;
    alone.print("blocked with 0 more threads", "ms");
    let with = blocked(p, &["threads", "512"])?;
    let bare = bare_stops(p, &["threads", "512"])?;
    with.print("blocked with 512 more threads", "ms");
    bare.print("bare stop of 513 threads", "ms");
    let added = with.median() - alone.median();
    println!("{:<44} {added:>10.3} ms    goal <= 20", "512 threads add");
    Ok(())
}

/// Blocked times of a worker with `args`.
fn blocked(p: &Plan, args: &[&str]) -> Result<Samples, String> {
    std::fs::remove_dir_all(p.dir.join("job")).ok();
    let mut job = Job::launch(p, args)?;
    job.line()?;
    let mut s = Samples::default();
    for _ in 0..p.runs * 2 {
        s.push(Job::checkpoint(p)?.1["blocked_ms"].as_f64().unwrap_or(f64::NAN));
    }
    job.stop(p)?;
    Ok(s)
}

/// The least that a tracer needs for the threads of a native worker with `args`: one tracer stops them, reads
/// registers, extended state and mask of each, and lets them go by its end.
fn bare_stops(p: &Plan, args: &[&str]) -> Result<Samples, String> {
    let mut job = Job::native(p, args)?;
    job.line()?;
    let tids = proc::tasks(job.pid()).map_err(|e| format!("list the threads of the worker: {e}"))?;
    let mut s = Samples::default();
    for _ in 0..p.runs * 2 {
        s.push(bare_stop(tids.clone()).map_err(|e| format!("stop the threads of the worker: {e}"))?);
        // They get their places again.
        std::thread::sleep(Duration::from_millis(100));
    }
    job.kill()?;
    Ok(s)
}

/// Milliseconds of one bare stop of `tids`.
fn bare_stop(tids: Vec<i32>) -> io::Result<f64> {
    let (tell, told) = channel();
    let (done, over) = channel::<()>();
    let tracer = std::thread::spawn(move || -> io::Result<Instant> {
        tell.send(rustix::thread::gettid().as_raw_nonzero().get())
            .map_err(io::Error::other)?;
        tids.iter().try_for_each(|tid| ptrace::seize(*tid, 0))?;
        let begin = Instant::now();
        tids.iter().try_for_each(|tid| ptrace::interrupt(*tid))?;
        for tid in &tids {
            ptrace::wait(*tid, true)?;
            ptrace::get_regs(*tid)?;
            ptrace::get_xstate(*tid)?;
            ptrace::get_sigmask(*tid)?;
        }
        let _ = over.recv();
        Ok(begin)
    });
    let gone = pidfd::open_thread(told.recv().map_err(io::Error::other)?);
    drop(done);
    // What it traces is let go after it could be joined.
    let end = gone.map(|gone| {
        pidfd::wait_gone(gone.as_fd());
        Instant::now()
    });
    let begin = tracer.join().map_err(|_| io::Error::other("the tracer has panicked"))??;
    Ok((end? - begin).as_secs_f64() * 1000.0)
}
