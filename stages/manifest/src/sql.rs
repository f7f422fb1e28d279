//! The kind `sql`.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use arrow::array::{Array, ArrayRef, BooleanArray, RecordBatch, StringArray, UInt32Array};
use arrow::buffer::BooleanBuffer;
use arrow::compute::{cast, concat_batches, filter_record_batch, take_record_batch};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_corpus::ManifestError;
use flow_corpus::columns;
use flow_kind::{
    Artifact, Body, Conservation, Context, Input, InputCount, InputPort, Inputs, Kind, Operator, Out, OutputPort,
    Partition, Port, Progress, ROW, ReadOnce, RejectClass, Shape, StageError, WithShared,
};
use flow_storage::Storage;
use flow_text::normalize::{TextRules, TextSettings};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::language::Languages;
use crate::own_thread::OwnThread;
use crate::session::{Expression, Functions, Params, Query, Relation, Session, normal_expression, normal_query};

/// Transforms rows with SQL, partition by partition.
///
/// # What it does
///
/// `rejects` are tried on every row in their order; the first whose `when` is true rejects the row, with its reason
/// (null is not true). `query` then reads the remaining rows under the name of the first input, or as `input`. With
/// several inputs, `query` may join them itself, or `join` builds the relation `input` from them first, so that
/// `rejects` see the joined columns; `join` must give each row of the first input exactly once.
///
/// Inputs are read partition by partition: a query joins a partition of one with the same partition of the others. Those
/// that `whole` names are read whole, and every partition is joined with all their rows (in the order of their partitions;
/// they are held in memory, once for all workers). Their `_row` is left out, so that `SELECT *` gives no second one.
/// Their content is part of every partition's key: when it changes, all partitions run again. The first input cannot be
/// among them.
///
/// No row vanishes without a reason: unless `rows: new` is set, the result carries `_row` and has exactly the
/// rows that came in, and WHERE, LIMIT, DISTINCT, GROUP BY and HAVING are errors. With `rows: new` the result may have
/// any rows; rows without `_row` are numbered in the order of the result, and of rows with `_row` no two may have the same.
///
/// The dialect is that of DataFusion. Functions of our own: `clean_text(text)`, `norm_text(clean)`,
/// `tagged_text(clean, lang)`, `untagged_text(text)` (without the language tag that it may begin with), `is_blank(text)`,
/// `py_strip(text)`, `nfc(text)` (Unicode normal form C),
/// `strip_zero_width(text)`, `correct_language(clean, tag, path_lang)`,
/// `identify_language(clean, lang, least)` (tells Hindi from Marathi where it is at least as sure as `least`, of 1; other
/// languages stay),
/// `unsafe_name(name)`, `names_shard_file(name, shard_id)`, `strip_dot_slash(name)`, `json_text(object, key)` (the value of a
/// key of a JSON object, such as the column `extra` of `manifest.read`, as text). Mind that `x >= 0.5` is true where
/// x is NaN: say `isnan(x)` first. `${param}` is a value, never pasted text. Functions that give another result
/// in every run (`now()`, `random()`) are refused.
///
/// A query that takes too long can be given a `timeout`. Where the run is asked to end (Ctrl-C), a partition whose SQL is
/// still at work after a moment is left to the next run.
///
/// # Example
///
/// ```yaml
/// long_enough:
///   uses: sql
///   from: scan
///   with:
///     rejects:
///       - {reason: duration_invalid, when: duration_s IS NULL OR isnan(duration_s)}
///       - {reason: duration_too_short, when: "duration_s < ${min_duration}"}
///     query: SELECT *, clean_text(transcription_native) AS clean FROM scan
/// with_speakers:
///   uses: sql
///   from: {rows: long_enough, speakers: speakers}   # a manifest.table
///   with:
///     whole: [speakers]
///     query: SELECT rows.*, speakers.age FROM rows LEFT JOIN speakers ON rows.speaker_id = speakers.speaker
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SqlSettings {
    /// One SELECT over the inputs.
    pub query: String,
    /// One SELECT that builds the relation `input` from several inputs, named as in `from`.
    #[serde(default)]
    pub join: Option<String>,
    /// Inputs, other than the first, that are read whole for every partition: lookup tables.
    #[serde(default)]
    pub whole: Vec<String>,
    /// Tried in order before the query.
    #[serde(default)]
    pub rejects: Vec<RejectRule>,
    /// Whether the rows that come out are those that came in.
    #[serde(default)]
    pub rows: RowRule,
    /// Values of `$name` placeholders. `${param}` in a text above adds one by itself.
    #[serde(default)]
    pub params: Params,
    /// Characters and tags that `clean_text` deletes.
    #[serde(default)]
    pub text: TextSettings,
    /// A language table for `correct_language`, in the form of `configs/languages.yaml`, which is used if none is named.
    #[serde(default)]
    pub languages: Option<PathBuf>,
    /// Most seconds that the SQL may take for one partition. A query that takes longer ends the run with an error.
    #[serde(default)]
    pub timeout: Option<f64>,
}

