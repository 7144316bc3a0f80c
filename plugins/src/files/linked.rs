//! Files whose name the kernel shows as deleted, and that have another one elsewhere (maildir: made in one directory,
//! linked to another). What is written to such a file must reach that name, so it is looked for.

use super::sought::{look, FileSet, Sought};
use super::Origin;
use crate::fault::{refuse, Fault, Refusal};
use crate::seek::Seeker;
use crate::session::Session;
use crate::sys::fd;
use std::os::fd::AsRawFd;

/// File systems that never count a name of a file which has none.
const COUNTING: [i64; 4] = [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994];

/// Finds the names of those that are written. One that is only read is what it was by its contents.
pub(super) fn find(s: &mut Session<'_>, set: &mut FileSet) -> Result<(), Refusal> {
    let mut seeker = None;
    for sought in &mut set.objects {
        let object = &sought.object;
        if object.written && matches!(object.origin, Origin::Deleted { .. }) {
            let found = of(s, sought, &mut seeker);
            found.map_err(|e| e.of(sought.holder.pid, format!("file {}", sought.object.path)))?;
        }
    }
    Ok(())
}

fn of(s: &mut Session<'_>, sought: &mut Sought, seeker: &mut Option<Seeker>) -> Result<(), Fault> {
    // Of one that is only mapped an ordinary user is not told whether it has names.
    let Ok(file) = look(s, sought) else { return Ok(()) };
    let Ok(stat) = fd::fstat(file.as_raw_fd()) else {
        return Ok(());
    };
    if stat.st_nlink == 0 {
        return Ok(());
    }
    let seeker = seeker.get_or_insert_with(|| Seeker::new(s, sought.holder.pid));
    if let Some(path) = seeker.find(stat.st_dev, stat.st_ino) {
        sought.object.path = path.as_path().into();
        sought.object.origin = Origin::Named;
        sought.object.links = stat.st_nlink;
        return Ok(());
    }
    if fd::fs_magic(file.as_raw_fd()).is_ok_and(|magic| COUNTING.contains(&magic)) {
        return refuse(
            "its name has been removed, and it has another one that is not found near what the job has open; keep that directory open, or \
             close the file",
        );
    }
    s.notes.push(format!(
        "process {}: file {}: where it has another name now, what is written to it after a restart does not reach that",
        sought.holder.pid, sought.object.path
    ));
    Ok(())
}
