//! The targets. Each takes bytes that come from disk, from the network or from another process, and does with them what
//! belay does until it trusts them.

use crate::values;
use belay_coordinator::config::{Config, Limits};
use belay_coordinator::fuzzing as from_coordinator;
use belay_coordinator::jobdir::Description;
use belay_coordinator::nodes::step::fuzzing as step;
use belay_image::extents::{self, Extent};
use belay_image::manifest::Manifest;
use belay_image::model::{FileIdentity, Job};
use belay_image::sections::{Kind, SectionFile};
use belay_image::{checksum, FORMAT_VERSION};
use belay_kernel::proc::{Map, Stat, Status};
use belay_plugins::Descriptors;
use belay_redundancy::index::{Index, FOOTER};
use belay_storage::chunk;
use belay_storage::place::model::Model;
use belay_wire::socket::Lines;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::Path;

/// A target.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name.
    pub name: &'static str,
    /// The directory of its corpus.
    pub corpus: &'static str,
    /// Takes the bytes.
    pub run: fn(&[u8]),
    /// It decodes what every restart reads, and is fuzzed for longer in each run of the tests.
    pub main: bool,
}

const fn target(name: &'static str, corpus: &'static str, run: fn(&[u8])) -> Target {
    let main = false;
    Target { name, corpus, run, main }
}

const fn main(target: Target) -> Target {
    Target { main: true, ..target }
}

/// All of them.
pub const ALL: [Target; 30] = [
    main(target("image", "image", image)),
    main(target("image-resealed", "image", image_resealed)),
    main(target("values", "values", values::values)),
    target("job", "job", job),
    target("vdso", "vdso", belay_restart::fuzzing::vdso),
    target("descriptors", "descriptors", descriptors),
    target("extents", "extents", extent_index),
    main(target("manifest", "manifest", manifest)),
    main(target("chunk", "chunk", chunk_index)),
    target("group", "group", group_index),
    target("pack", "pack", belay_storage::fuzzing::pack),
    target("piece", "piece", belay_storage::fuzzing::piece),
    target("record", "record", belay_storage::fuzzing::record),
    target("sealed", "sealed", belay_storage::fuzzing::sealed),
    target("places", "places", belay_storage::fuzzing::places),
    target("documents", "documents", from_coordinator::documents),
    target("identity", "identity", identity),
    target("config", "config", config),
    target("wire", "wire", wire),
    target("tree-stranger", "tree", tree_stranger),
    target("tree-node", "tree", tree_node),
    target("direct-stranger", "tree", belay_tree::fuzzing::direct_stranger),
    target("direct-node", "tree", direct_node),
    target("redundancy", "redundancy", from_coordinator::redundancy),
    target("order", "order", from_coordinator::order),
    target("fact", "fact", belay_plugins::fuzzing::fact),
    target("request", "request", from_coordinator::request),
    target("procfs", "procfs", procfs),
    target("step-layout", "step", |data| step::layout(&String::from_utf8_lossy(data))),
    target("step-rank", "step", |data| step::rank(&String::from_utf8_lossy(data))),
];

fn here() -> &'static Path {
    Path::new("input")
}

/// A section file as it is on disk.
fn image(data: &[u8]) {
    if let Ok(file) = SectionFile::decode(here(), data) {
        look_into(&file);
    }
}

/// The same with right checksums, so that what lies behind them is reached.
fn image_resealed(data: &[u8]) {
    let mut data = data.to_vec();
    if let Some(head) = data.get_mut(..16) {
        head.copy_from_slice(&SectionFile::new().encode());
    }
    let mut at = 16;
    while let Some(head) = data.get(at..at + 24) {
        let length = u64::from_le_bytes(head[8..16].try_into().unwrap_or_default());
        let body = at + 24;
        let Some(payload) = usize::try_from(length)
            .ok()
            .and_then(|n| data.get(body..body.checked_add(n)?))
        else {
            break;
        };
        let (sum, next) = (checksum(payload), (body + payload.len()).next_multiple_of(8));
        data[at + 16..at + 24].copy_from_slice(&sum.to_le_bytes());
        at = next;
    }
    image(&data);
}

fn look_into(file: &SectionFile) {
    let table = match file.get(Kind::Extents).map(|raw| extents::decode(here(), raw)) {
        Ok(Ok(table)) => table,
        _ => Vec::new(),
    };
    if let Ok(job) = file.get_json::<Job>(Kind::Job) {
        belay_restart::fuzzing::decide(&job, &small(&table));
    }
    if let Ok(d) = file.get_json::<Descriptors>(Kind::Descriptors) {
        d.restores(Path::new("/tmp/x"));
    }
    // What is decoded and written again is the same.
    let again = SectionFile::decode(here(), &file.encode());
    assert!(again.is_ok_and(|a| a.sections() == file.sections()));
}