/// What the workers of a stage share.
#[derive(Clone, Debug, Default)]
pub struct SqlShared {
    storage: Storage,
    /// The table that `languages` names.
    languages: ReadOnce<Languages>,
    /// The rows of the inputs that are read whole.
    whole: ReadOnce<WholeInputs>,
}

/// By input, all its rows, if it is read whole.
type WholeInputs = Vec<Option<Vec<RecordBatch>>>;

/// A condition under which a row is refused.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RejectRule {
    /// A name in snake case.
    pub reason: String,
    /// An expression over the columns of `input`.
    pub when: String,
    /// `rule`: the row was filtered out. `fault`: something is broken; counts towards `max_rejects`.
    #[serde(default = "rule")]
    pub class: RejectClass,
    /// An expression whose value becomes the detail of the reject.
    #[serde(default)]
    pub detail: Option<String>,
}

fn rule() -> RejectClass {
    RejectClass::Rule
}

/// Whether the rows that come out are those that came in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RowRule {
    /// The same rows, known by `_row`.
    #[default]
    Keep,
    /// New rows.
    New,
}

pub struct Sql;

impl Kind for Sql {
    const NAME: &'static str = "sql";
    const VERSION: u32 = 3;
    const INPUTS: &'static [InputPort] = &[InputPort::streamed(
        "tables",
        "rows that the query reads, each under its name in `from`; the first is also called `input`",
    )
    .count(InputCount::Many)];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "the columns that the query selects")];
    const SQL_SETTINGS: &'static [&'static str] = &["query", "join", "when", "detail"];
    const URL_SETTINGS: &'static [(&'static str, flow_kind::UrlUse)] = &[("languages", flow_kind::UrlUse::Read)];
    type Settings = WithShared<SqlSettings, SqlShared>;

    fn shape(settings: &Self::Settings, inputs: &Inputs) -> Result<Shape, StageError> {
        settings.time_limit()?;
        let plans = Plans::new(settings, inputs)?;
        // The schema metadata of the first input is passed on: for example how micro-batches were made.
        let said = inputs.first().map(|input| input.schema.metadata().clone());
        let schema = plans.output.as_ref().clone().with_metadata(said.unwrap_or_default());
        let shape = Shape {
            whole: settings.whole.clone(),
            ..Shape::local(vec![Port::new("rows", Arc::new(schema))])
        };
        Ok(match settings.rows {
            RowRule::Keep => shape,
            RowRule::New => Shape {
                conservation: Conservation::NewRows,
                ..shape
            },
        })
    }

    fn set_storage(settings: &mut Self::Settings, storage: &Storage) {
        settings.shared.storage = storage.clone();
    }

    fn open(settings: &Self::Settings, context: &Context) -> Result<Body, StageError> {
        let plans = Plans::new(settings, &context.inputs)?;
        Ok(Body::Local(Box::new(Transformer {
            plans: Arc::new(plans),
            thread: None,
            time_limit: settings.time_limit()?,
            gives_up: Box::new(context.gives_up()),
            inputs: context.inputs.iter().map(|input| input.name.clone()).collect(),
            whole: settings.shared.whole_rows(context)?,
            waiting: HashMap::new(),
        })))
    }

    /// SQL in its parsed form, independent of layout; the language table by its contents, where it is used.
    fn identity(settings: &Self::Settings) -> serde_json::Value {
        let (query, _) = normal_query(&settings.query);
        let join = settings.join.as_deref().map(|join| normal_query(join).0);
        let rejects: Vec<serde_json::Value> = settings
            .rejects
            .iter()
            .map(|rule| {
                let detail = rule.detail.as_deref().map(normal_expression);
                serde_json::json!({"reason": rule.reason, "when": normal_expression(&rule.when), "class": rule.class, "detail": detail})
            })
            .collect();
        let uses = |function: &str| {
            settings
                .texts()
                .any(|text| text.to_ascii_lowercase().contains(function))
        };
        let languages = uses("correct_language").then(|| match settings.shared.languages(settings) {
            Ok(languages) => languages.digest(),
            Err(error) => error.to_string(), // Nothing runs with it: `shape` fails with the same error.
        });
        let text = uses("clean_text").then_some(&settings.text);
        serde_json::json!({
            "query": query, "join": join, "rejects": rejects, "rows": settings.rows, "params": settings.params,
            "text": text, "languages": languages,
        })
    }
}

