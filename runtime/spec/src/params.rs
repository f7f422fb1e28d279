//! Parameters of a pipeline: what the file declares, what overlays and the command line give, and the
//! values that come out.
//!
//! `params` holds values (`min_quality: 0.5`), long forms (`shards: {default: data, help: ...}`,
//! `folder: {required: true}`) and groups of these (`train: {max_steps: 100}`), whose members are named with
//! dots: `train.max_steps`.

mod fit;
mod resolve;
mod secrets;
mod unknown;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::diagnostic::Diagnostic;
use super::source::{Place, SourceFile};
use super::substitute;
use super::yaml::{self, Mapping, Part, Steps, Value};
use fit::{check_finite, fit, has_reference};
use flow_base::secret::Secrets;
use flow_base::suggest::did_you_mean;
pub(super) use {fit::brief, fit::place_of_not_finite, resolve::Scope};

/// Reads an environment variable.
pub type Environment = Arc<dyn Fn(&str) -> Option<String> + Send + Sync>;

/// Names of parameters in other programs, without groups and in lower case, beside the last parts of our parameters' names.
/// Names are separated by spaces.
#[derive(Clone, Copy, Debug, Default)]
pub struct UsualNames {
    /// Ours, and those that mean the same: `("lr phase1_lr", "learning_rate max_lr")`.
    pub same: &'static [(&'static str, &'static str)],
    /// What is different here, our parameters that come nearest, if any, and those that mean what we do not have.
    pub near: &'static [(&'static str, &'static str, &'static str)],
}

/// What a user gives besides the pipeline file.
#[derive(Clone)]
pub struct Overrides {
    /// Overlay files, applied in order.
    pub configs: Vec<PathBuf>,
    /// `name=value`, applied after the overlays, in order.
    pub set: Vec<String>,
    pub environment: Environment,
    /// For the help where a parameter is unknown.
    pub usual_names: UsualNames,
}

impl Default for Overrides {
    fn default() -> Self {
        Overrides {
            configs: Vec::new(),
            set: Vec::new(),
            environment: Arc::new(|name| std::env::var(name).ok()),
            usual_names: UsualNames::default(),
        }
    }
}

/// One parameter with the value it has in this run.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamValue {
    /// With dots: `train.max_steps`.
    pub name: String,
    pub value: Value,
    pub default: Option<Value>,
    pub help: Option<String>,
    /// Where the value came from, in words: `--set min_quality=1`.
    pub given_by: String,
}

/// Where a value was given.
#[derive(Clone)]
pub(super) struct Given {
    pub by: String,
    pub place: Option<Place>,
    /// Whether it is in a pipeline, and not in an overlay or on the command line.
    pub by_pipeline: bool,
}

impl Given {
    fn wrong(&self, message: String) -> Diagnostic {
        match &self.place {
            Some(place) => Diagnostic::new(message).at(place.clone()),
            None => Diagnostic::new(format!("{}: {message}", self.by)),
        }
    }
}

struct Param {
    name: String,
    default: Option<Value>,
    help: Option<String>,
    /// Before references in it were put in.
    raw: Option<Value>,
    /// Its value is shown nowhere.
    secret: bool,
    /// The least and the largest number that its value may be.
    range: Option<[f64; 2]>,
    given: Given,
    declared_at: Place,
    /// The group of whose pipeline it is, if it was not declared in the file itself.
    inherited_by: Option<String>,
}

/// A parameter that two groups would inherit with different defaults.
pub(super) struct Conflict {
    pub param: String,
    /// The group that had it first.
    pub other: String,
    /// That group's default, and that of the other.
    pub defaults: [String; 2],
}

/// The parameters of one pipeline file, in its order.
#[derive(Default)]
pub(super) struct Params {
    params: Vec<Param>,
    /// The value of `${file_dir}`.
    file_dir: String,
    usual_names: UsualNames,
    secrets: Secrets,
    /// Files that contain values of secrets as text, or may contain them under a misspelt name.
    files_with_secrets: BTreeSet<PathBuf>,
}

