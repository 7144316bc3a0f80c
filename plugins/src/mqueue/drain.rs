//! Reads the messages of a queue, which the kernel only hands out for good: all are received and sent again in the same order.
//!
//! A helper process does this, with nothing but system calls on memory laid out before, so that the messages return
//! even when the agent is killed in between. A program outside the job may take the room of a message that is out for
//! these microseconds; what then does not fit is sent by a thread of the agent as soon as there is room.

use crate::fault::{not_now, At, Fault};
use crate::sys::{check, check_len, fd};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// A message: priority and text.
pub(crate) type Message = (u32, Vec<u8>);

/// Most memory that is laid out for messages that may have become longer meanwhile, bytes. What is not used takes none.
const ROOM: usize = 1 << 30;

/// Head of the memory shared with the helper.
#[repr(C)]
struct Board {
    received: usize,
    sent: usize,
    /// Error number of the helper.
    error: i32,
}

/// Where a message lies in the data behind the entries.
#[repr(C)]
#[derive(Clone, Copy)]
struct Entry {
    priority: u32,
    bytes: usize,
}

/// Shared memory: board, entries, data.
struct Shared {
    base: *mut u8,
    bytes: usize,
    count: usize,
    data: usize,
    /// Bytes of data.
    room: usize,
}

impl Shared {
    fn new(count: usize, room: usize) -> io::Result<Self> {
        let entries = count.checked_mul(size_of::<Entry>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let data = size_of::<Board>() + entries;
        let bytes = data.checked_add(room).ok_or(io::ErrorKind::OutOfMemory)?;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, prot, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            base: base.cast(),
            bytes,
            count,
            data,
            room,
        })
    }

    fn board(&self) -> *mut Board {
        self.base.cast()
    }

    fn entry(&self, i: usize) -> *mut Entry {
        debug_assert!(i < self.count);
        // SAFETY: the mapping holds `count` entries behind the board, aligned as the board is.
        unsafe { self.base.add(size_of::<Board>()).cast::<Entry>().add(i) }
    }

    fn text(&self, offset: usize) -> *mut u8 {
        // SAFETY: callers stay within the data.
        unsafe { self.base.add(self.data + offset) }
    }

    fn messages(&self, count: usize) -> Vec<Message> {
        let mut offset = 0;
        let all = (0..count.min(self.count)).map_while(|i| {
            // SAFETY: the helper has written this entry and has ended.
            let e = unsafe { self.entry(i).read() };
            let end = offset + e.bytes;
            if end > self.room {
                return None;
            }
            // SAFETY: the helper has received that many bytes there, which end within the data.
            let text = unsafe { std::slice::from_raw_parts(self.text(offset), e.bytes) };
            offset = end;
            Some((e.priority, text.to_vec()))
        });
        all.collect()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own.
        unsafe { libc::munmap(self.base.cast(), self.bytes) };
    }
}

/// The `count` messages of a queue, of `bytes` bytes together and at most `max` each, which are in it again afterwards.
pub(crate) fn copy(reader: OwnedFd, writer: OwnedFd, count: usize, bytes: usize, max: usize) -> Result<Vec<Message>, Fault> {
    // A program outside the job may put longer ones in their place before they are read.
    let longest = count.checked_mul(max).filter(|all| *all <= ROOM).unwrap_or(0);
    copy_within((reader, writer), count, longest.max(bytes), max)
}

/// The same for messages of `bytes` bytes at most.
fn copy_within((reader, writer): (OwnedFd, OwnedFd), count: usize, bytes: usize, max: usize) -> Result<Vec<Message>, Fault> {
    // The kernel asks for room for the largest message each time.
    let shared = Shared::new(count, bytes.saturating_add(max)).at("map memory for its messages")?;
    // SAFETY: the child runs `helper`, which makes system calls on memory made before and ends.
    let pid = check(unsafe { libc::fork() }).at("make a process that reads its messages")?;
    if pid == 0 {
        helper(&shared, reader.as_raw_fd(), writer.as_raw_fd(), max);
    }
    let mut status = 0;
    loop {
        // SAFETY: `status` is valid for writing.
        match check(unsafe { libc::waitpid(pid, &mut status, libc::__WALL) }) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e).at("wait for the process that reads its messages"),
            Ok(_) => break,
        }
    }
    // SAFETY: the helper has ended; nobody else writes there.
    let board = unsafe { shared.board().read() };
    let messages = shared.messages(board.received);
    if board.sent < board.received {
        send_later(writer, messages.get(board.sent..).unwrap_or_default().to_vec());
    }
    if status != 0 || board.received != count {
        return not_now(format!(
            "{} of its {count} messages could be read ({}); programs outside the job use this queue",
            board.received,
            io::Error::from_raw_os_error(board.error)
        ));
    }
    Ok(messages)
}

