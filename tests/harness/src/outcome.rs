//! What programs that nobody here wrote come to, undisturbed and disturbed, and how far they differ.

use crate::job::text;
use crate::Failure;
use std::process::Output;
use std::time::{Duration, Instant};

/// What a run came to: exit status and output.
pub type Outcome = (String, Vec<u8>);

/// How long what passes by itself may take, also where much else runs.
const PATIENCE: Duration = Duration::from_secs(90);

/// Runs `take`, a `belay checkpoint`, until nothing stands against it that passes by itself; `false` when the program
/// has ended before it.
pub fn take_unless_ended(
    take: impl Fn() -> Result<Output, Failure>,
    ended: impl Fn() -> Result<bool, Failure>,
) -> Result<bool, Failure> {
    let begin = Instant::now();
    loop {
        let o = take()?;
        if o.status.success() {
            return Ok(true);
        }
        let said = text(&o);
        if ended()? || said.contains("is not running") || said.contains("ended before") {
            return Ok(false);
        }
        // A connection that nobody has accepted yet, a thread that cannot be let go before a child of vfork has ended.
        let passes = said.contains("try again") || said.contains("again in a moment");
        // A job over hosts ends host by host; it is asked again until all of it has.
        if !(passes || said.contains("it has ended")) || begin.elapsed() > PATIENCE {
            return Err(format!("belay checkpoint: {said}"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Fails where what was `got` is not what was `expected`.
pub fn compare(expected: &Outcome, got: &Outcome, way: &str) -> Result<(), Failure> {
    if got.0 != expected.0 {
        let text = String::from_utf8_lossy(&got.1);
        return Err(format!(
            "{way}: ended with {} instead of {}; its output:\n{}",
            got.0,
            expected.0,
            tail(&text)
        ));
    }
    if got.1 == expected.1 {
        return Ok(());
    }
    let at = got
        .1
        .iter()
        .zip(&expected.1)
        .position(|(a, b)| a != b)
        .unwrap_or(got.1.len().min(expected.1.len()));
    let part = |v: &[u8]| String::from_utf8_lossy(&v[at.min(v.len())..(at + 300).min(v.len())]).into_owned();
    Err(format!(
        "{way}: its output differs from byte {at} on ({} and {} bytes):\n{}\ninstead of:\n{}",
        got.1.len(),
        expected.1.len(),
        part(&got.1),
        part(&expected.1)
    ))
}

/// The end of an output.
pub fn tail(text: &str) -> &str {
    let mut at = text.len().saturating_sub(1500);
    while !text.is_char_boundary(at) {
        at += 1;
    }
    &text[at..]
}
