//! What the sockets of one node had received and not read, for the nodes that send it again.
//!
//! Where both nodes see the file in which it is stored, it is read from there. Else the node that has it gives it out,
//! on a thread that lives for as long as connections are made again, to whoever knows a random token, which travels
//! through the authenticated tree.

use crate::fault::Fault;
use belay_image::blobs::{BlobReader, BlobRef};
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub(super) const TOKEN_BYTES: usize = 32;

/// How long a connection, and each piece of data, may take.
const LIMIT: Duration = Duration::from_secs(30);

/// Where something lies.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Unread {
    path: PathBuf,
    blob: BlobRef,
    addresses: Vec<SocketAddr>,
    token: String,
}

/// Gives out what a node has.
pub(super) struct Shelf {
    path: PathBuf,
    listener: TcpListener,
    token: String,
    closed: AtomicBool,
}

impl Shelf {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let any: [SocketAddr; 2] = [(IpAddr::from([0u16; 8]), 0).into(), (IpAddr::from([0u8; 4]), 0).into()];
        Ok(Self {
            path: path.to_owned(),
            listener: TcpListener::bind(&any[..])?,
            token: token()?,
            closed: AtomicBool::new(false),
        })
    }

    /// What to tell the node that wants `blob`.
    pub(super) fn offer(&self, blob: BlobRef) -> io::Result<Unread> {
        let port = self.listener.local_addr()?.port();
        let own = belay_kernel::net::addresses().into_iter();
        Ok(Unread {
            path: self.path.clone(),
            blob,
            addresses: own.map(|ip| SocketAddr::from((ip, port))).collect(),
            token: self.token.clone(),
        })
    }

    /// Serves one visitor after the other until the shelf is closed.
    pub(super) fn serve(&self) {
        while let Ok((visitor, _)) = self.listener.accept() {
            if self.closed.load(Ordering::Acquire) {
                return;
            }
            if let Err(e) = self.attend(visitor) {
                tracing::debug!(error = %e, "a node was not given what it asked for");
            }
        }
    }

    fn attend(&self, mut visitor: TcpStream) -> io::Result<()> {
        visitor.set_read_timeout(Some(LIMIT))?;
        visitor.set_write_timeout(Some(LIMIT))?;
        let mut token = vec![0; self.token.len()];
        visitor.read_exact(&mut token)?;
        if token != self.token.as_bytes() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let mut words = [[0u8; 8]; 3];
        words.iter_mut().try_for_each(|w| visitor.read_exact(w))?;
        let [offset, bytes, xxh3] = words.map(u64::from_le_bytes);
        let data = BlobReader::open(&self.path).and_then(|r| r.get(&BlobRef { offset, bytes, xxh3 }));
        visitor.write_all(&data.map_err(io::Error::other)?)
    }

    /// Lets [`Shelf::serve`] return.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        if let Ok(own) = self.listener.local_addr() {
            let to: IpAddr = if own.is_ipv6() {
                [0u16, 0, 0, 0, 0, 0, 0, 1].into()
            } else {
                [127, 0, 0, 1].into()
            };
            // Whoever else comes also lets it look.
            drop(TcpStream::connect_timeout(&SocketAddr::from((to, own.port())), LIMIT));
        }
    }
}

impl Unread {
    /// The data.
    pub(super) fn get(&self) -> Result<Vec<u8>, Fault> {
        if let Ok(data) = BlobReader::open(&self.path).and_then(|r| r.get(&self.blob)) {
            return Ok(data);
        }
        let mut failure = io::Error::other("no address");
        for to in &self.addresses {
            match self.fetch(*to) {
                Ok(data) => return Ok(data),
                Err(e) => failure = e,
            }
        }
        Err(Fault::Refused(format!("fetch what its other end had not read: {failure}")))
    }

    fn fetch(&self, from: SocketAddr) -> io::Result<Vec<u8>> {
        let mut peer = TcpStream::connect_timeout(&from, LIMIT)?;
        peer.set_read_timeout(Some(LIMIT))?;
        peer.write_all(self.token.as_bytes())?;
        for word in [self.blob.offset, self.blob.bytes, self.blob.xxh3] {
            peer.write_all(&word.to_le_bytes())?;
        }
        let mut data = Vec::new();
        peer.take(self.blob.bytes).read_to_end(&mut data)?;
        if data.len() as u64 != self.blob.bytes || belay_image::checksum(&data) != self.blob.xxh3 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{from} has something else"),
            ));
        }
        Ok(data)
    }
}

/// Random, for whoever may have something.
pub(crate) fn token() -> io::Result<String> {
    let mut raw = [0u8; TOKEN_BYTES / 2];
    io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut raw)?;
    Ok(raw.iter().map(|b| format!("{b:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use belay_image::blobs::BlobWriter;

    #[test]
    fn what_is_not_seen_is_fetched_with_the_token_only() {
        let dir = std::env::temp_dir().join(format!("belay-unread-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let path = dir.join("blobs.bin");
        let mut w = BlobWriter::create(&path).unwrap();
        let data: Vec<u8> = (0..300_000u32).map(|n| n as u8).collect();
        let blob = w.put(&data).unwrap();
        drop(w);
        let shelf = Shelf::open(&path).unwrap();
        std::thread::scope(|s| {
            s.spawn(|| shelf.serve());
            let mut offer = shelf.offer(blob).unwrap();
            assert_eq!(offer.get().unwrap(), data, "by the file");
            offer.path = dir.join("elsewhere");
            assert_eq!(offer.get().unwrap(), data, "by the other node");
            offer.token = "x".repeat(offer.token.len());
            assert!(offer.get().is_err(), "whoever has no token");
            shelf.close();
        });
        std::fs::remove_dir_all(dir).unwrap();
    }
}
