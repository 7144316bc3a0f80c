//! The checkpoint functions of NVIDIA's driver (CUDA Driver API, "CUDA Checkpointing", from r570 on), found in
//! libcuda.so.1 at run time.

use crate::devices::{Device, Pair};
use libloading::Library;
use std::ffi::{c_char, c_int, CStr};
use std::fmt::{self, Display};
use std::mem::ManuallyDrop;
use std::time::Duration;

/// The driver's library.
const LIBRARY: &str = "libcuda.so.1";
/// What is needed, for who has less.
const NEEDED: &str = "checkpoints of GPU programs need NVIDIA's driver r570 or newer on this host";

/// Room for the name of a GPU.
const NAME_BYTES: usize = 128;

const SUCCESS: c_int = 0;
const INVALID_VALUE: c_int = 1;
const OUT_OF_MEMORY: c_int = 2;
const NO_DEVICE: c_int = 100;
const OPERATING_SYSTEM: c_int = 304;
const ILLEGAL_STATE: c_int = 401;
/// Its work has not ended in time.
pub(crate) const NOT_READY: c_int = 600;
pub(crate) const NOT_SUPPORTED: c_int = 801;

/// What to do about an error of the driver.
fn advice(code: c_int) -> Option<&'static str> {
    match code {
        OUT_OF_MEMORY => Some("free memory of the GPU (nvidia-smi shows who has it), or of the host where its state goes there"),
        NO_DEVICE => Some("see whether nvidia-smi shows the GPU here, and whether a container has been given it"),
        OPERATING_SYSTEM => Some("what has failed once fails for good: restart the job from its last checkpoint (belay restart)"),
        NOT_SUPPORTED => Some("the program has used what this driver cannot checkpoint (managed memory, MPS, MIG, CUDA IPC)"),
        _ => None,
    }
}

/// How a process stands with the driver (`CUprocessState`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// It computes.
    Running,
    /// Its calls wait, and what it had submitted is done.
    Locked,
    /// What it had on devices lies in its memory, and it has no devices.
    Checkpointed,
    /// The driver has lost it.
    Failed,
}

/// Why a call of the driver did not do what it is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refused {
    pub(crate) why: String,
    /// The driver's error, where it is one.
    pub(crate) code: c_int,
    /// The process is not in the state from which it can be done; it may be on its way there.
    pub(crate) early: bool,
    /// The reason passes by itself.
    pub(crate) passing: bool,
    /// Processes with which it can never be done.
    pub(crate) unable: Vec<i32>,
}

impl Refused {
    /// For this reason, which lasts.
    pub(crate) fn of(why: impl Into<String>) -> Self {
        Self {
            why: why.into(),
            code: SUCCESS,
            early: false,
            passing: false,
            unable: Vec::new(),
        }
    }
}

impl Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)
    }
}

/// What the driver does to a process.
pub(crate) trait Driver: Sync {
    fn state(&self, pid: i32) -> Result<State, Refused>;
    /// The thread of the process that does the driver's work there.
    fn thread(&self, pid: i32) -> Result<i32, Refused>;
    /// Waits until what was submitted is done, at most so long.
    fn lock(&self, pid: i32, limit: Duration) -> Result<(), Refused>;
    fn checkpoint(&self, pid: i32) -> Result<(), Refused>;
    /// GPUs that are not there any more give their place to others.
    fn restore(&self, pid: i32, pairs: &[Pair]) -> Result<(), Refused>;
    fn unlock(&self, pid: i32) -> Result<(), Refused>;
}

/// Arguments of all calls: 64 bytes, of which those that mean nothing yet are zero.
#[repr(C, align(8))]
struct Arguments([u32; 16]);

/// What the arguments point to must be there.
type Call = unsafe extern "C" fn(c_int, &mut Arguments) -> c_int;
type Ask = extern "C" fn(c_int, &mut c_int) -> c_int;

/// The real one.
pub(crate) struct Cuda {
    state: Ask,
    thread: Ask,
    lock: Call,
    checkpoint: Call,
    restore: Call,
    unlock: Call,
    text: extern "C" fn(c_int, &mut *const c_char) -> c_int,
    init: extern "C" fn(u32) -> c_int,
    count: extern "C" fn(&mut c_int) -> c_int,
    device: extern "C" fn(&mut c_int, c_int) -> c_int,
    uuid: extern "C" fn(&mut [u8; 16], c_int) -> c_int,
    /// There must be room for so many bytes.
    name: unsafe extern "C" fn(*mut u8, c_int, c_int) -> c_int,
    /// Never closed: threads of it may run.
    _library: ManuallyDrop<Library>,
}

