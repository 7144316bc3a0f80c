//! Test hosts: each is a set of namespaces (network, host name, IPC, PIDs, mounts) with an address on a bridge in a
//! namespace of its own, its own `/tmp` and `/dev/shm`, and a small daemon as PID 1 that runs commands for the other
//! hosts and their users, as sshd would. What lies in `etc` of the shared directory takes the place of the machine's
//! files and directories of that name, or is there beside them where the machine has none.
//!
//! The daemon and its client are the test program itself, which is copied to where every host finds it, the client
//! under the names `ssh` and `rsh`.

use crate::Failure;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const DAEMON: &str = "host-daemon";
/// The client's names.
const SHELLS: [&str; 2] = ["ssh", "rsh"];
const LIMIT: Duration = Duration::from_secs(60);
/// Longest command.
const MAX_COMMAND: usize = 1 << 20;

/// When the program was started as daemon or as a remote shell: does that, and never returns.
pub fn serve_if_asked() {
    let args: Vec<String> = std::env::args().collect();
    let name = Path::new(&args[0]).file_name().unwrap_or_default().to_owned();
    if args.get(1).is_some_and(|a| a == DAEMON) {
        std::process::exit(daemon(Path::new(&args[2])));
    }
    if SHELLS.iter().any(|shell| name == *shell) {
        std::process::exit(client(&args[1..]).unwrap_or_else(|e| {
            eprintln!("ssh: {e}");
            255
        }));
    }
}

/// Sends three descriptors with one byte.
fn send_fds(to: &UnixStream, fds: [RawFd; 3]) -> std::io::Result<()> {
    let mut byte = [1u8];
    let mut iov = libc::iovec {
        iov_base: byte.as_mut_ptr().cast(),
        iov_len: 1,
    };
    let mut control = [0u64; 8];
    // SAFETY: msghdr is plain data, for which zero is a valid value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut iov;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    // SAFETY: takes a number only.
    message.msg_controllen = unsafe { libc::CMSG_SPACE(12) } as usize;
    // SAFETY: the control buffer is large enough for one header and three descriptors.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(12) as usize;
        std::ptr::copy_nonoverlapping(fds.as_ptr(), libc::CMSG_DATA(header).cast::<RawFd>(), 3);
    }
    // SAFETY: the message and all it points to are live.
    match unsafe { libc::sendmsg(to.as_raw_fd(), &raw const message, 0) } {
        1 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

fn receive_fds(from: &UnixStream) -> std::io::Result<[OwnedFd; 3]> {
    let mut byte = [0u8];
    let mut iov = libc::iovec {
        iov_base: byte.as_mut_ptr().cast(),
        iov_len: 1,
    };
    let mut control = [0u64; 8];
    // SAFETY: msghdr is plain data, for which zero is a valid value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut iov;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    // SAFETY: the message and all it points to are live.
    if unsafe { libc::recvmsg(from.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) } != 1 {
        return Err(std::io::Error::last_os_error());
    }
    let mut fds: [RawFd; 3] = [-1; 3];
    // SAFETY: the kernel has filled the control buffer; the header is checked before the descriptors are copied.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        if header.is_null() || (*header).cmsg_len < libc::CMSG_LEN(12) as usize {
            return Err(std::io::Error::other("no descriptors"));
        }
        std::ptr::copy_nonoverlapping(libc::CMSG_DATA(header).cast::<RawFd>(), fds.as_mut_ptr(), 3);
    }
    // SAFETY: the kernel has just made these descriptors.
    Ok(fds.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// PID 1 of a host: runs what it is sent.
fn daemon(socket: &Path) -> i32 {
    let Ok(listener) = UnixListener::bind(socket) else { return 1 };
    if std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o666)).is_err() {
        return 1;
    }
    for stream in listener.incoming().flatten() {
        std::thread::spawn(move || run_for(stream).ok());
    }
    0
}

/// User and group of the process at the other end.
fn peer_of(stream: &UnixStream) -> std::io::Result<(u32, u32)> {
    let mut who = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    let to = (&raw mut who).cast();
    // SAFETY: `who` is valid for writing `length` bytes.
    match unsafe { libc::getsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, to, &raw mut length) } {
        0 => Ok((who.uid, who.gid)),
        _ => Err(std::io::Error::last_os_error()),
    }
}