impl SqlSettings {
    fn time_limit(&self) -> Result<Option<Duration>, StageError> {
        match self.timeout {
            Some(seconds) if !(seconds > 0.0 && seconds <= 1e9) => {
                let message = format!("a number of seconds above 0 is expected, not {seconds}");
                Err(StageError::setting("timeout", message))
            }
            seconds => Ok(seconds.map(Duration::from_secs_f64)),
        }
    }

    /// The inputs as SQL sees them: those that are read whole without `_row`.
    fn seen(&self, inputs: &[Input]) -> Result<Vec<Input>, StageError> {
        for name in &self.whole {
            match inputs.iter().position(|input| input.name == *name) {
                Some(0) => {
                    let message =
                        format!("`{name}` is the first input, whose rows are streamed: it cannot be read whole");
                    return Err(StageError::setting("whole", message));
                }
                Some(_) => {}
                None => {
                    let known: Vec<&str> = inputs.iter().skip(1).map(|input| input.name.as_str()).collect();
                    let message = format!("`from` gives no input `{name}`");
                    let help = format!("the inputs after the first are: {}", known.join(", "));
                    return Err(StageError::setting("whole", message).with_help(help));
                }
            }
        }
        let seen = inputs.iter().cloned().map(|mut input| {
            if self.whole.contains(&input.name) {
                let fields = input.schema.fields().iter().filter(|field| field.name() != ROW);
                input.schema = Arc::new(Schema::new(fields.cloned().collect::<Vec<_>>()));
            }
            input
        });
        Ok(seen.collect())
    }

    /// All SQL of the stage.
    fn texts(&self) -> impl Iterator<Item = &str> {
        let rules = self
            .rejects
            .iter()
            .flat_map(|rule| [Some(rule.when.as_str()), rule.detail.as_deref()]);
        [Some(self.query.as_str()), self.join.as_deref()]
            .into_iter()
            .chain(rules)
            .flatten()
    }
}

impl SqlShared {
    fn languages(&self, settings: &SqlSettings) -> Result<Arc<Languages>, ManifestError> {
        match &settings.languages {
            Some(path) => self
                .languages
                .get(&path.to_string_lossy(), || Languages::from_file(&self.storage, path)),
            None => Ok(Languages::shipped()),
        }
    }

    /// By input, the rows of those that are read whole. Read once for all workers.
    fn whole_rows(&self, context: &Context) -> Result<Arc<WholeInputs>, StageError> {
        let artifacts: BTreeMap<&str, &Artifact> = context
            .whole("tables")
            .map(|(input, artifact)| (input.name.as_str(), artifact))
            .collect();
        let of: Vec<String> = artifacts.values().map(|artifact| artifact.digest().to_hex()).collect();
        self.whole.get(&of.join(" "), || {
            let rows = |input: &Input| -> Result<Option<Vec<RecordBatch>>, StageError> {
                let Some(artifact) = artifacts.get(input.name.as_str()) else {
                    return Ok(None);
                };
                let mut batches = Vec::new();
                for batch in artifact.batches(None) {
                    let (_, mut batch) = batch?;
                    if let Ok(row) = batch.schema().index_of(ROW) {
                        batch.remove_column(row);
                    }
                    batches.push(batch);
                }
                Ok(Some(batches))
            };
            context.inputs.iter().map(rows).collect()
        })
    }
}

