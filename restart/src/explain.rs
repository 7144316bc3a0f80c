//! What the restorer reports in numbers, in words.

use crate::fail::RestartError;
use belay_abi::restore::{Slot, Step};
use belay_image::extents::Extent;
use belay_image::model::{Process, VmaKind};
use belay_image::{is_bad_sector, ImageError};
use std::io;
use std::sync::atomic::Ordering;

/// The error that process `p` reported in `slot`.
pub(crate) fn restorer(p: &Process, extents: &[Extent], slot: &Slot) -> RestartError {
    let step = Step::from_u32(slot.step.load(Ordering::Acquire));
    let index = slot.index.load(Ordering::Acquire);
    let errno = io::Error::from_raw_os_error(slot.errno.load(Ordering::Acquire));
    let i = index as usize;
    let vma = || p.vmas.get(i).map_or_else(|| "a mapping".to_owned(), describe);
    let extent = || {
        extents.get(i).map_or_else(
            || "an extent".to_owned(),
            |e| {
                format!(
                    "chunk {}, {} bytes at {} (address {:#x})",
                    e.chunk,
                    e.bytes,
                    e.offset(),
                    e.vaddr
                )
            },
        )
    };
    let thread = || {
        p.threads
            .get(i)
            .map_or_else(|| "a helper thread".to_owned(), |t| format!("thread {}", t.tid))
    };
    let (phase, reason) = match step {
        Step::Clear => ("map", format!("clear the address space: {errno}")),
        Step::Vdso => ("map", format!("put the kernel's pages in place: {errno}")),
        Step::Map => ("map", format!("{}: {errno}", vma())),
        Step::Attach => ("map", format!("attach {}: {errno}", vma())),
        Step::Fill if is_bad_sector(&errno) => return damaged(p, &format!("{}: {errno}", extent())),
        Step::Fill => ("refill", format!("read {}: {errno}", extent())),
        Step::Checksum => return damaged(p, &format!("{}: checksum does not match", extent())),
        Step::Short => return damaged(p, &format!("{}: the file ends before", extent())),
        Step::Advise => ("map", format!("protection, advice or lock of {}: {errno}", vma())),
        Step::Key => ("map", format!("memory protection key {index}: {errno}")),
        Step::Layout => ("map", format!("set brk, arguments and environment: {errno}")),
        Step::Membarrier => ("map", format!("membarrier registration {index}: {errno}")),
        Step::Sigaction => ("threads", format!("disposition of signal {index}: {errno}")),
        Step::Thread => ("threads", format!("make {}: {errno}", thread())),
        Step::ThreadState => ("threads", format!("state of {}: {errno}", thread())),
        Step::Credentials => ("threads", format!("credentials (step {index}): {errno}")),
        Step::Pending => ("threads", format!("queue pending signal {index}: {errno}")),
        Step::Itimer => ("threads", format!("interval timer {index}: {errno}")),
        Step::Timer => ("threads", format!("POSIX timer {index}: {errno}")),
        Step::Process if index == 6 => ("map", format!("PR_SET_MDWE (since Linux 6.3): {errno}")),
        Step::Process => ("threads", format!("process settings ({index}): {errno}")),
        Step::Close => ("threads", format!("close descriptors: {errno}")),
        Step::Lock => ("threads", format!("file lock {index}: {errno}: another program holds it now")),
        Step::Ring => (
            "map",
            format!(
                "asynchronous I/O (io_setup), context {index}: {errno}: is fs.aio-max-nr large enough, and does this machine have as many processors?"
            ),
        ),
        Step::None | Step::Magic => (
            "map",
            "the restorer program is of another build: install belay again".to_owned(),
        ),
    };
    RestartError::at(phase, format!("process {} ({}): {reason}", p.pid, p.comm))
}

/// The caller falls back to an older generation.
fn damaged(p: &Process, reason: &str) -> RestartError {
    RestartError::Image(ImageError::Damaged {
        path: format!("process {} ({})", p.pid, p.comm),
        reason: reason.to_owned(),
    })
}

fn describe(v: &belay_image::model::Vma) -> String {
    let what = match &v.kind {
        VmaKind::Anonymous { .. } => "anonymous memory".to_owned(),
        VmaKind::HugeTlb { page_bytes } => format!(
            "{} bytes in pages of {} KiB (does the machine have that many free huge pages? see vm.nr_hugepages, vm.nr_overcommit_hugepages)",
            v.end - v.start,
            page_bytes >> 10
        ),
        VmaKind::Stack => "the stack".to_owned(),
        VmaKind::Heap => "the heap".to_owned(),
        VmaKind::FilePrivate { path, .. } => path.to_string(),
        VmaKind::PrivateObject { object, .. } => format!("file without a name {:x}:{}", object.dev, object.ino),
        VmaKind::Shared { object, .. } => format!("shared object {:x}:{}", object.dev, object.ino),
        VmaKind::SysvShm { shmid, .. } => format!("System V segment {shmid}"),
        VmaKind::Vdso(name) => format!("[{name}]"),
        VmaKind::Ring => "a ring of asynchronous I/O".to_owned(),
        VmaKind::Vsyscall => "[vsyscall]".to_owned(),
        VmaKind::Device(path) => format!("the place of {path}"),
    };
    let has = |flag: &str| v.flags.iter().any(|f| f == flag);
    let needs = [
        (!v.guards.is_empty(), "guard regions need Linux 6.13, those of files 6.15"),
        (has("dp"), "MAP_DROPPABLE needs Linux 6.11"),
        (has("sl"), "mseal needs Linux 6.10"),
    ];
    let needs: Vec<&str> = needs.iter().filter(|(has, _)| *has).map(|(_, need)| *need).collect();
    let needs = if needs.is_empty() {
        String::new()
    } else {
        format!(" ({})", needs.join("; "))
    };
    format!("{what} at {:#x}-{:#x}{needs}", v.start, v.end)
}