fn run_for(mut stream: UnixStream) -> std::io::Result<()> {
    let (user, group) = peer_of(&stream)?;
    let [input, output, error] = receive_fds(&stream)?;
    let mut length = [0u8; 4];
    stream.read_exact(&mut length)?;
    let mut command = vec![0u8; (u32::from_le_bytes(length) as usize).min(MAX_COMMAND)];
    stream.read_exact(&mut command)?;
    let mut c = Command::new("setsid");
    c.args(["sh", "-c"]).arg(String::from_utf8_lossy(&command).as_ref());
    c.current_dir("/").stdin(input).stdout(output).stderr(error);
    if user != 0 {
        c.uid(user).gid(group);
    }
    let status = c.status()?;
    stream.write_all(&[u8::try_from(status.code().unwrap_or(255)).unwrap_or(255)])
}

/// `ssh [-x] HOST COMMAND...`.
fn client(args: &[String]) -> Result<i32, String> {
    let mut words = args.iter().skip_while(|a| a.starts_with('-'));
    let host = words.next().ok_or("no host")?;
    let mut command = words.cloned().collect::<Vec<_>>().join(" ");
    let exe = std::env::current_exe().map_err(|e| e.to_string())?;
    let shells = exe.parent().ok_or("no directory")?;
    if exe.ends_with("rsh/rsh") {
        // Open MPI's daemon crashes where the remote shell that it is told to use is not in its PATH.
        command = format!("PATH=$PATH:{}; export PATH; {command}", shells.display());
    }
    let sockets = shells.parent().ok_or("no directory")?;
    let mut stream = UnixStream::connect(sockets.join(format!("{host}.sock"))).map_err(|e| format!("{host}: {e}"))?;
    let sent = send_fds(&stream, [0, 1, 2])
        .and_then(|()| stream.write_all(&u32::try_from(command.len()).unwrap_or(0).to_le_bytes()))
        .and_then(|()| stream.write_all(command.as_bytes()));
    sent.map_err(|e| format!("{host}: {e}"))?;
    let mut status = [255u8];
    // A host that is gone says nothing.
    let _ = stream.read_exact(&mut status);
    Ok(i32::from(status[0]))
}

/// Some hosts and the bridge between them. They end when this is dropped.
#[derive(Debug)]
pub struct Hosts {
    dir: PathBuf,
    bridge: Child,
    hosts: Vec<(String, Child, i32)>,
}

fn run(program: &str, args: &[&str]) -> Result<(), Failure> {
    let out = Command::new(program)
        .args(args)
        .output()
        .map_err(|e| format!("{program}: {e}"))?;
    if out.status.success() {
        return Ok(());
    }
    Err(format!("{program} {args:?}: {}", String::from_utf8_lossy(&out.stderr).trim()))
}

/// Lets the process end with the thread that starts it: whatever becomes of the test program, no namespace stays.
fn ending_with_this_thread(c: &mut Command) -> &mut Command {
    // SAFETY: the closure makes one system call, which takes numbers only.
    unsafe {
        c.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        })
    }
}

/// Why there can be no test hosts here, if so.
pub fn unavailable() -> Option<String> {
    if !crate::place::am_root() {
        return Some("test hosts need root".into());
    }
    let probe = [
        "--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "--", "ip", "link", "add", "b0", "type", "bridge",
    ];
    run("unshare", &probe).err()
}

impl Hosts {
    /// Makes hosts h1 to h`count` that share the directory `dir`.
    pub fn new(dir: &Path, count: usize) -> Result<Self, Failure> {
        let io = |what: &str| {
            let what = what.to_owned();
            move |e: std::io::Error| format!("{what}: {e}")
        };
        let rsh = dir.join("rsh");
        std::fs::create_dir_all(&rsh).map_err(io("make the directory of ssh"))?;
        let me = std::env::current_exe().map_err(io("find the test program"))?;
        for shell in SHELLS {
            std::fs::copy(&me, rsh.join(shell)).map_err(io("copy the test program"))?;
        }
        let names: String = (1..=count).map(|n| format!("10.99.0.{n} h{n}\n")).collect();
        std::fs::create_dir_all(dir.join("etc")).map_err(io("make the directory of hosts"))?;
        std::fs::write(dir.join("etc/hosts"), format!("127.0.0.1 localhost\n{names}")).map_err(io("write hosts"))?;
        let bridge = ending_with_this_thread(&mut Command::new("unshare"))
            .args(["--net", "--", "sleep", "infinity"])
            .stdin(Stdio::null())
            .spawn()
            .map_err(io("unshare"))?;
        let mut made = Self {
            dir: dir.to_owned(),
            bridge,
            hosts: Vec::new(),
        };
        let bridge = made.bridge.id().to_string();
        made.await_namespace()?;
        for words in [&["link", "add", "b0", "type", "bridge"][..], &["link", "set", "b0", "up"]] {
            run("nsenter", &[&["-t", &bridge, "-n", "ip"][..], words].concat())?;
        }
        for n in 1..=count {
            made.add(n, &bridge)?;
        }
        Ok(made)
    }

