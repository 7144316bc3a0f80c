//! `belay report`: one page about a job, which needs nothing else.

mod charts;
mod log;
mod page;
mod predicted;

use crate::cli;
use crate::client::status;
use belay_coordinator::jobdir::{Access, JobDir};
use belay_coordinator::Failure;
use belay_wire::Exit;
use std::fs::File;
use std::io::{ErrorKind, IsTerminal, Write};
use std::os::unix::fs::OpenOptionsExt;

/// Writes the page.
pub(crate) fn report(args: &cli::Report) -> Result<u8, Failure> {
    // Before root takes the owner's identity, with which it may not write here. What is there stays until there is a page.
    let file = match &args.output {
        Some(path) => {
            let file = File::options()
                .write(true)
                .create(true)
                .truncate(false)
                // It tells what the job directory does.
                .mode(0o600)
                .open(path);
            Some(file.map_err(|e| Failure::io(format!("create {}", path.display()), &e))?)
        }
        None if std::io::stdout().is_terminal() => {
            let why = "the page is nothing for a terminal: name a file with --output, or lead standard output to one";
            return Err(Failure::new(Exit::Usage, why));
        }
        None => None,
    };
    let dir = &args.target.dir;
    let status = status(dir)?;
    let told = log::read(&JobDir::open(dir, Access::OwnOrRoot)?.log())?;
    let page = page::page(&status, &told).into_string();
    let written = match file {
        Some(file) => replace(file, &page),
        None => std::io::stdout()
            .write_all(page.as_bytes())
            .and_then(|()| std::io::stdout().flush()),
    };
    match written {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            let place = args
                .output
                .as_ref()
                .map_or("standard output".into(), |path| path.display().to_string());
            Err(Failure::io(format!("write the page to {place}"), &e))
        }
        _ => Ok(0),
    }
}

/// Writes `page` in place of what `file` holds. It may be a pipe or a terminal, which hold nothing.
fn replace(mut file: File, page: &str) -> std::io::Result<()> {
    if file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    file.write_all(page.as_bytes())
}
