//! Words as a shell reads them.

use crate::Failure;
use belay_wire::Exit;
use std::path::Path;

/// `path` for a command line of a remote shell, which is text.
pub(crate) fn text(path: &Path) -> Result<&str, Failure> {
    path.to_str().ok_or_else(|| {
        let what = format!("{path:?} is no UTF-8, and remote shells are told of it: another name is needed");
        Failure::new(Exit::Usage, what)
    })
}

/// `word`, quoted.
pub(crate) fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// `word` as a person types it: quoted where it must be.
pub(crate) fn typed(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+,:@%=".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        quote(word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_survive_the_shell() {
        for word in ["a 'b' \"c\" $d `e`", "/scratch/job-1.2", "/a b", "", "~", "über"] {
            for shown in [quote(word), typed(word)] {
                let mut shell = std::process::Command::new("sh");
                let out = shell.args(["-c", &format!("printf %s {shown}")]).output().unwrap();
                assert_eq!(String::from_utf8_lossy(&out.stdout), word);
            }
        }
        assert_eq!(
            (typed("/tmp/job-1.2"), typed("/a b")),
            ("/tmp/job-1.2".into(), "'/a b'".into())
        );
    }
}