    /// Waits until the bridge's process has a network of its own.
    fn await_namespace(&self) -> Result<(), Failure> {
        let own = std::fs::read_link("/proc/self/ns/net").map_err(|e| e.to_string())?;
        let begin = Instant::now();
        while std::fs::read_link(format!("/proc/{}/ns/net", self.bridge.id())).is_ok_and(|n| n == own) {
            if begin.elapsed() > LIMIT {
                return Err("the bridge's namespace was not made".into());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    fn add(&mut self, n: usize, bridge: &str) -> Result<(), Failure> {
        let (name, dir) = (format!("h{n}"), self.dir.display());
        let init = format!(
            "set -e; hostname {name}; mount -t proc proc /proc; exec 9<'{dir}'; mount -t tmpfs -o mode=1777 tmpfs /tmp; \
             mkdir -p '{dir}'; mount -c --rbind /proc/self/fd/9 '{dir}'; exec 9<&-; mount -t tmpfs -o mode=1777 tmpfs /dev/shm; \
             for f in '{dir}'/etc/*; do \
               [ -e \"/etc/${{f##*/}}\" ] && continue; \
               [ -e /tmp/etc ] || {{ mkdir /tmp/etc; cp -a /etc/. /tmp/etc; mount --bind /tmp/etc /etc; }}; \
               if [ -d \"$f\" ]; then mkdir \"/etc/${{f##*/}}\"; else : > \"/etc/${{f##*/}}\"; fi; \
             done; \
             for f in '{dir}'/etc/*; do mount --bind \"$f\" \"/etc/${{f##*/}}\"; done; exec '{dir}/rsh/ssh' {DAEMON} '{dir}/{name}.sock'"
        );
        let unshare = [
            "--net",
            "--uts",
            "--ipc",
            "--pid",
            "--mount",
            "--propagation",
            "private",
            "--fork",
            "--kill-child",
        ];
        let child = ending_with_this_thread(&mut Command::new("unshare"))
            .args(unshare)
            .args(["--", "sh", "-c", &init])
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            // A host's temporary files are its own.
            .env_remove("TMPDIR")
            .stdin(Stdio::null())
            .spawn()
            .map_err(|e| format!("unshare: {e}"))?;
        let outer = child.id().cast_signed();
        self.hosts.push((name.clone(), child, 0));
        let socket = self.dir.join(format!("{name}.sock"));
        let begin = Instant::now();
        while UnixStream::connect(&socket).is_err() {
            if begin.elapsed() > LIMIT {
                return Err(format!("host {name} did not come up"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let inner = std::fs::read_to_string(format!("/proc/{outer}/task/{outer}/children")).unwrap_or_default();
        let pid = inner.trim().parse().map_err(|_| "a host without PID 1")?;
        if let Some(host) = self.hosts.last_mut() {
            host.2 = pid;
        }
        let (veth, address, pid) = (format!("v{n}"), format!("10.99.0.{n}/24"), pid.to_string());
        let outside = |words: &[&str]| run("nsenter", &[&["-t", bridge, "-n", "ip"][..], words].concat());
        let inside = |words: &[&str]| run("nsenter", &[&["-t", &pid, "-n", "ip"][..], words].concat());
        outside(&["link", "add", &veth, "type", "veth", "peer", "name", "eth0", "netns", &pid])?;
        outside(&["link", "set", &veth, "master", "b0", "up"])?;
        inside(&["link", "set", "lo", "up"])?;
        inside(&["addr", "add", &address, "dev", "eth0"])?;
        inside(&["link", "set", "eth0", "up"])
    }

    /// Cuts host `n` (from 1) off from the others, or joins it to them again. Connections stay; nothing comes through.
    pub fn cut(&self, n: usize, off: bool) -> Result<(), Failure> {
        let (bridge, veth) = (self.bridge.id().to_string(), format!("v{n}"));
        let state = if off { "down" } else { "up" };
        run("nsenter", &["-t", &bridge, "-n", "ip", "link", "set", &veth, state])
    }

    /// A command that runs `program` on none of the hosts, and the address by which they reach it.
    pub fn outside(&self, program: &Path) -> Result<(Command, String), Failure> {
        let (bridge, address) = (self.bridge.id().to_string(), "10.99.0.254");
        let enter = ["-t", &bridge, "-n"];
        run(
            "nsenter",
            &[&enter[..], &["ip", "addr", "replace", &format!("{address}/24"), "dev", "b0"]].concat(),
        )?;
        let mut c = Command::new("nsenter");
        c.args(enter).arg(program);
        Ok((c, address.into()))
    }

    /// Nobody finds host `n` any more: its daemon cannot be reached.
    pub fn hide(&self, n: usize) -> Result<(), Failure> {
        self.rename(n, "sock", "gone")
    }

    /// A host that was hidden is back.
    pub fn show(&self, n: usize) -> Result<(), Failure> {
        self.rename(n, "gone", "sock")
    }

    fn rename(&self, n: usize, from: &str, to: &str) -> Result<(), Failure> {
        let at = |extension: &str| self.dir.join(format!("h{n}.{extension}"));
        std::fs::rename(at(from), at(to)).map_err(|e| format!("hide or show host {n}: {e}"))
    }

    /// PID 1 of host `n` (from 1), as the maker of the hosts sees it.
    pub fn init(&self, n: usize) -> i32 {
        self.hosts[n - 1].2
    }

    /// A command on host `n` (from 1), with `ssh` in PATH.
    pub fn command(&self, n: usize, argv: &[String]) -> Command {
        let mut c = Command::new("nsenter");
        c.args(["-t", &self.init(n).to_string(), "-a", "--"]).args(argv);
        c.env_clear()
            .env("PATH", format!("{}/rsh:/usr/sbin:/usr/bin:/sbin:/bin", self.dir.display()));
        c.env("HOME", "/root").env("SHELL", "/bin/sh").env("LANG", "C.UTF-8");
        c
    }

    /// Kills everything that runs on the hosts but their daemons.
    pub fn kill_all(&self) {
        kill(&self.hosts);
    }

    /// The same on host `n` (from 1) alone.
    pub fn kill_host(&self, n: usize) {
        kill(&self.hosts[n - 1..n]);
    }

    /// Processes of host `n` whose command line contains `word`.
    pub fn find(&self, n: usize, word: &str) -> Vec<i32> {
        let (_, outer, pid) = &self.hosts[n - 1];
        let Ok(net) = std::fs::read_link(format!("/proc/{pid}/ns/net")) else {
            return Vec::new();
        };
        let named = |p: &i32| {
            let line = std::fs::read(format!("/proc/{p}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).replace('\0', " ").contains(word)
        };
        in_network(&net, [*pid, outer.id().cast_signed()])
            .into_iter()
            .filter(named)
            .collect()
    }
}

/// Kills everything that runs on `hosts` but their daemons.
fn kill(hosts: &[(String, Child, i32)]) {
    loop {
        let below: Vec<i32> = hosts
            .iter()
            .filter(|(_, _, pid)| *pid > 0)
            .filter_map(|(_, outer, pid)| {
                let net = std::fs::read_link(format!("/proc/{pid}/ns/net")).ok()?;
                Some((net, [*pid, outer.id().cast_signed()]))
            })
            .flat_map(|(net, pids)| in_network(&net, pids))
            .collect();
        if below.is_empty() {
            return;
        }
        for pid in below {
            // SAFETY: takes numbers only.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Processes in network namespace `net` but `except`: the host's PID 1 and its maker.
fn in_network(net: &Path, except: [i32; 2]) -> Vec<i32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut all: Vec<i32> = entries.filter_map(|e| e.file_name().to_str()?.parse().ok()).collect();
    all.sort_unstable();
    all.retain(|p| !except.contains(p) && std::fs::read_link(format!("/proc/{p}/ns/net")).is_ok_and(|n| n == net));
    all
}

impl Drop for Hosts {
    fn drop(&mut self) {
        self.kill_all();
        for (_, child, _) in &mut self.hosts {
            // PID 1 goes with it (--kill-child), and with that the host.
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = self.bridge.kill();
        let _ = self.bridge.wait();
    }
}
