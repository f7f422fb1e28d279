//! A section of a YAML document, read value by value with errors that name the key.

use serde_yaml::{Mapping, Value};

use crate::{Error, Result};

/// A section of the YAML document, with its path for messages.
pub(super) struct Section<'a> {
    pub(super) root: &'a Mapping,
    pub(super) path: String,
    pub(super) map: Option<&'a Mapping>,
}

pub(super) fn wrong(path: &str, expected: &str, found: &Value) -> Error {
    let mut found = serde_yaml::to_string(found)
        .unwrap_or_default()
        .trim()
        .replace('\n', " ");
    if found.chars().count() > 60 {
        found = found.chars().take(60).collect::<String>() + "...";
    }
    Error::Config(format!("`{path}` is `{found}`, expected {expected}"))
}

impl<'a> Section<'a> {
    pub(super) fn key(&self, key: &str) -> String {
        if self.path.is_empty() {
            key.to_string()
        } else {
            format!("{}.{key}", self.path)
        }
    }

    /// The value of a key, with `${a.b}` followed to where it points (`model.` in front is the document itself).
    /// Null is the same as absent.
    pub(super) fn get(&self, key: &str) -> Result<Option<&'a Value>> {
        let mut value = self.map.and_then(|map| map.get(key));
        for _ in 0..8 {
            let Some(reference) = value
                .and_then(Value::as_str)
                .and_then(|text| text.strip_prefix("${")?.strip_suffix('}'))
            else {
                return Ok(value.filter(|v| !v.is_null()));
            };
            let reference = reference.strip_prefix("model.").unwrap_or(reference);
            let mut parts = reference.split('.');
            let mut target = parts.next().and_then(|part| self.root.get(part));
            for part in parts {
                target = target.and_then(|value| value.get(part));
            }
            if target.is_none() {
                return Err(Error::Config(format!(
                    "`{}` refers to `{reference}`, which does not exist",
                    self.key(key)
                )));
            }
            value = target;
        }
        Err(Error::Config(format!("`{}` refers to itself", self.key(key))))
    }

    pub(super) fn section(&self, key: &str) -> Result<Section<'a>> {
        let map = match self.get(key)? {
            None => None,
            Some(Value::Mapping(map)) => Some(map),
            Some(other) => return Err(wrong(&self.key(key), "a mapping", other)),
        };
        Ok(Section {
            root: self.root,
            path: self.key(key),
            map,
        })
    }

    pub(super) fn required<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| Error::Config(format!("`{}` is missing", self.key(key))))
    }

    pub(super) fn optional_size(&self, key: &str, range: std::ops::RangeInclusive<usize>) -> Result<Option<usize>> {
        self.get(key)?
            .map(|value| {
                value
                    .as_u64()
                    .and_then(|n| usize::try_from(n).ok())
                    .filter(|n| range.contains(n))
                    .ok_or_else(|| {
                        let expected = format!("an integer from {} to {}", range.start(), range.end());
                        wrong(&self.key(key), &expected, value)
                    })
            })
            .transpose()
    }

    pub(super) fn size(&self, key: &str, range: std::ops::RangeInclusive<usize>) -> Result<usize> {
        let value = self.optional_size(key, range)?;
        self.required(key, value)
    }

    pub(super) fn number(&self, key: &str, default: f64) -> Result<f64> {
        match self.get(key)? {
            None => Ok(default),
            Some(value) => value
                .as_f64()
                .filter(|x| x.is_finite())
                .ok_or_else(|| wrong(&self.key(key), "a finite number", value)),
        }
    }

    pub(super) fn probability(&self, key: &str, default: f64) -> Result<f64> {
        let value = self.number(key, default)?;
        if (0.0..=1.0).contains(&value) {
            Ok(value)
        } else {
            Err(Error::Config(format!(
                "`{}` is {value}, expected a number from 0 to 1",
                self.key(key)
            )))
        }
    }

    pub(super) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key)? {
            None => Ok(default),
            Some(value) => value
                .as_bool()
                .ok_or_else(|| wrong(&self.key(key), "true or false", value)),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<String>> {
        self.get(key)?
            .map(|value| {
                value
                    .as_str()
                    .map(str::to_string)
                    .ok_or_else(|| wrong(&self.key(key), "a text", value))
            })
            .transpose()
    }

    /// Refuses any value but the listed ones; absent is fine.
    pub(super) fn only(&self, key: &str, allowed: &[Value]) -> Result<()> {
        match self.get(key)? {
            Some(value) if !allowed.contains(value) => {
                let names: Vec<String> = allowed
                    .iter()
                    .map(|v| serde_yaml::to_string(v).unwrap_or_default().trim().to_string())
                    .collect();
                Err(wrong(
                    &self.key(key),
                    &format!("{}; other values are not supported", names.join(" or ")),
                    value,
                ))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn sizes(&self, key: &str) -> Result<Option<Vec<usize>>> {
        self.get(key)?
            .map(|value| {
                value
                    .as_sequence()
                    .and_then(|list| {
                        list.iter()
                            .map(|v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
                            .collect::<Option<Vec<_>>>()
                    })
                    .ok_or_else(|| wrong(&self.key(key), "a list of integers from 0", value))
            })
            .transpose()
    }

    pub(super) fn texts(&self, key: &str) -> Result<Option<Vec<String>>> {
        self.get(key)?
            .map(|value| {
                value
                    .as_sequence()
                    .and_then(|list| list.iter().map(|v| v.as_str().map(str::to_string)).collect())
                    .ok_or_else(|| wrong(&self.key(key), "a list of texts", value))
            })
            .transpose()
    }
}