/// Receives everything and sends it again, without waiting: the time-outs have passed already.
fn helper(shared: &Shared, reader: RawFd, writer: RawFd, max: usize) -> ! {
    let past = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let board = shared.board();
    let (mut received, mut sent, mut error) = (0, 0, 0);
    let mut offset = 0;
    while received < shared.count {
        // Those received so far are longer than what the queue held: it is used meanwhile.
        if offset + max > shared.room {
            error = libc::ENOBUFS;
            break;
        }
        let mut priority = 0;
        // SAFETY: the data has room for `max` bytes there.
        let n = check_len(unsafe { libc::mq_timedreceive(reader, shared.text(offset).cast(), max, &mut priority, &past) });
        match n {
            Ok(bytes) => {
                // SAFETY: the entry is in the mapping.
                unsafe { shared.entry(received).write(Entry { priority, bytes }) };
                offset += bytes;
                received += 1;
                // Now, not in the end: the agent sends again what this process, killed, has not.
                // SAFETY: the board is in the mapping, and the agent reads it after the end of this process.
                unsafe { board.write(Board { received, sent, error }) };
            }
            Err(e) => {
                error = e.raw_os_error().unwrap_or(0);
                break;
            }
        }
    }
    offset = 0;
    while sent < received {
        // SAFETY: written above.
        let e = unsafe { shared.entry(sent).read() };
        // SAFETY: the text was received there.
        let done = check(unsafe { libc::mq_timedsend(writer, shared.text(offset).cast(), e.bytes, e.priority, &past) });
        if done.is_err() {
            break;
        }
        offset += e.bytes;
        sent += 1;
        // SAFETY: as above.
        unsafe { board.write(Board { received, sent, error }) };
    }
    // SAFETY: the board is in the mapping, and the agent reads it after the end of this process.
    unsafe { board.write(Board { received, sent, error }) };
    // SAFETY: ends the process without running what the agent has registered.
    unsafe { libc::_exit(0) }
}

/// Sends what did not fit, as soon as it does.
pub(super) fn send_later(writer: OwnedFd, messages: Vec<Message>) {
    tracing::warn!(
        messages = messages.len(),
        "a program outside the job has filled a message queue while it was read; the rest follows"
    );
    std::thread::spawn(move || {
        for (priority, text) in messages {
            loop {
                // SAFETY: the text is valid for reading.
                let sent = check(unsafe { libc::mq_send(writer.as_raw_fd(), text.as_ptr().cast(), text.len(), priority) });
                match sent.map_err(|e| e.kind()) {
                    Ok(_) => break,
                    Err(io::ErrorKind::WouldBlock) => drop(fd::wait(writer.as_raw_fd(), libc::POLLOUT, -1)),
                    Err(io::ErrorKind::Interrupted) => {}
                    Err(error) => return tracing::error!(%error, "a message is lost"),
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::FromRawFd as _;

    const COUNT: usize = 5;
    const LONG: usize = 6000;

    /// A queue of its own with messages that are all long, opened twice.
    fn queue(test: &str) -> [OwnedFd; 2] {
        let name = std::ffi::CString::new(format!("/belay-drain-{test}-{}", std::process::id())).unwrap();
        // SAFETY: all-zero bytes are a valid value of this plain C struct.
        let mut a: libc::mq_attr = unsafe { std::mem::zeroed() };
        (a.mq_maxmsg, a.mq_msgsize) = (COUNT as i64, LONG as i64);
        let mut open = || {
            let flags = libc::O_CREAT | libc::O_RDWR | libc::O_CLOEXEC;
            // SAFETY: the name and the attributes are live; the mode is a number.
            let made = check(unsafe { libc::mq_open(name.as_ptr(), flags, 0o600, &raw mut a) }).unwrap();
            // SAFETY: the kernel has just returned it.
            unsafe { OwnedFd::from_raw_fd(made) }
        };
        let both = [open(), open()];
        // SAFETY: the name is live.
        check(unsafe { libc::mq_unlink(name.as_ptr()) }).unwrap();
        for i in 0..COUNT {
            let text = vec![i as u8; LONG];
            // SAFETY: the text is valid for reading.
            check(unsafe { libc::mq_send(both[1].as_raw_fd(), text.as_ptr().cast(), LONG, 1) }).unwrap();
        }
        both
    }

    fn waiting(queue: &OwnedFd) -> i64 {
        // SAFETY: all-zero bytes are a valid value of this plain C struct.
        let mut a: libc::mq_attr = unsafe { std::mem::zeroed() };
        // SAFETY: `a` is valid for writing.
        check(unsafe { libc::mq_getattr(queue.as_raw_fd(), &mut a) }).unwrap();
        a.mq_curmsgs
    }

    #[test]
    fn messages_that_have_become_longer_are_read_nevertheless() {
        let [reader, writer] = queue("longer");
        let again = writer.try_clone().unwrap();
        let all = copy(reader, writer, COUNT, COUNT, LONG).unwrap();
        let want: Vec<Message> = (0..COUNT).map(|i| (1, vec![i as u8; LONG])).collect();
        assert!(all == want);
        assert_eq!(waiting(&again), COUNT as i64);
    }

    #[test]
    fn messages_for_which_there_is_no_room_stay_in_the_queue() {
        let [reader, writer] = queue("room");
        let again = writer.try_clone().unwrap();
        let refused = copy_within((reader, writer), COUNT, COUNT, LONG).unwrap_err();
        assert!(matches!(refused, Fault::Passing(why) if why.contains("1 of its 5 messages")));
        assert_eq!(waiting(&again), COUNT as i64);
    }
}