struct Rule {
    reason: String,
    class: RejectClass,
    when: Expression,
    when_path: String,
    detail: Option<Expression>,
}

/// The stage's SQL, planned for its inputs.
struct Plans {
    /// The inputs as `join` reads them, and `join`.
    join: Option<(Vec<Relation>, Query)>,
    rules: Vec<Rule>,
    /// What `query` reads: `input`, then (without `join`) the inputs after the first.
    read: Vec<Relation>,
    query: Query,
    rows: RowRule,
    output: SchemaRef,
    /// Nobody waits for the result.
    given_up: AtomicBool,
}

impl Plans {
    fn new(settings: &<Sql as Kind>::Settings, inputs: &[Input]) -> Result<Plans, StageError> {
        let inputs = settings.seen(inputs)?;
        let [first, others @ ..] = inputs.as_slice() else {
            let message = "sql needs an input";
            return Err(StageError::input("", message).with_help("name one in `from`"));
        };
        let functions = Functions {
            text: Arc::new(TextRules::new(&settings.text).map_err(|e| ManifestError::from(e).of_setting("text.tags"))?),
            languages: settings
                .shared
                .languages(settings)
                .map_err(|e| e.of_setting("languages"))?,
        };
        if settings.rows == RowRule::Keep || !settings.rejects.is_empty() || settings.join.is_some() {
            columns::expect(first, ROW, &DataType::UInt32)?;
        }
        let of_input = |input: &Input, e: ManifestError| StageError::input(input.name.clone(), e.to_string());
        let join = match &settings.join {
            None => None,
            Some(text) => {
                let mut session = Session::new(&functions)?;
                let relation = |input: &Input| {
                    session
                        .relation(&input.name, &input.schema)
                        .map_err(|e| of_input(input, e))
                };
                let relations = inputs.iter().map(relation).collect::<Result<Vec<_>, _>>()?;
                let query = session
                    .query(text, &settings.params)
                    .map_err(|e| e.of_setting("join"))?;
                carries_row(query.schema(), "join")?;
                Some((relations, query))
            }
        };
        let mut session = Session::new(&functions)?;
        let schema = join.as_ref().map_or(&first.schema, |(_, query)| query.schema());
        let input = session.relation("input", schema)?;
        let mut read = vec![input];
        if join.is_none() {
            if first.name != "input" {
                session.alias(&first.name, &read[0]).map_err(|e| of_input(first, e))?;
            }
            for other in others {
                read.push(
                    session
                        .relation(&other.name, &other.schema)
                        .map_err(|e| of_input(other, e))?,
                );
            }
        }
        let rules = settings
            .rejects
            .iter()
            .enumerate()
            .map(|(n, rule)| Rule::new(rule, n, &session, schema, &settings.params));
        let rules = rules.collect::<Result<Vec<_>, _>>()?;
        if settings.rows == RowRule::Keep
            && let (_, Some(dropping)) = normal_query(&settings.query)
        {
            return Err(StageError::Setting {
                path: "query".into(),
                offset: dropping.offset,
                message: format!("{} makes rows vanish without a reason", dropping.clause),
                help: Some("refuse rows in `rejects: [{reason, when}]`, or set `rows: new` if rows of another nature are meant".into()),
            });
        }
        let query = session
            .query(&settings.query, &settings.params)
            .map_err(|e| e.of_setting("query"))?;
        let output = match settings.rows {
            RowRule::Keep => {
                carries_row(query.schema(), "query")?;
                Arc::clone(query.schema())
            }
            RowRule::New if query.schema().column_with_name(ROW).is_some() => {
                carries_row(query.schema(), "query")?;
                Arc::clone(query.schema())
            }
            RowRule::New => {
                let row = Arc::new(Field::new(ROW, DataType::UInt32, false));
                Arc::new(Schema::new(
                    std::iter::once(row)
                        .chain(query.schema().fields().iter().cloned())
                        .collect::<Vec<_>>(),
                ))
            }
        };
        Ok(Plans {
            join,
            rules,
            read,
            query,
            rows: settings.rows,
            output,
            given_up: AtomicBool::new(false),
        })
    }
}

