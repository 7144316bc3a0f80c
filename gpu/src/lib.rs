//! GPU programs come to rest for a checkpoint by NVIDIA's driver itself: it waits for their work, takes what is on the devices into
//! their memory, and puts it back afterwards or after a restart. A thread of its own in each of them does that, which alone
//! runs then (`docs/decisions/0035-gpu-driver.md`).
//!
//! The driver's library is loaded by a process of its own, never by the agent: it is large, has threads, and may fail.
//! That process takes part like a library in a program, by a control page, for all GPU processes of its host. It waits
//! for orders; whatever becomes of the agent, it lets the programs go on.
//!
//! ```text
//! CLOSE           lock all ── DONE           [all hosts have; everything is stopped, but for the driver's thread in each]
//! LEAVE           checkpoint all ── DONE     [these are stopped too; captured; or restarted; these run]
//! REBUILD         restore all ── DONE        [everything runs]
//! OPEN, or death  restore those that are off, unlock all
//! ```

mod devices;
mod driver;
mod page;
mod rest;

pub use devices::Device;
use devices::Missing;
use driver::Cuda;
use rest::Processes;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// What the agent asks of the process.
#[derive(Debug)]
pub struct Task {
    /// The job's processes that use a GPU.
    pub pids: Vec<i32>,
    /// How long the driver may wait for the work of each.
    pub limit: Duration,
    /// They were restarted, and are off their devices.
    pub restarted: bool,
    /// The GPUs that they had, where those of this host are to take their places.
    pub had: Vec<Device>,
    /// The GPUs that were hidden from them there: the driver has counted those too, and wants a place for each.
    pub hidden: Vec<Device>,
    /// What `CUDA_VISIBLE_DEVICES` said where the job was started: which of them may be used.
    pub visible: Option<String>,
    /// Say which GPUs the host has.
    pub list: bool,
    /// Let them go on, whatever their state, and nothing else.
    pub recover: bool,
}

/// Claims a GPU on this host, unless another process has: by a name in the abstract namespace, which goes with this process.
fn claim(device: &Device) -> Option<UnixDatagram> {
    let name = SocketAddr::from_abstract_name(format!("belay-gpu-{}", device.uuid())).ok()?;
    UnixDatagram::bind_addr(&name).ok()
}

/// Serves the control page behind standard input until all goes on again. On standard output it says `gpu UUID NAME` of
/// each GPU that may be used, and `hidden UUID NAME` of the others, where it is to list them, `thread PID TID` of each
/// process that runs, with the thread that does the driver's work there, and `ready` when it begins.
pub fn serve(task: Task) -> Result<(), String> {
    let cuda = Cuda::load().map_err(|e| e.to_string())?;
    // While the programs run: whatever follows may have to put states back.
    cuda.begin().map_err(|e| e.to_string())?;
    let all = if task.list || !task.had.is_empty() {
        cuda.devices().map_err(|e| e.to_string())?
    } else {
        Vec::new()
    };
    let visible = task.visible.as_ref().map(|named| devices::visible(&all, named));
    // Where none is, programs of the job may have been told others.
    let may = visible.filter(|some| !some.is_empty() || !task.had.is_empty());
    let may = may.unwrap_or_else(|| all.clone());
    // Held until this process ends: by then all that restart here have chosen.
    let mut claims = Vec::new();
    let pairs = devices::pairs((&task.had, &task.hidden), (&all, &may), &mut |device| {
        let claimed = claim(device);
        let is_new = claimed.is_some();
        claims.extend(claimed);
        is_new
    });
    let pairs = pairs.map_err(|missing| match (missing, &task.visible) {
        (Missing::Had(why), Some(named)) => {
            format!("{why} (CUDA_VISIBLE_DEVICES={named}); let it name as many of this kind as before")
        }
        (Missing::Had(why), None) => format!("{why}; restart where there is one"),
        (Missing::Hidden(why), _) => format!(
            "{why}; restart where there is one, and have a container or a device cgroup (Slurm: ConstrainDevices) show jobs their own GPUs only"
        ),
    })?;
    let mut processes = Processes::new(&cuda, task.pids, task.limit, pairs);
    if task.recover {
        return processes.go_on(true).map_err(|e| e.why);
    }
    if task.list {
        may.iter().for_each(|d| println!("gpu {d}"));
        all.iter().filter(|d| !may.contains(d)).for_each(|d| println!("hidden {d}"));
    }
    if !task.restarted {
        processes.list().iter().for_each(|(pid, tid)| println!("thread {pid} {tid}"));
    }
    page::serve(&processes, task.restarted)
}
