//! CUDA: which processes have left their GPUs for the checkpoint, so that a restart has the driver put their state back.
//!
//! What they had on the devices lies in their memory by then, and is captured as such.

use crate::kind::{nothing, Kind, Never};
use crate::model::Descriptors;
use crate::session::Session;
use crate::state::Part;
use serde::{Deserialize, Serialize};

/// Longest that says which GPU one is, bytes.
const MOST: usize = 300;

/// Those processes.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct OffGpu {
    pub(crate) pids: Vec<i32>,
    /// The GPUs of the host that they could use, as `UUID NAME`,
    pub(crate) devices: Vec<String>,
    /// and those that were hidden from them (`CUDA_VISIBLE_DEVICES`).
    #[serde(default)]
    pub(crate) hidden: Vec<String>,
    /// The driver's thread in each: process, thread.
    #[serde(default)]
    pub(crate) threads: Vec<(i32, i32)>,
}

impl Part for OffGpu {
    const KEY: &'static str = "cuda";
}

/// The kind.
pub(crate) struct Cuda;

impl Kind for Cuda {
    const NAME: &'static str = "Cuda";
    const VERSION: u32 = 1;
    type State = Never;
    type Part = OffGpu;

    fn finish(s: &mut Session<'_>, out: &mut Descriptors, _: &mut Vec<crate::fault::Refusal>) {
        let off = s.processes.iter().filter_map(|p| Some((p.pid, p.left_gpus.as_ref()?)));
        let off: Vec<_> = off.collect();
        if let Some((_, first)) = off.first() {
            out.parts.put(OffGpu {
                pids: off.iter().map(|(pid, _)| *pid).collect(),
                devices: first.devices.seen.clone(),
                hidden: first.devices.hidden.clone(),
                threads: off.iter().filter_map(|(pid, left)| Some((*pid, left.thread?))).collect(),
            });
        }
    }

    fn check_part(part: &OffGpu, d: &Descriptors) -> Result<(), String> {
        let is_odd = |device: &String| device.len() > MOST || device.contains(char::is_control);
        if let Some(device) = part.devices.iter().chain(&part.hidden).find(|d| is_odd(d)) {
            return Err(format!("{device:?} is no GPU"));
        }
        if let Some((pid, tid)) = part.threads.iter().find(|(pid, tid)| *tid <= 0 || !part.pids.contains(pid)) {
            return Err(format!("thread {tid} of process {pid} is no thread of a GPU's driver"));
        }
        match part.pids.iter().find(|pid| d.table(**pid).is_none()) {
            None => Ok(()),
            Some(pid) => Err(format!("process {pid}, which has left its GPU, is not in the image")),
        }
    }

    nothing!(survey, recognise, capture, contents, check, numbers, ways, prepare, rebuild, join, refill);
    nothing!(install, install_late, settle, install_own, complete);
}
