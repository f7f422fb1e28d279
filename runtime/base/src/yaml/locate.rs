//! The place of a path in the text of a document.

use std::cell::Cell;
use std::fmt;

use serde::de::{self, DeserializeSeed, EnumAccess, IgnoredAny, MapAccess, SeqAccess, VariantAccess, Visitor};

use super::{Step, Steps, visit_scalars};

/// Which end of an entry is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Key,
    Value,
}

/// Line and column (from 1, in characters) of what `steps` leads to, if the document holds it.
///
/// serde_yaml reports places in errors only. So the document is read once more with a reader that fails exactly there.
pub fn locate(text: &str, steps: &Steps, part: Part) -> Option<(usize, usize)> {
    let found = Cell::new(false);
    let seed = Find {
        steps: &steps.0,
        part,
        found: &found,
    };
    match seed.deserialize(serde_yaml::Deserializer::from_str(text)) {
        Err(error) if found.get() => error.location().map(|location| (location.line(), location.column())),
        _ => None,
    }
}

#[derive(Clone, Copy)]
struct Find<'a> {
    steps: &'a [Step],
    part: Part,
    found: &'a Cell<bool>,
}

impl Find<'_> {
    fn fail<E: de::Error>(&self) -> E {
        self.found.set(true);
        E::custom("here")
    }

    fn scalar<E: de::Error>(&self) -> Result<(), E> {
        if self.steps.is_empty() {
            Err(self.fail())
        } else {
            Ok(())
        }
    }
}

impl<'de> DeserializeSeed<'de> for Find<'_> {
    type Value = ();

    fn deserialize<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Find<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Some((Step::Key(wanted), rest)) = self.steps.split_first() else {
            if self.steps.is_empty() {
                return Err(self.fail());
            }
            while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
            return Ok(());
        };
        let at_key = rest.is_empty() && self.part == Part::Key;
        while let Some(matches) = map.next_key_seed(FindKey {
            wanted,
            fail: at_key.then_some(self),
        })? {
            if matches {
                map.next_value_seed(Find { steps: rest, ..self })?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let Some((Step::Index(wanted), rest)) = self.steps.split_first() else {
            if self.steps.is_empty() {
                return Err(self.fail());
            }
            while items.next_element::<IgnoredAny>()?.is_some() {}
            return Ok(());
        };
        let mut index = 0;
        loop {
            let more = if index == *wanted {
                // A list item has no key: the item itself is the place, whichever part was asked for.
                items.next_element_seed(Find { steps: rest, ..self })?.is_some()
            } else {
                items.next_element::<IgnoredAny>()?.is_some()
            };
            if !more {
                return Ok(());
            }
            index += 1;
        }
    }

    fn visit_enum<A: EnumAccess<'de>>(self, data: A) -> Result<(), A::Error> {
        let (_, variant) = data.variant::<IgnoredAny>()?;
        if self.steps.is_empty() {
            return Err(self.fail());
        }
        variant.newtype_variant_seed(self)
    }

    visit_scalars!();
}

/// Reads a key and says whether it is the wanted one; fails there if the key is what is looked for.
struct FindKey<'a> {
    wanted: &'a str,
    fail: Option<Find<'a>>,
}

impl<'de> DeserializeSeed<'de> for FindKey<'_> {
    type Value = bool;

    fn deserialize<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for FindKey<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: de::Error>(self, key: &str) -> Result<bool, E> {
        match self.fail {
            Some(find) if key == self.wanted => Err(find.fail()),
            _ => Ok(key == self.wanted),
        }
    }
}