/// A map of values that an overlay, a test or an include gives.
pub(super) struct GivenMap<'a> {
    pub map: &'a Mapping,
    pub source: &'a Arc<SourceFile>,
    /// Path of the map in its file.
    pub steps: Steps,
    /// What gives the values, in words.
    pub by: String,
    /// Of an include or a test, the head of its pipeline file before references were put in.
    pub written: Option<&'a Mapping>,
}

/// The reference that is replaced by the folder of the file that contains it.
pub(super) const FILE_DIR: &str = "file_dir";

/// Characters of a value of the command line that are shown.
const SHOWN: usize = 200;

const LONG_FORM: [&str; 5] = ["default", "help", "required", "secret", "range"];

/// Whether a map describes a parameter, and is no group of parameters.
fn is_long_form(map: &Mapping) -> bool {
    let describes = |word: &&str| match *word {
        // A parameter of a group may have this name.
        "secret" => map.get("secret").is_some_and(Value::is_bool),
        "range" => false,
        word => map.contains_key(word),
    };
    LONG_FORM.iter().any(describes)
}

impl Params {
    pub fn declare(
        source: &Arc<SourceFile>,
        declared: &Value,
        usual_names: UsualNames,
        found: &mut Vec<Diagnostic>,
    ) -> Params {
        let mut params = Params {
            file_dir: file_dir(&source.path),
            usual_names,
            ..Params::default()
        };
        let steps = Steps::default().key("params");
        match declared {
            Value::Null => {}
            Value::Mapping(map) => params.declare_group(source, map, &steps, "", found),
            other => found.push(
                Diagnostic::new(format!(
                    "`params` must be a map of parameters, found {}",
                    yaml::describe(other)
                ))
                .at(Place::of(source, &steps, Part::Value)),
            ),
        }
        params
    }

    /// Leaves out these parameters, and the members of groups of these names.
    pub fn leave_out(&mut self, names: &BTreeSet<String>) {
        self.params
            .retain(|param| !names.contains(param.name.split('.').next().unwrap_or_default()));
    }

    /// Takes over the parameters of the pipeline of `group` that are not declared here. References to `${file_dir}` in them are
    /// to the folder of their own file. A parameter that is declared here without help has theirs. Gives the names
    /// under which all of them are passed on to the group, and those that another group has with another default.
    pub fn inherit(&mut self, group: &str, of_group: Params) -> (Vec<String>, Vec<Conflict>) {
        let (mut passed_on, mut conflicts) = (Vec::new(), Vec::new());
        let folder = of_group.file_dir.clone();
        let mut taken = of_group.params;
        self.files_with_secrets.extend(of_group.files_with_secrets);
        for param in &mut taken {
            if !param.secret {
                for value in [&mut param.default, &mut param.raw].into_iter().flatten() {
                    self.put_file_dir(&param.name, value, &folder);
                }
            }
        }
        for mut param in taken {
            let is_below = |name: &str, of: &str| name.strip_prefix(of).is_some_and(|rest| rest.starts_with('.'));
            // One that is or holds it, or one that it holds.
            let own = self.params.iter_mut().find(|own| {
                own.name == param.name || is_below(&param.name, &own.name) || is_below(&own.name, &param.name)
            });
            let Some(own) = own else {
                passed_on.push(param.name.clone());
                param.inherited_by = Some(group.to_owned());
                self.params.push(param);
                continue;
            };
            if own.name == param.name && own.help.is_none() {
                own.help.clone_from(&param.help);
            }
            let name = match is_below(&param.name, &own.name) {
                true => own.name.clone(),
                false => param.name.clone(),
            };
            let is_same = own.name == param.name && own.default == param.default && own.secret == param.secret;
            if let Some(other) = own.inherited_by.as_ref().filter(|other| *other != group && !is_same) {
                conflicts.push(Conflict {
                    param: param.name.clone(),
                    other: other.clone(),
                    defaults: [&*own, &param].map(|param| match (&param.default, param.secret) {
                        (Some(default), false) => brief(default),
                        _ => "none".to_owned(),
                    }),
                });
            }
            if !passed_on.contains(&name) {
                passed_on.push(name);
            }
        }
        (passed_on, conflicts)
    }

