//! `belay report`: one page about a job, which needs nothing else.

mod charts;
mod log;
mod page;

use crate::cli;
use crate::client::status;
use belay_coordinator::jobdir::{Access, JobDir};
use belay_coordinator::Failure;
use belay_wire::Exit;
use std::fs::File;
use std::io::{ErrorKind, IsTerminal, Write};

/// Writes the page.
pub(crate) fn report(args: &cli::Report) -> Result<u8, Failure> {
    // Before root takes the owner's identity, with which it may not write here.
    let mut out: Box<dyn Write> = match &args.output {
        Some(path) => {
            let file = File::create(path);
            Box::new(file.map_err(|e| Failure::io(format!("create {}", path.display()), &e))?)
        }
        None if std::io::stdout().is_terminal() => {
            let why = "the page is nothing for a terminal: name a file with --output, or lead standard output to one";
            return Err(Failure::new(Exit::Usage, why));
        }
        None => Box::new(std::io::stdout()),
    };
    let dir = &args.target.dir;
    let status = status(dir)?;
    let told = log::read(&JobDir::open(dir, Access::OwnOrRoot)?.log())?;
    let page = page::page(&status, &told).into_string();
    match out.write_all(page.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(Failure::io("write the page", &e)),
        _ => Ok(0),
    }
}
