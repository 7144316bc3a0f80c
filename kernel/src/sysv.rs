//! System V IPC objects, by their identifiers.
//!
//! Of each kind: the place of the last one, what is known of the one at a place or of one by its identifier, and how one
//! is made, changed and removed.

use crate::check;
use std::io;

/// The result of a call that returns a number.
fn number(ret: libc::c_int) -> io::Result<i32> {
    check(ret.into()).map(|n| n as i32)
}

/// Shared memory segments.
pub mod shm {
    use super::number;
    use crate::shared::Memory;
    use std::io;
    use std::ops::Deref;
    use std::ptr::NonNull;

    pub use libc::shmid_ds as Data;

    const SHM_INFO: i32 = 14;
    const SHM_STAT_ANY: i32 = 15;

    fn ask(id: i32, command: i32) -> io::Result<(i32, Data)> {
        // SAFETY: all-zero bytes are a valid value of this plain C struct.
        let mut data: Data = unsafe { std::mem::zeroed() };
        // SAFETY: `data` is valid for writing, and not shorter than what any command writes.
        let answer = number(unsafe { libc::shmctl(id, command, &raw mut data) })?;
        Ok((answer, data))
    }

    /// The place of the last one.
    pub fn last() -> io::Result<i32> {
        ask(0, SHM_INFO).map(|(last, _)| last)
    }

    /// Identifier of the one at `place`, and what is known of it.
    pub fn at(place: i32) -> io::Result<(i32, Data)> {
        ask(place, SHM_STAT_ANY)
    }

    /// What is known of segment `id`.
    pub fn stat(id: i32) -> io::Result<Data> {
        ask(id, libc::IPC_STAT).map(|(_, data)| data)
    }

    /// Keeps it in memory (SHM_LOCK).
    pub fn lock(id: i32) -> io::Result<()> {
        ask(id, libc::SHM_LOCK).map(drop)
    }

    /// Gives it owner and mode of `data`.
    pub fn change(id: i32, data: &mut Data) -> io::Result<()> {
        // SAFETY: `data` is valid for reading.
        number(unsafe { libc::shmctl(id, libc::IPC_SET, &raw mut *data) }).map(drop)
    }

    /// Removes it, when nobody has it attached any more.
    pub fn remove(id: i32) -> io::Result<()> {
        // SAFETY: IPC_RMID takes no third argument.
        number(unsafe { libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut()) }).map(drop)
    }

    /// A segment, and how long it is, which never changes.
    #[derive(Debug, Clone, Copy)]
    pub struct Segment {
        id: i32,
        bytes: usize,
    }

    impl Segment {
        /// Makes one of so many bytes.
        pub fn make(key: i32, bytes: usize, flags: i32) -> io::Result<Self> {
            // SAFETY: takes numbers only.
            let id = number(unsafe { libc::shmget(key, bytes, flags | libc::IPC_CREAT | libc::IPC_EXCL) })?;
            Ok(Self { id, bytes })
        }

        /// Segment `id`, and what is known of it.
        pub fn find(id: i32) -> io::Result<(Self, Data)> {
            let data = stat(id)?;
            let bytes = data.shm_segsz;
            Ok((Self { id, bytes }, data))
        }

        /// Its identifier.
        pub fn id(&self) -> i32 {
            self.id
        }

        /// Attaches it with `flags`, without allocating.
        pub fn attach(&self, flags: i32) -> io::Result<Attached> {
            // SAFETY: a null address lets the kernel choose a free range.
            let at = unsafe { libc::shmat(self.id, std::ptr::null(), flags) };
            match NonNull::new(at.cast::<u8>()) {
                Some(base) if at.addr() != usize::MAX => {
                    // SAFETY: nothing is read or written of it before it is known to be as long.
                    let attached = Attached(unsafe { Memory::at_base(base, self.bytes.next_multiple_of(4096)) });
                    // Another one may have got its number since it was looked at. What is attached keeps its own.
                    match stat(self.id)?.shm_segsz >= self.bytes {
                        true => Ok(attached),
                        false => Err(io::Error::from_raw_os_error(libc::EIDRM)),
                    }
                }
                _ => Err(io::Error::last_os_error()),
            }
        }
    }

    /// A segment that this process has attached: all of its pages.
    #[derive(Debug)]
    pub struct Attached(Memory);

    impl Deref for Attached {
        type Target = Memory;

        fn deref(&self) -> &Memory {
            &self.0
        }
    }

    impl Drop for Attached {
        fn drop(&mut self) {
            // SAFETY: the address came from shmat, and nothing refers into the attachment any more.
            unsafe { libc::shmdt(self.0.range().0.cast()) };
        }
    }
}

/// Message queues.
pub mod msg {
    use super::number;
    use std::io;

    pub use libc::msqid_ds as Data;

    const MSG_COPY: i32 = 0o40000;
    const MSG_STAT_ANY: i32 = 13;