    fn declare_group(
        &mut self,
        source: &Arc<SourceFile>,
        map: &Mapping,
        steps: &Steps,
        prefix: &str,
        found: &mut Vec<Diagnostic>,
    ) {
        for (key, value) in map {
            let Some(key) = key.as_str() else {
                found.push(
                    Diagnostic::new(format!(
                        "names of parameters must be text, found {}",
                        yaml::describe(key)
                    ))
                    .at(Place::of(source, steps, Part::Key)),
                );
                continue;
            };
            let here = steps.key(key);
            let place = |part| Place::of(source, &here, part);
            if !substitute::is_param_name(key) || key == "env" || key == FILE_DIR {
                found.push(
                    Diagnostic::new(format!(
                        "`{key}` cannot name a parameter: use letters, digits and `_` (`env` and `{FILE_DIR}` are taken)"
                    ))
                    .at(place(Part::Key)),
                );
                continue;
            }
            let name = format!("{prefix}{key}");
            match value {
                Value::Mapping(inner) if is_long_form(inner) => {
                    self.declare_long(source, inner, &here, name, found);
                }
                Value::Mapping(inner) if !inner.is_empty() => {
                    self.declare_group(source, inner, &here, &format!("{name}."), found)
                }
                value => self.push(
                    Declared {
                        name,
                        default: Some(value.clone()),
                        help: None,
                        secret: false,
                        range: None,
                    },
                    place(Part::Value),
                    source,
                ),
            }
        }
    }

    fn declare_long(
        &mut self,
        source: &Arc<SourceFile>,
        form: &Mapping,
        here: &Steps,
        name: String,
        found: &mut Vec<Diagnostic>,
    ) {
        let mut wrong = |steps: &Steps, part, message: String, help: Option<String>| {
            found.push(Diagnostic {
                message,
                place: Some(Place::of(source, steps, part)),
                help,
            });
        };
        for (key, _) in form {
            match key.as_str() {
                Some(word) if LONG_FORM.contains(&word) => {}
                Some(word) => wrong(
                    &here.key(word),
                    Part::Key,
                    format!("parameter `{name}`: unknown key `{word}`"),
                    Some(did_you_mean(word, LONG_FORM, "keys")),
                ),
                None => wrong(
                    here,
                    Part::Value,
                    format!("parameter `{name}`: keys must be text"),
                    None,
                ),
            }
        }
        let help = match form.get("help") {
            None => None,
            Some(Value::String(text)) => Some(text.trim().to_string()),
            Some(other) => {
                wrong(
                    &here.key("help"),
                    Part::Value,
                    format!(
                        "parameter `{name}`: `help` must be text, found {}",
                        yaml::describe(other)
                    ),
                    None,
                );
                None
            }
        };
        let required = match form.get("required") {
            None => false,
            Some(Value::Bool(required)) => *required,
            Some(other) => {
                wrong(
                    &here.key("required"),
                    Part::Value,
                    format!(
                        "parameter `{name}`: `required` must be true or false, found {}",
                        yaml::describe(other)
                    ),
                    None,
                );
                true
            }
        };
        let secret = match form.get("secret") {
            None => false,
            Some(Value::Bool(secret)) => *secret,
            Some(other) => {
                let found = yaml::describe(other);
                let message = format!("parameter `{name}`: `secret` must be true or false, found {found}");
                wrong(&here.key("secret"), Part::Key, message, None);
                true
            }
        };
        let range = form.get("range").and_then(|range| {
            let ends = range.as_sequence().map(Vec::as_slice).unwrap_or_default();
            let ends: Vec<f64> = ends.iter().filter_map(Value::as_f64).collect();
            match ends[..] {
                [least, largest] if least <= largest => Some([least, largest]),
                _ => {
                    let message = format!("parameter `{name}`: `range` must be two numbers, the smaller one first");
                    wrong(&here.key("range"), Part::Value, message, None);
                    None
                }
            }
        });
        let mut default = form.get("default").cloned();
        let reads_environment = |default: &Value| default.as_str().is_some_and(substitute::is_lone_environment);
        if let (true, Some(written)) = (secret, &default)
            && !written.is_null()
            && !reads_environment(written)
        {
            let message = format!("parameter `{name}` is secret, so a pipeline file cannot contain its value");
            let help =
                "write `default: ${env:NAME}`, `default: null` where it need not be given, or no default".to_string();
            wrong(here, Part::Key, message, Some(help));
            self.files_with_secrets.insert(source.path.clone());
            default = Some(Value::Null);
        }
        match (&default, required) {
            (Some(_), true) => wrong(
                &here.key("required"),
                Part::Key,
                format!("parameter `{name}` has a default, so it cannot be required"),
                None,
            ),
            // It has to be given.
            (None, false) if secret => {}
            (None, false) => {
                wrong(
                    here,
                    Part::Key,
                    format!("parameter `{name}` has neither a `default` nor `required: true`"),
                    None,
                );
                // Marked as wrong, so that no further error is reported for it.
                default = Some(Value::Null);
            }
            _ => {}
        }
        let place = match default {
            Some(_) if !secret => Place::of(source, &here.key("default"), Part::Value),
            _ => Place::of(source, here, Part::Key),
        };
        let declared = Declared {
            name,
            default,
            help,
            secret,
            range,
        };
        self.push(declared, place, source);
    }

