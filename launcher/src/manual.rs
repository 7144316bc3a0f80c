//! Man pages: what the command line's table says, and behind it the exit statuses and where to read on.

use crate::cli::Cli;
use belay_wire::Exit;
use clap::{Command, CommandFactory};
use clap_mangen::roff::{bold, roman, Roff};
use clap_mangen::Man;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// Writes a page for `belay` and one for each of its commands into `dir`.
pub(crate) fn write_pages(dir: &Path) -> io::Result<()> {
    let mut belay = Cli::command().disable_help_subcommand(true);
    belay.build();
    let shown: Vec<Command> = belay.get_subcommands().filter(|c| !c.is_hide_set()).cloned().collect();
    let commands: Vec<String> = shown.iter().map(|c| format!("belay-{}", c.get_name())).collect();
    write_page(dir, belay, &exit_statuses(), &commands)?;
    let elsewhere = exit_status_of_command();
    shown
        .into_iter()
        .try_for_each(|command| write_page(dir, command, &elsewhere, &["belay".to_owned()]))
}

fn write_page(dir: &Path, command: Command, statuses: &Roff, others: &[String]) -> io::Result<()> {
    let man = Man::new(command).source(concat!("belay ", env!("CARGO_PKG_VERSION")));
    let mut file = File::create(dir.join(man.get_filename()))?;
    man.render(&mut file)?;
    statuses.to_writer(&mut file)?;
    see_also(others).to_writer(&mut file)?;
    file.flush()
}

fn exit_statuses() -> Roff {
    let mut page = Roff::new();
    page.control("SH", ["EXIT STATUS"]);
    page.text([roman(
        "launch, restart and run end as the command ended: with its exit status, or by the same signal. Where belay itself fails:",
    )]);
    for row in Exit::TABLE {
        page.control("TP", []);
        page.text([bold(row.exit.code().to_string())]);
        page.text([roman(format!("{} ({})", row.meaning, row.next))]);
    }
    page
}

fn exit_status_of_command() -> Roff {
    let mut page = Roff::new();
    page.control("SH", ["EXIT STATUS"]);
    page.text([
        roman("0, or one that "),
        bold("belay"),
        roman("(1) explains; launch, restart and run end as the command ended."),
    ]);
    page
}

fn see_also(pages: &[String]) -> Roff {
    let mut page = Roff::new();
    page.control("SH", ["SEE ALSO"]);
    let mut words = Vec::new();
    for (n, name) in pages.iter().enumerate() {
        words.push(bold(name.clone()));
        words.push(roman(if n + 1 < pages.len() { "(1), " } else { "(1)" }));
    }
    page.text(words);
    page
}
