//! Values by their types: what one kind notes down from one step to the next, in a flow that knows nothing of it.

use std::any::{Any, TypeId};
use std::collections::HashMap;

/// One value of each type at most.
#[derive(Debug, Default)]
pub(crate) struct Sets(HashMap<TypeId, Box<dyn Any>>);

impl Sets {
    /// The value of this type, which is made by whoever asks first.
    pub(crate) fn of<T: Any + Default>(&mut self) -> &mut T {
        let made = self.0.entry(TypeId::of::<T>()).or_insert_with(|| Box::<T>::default());
        match made.downcast_mut() {
            Some(value) => value,
            None => unreachable!("it is found by its type"),
        }
    }

    /// The value of this type, if there is one.
    pub(crate) fn get<T: Any>(&self) -> Option<&T> {
        self.0.get(&TypeId::of::<T>())?.downcast_ref()
    }

    /// Takes it out, if there is one.
    pub(crate) fn take<T: Any>(&mut self) -> Option<T> {
        self.0.remove(&TypeId::of::<T>())?.downcast().ok().map(|value| *value)
    }

    /// Puts it in.
    pub(crate) fn put<T: Any>(&mut self, value: T) {
        self.0.insert(TypeId::of::<T>(), Box::new(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_one_value_of_each_type() {
        let mut sets = Sets::default();
        assert_eq!(sets.get::<u32>(), None);
        *sets.of::<u32>() += 2;
        sets.put("text");
        assert_eq!((*sets.of::<u32>(), sets.get::<&str>()), (2, Some(&"text")));
        assert_eq!((sets.take::<u32>(), sets.take::<u32>()), (Some(2), None));
    }
}