impl Cuda {
    /// Loads it, or says what is missing.
    pub(crate) fn load() -> Result<Self, Refused> {
        let missing = |e: libloading::Error| Refused::of(format!("{e}: {NEEDED}"));
        // SAFETY: the driver's library, whose initialisers may run in any process.
        let library = unsafe { Library::new(LIBRARY) }.map_err(missing)?;
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: functions of these names have these types, by the driver's header; numbers that mean nothing to
                // them are refused, and those that are safe here look at nothing but their arguments.
                *unsafe { library.get(concat!($name, "\0").as_bytes()) }.map_err(missing)?
            };
        }
        Ok(Self {
            state: symbol!("cuCheckpointProcessGetState"),
            thread: symbol!("cuCheckpointProcessGetRestoreThreadId"),
            lock: symbol!("cuCheckpointProcessLock"),
            checkpoint: symbol!("cuCheckpointProcessCheckpoint"),
            restore: symbol!("cuCheckpointProcessRestore"),
            unlock: symbol!("cuCheckpointProcessUnlock"),
            text: symbol!("cuGetErrorString"),
            init: symbol!("cuInit"),
            count: symbol!("cuDeviceGetCount"),
            device: symbol!("cuDeviceGet"),
            uuid: symbol!("cuDeviceGetUuid_v2"),
            name: symbol!("cuDeviceGetName"),
            _library: ManuallyDrop::new(library),
        })
    }

    /// Initialises it, which takes seconds. By its documentation (`cuCheckpointProcessRestore`) who has a state put back must
    /// have done that, unless the GPU is in persistence mode.
    pub(crate) fn begin(&self) -> Result<(), Refused> {
        self.done("initialise the GPU driver", || (self.init)(0))
    }

    /// The GPUs that it shows.
    pub(crate) fn devices(&self) -> Result<Vec<Device>, Refused> {
        let mut count = 0;
        self.done("count the GPUs", || (self.count)(&mut count))?;
        let one = |ordinal| {
            let (mut device, mut uuid, mut name) = (0, [0; 16], [0; NAME_BYTES]);
            self.done("look at a GPU", || (self.device)(&mut device, ordinal))?;
            self.done("ask a GPU for its UUID", || (self.uuid)(&mut uuid, device))?;
            let room = NAME_BYTES as c_int - 1;
            // SAFETY: room for a name and its end.
            self.done("ask a GPU for its name", || unsafe {
                (self.name)(name.as_mut_ptr(), room, device)
            })?;
            // The last byte is zero, whatever the driver has written before it.
            let name = CStr::from_bytes_until_nul(&name)
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            Ok(Device { uuid, name })
        };
        (0..count).map(one).collect()
    }

    /// Calls the driver.
    fn done(&self, what: &str, call: impl FnOnce() -> c_int) -> Result<(), Refused> {
        let code = call();
        if code == SUCCESS {
            return Ok(());
        }
        let mut text = std::ptr::null();
        let known = (self.text)(code, &mut text) == SUCCESS && !text.is_null();
        // SAFETY: a terminated text of the driver's, which lives as long as the library.
        let said = known.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned());
        let advice = advice(code).map(|advice| format!(": {advice}")).unwrap_or_default();
        Err(Refused {
            why: format!("{what}: {} (CUDA error {code}){advice}", said.unwrap_or_default()),
            code,
            early: code == ILLEGAL_STATE,
            passing: false,
            unable: Vec::new(),
        })
    }

    fn ask(&self, what: &str, ask: Ask, pid: i32) -> Result<c_int, Refused> {
        let mut answer = -1;
        self.done(what, || ask(pid, &mut answer))?;
        Ok(answer)
    }

    fn call(&self, what: &str, call: Call, pid: i32, first: &[u32]) -> Result<(), Refused> {
        self.done(what, || {
            let mut arguments = Arguments([0; 16]);
            arguments.0[..first.len()].copy_from_slice(first);
            // SAFETY: arguments as the driver's header has them; what they point to is the caller's, and lives.
            unsafe { call(pid, &mut arguments) }
        })
    }
}

impl Driver for Cuda {
    fn state(&self, pid: i32) -> Result<State, Refused> {
        match self.ask("ask the GPU driver for its state", self.state, pid)? {
            0 => Ok(State::Running),
            1 => Ok(State::Locked),
            2 => Ok(State::Checkpointed),
            3 => Ok(State::Failed),
            other => Err(Refused::of(format!(
                "the GPU driver says state {other}, which this belay does not know"
            ))),
        }
    }

    fn thread(&self, pid: i32) -> Result<i32, Refused> {
        self.ask("ask the GPU driver for its thread", self.thread, pid)
    }

    fn lock(&self, pid: i32, limit: Duration) -> Result<(), Refused> {
        let limit = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX).max(1);
        self.call("wait for its GPU work", self.lock, pid, &[limit])
    }

    fn checkpoint(&self, pid: i32) -> Result<(), Refused> {
        self.call("take its state off the GPU", self.checkpoint, pid, &[])
    }

    fn restore(&self, pid: i32, pairs: &[Pair]) -> Result<(), Refused> {
        let at = if pairs.is_empty() { 0 } else { pairs.as_ptr() as u64 };
        let count = u32::try_from(pairs.len()).unwrap_or(u32::MAX);
        let first = [(at & 0xffff_ffff) as u32, (at >> 32) as u32, count];
        let restored = self.call("put its state back on the GPU", self.restore, pid, &first);
        restored.map_err(|e| match e.code {
            INVALID_VALUE if !pairs.is_empty() => Refused {
                why: format!("{e}: another GPU than the one of before needs driver r580 or newer, and a place for each GPU that the driver had shown"),
                ..e
            },
            _ => e,
        })
    }

    fn unlock(&self, pid: i32) -> Result<(), Refused> {
        self.call("let its GPU work go on", self.unlock, pid, &[])
    }
}
