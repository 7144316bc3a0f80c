//! An S3 server for tests: `s3-server DIRECTORY [ADDRESS]` serves the buckets that are directories there, at a port of this machine's own where no address is given, prints its address, and ends with its standard input.

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use std::io::Read;
use tokio::net::TcpListener;

/// Key and secret that it accepts.
const KEY: (&str, &str) = ("belay-test", "belay-secret");

#[tokio::main]
async fn main() {
    let root = std::env::args().nth(1).expect("usage: s3-server DIRECTORY [ADDRESS]");
    let address = std::env::args().nth(2).unwrap_or("127.0.0.1:0".into());
    let mut service = S3ServiceBuilder::new(s3s_fs::FileSystem::new(root).expect("open the directory"));
    service.set_auth(SimpleAuth::from_single(KEY.0, KEY.1));
    let service = service.build().into_shared();
    let listener = TcpListener::bind(address).await.expect("listen");
    println!("http://{}", listener.local_addr().expect("address"));
    std::thread::spawn(|| {
        let end = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(i32::from(end.is_err()));
    });
    let server = Builder::new(TokioExecutor::new());
    while let Ok((socket, _)) = listener.accept().await {
        let connection = server.serve_connection(TokioIo::new(socket), service.clone()).into_owned();
        tokio::spawn(async move { drop(connection.await) });
    }
}
