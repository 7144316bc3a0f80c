//! Tasks that share the memory of who makes them.

use belay_abi::restore::CloneArgs;
use std::io;

/// What such a task does.
pub trait Task {
    /// All that it does.
    fn live(&self) -> !;
}

/// Makes one as `args` say, on the stack that they name; its identifier.
///
/// # Safety
/// The stack is nobody else's, and what else `args` lead to is there. `task` stays as long as the new one has this memory,
/// and neither uses what the other uses meanwhile, the C library's data of their thread included.
pub unsafe fn spawn<T: Task>(args: &CloneArgs, task: &T) -> io::Result<i32> {
    extern "C" fn begin<T: Task>(task: usize) -> ! {
        // SAFETY: the reference that `spawn` was given, which is good as long as this runs.
        unsafe { &*(task as *const T) }.live()
    }
    // SAFETY: as promised by the caller, and `begin` never returns.
    let made = unsafe { belay_abi::task::spawn(args, begin::<T>, std::ptr::from_ref(task) as usize) };
    // Error numbers and identifiers are small.
    match made as i32 {
        pid if pid >= 0 => Ok(pid),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}
