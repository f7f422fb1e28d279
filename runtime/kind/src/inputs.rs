//! The inputs of a stage: what a kind declares, and what `from` gives it.

use std::ops::Deref;
use std::sync::Arc;

use arrow::datatypes::{DataType, SchemaRef};

use flow_base::error::StageError;
use flow_base::suggest::{did_you_mean, nearest};

/// How often an input may be given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputCount {
    One,
    Optional,
    /// One or more, each under a name of its own: tables of a query, say.
    Many,
}

/// How a stage reads one input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// Batch by batch, partition by partition, through [`crate::Operator::batch`].
    Streamed,
    /// As a whole artifact, through [`crate::Context::required`], [`crate::Context::input`] or [`crate::Context::whole`]. The edge is then stored.
    Whole,
}

/// Types that a declared input may require of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColumnType {
    Text,
    /// Text in any encoding of Arrow's: large, as views, or as a dictionary.
    AnyText,
    Int32,
    Int64,
    UInt32,
    Float64,
    Binary,
    /// Numbers of any kind, with or without a fraction.
    Number,
    /// Any type; the kind checks it itself.
    Any,
}

impl ColumnType {
    pub fn fits(self, found: &DataType) -> bool {
        match self {
            ColumnType::Text => *found == DataType::Utf8,
            ColumnType::AnyText => match found {
                DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => true,
                DataType::Dictionary(_, value) => ColumnType::Text.fits(value),
                _ => false,
            },
            ColumnType::Int32 => *found == DataType::Int32,
            ColumnType::Int64 => *found == DataType::Int64,
            ColumnType::UInt32 => *found == DataType::UInt32,
            ColumnType::Float64 => *found == DataType::Float64,
            ColumnType::Binary => *found == DataType::Binary,
            ColumnType::Number => found.is_numeric(),
            ColumnType::Any => true,
        }
    }

    /// The name of the type in the reference pages.
    pub fn name(self) -> &'static str {
        match self {
            ColumnType::Text | ColumnType::AnyText => "text",
            ColumnType::Int32 => "int32",
            ColumnType::Int64 => "int64",
            ColumnType::UInt32 => "uint32",
            ColumnType::Float64 => "float64",
            ColumnType::Binary => "binary",
            ColumnType::Number => "number",
            ColumnType::Any => "any type",
        }
    }
}

/// An input that a kind declares: what `from` may name.
#[derive(Clone, Copy, Debug)]
pub struct InputPort {
    pub name: &'static str,
    pub count: InputCount,
    /// Sources and exports read all inputs whole, whatever this value.
    pub reads: Reads,
    /// Required columns. Those that settings name are checked by [`crate::Kind::shape`].
    pub columns: &'static [(&'static str, ColumnType)],
    /// For the reference page and for error messages: what it holds, and which kind gives it.
    pub doc: &'static str,
}

impl InputPort {
    pub const fn streamed(name: &'static str, doc: &'static str) -> Self {
        InputPort {
            name,
            count: InputCount::One,
            reads: Reads::Streamed,
            columns: &[],
            doc,
        }
    }

    pub const fn whole(name: &'static str, doc: &'static str) -> Self {
        InputPort {
            reads: Reads::Whole,
            ..InputPort::streamed(name, doc)
        }
    }

    pub const fn count(self, count: InputCount) -> Self {
        InputPort { count, ..self }
    }

    pub const fn optional(self) -> Self {
        self.count(InputCount::Optional)
    }

    pub const fn columns(self, columns: &'static [(&'static str, ColumnType)]) -> Self {
        InputPort { columns, ..self }
    }

    /// Whether several inputs, each with its own name, may be bound to it.
    pub fn is_many(&self) -> bool {
        self.count == InputCount::Many
    }

    fn is_required(&self) -> bool {
        matches!(self.count, InputCount::One | InputCount::Many)
    }

    /// Whether the input declares required columns and `schema` has all of them.
    pub fn is_told_by(&self, schema: &SchemaRef) -> bool {
        !self.columns.is_empty() && self.lacks(schema).is_none()
    }

    /// The first column that `schema` lacks, or has with another type.
    fn lacks(&self, schema: &SchemaRef) -> Option<(&'static str, ColumnType)> {
        let fits = |name: &str, wanted: ColumnType| {
            let found = schema.field_with_name(name);
            found.is_ok_and(|field| wanted.fits(field.data_type()))
        };
        self.columns.iter().find(|(name, wanted)| !fits(name, *wanted)).copied()
    }
}

