//! Entries for the fuzzer: what the agents of a job say to each other, what lies in the job directory, who asks for numbers.

use crate::exporter::understand;
use crate::nodes::table::Row;
use crate::nodes::Order;
use crate::state::State;
use crate::tiers::{gather, notes};

pub use crate::redundancy::fuzzing::message as redundancy;

/// What the root orders the parts to do.
pub fn order(data: &[u8]) {
    let Ok(order) = serde_json::from_slice::<Order>(data) else {
        return;
    };
    let text = serde_json::to_string(&order).unwrap_or_default();
    let again = serde_json::from_str::<Order>(&text);
    assert!(again.is_ok_and(|again| format!("{again:?}") == format!("{order:?}")));
}

/// Small documents of the job directory and of generations, and what a host says that is asked for its chunks.
pub fn documents(data: &[u8]) {
    if let Some(known) = notes::decode(data) {
        assert!(known.numbers().count() >= known.generations.len());
    }
    for row in serde_json::from_slice::<Vec<Row>>(data).into_iter().flatten() {
        row.first();
        row.words.to(row.host()).program_words();
    }
    crate::forecast::understand(data);
    drop(serde_json::from_slice::<State>(data));
    drop(serde_json::from_slice::<gather::Answer>(data));
}

/// A request for the job's numbers.
pub fn request(data: &[u8]) {
    for end in 0..data.len().min(100) {
        understand(&data[..end]);
    }
    assert!(understand(data).is_none_or(|(status, numbers)| numbers == status.starts_with("200")));
}
