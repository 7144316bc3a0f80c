//! The processor of this machine, for an image.

use crate::model::{Processor, StateComponent};
use belay_kernel::cpu;

impl Processor {
    /// That on which this process runs.
    pub fn own() -> Self {
        let component = |c: &cpu::Component| StateComponent {
            number: c.number,
            offset: c.offset,
            bytes: c.bytes,
        };
        Self {
            features: cpu::features().iter().map(|f| (*f).to_owned()).collect(),
            components: cpu::components().iter().map(component).collect(),
        }
    }
}
