//! Histories.

// Every function here is called from C: what holds for the pointers is said in the header, and null is looked for.
#![allow(clippy::missing_safety_doc)]

use crate::error::{answer, Failure};
use crate::options::HistoryOptions;
use crate::regions::Regions;
use belay_recall::{After, Background, History, HistoryError, Level, Life, Shape, Span};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// What `belay_history` is.
pub(crate) struct Handle {
    history: Arc<History>,
    life: Life,
    regions: Arc<Regions>,
    background: Background,
}

/// Of the header.
#[repr(C)]
#[derive(Default)]
pub(crate) struct HistoryStats {
    puts: u64,
    gets: u64,
    put_ns: u64,
    get_ns: u64,
    put_bytes: u64,
    get_bytes: u64,
    hits: u64,
    from_files: u64,
    down: u64,
    up: u64,
    cancelled: u64,
    failed: u64,
    versions: u64,
    held: u64,
    reserved: [u64; 16],
}

/// Bytes of the largest object that there can be.
const MOST: usize = isize::MAX as usize;

fn shape(regions: &[(u32, Span)]) -> Result<Shape, Failure> {
    Ok(Shape::new(regions.iter().map(|(id, s)| (*id, s.len() as u64)))?)
}

/// # Safety
/// A handle of `belay_history_open` that has not been closed, or null.
unsafe fn of<'a>(handle: *const Handle) -> Result<&'a Handle, Failure> {
    // SAFETY: as promised by the caller.
    let handle = unsafe { handle.as_ref() }.ok_or_else(|| Failure::invalid("there is no history"))?;
    // Before any lock, which a thread of the parent may have held.
    handle.history.is_own()?;
    Ok(handle)
}

/// The same, when no put goes on in the background: its version is there as any other then, or is not.
///
/// # Safety
/// As for [`of`].
unsafe fn settled<'a>(handle: *const Handle) -> Result<&'a Handle, Failure> {
    // SAFETY: as promised by the caller.
    let handle = unsafe { of(handle) }?;
    handle.background.settle();
    Ok(handle)
}

/// # Safety
/// A place for a value, or null.
unsafe fn into<'a, T>(place: *mut T) -> Result<&'a mut T, Failure> {
    // SAFETY: as promised by the caller.
    unsafe { place.as_mut() }.ok_or_else(|| Failure::invalid("there is no place for the answer"))
}

/// # Safety
/// A list of `n` values; null if there are none.
unsafe fn list<'a, T>(at: *const T, n: usize) -> Result<&'a [T], Failure> {
    match (at.is_null(), n) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(Failure::invalid("there is no list")),
        _ if n > MOST / size_of::<T>() => Err(Failure::invalid("no list is that long")),
        // SAFETY: as promised by the caller.
        (false, _) => Ok(unsafe { std::slice::from_raw_parts(at, n) }),
    }
}

