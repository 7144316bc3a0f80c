//! Every socket option that can be set and read, by the kernel's headers (`include/uapi`, Linux 6.18) and its
//! `getsockopt` functions. A newer kernel's option is one line more.

use super::Stage::{self, Always, Early, Inherited, Last, Late, New};
use Who::{Any, Datagrams, Inet, Listed, Netlink, Passing, Steered, Stream, Udp, UdpLite, Unix, V6Datagrams, V4, V6};

/// Sockets that have an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Who {
    Any,
    /// Internet sockets.
    Inet,
    /// Those of IPv4 and, as they speak it too, of IPv6.
    V4,
    V6,
    /// Of [`Who::V4`] and [`Who::V6`], those without connections; a stream socket may let itself be asked.
    Datagrams,
    V6Datagrams,
    /// TCP.
    Stream,
    /// UDP, and UDP-Lite, which has all of its options.
    Udp,
    UdpLite,
    Netlink,
    Unix,
    /// UNIX and netlink sockets, whose messages can carry more than data.
    Passing,
    /// TCP sockets that listen or are not connected.
    Listed,
    /// All but connections of TCP, in which the kernel writes it.
    Steered,
}

/// What a socket is, for [`Who`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Sort {
    pub(super) family: i32,
    pub(super) protocol: i32,
    /// It has a connection of TCP.
    pub(super) connected: bool,
}

impl Who {
    pub(super) fn are(self, s: Sort) -> bool {
        let inet = matches!(s.family, libc::AF_INET | libc::AF_INET6);
        let stream = inet && s.protocol == libc::IPPROTO_TCP;
        match self {
            Any => true,
            Inet | V4 => inet,
            V6 => s.family == libc::AF_INET6,
            Datagrams => inet && !stream,
            V6Datagrams => s.family == libc::AF_INET6 && !stream,
            Stream => stream,
            Udp => inet && matches!(s.protocol, libc::IPPROTO_UDP | libc::IPPROTO_UDPLITE),
            UdpLite => inet && s.protocol == libc::IPPROTO_UDPLITE,
            Netlink => s.family == libc::AF_NETLINK,
            Unix => s.family == libc::AF_UNIX,
            Passing => matches!(s.family, libc::AF_UNIX | libc::AF_NETLINK),
            Listed => stream && !s.connected,
            Steered => !s.connected,
        }
    }
}

/// One option.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) level: i32,
    pub(super) number: i32,
    pub(super) name: &'static str,
    pub(super) stage: Stage,
    pub(super) who: Who,
}

const fn o(level: i32, number: i32, name: &'static str, stage: Stage, who: Who) -> Entry {
    Entry {
        level,
        number,
        name,
        stage,
        who,
    }
}

const SOL: i32 = libc::SOL_SOCKET;
const IP: i32 = libc::IPPROTO_IP;
const IPV6: i32 = libc::IPPROTO_IPV6;
const TCP: i32 = libc::IPPROTO_TCP;
const UDP: i32 = libc::IPPROTO_UDP;
const LITE: i32 = libc::IPPROTO_UDPLITE;
const NETLINK: i32 = 270;

