//! Declared accesses.

// Every function here is called from C: what holds for the pointers is said in the header, and null is looked for.
#![allow(clippy::missing_safety_doc)]

use crate::door::{give, items, Text};
use crate::error::{answer, Failure};
use belay_abi::access::Share;
use belay_access::block::MAX_DIMS;
use belay_access::shape::Shape;
use belay_access::trace::Mode;
use belay_tracker::{start, DeclareError, Part};
use std::ffi::{c_int, c_void};

/// `BELAY_R` and `BELAY_W` of the header; everything else counts as `BELAY_RW`.
const READ: c_int = 1;
const WRITE: c_int = 2;

/// Of the header.
#[repr(C)]
pub(crate) struct Use {
    dataset: u32,
    mode: c_int,
    lo: *const i64,
    hi: *const i64,
}

impl From<DeclareError> for Failure {
    fn from(e: DeclareError) -> Self {
        Self {
            errno: e.errno(),
            why: e.to_string(),
        }
    }
}

fn given<'a>(name: &Text<'a>) -> Result<&'a [u8], Failure> {
    let name = name.get().ok_or_else(|| Failure::invalid("there is no name"))?;
    Ok(name.to_bytes())
}

/// As many numbers as there are dimensions, or null; `none` in those that there are not.
///
/// # Safety
/// They are there.
unsafe fn numbers<T: Copy, U: Copy>(at: *const T, dims: usize, none: U, of: impl Fn(T) -> U) -> Option<[U; MAX_DIMS]> {
    let mut out = [none; MAX_DIMS];
    // SAFETY: as promised by the caller.
    let given = unsafe { items(at, dims) }?;
    out.iter_mut().zip(given).for_each(|(out, n)| *out = of(*n));
    Some(out)
}

/// A number of elements, or of bytes.
fn size(n: usize) -> u64 {
    n as u64
}

/// A number, 0 where there is none.
fn number(result: Result<u32, Failure>) -> u32 {
    let mut number = 0;
    answer(result.map(|n| number = n));
    number
}

#[no_mangle]
unsafe extern "C" fn belay_dataset(
    name: Text<'_>,
    at: *mut c_void,
    elem: usize,
    dims: c_int,
    extent: *const usize,
    stride: *const usize,
) -> u32 {
    let declare = || {
        let name = given(&name)?;
        let dims = usize::try_from(dims).ok().filter(|d| (1..=MAX_DIMS).contains(d));
        let dims = dims.ok_or_else(|| Failure::invalid("a dataset has 1 to 5 dimensions"))?;
        if at.is_null() {
            return Err(Failure::invalid("there is no array"));
        }
        // SAFETY: of the header: a number for each dimension, or null.
        let (extent, stride) = unsafe { (numbers(extent, dims, 1, size), numbers(stride, dims, 1, size)) };
        let extent = extent.ok_or_else(|| Failure::invalid("there is no extent"))?;
        let shape = match stride {
            Some(stride) => Shape::new(at as u64, elem as u64, extent, stride),
            None => Shape::dense(at as u64, elem as u64, &extent),
        };
        let shape = shape.map_err(DeclareError::from)?;
        // SAFETY: of the header: an array of numbers, which stays until it is moved or forgotten.
        Ok(unsafe { belay_tracker::dataset(name, &shape, dims) }?)
    };
    number(declare())
}

#[no_mangle]
extern "C" fn belay_dataset_move(dataset: u32, at: *mut c_void) -> c_int {
    let place = match at.is_null() {
        true => Err(Failure::invalid("there is no array")),
        false => Ok(at as u64),
    };
    // SAFETY: as above.
    answer(place.and_then(|at| Ok(unsafe { belay_tracker::moved(dataset, at) }?)))
}

#[no_mangle]
extern "C" fn belay_dataset_forget(dataset: u32) -> c_int {
    answer(belay_tracker::forget(dataset).map_err(Failure::from))
}

#[no_mangle]
extern "C" fn belay_dataset_dims(dataset: u32) -> c_int {
    // There are few.
    belay_tracker::dims(dataset) as c_int
}

#[no_mangle]
extern "C" fn belay_live(dataset: u32, always: c_int) -> c_int {
    answer(belay_tracker::keep(dataset, always != 0).map_err(Failure::from))
}

