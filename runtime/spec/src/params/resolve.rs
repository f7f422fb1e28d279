//! The values of parameters, with references to each other put in.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::fit::{brief, check_finite, fit, has_reference};
use super::{Environment, FILE_DIR, Param, ParamValue, Params};
use crate::diagnostic::Diagnostic;
use crate::substitute::{self, Lookup};
use crate::yaml::{Mapping, Steps, Value};
use flow_base::secret::SHORTEST;
use flow_base::suggest::did_you_mean;

impl Params {
    /// Puts references (`${other}`, `${env:X}`) into the values.
    pub fn resolve(self, environment: &Environment, found: &mut Vec<Diagnostic>) -> Scope {
        let mut resolver = Resolver {
            params: &self,
            environment,
            state: vec![State::Open; self.params.len()],
            depth: 0,
            left: substitute::ALL,
            found,
        };
        let values: Vec<Value> = (0..self.params.len())
            .map(|index| resolver.value(index).unwrap_or(Value::Null))
            .collect();
        let values = self.params.into_iter().zip(values).map(|(param, value)| ParamValue {
            name: param.name,
            value,
            default: param.default,
            help: param.help,
            given_by: param.given.by,
        });
        Scope {
            values: values.collect(),
            environment: Arc::clone(environment),
            left: AtomicUsize::new(substitute::ALL),
            file_dir: self.file_dir,
        }
    }
}

#[derive(Clone)]
enum State {
    Open,
    InWork,
    /// None: it is wrong, and the error was reported.
    Done(Option<Value>),
}

pub(super) struct Resolver<'a> {
    params: &'a Params,
    environment: &'a Environment,
    state: Vec<State>,
    /// Stack of the parameters that are being resolved, each needed by the one before it.
    depth: usize,
    /// Remaining size that references may add.
    left: usize,
    found: &'a mut Vec<Diagnostic>,
}

/// Most parameters of which each refers to the next.
const CHAIN: usize = 200;

impl Resolver<'_> {
    pub fn value(&mut self, index: usize) -> Option<Value> {
        let param = &self.params.params[index];
        match &self.state[index] {
            State::Done(value) => return value.clone(),
            State::InWork => {
                self.found.push(
                    param
                        .given
                        .wrong(format!("parameter `{}` refers to itself", param.name)),
                );
                return None;
            }
            State::Open => {}
        }
        if self.depth == CHAIN {
            let message = format!(
                "parameter `{}` is reached by more than {CHAIN} references, one after the other",
                param.name
            );
            self.found.push(param.given.wrong(message));
            self.state[index] = State::Done(None);
            return None;
        }
        self.state[index] = State::InWork;
        self.depth += 1;
        let value = self.resolve(index).filter(|value| self.is_in_range(index, value));
        self.depth -= 1;
        self.state[index] = State::Done(value.clone());
        value
    }

    /// Whether a number is in the range of its parameter. If not, it is reported.
    fn is_in_range(&mut self, index: usize, value: &Value) -> bool {
        let param = &self.params.params[index];
        let (Some([least, largest]), Some(number)) = (param.range, value.as_f64()) else {
            return true;
        };
        let is_in = (least..=largest).contains(&number);
        if !is_in {
            let message = format!(
                "parameter `{}`: expected a number from {least} to {largest}, found {}",
                param.name,
                brief(value)
            );
            self.found.push(param.given.wrong(message));
        }
        is_in
    }

    fn resolve(&mut self, index: usize) -> Option<Value> {
        let param = &self.params.params[index];
        let Some(raw) = &param.raw else {
            let help = format!("give it with --set {}=... or in an overlay (--config)", param.name);
            self.found.push(
                Diagnostic::new(format!("parameter `{}` is required", param.name))
                    .at(param.declared_at.clone())
                    .help(help),
            );
            return None;
        };
        if param.secret {
            return self.secret(param, raw);
        }
        if !has_reference(raw) {
            return Some(raw.clone());
        }
        let mut problems = Vec::new();
        let value = substitute::in_value(raw, &Steps::default(), self, &mut problems, &mut Vec::new());
        for problem in &problems {
            // A reference to a parameter that is itself wrong has been reported there.
            if let Some(message) = &problem.message {
                let mut diagnostic = param.given.wrong(format!("parameter `{}`: {message}", param.name));
                diagnostic.help = problem.help.clone();
                self.found.push(diagnostic);
            }
        }
        if !problems.is_empty() {
            return None;
        }
        let value = match (&param.default, value) {
            // A text parameter takes `${count}` or `${env:N}` as the text it is.
            (Some(Value::String(_)), Value::Number(number)) => Value::String(number.to_string()),
            (Some(Value::String(_)), Value::Bool(flag)) => Value::String(flag.to_string()),
            (_, value) => value,
        };
        let fitted = match &param.default {
            Some(default) if param.default != param.raw && !has_reference(default) => fit(default, default, value),
            _ => Ok(value),
        };
        // A variable of the environment may hold any number.
        match fitted.and_then(|value| check_finite(param.default.as_ref(), &value).map(|()| value)) {
            Ok(value) => Some(value),
            Err(message) => {
                let message = format!("parameter `{}`: {message}", param.name);
                self.found.push(param.given.wrong(message));
                None
            }
        }
    }
}

