//! Reads pipeline files, their includes and overlays.

mod document;
mod ports;
mod stage;
mod tests_of_pipeline;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::condition;
use super::connections::{Connections, connect};
use super::diagnostic::{Diagnostic, Diagnostics};
use super::edges::{Names, is_stage_name, order};
use super::params::{
    Environment, FILE_DIR, GivenMap, Overrides, ParamValue, Params, Scope, UsualNames, brief, file_dir,
};
use super::pipeline::{Pipeline, Stage};
use super::source::{Place, SourceFile};
use super::substitute::{self, Lookup, Problem, Taken};
use super::test_case::TestCase;
use super::yaml::{self, Mapping, Part, Steps, Value};
use document::{Document, MOST_DOCUMENTS, OVERLAY};
use flow_base::secret::Secrets;
use flow_base::suggest::did_you_mean;
use flow_kind::registry::Registry;
use stage::MERGE;

/// Reads a pipeline file with its includes and puts parameters in. Kinds that are not in `registry` are reported by
/// [`check`](fn@super::check).
pub fn load(path: &Path, overrides: &Overrides, registry: &Registry) -> Result<Pipeline, Diagnostics> {
    load_with(path, overrides, registry, None)
}

/// As [`load`], with the values that a test of the pipeline gives to parameters: over those of overlays, below those of
/// `--set`.
pub fn load_for_test(
    path: &Path,
    overrides: &Overrides,
    registry: &Registry,
    test: &TestCase,
) -> Result<Pipeline, Diagnostics> {
    load_with(path, overrides, registry, Some(test))
}

/// The values of a pipeline's parameters, with no more of the file read.
pub fn load_params(path: &Path, overrides: &Overrides) -> Result<Vec<ParamValue>, Diagnostics> {
    let no_kinds = Registry::default();
    let mut reader = Reader::new(&no_kinds, overrides);
    let values = reader.document(path, None, "a pipeline", &KEYS).map(|document| {
        let (mut params, _) = reader.declared(&document);
        reader.give(overrides, None, &mut params);
        reader.unshown.extend(params.files_with_secrets().iter().cloned());
        params.resolve(&overrides.environment, &mut reader.found).values
    });
    Diagnostics::unless_empty(reader.into_found(), values.unwrap_or_default())
}

/// Reads the tests of a pipeline file, and no more of it; not those of included files.
pub fn load_tests(path: &Path, registry: &Registry) -> Result<Vec<TestCase>, Diagnostics> {
    let mut reader = Reader::new(registry, &Overrides::default());
    let document = reader.document(path, None, "a pipeline", &KEYS);
    let tests = document.map(|document| {
        let tests = document.root.get("tests").unwrap_or(&Value::Null);
        reader.tests(&document, tests)
    });
    Diagnostics::unless_empty(reader.found, tests.unwrap_or_default())
}

fn load_with(
    path: &Path,
    overrides: &Overrides,
    registry: &Registry,
    test: Option<&TestCase>,
) -> Result<Pipeline, Diagnostics> {
    let mut reader = Reader::new(registry, overrides);
    let read = reader.pipeline(path, None, "", "", |reader, params| {
        reader.give(overrides, test, params)
    });
    let secrets = reader.secrets.clone();
    let connections = std::mem::take(&mut reader.connections);
    let mut found = reader.into_found();
    let Some(mut read) = read else {
        return Err(Diagnostics::sorted(found));
    };
    connect(&mut read.stages, connections, &mut found);
    let stages = order(read.stages, &mut found);
    let name = path.file_stem().map_or_else(
        || path.display().to_string(),
        |stem| stem.to_string_lossy().into_owned(),
    );
    Diagnostics::unless_empty(
        found,
        Pipeline {
            name,
            path: path.to_path_buf(),
            description: read.description,
            params: read.scope.values,
            stages,
            switched_off: Vec::new(),
            secrets,
        },
    )
}

/// Keys at the top level of a pipeline file, beside `flow`.
const KEYS: [&str; 7] = [
    "description",
    "params",
    "inputs",
    "include",
    "stages",
    "outputs",
    "tests",
];

/// In place of the `params` of a group: it has those of its pipeline, which become parameters of the one that includes it.
/// As `<<: inherit` beside values: all but those.
const INHERIT: &str = "inherit";