    fn push(&mut self, declared: Declared, declared_at: Place, source: &SourceFile) {
        let Declared {
            name,
            default,
            help,
            secret,
            range,
        } = declared;
        let given = Given {
            by: format!("its default in {}", source.path.display()),
            place: Some(declared_at.clone()),
            by_pipeline: true,
        };
        self.params.push(Param {
            name,
            raw: default.clone(),
            default,
            help,
            secret,
            range,
            given,
            declared_at,
            inherited_by: None,
        });
    }

    /// Gives values from an overlay or an include: a map of values, nested like the declaration.
    pub fn give_map(&mut self, given: &GivenMap<'_>, found: &mut Vec<Diagnostic>) {
        self.give_below("", given, given.map, &given.steps, found);
    }

    /// Gives the values of a map within a map, at `steps` in the file.
    fn give_below(
        &mut self,
        prefix: &str,
        all: &GivenMap<'_>,
        map: &Mapping,
        steps: &Steps,
        found: &mut Vec<Diagnostic>,
    ) {
        let source = all.source;
        for (key, value) in map {
            let Some(key) = key.as_str() else {
                self.may_stand_in(source);
                found.push(Diagnostic::new("names of parameters must be text").at(Place::of(
                    source,
                    steps,
                    Part::Value,
                )));
                continue;
            };
            let (name, here) = (format!("{prefix}{key}"), steps.key(key));
            if self.is_group(&name) {
                match value {
                    Value::Mapping(inner) => self.give_below(&format!("{name}."), all, inner, &here, found),
                    other => {
                        self.may_stand_in_as(&name, source);
                        let place = Place::of(source, &here, Part::Value);
                        found.push(self.group_needs_members(&name, other).at(place));
                    }
                }
                continue;
            }
            // A message would show the line.
            let shown = !self.is_secret(&name);
            let given = Given {
                by: all.by.clone(),
                place: shown.then(|| Place::of(source, &here, Part::Value)),
                by_pipeline: all.written.is_some(),
            };
            let mut value = value.clone();
            if !shown && !value.is_null() && !substitute::is_secret(&value) {
                let from_environment = all.written.and_then(|root| lone_environment_at(root, &here));
                match (from_environment, all.written) {
                    // As text, also where it looks like a number.
                    (Some(reference), _) => value = Value::from(reference),
                    (None, None) => {
                        self.files_with_secrets.insert(source.path.clone());
                    }
                    (None, Some(_)) => {
                        self.files_with_secrets.insert(source.path.clone());
                        let message =
                            format!("parameter `{name}` is secret, so a pipeline file cannot contain its value");
                        found.push(
                            given
                                .wrong(message)
                                .help("give it `${env:NAME}`, or a parameter that is secret, too"),
                        );
                        // Marked as wrong, so that no further error is reported for it.
                        if let Some((index, _)) = self.find(&name) {
                            self.params[index].raw = Some(Value::Null);
                        }
                        continue;
                    }
                }
            }
            match self.give(&name, value, given) {
                Ok(()) => {}
                Err(Refusal::Unknown(help)) => {
                    self.may_stand_in_as(&name, source);
                    found.push(
                        Diagnostic::new(format!("unknown parameter `{name}`"))
                            .at(Place::of(source, &here, Part::Key))
                            .help(help),
                    );
                }
                Err(Refusal::Wrong(diagnostic)) => found.push(diagnostic),
            }
        }
    }

