//! The stage kinds that a binary knows, without their types.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::Arc;

use crate::context::Context;
use crate::inputs::{InputPort, Inputs, OutputPort};
use crate::kind::{Body, Kind, Shape};
use crate::url_settings;
use flow_base::error::StageError;
use flow_base::partition::Partition;
use flow_base::reject::ID_COLUMN;
use flow_base::suggest::did_you_mean;
use flow_base::url_use::UrlUse;
use flow_base::yaml::{self, Mapping, TypedError, Value};
use flow_storage::Storage;
use flow_store::Artifact;

/// A stage kind without its type: what the list in the binary holds.
pub trait AnyKind: Send + Sync {
    fn name(&self) -> &'static str;
    fn version(&self) -> u32;
    /// See [`Kind::INPUTS`].
    fn inputs(&self) -> &'static [InputPort];
    /// See [`Kind::OUTPUTS`].
    fn outputs(&self) -> &'static [OutputPort];
    /// See [`Kind::SQL_SETTINGS`].
    fn sql_settings(&self) -> &'static [&'static str];
    /// See [`Kind::URL_SETTINGS`].
    fn url_settings(&self) -> &'static [(&'static str, UrlUse)] {
        &[]
    }
    /// The JSON schema of the kind's settings.
    fn schema(&self) -> serde_json::Value;
    /// The kind's doc text: the doc comment of its settings struct.
    fn docs(&self) -> String;
    /// Reads the settings of one stage, after parameters were put in.
    fn parse(&self, with: &Value, storage: &Storage) -> Result<Arc<dyn AnySettings>, TypedError>;
}

/// The settings of one stage, read and typed; they know their kind.
pub trait AnySettings: Send + Sync {
    fn shape(&self, inputs: &Inputs) -> Result<Shape, StageError>;
    fn open(&self, context: &Context) -> Result<Body, StageError>;
    /// See [`Kind::sources`].
    fn sources(&self) -> Vec<(&'static str, PathBuf)>;
    /// See [`Kind::ready`].
    fn ready(&self, storage: &Storage) -> Result<(), StageError>;
    /// See [`Kind::spreads`].
    fn spreads(&self, processes: usize) -> Result<bool, StageError>;
    /// The settings that decide the output bytes, with the keys of every map sorted.
    fn identity(&self) -> serde_json::Value;
    /// All settings, defaults filled in, with the keys of every map sorted.
    fn all(&self) -> serde_json::Value;
    /// See [`Kind::missing_outputs`].
    fn missing_outputs(
        &self,
        storage: &Storage,
        committed: &Artifact,
        threads: usize,
    ) -> Result<BTreeMap<Partition, String>, StageError>;
}

/// A kind as an entry for a list of kinds: `kind::<ManifestScan>()`.
pub fn kind<K: Kind>() -> Box<dyn AnyKind> {
    Box::new(Typed::<K>(PhantomData))
}

struct Typed<K: Kind>(PhantomData<fn() -> K>);

struct TypedSettings<K: Kind>(K::Settings);

impl<K: Kind> AnyKind for Typed<K> {
    fn name(&self) -> &'static str {
        K::NAME
    }

    fn version(&self) -> u32 {
        K::VERSION
    }

