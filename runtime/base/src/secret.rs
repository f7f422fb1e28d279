//! Values that are never shown: parameters with `secret: true`.
//!
//! Such a value is never part of the settings. Where a pipeline names the parameter, the settings hold a reference to
//! it, a map of one key, which only a setting of the type [`Secret`] accepts. So a plan, a recipe, a record or a
//! message that shows settings shows the parameter's name. Only a kind that has such a setting gets the value; where it
//! appears in the text of an error or an event, it is removed again.

use std::borrow::Cow;
use std::cell::RefCell;
use std::cmp::Reverse;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The key of the map that refers to a secret.
pub const REFERENCE: &str = "$secret";

/// What is shown instead of a value.
const HIDDEN: &str = "***";

/// Shorter values (without white space at their ends) are refused: they occur by chance in unrelated text.
pub const SHORTEST: usize = 6;

/// A setting that is never shown: a password, say, or a token. A pipeline gives it a parameter with `secret: true`.
///
/// It is written (in recipes, plans and records) as the name of its parameter. A kind passes its value only to the
/// service that requires it, and never to a row, a reject, a file, an argument of a program or a panic.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    name: String,
    value: Arc<str>,
}

impl Secret {
    /// The value itself.
    pub fn reveal(&self) -> &str {
        &self.value
    }

    /// The name of the parameter.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret({})", self.name)
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format!("${{{}}}", self.name))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Reference {
    #[serde(rename = "$secret")]
    name: String,
}

thread_local! {
    /// The secrets of the pipeline whose settings are being read on this thread.
    static IN_USE: RefCell<Option<Secrets>> = const { RefCell::new(None) };
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let wanted = || D::Error::custom("expected a parameter with `secret: true`, as `${name}`");
        let Reference { name } = Reference::deserialize(deserializer).map_err(|_| wanted())?;
        let value = IN_USE.with_borrow(|secrets| secrets.as_ref().and_then(|secrets| secrets.value(&name)));
        Ok(Secret {
            value: value.ok_or_else(wanted)?,
            name,
        })
    }
}

impl schemars::JsonSchema for Secret {
    fn schema_name() -> Cow<'static, str> {
        "Secret".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({"type": "string"})
    }
}

/// The secrets of a pipeline, by the names of their parameters. Cheap to clone; clones share what is added.
#[derive(Clone, Default)]
pub struct Secrets(Arc<Mutex<Vec<Named>>>);

/// A name, and its value.
type Named = (String, Arc<str>);

/// Shows the names only.
impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.all().iter().map(|(name, _)| name)).finish()
    }
}

impl Secrets {
    fn all(&self) -> MutexGuard<'_, Vec<Named>> {
        // Each change is one push.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the value of a parameter, and gives the name that represents it: another one where a parameter of an included
    /// pipeline has the same name and another value.
    pub fn add(&self, parameter: &str, value: &str) -> String {
        let mut all = self.all();
        let mut name = parameter.to_string();
        let mut others = 1;
        while let Some((_, other)) = all.iter().find(|(known, _)| *known == name) {
            if **other == *value {
                return name;
            }
            others += 1;
            name = format!("{parameter}#{others}");
        }
        all.push((name.clone(), value.into()));
        name
    }

    fn value(&self, name: &str) -> Option<Arc<str>> {
        let all = self.all();
        let found = all.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| Arc::clone(value))
    }

    /// Makes the values available to [`Secret`] settings that `read` deserialises on this thread.
    pub fn while_reading<T>(&self, read: impl FnOnce() -> T) -> T {
        struct Before(Option<Secrets>);
        impl Drop for Before {
            fn drop(&mut self) {
                IN_USE.set(self.0.take());
            }
        }
        let _before = Before(IN_USE.replace(Some(self.clone())));
        read()
    }

    /// The text without the values, and without what is left of them where white space at their ends was cut off.
    pub fn hide<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let all = self.all();
        let mut values: Vec<&str> = all.iter().flat_map(|(_, value)| [&**value, value.trim()]).collect();
        // Longest first: a value may contain another one, whose removal would leave the rest of it.
        values.sort_by_key(|value| Reverse(value.len()));
        let mut hidden = Cow::Borrowed(text);
        for value in values {
            if hidden.contains(value) {
                hidden = Cow::Owned(hidden.replace(value, HIDDEN));
            }
        }
        hidden
    }

    /// Takes the values out of all texts of a JSON value, names of members among them.
    pub fn hide_in_json(&self, json: &mut serde_json::Value) {
        match json {
            serde_json::Value::String(text) => {
                if let Cow::Owned(hidden) = self.hide(text) {
                    *text = hidden;
                }
            }
            serde_json::Value::Array(items) => items.iter_mut().for_each(|item| self.hide_in_json(item)),
            serde_json::Value::Object(map) => {
                let members = std::mem::take(map);
                map.extend(members.into_iter().map(|(name, mut member)| {
                    self.hide_in_json(&mut member);
                    (self.hide(&name).into_owned(), member)
                }));
            }
            _ => {}
        }
    }

    pub fn is_empty(&self) -> bool {
        self.all().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_read_by_its_name_and_written_as_its_name() {
        let secrets = Secrets::default();
        assert_eq!(secrets.add("hub.token", "hunter22"), "hub.token");
        assert_eq!(secrets.add("hub.token", "hunter22"), "hub.token");
        assert_eq!(secrets.add("hub.token", "another one"), "hub.token#2");
        let read = |json: &str| secrets.while_reading(|| serde_json::from_str::<Secret>(json));
        let secret = read(r#"{"$secret":"hub.token"}"#).unwrap();
        assert_eq!((secret.reveal(), secret.name()), ("hunter22", "hub.token"));
        assert_eq!(serde_json::to_string(&secret).unwrap(), r#""${hub.token}""#);
        assert_eq!(
            format!("{secret:?} {secrets:?}"),
            "Secret(hub.token) [\"hub.token\", \"hub.token#2\"]"
        );
        // A plain text and an unknown name are errors, and so is a reference outside of the pipeline.
        assert!(read(r#""hunter22""#).is_err() && read(r#"{"$secret":"other"}"#).is_err());
        assert!(serde_json::from_str::<Secret>(r#"{"$secret":"hub.token"}"#).is_err());
    }

    #[test]
    fn values_are_taken_out_of_texts() {
        let secrets = Secrets::default();
        assert_eq!(secrets.hide("hunter22"), "hunter22");
        secrets.add("a", "hunter22");
        assert_eq!(secrets.hide("x=hunter22&y=hunter22"), "x=***&y=***");
        let mut json = serde_json::json!({"a hunter22": [1, "hunter22", {"b": null}]});
        secrets.hide_in_json(&mut json);
        assert_eq!(json, serde_json::json!({"a ***": [1, "***", {"b": null}]}));
    }

    #[test]
    fn values_are_hidden_trimmed_and_within_longer_ones() {
        let secrets = Secrets::default();
        secrets.add("short", "hunter22");
        secrets.add("long", "hunter22-and-more");
        secrets.add("line", " with a break\n");
        assert_eq!(secrets.hide("a=hunter22-and-more, b=hunter22"), "a=***, b=***");
        assert_eq!(secrets.hide("`with a break`, as: with a break\n."), "`***`, as:***.");
    }
}