#[no_mangle]
extern "C" fn belay_site_id(name: Text<'_>) -> u32 {
    let site = given(&name).and_then(|name| Ok(belay_tracker::site(name)?));
    number(site)
}

#[no_mangle]
unsafe extern "C" fn belay_enter(site: u32, uses: *const Use, n: c_int) {
    // SAFETY: of the header: a list of `n` uses.
    let uses = usize::try_from(n).ok().and_then(|n| unsafe { items(uses, n) });
    let uses = uses.unwrap_or_else(|| {
        belay_tracker::unheard();
        &[]
    });
    let part = |u: &Use| {
        let mode = match u.mode {
            READ => Mode::Read,
            // One bound alone does not say what is overwritten.
            WRITE if u.lo.is_null() == u.hi.is_null() => Mode::Write,
            _ => Mode::Both,
        };
        let bounds = match u.lo.is_null() || u.hi.is_null() {
            true => None,
            false => {
                let dims = belay_tracker::dims(u.dataset);
                // SAFETY: of the header: as many numbers as the dataset has dimensions.
                let (lo, hi) = unsafe { (items(u.lo, dims), items(u.hi, dims)) };
                lo.zip(hi)
            }
        };
        Part {
            dataset: u.dataset,
            mode,
            bounds,
        }
    };
    belay_tracker::enter(site, uses.iter().map(part));
}

#[no_mangle]
extern "C" fn belay_leave(site: u32) {
    belay_tracker::leave(site);
}

#[no_mangle]
extern "C" fn belay_abandon(site: u32) {
    belay_tracker::abandon(site);
}

#[no_mangle]
unsafe extern "C" fn belay_dataset_part(
    dataset: u32,
    global: *const usize,
    lower: *const i64,
    lo: *const i64,
    hi: *const i64,
) -> c_int {
    let declare = || {
        let dims = belay_tracker::dims(dataset);
        if dims == 0 {
            return Err(DeclareError::Unknown(dataset).into());
        }
        if lo.is_null() != hi.is_null() {
            return Err(Failure::invalid("what is its own has two bounds, or none"));
        }
        // One below 0 is too large then.
        let bound = |n: i64| u64::try_from(n).unwrap_or(u64::MAX);
        // SAFETY: of the header: a number for each dimension, or null.
        let all = unsafe {
            (
                (numbers(global, dims, 1, size), numbers(lower, dims, 0, |n: i64| n)),
                (numbers(lo, dims, 0, bound), numbers(hi, dims, 1, bound)),
            )
        };
        let ((Some(global), Some(lower)), (lo, hi)) = all else {
            return Err(Failure::invalid("there is no extent of the global array, or no place in it"));
        };
        let own = lo.zip(hi);
        let (lo, hi) = own.map_or_else(|| belay_tracker::extent(dataset).map(|extent| ([0; MAX_DIMS], extent)), Ok)?;
        let share = Share { global, lower, lo, hi };
        Ok(belay_tracker::part(dataset, share)?)
    };
    answer(declare())
}

#[no_mangle]
unsafe extern "C" fn belay_point(bytes: u64, payload: *const c_void) -> c_int {
    let payload = usize::try_from(bytes).ok().and_then(|n| {
        // SAFETY: of the header: so many bytes.
        unsafe { items(payload.cast::<u8>(), n) }
    });
    let payload = payload.ok_or_else(|| Failure::invalid("there is no payload"));
    answer(payload.and_then(|payload| Ok(belay_tracker::point(payload)?)))
}

#[no_mangle]
unsafe extern "C" fn belay_fastforward(payload: *mut c_void, bytes: usize) -> c_int {
    let Some(from) = start::named() else { return 0 };
    let filled = start::Export::open(&from).and_then(|export| export.fill(bytes));
    let filled = filled.map_err(|e| Failure {
        errno: e.errno(),
        why: format!("start from {}: {e}", from.display()),
    });
    // SAFETY: of the header: room for so many bytes.
    let given = filled.and_then(|from| unsafe { give(&from, payload.cast(), bytes) });
    if let Err(failure) = &given {
        // Nobody may listen. What it names is somebody else's.
        let why: String = failure.why.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
        belay_tracker::say(&mut std::io::stderr(), &why);
    }
    match answer(given) {
        0 => 1,
        errno => errno,
    }
}