/// In the order in which they are set: what another option changes too comes behind that.
pub(super) const TABLE: &[Entry] = &[
    o(SOL, 2, "SO_REUSEADDR", Always, Any),
    o(SOL, 15, "SO_REUSEPORT", Always, Any),
    o(SOL, 25, "SO_BINDTODEVICE", Always, Inet),
    o(IP, 15, "IP_FREEBIND", Always, V4),
    o(IP, 19, "IP_TRANSPARENT", Always, V4),
    o(IPV6, 26, "IPV6_V6ONLY", Early, V6),
    o(TCP, 23, "TCP_FASTOPEN", Early, Stream),
    o(TCP, 34, "TCP_FASTOPEN_NO_COOKIE", Inherited, Stream),
    o(TCP, 30, "TCP_FASTOPEN_CONNECT", New, Listed),
    o(TCP, 2, "TCP_MAXSEG", Late, Listed),
    o(TCP, 10, "TCP_WINDOW_CLAMP", Late, Listed),
    o(SOL, 1, "SO_DEBUG", Late, Any),
    o(SOL, 5, "SO_DONTROUTE", Late, Any),
    o(SOL, 6, "SO_BROADCAST", Late, Any),
    o(SOL, 9, "SO_KEEPALIVE", Late, Any),
    o(SOL, 10, "SO_OOBINLINE", Late, Any),
    o(SOL, 11, "SO_NO_CHECK", Late, Any),
    o(SOL, 13, "SO_LINGER", Late, Any),
    o(SOL, 16, "SO_PASSCRED", Late, Passing),
    o(SOL, 18, "SO_RCVLOWAT", Late, Any),
    o(SOL, 20, "SO_RCVTIMEO", Late, Any),
    o(SOL, 21, "SO_SNDTIMEO", Late, Any),
    o(SOL, 29, "SO_TIMESTAMP", Late, Any),
    o(SOL, 35, "SO_TIMESTAMPNS", Late, Any),
    o(SOL, 63, "SO_TIMESTAMP_NEW", Late, Any),
    o(SOL, 64, "SO_TIMESTAMPNS_NEW", Late, Any),
    o(SOL, 37, "SO_TIMESTAMPING", Late, Any),
    o(SOL, 65, "SO_TIMESTAMPING_NEW", Late, Any),
    o(SOL, 34, "SO_PASSSEC", Late, Passing),
    o(SOL, 36, "SO_MARK", Late, Any),
    o(SOL, 40, "SO_RXQ_OVFL", Late, Any),
    o(SOL, 41, "SO_WIFI_STATUS", Late, Any),
    o(SOL, 42, "SO_PEEK_OFF", Late, Any),
    o(SOL, 43, "SO_NOFCS", Late, Any),
    o(SOL, 45, "SO_SELECT_ERR_QUEUE", Late, Any),
    o(SOL, 46, "SO_BUSY_POLL", Late, Any),
    o(SOL, 69, "SO_PREFER_BUSY_POLL", Late, Any),
    o(SOL, 47, "SO_MAX_PACING_RATE", Late, Any),
    o(SOL, 60, "SO_ZEROCOPY", Late, Any),
    o(SOL, 61, "SO_TXTIME", Late, Any),
    o(SOL, 73, "SO_RESERVE_MEM", Late, Any),
    o(SOL, 74, "SO_TXREHASH", Late, Stream),
    o(SOL, 75, "SO_RCVMARK", Late, Any),
    o(SOL, 82, "SO_RCVPRIORITY", Late, Any),
    o(SOL, 76, "SO_PASSPIDFD", Late, Passing),
    o(SOL, 83, "SO_PASSRIGHTS", Late, Unix),
    o(SOL, 84, "SO_INQ", Late, Unix),
    o(IP, 1, "IP_TOS", Late, V4),
    o(SOL, 12, "SO_PRIORITY", Late, Any),
    o(IP, 2, "IP_TTL", Late, V4),
    o(IP, 4, "IP_OPTIONS", Late, V4),
    o(IP, 6, "IP_RECVOPTS", Late, V4),
    o(IP, 7, "IP_RETOPTS", Late, V4),
    o(IP, 8, "IP_PKTINFO", Late, V4),
    o(IP, 10, "IP_MTU_DISCOVER", Late, V4),
    o(IP, 11, "IP_RECVERR", Late, V4),
    o(IP, 26, "IP_RECVERR_RFC4884", Late, V4),
    o(IP, 12, "IP_RECVTTL", Late, V4),
    o(IP, 13, "IP_RECVTOS", Late, V4),
    o(IP, 18, "IP_PASSSEC", Late, V4),
    o(IP, 20, "IP_RECVORIGDSTADDR", Late, V4),
    o(IP, 21, "IP_MINTTL", Late, V4),
    o(IP, 23, "IP_CHECKSUM", Late, V4),
    o(IP, 24, "IP_BIND_ADDRESS_NO_PORT", Late, V4),
    o(IP, 25, "IP_RECVFRAGSIZE", Late, V4),
    o(IP, 50, "IP_UNICAST_IF", Late, V4),
    o(IP, 51, "IP_LOCAL_PORT_RANGE", Late, V4),
    o(IP, 32, "IP_MULTICAST_IF", Late, Datagrams),
    o(IP, 33, "IP_MULTICAST_TTL", Late, Datagrams),
    o(IP, 34, "IP_MULTICAST_LOOP", Late, V4),
    o(IP, 49, "IP_MULTICAST_ALL", Late, V4),
    o(IPV6, 2, "IPV6_2292PKTINFO", Late, V6),
    o(IPV6, 3, "IPV6_2292HOPOPTS", Late, V6),
    o(IPV6, 4, "IPV6_2292DSTOPTS", Late, V6),
    o(IPV6, 5, "IPV6_2292RTHDR", Late, V6),
    o(IPV6, 8, "IPV6_2292HOPLIMIT", Late, V6),
    o(IPV6, 11, "IPV6_FLOWINFO", Late, V6),
    o(IPV6, 16, "IPV6_UNICAST_HOPS", Late, V6),
    o(IPV6, 17, "IPV6_MULTICAST_IF", Late, V6Datagrams),
    o(IPV6, 18, "IPV6_MULTICAST_HOPS", Late, V6Datagrams),
    o(IPV6, 19, "IPV6_MULTICAST_LOOP", Late, V6),
    o(IPV6, 23, "IPV6_MTU_DISCOVER", Late, V6),
    o(IPV6, 25, "IPV6_RECVERR", Late, V6),
    o(IPV6, 29, "IPV6_MULTICAST_ALL", Late, V6),
    o(IPV6, 31, "IPV6_RECVERR_RFC4884", Late, V6),
    o(IPV6, 33, "IPV6_FLOWINFO_SEND", Late, V6),
    o(IPV6, 49, "IPV6_RECVPKTINFO", Late, V6),
    o(IPV6, 51, "IPV6_RECVHOPLIMIT", Late, V6),
    o(IPV6, 53, "IPV6_RECVHOPOPTS", Late, V6),
    o(IPV6, 54, "IPV6_HOPOPTS", Late, V6),
    o(IPV6, 55, "IPV6_RTHDRDSTOPTS", Late, V6),
    o(IPV6, 56, "IPV6_RECVRTHDR", Late, V6),
    o(IPV6, 57, "IPV6_RTHDR", Late, V6),
    o(IPV6, 58, "IPV6_RECVDSTOPTS", Late, V6),
    o(IPV6, 59, "IPV6_DSTOPTS", Late, V6),
    o(IPV6, 60, "IPV6_RECVPATHMTU", Late, V6),
    o(IPV6, 62, "IPV6_DONTFRAG", Late, V6),
    o(IPV6, 66, "IPV6_RECVTCLASS", Late, V6),
    o(IPV6, 67, "IPV6_TCLASS", Late, V6),
    o(IPV6, 70, "IPV6_AUTOFLOWLABEL", Late, V6),
    o(IPV6, 72, "IPV6_ADDR_PREFERENCES", Late, V6),
    o(IPV6, 73, "IPV6_MINHOPCOUNT", Late, V6),
    o(IPV6, 74, "IPV6_RECVORIGDSTADDR", Late, V6),
    o(IPV6, 76, "IPV6_UNICAST_IF", Late, V6),
    o(IPV6, 77, "IPV6_RECVFRAGSIZE", Late, V6),
    o(TCP, 1, "TCP_NODELAY", Late, Stream),
    o(TCP, 3, "TCP_CORK", Late, Stream),
    o(TCP, 4, "TCP_KEEPIDLE", Late, Stream),
    o(TCP, 5, "TCP_KEEPINTVL", Late, Stream),
    o(TCP, 6, "TCP_KEEPCNT", Late, Stream),
    o(TCP, 7, "TCP_SYNCNT", Late, Stream),
    o(TCP, 8, "TCP_LINGER2", Late, Stream),
    o(TCP, 13, "TCP_CONGESTION", Late, Stream),
    o(TCP, 16, "TCP_THIN_LINEAR_TIMEOUTS", Late, Stream),
    o(TCP, 18, "TCP_USER_TIMEOUT", Late, Stream),
    o(TCP, 25, "TCP_NOTSENT_LOWAT", Late, Stream),
    o(TCP, 27, "TCP_SAVE_SYN", Late, Stream),
    o(TCP, 33, "TCP_FASTOPEN_KEY", Late, Stream),
    o(TCP, 36, "TCP_INQ", Late, Stream),
    o(TCP, 37, "TCP_TX_DELAY", Late, Stream),
    o(TCP, 44, "TCP_RTO_MAX_MS", Late, Stream),
    o(TCP, 45, "TCP_RTO_MIN_US", Late, Stream),
    o(TCP, 46, "TCP_DELACK_MAX_US", Late, Stream),
    o(UDP, 1, "UDP_CORK", Late, Udp),
    o(UDP, 100, "UDP_ENCAP", Late, Udp),
    o(UDP, 101, "UDP_NO_CHECK6_TX", Late, Udp),
    o(UDP, 102, "UDP_NO_CHECK6_RX", Late, Udp),
    o(UDP, 103, "UDP_SEGMENT", Late, Udp),
    o(UDP, 104, "UDP_GRO", Late, Udp),
    o(LITE, 10, "UDPLITE_SEND_CSCOV", Late, UdpLite),
    o(LITE, 11, "UDPLITE_RECV_CSCOV", Late, UdpLite),
    o(NETLINK, 3, "NETLINK_PKTINFO", Late, Netlink),
    o(NETLINK, 4, "NETLINK_BROADCAST_ERROR", Late, Netlink),
    o(NETLINK, 5, "NETLINK_NO_ENOBUFS", Late, Netlink),
    o(NETLINK, 8, "NETLINK_LISTEN_ALL_NSID", Late, Netlink),
    o(NETLINK, 10, "NETLINK_CAP_ACK", Late, Netlink),
    o(NETLINK, 11, "NETLINK_EXT_ACK", Late, Netlink),
    o(NETLINK, 12, "NETLINK_GET_STRICT_CHK", Late, Netlink),
    // These decide what a listening socket accepts, so connections that wait to be accepted are made without them.
    o(TCP, 9, "TCP_DEFER_ACCEPT", Last, Stream),
    o(SOL, 26, "SO_ATTACH_FILTER", Last, Any),
    o(SOL, 44, "SO_LOCK_FILTER", Last, Any),
    o(SOL, 49, "SO_INCOMING_CPU", Last, Steered),
];