    /// Gives a value in the form `name=value` of the command line.
    pub fn give_text(&mut self, argument: &str, found: &mut Vec<Diagnostic>) {
        let split = argument.split_once('=');
        let shown = without_users(argument);
        let by = match (split, shown.char_indices().nth(SHOWN)) {
            (Some((name, _)), _) if self.may_be_secret(name.trim()) => format!("--set {}=***", name.trim()),
            (_, Some((end, _))) => format!("--set {}…", &shown[..end]),
            (_, None) => format!("--set {shown}"),
        };
        let Some((name, text)) = split else {
            found.push(Diagnostic::new(format!("{by}: expected NAME=VALUE")));
            return;
        };
        let name = name.trim();
        if self.is_group(name) {
            found.push(self.group_needs_members(name, &Value::String(text.to_string())));
            return;
        }
        let value = match self.declared(name) {
            _ if self.is_secret(name) => Value::String(text.to_string()),
            // A text parameter takes the text unchanged, so that `--set shards=0042` is a folder.
            Some(Value::String(default)) if !substitute::is_lone_reference(default) => match yaml::parse_text(text) {
                Ok(Value::String(unquoted)) if text.starts_with(['"', '\'']) => Value::String(unquoted),
                _ => Value::String(text.to_string()),
            },
            _ => match yaml::parse_text(text) {
                Ok(value) => value,
                Err(error) => {
                    found.push(Diagnostic::new(format!("{by}: {}", error.message)));
                    return;
                }
            },
        };
        // Values of the command line have no file; their paths are relative to the current directory.
        let mut value = value;
        self.put_file_dir(name, &mut value, ".");
        match self.give(
            name,
            value,
            Given {
                by: by.clone(),
                place: None,
                by_pipeline: false,
            },
        ) {
            Ok(()) => {}
            Err(Refusal::Unknown(help)) => {
                found.push(Diagnostic::new(format!("{by}: unknown parameter `{name}`")).help(help))
            }
            Err(Refusal::Wrong(diagnostic)) => found.push(diagnostic),
        }
    }

    /// Puts the folder that `${file_dir}` represents into the texts of an overlay or of the command line: their values are
    /// resolved among the parameters of another file. `name` is the parameter that is given the value; empty for a map of all.
    /// Values of secrets may hold any characters, and stay as they are.
    pub fn put_file_dir(&self, name: &str, value: &mut Value, folder: &str) {
        if self.is_secret(name) {
            return;
        }
        match value {
            Value::String(text) => {
                if let Some(put_in) = substitute::with_file_dir(text, folder) {
                    *text = put_in;
                }
            }
            Value::Sequence(items) => items.iter_mut().for_each(|item| self.put_file_dir(name, item, folder)),
            Value::Mapping(map) => map.iter_mut().for_each(|(key, value)| {
                let key = key.as_str().unwrap_or_default();
                let inner = if name.is_empty() {
                    key.to_string()
                } else {
                    format!("{name}.{key}")
                };
                self.put_file_dir(&inner, value, folder);
            }),
            _ => {}
        }
    }

    fn is_group(&self, name: &str) -> bool {
        self.params
            .iter()
            .any(|param| param.name.strip_prefix(name).is_some_and(|rest| rest.starts_with('.')))
    }

    fn group_needs_members(&self, name: &str, value: &Value) -> Diagnostic {
        let members: Vec<&str> = self
            .params
            .iter()
            .map(|param| param.name.as_str())
            .filter(|member| member.starts_with(&format!("{name}.")))
            .collect();
        Diagnostic::new(format!(
            "`{name}` is a group of parameters and takes no value of its own, found {}",
            yaml::describe(value)
        ))
        .help(did_you_mean(name, members, "parameters in it"))
    }

    /// The default at `name`, which may be within a map that is a parameter's default.
    fn declared(&self, name: &str) -> Option<&Value> {
        let (index, inner) = self.find(name)?;
        inner.of(self.params[index].default.as_ref()?)
    }