/// The names of parameters that a group is given in another way, where it inherits the others; none where it inherits nothing.
fn inherits_but(params: Option<&Value>) -> Option<BTreeSet<String>> {
    match params? {
        Value::String(word) if word == INHERIT => Some(BTreeSet::new()),
        Value::Mapping(map) if map.get(MERGE).and_then(Value::as_str) == Some(INHERIT) => {
            let names = map.keys().filter_map(Value::as_str).filter(|name| *name != MERGE);
            Some(names.map(str::to_owned).collect())
        }
        _ => None,
    }
}

/// The same for all paths of a file.
fn same_file(path: &Path) -> PathBuf {
    std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf())
}

/// A path of an included file, relative to the file that names it.
fn beside(source: &SourceFile, path: &str) -> PathBuf {
    let path = Path::new(&file_dir(&source.path)).join(path);
    path.strip_prefix(".").map(Path::to_path_buf).unwrap_or(path)
}

/// What a group with `params: inherit` is given.
enum Inherited {
    /// The values of these parameters.
    Names(Vec<String>),
    /// Which parameters it has cannot be known; the error was reported.
    Refused,
}

/// What a text may refer to before there are parameters.
struct BeforeParams {
    folder: String,
    environment: Environment,
    /// The first parameter that it refers to.
    param: Option<String>,
}

impl Lookup for BeforeParams {
    fn param(&mut self, name: &str) -> Result<Value, Option<String>> {
        if name == FILE_DIR {
            return Ok(Value::from(self.folder.as_str()));
        }
        self.param.get_or_insert_with(|| name.to_owned());
        Err(None)
    }

    fn environment(&mut self, name: &str) -> Option<String> {
        (self.environment)(name)
    }

    fn spend(&mut self, bytes: usize) -> bool {
        bytes <= substitute::ALL
    }
}

struct Reader<'r> {
    registry: &'r Registry,
    environment: Environment,
    usual_names: UsualNames,
    /// The files that are being read, outermost first: including one of them again is a cycle.
    open: Vec<(PathBuf, PathBuf)>,
    secrets: Secrets,
    connections: Connections,
    /// Files that contain the value of a secret, or may contain one.
    unshown: BTreeSet<PathBuf>,
    found: Vec<Diagnostic>,
    /// Files that were read so far, each as often as it is included.
    documents: usize,
}

struct Parts {
    description: Option<String>,
    scope: Scope,
    inputs: BTreeSet<String>,
    stages: Vec<Stage>,
}

impl<'r> Reader<'r> {
    fn new(registry: &'r Registry, overrides: &Overrides) -> Self {
        Reader {
            registry,
            environment: Arc::clone(&overrides.environment),
            usual_names: overrides.usual_names,
            open: Vec::new(),
            secrets: Secrets::default(),
            connections: Connections::new(),
            unshown: BTreeSet::new(),
            found: Vec::new(),
            documents: 0,
        }
    }

    /// The diagnostics, without the text of files that contain secrets.
    fn into_found(self) -> Vec<Diagnostic> {
        let mut found = self.found;
        if self.documents > MOST_DOCUMENTS {
            found.push(Diagnostic::new(format!(
                "the pipeline includes more than {MOST_DOCUMENTS} files, each counted as often as it is included"
            )));
        }
        for place in found.iter_mut().filter_map(|diagnostic| diagnostic.place.as_mut()) {
            if self.unshown.contains(&place.source.path) {
                place.is_shown = false;
            }
        }
        found
    }
}

