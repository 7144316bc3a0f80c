//! The name by which programs ask for the library.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libbelay.so.0");
    // It has a handler of SIGSEGV, which stays where it is.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