    /// The parameter that holds `name`, and the path within its value.
    fn find(&self, name: &str) -> Option<(usize, Steps)> {
        self.params.iter().enumerate().find_map(|(index, param)| {
            let rest = name.strip_prefix(param.name.as_str())?;
            match rest.strip_prefix('.') {
                None if rest.is_empty() => Some((index, Steps::default())),
                Some(inner) if !inner.is_empty() => Some((index, Steps::parse(inner))),
                _ => None,
            }
        })
    }

    fn give(&mut self, name: &str, value: Value, given: Given) -> Result<(), Refusal> {
        let Some((index, inner)) = self.find(name) else {
            return Err(Refusal::Unknown(self.suggest(name)));
        };
        let param = &mut self.params[index];
        let value = inner.0.iter().rev().fold(value, |value, step| match step {
            yaml::Step::Key(key) => Value::Mapping(Mapping::from_iter([(Value::from(key.clone()), value)])),
            // No map has a key of this form, so the fit below refuses it.
            yaml::Step::Index(index) => {
                Value::Mapping(Mapping::from_iter([(Value::from(format!("[{index}]")), value)]))
            }
        });
        let fitted = match &param.default {
            // One that need not be given, of an including pipeline that was not given it either.
            Some(Value::Null) if param.secret && value.is_null() => Ok(value),
            _ if param.secret && !value.is_string() && !substitute::is_secret(&value) => {
                Err(format!("a secret is text, found {}", yaml::describe(&value)))
            }
            _ if param.secret => Ok(value),
            None => Ok(value),
            Some(_) if has_reference(&value) => Ok(value),
            // A map is merged into the present value, key by key.
            Some(default) => fit(default, param.raw.as_ref().unwrap_or(default), value),
        };
        let fitted = match given.by_pipeline {
            true => fitted,
            false => fitted.and_then(|value| check_finite(param.default.as_ref(), &value).map(|()| value)),
        };
        match fitted {
            Ok(value) => {
                param.raw = Some(value);
                param.given = given;
                Ok(())
            }
            Err(message) => Err(Refusal::Wrong(given.wrong(format!("parameter `{name}`: {message}")))),
        }
    }
}

/// The text at `steps` below the head of a file, where it is [`substitute::is_lone_environment`].
fn lone_environment_at<'a>(root: &'a Mapping, steps: &Steps) -> Option<&'a str> {
    let (first, rest) = steps.0.split_first()?;
    let yaml::Step::Key(first) = first else { return None };
    let text = Steps(rest.to_vec()).of(root.get(first.as_str())?)?.as_str()?;
    substitute::is_lone_environment(text).then_some(text)
}

/// The folder of a file: relative to the current directory if it is below, else absolute; symbolic links are
/// resolved, so that a `..` after it leads to the expected folder.
pub(super) fn file_dir(path: &Path) -> String {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    let Ok(folder) = parent.canonicalize() else {
        return parent.display().to_string();
    };
    let current = std::env::current_dir().and_then(|current| current.canonicalize());
    let below = current
        .ok()
        .and_then(|current| Some(folder.strip_prefix(current).ok()?.to_path_buf()));
    match below {
        Some(below) if below.as_os_str().is_empty() => ".".to_string(),
        Some(below) => below.display().to_string(),
        None => folder.display().to_string(),
    }
}

/// The declaration of a parameter in a pipeline file.
struct Declared {
    name: String,
    default: Option<Value>,
    help: Option<String>,
    secret: bool,
    range: Option<[f64; 2]>,
}

enum Refusal {
    Unknown(String),
    Wrong(Diagnostic),
}

/// The text with `***` for users and passwords of URLs in it: `https://***@host/path`.
fn without_users(text: &str) -> String {
    let mut parts = text.split("://");
    let mut shown = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        shown.push_str("://");
        let host = part.find(['/', '?', '#', ' ', '"', '\'']).unwrap_or(part.len());
        match part[..host].rfind('@') {
            Some(at) => {
                shown.push_str("***");
                shown.push_str(&part[at..]);
            }
            None => shown.push_str(part),
        }
    }
    shown
}