/// Writes the first `room` of `all` to `at`.
///
/// # Safety
/// `at` has a place for `room` values, or is null.
unsafe fn give<T: Copy>(all: &[T], at: *mut T, room: usize) -> Result<(), Failure> {
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

fn level(number: u32) -> Result<Level, Failure> {
    match number {
        0 => Ok(Level::Host),
        1 => Ok(Level::Local),
        2 => Ok(Level::Durable),
        _ => Err(Failure::invalid("there is no such level")),
    }
}

#[no_mangle]
unsafe extern "C" fn belay_history_open(options: *const HistoryOptions, handle: *mut *mut Handle) -> c_int {
    let open = || {
        // SAFETY: of the header: a place for the handle.
        let place = unsafe { into(handle) }?;
        *place = std::ptr::null_mut();
        // SAFETY: of the header: options, or null.
        let options = unsafe { options.as_ref() }.ok_or_else(|| Failure::invalid("there are no options"))?;
        // SAFETY: of the header: their strings.
        let options = unsafe { options.read() }?;
        let life = options.life;
        let history = History::open(options)?;
        *place = Box::into_raw(Box::new(Handle {
            history: Arc::new(history),
            life,
            regions: Arc::default(),
            background: Background::default(),
        }));
        Ok(())
    };
    answer(open())
}

#[no_mangle]
unsafe extern "C" fn belay_history_region(handle: *const Handle, id: u32, at: *mut c_void, bytes: usize) -> c_int {
    let region = || {
        // SAFETY: of the header.
        let handle = unsafe { of(handle) }?;
        let span = match (at.is_null(), bytes) {
            (true, 0) => None,
            (true, _) => return Err(Failure::invalid("a region has memory")),
            _ if bytes > MOST => return Err(Failure::invalid("no region is that large")),
            (false, _) => Some(Span::new(at.cast(), bytes)),
        };
        handle.regions.set(id, span);
        Ok(())
    };
    answer(region())
}

#[no_mangle]
unsafe extern "C" fn belay_history_put(handle: *const Handle, version: u64) -> c_int {
    let put = || {
        // SAFETY: of the header.
        let handle = unsafe { settled(handle) }?;
        let used = handle.regions.used();
        // SAFETY: of the header: regions are memory that stays as it is during a put.
        unsafe { handle.history.put_spans(version, shape(&used.all)?, used.all.clone()) }?;
        Ok(())
    };
    answer(put())
}

#[no_mangle]
unsafe extern "C" fn belay_history_put_async(
    handle: *const Handle,
    version: u64,
    cu_stream: *mut c_void,
    cu_event: *mut c_void,
) -> c_int {
    let put = || {
        // SAFETY: of the header.
        let handle = unsafe { settled(handle) }?;
        if !cu_stream.is_null() || !cu_event.is_null() {
            return Err(Failure::no_device());
        }
        if let Ok(_) | Err(HistoryError::Damaged(_)) = handle.history.shape(version) {
            return Err(HistoryError::Exists(version).into());
        }
        let (history, used) = (handle.history.clone(), handle.regions.used());
        let shape = shape(&used.all)?;
        handle.background.begin(version, move || {
            // SAFETY: of the header: regions are memory that stays as it is until the put has been waited for; and `used`
            // has it wait who gives them up.
            unsafe { history.put_spans(version, shape, used.all.clone()) }
        })?;
        Ok(())
    };
    answer(put())
}

#[no_mangle]
unsafe extern "C" fn belay_history_put_wait(handle: *const Handle, version: u64) -> c_int {
    let wait = || {
        // SAFETY: of the header.
        let handle = unsafe { of(handle) }?;
        handle.background.end_of(version)?;
        handle.history.shape(version)?;
        Ok(())
    };
    answer(wait())
}

#[no_mangle]
unsafe extern "C" fn belay_history_get(handle: *const Handle, version: u64, flags: u32) -> c_int {
    let get = || {
        // SAFETY: of the header.
        let handle = unsafe { settled(handle) }?;
        let after = match (flags, handle.life) {
            (0, Life::UntilRead) | (1, _) => After::Discard,
            (0, Life::Lasting) | (2, _) => After::Keep,
            _ => return Err(Failure::invalid("there are no such flags of a get")),
        };
        let used = handle.regions.used();
        // SAFETY: of the header: regions are memory that nobody uses during a get.
        unsafe { handle.history.get_spans(version, &shape(&used.all)?, used.all.clone(), after) }?;
        Ok(())
    };
    answer(get())
}

#[no_mangle]
unsafe extern "C" fn belay_history_hint(handle: *const Handle, versions: *const u64, n: usize) -> c_int {
    let hint = || {
        // SAFETY: of the header.
        let (handle, versions) = unsafe { (of(handle)?, list(versions, n)?) };
        handle.history.hint(versions.iter().copied())?;
        Ok(())
    };
    answer(hint())
}

#[no_mangle]
unsafe extern "C" fn belay_history_hint_sized(handle: *const Handle, versions: *const u64, bytes: *const u64, n: usize) -> c_int {
    let hint = || {
        // SAFETY: of the header.
        let (handle, versions, bytes) = unsafe { (of(handle)?, list(versions, n)?, list(bytes, n)?) };
        let order = versions.iter().copied().zip(bytes.iter().copied().map(Some));
        handle.history.hint_sized(order)?;
        Ok(())
    };
    answer(hint())
}

#[no_mangle]
unsafe extern "C" fn belay_history_hint_replace(handle: *const Handle, from: usize, versions: *const u64, n: usize) -> c_int {
    let hint = || {
        // SAFETY: of the header.
        let (handle, versions) = unsafe { (of(handle)?, list(versions, n)?) };
        handle.history.hint_replace(from, versions.iter().copied())?;
        Ok(())
    };
    answer(hint())
}

#[no_mangle]
unsafe extern "C" fn belay_history_prefetch(handle: *const Handle, on: c_int) -> c_int {
    // SAFETY: of the header.
    answer(unsafe { of(handle) }.and_then(|h| Ok(h.history.prefetch(on != 0)?)))
}

#[no_mangle]
unsafe extern "C" fn belay_history_size(handle: *const Handle, version: u64, id: u32, bytes: *mut usize) -> c_int {
    let size = || {
        // SAFETY: of the header.
        let (handle, place) = unsafe { (settled(handle)?, into(bytes)?) };
        let part = handle.history.shape(version)?.part(id);
        let part = part.ok_or_else(|| Failure::new(libc::ENOENT, &format!("version {version} has no region {id}")))?;
        *place = part as usize;
        Ok(())
    };
    answer(size())
}

#[no_mangle]
unsafe extern "C" fn belay_history_regions(
    handle: *const Handle,
    version: u64,
    ids: *mut u32,
    room: usize,
    n: *mut usize,
) -> c_int {
    let regions = || {
        // SAFETY: of the header.
        let (handle, n) = unsafe { (settled(handle)?, into(n)?) };
        let shape = handle.history.shape(version)?;
        let all: Vec<u32> = shape.parts().iter().map(|(id, _)| *id).collect();
        // SAFETY: of the header: a place for `room` numbers.
        unsafe { give(&all, ids, room) }?;
        *n = all.len();
        Ok(())
    };
    answer(regions())
}

#[no_mangle]
unsafe extern "C" fn belay_history_drop(handle: *const Handle, version: u64) -> c_int {
    // SAFETY: of the header.
    answer(unsafe { settled(handle) }.and_then(|h| Ok(h.history.drop_version(version)?)))
}

#[no_mangle]
unsafe extern "C" fn belay_history_wait(handle: *const Handle, level: u32) -> c_int {
    let wait = || {
        // SAFETY: of the header.
        let handle = unsafe { settled(handle) }?;
        handle.history.wait(self::level(level)?)?;
        Ok(handle.background.failure()?)
    };
    answer(wait())
}

#[no_mangle]
unsafe extern "C" fn belay_history_is_at(handle: *const Handle, level: u32) -> c_int {
    let is_at = || {
        // SAFETY: of the header.
        let handle = unsafe { of(handle) }?;
        let level = self::level(level)?;
        Ok(!handle.background.is_busy() && handle.history.is_at(level)?)
    };
    match is_at() {
        Ok(yes) => c_int::from(yes),
        Err(failure) => answer(Err(failure)),
    }
}

#[no_mangle]
unsafe extern "C" fn belay_history_versions(handle: *const Handle, versions: *mut u64, room: usize, n: *mut usize) -> c_int {
    let versions = || {
        // SAFETY: of the header.
        let (handle, n) = unsafe { (settled(handle)?, into(n)?) };
        let all = handle.history.versions()?;
        // SAFETY: of the header: a place for `room` numbers.
        unsafe { give(&all, versions, room) }?;
        *n = all.len();
        Ok(())
    };
    answer(versions())
}

#[no_mangle]
unsafe extern "C" fn belay_history_get_stats(handle: *const Handle, stats: *mut HistoryStats) -> c_int {
    let get = || {
        // SAFETY: of the header.
        let (handle, place) = unsafe { (of(handle)?, into(stats)?) };
        let s = handle.history.stats()?;
        *place = HistoryStats {
            puts: s.puts,
            gets: s.gets,
            put_ns: s.put_ns,
            get_ns: s.get_ns,
            put_bytes: s.put_bytes,
            get_bytes: s.get_bytes,
            hits: s.hits,
            from_files: s.from_files,
            down: s.down,
            up: s.up,
            cancelled: s.cancelled,
            failed: s.failed,
            versions: s.versions,
            held: s.held,
            ..HistoryStats::default()
        };
        Ok(())
    };
    answer(get())
}

#[no_mangle]
unsafe extern "C" fn belay_history_close(handle: *mut Handle) -> c_int {
    let close = || {
        if handle.is_null() {
            return Err(Failure::invalid("there is no history"));
        }
        // SAFETY: of the header: made by `belay_history_open`, and not used any more.
        let Handle { history, background, .. } = *unsafe { Box::from_raw(handle) };
        let put = match history.is_own() {
            Ok(()) => background.end(),
            // A child has not got the thread that is to be joined.
            Err(_) => {
                std::mem::forget(background);
                Ok(())
            }
        };
        match Arc::into_inner(history) {
            Some(history) => history.close()?,
            // Of a child that was forked during a put.
            None => return Err(HistoryError::Forked.into()),
        }
        Ok(put?)
    };
    answer(close())
}
