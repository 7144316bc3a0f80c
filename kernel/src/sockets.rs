//! Sockets: addresses and options as the kernel writes them, messages with what comes beside their data.

use crate::plain::{bytes_of, Plain};
use crate::{check, length};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Largest address.
const ADDRESS_MAX: usize = size_of::<libc::sockaddr_storage>();
/// Words of a control buffer that holds the most descriptors one message can carry (253) with room to spare.
const CONTROL_WORDS: usize = 512;
/// A message's sender, where SO_PASSPIDFD is set.
const SCM_PIDFD: i32 = 4;
/// What netfilter takes and gives by `setsockopt` and `getsockopt` begins here.
const FILTER_TABLES: i32 = 64;
const FLOW_LABELS: i32 = 32;
const MCAST_MSFILTER: i32 = 48;
const TCP_ZEROCOPY_RECEIVE: i32 = 35;
const TCP_AO_GET_KEYS: i32 = 41;
/// Bytes of an instruction of a filter (`struct sock_filter`).
pub const INSTRUCTION: usize = 8;

type NameCall = unsafe extern "C" fn(libc::c_int, *mut libc::sockaddr, *mut libc::socklen_t) -> libc::c_int;

fn name(fd: impl AsFd, call: NameCall) -> io::Result<Vec<u8>> {
    let mut raw = vec![0u8; ADDRESS_MAX];
    let mut len = ADDRESS_MAX as libc::socklen_t;
    // SAFETY: `raw` has `len` bytes; byte buffers may hold any address, the kernel writes without alignment.
    check(unsafe { call(fd.as_fd().as_raw_fd(), raw.as_mut_ptr().cast(), &raw mut len) }.into())?;
    raw.truncate(len as usize);
    Ok(raw)
}

/// The socket's own address.
pub fn local(fd: impl AsFd) -> io::Result<Vec<u8>> {
    name(fd, libc::getsockname)
}

/// Its peer's address.
pub fn peer(fd: impl AsFd) -> io::Result<Vec<u8>> {
    name(fd, libc::getpeername)
}

/// `bind`.
pub fn bind(fd: impl AsFd, address: &[u8]) -> io::Result<()> {
    let (at, len) = (address.as_ptr(), address.len() as libc::socklen_t);
    // SAFETY: `address` is valid for reading its length.
    check(unsafe { libc::bind(fd.as_fd().as_raw_fd(), at.cast(), len) }.into()).map(drop)
}

/// `connect`.
pub fn connect(fd: impl AsFd, address: &[u8]) -> io::Result<()> {
    let (at, len) = (address.as_ptr(), address.len() as libc::socklen_t);
    // SAFETY: `address` is valid for reading its length.
    check(unsafe { libc::connect(fd.as_fd().as_raw_fd(), at.cast(), len) }.into()).map(drop)
}