    fn inputs(&self) -> &'static [InputPort] {
        K::INPUTS
    }

    fn outputs(&self) -> &'static [OutputPort] {
        K::OUTPUTS
    }

    fn sql_settings(&self) -> &'static [&'static str] {
        K::SQL_SETTINGS
    }

    fn url_settings(&self) -> &'static [(&'static str, UrlUse)] {
        K::URL_SETTINGS
    }

    fn schema(&self) -> serde_json::Value {
        schemars::generate::SchemaSettings::draft2020_12()
            .into_generator()
            .into_root_schema_for::<K::Settings>()
            .to_value()
    }

    fn docs(&self) -> String {
        let schema = self.schema();
        schema
            .get("description")
            .and_then(|text| text.as_str())
            .unwrap_or_default()
            .to_string()
    }

    fn parse(&self, with: &Value, storage: &Storage) -> Result<Arc<dyn AnySettings>, TypedError> {
        let settings: Result<K::Settings, TypedError> = match with {
            Value::Null => yaml::typed(&Value::Mapping(Mapping::new())),
            other => yaml::typed(other),
        };
        let mut settings = match (settings, url_settings::refused(with, K::URL_SETTINGS, K::SQL_SETTINGS)) {
            (Err(unknown), _) if unknown.part == yaml::Part::Key => return Err(unknown),
            (_, Some(refused)) => return Err(refused),
            (settings, None) => settings?,
        };
        K::set_storage(&mut settings, storage);
        Ok(Arc::new(TypedSettings::<K>(settings)))
    }
}

impl<K: Kind> AnySettings for TypedSettings<K> {
    fn shape(&self, inputs: &Inputs) -> Result<Shape, StageError> {
        K::shape(&self.0, inputs)
    }

    fn open(&self, context: &Context) -> Result<Body, StageError> {
        K::open(&self.0, context)
    }

    fn sources(&self) -> Vec<(&'static str, PathBuf)> {
        K::sources(&self.0)
    }

    fn ready(&self, storage: &Storage) -> Result<(), StageError> {
        K::ready(&self.0, storage)
    }

    fn spreads(&self, processes: usize) -> Result<bool, StageError> {
        K::spreads(&self.0, processes)
    }

    fn identity(&self) -> serde_json::Value {
        sorted(K::identity(&self.0))
    }

    fn all(&self) -> serde_json::Value {
        sorted(serde_json::to_value(&self.0).unwrap_or(serde_json::Value::Null))
    }

    fn missing_outputs(
        &self,
        storage: &Storage,
        committed: &Artifact,
        threads: usize,
    ) -> Result<BTreeMap<Partition, String>, StageError> {
        K::missing_outputs(&self.0, storage, committed, threads)
    }
}

/// Sorts the keys of every map, so that neither the order of struct fields nor that of a hash map reaches
/// a recipe.
fn sorted(value: serde_json::Value) -> serde_json::Value {
    match value {
        serde_json::Value::Object(map) => {
            let ordered: BTreeMap<String, serde_json::Value> =
                map.into_iter().map(|(key, value)| (key, sorted(value))).collect();
            serde_json::Value::Object(ordered.into_iter().collect())
        }
        serde_json::Value::Array(items) => serde_json::Value::Array(items.into_iter().map(sorted).collect()),
        other => other,
    }
}

/// Two kinds of one name were registered.
#[derive(Debug, thiserror::Error)]
#[error("two stage kinds are called `{0}`; each name may be registered once")]
pub struct DuplicateKind(pub String);

/// All kinds of a binary, by name.
pub struct Registry {
    kinds: BTreeMap<&'static str, Arc<dyn AnyKind>>,
    id_column: &'static str,
    storage: Storage,
}

impl Default for Registry {
    fn default() -> Self {
        Registry {
            kinds: BTreeMap::new(),
            id_column: ID_COLUMN,
            storage: Storage::default(),
        }
    }
}

impl Registry {
    pub fn new(kinds: Vec<Box<dyn AnyKind>>) -> Result<Self, DuplicateKind> {
        let mut by_name: BTreeMap<&'static str, Arc<dyn AnyKind>> = BTreeMap::new();
        for kind in kinds {
            let name = kind.name();
            if by_name.insert(name, Arc::from(kind)).is_some() {
                return Err(DuplicateKind(name.to_string()));
            }
        }
        Ok(Registry {
            kinds: by_name,
            ..Registry::default()
        })
    }

    /// Says which column of texts names a row, in the rows of all kinds that have it; `id` if nothing is said. Rejects have a
    /// column of this name.
    pub fn with_id_column(mut self, id_column: &'static str) -> Self {
        self.id_column = id_column;
        self
    }