impl Resolver<'_> {
    /// The reference to a secret that takes the place of its value.
    fn secret(&mut self, param: &Param, raw: &Value) -> Option<Value> {
        if substitute::is_secret(raw) {
            return Some(raw.clone());
        }
        let text = match raw.as_str() {
            Some(text) => substitute::secret_text(text, self),
            // It is optional. Any other value that is no text was reported where it was given.
            None => return raw.is_null().then_some(Value::Null),
        };
        let wrong = |message: String, help: Option<String>| Diagnostic {
            help,
            ..param.given.wrong(format!("parameter `{}`: {message}", param.name))
        };
        match text {
            Ok(substitute::SecretText::Reference(value)) => Some(value),
            Ok(substitute::SecretText::NotGiven) => Some(Value::Null),
            // A variable without a value, of a parameter that need not be given.
            Ok(substitute::SecretText::Text(text)) if text.trim().is_empty() && param.default == Some(Value::Null) => {
                Some(Value::Null)
            }
            Ok(substitute::SecretText::Text(text)) if text.trim().chars().count() < SHORTEST => {
                let message = format!("a secret of less than {SHORTEST} characters cannot be kept out of messages");
                self.found.push(wrong(message, None));
                None
            }
            Ok(substitute::SecretText::Text(text)) => Some(substitute::secret_reference(
                self.params.secrets.add(&param.name, &text),
            )),
            Err((message, help)) => {
                self.found.extend(message.map(|message| wrong(message, help)));
                None
            }
        }
    }
}

impl Lookup for Resolver<'_> {
    fn param(&mut self, name: &str) -> Result<Value, Option<String>> {
        if name == FILE_DIR {
            return Ok(Value::String(self.params.file_dir.clone()));
        }
        if self.params.is_group(name) {
            let members: Vec<(usize, &str)> = self
                .params
                .params
                .iter()
                .enumerate()
                .filter_map(|(index, param)| Some((index, param.name.strip_prefix(name)?.strip_prefix('.')?)))
                .collect();
            let mut map = Mapping::new();
            for (index, member) in members {
                let value = self.value(index).ok_or(None)?;
                insert(&mut map, member, value);
            }
            return Ok(Value::Mapping(map));
        }
        let (index, inner) = self.params.find(name).ok_or_else(|| Some(self.params.suggest(name)))?;
        let value = self.value(index).ok_or(None)?;
        inner.of(&value).cloned().ok_or_else(|| Some(self.params.suggest(name)))
    }

    fn environment(&mut self, name: &str) -> Option<String> {
        (self.environment)(name)
    }

    fn spend(&mut self, bytes: usize) -> bool {
        let enough = bytes <= self.left;
        self.left = self.left.saturating_sub(bytes);
        enough
    }
}

/// The resolved parameters of one pipeline file.
pub(crate) struct Scope {
    pub values: Vec<ParamValue>,
    environment: Environment,
    /// Remaining size that references may add.
    left: AtomicUsize,
    file_dir: String,
}

impl Scope {
    /// The parameter that `name` belongs to.
    pub fn origin(&self, name: &str) -> Option<&ParamValue> {
        self.values.iter().find(|param| {
            name == param.name
                || name
                    .strip_prefix(param.name.as_str())
                    .is_some_and(|rest| rest.starts_with('.'))
        })
    }
}

/// Reads a scope; `&Scope` so that many readers can share it.
impl Lookup for &Scope {
    fn param(&mut self, name: &str) -> Result<Value, Option<String>> {
        if name == FILE_DIR {
            return Ok(Value::String(self.file_dir.clone()));
        }
        if let Some(origin) = self.origin(name) {
            let inner = name[origin.name.len()..].trim_start_matches('.');
            if let Some(value) = Steps::parse(inner).of(&origin.value) {
                return Ok(value.clone());
            }
        }
        let mut map = Mapping::new();
        for param in &self.values {
            if let Some(member) = param.name.strip_prefix(name).and_then(|rest| rest.strip_prefix('.')) {
                insert(&mut map, member, param.value.clone());
            }
        }
        if map.is_empty() {
            return Err(Some(did_you_mean(
                name,
                self.values.iter().map(|param| param.name.as_str()),
                "parameters",
            )));
        }
        Ok(Value::Mapping(map))
    }

    fn environment(&mut self, name: &str) -> Option<String> {
        (self.environment)(name)
    }

    fn spend(&mut self, bytes: usize) -> bool {
        let taken = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes));
        taken.is_ok()
    }
}

/// Inserts at a path with dots, making maps on the way.
fn insert(map: &mut Mapping, name: &str, value: Value) {
    match name.split_once('.') {
        None => {
            map.insert(Value::from(name), value);
        }
        Some((head, rest)) => {
            let inner = map
                .entry(Value::from(head))
                .or_insert_with(|| Value::Mapping(Mapping::new()));
            if let Value::Mapping(inner) = inner {
                insert(inner, rest, value);
            }
        }
    }
}
