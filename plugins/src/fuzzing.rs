//! Entry for the fuzzer: what other nodes of the job tell about their sockets.

use crate::sockets::names::{Book, Page, View};
use crate::sockets::tcp::{Counters, Told, Unread};
use serde::de::DeserializeOwned;
use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};

/// What this node tells.
const OWN_COUNTERS: &str = r#"{"counted":1000,"syn":true,"received":5}"#;
const OWN_PAGE: &str = r#"{
    "names": {"hosts": [["10.0.0.1", "fd00::1"], ["10.0.0.2"]], "begun": [0, 5], "era": 5, "started": {"40": 5}, "ports": [[80, 81]]},
    "now": ["10.0.0.3", "fd00::1"],
    "listening": [{"ip": "0.0.0.0", "port": 81, "now": 82}, {"ip": "fd00::1", "port": 7, "now": 7}],
    "bound": [5353]
}"#;

fn own<T: DeserializeOwned>(text: &str) -> T {
    match serde_json::from_str(text) {
        Ok(own) => own,
        Err(e) => panic!("what this node tells: {e}"),
    }
}

/// A fact of whichever kind.
pub fn fact(data: &[u8]) {
    if let Ok(told) = serde_json::from_slice::<Counters>(data) {
        let own = own(OWN_COUNTERS);
        for (from, to) in [(&own, &told), (&told, &own), (&told, &told)] {
            drop(from.undelivered(to));
        }
    }
    if let Ok(page) = serde_json::from_slice::<Page>(data) {
        book(&page);
    }
    drop(serde_json::from_slice::<Unread>(data));
    drop(serde_json::from_slice::<Told>(data));
}

/// All addresses that a page names, with some ports.
fn addresses(page: &Page) -> Vec<SocketAddr> {
    let value = serde_json::to_value(page).unwrap_or_default();
    let hosts: Vec<Vec<IpAddr>> = serde_json::from_value(value["names"]["hosts"].clone()).unwrap_or_default();
    let ips = hosts.iter().flatten().chain(&page.now);
    let ports: Vec<u16> = page
        .listening
        .iter()
        .flat_map(|l| [l.port, l.now])
        .chain([0, 7, 40_000])
        .collect();
    ips.flat_map(|ip| ports.iter().map(|port| SocketAddr::new(*ip, *port)))
        .collect()
}

/// What is looked up where one node has told `page`, by it and by another.
fn book(page: &Page) {
    let own: Page = own(OWN_PAGE);
    let mut all = addresses(page);
    // Every address is compared with all others.
    if all.len() > 1000 {
        return;
    }
    all.extend(addresses(&own));
    for (own, other) in [(own.clone(), page.clone()), (page.clone(), own)] {
        let book = Book::new(own, vec![other], HashSet::from([7]));
        for at in &all {
            for view in [View::Since(0), View::Since(5), View::Checkpoint, View::Now, book.view(40)] {
                assert!(book.lead(*at, view) != Some(*at) && book.shown_own(*at, view) != Some(*at));
                assert_ne!(book.likely(*at, view), Some(*at));
                for stream in [true, false] {
                    assert_ne!(book.shown_peer(*at, stream, view), Some(*at));
                }
            }
            assert!(book.place(*at).is_none_or(|now| now.port() == at.port()));
            book.is_known(at.ip());
        }
        book.is_needed();
        for view in [View::Since(5), View::Now] {
            book.share(view);
        }
        drop(book.names(&HashSet::from([40])).in_era(9).with(&[]));
    }
}
