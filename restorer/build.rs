//! Links the program as a static position-independent executable without libc.
fn main() {
    for arg in [
        "-nostartfiles",
        "-nostdlib",
        "-static-pie",
        "-Wl,-z,noexecstack",
        "-Wl,--build-id=none",
        "-Wl,-z,norelro",
    ] {
        println!("cargo:rustc-link-arg-bins={arg}");
    }
}
