//! A GPU without one: `tests/fake-cuda`, a stand-in for NVIDIA's driver, and its device files.

use crate::build::compile;
use crate::place::{build_dir, repository, with_devices, Place};
use crate::Failure;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// The library's file name, which is that of the real one.
pub const LIBRARY: &str = "libcuda.so.1";
/// Makes the file of the device that it has, and one that nobody has.
const DEVICES: &str = "head -c 4096 /dev/zero > /dev/nvidia1; touch /dev/nvidia0; chmod 666 /dev/nvidia?";
/// Set in a process that sees the device files.
const INSIDE: &str = "BELAY_TEST_GPU";

/// Held while the library is made.
static TURN: Mutex<()> = Mutex::new(());

/// Executes this program again where there are device files of a GPU that nobody else sees, unless that has been done.
/// It takes root.
pub fn enter() -> Result<(), Failure> {
    if std::env::var_os(INSIDE).is_some() {
        return Ok(());
    }
    let me = std::env::current_exe().map_err(|e| format!("find this program: {e}"))?;
    let devices = with_devices(DEVICES);
    let mut c = Command::new("unshare");
    c.args(["-m", "sh", "-c", &devices, "-"])
        .arg(me)
        .args(std::env::args_os().skip(1));
    Err(format!("unshare: {}", c.env(INSIDE, "1").exec()))
}

/// Makes the library and puts it into `place`. Returns its directory, which belongs into LD_LIBRARY_PATH.
pub fn build(place: &Place) -> Result<PathBuf, Failure> {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let from = repository().join("tests/fake-cuda");
    let cache = build_dir()?.join("fake-cuda");
    std::fs::create_dir_all(&cache).map_err(|e| format!("create {}: {e}", cache.display()))?;
    let sources = ["cuda.c", "cuda.h"].map(|f| from.join(f));
    let soname = format!("-Wl,-soname,{LIBRARY}");
    let options = ["-fPIC", "-shared", "-fvisibility=hidden", &soname, "-Wl,-z,defs"];
    compile(&cache.join(LIBRARY), &sources, &options)?;
    let to = place.programs().join("fake-cuda");
    std::fs::create_dir_all(&to).map_err(|e| format!("create {}: {e}", to.display()))?;
    if !to.join(LIBRARY).exists() {
        std::fs::copy(cache.join(LIBRARY), to.join(LIBRARY)).map_err(|e| format!("copy {LIBRARY}: {e}"))?;
    }
    Ok(to)
}