fn carries_row(schema: &SchemaRef, path: &str) -> Result<(), StageError> {
    match schema.column_with_name(ROW) {
        Some((_, field)) if field.data_type() == &DataType::UInt32 => Ok(()),
        Some((_, field)) => Err(StageError::setting(
            path,
            format!(
                "`{ROW}` has to stay as it is (uint32), but comes out as {}",
                field.data_type()
            ),
        )),
        None => {
            let error = StageError::setting(
                path,
                format!("the result does not carry `{ROW}`, by which rows are known"),
            );
            Err(error.with_help(format!("select `{ROW}` of the first input too")))
        }
    }
}

impl Rule {
    fn new(
        rule: &RejectRule,
        number: usize,
        session: &Session,
        schema: &SchemaRef,
        params: &Params,
    ) -> Result<Rule, StageError> {
        let snake_case = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        if rule.reason.is_empty() || !rule.reason.chars().all(snake_case) {
            let message = format!("{:?} is not a name in snake case, such as quality_too_low", rule.reason);
            return Err(StageError::setting(format!("rejects[{number}].reason"), message));
        }
        let when_path = format!("rejects[{number}].when");
        let when = session
            .expression(&rule.when, schema, params)
            .map_err(|e| e.of_setting(&when_path))?;
        if !matches!(when.data_type(), DataType::Boolean | DataType::Null) {
            return Err(StageError::setting(
                &when_path,
                format!("a condition is true or false, but this gives {}", when.data_type()),
            ));
        }
        let detail = match &rule.detail {
            Some(text) => Some(
                session
                    .expression(text, schema, params)
                    .map_err(|e| e.of_setting(&format!("rejects[{number}].detail")))?,
            ),
            None => None,
        };
        Ok(Rule {
            reason: rule.reason.clone(),
            class: rule.class,
            when,
            when_path,
            detail,
        })
    }

    /// The rows of `batch` that the rule refuses; none if it refuses none.
    fn refused(&self, batch: &RecordBatch) -> Result<Option<BooleanBuffer>, StageError> {
        let truth = self
            .when
            .evaluate(batch)
            .map_err(|e| StageError::failed(format!("{}: {e}", self.when_path)))?;
        let Some(truth) = truth.as_any().downcast_ref::<BooleanArray>() else {
            return Ok(None); // All null.
        };
        let refused = match truth.nulls() {
            Some(nulls) => truth.values() & nulls.inner(),
            None => truth.values().clone(),
        };
        Ok((refused.count_set_bits() > 0).then_some(refused))
    }

    /// Puts rows into the rejects.
    fn refuse(&self, batch: &RecordBatch, refused: &BooleanBuffer, out: &mut Out) -> Result<(), StageError> {
        let Some(detail) = &self.detail else {
            let positions: Vec<usize> = refused.set_indices().collect();
            return out.reject_rows(batch, &positions, &self.reason, self.class, "");
        };
        let gone = filter_record_batch(batch, &BooleanArray::from(refused.clone()))?;
        let details: ArrayRef = cast(&detail.evaluate(&gone)?, &DataType::Utf8)?;
        let details = details.as_any().downcast_ref::<StringArray>();
        for position in 0..gone.num_rows() {
            let detail = details
                .filter(|d| d.is_valid(position))
                .map_or("", |d| d.value(position));
            out.reject_rows(&gone, &[position], &self.reason, self.class, detail)?;
        }
        Ok(())
    }
}

