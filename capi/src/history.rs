//! Histories.

// Every function here is called from C: what holds for the pointers is said in the header, and null is looked for.
#![allow(clippy::missing_safety_doc)]

use crate::call::{call, question, whole_call};
use crate::door::{give, into, list, MOST};
use crate::error::Failure;
use crate::options::HistoryOptions;
use crate::regions::{Regions, Span, Used};
use belay_recall::{After, Background, History, HistoryError, Level, Life, Shape};
use std::ffi::{c_int, c_void};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::sync::{Arc, Mutex, PoisonError};

/// What `belay_history` is.
pub(crate) struct Handle {
    history: Arc<History>,
    life: Life,
    regions: Arc<Regions>,
    background: Background,
    /// Held during a put or get: the next one makes no reference to its regions before.
    turn: Arc<Mutex<()>>,
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

/// A handle of `belay_history_open` that has not been closed, or null: what C gives.
type Given<'a> = Option<&'a Handle>;

fn of(handle: Given<'_>) -> Result<&Handle, Failure> {
    let handle = handle.ok_or_else(|| Failure::invalid("there is no history"))?;
    // Before any lock, which a thread of the parent may have held.
    handle.history.is_own()?;
    Ok(handle)
}

/// The same, when no put goes on in the background: its version is there as any other then, or is not.
fn settled(handle: Given<'_>) -> Result<&Handle, Failure> {
    let handle = of(handle)?;
    handle.background.settle();
    Ok(handle)
}

/// A put or get, which has the regions for itself.
struct Turn {
    history: Arc<History>,
    used: Used,
    turn: Arc<Mutex<()>>,
}

impl Turn {
    fn of(handle: &Handle) -> Self {
        Self {
            history: handle.history.clone(),
            used: handle.regions.used(),
            turn: handle.turn.clone(),
        }
    }

    fn put(&self, version: u64) -> Result<(), HistoryError> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: of the header: regions are memory that stays as it is during a put, also one in the background. Who gives
        // them up waits for `used`, and gets, which write to them, have turns of their own.
        let parts = self.used.all.iter().map(|(id, span)| (*id, unsafe { span.bytes() }));
        self.history.put(version, &parts.collect::<Vec<_>>())
    }

    fn get(&self, version: u64, after: After) -> Result<(), HistoryError> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let overlapping = self.used.overlapping();
        let (mut apart, common): (Vec<(u32, Span)>, Vec<_>) = self.used.all.iter().partition(|(id, _)| !overlapping.contains(id));
        // What has bytes in common is read to places of its own first.
        if !common.is_empty() && *self.history.shape(version)? != self.shape()? {
            // Before there is memory for it, which could be any amount.
            return Err(HistoryError::Parts(version));
        }
        let mut places = common
            .iter()
            .map(|(_, span)| room(span.len()))
            .collect::<Result<Vec<_>, _>>()?;
        // SAFETY: of the header: regions are memory that nobody uses during a get. Who gives them up waits for `used`;
        // puts and other gets have turns of their own; and no two of these have a byte in common.
        let parts = apart.iter_mut().map(|(id, span)| (*id, unsafe { span.bytes_mut() }));
        let mut parts: Vec<(u32, &mut [u8])> = parts.collect();
        let to_places = common.iter().zip(&mut places).map(|((id, _), place)| (*id, &mut place[..]));
        parts.extend(to_places);
        self.history.get(version, &mut parts, after)?;
        for ((_, mut span), place) in common.into_iter().zip(places) {
            // SAFETY: as above, one after the other; and those of before are not used any more.
            unsafe { span.bytes_mut() }.copy_from_slice(&place);
        }
        Ok(())
    }

    fn shape(&self) -> Result<Shape, HistoryError> {
        Shape::new(self.used.all.iter().map(|(id, s)| (*id, s.len() as u64)))
    }
}

