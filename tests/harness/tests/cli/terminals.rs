//! Commands on terminals.

use super::LIMIT;
use belay_tests::expect::want;
use belay_tests::job::{output, text, Job};
use belay_tests::place::{Place, User};
use belay_tests::terminal::Terminal;
use belay_tests::Failure;

/// An interactive shell on a terminal of its own.
fn shell(job: &Job) -> Result<Terminal, Failure> {
    let words = ["env", "PS1=PROMPT:", "HISTFILE=", "bash", "--norc", "--noediting", "-i"];
    let mut t = Terminal::new(job.command(&words.map(str::to_owned)))?;
    t.expect("PROMPT:")?;
    Ok(t)
}

/// The command has ended with this status, as the shell sees it, which then waits for the next.
fn ended(t: &mut Terminal, status: i32) -> Result<(), Failure> {
    t.expect("PROMPT:")?;
    t.type_keys("echo status=$?\n")?;
    t.expect(&format!("status={status}\r\n"))?;
    t.expect("PROMPT:").map(drop)
}

/// A shell on a terminal: Ctrl-C, Ctrl-Z with fg, input, window.
pub(super) fn terminal(place: &Place, user: User) -> Result<(), Failure> {
    let job = Job::new(place, "terminal", user)?;
    let belay = place.belay().display().to_string();
    let mut t = shell(&job)?;
    t.type_keys(&format!("{belay} launch -- sh -c 'read x; echo \"<$x>\"; exit 9'\n"))?;
    t.expect("exit 9'\r\n")?;
    t.type_keys("some words\n")?;
    t.expect("<some words>")?;
    ended(&mut t, 9)?;
    t.type_keys(&format!("{belay} launch -- sh -c 'echo up; exec sleep 1000'\n"))?;
    t.expect("\nup\r\n")?;
    t.type_keys("\x03")?;
    ended(&mut t, 130)?;
    t.type_keys(&format!(
        "{belay} launch -- sh -c 'echo up; i=0; while sleep 0.05; do i=$((i+1)); echo tick$i; done'\n"
    ))?;
    t.expect("\nup\r\n")?;
    t.expect("tick2\r\n")?;
    t.type_keys("\x1a")?;
    t.expect("Stopped")?;
    t.type_keys("echo in=shell\n")?;
    t.expect("in=shell\r\n")?;
    t.expect("PROMPT:")?;
    t.type_keys("fg\n")?;
    t.expect("tick")?;
    t.expect("tick")?;
    t.type_keys("\x03")?;
    t.expect("PROMPT:")?;
    Ok(())
}

/// Commands that stop themselves, and a shell with a process group of its own: the outer shell notices, `fg` continues them.
pub(super) fn self_stopped(place: &Place, user: User) -> Result<(), Failure> {
    let job = Job::new(place, "selfstop", user)?;
    let belay = place.belay().display().to_string();
    let mut t = shell(&job)?;
    t.type_keys(&format!(
        "{belay} launch --ckpt-dir j1 -- sh -c 'echo up; kill -TSTP $$; echo back; exit 3'\n"
    ))?;
    t.expect("\nup\r\n")?;
    t.expect("Stopped")?;
    t.expect("PROMPT:")?;
    t.type_keys("fg\n")?;
    t.expect("\nback\r\n")?;
    let said = t.expect("PROMPT:")?;
    want(!said.contains("belay"), || format!("continued by fg: {said}"))?;
    t.type_keys("echo status=$?\n")?;
    t.expect("status=3\r\n")?;
    t.expect("PROMPT:")?;
    t.type_keys(&format!(
        "{belay} launch --ckpt-dir j2 -- env PS1=INNER: bash --norc --noediting -i\n"
    ))?;
    t.expect("-i\r\nINNER:")?;
    t.type_keys("suspend\n")?;
    t.expect("Stopped")?;
    t.expect("PROMPT:")?;
    t.type_keys("fg\n")?;
    t.expect("-i\r\n")?;
    t.type_keys("echo now=$((3+4))\n")?;
    t.expect("now=7\r\n")?;
    t.type_keys("exit 5\n")?;
    ended(&mut t, 5)
}

/// A program on a terminal is killed and restarted on another terminal: its input comes from there.
pub(super) fn terminal_restart(place: &Place, user: User) -> Result<(), Failure> {
    let job = Job::new(place, "ttyrestart", user)?;
    let belay = place.belay().display().to_string();
    let dir = job.dir().display().to_string();
    let mut t = shell(&job)?;
    t.type_keys(&format!(
        "{belay} launch --ckpt-dir {dir} -- sh -c 'n=0; while read x; do n=$((n+1)); echo \"$n:<$x>\"; done; exit 4'\n"
    ))?;
    t.expect("exit 4'\r\n")?;
    t.type_keys("one\n")?;
    t.expect("1:<one>")?;
    let o = output(job.belay(&["checkpoint", &dir]), LIMIT)?;
    want(o.status.success(), || text(&o))?;
    t.type_keys("two\n")?;
    t.expect("2:<two>")?;
    drop(t); // kills everything on that terminal
    let mut t = shell(&job)?;
    t.type_keys(&format!("{belay} restart {dir}\n"))?;
    t.expect("\r\n")?;
    t.type_keys("again\n")?;
    t.expect("2:<again>")?;
    t.type_keys("\x04")?;
    ended(&mut t, 4)
}