/// The extents that a chunk can back, as the restart checks before it uses them.
fn small(table: &[Extent]) -> Vec<Extent> {
    table.iter().copied().filter(|e| e.pages() <= 1 << 16).take(1000).collect()
}

/// Section JOB, which is JSON, and all decisions of a restart about it.
fn job(data: &[u8]) {
    if let Ok(job) = serde_json::from_slice::<Job>(data) {
        let pages = |v: &belay_image::model::Vma| Extent {
            vaddr: v.start & !0xfff,
            bytes: 4096,
            chunk: 1,
            page: 0,
        };
        let mut table: Vec<Extent> = job.processes.iter().flat_map(|p| &p.vmas).take(100).map(pages).collect();
        table.retain(|e| e.vaddr < u64::MAX - 4096);
        table.sort_by_key(|e| e.vaddr);
        table.dedup_by_key(|e| e.vaddr);
        belay_restart::fuzzing::decide(&job, &table);
    }
}

/// Section DESCRIPTORS, which is JSON.
fn descriptors(data: &[u8]) {
    if let Ok(d) = serde_json::from_slice::<Descriptors>(data) {
        d.restores(Path::new("/tmp/x"));
        // The processes of the corpus, and two threads of the first.
        let threads = [3866, 3867, 3868, 3869].map(|pid| (pid, pid));
        let threads = threads.into_iter().chain([(4866, 3866), (4867, 3866)]).collect();
        drop(d.check(&threads));
        assert!(d.of_ipc_namespace().is_none_or(|what| !what.is_empty()));
    }
}

/// The table of extents, and what is looked up in it.
fn extent_index(data: &[u8]) {
    if let Ok(table) = extents::decode(here(), data) {
        assert_eq!(extents::encode(&table), data, "a table that is written again differs");
        let mut out = Vec::new();
        for e in table.iter().take(50) {
            extents::within(&table, e.vaddr, e.vaddr.saturating_add(1 << 20), &mut out);
            e.offset();
        }
        let mut joined = table.clone();
        extents::normalise(&mut joined);
        let pages = |t: &[Extent]| t.iter().map(Extent::pages).sum::<u64>();
        assert_eq!(pages(&joined), pages(&table));
    }
}

/// A manifest: as a file, and as the body of an envelope with a right checksum.
fn manifest(data: &[u8]) {
    drop(Manifest::decode(here(), data));
    if let Ok(body) = std::str::from_utf8(data) {
        let envelope = serde_json::json!({
            "format": FORMAT_VERSION,
            "xxh3": format!("{:016x}", checksum(data)),
            "body": body,
        });
        if let Ok(m) = Manifest::decode(here(), envelope.to_string().as_bytes()) {
            assert!(m.files.iter().all(|f| Path::new(&f.name).components().count() == 1));
            assert!(m.encode().is_ok());
        }
    }
    drop(Description::decode(here(), data));
}

/// The table of hashes at the end of a chunk, as it is and with a right checksum.
fn chunk_index(data: &[u8]) {
    drop(chunk::decode_trailer(here(), data));
    let mut data = data.to_vec();
    if let Some(end) = data.len().checked_sub(8) {
        let sum = checksum(&data[..end]);
        data[end..].copy_from_slice(&sum.to_le_bytes());
        if let Ok((hashes, sum)) = chunk::decode_trailer(here(), &data) {
            assert_eq!(chunk::encode_trailer(&hashes), (data, sum));
        }
    }
}

/// The index behind the parity blocks of a group: as it is in a file, and the JSON in it behind a right footer.
fn group_index(data: &[u8]) {
    let body = data.len().saturating_sub(FOOTER);
    if let Ok(length) = Index::length(&data[body..], data.len() as u64) {
        assert!(length + FOOTER as u64 <= data.len() as u64);
    }
    let decoded = [
        Index::decode(data).ok(),
        Index::decode(&sealed(data, 1)).ok(),
        Index::decode(&sealed(data, 2)).ok(),
        Index::decode(&sealed(&data[..body], 2)).ok(),
    ];
    for index in decoded.into_iter().flatten() {
        let again = index.encode().and_then(|bytes| Index::decode(&bytes));
        assert!(again.is_ok_and(|a| a == index));
        assert!(index.parity_bytes() > 0);
        let layout = index.layout;
        for member in 0..layout.members {
            let stripe = layout.stripe_of(member, layout.data - 1);
            assert!(layout.data_of(stripe).contains(&(member, layout.data - 1)));
            assert!(index.sum_of(member, layout.data - 1, 0).is_some());
            for part in index.members[member].parts.iter().filter(|p| p.bytes > 0) {
                let (segment, block) = index.geometry().block_at(part.at);
                assert!(index.sum_of(member, segment, block).is_some());
            }
        }
    }
}

