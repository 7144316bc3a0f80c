//! Which host each part gets at a restart, and host files. No input or output but the reading of the file.

use crate::Failure;
use belay_wire::Exit;
use std::path::Path;

/// The host of part `at` of `parts` (in the order in which they were started), given today's `hosts`; none for the one that it had.
///
/// A part is never divided. With fewer hosts than parts neighbours share one, each host getting as many as the next or
/// one more; with more hosts the last ones are left out.
pub(crate) fn of_part(at: usize, parts: usize, hosts: &[String]) -> Option<&String> {
    hosts.get(if hosts.len() < parts { at * hosts.len() / parts } else { at })
}

/// The hosts that a file names: the first word of each line, without what follows a colon (slots); `#` begins a comment.
pub fn read_file(file: &Path) -> Result<Vec<String>, Failure> {
    let text = std::fs::read_to_string(file).map_err(|e| Failure::io(format!("read the hosts in {}", file.display()), &e))?;
    let hosts = parse(&text);
    if hosts.is_empty() {
        return Err(Failure::new(Exit::Usage, format!("{} names no host", file.display())));
    }
    Ok(hosts)
}

fn parse(text: &str) -> Vec<String> {
    let lines = text.lines().map(|l| l.split('#').next().unwrap_or_default());
    let hosts = lines.filter_map(|l| l.split_whitespace().next()?.split(':').next());
    hosts.filter(|h| !h.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spread(parts: usize, hosts: usize) -> Vec<usize> {
        let names: Vec<String> = (0..hosts).map(|h| h.to_string()).collect();
        let place = |at| of_part(at, parts, &names).map_or(99, |h| h.parse().unwrap());
        (0..parts).map(place).collect()
    }

    #[test]
    fn parts_are_packed_evenly_and_keep_their_order() {
        assert_eq!(spread(4, 4), [0, 1, 2, 3]);
        assert_eq!(spread(4, 2), [0, 0, 1, 1]);
        assert_eq!(spread(5, 2), [0, 0, 0, 1, 1]);
        assert_eq!(spread(3, 1), [0, 0, 0]);
        assert_eq!(spread(2, 3), [0, 1]);
        assert_eq!(spread(2, 0), [99, 99]);
    }

    #[test]
    fn host_files_of_open_mpi_and_of_mpich_are_understood() {
        let text = "# nodes of today\nn1 slots=4\n\n  n2:8  # spare\nn3\n:4\n";
        assert_eq!(parse(text), ["n1", "n2", "n3"]);
    }
}
