//! Entry for the fuzzer: what the agents of a redundant job say to each other, and the records in the job directory.

use super::again::Healed;
use super::record::Record;
use super::round::{Done, Hello, Plan};
use super::serve::{Ask, Holder};
use belay_redundancy::index::check_parts;
use belay_redundancy::{stream, Part, BLOCK};
use std::path::{Path, PathBuf};

/// A message of whichever kind, or a record.
pub fn message(data: &[u8]) {
    if let Ok(ask) = serde_json::from_slice::<Ask>(data) {
        question(&ask);
    }
    if let Ok(plan) = serde_json::from_slice::<Plan>(data) {
        if plan.check().is_ok() {
            let layout = plan.layout;
            let stripe = layout.stripe_of(plan.position, layout.data - 1);
            assert!(layout.data_of(stripe).contains(&(plan.position, layout.data - 1)));
        }
    }
    drop(serde_json::from_slice::<Hello>(data));
    drop(serde_json::from_slice::<Done>(data));
    drop(serde_json::from_slice::<Healed>(data));
    // Answers.
    drop(serde_json::from_slice::<Vec<u64>>(data));
    if let Ok(files) = serde_json::from_slice::<Vec<Part>>(data) {
        placed(files);
    }
    if let Ok(record) = Record::decode(Path::new("input"), data, 7) {
        for row in &record.rows {
            row.first();
            row.words.to(row.host()).program_words();
        }
    }
}

/// Files that a host has told of, in a stream.
fn placed(files: Vec<Part>) {
    let before = stream::place(files.clone(), &[], |_| true);
    let parts = stream::place(files, &before, |_| true);
    if check_parts(&parts).is_ok() {
        stream::pieces(&parts, stream::end(&parts) / 2, 1 << 20);
    }
}

/// A question to a host that holds part 3, of which nothing can be read.
fn question(ask: &Ask) {
    let holder = Holder::of(vec![(3, PathBuf::from("/dev/null/nowhere"))]);
    if let Ok(answer) = holder.answer(ask) {
        assert!(answer.len() as u64 <= BLOCK, "an answer of {} bytes", answer.len());
    }
}
