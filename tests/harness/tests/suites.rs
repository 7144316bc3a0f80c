//! Real programs, four ways, as root and as an ordinary user.

use belay_tests::case::{script, Case};
use belay_tests::place::Place;
use belay_tests::runner;
use std::sync::Arc;

fn redis(name: &str, options: &[&str]) -> Case {
    let mut c = script("python3", "redis_load.py");
    c.name = name.into();
    c.args.extend(options.iter().map(|s| (*s).to_owned()));
    c.patience(60)
}

fn cases() -> Vec<Case> {
    vec![
        script("python3", "python_plain.py"),
        script("python3", "python_multi.py"),
        script("python3", "python_subprocess.py"),
        script("python3", "python_asyncio.py"),
        script("bash", "bash_pipeline.sh"),
        script("perl", "perl_plain.pl"),
        script("node", "node_server.js").patience(60),
        script("java", "JavaPlain.java").patience(90),
        redis("redis_plain", &[]),
        redis("redis_io_threads", &["--io-threads", "3", "--io-threads-do-reads", "yes"]),
        redis("redis_aof", &["--appendonly", "yes", "--appendfsync", "everysec"]),
        script("python3", "sqlite_file.py"),
        script("python3", "tmux_shell.py").transient("waits to be accepted"),
        script("python3", "make_project.py").patience(60),
    ]
}

fn main() {
    let place = match Place::new("suites") {
        Ok(p) => Arc::new(p),
        Err(e) => {
            println!("{e}");
            std::process::exit(1);
        }
    };
    let checks = runner::checks(&place, cases());
    drop(place);
    runner::main(checks);
}
