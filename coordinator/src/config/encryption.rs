//! `[encryption]`: where the keys come from (`keys`).

use crate::Failure;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// `[encryption]`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Encryption {
    /// A file of keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_file: Option<PathBuf>,
    /// A command that prints them, and its arguments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_command: Option<Vec<String>>,
}

impl Encryption {
    /// By the keys in the file at `path`.
    pub fn by_file(path: &Path) -> Result<Self, Failure> {
        let path = std::path::absolute(path).map_err(|e| Failure::io(format!("find {}", path.display()), &e))?;
        Ok(Self {
            key_file: Some(path),
            key_command: None,
        })
    }

    /// Whether what is written to durable tiers is sealed.
    pub fn is_on(&self) -> bool {
        *self != Self::default()
    }

    /// What cannot be.
    pub(crate) fn check(&self) -> Result<(), String> {
        match (&self.key_file, &self.key_command) {
            (Some(_), Some(_)) => Err("key_file and key_command: one of them".into()),
            (Some(path), None) if !path.is_absolute() => Err("key_file: an absolute path is needed".into()),
            (None, Some(words)) if words.first().is_none_or(String::is_empty) => {
                Err("key_command: a command and its arguments are needed".into())
            }
            _ => Ok(()),
        }
    }
}
