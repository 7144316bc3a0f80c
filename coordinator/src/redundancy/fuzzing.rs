//! Entry for the fuzzer: what the agents of a redundant job say to each other, and the records in the job directory.

use super::again::Healed;
use super::record::Record;
use super::round::{Done, Hello, Plan};
use super::serve::{Ask, Holder};
use belay_redundancy::index::Place;
use belay_redundancy::{Part, BLOCK};
use std::path::{Path, PathBuf};
use std::sync::Arc;

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
    drop(serde_json::from_slice::<Vec<Part>>(data));
    if let Ok(record) = Record::decode(Path::new("input"), data, 7) {
        for row in &record.rows {
            row.first();
            row.words.to(row.host()).program_words();
        }
    }
}

/// A question to a host that holds generation 7 of part 3, whose one file cannot be read.
fn question(ask: &Ask) {
    let part = Part {
        place: Place::Generation,
        name: "manifest.json".into(),
        bytes: 3 * BLOCK + 5,
    };
    let stream = (3, 7, Arc::new(vec![part]));
    let holder = Holder::of(vec![(3, PathBuf::from("/dev/null/nowhere"))], Some(stream));
    if let Ok(answer) = holder.answer(ask) {
        assert!(answer.len() as u64 <= BLOCK, "an answer of {} bytes", answer.len());
    }
}
