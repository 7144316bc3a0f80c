//! Devices and contexts.

use super::{enter, none};
use crate::real::real;
use crate::shadow::{free, strike, ShadowContext, ShadowDevice, WORLD};
use belay_ibv::*;
use libc::c_char;
use std::ptr::null_mut;

#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_get_device_list(count: *mut Int) -> *mut *mut Device {
    let _call = enter!(std::ptr::null_mut(), (real().ibv_get_device_list)(count));
    let mut n = 0;
    let theirs = (real().ibv_get_device_list)(&mut n);
    if let Some(count) = count.as_mut() {
        *count = if theirs.is_null() { 0 } else { n };
    }
    if theirs.is_null() {
        return null_mut();
    }
    let n = n.max(0) as usize;
    let ours = libc::calloc(n + 1, size_of::<*mut Device>()).cast::<*mut Device>();
    if !ours.is_null() {
        for i in 0..n {
            *ours.add(i) = shadow_of(*theirs.add(i)).cast();
        }
    }
    (real().ibv_free_device_list)(theirs);
    ours
}

/// The shadow of the same name; what is known of the device is what was known first.
unsafe fn shadow_of(device: *mut Device) -> *mut ShadowDevice {
    let fresh = ShadowDevice::of(device);
    let mut world = WORLD.lock();
    let known = |d: &&*mut ShadowDevice| (***d).base.name == fresh.base.name && (***d).guid == fresh.guid;
    if let Some(known) = world.devices.iter().find(known) {
        return *known;
    }
    let shadow = Box::into_raw(Box::new(fresh));
    world.devices.push(shadow);
    shadow
}

#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_free_device_list(list: *mut *mut Device) {
    let _call = enter!(std::ptr::null_mut(), (real().ibv_free_device_list)(list));
    libc::free(list.cast());
}

#[no_mangle]
unsafe extern "C" fn ibv_get_device_name(device: *mut Device) -> *const c_char {
    std::ptr::addr_of!((*device).name).cast()
}

#[no_mangle]
unsafe extern "C" fn ibv_get_device_index(device: *mut Device) -> Int {
    let _call = enter!(std::ptr::null_mut(), (real().ibv_get_device_index)(device));
    (*device.cast::<ShadowDevice>()).index
}

#[no_mangle]
unsafe extern "C" fn ibv_get_device_guid(device: *mut Device) -> u64 {
    let _call = enter!(std::ptr::null_mut(), (real().ibv_get_device_guid)(device));
    (*device.cast::<ShadowDevice>()).guid
}

/// Opens the real device of this name. Where there are several of them, as on two hosts of a fabric of tests, the one
/// with this number too.
pub(crate) unsafe fn open_real(device: &ShadowDevice) -> *mut Context {
    let mut n = 0;
    let list = (real().ibv_get_device_list)(&mut n);
    if list.is_null() {
        return null_mut();
    }
    let names = (0..n.max(0) as usize).map(|i| *list.add(i));
    let found = names.clone().find(|d| (**d).name == device.base.name);
    let context = found.map_or_else(|| none(libc::ENODEV), |d| (real().ibv_open_device)(d));
    let error = crate::errno();
    (real().ibv_free_device_list)(list);
    crate::set_errno(error);
    context
}

#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_open_device(device: *mut Device) -> *mut Context {
    let _call = enter!(std::ptr::null_mut(), (real().ibv_open_device)(device));
    let device = device.cast::<ShadowDevice>();
    let context = open_real(&*device);
    if context.is_null() {
        return null_mut();
    }
    let Some(shadow) = ShadowContext::new(context, device) else {
        (real().ibv_close_device)(context);
        return none(libc::EMFILE);
    };
    let program = shadow.program();
    crate::control::start();
    WORLD.lock().contexts.push(Box::into_raw(shadow));
    program
}

#[no_mangle]
unsafe extern "C" fn ibv_close_device(context: *mut Context) -> Int {
    let _call = enter!(context, (real().ibv_close_device)(context));
    let shadow = std::ptr::from_ref(ShadowContext::of(context)).cast_mut();
    let error = (real().ibv_close_device)((*shadow).real);
    if error == 0 {
        let mut world = WORLD.lock();
        strike(&mut world.contexts, shadow);
        // What the program has left on it is of no use to anybody, and is never freed.
        world.leave(context);
        drop(world);
        (*shadow).bell.close();
        free(shadow);
    }
    error
}

/// Objects of other processes are not to be had after a restart.
#[no_mangle]
unsafe extern "C" fn ibv_import_device(_: Int) -> *mut Context {
    none(libc::EOPNOTSUPP)
}

#[no_mangle]
unsafe extern "C" fn ibv_import_pd(_: *mut Context, _: u32) -> *mut Pd {
    none(libc::EOPNOTSUPP)
}

#[no_mangle]
unsafe extern "C" fn ibv_import_mr(_: *mut Pd, _: u32) -> *mut Mr {
    none(libc::EOPNOTSUPP)
}

#[no_mangle]
unsafe extern "C" fn ibv_import_dm(_: *mut Context, _: u32) -> *mut Opaque {
    none(libc::EOPNOTSUPP)
}

/// Libraries of one provider go around libibverbs; told that the device is not theirs, programs use plain verbs.
#[no_mangle]
unsafe extern "C" fn mlx5dv_is_supported(_: *mut Device) -> bool {
    false
}

#[no_mangle]
unsafe extern "C" fn mlx4dv_is_supported(_: *mut Device) -> bool {
    false
}

#[no_mangle]
unsafe extern "C" fn efadv_query_device(_: *mut Context, _: *mut Opaque, _: u32) -> Int {
    libc::EOPNOTSUPP
}

#[no_mangle]
unsafe extern "C" fn mlx5dv_open_device(_: *mut Device, _: *mut Opaque) -> *mut Context {
    none(libc::EOPNOTSUPP)
}