/// An output that a kind declares. Its schema depends on settings and inputs: see [`crate::Kind::shape`].
#[derive(Clone, Copy, Debug)]
pub struct OutputPort {
    pub name: &'static str,
    /// For the reference page: what it holds.
    pub doc: &'static str,
}

impl OutputPort {
    pub const fn new(name: &'static str, doc: &'static str) -> Self {
        OutputPort { name, doc }
    }
}

/// One input of a stage.
#[derive(Clone, Debug)]
pub struct Input {
    /// The name of the declared input; if several may be bound to it, the name in the pipeline.
    pub name: String,
    pub port: &'static InputPort,
    pub schema: SchemaRef,
    /// The columns that the same rows had in the stages before the one that gives them, the nearest first: as far as stages
    /// keep their rows. Known while a pipeline is checked.
    pub before: Vec<SchemaRef>,
}

/// All inputs of a stage, in the order in which its kind declares them. Those bound to the same declared input keep the
/// order of `from`. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Inputs(Arc<[Input]>);

impl Inputs {
    pub fn new(inputs: Vec<Input>) -> Self {
        Inputs(inputs.into())
    }

    pub fn position(&self, name: &str) -> Option<usize> {
        self.iter().position(|input| input.name == name)
    }

    pub fn get(&self, name: &str) -> Option<&Input> {
        self.iter().find(|input| input.name == name)
    }

    pub fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// An input that the kind declares as required.
    ///
    /// # Errors
    /// When it was not given, or was not declared.
    pub fn required(&self, name: &str) -> Result<&Input, StageError> {
        self.get(name)
            .ok_or_else(|| StageError::input("", format!("the input `{name}` is missing")))
    }

    /// The inputs bound to the declared input `port`.
    pub fn of(&self, port: &str) -> impl Iterator<Item = &Input> {
        self.iter().filter(move |input| input.port.name == port)
    }
}

impl Deref for Inputs {
    type Target = [Input];

    fn deref(&self) -> &[Input] {
        &self.0
    }
}

/// One entry of `from`, before it is bound to a declared input.
#[derive(Clone, Copy, Debug)]
pub struct Offered<'a> {
    /// The key in `from: {name: stage.port}`; none for `from: stage.port` and in lists.
    pub key: Option<&'a str>,
    /// The name of the stage that it comes from, without its groups.
    pub stage: &'a str,
    /// None: that stage is switched off.
    pub schema: Option<&'a SchemaRef>,
}

/// For each declared input that is given, in their order: the place in `offered`, and the input.
///
/// An optional input that comes from a stage that is switched off is left out.
///
/// # Errors
/// The mismatch, with the index in `offered` of its cause, if there is one.
pub fn bind(kind: &str, ports: &'static [InputPort], offered: &[Offered<'_>]) -> Result<Vec<(usize, Input)>, Unfit> {
    let mut bound: Vec<(usize, usize, Input)> = Vec::new();
    let mut absent: Vec<&str> = Vec::new();
    for (place, offer) in offered.iter().enumerate() {
        let (at, port) = port_of(kind, ports, offered, place)?;
        let name = match (port.is_many(), offer.key) {
            (false, _) => port.name,
            (true, Some(key)) => key,
            (true, None) => offer.stage,
        };
        if bound.iter().any(|(_, _, input)| input.name == name) || absent.contains(&name) {
            return Err(Unfit::at(place, format!("the input `{name}` is given twice")));
        }
        let Some(schema) = offer.schema else {
            if port.is_required() {
                let message = format!("its input `{name}` comes from `{}`, which is switched off", offer.stage);
                return Err(Unfit {
                    switched_off: true,
                    ..Unfit::at(place, message)
                });
            }
            absent.push(name);
            continue;
        };
        if let Some((column, wanted)) = port.lacks(schema) {
            return Err(lacking(ports, port, (offer, schema), place, (column, wanted)));
        }
        let input = Input {
            name: name.to_string(),
            port,
            schema: SchemaRef::clone(schema),
            before: Vec::new(),
        };
        bound.push((at, place, input));
    }
    if let Some(missing) = ports
        .iter()
        .enumerate()
        .find(|(at, port)| port.is_required() && !bound.iter().any(|(bound, ..)| bound == at))
    {
        let port = missing.1;
        return Err(Unfit {
            place: None,
            message: format!("kind `{kind}` needs the input `{}`: {}", port.name, port.doc),
            help: Some(example(ports)),
            switched_off: false,
            wanted: None,
        });
    }
    bound.sort_by_key(|(at, ..)| *at);
    Ok(bound.into_iter().map(|(_, place, input)| (place, input)).collect())
}

