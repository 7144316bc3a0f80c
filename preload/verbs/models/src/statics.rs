//! Statics, of all threads and of each, which loom makes anew in each order.

macro_rules! statics {
    ($($(#[$about:meta])* static $name:ident: $type:ty = $first:expr;)*) => {
        loom::lazy_static! {
            $($(#[$about])* static ref $name: $type = $first;)*
        }
    };
}

macro_rules! of_threads {
    ($(#[$about:meta])* static $name:ident: $type:ty = $first:expr;) => {
        loom::thread_local! {
            $(#[$about])*
            static $name: $type = $first;
        }
    };
}

macro_rules! constant {
    ($($all:item)*) => { $($all)* };
}
pub(crate) use {constant, of_threads, statics};
