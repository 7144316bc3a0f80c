//! What the image holds of a resource, without its type: the flows pass it on, and the kind that it belongs to knows it.

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use std::any::Any;
use std::collections::BTreeMap;
use std::fmt::Debug;

/// Data of the image.
pub(crate) trait State: Any + Debug + Send + Sync + erased_serde::Serialize {
    /// Another one like it.
    fn copy(&self) -> Box<dyn State>;
    /// For whoever knows its type.
    fn any(&self) -> &dyn Any;
    /// The same, to be changed.
    fn any_mut(&mut self) -> &mut dyn Any;
}

impl<T: Any + Debug + Clone + Send + Sync + Serialize> State for T {
    fn copy(&self) -> Box<dyn State> {
        Box::new(self.clone())
    }

    fn any(&self) -> &dyn Any {
        self
    }

    fn any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

erased_serde::serialize_trait_object!(State);

/// What a description is: the name of its kind, and the state that this kind has captured. In the image an object with one entry.
#[derive(Debug)]
pub(crate) struct Described {
    kind: &'static str,
    state: Box<dyn State>,
}

impl Described {
    /// State of this kind.
    pub(crate) fn new(kind: &'static str, state: impl State) -> Self {
        Self {
            kind,
            state: Box::new(state),
        }
    }

    /// The name of the kind.
    pub(crate) fn kind(&self) -> &'static str {
        self.kind
    }

    /// The state, where it is of this type.
    pub(crate) fn get<T: State>(&self) -> Option<&T> {
        (*self.state).any().downcast_ref()
    }

    /// The same, to be changed.
    pub(crate) fn get_mut<T: State>(&mut self) -> Option<&mut T> {
        (*self.state).any_mut().downcast_mut()
    }
}

impl Clone for Described {
    fn clone(&self) -> Self {
        Self {
            kind: self.kind,
            state: (*self.state).copy(),
        }
    }
}

impl Serialize for Described {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let mut map = s.serialize_map(Some(1))?;
        map.serialize_entry(self.kind, &*self.state)?;
        map.end()
    }
}

/// Objects behind several descriptions, or behind none: what one kind has of them, under a name of its own beside the descriptions.
pub(crate) trait Part: State + Default {
    /// The name.
    const KEY: &'static str;
}

/// Those of all kinds.
#[derive(Debug, Default)]
pub(crate) struct Parts(BTreeMap<&'static str, Box<dyn State>>);

impl Parts {
    /// That of this type, where there is one.
    pub(crate) fn get<T: Part>(&self) -> Option<&T> {
        let found: &dyn State = &**self.0.get(T::KEY)?;
        found.any().downcast_ref()
    }

    /// That of this type, which is made by whoever asks first.
    pub(crate) fn of<T: Part>(&mut self) -> &mut T {
        let made = self.0.entry(T::KEY).or_insert_with(|| Box::new(T::default()));
        match (**made).any_mut().downcast_mut() {
            Some(part) => part,
            None => unreachable!("no two kinds have parts of one name"),
        }
    }

    /// Puts it in.
    pub(crate) fn put<T: Part>(&mut self, part: T) {
        self.0.insert(T::KEY, Box::new(part));
    }

    /// Name and data of each.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&'static str, &dyn State)> {
        self.0.iter().map(|(key, part)| (*key, &**part))
    }
}

impl Clone for Parts {
    fn clone(&self) -> Self {
        Self(self.0.iter().map(|(key, part)| (*key, (**part).copy())).collect())
    }
}