/// Memory of so many bytes.
fn room(bytes: usize) -> Result<Vec<u8>, HistoryError> {
    let mut room = Vec::new();
    room.try_reserve_exact(bytes).map_err(|_| HistoryError::Memory(bytes))?;
    room.resize(bytes, 0);
    Ok(room)
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
extern "C" fn belay_history_open(
    options: Option<&HistoryOptions<'_>>,
    handle: Option<&mut MaybeUninit<Option<Box<Handle>>>>,
) -> c_int {
    let open = || {
        let place = into(handle)?;
        place.write(None);
        let options = options.ok_or_else(|| Failure::invalid("there are no options"))?.read()?;
        let life = options.life;
        let history = History::open(options)?;
        place.write(Some(Box::new(Handle {
            history: Arc::new(history),
            life,
            regions: Arc::default(),
            background: Background::default(),
            turn: Arc::default(),
        })));
        Ok(())
    };
    whole_call(open)
}

#[no_mangle]
extern "C" fn belay_history_region(handle: Given<'_>, id: u32, at: *mut c_void, bytes: usize) -> c_int {
    let region = || {
        let handle = of(handle)?;
        let span = match (at.is_null(), bytes) {
            (true, 0) => None,
            (true, _) => return Err(Failure::invalid("a region has memory")),
            _ if bytes > MOST => return Err(Failure::invalid("no region is that large")),
            (false, _) => Some(Span::new(at.cast(), bytes)),
        };
        handle.regions.set(id, span);
        Ok(())
    };
    call(region)
}

#[no_mangle]
extern "C" fn belay_history_put(handle: Given<'_>, version: u64) -> c_int {
    let put = || {
        let handle = settled(handle)?;
        Ok(Turn::of(handle).put(version)?)
    };
    whole_call(put)
}

#[no_mangle]
extern "C" fn belay_history_put_async(handle: Given<'_>, version: u64, cu_stream: *mut c_void, cu_event: *mut c_void) -> c_int {
    let put = || {
        let handle = settled(handle)?;
        if !cu_stream.is_null() || !cu_event.is_null() {
            return Err(Failure::no_device());
        }
        if handle.history.shape(version).is_ok() {
            return Err(HistoryError::Exists(version).into());
        }
        let turn = Turn::of(handle);
        turn.shape()?;
        Ok(handle.background.begin(version, move || turn.put(version))?)
    };
    whole_call(put)
}

#[no_mangle]
extern "C" fn belay_history_put_wait(handle: Given<'_>, version: u64) -> c_int {
    let wait = || {
        let handle = of(handle)?;
        handle.background.end_of(version)?;
        handle.history.shape(version)?;
        Ok(())
    };
    whole_call(wait)
}

#[no_mangle]
extern "C" fn belay_history_get(handle: Given<'_>, version: u64, flags: u32) -> c_int {
    let get = || {
        let handle = settled(handle)?;
        let after = match (flags, handle.life) {
            (0, Life::UntilRead) | (1, _) => After::Discard,
            (0, Life::Lasting) | (2, _) => After::Keep,
            _ => return Err(Failure::invalid("there are no such flags of a get")),
        };
        Ok(Turn::of(handle).get(version, after)?)
    };
    whole_call(get)
}

#[no_mangle]
unsafe extern "C" fn belay_history_hint(handle: Given<'_>, versions: *const u64, n: usize) -> c_int {
    let hint = || {
        // SAFETY: of the header.
        let (handle, versions) = (of(handle)?, unsafe { list(versions, n)? });
        handle.history.hint(versions.iter().copied())?;
        Ok(())
    };
    call(hint)
}

#[no_mangle]
unsafe extern "C" fn belay_history_hint_sized(handle: Given<'_>, versions: *const u64, bytes: *const u64, n: usize) -> c_int {
    let hint = || {
        // SAFETY: of the header.
        let (handle, (versions, bytes)) = (of(handle)?, unsafe { (list(versions, n)?, list(bytes, n)?) });
        let order = versions.iter().copied().zip(bytes.iter().copied().map(Some));
        handle.history.hint_sized(order)?;
        Ok(())
    };
    call(hint)
}

#[no_mangle]
unsafe extern "C" fn belay_history_hint_replace(handle: Given<'_>, from: usize, versions: *const u64, n: usize) -> c_int {
    let hint = || {
        // SAFETY: of the header.
        let (handle, versions) = (of(handle)?, unsafe { list(versions, n)? });
        handle.history.hint_replace(from, versions.iter().copied())?;
        Ok(())
    };
    call(hint)
}

#[no_mangle]
extern "C" fn belay_history_prefetch(handle: Given<'_>, on: c_int) -> c_int {
    call(|| Ok(of(handle)?.history.prefetch(on != 0)?))
}

#[no_mangle]
extern "C" fn belay_history_size(handle: Given<'_>, version: u64, id: u32, bytes: Option<&mut MaybeUninit<usize>>) -> c_int {
    let size = || {
        let (handle, place) = (settled(handle)?, into(bytes)?);
        let part = handle.history.shape(version)?.part(id);
        let part = part.ok_or_else(|| Failure::new(libc::ENOENT, &format!("version {version} has no region {id}")))?;
        place.write(part as usize);
        Ok(())
    };
    call(size)
}

#[no_mangle]
unsafe extern "C" fn belay_history_regions(
    handle: Given<'_>,
    version: u64,
    ids: *mut u32,
    room: usize,
    n: Option<&mut MaybeUninit<usize>>,
) -> c_int {
    let regions = || {
        let (handle, n) = (settled(handle)?, into(n)?);
        let shape = handle.history.shape(version)?;
        let all: Vec<u32> = shape.parts().iter().map(|(id, _)| *id).collect();
        // SAFETY: of the header: a place for `room` numbers.
        unsafe { give(&all, ids, room) }?;
        n.write(all.len());
        Ok(())
    };
    call(regions)
}

#[no_mangle]
extern "C" fn belay_history_drop(handle: Given<'_>, version: u64) -> c_int {
    whole_call(|| Ok(settled(handle)?.history.drop_version(version)?))
}

#[no_mangle]
extern "C" fn belay_history_wait(handle: Given<'_>, level: u32) -> c_int {
    let wait = || {
        let handle = settled(handle)?;
        handle.history.wait(self::level(level)?)?;
        Ok(handle.background.failure()?)
    };
    whole_call(wait)
}

#[no_mangle]
extern "C" fn belay_history_is_at(handle: Given<'_>, level: u32) -> c_int {
    let is_at = || {
        let handle = of(handle)?;
        let level = self::level(level)?;
        Ok(!handle.background.is_busy() && handle.history.is_at(level)?)
    };
    question(is_at)
}

#[no_mangle]
unsafe extern "C" fn belay_history_versions(
    handle: Given<'_>,
    versions: *mut u64,
    room: usize,
    n: Option<&mut MaybeUninit<usize>>,
) -> c_int {
    let versions = || {
        let (handle, n) = (settled(handle)?, into(n)?);
        let all = handle.history.versions()?;
        // SAFETY: of the header: a place for `room` numbers.
        unsafe { give(&all, versions, room) }?;
        n.write(all.len());
        Ok(())
    };
    call(versions)
}

#[no_mangle]
extern "C" fn belay_history_get_stats(handle: Given<'_>, stats: Option<&mut MaybeUninit<HistoryStats>>) -> c_int {
    let get = || {
        let (handle, place) = (of(handle)?, into(stats)?);
        let s = handle.history.stats()?;
        place.write(HistoryStats {
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
        });
        Ok(())
    };
    whole_call(get)
}

#[no_mangle]
extern "C" fn belay_history_close(handle: Option<Box<Handle>>) -> c_int {
    // In the middle of another call it stays, as that may still use it.
    let handle = ManuallyDrop::new(handle);
    let close = || {
        let handle = ManuallyDrop::into_inner(handle).ok_or_else(|| Failure::invalid("there is no history"))?;
        let Handle { history, background, .. } = *handle;
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
    whole_call(close)
}