    fn ask(id: i32, command: i32) -> io::Result<(i32, Data)> {
        // SAFETY: all-zero bytes are a valid value of this plain C struct.
        let mut data: Data = unsafe { std::mem::zeroed() };
        // SAFETY: `data` is valid for writing, and not shorter than what any command writes.
        let answer = number(unsafe { libc::msgctl(id, command, &raw mut data) })?;
        Ok((answer, data))
    }

    /// The place of the last one.
    pub fn last() -> io::Result<i32> {
        ask(0, libc::MSG_INFO).map(|(last, _)| last)
    }

    /// Identifier of the one at `place`, and what is known of it.
    pub fn at(place: i32) -> io::Result<(i32, Data)> {
        ask(place, MSG_STAT_ANY)
    }

    /// What is known of queue `id`.
    pub fn stat(id: i32) -> io::Result<Data> {
        ask(id, libc::IPC_STAT).map(|(_, data)| data)
    }

    /// Gives it limit, owner and mode of `data`.
    pub fn change(id: i32, data: &mut Data) -> io::Result<()> {
        // SAFETY: `data` is valid for reading.
        number(unsafe { libc::msgctl(id, libc::IPC_SET, &raw mut *data) }).map(drop)
    }

    /// Removes it.
    pub fn remove(id: i32) -> io::Result<()> {
        // SAFETY: IPC_RMID takes no third argument.
        number(unsafe { libc::msgctl(id, libc::IPC_RMID, std::ptr::null_mut()) }).map(drop)
    }

    /// Makes one.
    pub fn make(key: i32, flags: i32) -> io::Result<i32> {
        // SAFETY: takes numbers only.
        number(unsafe { libc::msgget(key, flags | libc::IPC_CREAT | libc::IPC_EXCL) })
    }

    /// Copies the message at `place` into `buf`, its type into the first word; returns the length of its text.
    pub fn copy(id: i32, place: i64, buf: &mut [u64]) -> io::Result<usize> {
        let Some(text) = buf.len().checked_sub(1) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let flags = MSG_COPY | libc::IPC_NOWAIT;
        // SAFETY: the buffer has room for the type and so many bytes.
        crate::length(unsafe { libc::msgrcv(id, buf.as_mut_ptr().cast(), text * size_of::<u64>(), place, flags) })
    }

    /// Sends a message, without waiting for room.
    pub fn send(id: i32, kind: i64, text: &[u8]) -> io::Result<()> {
        let mut message = kind.to_ne_bytes().to_vec();
        message.extend_from_slice(text);
        // SAFETY: `message` holds the type and the text of the stated length.
        number(unsafe { libc::msgsnd(id, message.as_ptr().cast(), text.len(), libc::IPC_NOWAIT) }).map(drop)
    }
}

/// Sets of semaphores.
pub mod sem {
    use super::number;
    use std::io;

    pub use libc::semid_ds as Data;

    const SEM_STAT_ANY: i32 = 20;

    /// The fourth argument of `semctl`.
    #[repr(C)]
    #[derive(Clone, Copy)]
    union Argument {
        value: libc::c_int,
        data: *mut Data,
        values: *mut u16,
    }

    fn ask(id: i32, command: i32) -> io::Result<(i32, Data)> {
        // SAFETY: all-zero bytes are a valid value of this plain C struct.
        let mut data: Data = unsafe { std::mem::zeroed() };
        let argument = Argument { data: &raw mut data };
        // SAFETY: `data` is valid for writing, and not shorter than what any command writes.
        let answer = number(unsafe { libc::semctl(id, 0, command, argument) })?;
        Ok((answer, data))
    }

    /// The place of the last one.
    pub fn last() -> io::Result<i32> {
        ask(0, libc::SEM_INFO).map(|(last, _)| last)
    }

    /// Identifier of the one at `place`, and what is known of it.
    pub fn at(place: i32) -> io::Result<(i32, Data)> {
        ask(place, SEM_STAT_ANY)
    }

    /// What is known of set `id`.
    pub fn stat(id: i32) -> io::Result<Data> {
        ask(id, libc::IPC_STAT).map(|(_, data)| data)
    }

    /// What is known of set `id`, and the values of its semaphores.
    pub fn values(id: i32) -> io::Result<(Data, Vec<u16>)> {
        let data = stat(id)?;
        let mut values = vec![0u16; data.sem_nsems as usize];
        let argument = Argument {
            values: values.as_mut_ptr(),
        };
        // SAFETY: GETALL writes one value for each semaphore of the set.
        number(unsafe { libc::semctl(id, 0, libc::GETALL, argument) })?;
        Ok((data, values))
    }

    /// The process that has used semaphore `at` of set `id` last.
    pub fn user(id: i32, at: usize) -> io::Result<i32> {
        let at = i32::try_from(at).map_err(io::Error::other)?;
        // SAFETY: GETPID takes no fourth argument.
        number(unsafe { libc::semctl(id, at, libc::GETPID, Argument { value: 0 }) })
    }

    /// Gives it owner and mode of `data`.
    pub fn change(id: i32, data: &mut Data) -> io::Result<()> {
        let argument = Argument { data };
        // SAFETY: `data` is valid for reading.
        number(unsafe { libc::semctl(id, 0, libc::IPC_SET, argument) }).map(drop)
    }

