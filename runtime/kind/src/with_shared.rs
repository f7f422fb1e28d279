//! The settings of a stage beside what its checks and bodies share.

use std::borrow::Cow;
use std::ops::{Deref, DerefMut};

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Settings `S`, and what all that is made with them shares: files that are read once ([`crate::ReadOnce`]), object storage.
///
/// A [`crate::Kind::Settings`] for kinds whose settings name files. `S` stays plain data, which is all that is read, written and
/// documented: in YAML, in keys and in the JSON schema this type is `S`. `T` begins as its default, and clones share it where
/// `T`'s do.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WithShared<S, T> {
    pub settings: S,
    pub shared: T,
}

impl<S, T: Default> From<S> for WithShared<S, T> {
    fn from(settings: S) -> Self {
        let shared = T::default();
        WithShared { settings, shared }
    }
}

impl<S, T> Deref for WithShared<S, T> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.settings
    }
}

impl<S, T> DerefMut for WithShared<S, T> {
    fn deref_mut(&mut self) -> &mut S {
        &mut self.settings
    }
}

impl<'de, S: Deserialize<'de>, T: Default> Deserialize<'de> for WithShared<S, T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        S::deserialize(deserializer).map(WithShared::from)
    }
}

impl<S: Serialize, T> Serialize for WithShared<S, T> {
    fn serialize<Z: Serializer>(&self, serializer: Z) -> Result<Z::Ok, Z::Error> {
        self.settings.serialize(serializer)
    }
}

impl<S: JsonSchema, T> JsonSchema for WithShared<S, T> {
    fn schema_name() -> Cow<'static, str> {
        S::schema_name()
    }

    fn schema_id() -> Cow<'static, str> {
        S::schema_id()
    }

    fn inline_schema() -> bool {
        S::inline_schema()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        S::json_schema(generator)
    }
}