    /// Says with which object storage settings are checked ([`Kind::set_storage`]). Without it, no bucket can be read.
    pub fn with_storage(mut self, storage: &Storage) -> Self {
        self.storage = storage.clone();
        self
    }

    /// See [`Registry::with_storage`].
    pub fn storage(&self) -> &Storage {
        &self.storage
    }

    /// See [`Registry::with_id_column`].
    pub fn id_column(&self) -> &'static str {
        self.id_column
    }

    pub fn get(&self, name: &str) -> Option<&Arc<dyn AnyKind>> {
        self.kinds.get(name)
    }

    /// All kinds, sorted by name.
    pub fn kinds(&self) -> impl Iterator<Item = &Arc<dyn AnyKind>> {
        self.kinds.values()
    }

    /// The help for the name of a kind that does not exist.
    pub fn suggest(&self, name: &str) -> String {
        did_you_mean(name, self.kinds.keys().copied(), "kinds")
    }

    /// Mistakes in the declarations of the registered kinds; a test of the binary requires that there are none.
    ///
    /// Settings must refuse unknown keys (`#[serde(deny_unknown_fields)]`) on every level, every setting
    /// needs a doc comment, and so does the settings struct as a whole.
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        for kind in self.kinds() {
            let name = kind.name();
            // A kind of SQL may be one word.
            let named = match name.split_once('.') {
                Some((area, verb)) => is_lower_name(area) && is_lower_name(verb),
                None => is_lower_name(name) && !kind.sql_settings().is_empty(),
            };
            if !named {
                faults.push(format!("{name}: a kind is named `area.verb` in lower case"));
            }
            if kind.docs().trim().is_empty() {
                faults.push(format!("{name}: its settings struct has no doc comment"));
            }
            let schema = kind.schema();
            for (setting, _) in kind.url_settings() {
                if schema["properties"].get(setting).is_none() {
                    faults.push(format!("{name}: it has no setting `{setting}`, which may be a URL"));
                }
            }
            schema_faults(name, &schema, false, &mut faults);
            port_faults(kind.as_ref(), &mut faults);
        }
        faults
    }
}

fn port_faults(kind: &dyn AnyKind, faults: &mut Vec<String>) {
    let inputs = kind.inputs().iter().map(|port| ("input", port.name, port.doc));
    let outputs = kind.outputs().iter().map(|port| ("output", port.name, port.doc));
    let mut seen = std::collections::BTreeSet::new();
    for (what, name, doc) in inputs.chain(outputs) {
        if !is_lower_name(name) || !seen.insert((what, name)) {
            faults.push(format!(
                "{}: the {what} `{name}` needs a name of its own in lower case",
                kind.name()
            ));
        }
        if doc.trim().is_empty() {
            faults.push(format!("{}: the {what} `{name}` has no doc text", kind.name()));
        }
    }
    if kind.inputs().iter().filter(|port| port.is_many()).count() > 1 {
        faults.push(format!(
            "{}: only one input may be given under several names",
            kind.name()
        ));
    }
}

fn is_lower_name(text: &str) -> bool {
    !text.is_empty()
        && text
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
}

