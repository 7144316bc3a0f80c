//! The command line: exit statuses, standard streams, signals, terminals, job directories, machine-readable output.

mod directories;
mod jobs;
mod limits;
mod page;
mod predictions;
mod streams;
mod terminals;

use belay_tests::expect::want;
use belay_tests::job::{output, text, Job};
use belay_tests::place::{Place, User};
use belay_tests::target::Target;
use belay_tests::Failure;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(40);

type Test = fn(&Place, User) -> Result<(), Failure>;

/// A launched `program ARGS` that makes progress.
fn running(place: &Place, user: User, label: &str, options: &[&str], line: &[&str]) -> Result<Job, Failure> {
    let mut job = Job::new(place, label, user)?;
    let mut argv = vec![place.programs().join(line[0]).display().to_string()];
    argv.extend(line[1..].iter().map(|s| (*s).to_owned()));
    let options: Vec<String> = options.iter().map(|s| (*s).to_owned()).collect();
    job.launch(&options, &argv)?;
    job.progress(LIMIT)?;
    Ok(job)
}

fn main() {
    let mut target = Target::new("cli", &["fault_target", "fd_crowd", "fd_many", "fd_ptynames", "mem_private"]);
    let tests: [(&str, Test); 41] = [
        ("exit_status", streams::exit_status),
        ("streams", streams::streams),
        ("no_command", streams::no_command),
        ("default_directory", streams::default_directory),
        ("launch_twice", jobs::launch_twice),
        ("nothing_there", jobs::nothing_there),
        ("reports", jobs::reports),
        ("report", page::report),
        ("predictions", predictions::learnt),
        ("calibrate_predict", predictions::before),
        ("moved", directories::moved),
        ("half_made", directories::half_made),
        ("named_by_mistake", directories::named_by_mistake),
        ("several_runs", directories::several_runs),
        ("across_hosts", directories::across_hosts),
        ("modes", terminals::modes),
        ("stop_and_go_on", jobs::stop_and_go_on),
        ("suspended", jobs::suspended),
        ("run", jobs::run),
        ("past_the_standin", jobs::past_the_standin),
        ("lazy", jobs::lazy),
        ("socket_gone", jobs::socket_gone),
        ("called_by_itself", jobs::called_by_itself),
        ("interval", jobs::interval),
        ("slow_checkpoint", jobs::slow_checkpoint),
        ("signals_pass", streams::signals_pass),
        ("terminal", terminals::terminal),
        ("self_stopped", terminals::self_stopped),
        ("terminal_restart", terminals::terminal_restart),
        ("terminal_names", terminals::terminal_names),
        ("bar", terminals::bar),
        ("under_script", streams::under_script),
        ("restart_streams", streams::restart_streams),
        ("early_signal", streams::early_signal),
        ("setuid", limits::setuid),
        ("open_files", limits::open_files),
        ("crowd", limits::crowd),
        ("verify_running", jobs::verify_running),
        ("replaced", jobs::replaced),
        ("file_size", limits::file_size),
        ("help", |place, user| {
            let job = Job::new(place, "help", user)?;
            for verb in [
                "launch",
                "checkpoint",
                "restart",
                "run",
                "status",
                "list",
                "report",
                "verify",
                "inspect",
                "stop",
                "gc",
            ] {
                let o = output(job.belay(&[verb, "--help"]), LIMIT)?;
                want(o.status.success() && text(&o).contains("Usage"), || {
                    format!("{verb} --help: {}", text(&o))
                })?;
            }
            Ok(())
        }),
    ];
    for (name, test) in tests {
        target.by_user(
            name,
            // Root may open and raise everything.
            |u| !["setuid", "open_files", "crowd"].contains(&name) || u == User::Ordinary,
            move |place, user, _| test(place, user),
        );
    }
    target.run();
}