impl Reader<'_> {
    /// Gives parameters the values of overlays, of a test and of the command line, later ones winning.
    fn give(&mut self, overrides: &Overrides, test: Option<&TestCase>, params: &mut Params) {
        for config in &overrides.configs {
            self.overlay(config, params);
        }
        if let Some(test) = test {
            let (source, steps) = (&test.origin.source, test.origin.steps.key("params"));
            let by = format!("test `{}` in {}", test.name, source.path.display());
            // The file, as far as it holds these values.
            let values = Value::Mapping(test.params.clone());
            let root = steps.0.iter().rev().fold(values, |value, step| match step {
                yaml::Step::Key(key) => Value::Mapping(Mapping::from_iter([(Value::from(key.clone()), value)])),
                yaml::Step::Index(_) => value,
            });
            let given = GivenMap {
                map: &test.params,
                source,
                steps,
                by,
                written: root.as_mapping(),
            };
            params.give_map(&given, &mut self.found);
        }
        for argument in &overrides.set {
            params.give_text(argument, &mut self.found);
        }
    }

    /// `included_at` is where an include names the file; `group` is put before the names of its stages, `of` before those of
    /// its inputs and outputs; `give` gives the parameters their values.
    fn pipeline(
        &mut self,
        path: &Path,
        included_at: Option<Place>,
        group: &str,
        of: &str,
        give: impl FnOnce(&mut Reader<'_>, &mut Params),
    ) -> Option<Parts> {
        let same_file = same_file(path);
        if let Some(start) = self.open.iter().position(|(open, _)| *open == same_file) {
            let chain: Vec<String> = self.open[start..]
                .iter()
                .map(|(_, shown)| shown)
                .chain([&path.to_path_buf()])
                .map(|shown| shown.display().to_string())
                .collect();
            self.found.push(Diagnostic {
                message: format!("pipelines include each other in a circle: {}", chain.join(" -> ")),
                place: included_at,
                help: None,
            });
            return None;
        }
        let document = self.document(path, included_at, "a pipeline", &KEYS)?;
        self.open.push((same_file, path.to_path_buf()));
        let null = Value::Null;
        let entry = |key: &str| document.root.get(key).unwrap_or(&null);
        let (mut params, inherited) = self.declared(&document);
        params.keep_secrets_in(&self.secrets);
        give(self, &mut params);
        self.unshown.extend(params.files_with_secrets().iter().cloned());
        let environment = Arc::clone(&self.environment);
        let scope = params.resolve(&environment, &mut self.found);
        let description = match entry("description") {
            Value::Null => None,
            Value::String(text) => Some(text.trim().to_string()),
            other => {
                self.wrong(
                    document.at(&Steps::default().key("description"), Part::Value),
                    format!("`description` must be text, found {}", yaml::describe(other)),
                );
                None
            }
        };
        let is_included = self.open.len() > 1;
        let inputs = self.inputs(&document, entry("inputs"), of, is_included);
        let names = Names {
            group,
            inputs: &inputs,
            of,
        };
        let mut taken: BTreeMap<String, String> = inputs
            .iter()
            .map(|input| (input.clone(), "an input".to_string()))
            .collect();
        let mut stages = self.includes(&document, &inherited, &scope, names, &mut taken);
        stages.extend(self.stages(&document, entry("stages"), &scope, names, &taken));
        self.outputs(&document, entry("outputs"), names, &stages);
        // Tests run only with their own file, but their syntax is checked wherever the file is read.
        self.tests(&document, entry("tests"));
        if stages.is_empty() && self.found.is_empty() {
            self.found.push(
                Diagnostic::new("this pipeline has no stages")
                    .at(document.at(&Steps::default().key("stages"), Part::Key)),
            );
        }
        self.open.pop();
        Some(Parts {
            description,
            scope,
            inputs,
            stages,
        })
    }

    fn overlay(&mut self, path: &Path, params: &mut Params) {
        let Some(mut document) = self.document(path, None, OVERLAY, &["description", "params"]) else {
            if params.has_secrets() {
                self.unshown.insert(path.to_path_buf());
            }
            return;
        };
        // Values under other names may be meant for a secret, too.
        let is_misplaced = |(key, value): (&Value, &Value)| match key.as_str() {
            Some("params") => !matches!(value, Value::Null | Value::Mapping(_)),
            Some("flow" | "description") => false,
            _ => true,
        };
        if document.root.iter().any(is_misplaced) {
            params.may_stand_in(&document.source);
        }
        if let Some(values) = document.root.get_mut("params") {
            params.put_file_dir("", values, &file_dir(path));
        }
        let steps = Steps::default().key("params");
        match document.root.get("params") {
            None | Some(Value::Null) => {}
            Some(Value::Mapping(map)) => {
                let given = GivenMap {
                    map,
                    source: &document.source,
                    steps,
                    by: format!("--config {}", path.display()),
                    written: None,
                };
                params.give_map(&given, &mut self.found);
            }
            Some(other) => self.wrong(
                document.at(&steps, Part::Value),
                format!("`params` must be a map of values, found {}", yaml::describe(other)),
            ),
        }
    }

    /// The parameters that a pipeline declares, with those that it inherits; and by group that inherits, the names that it is
    /// given.
    fn declared(&mut self, document: &Document) -> (Params, BTreeMap<String, Inherited>) {
        self.declared_below(document, &mut vec![same_file(&document.source.path)])
    }

    /// `chain` are the files that led here. What is wrong with an included file is reported where it is included.
    fn declared_below(
        &mut self,
        document: &Document,
        chain: &mut Vec<PathBuf>,
    ) -> (Params, BTreeMap<String, Inherited>) {
        let declared = document.root.get("params").unwrap_or(&Value::Null);
        let mut params = Params::declare(&document.source, declared, self.usual_names, &mut self.found);
        let mut inherited = BTreeMap::new();
        let Some(Value::Mapping(groups)) = document.root.get("include") else {
            return (params, inherited);
        };
        for (name, entry) in groups {
            let (Some(name), Some(path)) = (name.as_str(), entry.get("pipeline").filter(|path| path.is_string()))
            else {
                continue;
            };
            let Some(but) = inherits_but(entry.get("params")) else {
                continue;
            };
            let here = Steps::default().key("include").key(name);
            let mut lookup = BeforeParams {
                folder: file_dir(&document.source.path),
                environment: Arc::clone(&self.environment),
                param: None,
            };
            let path = substitute::in_value(path, &here, &mut lookup, &mut Vec::new(), &mut Vec::new());
            if let Some(param) = lookup.param {
                let message = format!(
                    "group `{name}`: `pipeline` refers to the parameter `{param}`, and with `params: inherit` this file has to be \
                     read before there are parameters"
                );
                let help = "name the file, or list under `params` the parameters that are passed on".to_owned();
                self.wrong_with(document.at(&here.key("pipeline"), Part::Value), message, Some(help));
                inherited.insert(name.to_string(), Inherited::Refused);
                continue;
            }
            let Some(path) = path.as_str().map(|path| beside(&document.source, path)) else {
                continue;
            };
            if chain.contains(&same_file(&path)) {
                continue;
            }
            let found = self.found.len();
            let of_group = self.document(&path, None, "a pipeline", &KEYS).map(|included| {
                chain.push(same_file(&path));
                let (mut of_group, _) = self.declared_below(&included, chain);
                chain.pop();
                of_group.leave_out(&but);
                of_group
            });
            self.found.truncate(found);
            let Some(of_group) = of_group else { continue };
            let (names, conflicts) = params.inherit(name, of_group);
            for conflict in conflicts {
                let [one, other] = conflict.defaults;
                let message = format!(
                    "the groups `{}` and `{name}` inherit the parameter `{}` with different defaults ({one} and {other})",
                    conflict.other, conflict.param
                );
                let help = format!("declare `{}` under `params` of this file", conflict.param);
                self.wrong_with(document.at(&here.key("params"), Part::Value), message, Some(help));
            }
            inherited.insert(name.to_string(), Inherited::Names(names));
        }
        (params, inherited)
    }

    fn includes(
        &mut self,
        document: &Document,
        inherited: &BTreeMap<String, Inherited>,
        scope: &Scope,
        names: Names<'_>,
        taken: &mut BTreeMap<String, String>,
    ) -> Vec<Stage> {
        let group = names.group;
        let include = document.root.get("include").unwrap_or(&Value::Null);
        let steps = Steps::default().key("include");
        let mut stages = Vec::new();
        for (name, entry) in self.named_entries(document, include, &steps, "groups") {
            let here = steps.key(name);
            if let Some(what) = taken.insert(name.to_string(), "a group".to_string()) {
                let message = format!("`{name}` names both {what} and a group");
                self.wrong(document.at(&here, Part::Key), message);
            }
            let Value::Mapping(entry) = entry else {
                self.wrong(
                    document.at(&here, Part::Value),
                    format!(
                        "group `{name}`: expected `{{pipeline: FILE, params: {{...}}}}`, found {}",
                        yaml::describe(entry)
                    ),
                );
                continue;
            };
            self.unknown_keys(document, &here, entry, &["pipeline", "params", "from", "group", "when"]);
            if let Some(Inherited::Refused) = inherited.get(name) {
                continue;
            }
            let null = Value::Null;
            let entry = Value::Mapping(entry.clone());
            let part = |key: &str| Steps::default().key(key).of(&entry).unwrap_or(&null);
            let path = self.put_in(
                document,
                part("pipeline"),
                &here.key("pipeline"),
                scope,
                &mut Vec::new(),
            );
            let Value::String(path) = path else {
                if !path.is_null() || part("pipeline").is_null() {
                    self.wrong(
                        document.at(&here.key("pipeline"), Part::Value),
                        format!(
                            "group `{name}`: `pipeline` must name a file, found {}",
                            yaml::describe(&path)
                        ),
                    );
                }
                continue;
            };
            let when = Steps::default().key("when");
            let off = when
                .of(&entry)
                .and_then(|written| self.off(document, written, &here.key("when"), scope));
            let off = off.map(|when| format!("the group `{group}{name}` is switched off: {when}"));
            let given = match part("params") {
                Value::Sequence(names) => self.passed_on(document, names, &here.key("params"), scope),
                params if inherits_but(Some(params)).is_some() => {
                    let names = match inherited.get(name) {
                        Some(Inherited::Names(names)) => names.as_slice(),
                        _ => &[],
                    };
                    let names: Vec<Value> = names.iter().map(|name| Value::from(name.as_str())).collect();
                    let mut given = self.passed_on(document, &names, &here.key("params"), scope);
                    if let (Value::Mapping(params), Value::Mapping(given)) = (params, &mut given) {
                        let mut own = params.clone();
                        own.remove(MERGE);
                        let own = Value::Mapping(own);
                        let own = self.put_in(document, &own, &here.key("params"), scope, &mut Vec::new());
                        given.extend(own.as_mapping().cloned().unwrap_or_default());
                    }
                    given
                }
                params => self.put_in(document, params, &here.key("params"), scope, &mut Vec::new()),
            };
            let place = document.at(&here.key("pipeline"), Part::Value);
            let source = Arc::clone(&document.source);
            let path = beside(&document.source, &path);
            let of = format!("{group}{name}/");
            let is_group = self.is_group(document, name, part("group"), &here);
            let inputs = self.given_inputs(document, part("from"), &here, &of, names);
            let prefix = if is_group { of.as_str() } else { group };
            let read = self.pipeline(&path, Some(place), prefix, &of, |reader, params| match &given {
                Value::Null => {}
                Value::Mapping(map) => {
                    let given = GivenMap {
                        map,
                        source: &source,
                        steps: here.key("params"),
                        by: format!("include `{name}` in {}", source.path.display()),
                        written: Some(&document.root),
                    };
                    params.give_map(&given, &mut reader.found);
                }
                other => {
                    let place = Place::of(&source, &here.key("params"), Part::Value);
                    reader.found.push(
                        Diagnostic::new(format!(
                            "group `{name}`: `params` must be a map of values, found {}",
                            yaml::describe(other)
                        ))
                        .at(place),
                    );
                }
            });
            let Some(read) = read else { continue };
            for input in inputs.iter().filter(|input| !read.inputs.contains(*input)) {
                let message = format!("group `{name}`: {} has no input `{input}`", path.display());
                let help = did_you_mean(input, read.inputs.iter().map(String::as_str), "inputs");
                self.wrong_with(
                    document.at(&here.key("from").key(input), Part::Key),
                    message,
                    Some(help),
                );
            }
            if !is_group {
                self.take_names(document, name, &here, &read.stages, group, taken);
            }
            stages.extend(read.stages.into_iter().map(|mut stage| {
                // The outermost reason is reported.
                stage.off = off.clone().or(stage.off);
                stage
            }));
        }
        stages
    }

    /// Why `when` switches a stage or a group off; none where it holds or is wrong (which is reported).
    fn off(&mut self, document: &Document, when: &Value, steps: &Steps, scope: &Scope) -> Option<String> {
        let shown = match when {
            Value::Bool(true) => return None,
            Value::Bool(false) => "false".to_string(),
            Value::String(text) => {
                match condition::evaluate(text, &mut &*scope) {
                    Ok(true) => return None,
                    Ok(false) => {}
                    Err(mistake) => {
                        self.problems(
                            document,
                            vec![Problem {
                                steps: steps.clone(),
                                offset: mistake.offset,
                                message: mistake.message.map(|message| format!("`when`: {message}")),
                                help: mistake.help,
                            }],
                        );
                        return None;
                    }
                }
                text.split_whitespace().collect::<Vec<_>>().join(" ")
            }
            other => {
                let message = format!("`when` must be a condition, found {}", yaml::describe(other));
                let help = Some("such as `${manifest} == ''`".to_string());
                self.wrong_with(document.at(steps, Part::Value), message, help);
                return None;
            }
        };
        Some(format!("`when: {shown}` does not hold"))
    }

    /// Parameters that are passed on to an included pipeline under their own names: `params: [shards, out]`.
    fn passed_on(&mut self, document: &Document, names: &[Value], steps: &Steps, scope: &Scope) -> Value {
        let mut given = Mapping::new();
        for (index, name) in names.iter().enumerate() {
            let here = steps.index(index);
            let Some(name) = name.as_str() else {
                let message = format!("expected the name of a parameter, found {}", yaml::describe(name));
                self.wrong(document.at(&here, Part::Value), message);
                continue;
            };
            match (&mut &*scope).param(name) {
                Ok(value) => {
                    given.insert(Value::from(name), value);
                }
                Err(help) => {
                    let message = format!("unknown parameter `{name}`");
                    self.wrong_with(document.at(&here, Part::Value), message, help);
                }
            }
        }
        Value::Mapping(given)
    }

    /// A value with references put in; what goes wrong is reported.
    fn put_in(
        &mut self,
        document: &Document,
        value: &Value,
        steps: &Steps,
        scope: &Scope,
        taken: &mut Vec<Taken>,
    ) -> Value {
        let mut problems = Vec::new();
        let value = substitute::in_value(value, steps, &mut &*scope, &mut problems, taken);
        self.problems(document, problems);
        value
    }

    fn problems(&mut self, document: &Document, problems: Vec<Problem>) {
        for problem in problems {
            if let Some(message) = problem.message {
                let place = Place::within(&document.source, &problem.steps, problem.offset);
                self.found.push(Diagnostic {
                    message,
                    place: Some(place),
                    help: problem.help,
                });
            }
        }
    }

    /// The entries of `stages` or `include`, with proper names.
    fn named_entries<'v>(
        &mut self,
        document: &Document,
        value: &'v Value,
        steps: &Steps,
        what: &str,
    ) -> Vec<(&'v str, &'v Value)> {
        let map = match value {
            Value::Null => return Vec::new(),
            Value::Mapping(map) => map,
            other => {
                self.wrong(
                    document.at(steps, Part::Value),
                    format!("`{steps}` must be a map of {what}, found {}", yaml::describe(other)),
                );
                return Vec::new();
            }
        };
        let mut entries = Vec::new();
        for (key, entry) in map {
            match key.as_str() {
                Some(name) if is_stage_name(name) => entries.push((name, entry)),
                Some(name) => {
                    let message = format!(
                        "`{name}` cannot be a name here: use letters, digits, `_` and `-`, a letter first, 64 at most"
                    );
                    self.wrong(document.at(&steps.key(name), Part::Key), message);
                }
                None => self.wrong(
                    document.at(steps, Part::Key),
                    format!("names of {what} must be text, found {}", brief(key)),
                ),
            }
        }
        entries
    }

    fn unknown_keys(&mut self, document: &Document, steps: &Steps, map: &Mapping, known: &[&str]) {
        for key in map.keys() {
            match key.as_str() {
                Some(name) if known.contains(&name) => {}
                Some(name) => {
                    let help = did_you_mean(name, known.iter().copied(), "keys");
                    self.wrong_with(
                        document.at(&steps.key(name), Part::Key),
                        format!("unknown key `{name}`"),
                        Some(help),
                    );
                }
                None => self.wrong(
                    document.at(steps, Part::Value),
                    format!("keys must be text, found {}", brief(key)),
                ),
            }
        }
    }

    fn wrong(&mut self, place: Place, message: impl Into<String>) {
        self.wrong_with(place, message, None);
    }

    fn wrong_with(&mut self, place: Place, message: impl Into<String>, help: Option<String>) {
        self.found.push(Diagnostic {
            message: message.into(),
            place: Some(place),
            help,
        });
    }
}
