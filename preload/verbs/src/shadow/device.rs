//! Devices. There is one shadow for each name, for ever: programs keep pointers to devices.

use crate::real::real;
use belay_ibv::Device;

#[repr(C)]
pub(crate) struct ShadowDevice {
    pub(crate) base: Device,
    pub(crate) guid: u64,
    pub(crate) index: i32,
    /// What libraries of one provider look at behind the structure, to see whether it is theirs: it is not.
    _foreign: [u64; 64],
}

impl ShadowDevice {
    /// What is known of a real device.
    ///
    /// # Safety
    /// An element of a list that has not been freed.
    pub(crate) unsafe fn of(device: *mut Device) -> Self {
        let (guid, index) = ((real().ibv_get_device_guid)(device), (real().ibv_get_device_index)(device));
        let mut base = *device;
        base.ops = [0; 2];
        ShadowDevice {
            base,
            guid,
            index,
            _foreign: [0; 64],
        }
    }
}
