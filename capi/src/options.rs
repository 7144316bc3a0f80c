//! `belay_history_opts`.

use crate::door::Text;
use crate::error::Failure;
use belay_history::plan::Rules;
use belay_recall::{Layout, Life, Options};
use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;

/// Of the header.
#[repr(C)]
pub(crate) struct HistoryOptions<'a> {
    name: Text<'a>,
    dir: Text<'a>,
    host_bytes: u64,
    device_bytes: u64,
    extent_bytes: u64,
    device: i32,
    policy: u32,
    layout: u32,
    keep: u32,
    reserved: [u64; 8],
}

const HOST_BYTES: u64 = 1 << 30;

fn given<'a>(text: &Text<'a>, what: &str) -> Result<&'a CStr, Failure> {
    text.get()
        .ok_or_else(|| Failure::invalid(&format!("a history needs a {what}")))
}

impl HistoryOptions<'_> {
    pub(crate) fn read(&self) -> Result<Options, Failure> {
        let (name, dir) = (given(&self.name, "name")?, given(&self.dir, "directory")?);
        let name = name
            .to_str()
            .map_err(|_| Failure::invalid("the name of a history is UTF-8"))?;
        if self.device != 0 {
            return Err(Failure::no_device());
        }
        if self.device_bytes != 0 || self.reserved != [0; 8] {
            return Err(Failure::invalid("an option that this library does not know is not 0"));
        }
        let or = |given: u64, usual: u64| if given == 0 { usual } else { given };
        let usual = Options::new(OsStr::from_bytes(dir.to_bytes()), name, or(self.host_bytes, HOST_BYTES));
        Ok(Options {
            extent: or(self.extent_bytes, usual.extent),
            rules: match self.policy {
                0 => Rules::OURS,
                1 => Rules::SCORE,
                2 => Rules::LRU,
                3 => Rules::BELADY,
                _ => return Err(Failure::invalid("there is no such policy")),
            },
            layout: match self.layout {
                0 => Layout::Paged,
                1 => Layout::Contiguous,
                _ => return Err(Failure::invalid("there is no such layout")),
            },
            life: match self.keep {
                0 => Life::Lasting,
                1 => Life::UntilRead,
                _ => return Err(Failure::invalid("there is no such value of keep")),
            },
            ..usual
        })
    }
}
