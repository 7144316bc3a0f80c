//! Protection domains, regions and address handles.

use super::ShadowContext;
use crate::gate::{Calling, Whole};
use crate::lock::Lock;
use crate::translate::{address, epoch, is_identity, nowhere, NOBODY};
use belay_ibv::*;
use std::ptr::null_mut;
use std::sync::atomic::{fence, AtomicPtr, AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::time::{Duration, Instant};

#[repr(C)]
pub(crate) struct ShadowPd {
    pub(crate) base: Pd,
    pub(crate) real: *mut Pd,
    /// Of a parent domain, its domain.
    pub(crate) parent: *mut ShadowPd,
}

#[repr(C)]
pub(crate) struct ShadowMr {
    pub(crate) base: Mr,
    pub(crate) real: *mut Mr,
    pub(crate) iova: u64,
    pub(crate) access: u32,
    /// Where it is among the world's.
    pub(crate) place: usize,
}

/// Regions in no order, of which there may be very many.
#[derive(Default)]
pub(crate) struct Regions(Vec<*mut ShadowMr>);

impl Regions {
    pub(crate) const fn new() -> Self {
        Self(Vec::new())
    }

    /// # Safety
    /// The region lives until it is struck off.
    pub(crate) unsafe fn push(&mut self, region: *mut ShadowMr) {
        (*region).place = self.0.len();
        self.0.push(region);
    }

    /// Strikes one off, if it is there.
    ///
    /// # Safety
    /// All that are there live.
    pub(crate) unsafe fn strike(&mut self, region: *mut ShadowMr) {
        let place = (*region).place;
        if self.0.get(place) == Some(&region) {
            self.0.swap_remove(place);
            if let Some(last) = self.0.get(place) {
                (**last).place = place;
            }
        }
    }

    /// Strikes those of a context off.
    ///
    /// # Safety
    /// As for [`Regions::strike`].
    pub(crate) unsafe fn leave(&mut self, context: *mut Context) {
        self.0.retain(|m| (**m).base.context != context);
        for (place, region) in self.0.iter().enumerate() {
            (**region).place = place;
        }
    }
}

impl std::ops::Deref for Regions {
    type Target = [*mut ShadowMr];

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

/// Regions that have other addresses than their memory. Whoever polls looks here without a lock, which the thread might hold
/// that a signal handler has interrupted.
static ELSEWHERE: AtomicPtr<Elsewhere> = AtomicPtr::new(null_mut());
/// Held while it is changed.
static CHANGES: Lock<()> = Lock::new(());

/// One of these regions, or a place for one. Never freed.
struct Elsewhere {
    next: *const Elsewhere,
    /// Odd while the rest is changed: it is no region then that a request which is done can have named.
    changes: AtomicU32,
    /// Whose place it is; null where it is free.
    region: AtomicPtr<ShadowMr>,
    context: AtomicPtr<Context>,
    key: AtomicU32,
    /// From an address of the region's to that of its memory.
    distance: AtomicU64,
}

impl Elsewhere {
    const fn new(next: *const Elsewhere) -> Self {
        Elsewhere {
            next,
            changes: AtomicU32::new(0),
            region: AtomicPtr::new(null_mut()),
            context: AtomicPtr::new(null_mut()),
            key: AtomicU32::new(0),
            distance: AtomicU64::new(0),
        }
    }

    fn all() -> impl Iterator<Item = &'static Elsewhere> {
        // SAFETY: never freed.
        let each = |e: *const Elsewhere| unsafe { e.as_ref::<'static>() };
        std::iter::successors(each(ELSEWHERE.load(Acquire)), move |e| each(e.next))
    }

    /// Puts a region in, or takes it out: null. Changes are locked.
    fn set(&self, region: *mut ShadowMr) {
        let now = self.changes.load(Relaxed);
        self.changes.store(now.wrapping_add(1), Relaxed);
        fence(Release);
        self.region.store(region, Relaxed);
        // SAFETY: one that lives.
        if let Some(m) = unsafe { region.as_ref() } {
            self.context.store(m.base.context, Relaxed);
            self.key.store(m.base.lkey, Relaxed);
            self.distance.store((m.base.addr as u64).wrapping_sub(m.first()), Relaxed);
        }
        self.changes.store(now.wrapping_add(2), Release);
    }

    /// The distance, if it is this region.
    fn find(&self, context: *mut Context, key: u32) -> Option<u64> {
        let before = self.changes.load(Acquire);
        let taken = !self.region.load(Relaxed).is_null();
        let is_it = taken && self.context.load(Relaxed) == context && self.key.load(Relaxed) == key;
        let distance = self.distance.load(Relaxed);
        fence(Acquire);
        (is_it && before & 1 == 0 && self.changes.load(Relaxed) == before).then_some(distance)
    }
}

impl ShadowMr {
    /// The address of its first byte in requests.
    fn first(&self) -> u64 {
        if self.access & ACCESS_ZERO_BASED != 0 {
            0
        } else {
            self.iova
        }
    }

    /// From now on a program's requests may name it, by these addresses and this key.
    pub(crate) fn known(&mut self) {
        self.unknown();
        if self.first() == self.base.addr as u64 {
            return;
        }
        let _changes = CHANGES.lock();
        let free = Elsewhere::all().find(|e| e.region.load(Relaxed).is_null());
        match free {
            Some(place) => place.set(self),
            None => {
                let place: &Elsewhere = Box::leak(Box::new(Elsewhere::new(ELSEWHERE.load(Relaxed))));
                place.set(self);
                ELSEWHERE.store(std::ptr::from_ref(place).cast_mut(), Release);
            }
        }
    }

    pub(crate) fn unknown(&mut self) {
        let _changes = CHANGES.lock();
        let own = Elsewhere::all().find(|e| std::ptr::eq(e.region.load(Relaxed), self));
        if let Some(place) = own {
            place.set(null_mut());
        }
    }
}

/// In the child of a fork.
///
/// # Safety
/// No other thread is there.
pub(crate) unsafe fn after_fork() {
    CHANGES.reset(());
    ELSEWHERE.store(null_mut(), Release);
}

/// Where the memory of a segment is. Two devices may give the same key.
pub(crate) fn memory_of(context: *mut Context, segment: &Sge) -> *mut u8 {
    let distance = Elsewhere::all().find_map(|e| e.find(context, segment.lkey));
    segment.addr.wrapping_add(distance.unwrap_or(0)) as *mut u8
}

/// An address handle. The provider's are made when they are needed after a restart.
#[repr(C)]
pub(crate) struct ShadowAh {
    pub(crate) base: Ah,
    pub(crate) attr: AhAttr,
    pub(crate) real: Lock<RealAhs>,
}

#[derive(Default)]
pub(crate) struct RealAhs {
    /// Of which restart they are.
    pub(crate) epoch: u32,
    /// More than one where the port has become several.
    pub(crate) all: Vec<(AhAttr, *mut Ah)>,
    /// Addresses at which the provider finds nobody, and when it is asked again.
    pub(crate) lost: Vec<Lost>,
    /// The last destination: the program's number of it, the real one, and its handle.
    pub(crate) last: Option<(u32, u32, *mut Ah)>,
}

/// An address at which the provider has found nobody.
pub(crate) struct Lost {
    attr: AhAttr,
    /// It is asked again after this long.
    pause: Duration,
    at: Instant,
}

/// So many times as long as the provider has looked for somebody passes before it is asked again: the kernel looks for a
/// second, in which whoever posts stands still.
const PAUSE: u32 = 16;
/// The first pause for a host of which nobody tells that it lives lasts as long at least.
const FIRST_PAUSE: Duration = Duration::from_secs(16);

impl RealAhs {
    /// The handle that leads to an address, null where the provider makes none.
    unsafe fn handle(&mut self, pd: *mut Pd, attr: &AhAttr) -> *mut Ah {
        if let Some(known) = self.all.iter().find(|a| a.0 == *attr) {
            return known.1;
        }
        // It asks the kernel, under a lock.
        let _whole = Whole::begin();
        let _calling = Calling::begin();
        let new = (crate::real::real().ibv_create_ah)((*pd.cast::<ShadowPd>()).real, &mut { *attr });
        if !new.is_null() {
            self.all.push((*attr, new));
        }
        new
    }

    /// The same, where the provider is not asked for what it has not found until after a pause. For a host of which nobody
    /// tells that it lives each is twice as long as the one before.
    unsafe fn handle_if_found(&mut self, pd: *mut Pd, attr: &AhAttr, lives: bool) -> *mut Ah {
        let known = self.lost.iter().position(|l| l.attr == *attr);
        if known.is_some_and(|n| self.lost[n].at.elapsed() < self.lost[n].pause) {
            return null_mut();
        }
        let asked = Instant::now();
        let found = self.handle(pd, attr);
        let before = known.map(|n| self.lost.swap_remove(n).pause);
        if found.is_null() {
            let mut pause = asked.elapsed() * PAUSE;
            if !lives {
                pause = before.map_or(FIRST_PAUSE, |before| before * 2).max(pause);
            }
            let at = Instant::now();
            self.lost.push(Lost { attr: *attr, pause, at });
        }
        found
    }
}

impl ShadowAh {
    /// The handle and the number of a destination today. A program may have the handle of a host that is gone, for which
    /// none can be made any more where that host is looked for: what it sends there is lost, as it was before.
    ///
    /// # Safety
    /// A handle that lives.
    pub(crate) unsafe fn resolve(&self, number: u32) -> (*mut Ah, u32) {
        let mut real = self.real.lock();
        if real.epoch != epoch() {
            *real = RealAhs {
                epoch: epoch(),
                ..RealAhs::default()
            };
        }
        if let Some((_, now, ah)) = real.last.filter(|l| l.0 == number) {
            return (ah, now);
        }
        if is_identity() {
            let ah = real.handle(self.base.pd, &self.attr);
            real.last = Some((number, number, ah));
            return (ah, number);
        }
        let c = ShadowContext::of(self.base.context);
        let (attr, found) = address(c, &self.attr, number);
        // The queue pair is gone; whoever else is at that port is none of its business.
        let is_gone = found.is_some_and(|f| f.number == NOBODY);
        let ah = match is_gone {
            true => null_mut(),
            false => real.handle_if_found(self.base.pd, &attr, found.is_some()),
        };
        let (ah, now) = match ah.is_null() {
            true => (real.handle(self.base.pd, &nowhere(c, &attr)), NOBODY),
            false => (ah, found.map_or(number, |f| f.number)),
        };
        let for_good = !ah.is_null() && (now != NOBODY || is_gone);
        real.last = for_good.then_some((number, now, ah));
        (ah, now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::zeroed;
    use std::ptr::without_provenance_mut;

    #[test]
    fn a_key_is_one_of_its_device() {
        let [one, other] = [8, 16].map(without_provenance_mut::<Context>);
        // SAFETY: numbers and pointers that are not followed; the regions live until they are not known any more.
        unsafe {
            let mut regions = [(one, 0x1000), (other, 0x2000)].map(|(context, addr)| {
                let mut region: ShadowMr = zeroed();
                (region.base.context, region.base.lkey) = (context, 0xab_cdef);
                region.base.addr = without_provenance_mut(addr);
                region
            });
            regions.iter_mut().for_each(ShadowMr::known);
            let segment = Sge {
                addr: 5,
                length: 1,
                lkey: 0xab_cdef,
            };
            let found = [one, other].map(|context| memory_of(context, &segment) as usize);
            regions.iter_mut().for_each(|r| r.unknown());
            assert_eq!(found, [0x1005, 0x2005]);
        }
    }

    #[test]
    fn regions_are_struck_off_in_any_order() {
        let [one, other] = [8, 16].map(without_provenance_mut::<Context>);
        // SAFETY: pointers that are not followed; the regions live as long as the list.
        unsafe {
            let mut made = [one, other, one, other, one].map(|context| {
                let mut region: ShadowMr = zeroed();
                region.base.context = context;
                region
            });
            let at = made.as_mut_ptr();
            let mut list = Regions::new();
            (0..5).for_each(|i| list.push(at.add(i)));
            let left = |list: &Regions| {
                let mut all: Vec<_> = list.iter().map(|m| m.offset_from(at)).collect();
                all.sort_unstable();
                all
            };
            list.strike(at.add(1));
            list.strike(at.add(1));
            assert_eq!(left(&list), [0, 2, 3, 4]);
            list.strike(at.add(3));
            assert_eq!(left(&list), [0, 2, 4]);
            list.push(at.add(3));
            list.leave(one);
            assert_eq!(left(&list), [3]);
            list.strike(at.add(3));
            assert!(list.is_empty());
        }
    }
}