/// Rejects rows of `batch`, each by the first rule that applies, and returns the others. Rows are copied once, whatever
/// the number of rules.
fn refuse(rules: &[Rule], batch: RecordBatch, out: &mut Out) -> Result<RecordBatch, StageError> {
    let mut left = BooleanBuffer::new_set(batch.num_rows());
    for (place, rule) in rules.iter().enumerate() {
        let refused = match rule.refused(&batch) {
            Ok(refused) => refused,
            // The error may come from a row that an earlier rule rejects (a text that is not a number, for example): the
            // rules from here on see only the remaining rows.
            Err(_) if left.count_set_bits() < batch.num_rows() => {
                let rest = filter_record_batch(&batch, &BooleanArray::from(left))?;
                return refuse(&rules[place..], rest, out);
            }
            Err(error) => return Err(error),
        };
        if let Some(refused) = refused {
            let refused = &refused & &left;
            if refused.count_set_bits() > 0 {
                rule.refuse(&batch, &refused, out)?;
                left = &left & &!&refused;
            }
        }
    }
    if left.count_set_bits() == batch.num_rows() {
        return Ok(batch);
    }
    Ok(filter_record_batch(&batch, &BooleanArray::from(left))?)
}

struct Transformer {
    plans: Arc<Plans>,
    /// What computes, while a worker waits for it: the engine cannot be cut off within an operator, so a query that takes
    /// too long is left to itself.
    thread: Option<OwnThread>,
    time_limit: Option<Duration>,
    gives_up: Box<dyn Fn() -> bool>,
    /// Their names.
    inputs: Vec<String>,
    /// By input, the rows of those that are read whole.
    whole: Arc<Vec<Option<Vec<RecordBatch>>>>,
    /// Batches of partitions that are not complete, by input.
    waiting: HashMap<Partition, Vec<Vec<RecordBatch>>>,
}

impl Operator for Transformer {
    fn batch(&mut self, input: &str, partition: &Partition, batch: RecordBatch, _: &mut Out) -> Result<(), StageError> {
        if batch.num_rows() > 0 {
            let inputs = self.inputs.len();
            let position = self.inputs.iter().position(|name| name == input);
            let waiting = self
                .waiting
                .entry(partition.clone())
                .or_insert_with(|| vec![Vec::new(); inputs]);
            position
                .and_then(|position| waiting.get_mut(position))
                .ok_or_else(|| StageError::failed(format!("input {input} is not in `from`")))?
                .push(batch);
        }
        Ok(())
    }

    fn partition_complete(&mut self, partition: &Partition, out: &mut Out) -> Result<Progress, StageError> {
        let mut inputs = self
            .waiting
            .remove(partition)
            .unwrap_or_else(|| vec![Vec::new(); self.inputs.len()]);
        let plans = &self.plans;
        // A query may look at the other inputs alone, which is an error where rows are kept: it has to be run to show.
        if plans.rows == RowRule::Keep && inputs.iter().all(Vec::is_empty) {
            return Ok(Progress::Done);
        }
        for (input, whole) in inputs.iter_mut().zip(self.whole.iter()) {
            if let Some(whole) = whole {
                input.clone_from(whole);
            }
        }
        let plans = Arc::clone(plans);
        let mut beside = out.beside();
        let thread = self.thread.take().map_or_else(OwnThread::start, Ok)?;
        let began = Instant::now();
        let done = thread.run(
            move || plans.run(inputs, &mut beside).map(|()| beside),
            || (self.gives_up)() || self.time_limit.is_some_and(|limit| began.elapsed() > limit),
        );
        let Some((done, thread)) = done else {
            self.plans.given_up.store(true, Ordering::Release);
            if (self.gives_up)() {
                return Err(StageError::failed("stopped"));
            }
            let limit = self.time_limit.unwrap_or_default().as_secs_f64();
            let message = format!("the SQL takes longer than `timeout`, {limit} s");
            let help = "raise `timeout` of the stage, or look for a join whose condition fits too many rows";
            return Err(StageError::failed(message).with_help(help));
        };
        self.thread = Some(thread);
        out.take_over(done?);
        Ok(Progress::Done)
    }
}

