//! The places of all keys and scalars of a document, found in one pass.

use std::cell::Cell;
use std::collections::HashMap;
use std::convert::Infallible;
use std::fmt;

use serde::de::{self, DeserializeSeed, EnumAccess, IgnoredAny, MapAccess, SeqAccess, VariantAccess, Visitor};

use super::{Part, Step, Steps, visit_scalars};

/// Line and column, from 1, in characters.
type Position = (usize, usize);

/// The places of a document's keys and scalars.
#[derive(Debug)]
pub struct PlaceIndex(Node);

/// The result of looking up a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Indexed {
    At(Position),
    /// The document has nothing there.
    Absent,
    /// It has a map or a list there, whose beginning the index does not know; `locate` does.
    Container,
}

#[derive(Debug, Default)]
struct Node {
    key: Option<Position>,
    /// None for a map or a list.
    scalar: Option<Position>,
    members: HashMap<String, Node>,
    items: Vec<Node>,
}

impl PlaceIndex {
    /// None where the text is not YAML, or has keys that are no scalars, or a key twice in one map.
    ///
    /// serde_yaml reports places in errors only. So the document is read with a reader that fails at each key and
    /// scalar; the next one can be read after such an error.
    pub fn of(text: &str) -> Option<PlaceIndex> {
        let doubled = Cell::new(None);
        let walk = Walk { doubled: &doubled };
        walk.deserialize(serde_yaml::Deserializer::from_str(text))
            .ok()
            .map(PlaceIndex)
    }

    pub fn get(&self, steps: &Steps, part: Part) -> Indexed {
        let mut node = &self.0;
        for step in &steps.0 {
            let next = match step {
                Step::Key(key) => node.members.get(key),
                Step::Index(index) => node.items.get(*index),
            };
            match next {
                Some(next) => node = next,
                None => return Indexed::Absent,
            }
        }
        let at_key = part == Part::Key && matches!(steps.0.last(), Some(Step::Key(_)));
        match if at_key { node.key } else { node.scalar } {
            Some(position) => Indexed::At(position),
            None => Indexed::Container,
        }
    }
}

/// The first key that occurs twice in one map, with the place of the second occurrence. serde_yaml reports that of the map.
pub(super) fn doubled_key(text: &str) -> Option<(String, Position)> {
    let doubled = Cell::new(None);
    let walk = Walk { doubled: &doubled };
    // An error that comes after it does not matter.
    let _ = walk.deserialize(serde_yaml::Deserializer::from_str(text));
    doubled.take()
}

/// The place in an error of serde_yaml: `... at line 3 column 5`, or `... at position 0` for the first letter.
fn position_in(error: &str) -> Option<Position> {
    let (_, place) = error.rsplit_once(" at ")?;
    if place.starts_with("position ") {
        return Some((1, 1));
    }
    let (line, column) = place.strip_prefix("line ")?.split_once(" column ")?;
    Some((line.parse().ok()?, column.parse().ok()?))
}

/// Reads anything but maps that have a key twice.
#[derive(Clone, Copy)]
struct Walk<'a> {
    doubled: &'a Cell<Option<(String, Position)>>,
}

impl<'de> DeserializeSeed<'de> for Walk<'_> {
    type Value = Node;

    fn deserialize<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<Node, D::Error> {
        let is_scalar = Cell::new(false);
        let visitor = AnyVisitor {
            walk: self,
            is_scalar: &is_scalar,
        };
        match deserializer.deserialize_any(visitor) {
            Err(error) if is_scalar.get() => Ok(Node {
                scalar: position_in(&error.to_string()),
                ..Node::default()
            }),
            read => read,
        }
    }
}

/// Reads maps and lists; fails at each scalar, which is consumed.
struct AnyVisitor<'a> {
    walk: Walk<'a>,
    is_scalar: &'a Cell<bool>,
}

impl AnyVisitor<'_> {
    fn scalar<E: de::Error>(&self) -> Result<Node, E> {
        self.is_scalar.set(true);
        Err(E::custom("here"))
    }
}

impl<'de> Visitor<'de> for AnyVisitor<'_> {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
        let mut members = HashMap::new();
        while let Some((name, key)) = map.next_key_seed(Key)? {
            if let (true, Some(place)) = (members.contains_key(&name), key) {
                self.walk.doubled.set(Some((name, place)));
                return Err(de::Error::custom("doubled"));
            }
            let value = map.next_value_seed(self.walk)?;
            members.insert(name, Node { key, ..value });
        }
        Ok(Node {
            members,
            ..Node::default()
        })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Node, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element_seed(self.walk)? {
            items.push(item);
        }
        Ok(Node {
            items,
            ..Node::default()
        })
    }

    fn visit_enum<A: EnumAccess<'de>>(self, data: A) -> Result<Node, A::Error> {
        let (_, variant) = data.variant::<IgnoredAny>()?;
        // The place of a tagged value is left to `locate`.
        let value = variant.newtype_variant_seed(self.walk)?;
        Ok(Node { scalar: None, ..value })
    }

    visit_scalars!();
}

/// Reads a key, and gives it with its place.
struct Key;

impl<'de> DeserializeSeed<'de> for Key {
    type Value = (String, Option<Position>);

    fn deserialize<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        let name = Cell::new(None);
        match deserializer.deserialize_str(KeyVisitor { name: &name }) {
            Ok(never) => match never {},
            Err(error) => match name.take() {
                Some(name) => Ok((name, position_in(&error.to_string()))),
                None => Err(error),
            },
        }
    }
}

struct KeyVisitor<'a> {
    name: &'a Cell<Option<String>>,
}

impl<'de> Visitor<'de> for KeyVisitor<'_> {
    type Value = Infallible;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: de::Error>(self, key: &str) -> Result<Infallible, E> {
        self.name.set(Some(key.to_owned()));
        Err(E::custom("here"))
    }
}