/// The declared input to which an offered one is bound, with its index.
fn port_of(
    kind: &str,
    ports: &'static [InputPort],
    offered: &[Offered<'_>],
    place: usize,
) -> Result<(usize, &'static InputPort), Unfit> {
    let mut numbered = ports.iter().enumerate();
    let many = ports.iter().enumerate().find(|(_, port)| port.is_many());
    if ports.is_empty() {
        let help = Some("leave out `from`".into());
        return Err(Unfit {
            help,
            ..Unfit::at(place, format!("kind `{kind}` takes no input"))
        });
    }
    match offered[place].key {
        Some(key) => numbered
            .find(|(_, port)| !port.is_many() && port.name == key)
            .or(many)
            .ok_or_else(|| Unfit {
                help: Some(did_you_mean(key, ports.iter().map(|port| port.name), "inputs")),
                ..Unfit::at(place, format!("kind `{kind}` has no input `{key}`"))
            }),
        None => {
            let mut required = ports.iter().enumerate().filter(|(_, port)| port.is_required());
            match (ports, required.next(), required.next()) {
                ([_], ..) => {}
                // The only required input.
                (_, Some(only), None) if offered.len() == 1 || only.1.is_many() => return Ok(only),
                _ => {
                    let message = format!("kind `{kind}` has several inputs, so each needs its name");
                    return Err(Unfit {
                        help: Some(example(ports)),
                        ..Unfit::at(place, message)
                    });
                }
            }
            if offered.len() > 1 && !ports[0].is_many() {
                let (name, given) = (ports[0].name, offered.len());
                let message = format!("kind `{kind}` takes one input, `{name}`, and `from` gives {given}");
                return Err(Unfit::at(1, message));
            }
            Ok((0, &ports[0]))
        }
    }
}

fn lacking(
    ports: &'static [InputPort],
    port: &'static InputPort,
    (offer, schema): (&Offered<'_>, &SchemaRef),
    place: usize,
    (column, wanted): (&str, ColumnType),
) -> Unfit {
    let name = offer.key.unwrap_or(port.name);
    let message = match schema.field_with_name(column) {
        Ok(field) => format!(
            "has its column `{column}` as {}, not as {}",
            field.data_type(),
            wanted.name()
        ),
        Err(_) => format!("has no column `{column}`"),
    };
    let message = format!("the input `{name}` {message}; it should be {}", port.doc);
    let near = offer.key.filter(|_| port.is_many()).and_then(|key| {
        let others = ports.iter().filter(|other| !other.is_many()).map(|other| other.name);
        nearest(key, others)
    });
    let other = ports
        .iter()
        .find(|other| other.name != port.name && other.is_told_by(schema));
    let help = match (near, other) {
        (Some(near), _) => Some(format!("did you mean `{near}`?")),
        (None, Some(other)) => Some(format!("it fits the input `{}`: {}", other.name, other.doc)),
        (None, None) => None,
    };
    Unfit {
        help,
        wanted: Some(port),
        ..Unfit::at(place, message)
    }
}

/// An example of `from`, for error messages.
fn example(ports: &[InputPort]) -> String {
    if let [_] = ports {
        return "from: STAGE".into();
    }
    let of = |required: bool| ports.iter().filter(move |port| port.is_required() == required);
    let named = |port: &InputPort| format!("{}: STAGE", port.name);
    let optional: Vec<String> = of(false).map(|port| format!("`{}`", port.name)).collect();
    match of(true).map(named).collect::<Vec<_>>() {
        required if required.is_empty() => format!("from: {{NAME: STAGE}}; the names are {}", optional.join(", ")),
        required if optional.is_empty() => format!("from: {{{}}}", required.join(", ")),
        required => format!(
            "from: {{{}}}, and if wanted {}",
            required.join(", "),
            optional.join(", ")
        ),
    }
}

/// Why inputs do not fit a kind.
#[derive(Debug)]
pub struct Unfit {
    /// The place in `from`; none where something is missing.
    pub place: Option<usize>,
    pub message: String,
    pub help: Option<String>,
    /// It would fit, but comes from a stage that is switched off.
    pub switched_off: bool,
    /// The input whose columns are not those of what was given.
    pub wanted: Option<&'static InputPort>,
}

impl Unfit {
    fn at(place: usize, message: String) -> Self {
        Unfit {
            place: Some(place),
            message,
            help: None,
            switched_off: false,
            wanted: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use arrow::datatypes::{Field, Schema};

    use super::*;

    static NAMED: [InputPort; 3] = [
        InputPort::streamed("rows", "what is scored").columns(&[("text", ColumnType::Text)]),
        InputPort::whole("model", "of toy.model")
            .optional()
            .columns(&[("path", ColumnType::Text)]),
        InputPort::whole("members", "of toy.members").optional(),
    ];
    static TABLES: [InputPort; 1] = [InputPort::streamed("tables", "what is asked").count(InputCount::Many)];
    static MIXED: [InputPort; 2] = [
        InputPort::whole("guesses", "of toy.guess")
            .count(InputCount::Many)
            .columns(&[("hypothesis", ColumnType::Text)]),
        InputPort::whole("model", "of toy.model")
            .optional()
            .columns(&[("path", ColumnType::Text)]),
    ];
    static NONE: [InputPort; 0] = [];

    fn schema(columns: &[(&str, DataType)]) -> SchemaRef {
        let fields = columns.iter().map(|(name, of)| Field::new(*name, of.clone(), false));
        Arc::new(Schema::new(fields.collect::<Vec<_>>()))
    }

    fn bound(ports: &'static [InputPort], offered: &[(Option<&str>, &str, &SchemaRef)]) -> Result<String, String> {
        let offered: Vec<Offered<'_>> = offered
            .iter()
            .map(|(key, stage, schema)| Offered {
                key: *key,
                stage,
                schema: Some(schema),
            })
            .collect();
        match bind("toy.kind", ports, &offered) {
            Ok(bound) => Ok(bound
                .iter()
                .map(|(place, input)| format!("{place}:{}={}", input.name, input.port.name))
                .collect::<Vec<_>>()
                .join(" ")),
            Err(unfit) => Err(format!(
                "{:?} {}; {}",
                unfit.place,
                unfit.message,
                unfit.help.unwrap_or_default()
            )),
        }
    }

    #[test]
    fn names_decide_and_not_the_order() {
        let (text, path) = (schema(&[("text", DataType::Utf8)]), schema(&[("path", DataType::Utf8)]));
        let offered = [(Some("model"), "train", &path), (Some("rows"), "split", &text)];
        assert_eq!(bound(&NAMED, &offered).unwrap(), "1:rows=rows 0:model=model");
        assert_eq!(bound(&NAMED, &[(None, "split", &text)]).unwrap(), "0:rows=rows");
        let twice = [(None, "a", &text), (None, "b", &text)];
        assert_eq!(bound(&TABLES, &twice).unwrap(), "0:a=tables 1:b=tables");
        let named = [(Some("x"), "a", &text), (None, "b", &text)];
        assert_eq!(bound(&TABLES, &named).unwrap(), "0:x=tables 1:b=tables");
        assert_eq!(bound(&NONE, &[]).unwrap(), "");
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let (text, path) = (schema(&[("text", DataType::Utf8)]), schema(&[("path", DataType::Utf8)]));
        let number = schema(&[("text", DataType::Int64)]);
        insta::assert_snapshot!(
            [
                bound(&NAMED, &[]),
                bound(&NAMED, &[(Some("rowes"), "a", &text)]),
                bound(&NAMED, &[(None, "a", &text), (None, "b", &path)]),
                bound(&NAMED, &[(Some("rows"), "a", &path)]),
                bound(&NAMED, &[(Some("rows"), "a", &number)]),
                bound(&NAMED, &[(Some("rows"), "a", &text), (Some("rows"), "b", &text)]),
                bound(&MIXED, &[(Some("modle"), "train", &path)]),
                bound(&MIXED, &[(Some("heard"), "train", &path)]),
                bound(&TABLES, &[]),
                bound(&TABLES, &[(None, "a", &text), (Some("a"), "b", &text)]),
                bound(&NONE, &[(None, "a", &text)]),
            ]
            .map(Result::unwrap_err)
            .join("\n"),
            @r"
            None kind `toy.kind` needs the input `rows`: what is scored; from: {rows: STAGE}, and if wanted `model`, `members`
            Some(0) kind `toy.kind` has no input `rowes`; did you mean `rows`?
            Some(0) kind `toy.kind` has several inputs, so each needs its name; from: {rows: STAGE}, and if wanted `model`, `members`
            Some(0) the input `rows` has no column `text`; it should be what is scored; it fits the input `model`: of toy.model
            Some(0) the input `rows` has its column `text` as Int64, not as text; it should be what is scored; 
            Some(1) the input `rows` is given twice; 
            Some(0) the input `modle` has no column `hypothesis`; it should be of toy.guess; did you mean `model`?
            Some(0) the input `heard` has no column `hypothesis`; it should be of toy.guess; it fits the input `model`: of toy.model
            None kind `toy.kind` needs the input `tables`: what is asked; from: STAGE
            Some(1) the input `a` is given twice; 
            Some(0) kind `toy.kind` takes no input; leave out `from`
            "
        );
    }
}
