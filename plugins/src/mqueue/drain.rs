//! Reads the messages of a queue, which the kernel only hands out for good: all are received and sent again in the same order.
//!
//! A helper process does this, with nothing but system calls on memory laid out before, so that the messages return
//! even when the agent is killed in between. A program outside the job may take the room of a message that is out for
//! these microseconds; what then does not fit is sent by a thread of the agent as soon as there is room.

use crate::fault::{not_now, At, Fault};
use crate::sys::fd;
use belay_kernel::shared::Shared;
use belay_kernel::{apart, mq};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;

/// A message: priority and text.
pub(crate) type Message = (u32, Vec<u8>);

/// Most memory that is laid out for messages that may have become longer meanwhile, bytes. What is not used takes none.
const ROOM: usize = 1 << 30;

/// Words of the board at the beginning of the memory shared with the helper: how many messages it has received and sent
/// again, and the number of its error.
const RECEIVED: usize = 0;
const SENT: usize = 1;
const ERROR: usize = 2;
const BOARD: usize = 3;

/// Shared memory: board, entries of two words (priority and length of a message), data.
struct Board {
    memory: Shared,
    count: usize,
    /// Where the data begins, and where it ends.
    data: Range<usize>,
}

impl Board {
    fn new(count: usize, room: usize) -> io::Result<Self> {
        let entries = count.checked_mul(2 * size_of::<u64>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let begin = BOARD * size_of::<u64>() + entries;
        let end = begin.checked_add(room).ok_or(io::ErrorKind::OutOfMemory)?;
        let memory = Shared::unreserved_with_children(end)?;
        let data = begin..end;
        Ok(Self { memory, count, data })
    }

    fn note(&self, word: usize, value: usize) {
        let word = self.memory.word(word * size_of::<u64>());
        word.store(value as u64, Ordering::Relaxed);
    }

    fn noted(&self, word: usize) -> usize {
        self.memory.word(word * size_of::<u64>()).load(Ordering::Relaxed) as usize
    }

    /// Priority and length of message `i`.
    fn entry(&self, i: usize) -> (u32, usize) {
        let at = BOARD + 2 * i;
        (self.noted(at) as u32, self.noted(at + 1))
    }

    /// The first `count` messages, which the helper has received.
    fn messages(&self, count: usize) -> Vec<Message> {
        let mut at = self.data.start;
        let all = (0..count.min(self.count)).map_while(|i| {
            let (priority, bytes) = self.entry(i);
            let end = at + bytes;
            if end > self.data.end {
                return None;
            }
            let mut text = vec![0; bytes];
            self.memory.read(at, &mut text);
            at = end;
            Some((priority, text))
        });
        all.collect()
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
    let board = Board::new(count, bytes.saturating_add(max)).at("map memory for its messages")?;
    let child = apart::child(|| helper(&board, &reader, &writer, max)).at("make a process that reads its messages")?;
    let status = loop {
        match child.wait(libc::__WALL) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            status => break status.at("wait for the process that reads its messages")?,
        }
    };
    let (received, sent) = (board.noted(RECEIVED), board.noted(SENT));
    let messages = board.messages(received);
    if sent < received {
        send_later(writer, messages.get(sent..).unwrap_or_default().to_vec());
    }
    if status != 0 || received != count {
        return not_now(format!(
            "{} of its {count} messages could be read ({}); programs outside the job use this queue",
            received,
            io::Error::from_raw_os_error(board.noted(ERROR) as i32)
        ));
    }
    Ok(messages)
}

/// Receives everything and sends it again, without waiting: the time-outs have passed already.
fn helper(board: &Board, reader: &OwnedFd, writer: &OwnedFd, max: usize) -> i32 {
    let (mut received, mut at) = (0, board.data.start);
    while received < board.count {
        // Those received so far are longer than what the queue held: it is used meanwhile.
        if at + max > board.data.end {
            board.note(ERROR, libc::ENOBUFS as usize);
            break;
        }
        match mq::receive_into(reader, &board.memory, (at, max)) {
            Ok((bytes, priority)) => {
                let entry = BOARD + 2 * received;
                board.note(entry, priority as usize);
                board.note(entry + 1, bytes);
                at += bytes;
                received += 1;
                // Now, not in the end: the agent sends again what this process, killed, has not.
                board.note(RECEIVED, received);
            }
            Err(e) => {
                board.note(ERROR, e.raw_os_error().unwrap_or(0) as usize);
                break;
            }
        }
    }
    at = board.data.start;
    for sent in 0..received {
        let (priority, bytes) = board.entry(sent);
        if mq::send_from(writer, &board.memory, (at, bytes), priority).is_err() {
            break;
        }
        at += bytes;
        board.note(SENT, sent + 1);
    }
    0
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
                match mq::send(&writer, &text, priority).map_err(|e| e.kind()) {
                    Ok(()) => break,
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

    const COUNT: usize = 5;
    const LONG: usize = 6000;

    /// A queue of its own with messages that are all long, opened twice.
    fn queue(test: &str) -> [OwnedFd; 2] {
        let name = std::ffi::CString::new(format!("/belay-drain-{test}-{}", std::process::id())).unwrap();
        let one = mq::create(&name, 0o600, COUNT as i64, LONG as i64).unwrap();
        let other = fd::open(&fd::self_path(one.as_raw_fd()), libc::O_RDWR, 0).unwrap();
        mq::unlink(&name).unwrap();
        for i in 0..COUNT {
            mq::send(&other, &vec![i as u8; LONG], 1).unwrap();
        }
        [one, other]
    }

    fn waiting(queue: &OwnedFd) -> i64 {
        mq::attributes(queue).unwrap().mq_curmsgs
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
