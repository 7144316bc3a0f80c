//! Placeholder entry.
#![no_std]
#![no_main]
belay_abi::freestanding!();

/// Entry.
#[no_mangle]
pub extern "C" fn _start() -> ! {
    loop {}
}