impl Plans {
    /// What becomes of the rows of one partition.
    fn run(&self, inputs: Vec<Vec<RecordBatch>>, out: &mut Out) -> Result<(), StageError> {
        let mut inputs = inputs.into_iter();
        let first = inputs.next().unwrap_or_default();
        let mut input = match &self.join {
            None => {
                for (relation, batches) in self.read[1..].iter().zip(inputs) {
                    relation.set(batches)?;
                }
                first
            }
            Some((relations, join)) => {
                let before = row_numbers(&first)?;
                for (relation, batches) in relations.iter().zip(std::iter::once(first).chain(inputs)) {
                    relation.set(batches)?;
                }
                let joined = join.run(&self.given_up)?;
                same_rows(before, row_numbers(&joined)?, "join")?;
                relations.iter().try_for_each(|relation| relation.set(Vec::new()))?;
                joined
            }
        };
        for batch in &mut input {
            let whole = std::mem::replace(batch, RecordBatch::new_empty(batch.schema()));
            *batch = refuse(&self.rules, whole, out)?;
        }
        input.retain(|batch| batch.num_rows() > 0);
        let before = if self.rows == RowRule::Keep {
            row_numbers(&input)?
        } else {
            Vec::new()
        };
        self.read[0].set(input)?;
        let result = self.query.run(&self.given_up)?;
        self.read.iter().try_for_each(|relation| relation.set(Vec::new()))?;
        let result = concat_batches(self.query.schema(), &result)?;
        let result = match self.rows {
            RowRule::Keep => {
                let after = columns::rows(&result)?;
                same_rows(before, after.values().to_vec(), "query")?;
                if after.values().is_sorted() {
                    result
                } else {
                    take_record_batch(&result, &arrow::compute::sort_to_indices(after, None, None)?)?
                }
            }
            RowRule::New if self.output.fields().len() > result.num_columns() => numbered(&result, &self.output)?,
            RowRule::New => result,
        };
        if result.num_rows() > 0 {
            out.send(0, result);
        }
        Ok(())
    }
}

fn row_numbers(batches: &[RecordBatch]) -> Result<Vec<u32>, ManifestError> {
    let mut numbers = Vec::with_capacity(batches.iter().map(RecordBatch::num_rows).sum());
    for batch in batches {
        numbers.extend_from_slice(columns::rows(batch)?.values());
    }
    Ok(numbers)
}

/// Checks that the same rows came out as came in, each as often.
fn same_rows(mut before: Vec<u32>, mut after: Vec<u32>, path: &str) -> Result<(), StageError> {
    before.sort_unstable();
    after.sort_unstable();
    if before == after {
        return Ok(());
    }
    let mut counts: BTreeMap<u32, i64> = BTreeMap::new();
    before.iter().for_each(|row| *counts.entry(*row).or_default() -= 1);
    after.iter().for_each(|row| *counts.entry(*row).or_default() += 1);
    let those = |wanted: fn(i64) -> bool| {
        let rows: Vec<u32> = counts
            .iter()
            .filter(|(_, count)| wanted(**count))
            .map(|(row, _)| *row)
            .collect();
        let named: Vec<String> = rows.iter().take(5).map(u32::to_string).collect();
        let more = if rows.len() > 5 { ", ..." } else { "" };
        (rows.first().copied(), rows.len(), format!("{}{more}", named.join(", ")))
    };
    let (first_lost, lost, lost_rows) = those(|count| count < 0);
    let (first_new, doubled, doubled_rows) = those(|count| count > 0);
    let mut faults = Vec::new();
    if lost > 0 {
        faults.push(format!("loses {lost} rows (`{ROW}` {lost_rows})"));
    }
    if doubled > 0 {
        faults.push(format!("doubles or makes up {doubled} rows (`{ROW}` {doubled_rows})"));
    }
    Err(StageError::Failed {
        message: format!("`{path}` {}", faults.join(" and ")),
        row: first_lost.or(first_new),
        help: Some(
            "each row has to come out exactly once: mind inner joins and keys that appear twice on the other side"
                .into(),
        ),
    })
}

/// `batch` with a `_row` that counts its rows.
fn numbered(batch: &RecordBatch, schema: &SchemaRef) -> Result<RecordBatch, StageError> {
    let rows = u32::try_from(batch.num_rows())
        .map_err(|_| StageError::failed("a partition has more rows than fit in 32 bits"))?;
    let row: ArrayRef = Arc::new(UInt32Array::from_iter_values(0..rows));
    Ok(RecordBatch::try_new(
        Arc::clone(schema),
        std::iter::once(row).chain(batch.columns().iter().cloned()).collect(),
    )?)
}

#[cfg(test)]
#[path = "sql_tests.rs"]
mod tests;
