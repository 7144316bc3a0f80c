//! The suite for tiers, over a local directory and over servers that run meanwhile.

use belay_objects::{Location, Objects};
use belay_storage::tier::{conformance, write_whole, Tier};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

struct Scratch(PathBuf);

impl Scratch {
    fn new(test: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("belay-objects-{test}-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("bucket")).unwrap();
        Self(dir)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

/// The server of `tests/s3-server`.
struct Server(Child, String);

impl Server {
    fn start(root: &Scratch, options: &[&str]) -> Self {
        let exe = std::env::current_exe().unwrap();
        let server = exe.ancestors().nth(2).unwrap().join("s3-server");
        let mut child = Command::new(server)
            .arg(&root.0)
            .args(options)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("start s3-server: run cargo build -p belay-s3-server first");
        let mut address = String::new();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        out.read_line(&mut address).unwrap();
        Self(child, address.trim().to_owned())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        self.0.wait().unwrap();
    }
}

/// The same, which is not asked again for a minute when it is gone.
fn impatient(location: Location) -> Location {
    Location {
        timeout: Some(Duration::from_secs(2)),
        ..location
    }
}

#[test]
fn an_s3_server_conforms_and_refuses_strangers() {
    let scratch = Scratch::new("s3");
    let server = Server::start(&scratch, &[]);
    let location = Location {
        url: "s3://bucket/some/prefix".into(),
        endpoint: Some(server.1.clone()),
        region: Some("us-east-1".into()),
        allow_http: true,
        timeout: None,
    };
    // No other test of this program reads these.
    std::env::set_var("AWS_ACCESS_KEY_ID", "belay-test");
    std::env::set_var("AWS_SECRET_ACCESS_KEY", "belay-secret");
    conformance::run(&|| Box::new(Objects::open("s3", &location, "job-1").unwrap()));
    let bucket = Location {
        url: "s3://bucket".into(),
        ..location.clone()
    };
    for folder in ["job-1", ""] {
        conformance::run(&|| Box::new(Objects::open("s3", &bucket, folder).unwrap()));
    }
    // What others have put there is not seen, and is in nobody's way.
    let all = Objects::open("s3", &bucket, "").unwrap();
    write_whole(&all, "job-1/job.json", b"{}").unwrap();
    std::fs::write(scratch.0.join("bucket/job-1/a b"), b"x").unwrap();
    let keys: Vec<String> = all.list("").unwrap().into_iter().map(|o| o.key).collect();
    assert_eq!(keys, ["job-1/job.json"]);
    std::env::set_var("AWS_SECRET_ACCESS_KEY", "wrong");
    let e = Objects::open("s3", &location, "job-1")
        .unwrap()
        .list("")
        .unwrap_err()
        .to_string();
    assert!(e.contains("tier s3"), "{e}");
    std::env::set_var("AWS_SECRET_ACCESS_KEY", "belay-secret");
    drop(server);
    let e = Objects::open("s3", &impatient(location), "job-1")
        .unwrap()
        .list("")
        .unwrap_err()
        .to_string();
    assert!(e.contains("tier s3"), "a server that is gone is an error: {e}");
}

/// Google's client speaks the XML interface, as S3's does, so that the server serves it as well. How it gets its tokens
/// is not tested.
#[test]
fn google_cloud_storage_conforms() {
    let scratch = Scratch::new("gs");
    let server = Server::start(&scratch, &["--anonymous"]);
    let location = Location {
        url: "gs://bucket/some/prefix".into(),
        endpoint: Some(server.1.clone()),
        allow_http: true,
        ..Location::default()
    };
    // An account without tokens, as emulators have it.
    let account = r#"{"private_key":"","private_key_id":"","client_email":"","disable_oauth":true}"#;
    std::env::set_var("GOOGLE_SERVICE_ACCOUNT_KEY", account);
    conformance::run(&|| Box::new(Objects::open("gs", &location, "job-1").unwrap()));
    let t = Objects::open("gs", &location, "job-1").unwrap();
    write_whole(&t, "job.json", b"{}").unwrap();
    let there = std::fs::read(scratch.0.join("bucket/some/prefix/job-1/job.json")).unwrap();
    assert_eq!(there, b"{}");
    drop(server);
    let t = Objects::open("gs", &impatient(location), "job-1").unwrap();
    let e = t.list("").unwrap_err().to_string();
    assert!(e.contains("tier gs"), "a server that is gone is an error: {e}");
}

/// By hand: `npx azurite-blob --skipApiVersionCheck`, a container `bucket` in it, and AZURE_STORAGE_ACCOUNT_NAME and
/// AZURE_STORAGE_ACCOUNT_KEY as it has them.
#[test]
#[ignore = "needs Azurite at 127.0.0.1:10000"]
fn azure_blob_storage_conforms() {
    let account = std::env::var("AZURE_STORAGE_ACCOUNT_NAME").expect("AZURE_STORAGE_ACCOUNT_NAME");
    for url in ["az://bucket/some/prefix", "abfs://bucket"] {
        let location = Location {
            url: url.into(),
            endpoint: Some(format!("http://127.0.0.1:10000/{account}")),
            allow_http: true,
            ..Location::default()
        };
        conformance::run(&|| Box::new(Objects::open("az", &location, "job-1").unwrap()));
    }
}

#[test]
fn a_local_store_conforms() {
    let scratch = Scratch::new("file");
    let location = Location {
        url: format!("file://{}", scratch.0.join("bucket").display()),
        ..Location::default()
    };
    for folder in ["job-1", ""] {
        conformance::run(&|| Box::new(Objects::open("file", &location, folder).unwrap()));
    }
}

#[test]
fn an_address_that_is_none_is_refused() {
    let location = Location {
        url: "ftp://x".into(),
        ..Location::default()
    };
    let e = Objects::open("odd", &location, "job-1").unwrap_err().to_string();
    assert!(e.contains("tier odd") && e.contains("s3://BUCKET"), "{e}");
    let location = Location {
        url: "az://container/prefix".into(),
        ..Location::default()
    };
    let e = Objects::open("odd", &location, "job-1").unwrap_err().to_string();
    assert!(e.contains("AZURE_STORAGE_ACCOUNT_NAME"), "{e}");
}

/// A store that gives `answer` to its requests, the first of which is number 0, and then closes the connection; `None`:
/// it says nothing. Its location.
fn odd_store(answer: impl Fn(usize) -> Option<String> + Send + 'static) -> Location {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        let mut held = Vec::new();
        for (n, stream) in listener.incoming().flatten().enumerate() {
            let Some(answer) = answer(n) else {
                held.push(stream);
                continue;
            };
            let mut lines = BufReader::new(&stream).lines();
            while lines.next().is_some_and(|line| !line.unwrap_or_default().is_empty()) {}
            (&stream).write_all(answer.as_bytes()).unwrap();
        }
    });
    std::env::set_var("AWS_ACCESS_KEY_ID", "belay-test");
    std::env::set_var("AWS_SECRET_ACCESS_KEY", "belay-secret");
    Location {
        url: "s3://bucket".into(),
        endpoint: Some(endpoint),
        region: Some("us-east-1".into()),
        allow_http: true,
        ..Location::default()
    }
}

/// An answer of which `bytes` are announced.
fn answer(status: &str, bytes: usize, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\nContent-Length: {bytes}\r\nConnection: close\r\n\r\n{body}")
}

#[test]
fn a_store_that_refuses_for_the_moment_is_asked_again_and_one_that_hangs_is_noticed_in_time() {
    let refuses = odd_store(|n| Some(answer(if n < 7 { "503 Slow Down" } else { "404 Not Found" }, 0, "")));
    let refuses = Objects::open("s3", &refuses, "job-1").unwrap();
    assert_eq!(refuses.length("packs/1").unwrap(), None);
    let hangs = Location {
        timeout: Some(Duration::from_secs(1)),
        ..odd_store(|_| None)
    };
    let begin = Instant::now();
    Objects::open("s3", &hangs, "job-1").unwrap().length("packs/1").unwrap_err();
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
}

#[test]
fn an_upload_is_complete_also_where_the_store_does_not_say_so_in_time() {
    const PARTS: usize = 9 << 20;
    let s = Scratch::new("late");
    // Whatever other tests say who they are.
    let server = Server::start(&s, &["--anonymous", "--late=packs"]);
    let location = Location {
        endpoint: Some(server.1.clone()),
        timeout: Some(Duration::from_secs(5)),
        ..odd_store(|_| None)
    };
    let tier = Objects::open("s3", &location, "job-1").unwrap();
    write_whole(&tier, "packs/1", &vec![7; PARTS]).unwrap();
    assert_eq!(tier.length("packs/1").unwrap(), Some(PARTS as u64));
    // Nobody can tell which one is there where there was one.
    write_whole(&tier, "packs/1", &vec![8; PARTS]).unwrap_err();
}

const LISTING: &str = r#"<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>bucket</Name><Prefix>job-1/gen/</Prefix><KeyCount>1</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated><Contents><Key>job-1/gen/1.json</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;1&quot;</ETag><Size>5</Size></Contents></ListBucketResult>"#;

#[test]
fn a_listing_that_was_cut_is_asked_for_again() {
    let store = odd_store(|n| {
        let cut = &LISTING[..LISTING.len() - 20 * n - 20];
        Some(match n {
            // The connection ends too early, and so does the text.
            0 | 1 => answer("200 OK", LISTING.len(), cut),
            2 | 3 => answer("200 OK", cut.len(), cut),
            _ => answer("200 OK", LISTING.len(), LISTING),
        })
    });
    let found = Objects::open("s3", &store, "job-1").unwrap().list("gen").unwrap();
    assert_eq!(found.iter().map(|o| &*o.key).collect::<Vec<_>>(), ["gen/1.json"]);
}

#[test]
fn a_page_in_place_of_a_listing_is_told_as_such() {
    let page = "<html><head><title>Welcome</title></head><body>Log in to the network</body></html>";
    let store = odd_store(move |_| Some(answer("200 OK", page.len(), page)));
    let tier = Objects::open("s3", &store, "job-1").unwrap();
    let begin = Instant::now();
    for e in [tier.list("gen").unwrap_err(), tier.folders().unwrap_err()] {
        let e = e.to_string();
        assert!(
            e.starts_with("tier s3: list ") && e.contains("no listing") && e.contains("<html>"),
            "{e}"
        );
    }
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
}