/// Refuses options of which the kernel would write elsewhere than into the bytes of `value`: those that hold addresses
/// (TCP_ZEROCOPY_RECEIVE, tables of packet filters), whose length counts no bytes (see [`filter`]) or one of several
/// elements (TCP_AO_GET_KEYS), or that are written where they are set (IPV6_FLOWLABEL_MGR). Of other levels nothing is known.
fn is_only_bytes(level: i32, option: i32, value: &[u8]) -> io::Result<()> {
    let known = match level {
        libc::SOL_SOCKET => ![libc::SO_ATTACH_FILTER, libc::SO_ATTACH_REUSEPORT_CBPF].contains(&option),
        libc::IPPROTO_IP => option < FILTER_TABLES && option != libc::IP_MSFILTER,
        libc::IPPROTO_IPV6 => ![FLOW_LABELS, FILTER_TABLES].contains(&option),
        libc::IPPROTO_TCP => ![TCP_ZEROCOPY_RECEIVE, TCP_AO_GET_KEYS].contains(&option),
        libc::IPPROTO_UDP | libc::IPPROTO_UDPLITE | libc::SOL_NETLINK => true,
        _ => false,
    };
    let lists = [libc::IPPROTO_IP, libc::IPPROTO_IPV6].contains(&level) && option == MCAST_MSFILTER;
    match known && (!lists || has_room(value)) {
        true => Ok(()),
        false => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// Whether a `struct group_filter` has room for as many senders as it says: the kernel looks at no more than that.
fn has_room(value: &[u8]) -> bool {
    const HEAD: usize = 144;
    let count = value.get(HEAD - 4..).and_then(|rest| rest.first_chunk());
    count.is_none_or(|count| (value.len() - HEAD) / ADDRESS_MAX >= u32::from_ne_bytes(*count) as usize)
}

/// Reads an option of type `T`; what the kernel does not write is zero.
pub fn option<T: Plain>(fd: impl AsFd, level: i32, option: i32) -> io::Result<T> {
    let mut value = T::zero();
    is_only_bytes(level, option, bytes_of(std::slice::from_ref(&value)))?;
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` has `len` bytes, and any bytes are valid in it.
    check(unsafe { libc::getsockopt(fd.as_fd().as_raw_fd(), level, option, (&raw mut value).cast(), &raw mut len) }.into())?;
    Ok(value)
}

/// Reads an option of any length into `buf`: the part that has been written.
pub fn option_into(fd: impl AsFd, level: i32, option: i32, buf: &mut [u8]) -> io::Result<&[u8]> {
    let mut len = libc::socklen_t::try_from(buf.len()).map_err(io::Error::other)?;
    is_only_bytes(level, option, buf)?;
    // SAFETY: `buf` has `len` bytes.
    check(unsafe { libc::getsockopt(fd.as_fd().as_raw_fd(), level, option, buf.as_mut_ptr().cast(), &raw mut len) }.into())?;
    Ok(&buf[..(len as usize).min(buf.len())])
}

/// Sets an option of type `T`.
pub fn set_option<T: Plain>(fd: impl AsFd, level: i32, option: i32, value: &T) -> io::Result<()> {
    set_option_bytes(fd, level, option, bytes_of(std::slice::from_ref(value)))
}

/// Sets an option from bytes as [`option_into`] has read them.
pub fn set_option_bytes(fd: impl AsFd, level: i32, option: i32, raw: &[u8]) -> io::Result<()> {
    is_only_bytes(level, option, raw)?;
    let len = raw.len() as libc::socklen_t;
    // SAFETY: `raw` is valid for reading its length.
    check(unsafe { libc::setsockopt(fd.as_fd().as_raw_fd(), level, option, raw.as_ptr().cast(), len) }.into()).map(drop)
}

/// Reads instructions of the socket's filter (`SO_GET_FILTER`), of 8 bytes each, into `buf`: how many there are, of which
/// as many are read as it has room for, if there is any.
pub fn filter(fd: impl AsFd, buf: &mut [u8]) -> io::Result<usize> {
    let mut len = libc::socklen_t::try_from(buf.len() / INSTRUCTION).map_err(io::Error::other)?;
    let (fd, at) = (fd.as_fd().as_raw_fd(), buf.as_mut_ptr().cast());
    // SAFETY: for this option the length is counted in instructions, for which `buf` has room.
    check(unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, at, &raw mut len) }.into())?;
    Ok(len as usize)
}

/// Attaches a filter of these instructions, as [`filter`] reads them.
pub fn attach_filter(fd: impl AsFd, program: &[u8]) -> io::Result<()> {
    let mut code: Vec<libc::sock_filter> = program
        .chunks_exact(INSTRUCTION)
        .map(|i| libc::sock_filter {
            code: u16::from_ne_bytes([i[0], i[1]]),
            jt: i[2],
            jf: i[3],
            k: u32::from_ne_bytes([i[4], i[5], i[6], i[7]]),
        })
        .collect();
    let all = libc::sock_fprog {
        len: u16::try_from(code.len()).map_err(io::Error::other)?,
        filter: code.as_mut_ptr(),
    };
    let (fd, len) = (fd.as_fd().as_raw_fd(), size_of_val(&all) as libc::socklen_t);
    let at = (&raw const all).cast();
    // SAFETY: `all` is live and of that length; `code`, to which it points, lives until the kernel has copied it.
    check(unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, at, len) }.into()).map(drop)
}

/// One received message.
#[derive(Debug, Default)]
pub struct Received {
    /// Bytes read; the data is in the caller's buffer.
    pub len: usize,
    /// Sender's address.
    pub from: Vec<u8>,
    /// Descriptors it carried.
    pub fds: Vec<OwnedFd>,
    /// `MSG_*` flags of the message.
    pub flags: i32,
    /// Process, user and group of its sender, where SO_PASSCRED is set and the kernel knows them.
    pub creds: Option<libc::ucred>,
    /// Where several datagrams have come as one (UDP_GRO): how long each is, but for the last.
    pub segment: Option<usize>,
    /// What an internet protocol tells of it: level, type, data.
    pub told: Vec<(i32, i32, Vec<u8>)>,
}

/// `recvmsg` into `buf`, never blocking.
pub fn receive(fd: impl AsFd, buf: &mut [u8], flags: i32) -> io::Result<Received> {
    let mut addr = vec![0u8; ADDRESS_MAX];
    let mut control = vec![0u64; CONTROL_WORDS];
    let mut iov = libc::iovec {
        iov_base: buf.as_mut_ptr().cast(),
        iov_len: buf.len(),
    };
    // SAFETY: all-zero bytes are a valid value of this plain C struct.
    let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
    msg.msg_name = addr.as_mut_ptr().cast();
    msg.msg_namelen = ADDRESS_MAX as libc::socklen_t;
    msg.msg_iov = &raw mut iov;
    msg.msg_iovlen = 1;
    msg.msg_control = control.as_mut_ptr().cast();
    msg.msg_controllen = control.len() * 8;
    let flags = flags | libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: every pointer in `msg` is valid for the length beside it.
    let len = length(unsafe { libc::recvmsg(fd.as_fd().as_raw_fd(), &raw mut msg, flags) })?;
    addr.truncate(msg.msg_namelen as usize);
    let (mut fds, mut segment, mut creds, mut told) = (Vec::new(), None, None, Vec::new());
    // SAFETY: `msg` describes the control buffer as the kernel left it.
    let mut head = unsafe { libc::CMSG_FIRSTHDR(&raw const msg) };
    // SAFETY: a non-null header lies within the control buffer.
    while let Some(h) = unsafe { head.as_ref() } {
        // SAFETY: the data begins behind the header.
        let data = unsafe { libc::CMSG_DATA(head) };
        if h.cmsg_level == libc::SOL_SOCKET && [libc::SCM_RIGHTS, SCM_PIDFD].contains(&h.cmsg_type) {
            let n = (h.cmsg_len - (data as usize - head as usize)) / size_of::<RawFd>();
            for i in 0..n {
                // SAFETY: the message holds `n` numbers, possibly unaligned.
                let fd = unsafe { data.cast::<RawFd>().add(i).read_unaligned() };
                // The kernel makes a pidfd of the sender with each reading; an error in place of one is no descriptor.
                // SAFETY: the kernel has just made it, and nobody else knows it.
                let received = (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) });
                fds.extend(received.filter(|_| h.cmsg_type == libc::SCM_RIGHTS));
            }
        }
        if h.cmsg_level == libc::SOL_SOCKET && h.cmsg_type == libc::SCM_CREDENTIALS {
            // SAFETY: the data is this structure.
            let sender = unsafe { data.cast::<libc::ucred>().read_unaligned() };
            creds = (sender.pid != 0).then_some(sender);
        }
        if h.cmsg_level == libc::SOL_UDP && h.cmsg_type == libc::UDP_GRO {
            // SAFETY: the data is a number.
            let each = unsafe { data.cast::<i32>().read_unaligned() };
            segment = usize::try_from(each).ok().filter(|n| *n > 0);
        }
        if [libc::IPPROTO_IP, libc::IPPROTO_IPV6].contains(&h.cmsg_level) {
            let n = h.cmsg_len - (data as usize - head as usize);
            // SAFETY: the message has so many bytes, as the kernel has written them.
            let text = unsafe { std::slice::from_raw_parts(data, n) }.to_vec();
            told.push((h.cmsg_level, h.cmsg_type, text));
        }
        // SAFETY: `head` is a header of `msg`.
        head = unsafe { libc::CMSG_NXTHDR(&raw const msg, head) };
    }
    Ok(Received {
        len,
        from: addr,
        fds,
        flags: msg.msg_flags,
        creds,
        segment,
        told,
    })
}

/// Peeks `len` bytes into memory of which the last byte cannot be written; returns how many bytes the kernel delivered
/// before that.
pub fn peek_all_but_last_byte(fd: impl AsFd, len: usize) -> io::Result<usize> {
    const PAGE: usize = 4096;
    let fd = fd.as_fd().as_raw_fd();
    if len == 0 {
        return Ok(0);
    }
    let writable = (len - 1).div_ceil(PAGE) * PAGE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let map = unsafe { libc::mmap(std::ptr::null_mut(), writable + PAGE, libc::PROT_NONE, flags, -1, 0) };
    if map == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let read = || -> io::Result<usize> {
        // SAFETY: the range lies within the mapping made above.
        check(unsafe { libc::mprotect(map, writable, libc::PROT_READ | libc::PROT_WRITE) }.into())?;
        // SAFETY: `writable` is at least `len - 1`.
        let buf = unsafe { map.cast::<u8>().add(writable - (len - 1)) };
        // SAFETY: the buffer is checked by the kernel, and its last byte lies in memory that nobody may write.
        length(unsafe { libc::recv(fd, buf.cast(), len, libc::MSG_PEEK | libc::MSG_DONTWAIT) })
    };
    let read = read();
    // SAFETY: the mapping made above, to which nothing refers any more.
    check(unsafe { libc::munmap(map, writable + PAGE) }.into())?;
    read
}

/// Writes a control message at `head`, where there is room for it.
fn control(head: &mut libc::cmsghdr, (level, kind): (i32, i32), data: &[u8]) {
    head.cmsg_level = level;
    head.cmsg_type = kind;
    // SAFETY: CMSG_LEN only computes a length.
    head.cmsg_len = unsafe { libc::CMSG_LEN(data.len() as u32) } as usize;
    // SAFETY: the data begins behind the header.
    let at = unsafe { libc::CMSG_DATA(head) };
    // SAFETY: there is room, as the caller says.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), at, data.len()) };
}

/// `sendmsg` of `data` with descriptors `fds`, to address `to` where given, never blocking and without SIGPIPE; with
/// `creds` as those of its sender where given.
pub fn send(fd: impl AsFd, data: &[u8], (fds, creds): (&[RawFd], Option<libc::ucred>), to: Option<&[u8]>) -> io::Result<usize> {
    let numbers: Vec<u8> = fds.iter().flat_map(|fd| fd.to_ne_bytes()).collect();
    let sender: Vec<u8> = creds
        .iter()
        .flat_map(|c| [c.pid.to_ne_bytes(), c.uid.to_ne_bytes(), c.gid.to_ne_bytes()].concat())
        .collect();
    let all = [
        (libc::SOL_SOCKET, libc::SCM_RIGHTS, numbers),
        (libc::SOL_SOCKET, libc::SCM_CREDENTIALS, sender),
    ];
    send_with(fd, data, &all, to)
}

/// The same with control messages: level, type, data; those without data are left out.
pub fn send_with(fd: impl AsFd, data: &[u8], all: &[(i32, i32, Vec<u8>)], to: Option<&[u8]>) -> io::Result<usize> {
    let mut iov = libc::iovec {
        iov_base: data.as_ptr().cast_mut().cast(),
        iov_len: data.len(),
    };
    // SAFETY: all-zero bytes are a valid value of this plain C struct.
    let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
    msg.msg_iov = &raw mut iov;
    msg.msg_iovlen = 1;
    if let Some(to) = to {
        msg.msg_name = to.as_ptr().cast_mut().cast();
        msg.msg_namelen = to.len() as libc::socklen_t;
    }
    if all.iter().any(|(_, _, data)| u16::try_from(data.len()).is_err()) {
        // The kernel has no room for so much, and neither have these structures.
        return Err(io::Error::from_raw_os_error(libc::ENOBUFS));
    }
    let parts: Vec<_> = all.iter().filter(|(_, _, data)| !data.is_empty()).collect();
    // SAFETY: CMSG_SPACE only computes a length.
    let space = |bytes: usize| unsafe { libc::CMSG_SPACE(bytes as u32) } as usize;
    let spaces = parts.iter().map(|(_, _, data)| space(data.len())).sum::<usize>();
    // There is room for the most descriptors a message can carry, and more: the kernel says when there are too many.
    let mut room = vec![0u64; CONTROL_WORDS.max(spaces.div_ceil(8))];
    if !parts.is_empty() {
        msg.msg_control = room.as_mut_ptr().cast();
        msg.msg_controllen = spaces;
        // SAFETY: `msg` describes the control buffer.
        let mut head = unsafe { libc::CMSG_FIRSTHDR(&raw const msg) };
        for (level, kind, data) in parts {
            // SAFETY: a non-null header lies within the control buffer.
            let Some(h) = (unsafe { head.as_mut() }) else { break };
            control(h, (*level, *kind), data);
            // SAFETY: `head` is a header of `msg`.
            head = unsafe { libc::CMSG_NXTHDR(&raw const msg, head) };
        }
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: every pointer in `msg` is valid for the length beside it.
    length(unsafe { libc::sendmsg(fd.as_fd().as_raw_fd(), &raw const msg, flags) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixDatagram;

    #[test]
    fn what_is_told_of_a_datagram_is_received() {
        let to = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        set_option(&to, libc::IPPROTO_IP, libc::IP_RECVTTL, &1i32).unwrap();
        let from = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let hops = (libc::IPPROTO_IP, libc::IP_TTL, 77i32.to_ne_bytes().to_vec());
        let nothing = (libc::IPPROTO_IP, libc::IP_TOS, Vec::new());
        let address = local(&to).unwrap();
        assert_eq!(send_with(&from, b"x", &[nothing, hops.clone()], Some(&address)).unwrap(), 1);
        let got = receive(&to, &mut [0; 8], 0).unwrap();
        assert_eq!((got.len, got.told), (1, vec![hops]));
    }

    #[test]
    fn a_message_carries_descriptors_and_its_sender() {
        let (a, b) = UnixDatagram::pair().unwrap();
        set_option(&b, libc::SOL_SOCKET, libc::SO_PASSCRED, &1i32).unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        let numbers = [reader.as_raw_fd(), writer.as_raw_fd()];
        assert_eq!(send(&a, b"text", (&numbers, None), None).unwrap(), 4);
        let mut buf = [0; 9];
        let got = receive(&b, &mut buf, 0).unwrap();
        assert_eq!((&buf[..got.len], got.fds.len(), got.segment), (&b"text"[..], 2, None));
        assert_eq!(got.creds.unwrap().pid, std::process::id().cast_signed());
        assert!(receive(&b, &mut buf, 0).is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock));
        // More than any message can carry.
        let many = vec![reader.as_raw_fd(); 2000];
        assert_eq!(
            send(&a, b"x", (&many, None), None).unwrap_err().raw_os_error(),
            Some(libc::EINVAL)
        );
        send(&a, &[7; 5000], (&[], None), None).unwrap();
        assert!(peek_all_but_last_byte(&b, 5000).is_err_and(|e| e.raw_os_error() == Some(libc::EFAULT)));
    }

    #[test]
    fn options_that_write_elsewhere_are_refused() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut from = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (to, _) = listener.accept().unwrap();
        std::io::Write::write_all(&mut from, b"elsewhere").unwrap();
        let mut elsewhere = [0u8; 16];
        let mut zerocopy = [0u8; 64];
        zerocopy[24..32].copy_from_slice(&(elsewhere.as_mut_ptr() as u64).to_ne_bytes());
        zerocopy[32..36].copy_from_slice(&16i32.to_ne_bytes());
        let refused = |e: io::Error| e.kind() == io::ErrorKind::InvalidInput && e.raw_os_error().is_none();
        assert!(option_into(&to, libc::IPPROTO_TCP, TCP_ZEROCOPY_RECEIVE, &mut zerocopy).is_err_and(refused));
        assert_eq!(elsewhere, [0; 16]);
        for (level, number) in [(283, 4), (276, 2), (libc::IPPROTO_IPV6, FLOW_LABELS)] {
            assert!(set_option_bytes(&to, level, number, &[0; 64]).is_err_and(refused));
        }
        // As many senders as there is room for.
        let mut group = [0u8; 144 + 2 * ADDRESS_MAX];
        let mut asked = |count: u32| {
            group[140..144].copy_from_slice(&count.to_ne_bytes());
            option_into(&to, libc::IPPROTO_IP, MCAST_MSFILTER, &mut group).map(drop)
        };
        assert!(asked(3).is_err_and(refused) && !asked(2).is_err_and(refused));
    }

    #[test]
    fn options_are_read_as_they_were_set() {
        let (a, _b) = UnixDatagram::pair().unwrap();
        set_option(&a, libc::SOL_SOCKET, libc::SO_PEEK_OFF, &3i32).unwrap();
        assert_eq!(option::<i32>(&a, libc::SOL_SOCKET, libc::SO_PEEK_OFF).unwrap(), 3);
        let mut buf = [0; 64];
        assert_eq!(
            option_into(&a, libc::SOL_SOCKET, libc::SO_PEEK_OFF, &mut buf).unwrap(),
            3i32.to_ne_bytes()
        );
        set_option_bytes(&a, libc::SOL_SOCKET, libc::SO_PEEK_OFF, &5i32.to_ne_bytes()).unwrap();
        assert_eq!(option::<i32>(&a, libc::SOL_SOCKET, libc::SO_PEEK_OFF).unwrap(), 5);
        assert!(option_into(&a, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &mut buf).is_err());
        // Accepts whole packets: `ret #-1`.
        let program = [6, 0, 0, 0, 255, 255, 255, 255];
        assert_eq!(filter(&a, &mut []).unwrap(), 0);
        attach_filter(&a, &program).unwrap();
        assert_eq!((filter(&a, &mut []).unwrap(), filter(&a, &mut buf).unwrap()), (1, 1));
        assert_eq!(buf[..8], program);
        connect(&a, &[0; 16]).unwrap();
        assert!(peer(&a).is_err() && local(&a).unwrap() == (libc::AF_UNIX as u16).to_ne_bytes());
        let mut name = local(&a).unwrap();
        name.push(0);
        name.extend_from_slice(format!("belay-sockets-{}", std::process::id()).as_bytes());
        bind(&a, &name).unwrap();
        assert_eq!(local(&a).unwrap(), name);
    }
}
