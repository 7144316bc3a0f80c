//! What comes in from C.
//!
//! A pointer to one value is an `Option<&T>` in the signature, and a place for an answer an `Option<&mut MaybeUninit<T>>`:
//! the same for C, with null for none. What the compiler cannot say in a type is here.

use crate::error::Failure;
use std::ffi::{c_char, CStr};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr::NonNull;

/// Bytes of the largest object that there can be.
pub(crate) const MOST: usize = isize::MAX as usize;

/// A string of C, or null. Only C can make one: it is there during the call, and ends with a zero byte.
#[repr(transparent)]
pub(crate) struct Text<'a>(Option<NonNull<c_char>>, PhantomData<&'a CStr>);

impl<'a> Text<'a> {
    pub(crate) fn get(&self) -> Option<&'a CStr> {
        // SAFETY: nothing in Rust makes such a value, and C promises in the header that it is a string, or null.
        self.0.map(|at| unsafe { CStr::from_ptr(at.as_ptr()) })
    }
}

/// The list that begins at `at`; nothing if it has no beginning or cannot be so long.
///
/// # Safety
/// `n` values are there, and stay as they are as long as the list is used; or `at` is null.
pub(crate) unsafe fn items<'a, T>(at: *const T, n: usize) -> Option<&'a [T]> {
    match n {
        0 => Some(&[]),
        // SAFETY: as promised by the caller.
        _ if !at.is_null() && n <= MOST / size_of::<T>() => Some(unsafe { std::slice::from_raw_parts(at, n) }),
        _ => None,
    }
}

/// The same, where there is to be one.
///
/// # Safety
/// As for [`items`].
pub(crate) unsafe fn list<'a, T>(at: *const T, n: usize) -> Result<&'a [T], Failure> {
    // SAFETY: as promised by the caller.
    unsafe { items(at, n) }.ok_or_else(|| {
        Failure::invalid(match at.is_null() {
            true => "there is no list",
            false => "no list is that long",
        })
    })
}

/// Writes the first `room` of `all` to `at`.
///
/// # Safety
/// `at` has a place for `room` values, or is null.
pub(crate) unsafe fn give<T: Copy>(all: &[T], at: *mut T, room: usize) -> Result<(), Failure> {
    let first = &all[..room.min(all.len())];
    if at.is_null() && room > 0 {
        return Err(Failure::invalid("there is no place for the numbers"));
    }
    if !first.is_empty() {
        // SAFETY: as promised by the caller: `first` is not longer than `room`.
        unsafe { at.copy_from_nonoverlapping(first.as_ptr(), first.len()) };
    }
    Ok(())
}

/// A place for a value.
pub(crate) fn into<T>(place: Option<&mut MaybeUninit<T>>) -> Result<&mut MaybeUninit<T>, Failure> {
    place.ok_or_else(|| Failure::invalid("there is no place for the answer"))
}
