//! Commands on terminals.

use super::{running, LIMIT};
use belay_tests::expect::{io, want};
use belay_tests::job::{output, text, Job};
use belay_tests::place::{Place, User};
use belay_tests::terminal::{master, take_names, Terminal};
use belay_tests::{procs, Failure};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// Besides the terminals with the names that it tells, the program has one now and then, with the smallest number that
/// is free: one of so many further ones.
const FURTHER: u32 = 16;
const SHELL: [&str; 7] = ["env", "PS1=PROMPT:", "HISTFILE=", "bash", "--norc", "--noediting", "-i"];

/// An interactive shell on a terminal of its own.
fn shell(job: &Job) -> Result<Terminal, Failure> {
    prompting(Terminal::new(job.command(&SHELL.map(str::to_owned)))?)
}

fn prompting(mut t: Terminal) -> Result<Terminal, Failure> {
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

/// A program that is stopped by its checkpoint has not put the modes of the terminal back: belay does.
pub(super) fn modes(place: &Place, user: User) -> Result<(), Failure> {
    let job = Job::new(place, "modes", user)?;
    let belay = place.belay().display().to_string();
    let mut t = shell(&job)?;
    t.type_keys(&format!(
        "{belay} launch --ckpt-dir j -- sh -c 'stty raw -echo; echo up; exec sleep 1000'\n"
    ))?;
    t.expect("\nup\n")?;
    let dir = job.work.join("j").display().to_string();
    let o = output(job.belay(&["checkpoint", "--then", "stop", &dir]), LIMIT)?;
    want(o.status.success(), || text(&o))?;
    t.expect("stopped after a checkpoint")?;
    ended(&mut t, 85)?;
    t.type_keys("stty -a\n")?;
    t.expect("isig icanon")?;
    t.expect("PROMPT:").map(drop)
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

/// Held by the test that takes the numbers of terminals, also of several runs: they are those of the whole machine.
fn turn() -> Result<File, Failure> {
    let names = io("open /dev/pts", File::open("/dev/pts"))?;
    io("lock /dev/pts", names.lock())?;
    Ok(names)
}

/// The master of a terminal with a greater number than `last`; the others on the way go to `others`.
fn above(last: u32, others: &mut BTreeMap<u32, OwnedFd>) -> Result<OwnedFd, Failure> {
    loop {
        let (made, number) = master()?;
        if number > last {
            return Ok(made);
        }
        others.insert(number, made);
    }
}

/// Masters of all terminals up to `last` that nobody has, and one of them that is called by one of `numbers`, which a
/// job had that has just been killed: its processes may still be ending, and a test beside this one may have some.
fn one_of(numbers: &[u32], last: u32) -> Result<(u32, OwnedFd, BTreeMap<u32, OwnedFd>), Failure> {
    let begin = Instant::now();
    loop {
        let mut others = take_names(last)?;
        if let Some((number, master)) = numbers.iter().find_map(|n| Some((*n, others.remove(n)?))) {
            return Ok((number, master, others));
        }
        want(begin.elapsed() < LIMIT, || "the names are others'".into())?;
        drop(others);
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Terminals of a job keep their names, also where those of others are called so at the restart, and are gone later;
/// the terminal of the restart is found by its name, unless one of the job's is called so.
pub(super) fn terminal_names(place: &Place, user: User) -> Result<(), Failure> {
    let _alone = turn()?;
    let job = Job::new(place, "ttynames", user)?;
    let belay = place.belay().display().to_string();
    let dir = job.dir().display().to_string();
    let program = place.programs().join("fd_ptynames").display().to_string();
    let mut t = shell(&job)?;
    t.type_keys(&format!("{belay} launch --ckpt-dir {dir} -- {program} said\n"))?;
    t.expect("its names: ")?;
    let names = t.expect(".\r\n")?;
    let number = |name: &str| {
        name.trim_start_matches("/dev/pts/")
            .parse::<u32>()
            .map_err(|e| format!("{name}: {e}"))
    };
    let mut numbers = names.split(' ').map(number).collect::<Result<Vec<u32>, _>>()?;
    numbers.sort_unstable();
    t.expect("on /dev/pts/")?;
    for with_name in [true, false, true] {
        job.beats(LIMIT)?;
        let o = output(job.belay(&["checkpoint", &dir]), LIMIT)?;
        want(o.status.success(), || text(&o))?;
        drop(t); // kills everything on that terminal
        job.clear_beat()?;
        let last = numbers[numbers.len() - 1] + FURTHER;
        let (same, master, mut others) = one_of(&numbers, last)?;
        let words = job.command(&SHELL.map(str::to_owned));
        t = prompting(if with_name {
            // A test beside this one may have given one of the names up by now.
            Terminal::on(above(last, &mut others)?, words)?
        } else {
            Terminal::on(master, words)?
        })?;
        t.type_keys(&format!("{belay} restart {dir}\n"))?;
        if with_name {
            t.expect("on /dev/pts/")?;
        } else {
            t.expect(&format!(
                "the terminal of this restart is called /dev/pts/{same} as one of the job's own"
            ))?;
            t.expect("on No such device.")?;
        }
        job.beats(LIMIT)?;
        drop(others);
        job.clear_beat()?;
        job.beats(LIMIT)?;
        drop(take_names(last)?);
    }
    job.tell_end()?;
    t.expect("PASS fd_ptynames")?;
    ended(&mut t, 0)
}

/// A checkpoint that takes longer than a second has a bar on a terminal, which is gone when the result is told; one that
/// does not has none, nor has it on a terminal that can do nothing, nor with `--quiet`. Colours are for terminals.
pub(super) fn bar(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = running(place, user, "bar", &["--differential", "off"], &["fault_target", "128"])?;
    let dir = job.dir().display().to_string();
    let begin = |term: &str, options: &[&str]| {
        let mut c = job.belay(&[&["checkpoint", &dir], options].concat());
        c.env("TERM", term).env("NO_COLOR", "1");
        Terminal::new(c)
    };
    for (term, options, wanted) in [
        ("xterm", [].as_slice(), true),
        ("dumb", &[], false),
        ("xterm", &["--quiet"], false),
    ] {
        let mut t = begin(term, options)?;
        let writer = writer(&job)?;
        procs::signal(writer, libc::SIGSTOP);
        let shown = if wanted {
            t.expect("belay: write [")?;
            t.expect("B/s").map(Some)?
        } else {
            std::thread::sleep(Duration::from_secs(2));
            None
        };
        procs::signal(writer, libc::SIGCONT);
        let before = t.expect("generation ")?;
        t.expect("took ")?;
        let so = || format!("{term} {options:?}: {shown:?}, then {before:?}");
        if wanted {
            want(shown.as_ref().is_some_and(|s| s.contains("] ") && s.contains(" % of ")), so)?;
            // Taken away, and only notes behind that.
            let rest = before.rsplit_once("\x1b[2K").map_or(before.as_str(), |(_, rest)| rest);
            want(is_no_bar(rest) && rest != before, so)?;
        } else {
            want(is_no_bar(&before), so)?;
        }
    }
    let began = Instant::now();
    let mut t = begin("xterm", &[])?;
    let before = t.expect("generation ")?;
    let took = began.elapsed();
    want(took >= Duration::from_secs(1) || is_no_bar(&before), || {
        format!("after {took:?}: {before:?}")
    })?;
    let mut c = job.belay(&["list", &dir]);
    c.env("TERM", "xterm");
    let mut t = Terminal::new(c)?;
    t.expect("\x1b[32mwhole\x1b[39m")?;
    let o = output(job.belay(&["list", &dir]), LIMIT)?;
    want(!text(&o).contains('\x1b') && text(&o).lines().count() > 1, || text(&o))?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

fn is_no_bar(text: &str) -> bool {
    !text.contains("belay: ") && !text.contains('\x1b')
}

/// Who writes the checkpoint of `job` that is under way or will be.
fn writer(job: &Job) -> Result<i32, Failure> {
    let end = Instant::now() + LIMIT;
    loop {
        let all = procs::marked(&job.work);
        if let Some((pid, _)) = all.iter().find(|(_, name)| name == "belay-snapshot") {
            return Ok(*pid);
        }
        want(Instant::now() < end, || format!("no checkpoint: {}", job.output_text()))?;
    }
}
