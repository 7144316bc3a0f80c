//! An S3 server for tests: `s3-server DIRECTORY [ADDRESS] [--anonymous] [--broken=TEXT] [--late=TEXT]` serves the buckets that are
//! directories there, at a port of this machine's own where no address is given, prints its address, and ends with its
//! standard input. With `--anonymous` to everybody, whatever their credentials: the clients of Google Cloud Storage speak
//! the same interface with others than those of S3. With `--broken` it fails for each object whose name contains that
//! text; with `--late` it completes the upload of such an object, and does not answer.

mod store;

use hyper::body::{Body, Incoming};
use hyper::header::{HeaderValue, AUTHORIZATION, ETAG};
use hyper::service::{service_fn, Service};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use s3s::S3Error;
use std::future::poll_fn;
use std::io::Read;
use std::pin::Pin;
use store::Store;
use tokio::net::TcpListener;

/// Key and secret that it accepts.
const KEY: (&str, &str) = ("belay-test", "belay-secret");

#[tokio::main]
async fn main() {
    let (options, mut args): (Vec<_>, Vec<_>) = std::env::args().skip(1).partition(|a| a.starts_with("--"));
    let anonymous = options.iter().any(|o| o == "--anonymous");
    let broken = options.iter().find_map(|o| o.strip_prefix("--broken=").map(str::to_owned));
    let late = options.iter().find_map(|o| o.strip_prefix("--late=").map(str::to_owned));
    let known = usize::from(anonymous) + usize::from(broken.is_some()) + usize::from(late.is_some());
    assert_eq!(options.len(), known, "unknown option");
    let address = if args.len() > 1 {
        args.remove(1)
    } else {
        "127.0.0.1:0".into()
    };
    let root = args.pop().expect("usage: s3-server DIRECTORY [ADDRESS] [OPTIONS]");
    let mut service = S3ServiceBuilder::new(Store::open(root.into()).expect("open the directory"));
    if !anonymous {
        service.set_auth(SimpleAuth::from_single(KEY.0, KEY.1));
    }
    let service = service.build().into_shared();
    let listener = TcpListener::bind(address).await.expect("listen");
    println!("http://{}", listener.local_addr().expect("address"));
    std::thread::spawn(|| {
        let end = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(i32::from(end.is_err()));
    });
    let server = Builder::new(TokioExecutor::new());
    while let Ok((socket, _)) = listener.accept().await {
        let service = service.clone();
        let (broken, late) = (broken.clone(), late.clone());
        let answer = service_fn(move |mut request: Request<Incoming>| {
            if anonymous {
                request.headers_mut().remove(AUTHORIZATION);
            }
            let is_broken = broken.as_ref().is_some_and(|text| request.uri().path().contains(text));
            let completes = request.method() == Method::POST && request.uri().query().is_some_and(|q| q.contains("uploadId="));
            let is_late = completes && late.as_ref().is_some_and(|text| request.uri().path().contains(text));
            let answer = service.call(request);
            async move {
                let mut answer = answer.await?;
                if is_late && answer.status().is_success() {
                    // It is completed while the answer is made.
                    while poll_fn(|c| Pin::new(answer.body_mut()).poll_frame(c)).await.is_some() {}
                    std::future::pending::<()>().await;
                }
                if is_broken {
                    *answer.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
                }
                if anonymous {
                    // Google's always have one.
                    let tag = HeaderValue::from_static("\"none\"");
                    answer.headers_mut().entry(ETAG).or_insert(tag);
                }
                Ok::<_, S3Error>(answer)
            }
        });
        let connection = server.serve_connection(TokioIo::new(socket), answer).into_owned();
        tokio::spawn(async move { drop(connection.await) });
    }
}
