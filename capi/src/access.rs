//! Declared accesses.

// Every function here is called from C: what holds for the pointers is said in the header, and null is looked for.
#![allow(clippy::missing_safety_doc)]

use crate::door::{items, Text};
use crate::error::{answer, Failure};
use belay_access::block::MAX_DIMS;
use belay_access::shape::Shape;
use belay_access::trace::Mode;
use belay_tracker::{DeclareError, Part};
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

/// As many numbers as there are dimensions, or null.
///
/// # Safety
/// They are there.
unsafe fn numbers(at: *const usize, dims: usize) -> Option<[u64; MAX_DIMS]> {
    let mut out = [1; MAX_DIMS];
    // SAFETY: as promised by the caller.
    let given = unsafe { items(at, dims) }?;
    out.iter_mut().zip(given).for_each(|(out, n)| *out = *n as u64);
    Some(out)
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
        let (extent, stride) = unsafe { (numbers(extent, dims), numbers(stride, dims)) };
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
    let n = usize::try_from(n).unwrap_or(0);
    // SAFETY: of the header: a list of `n` uses.
    let uses = unsafe { items(uses, n) }.unwrap_or(&[]);
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
