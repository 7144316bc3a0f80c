//! What the kernel tells about all objects of one kind in the IPC namespace.

use std::io;
use std::path::Path;

/// Where the kernel lists the objects of the namespace.
pub(super) const LISTS: &str = "/proc/sysvipc";

/// The columns `names` of every row of the kernel's list at `path`: one call for all objects, however many others have.
/// Where it cannot be read, or has been masked, `asked` asks for one object after the other.
pub(super) fn list<const N: usize>(path: &Path, names: [&str; N], asked: impl FnOnce() -> Vec<[i64; N]>) -> Vec<[i64; N]> {
    match std::fs::read_to_string(path) {
        Ok(text) => columns(&text, names).unwrap_or_else(asked),
        // Without System V objects in the kernel there is no such file.
        Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(e) => {
            tracing::debug!(path = %path.display(), error = %e, "objects are asked for one by one");
            asked()
        }
    }
}

/// What `stat` says of each object up to the last, whose place `last` is.
pub(super) fn each<const N: usize>(last: io::Result<i32>, stat: impl Fn(i32) -> io::Result<[i64; N]>) -> Vec<[i64; N]> {
    let last = last.unwrap_or(-1);
    (0..=last).filter_map(|at| stat(at).ok()).collect()
}

/// `None` where the text has no such columns.
fn columns<const N: usize>(text: &str, names: [&str; N]) -> Option<Vec<[i64; N]>> {
    let mut lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let head = lines.next().unwrap_or_default();
    let places = names.map(|name| head.iter().position(|h| *h == name));
    if places.contains(&None) {
        return None;
    }
    let number = |row: &[&str], place: Option<usize>| row.get(place?)?.parse().ok();
    let row = |row: Vec<&str>| {
        let found = places.map(|place| number(&row, place));
        found
            .iter()
            .all(Option::is_some)
            .then(|| found.map(Option::unwrap_or_default))
    };
    Some(lines.filter_map(row).collect())
}

#[cfg(test)]
mod tests {
    use super::super::{queues, segments, semaphores};
    use super::*;
    use belay_kernel::sysv::{msg, sem, shm};

    #[test]
    fn columns_are_found_by_their_names() {
        let text = "       key      shmid perms  cpid\n -12 7 600 13489\n 0 8 1600\n\n 1 9 600 -1\n";
        assert_eq!(columns(text, ["shmid", "cpid"]), Some(vec![[7, 13489], [9, -1]]));
        assert_eq!(columns(text, ["key", "nothing"]), None);
        assert_eq!(columns("", ["key"]), None);
        assert_eq!(columns("key\n", ["key"]), Some(Vec::new()));
    }

    /// The row of object `id`; others come and go.
    fn row<const N: usize>(rows: &[[i64; N]], id: i32) -> Option<[i64; N]> {
        rows.iter().find(|r| r[0] == i64::from(id)).copied()
    }

    #[test]
    fn what_cannot_be_listed_is_asked_for_one_by_one() {
        let segment = shm::Segment::make(libc::IPC_PRIVATE, 1, 0o600).map(|made| made.id());
        let set = sem::Made::new(libc::IPC_PRIVATE, 3, 0o600).map(|made| made.id());
        let ids = [segment, set, msg::make(libc::IPC_PRIVATE, 0o600)].map(|id| id.unwrap_or(-1));
        let lists = Path::new(LISTS);
        // A list that is there and cannot be read, one that is masked, and none.
        let [unreadable, masked, missing] = ["/", "/dev/null", "/nonexistent"].map(Path::new);
        let mut seen = Vec::new();
        for path in [unreadable, masked] {
            seen.push(
                row(&segments::rows(path), ids[0]).is_some_and(|r| Some(r) == row(&segments::rows(&lists.join("shm")), ids[0])),
            );
            seen.push(
                row(&semaphores::rows(path), ids[1]).is_some_and(|r| Some(r) == row(&semaphores::rows(&lists.join("sem")), ids[1])),
            );
            seen.push(row(&queues::rows(path), ids[2]).is_some_and(|r| Some(r) == row(&queues::rows(&lists.join("msg")), ids[2])));
        }
        let none = segments::rows(missing).len() + semaphores::rows(missing).len() + queues::rows(missing).len();
        let _ = (shm::remove(ids[0]), sem::remove(ids[1]), msg::remove(ids[2]));
        assert!(ids.iter().all(|id| *id >= 0), "{ids:?}");
        assert_eq!((seen, none), (vec![true; 6], 0));
    }
}