/// `is_choice`: whether the schema is one of several, of which a value fits one.
fn schema_faults(at: &str, schema: &serde_json::Value, is_choice: bool, faults: &mut Vec<String>) {
    match schema {
        serde_json::Value::Object(map) => {
            if let Some(properties) = map.get("properties").and_then(|p| p.as_object()) {
                if map.get("additionalProperties") != Some(&serde_json::Value::Bool(false)) {
                    faults.push(format!(
                        "{at}: its settings take unknown keys; add #[serde(deny_unknown_fields)]"
                    ));
                }
                // A variant of an enum: the only property is its name, and the object has the description.
                let is_variant = is_choice && properties.len() == 1 && map.contains_key("description");
                for (name, property) in properties {
                    if property.get("description").is_none() && !is_variant {
                        faults.push(format!("{at}.{name}: no doc comment"));
                    }
                }
            }
            for (key, inner) in map {
                let at = if matches!(
                    key.as_str(),
                    "properties" | "$defs" | "items" | "anyOf" | "oneOf" | "allOf"
                ) {
                    at.to_string()
                } else {
                    format!("{at}.{key}")
                };
                schema_faults(&at, inner, matches!(key.as_str(), "anyOf" | "oneOf"), faults);
            }
        }
        serde_json::Value::Array(items) => {
            for inner in items {
                schema_faults(at, inner, is_choice, faults);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::{Deserialize, Serialize};

    struct Strict;
    struct Lax;
    struct One;

    /// Settings that refuse unknown keys.
    #[derive(Clone, Serialize, Deserialize, schemars::JsonSchema)]
    #[serde(deny_unknown_fields, default)]
    struct StrictSettings {
        /// A share.
        share: f64,
        /// Names, for nothing.
        names: std::collections::HashMap<String, u32>,
    }

    impl Default for StrictSettings {
        fn default() -> Self {
            StrictSettings {
                share: 0.5,
                names: ["b", "a", "d", "c"].iter().map(|n| (n.to_string(), 1)).collect(),
            }
        }
    }

    #[derive(Clone, Serialize, Deserialize, schemars::JsonSchema)]
    struct LaxSettings {
        share: f64,
    }

    /// One setting, which has no description.
    #[derive(Clone, Serialize, Deserialize, schemars::JsonSchema)]
    #[serde(deny_unknown_fields)]
    struct OneSettings {
        share: f64,
    }

    macro_rules! toy {
        ($kind:ident, $name:literal, $settings:ident) => {
            impl Kind for $kind {
                const NAME: &'static str = $name;
                const VERSION: u32 = 1;
                const INPUTS: &'static [InputPort] = &[];
                const OUTPUTS: &'static [OutputPort] = &[];
                type Settings = $settings;
                fn shape(_: &$settings, _: &Inputs) -> Result<Shape, StageError> {
                    Ok(Shape::local(Vec::new()))
                }
                fn open(_: &$settings, _: &Context) -> Result<Body, StageError> {
                    Err(StageError::failed("not needed here"))
                }
            }
        };
    }
    toy!(Strict, "toy.strict", StrictSettings);
    toy!(Lax, "toy", LaxSettings);
    toy!(One, "toy.one", OneSettings);

    #[test]
    fn identity_does_not_depend_on_the_order_of_a_hash_map() {
        let parsed = kind::<Strict>().parse(&Value::Null, &Storage::default()).unwrap();
        assert_eq!(
            parsed.identity().to_string(),
            r#"{"names":{"a":1,"b":1,"c":1,"d":1},"share":0.5}"#
        );
    }

    #[test]
    fn lax_settings_are_found_out() {
        assert_eq!(
            Registry::new(vec![kind::<Strict>()]).unwrap().faults(),
            Vec::<String>::new()
        );
        let faults = Registry::new(vec![kind::<One>()]).unwrap().faults();
        assert_eq!(faults, ["toy.one.share: no doc comment"]);
        let faults = Registry::new(vec![kind::<Lax>()]).unwrap().faults();
        assert_eq!(
            faults,
            [
                "toy: a kind is named `area.verb` in lower case",
                "toy: its settings struct has no doc comment",
                "toy: its settings take unknown keys; add #[serde(deny_unknown_fields)]",
                "toy.share: no doc comment",
            ]
        );
    }

    #[test]
    fn one_name_once() {
        assert!(Registry::new(vec![kind::<Strict>(), kind::<Strict>()]).is_err());
    }

    #[test]
    fn an_unknown_setting_is_named_with_its_path() {
        let Err(error) = kind::<Strict>().parse(&yaml::parse_text("{shair: 1}").unwrap(), &Storage::default()) else {
            panic!("accepted")
        };
        assert_eq!(error.steps.to_string(), "shair");
        assert_eq!(error.message, "unknown setting `shair`");
        assert_eq!(error.help.as_deref(), Some("did you mean `share`?"));
    }
}
