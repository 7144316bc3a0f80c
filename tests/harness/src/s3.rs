//! An S3 server for the time of a test, and the tier that it is.

use crate::expect::{io, want};
use crate::place::{build_dir, Place};
use crate::Failure;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// What a client needs in its environment.
pub const CREDENTIALS: [(&str, &str); 2] = [("AWS_ACCESS_KEY_ID", "belay-test"), ("AWS_SECRET_ACCESS_KEY", "belay-secret")];

/// A server; it ends when this is dropped.
#[derive(Debug)]
pub struct Server {
    child: Child,
    address: String,
}

impl Server {
    /// Copies the server to where tests run.
    pub fn prepare(place: &Place) -> Result<(), Failure> {
        let from = build_dir()?.join("s3-server");
        want(from.exists(), || {
            format!("{} is missing: run `cargo build --workspace` first", from.display())
        })?;
        io("copy the S3 server", std::fs::copy(from, Self::program(place))).map(drop)
    }

    /// Where it was copied to.
    pub fn program(place: &Place) -> PathBuf {
        place.bin().join("s3-server")
    }

    /// Has `command`, which runs the server, serve a bucket in the directory `root` at `address`.
    pub fn start(mut command: Command, root: &Path, address: &str) -> Result<Self, Failure> {
        io("make a bucket", std::fs::create_dir_all(root.join("bucket")))?;
        let command = command.arg(root).arg(address).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = io("start the S3 server", command.spawn())?;
        let out = child.stdout.take().ok_or("no output of the S3 server")?;
        let mut address = String::new();
        io("hear the S3 server", BufReader::new(out).read_line(&mut address))?;
        let address = address.trim().to_owned();
        want(!address.is_empty(), || "the S3 server has ended at once".into())?;
        Ok(Self { child, address })
    }

    /// Where it serves: host and port.
    pub fn address(&self) -> &str {
        self.address.trim_start_matches("http://")
    }

    /// The configuration of the tier `cloud`.
    pub fn tier(&self) -> String {
        format!(
            "[[tier]]\nname = \"cloud\"\nkind = \"object\"\nurl = \"s3://bucket/prefix\"\nendpoint = \"{}\"\nregion = \"us-east-1\"\nallow_http = true\n",
            self.address
        )
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        self.child.wait().ok();
    }
}