    /// Removes it.
    pub fn remove(id: i32) -> io::Result<()> {
        // SAFETY: IPC_RMID takes no fourth argument.
        number(unsafe { libc::semctl(id, 0, libc::IPC_RMID) }).map(drop)
    }

    /// Carries out operations, all or none.
    pub fn operate(id: i32, operations: &mut [libc::sembuf]) -> io::Result<()> {
        // SAFETY: live operations, as many as is said.
        number(unsafe { libc::semop(id, operations.as_mut_ptr(), operations.len()) }).map(drop)
    }

    /// A set that has just been made.
    #[derive(Debug)]
    pub struct Made {
        id: i32,
        count: usize,
    }

    impl Made {
        /// Makes one of so many semaphores.
        pub fn new(key: i32, count: usize, flags: i32) -> io::Result<Self> {
            let n = i32::try_from(count).map_err(io::Error::other)?;
            // SAFETY: takes numbers only.
            let id = number(unsafe { libc::semget(key, n, flags | libc::IPC_CREAT | libc::IPC_EXCL) })?;
            Ok(Self { id, count })
        }

        /// Its identifier.
        pub fn id(&self) -> i32 {
            self.id
        }

        /// Gives its semaphores these values, of which there must be as many.
        pub fn set(&self, values: &[u16]) -> io::Result<()> {
            if values.len() != self.count {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            let argument = Argument {
                values: values.as_ptr().cast_mut(),
            };
            // SAFETY: SETALL reads one value for each semaphore of the set.
            number(unsafe { libc::semctl(self.id, 0, libc::SETALL, argument) }).map(drop)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Removed when the test is over, however that ends.
    struct Removed(i32, fn(i32) -> io::Result<()>);

    impl Drop for Removed {
        fn drop(&mut self) {
            let _ = self.1(self.0);
        }
    }

    #[test]
    fn segments_hold_what_was_written() {
        let segment = shm::Segment::make(libc::IPC_PRIVATE, 5000, 0o600).unwrap();
        let _removed = Removed(segment.id(), shm::remove);
        let attached = segment.attach(0).unwrap();
        attached.write(4999, b"x");
        let (same, data) = shm::Segment::find(segment.id()).unwrap();
        assert_eq!((same.id(), data.shm_segsz, data.shm_nattch), (segment.id(), 5000, 1));
        let mut back = [0; 3];
        same.attach(libc::SHM_RDONLY).unwrap().read(4998, &mut back);
        assert_eq!(back, [0, b'x', 0]);
        drop(attached);
        assert_eq!(shm::stat(segment.id()).unwrap().shm_nattch, 0);
        assert!((0..=shm::last().unwrap()).any(|place| shm::at(place).is_ok_and(|(id, _)| id == segment.id())));
    }

    #[test]
    fn queues_hold_what_was_sent() {
        let id = msg::make(libc::IPC_PRIVATE, 0o600).unwrap();
        let _removed = Removed(id, msg::remove);
        msg::send(id, 7, b"text").unwrap();
        let mut buf = [0; 2];
        // Only kernels for checkpoints copy.
        match msg::copy(id, 0, &mut buf) {
            Ok(n) => assert_eq!((n, buf[0], &buf[1].to_ne_bytes()[..4]), (4, 7, &b"text"[..])),
            Err(e) => assert_eq!(e.raw_os_error(), Some(libc::ENOSYS)),
        }
        let mut data = msg::stat(id).unwrap();
        assert_eq!(data.msg_qnum, 1);
        data.msg_qbytes /= 2;
        msg::change(id, &mut data).unwrap();
        assert_eq!(msg::stat(id).unwrap().msg_qbytes, data.msg_qbytes);
        assert!((0..=msg::last().unwrap()).any(|place| msg::at(place).is_ok_and(|(at, _)| at == id)));
    }

    #[test]
    fn semaphores_have_the_values_that_they_were_given() {
        let set = sem::Made::new(libc::IPC_PRIVATE, 2, 0o600).unwrap();
        let id = set.id();
        let _removed = Removed(id, sem::remove);
        assert!(set.set(&[1]).is_err());
        set.set(&[3, 4]).unwrap();
        let add = |sem_num, sem_op| libc::sembuf {
            sem_num,
            sem_op,
            sem_flg: libc::IPC_NOWAIT as i16,
        };
        sem::operate(id, &mut [add(0, -1), add(1, 2)]).unwrap();
        assert!(sem::operate(id, &mut [add(0, 1), add(1, -7)]).is_err());
        let (data, values) = sem::values(id).unwrap();
        assert_eq!((data.sem_nsems, values), (2, vec![2, 6]));
        assert_eq!(sem::user(id, 1).unwrap(), std::process::id().cast_signed());
        let mut data = sem::stat(id).unwrap();
        data.sem_perm.mode = 0o640;
        sem::change(id, &mut data).unwrap();
        assert_eq!(sem::stat(id).unwrap().sem_perm.mode & 0o777, 0o640);
        assert!((0..=sem::last().unwrap()).any(|place| sem::at(place).is_ok_and(|(at, _)| at == id)));
    }
}
