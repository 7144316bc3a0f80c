//! What tests expect: conditions with a message, and refusals in belay's own form.

use crate::job::{show, text};
use crate::Failure;
use std::process::Output;

/// Fails with the message of `what` unless `ok`.
pub fn want(ok: bool, what: impl FnOnce() -> String) -> Result<(), Failure> {
    if ok {
        Ok(())
    } else {
        Err(what())
    }
}

/// The one line on standard error, in lower case, of a command that must have failed with belay's own status.
pub fn refusal(o: &Output) -> Result<String, Failure> {
    let code = o.status.code().unwrap_or(0);
    want((64..128).contains(&code), || {
        format!(
            "{}, expected a status of belay's own between 64 and 127: {}",
            show(o.status),
            text(o)
        )
    })?;
    let err = String::from_utf8_lossy(&o.stderr).trim().to_lowercase();
    want(err.lines().count() == 1, || {
        format!("expected one line on standard error, got: {err:?}")
    })?;
    Ok(err)
}

/// A refusal that contains each of `words`.
pub fn refused(o: &Output, words: &[&str]) -> Result<(), Failure> {
    let err = refusal(o)?;
    match words.iter().find(|w| !err.contains(&w.to_lowercase())) {
        Some(missing) => Err(format!("the message does not mention {missing:?}: {err}")),
        None => Ok(()),
    }
}

/// A refusal that contains one of `words`.
pub fn refused_for_one_of(o: &Output, words: &[&str]) -> Result<(), Failure> {
    let err = refusal(o)?;
    want(words.iter().any(|w| err.contains(&w.to_lowercase())), || {
        format!("the message names none of {words:?}: {err}")
    })
}

/// The result of an operation on the system, with what it was in the failure.
pub fn io<T>(what: &str, r: std::io::Result<T>) -> Result<T, Failure> {
    r.map_err(|e| format!("{what}: {e}"))
}

/// The value of the metric whose line in `text` begins with `name` and holds `label`.
pub fn metric(text: &str, name: &str, label: &str) -> Result<f64, Failure> {
    let line = text
        .lines()
        .find(|l| l.strip_prefix(name).is_some_and(|rest| rest.starts_with('{')) && l.contains(label));
    let line = line.ok_or(format!("no {name} with {label} in:\n{text}"))?;
    let value = line.rsplit(' ').next().and_then(|v| v.parse().ok());
    value.ok_or(format!("not a number: {line}"))
}