/// `body` with the footer of an index.
fn sealed(body: &[u8], version: u32) -> Vec<u8> {
    let mut out = body.to_vec();
    out.extend_from_slice(b"BELAYPAR");
    out.extend_from_slice(&version.to_le_bytes());
    out.extend_from_slice(&(body.len() as u64).to_le_bytes());
    let sum = checksum(&out);
    out.extend_from_slice(&sum.to_le_bytes());
    out
}

/// A file of the configuration, over one that is good, and the measurements of a local tier.
fn config(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data) {
        let (mut known, mut limits) = (Config::default(), Limits::default());
        match known.lay(&mut limits, here(), text) {
            Ok(()) => {
                assert!(limits.keep(None) > 0 && limits.max_bytes(None).is_ok_and(|most| most != Some(0)));
                assert!(limits.lowered(None).is_none(), "only the site limits");
                assert_eq!(known.durable().count() + known.local().count(), known.tiers.len());
                let stored = serde_json::to_vec(&known).unwrap_or_default();
                assert!(serde_json::from_slice::<Config>(&stored).is_ok_and(|c| c == known));
            }
            Err(failure) => assert!(failure.to_string().starts_with("input: "), "{failure}"),
        }
    }
    if let Some(model) = serde_json::from_slice::<Model>(data).ok().and_then(Model::checked) {
        for writers in [0, 1, 2, 3, 7, 100, u32::MAX] {
            let rate = model.per_writer(writers);
            assert!(rate > 0.0 && !rate.is_nan(), "{writers} writers: {rate}");
        }
    }
}

/// Lines of the control socket, read in pieces.
fn wire(data: &[u8]) {
    let mut lines = Lines::new(4096);
    for piece in data.chunks(1 + data.len() % 1021) {
        if lines.fill(piece).is_err() {
            return;
        }
        loop {
            match lines.next_line() {
                Ok(Some(line)) => {
                    if let Ok(request) = serde_json::from_slice::<belay_wire::Request>(&line) {
                        let again = serde_json::to_vec(&request).unwrap_or_default();
                        assert!(serde_json::from_slice::<belay_wire::Request>(&again).is_ok_and(|r| r == request));
                    }
                    drop(serde_json::from_slice::<belay_wire::Event>(&line));
                }
                Ok(None) => break,
                Err(_) => return,
            }
        }
    }
}

/// A peer of the tree without the key.
fn tree_stranger(data: &[u8]) {
    belay_tree::fuzzing::stranger(data);
}

/// A node of the tree that says anything: lines of the corpus become messages.
fn tree_node(data: &[u8]) {
    belay_tree::fuzzing::node(&messages(data));
    belay_tree::fuzzing::node(data);
}

/// The same on a connection beside the tree.
fn direct_node(data: &[u8]) {
    belay_tree::fuzzing::direct_node(&messages(data));
    belay_tree::fuzzing::direct_node(data);
}

/// Each line with its length before it.
fn messages(lines: &[u8]) -> Vec<u8> {
    let mut stream = Vec::new();
    for line in lines.split(|b| *b == b'\n') {
        stream.extend_from_slice(&u32::try_from(line.len()).unwrap_or(0).to_le_bytes());
        stream.extend_from_slice(line);
    }
    stream
}

/// A file that programs have mapped: where its build id is, the file says.
fn identity(data: &[u8]) {
    let Ok(mut file) = memory_file() else { return };
    if file.write_all(data).is_ok() {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        assert!(FileIdentity::of(Path::new(&path)).is_ok_and(|i| i.bytes == data.len() as u64));
    }
}

fn memory_file() -> std::io::Result<File> {
    Ok(rustix::fs::memfd_create(c"input", rustix::fs::MemfdFlags::CLOEXEC)?.into())
}

/// Files of `/proc`, in which programs can choose some of the text.
fn procfs(data: &[u8]) {
    if let Some(stat) = Stat::parse(data) {
        stat.is_dead();
    }
    let status = Status::parse(data);
    for key in ["Uid", "NSpid", "Groups", "SigBlk"] {
        status.list(key);
        status.hex(key);
    }
    if let Some(maps) = Map::parse(data) {
        assert!(maps.len() <= data.len());
    }
}
