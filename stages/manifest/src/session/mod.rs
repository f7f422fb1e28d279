//! SQL over batches in memory. This module with its parts, and `browse` of the pages, are the only ones that name DataFusion.
//!
//! A [`Session`] holds relations: named schemas whose rows are set for every partition. A [`Query`] or an
//! [`Expression`] is planned once and run for each. Single-threaded, without files, random numbers or clocks.

mod functions;
mod mistakes;
mod statement;

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use arrow::array::{ArrayRef, RecordBatch};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use datafusion::catalog::streaming::StreamingTable;
use datafusion::common::DFSchema;
use datafusion::common::TableReference;
use datafusion::error::DataFusionError;
use datafusion::execution::disk_manager::{DiskManagerBuilder, DiskManagerMode};
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::logical_expr::simplify::SimplifyContext;
use datafusion::optimizer::simplify_expressions::ExprSimplifier;
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_plan::execution_plan::reset_plan_states;
use datafusion::physical_plan::memory::MemoryStream;
use datafusion::physical_plan::streaming::PartitionStream;
use datafusion::physical_plan::{ExecutionPlan, collect};
use datafusion::prelude::{SessionConfig, SessionContext};
use flow_corpus::ManifestError;
use flow_kind::ROW;

pub use functions::Functions;
pub use statement::{Dropping, normal_expression, normal_query};

use schemars::{JsonSchema, Schema as JsonSchemaValue, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use flow_corpus::columns::with_schema;
use mistakes::explain;

/// Values for the `$name` placeholders of a statement.
pub type Params = std::collections::BTreeMap<String, Param>;

/// One value of a placeholder.
#[derive(Clone, Debug, PartialEq)]
pub enum Param {
    Null,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
}

impl Serialize for Param {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Param::Null => serializer.serialize_unit(),
            Param::Bool(value) => serializer.serialize_bool(*value),
            Param::Int(value) => serializer.serialize_i64(*value),
            // JSON has no such numbers, and would make null of them.
            Param::Float(value) if !value.is_finite() => {
                std::collections::BTreeMap::from([("float", value.to_string())]).serialize(serializer)
            }
            Param::Float(value) => serializer.serialize_f64(*value),
            Param::Text(value) => serializer.serialize_str(value),
        }
    }
}

impl<'de> Deserialize<'de> for Param {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Scalar;
        impl de::Visitor<'_> for Scalar {
            type Value = Param;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number, a text, true, false or null")
            }

            fn visit_unit<E>(self) -> Result<Param, E> {
                Ok(Param::Null)
            }

            fn visit_bool<E>(self, value: bool) -> Result<Param, E> {
                Ok(Param::Bool(value))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Param, E> {
                Ok(Param::Int(value))
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Param, E> {
                i64::try_from(value)
                    .map(Param::Int)
                    .map_err(|_| E::custom(format!("{value} is too large")))
            }

            fn visit_f64<E>(self, value: f64) -> Result<Param, E> {
                Ok(Param::Float(value))
            }

            fn visit_str<E>(self, value: &str) -> Result<Param, E> {
                Ok(Param::Text(value.into()))
            }
        }
        deserializer.deserialize_any(Scalar)
    }
}

impl JsonSchema for Param {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Param".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> JsonSchemaValue {
        json_schema!({"type": ["null", "boolean", "number", "string"]})
    }
}

/// The rows of one relation; set before a query runs.
#[derive(Clone)]
pub struct Relation {
    rows: Arc<Rows>,
}

impl Relation {
    pub fn schema(&self) -> &SchemaRef {
        &self.rows.schema
    }

    /// # Errors
    /// When a batch does not fit the relation's schema.
    pub fn set(&self, batches: Vec<RecordBatch>) -> Result<(), ManifestError> {
        let batches = batches
            .into_iter()
            .map(|batch| with_schema(batch, &self.rows.schema))
            .collect::<Result<Vec<_>, _>>()?;
        *self.rows.batches.lock().unwrap_or_else(PoisonError::into_inner) = batches;
        Ok(())
    }
}

struct Rows {
    schema: SchemaRef,
    batches: Mutex<Vec<RecordBatch>>,
}

impl fmt::Debug for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rows")
            .field("schema", &self.schema)
            .finish_non_exhaustive()
    }
}

impl PartitionStream for Rows {
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    fn execute(&self, _context: Arc<TaskContext>) -> SendableRecordBatchStream {
        let batches = self.batches.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match MemoryStream::try_new(batches, Arc::clone(&self.schema), None) {
            Ok(stream) => Box::pin(stream),
            Err(error) => Box::pin(datafusion::physical_plan::stream::RecordBatchStreamAdapter::new(
                Arc::clone(&self.schema),
                futures::stream::iter([Err(error)]),
            )),
        }
    }
}

/// Relations and the functions that SQL over them may call.
pub struct Session {
    context: SessionContext,
    runtime: Arc<tokio::runtime::Runtime>,
    relations: Vec<String>,
}

impl Session {
    /// # Errors
    /// When the machine gives no thread resources for it.
    pub fn new(functions: &Functions) -> Result<Self, ManifestError> {
        let mut config = SessionConfig::new()
            .with_target_partitions(1)
            .with_batch_size(8192)
            .with_information_schema(false);
        let options = config.options_mut();
        options.sql_parser.collect_spans = true;
        options.sql_parser.map_string_types_to_utf8view = false;
        // A plan is run for every partition; dynamic filters of one run would be wrong in the next.
        options.optimizer.enable_dynamic_filter_pushdown = false;
        options.optimizer.enable_topk_dynamic_filter_pushdown = false;
        options.optimizer.enable_join_dynamic_filter_pushdown = false;
        options.optimizer.enable_aggregate_dynamic_filter_pushdown = false;
        let environment = RuntimeEnvBuilder::new()
            .with_disk_manager_builder(DiskManagerBuilder::default().with_mode(DiskManagerMode::Disabled))
            .build_arc()
            .map_err(ManifestError::sql)?;
        let context = SessionContext::new_with_config_rt(config, environment);
        functions.register(&context);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .map_err(ManifestError::sql)?;
        Ok(Session {
            context,
            runtime: Arc::new(runtime),
            relations: Vec::new(),
        })
    }

    /// Adds a relation that queries read under `name`.
    ///
    /// # Errors
    /// When there is one of this name already.
    pub fn relation(&mut self, name: &str, schema: &SchemaRef) -> Result<Relation, ManifestError> {
        let relation = Relation {
            rows: Arc::new(Rows {
                schema: Arc::clone(schema),
                batches: Mutex::default(),
            }),
        };
        self.alias(name, &relation)?;
        Ok(relation)
    }

    /// Lets queries read `relation` under one more name.
    ///
    /// # Errors
    /// When there is one of this name already.
    pub fn alias(&mut self, name: &str, relation: &Relation) -> Result<(), ManifestError> {
        if self.relations.iter().any(|known| known == name) {
            return Err(ManifestError::sql(format!("two relations have the name `{name}`")));
        }
        let partition: Arc<dyn PartitionStream> = Arc::clone(&relation.rows) as _;
        let table =
            StreamingTable::try_new(Arc::clone(relation.schema()), vec![partition]).map_err(ManifestError::sql)?;
        self.context
            .register_table(TableReference::bare(name), Arc::new(table))
            .map_err(ManifestError::sql)?;
        self.relations.push(name.to_string());
        Ok(())
    }

    /// Plans a query.
    ///
    /// # Errors
    /// When the text is not one SELECT over the relations, or calls a function whose result changes from
    /// run to run.
    pub fn query(&self, text: &str, params: &Params) -> Result<Query, ManifestError> {
        let state = self.context.state();
        let statement = statement::query(text, params)?;
        self.runtime.block_on(async {
            let plan = state
                .statement_to_plan(statement)
                .await
                .map_err(|e| explain(e, text, &self.relations))?;
            statement::refuse_changing_plan(&plan, text)?;
            let plan = state
                .create_physical_plan(&plan)
                .await
                .map_err(|e| explain(e, text, &self.relations))?;
            let schema = stored_schema(&plan.schema());
            Ok(Query {
                plan,
                schema,
                context: self.context.clone(),
                runtime: Arc::clone(&self.runtime),
            })
        })
    }

    /// Plans an expression over single rows of `schema`.
    ///
    /// # Errors
    /// When the text is not one expression over these columns, or calls a function whose result changes
    /// from run to run.
    pub fn expression(&self, text: &str, schema: &SchemaRef, params: &Params) -> Result<Expression, ManifestError> {
        let state = self.context.state();
        let fault = |e| explain(e, text, &self.relations);
        let columns = DFSchema::try_from_qualified_schema("input", schema).map_err(fault)?;
        let parsed = statement::expression(text, params)?;
        let logical = state
            .create_logical_expr_from_sql_expr(parsed, &columns)
            .map_err(fault)?;
        statement::refuse_changing_expression(&logical, text)?;
        // Some functions, such as `coalesce`, exist only until an expression is simplified.
        let context = SimplifyContext::builder()
            .with_schema(Arc::new(columns.clone()))
            .with_config_options(Arc::clone(state.config_options()))
            .build();
        let simplifier = ExprSimplifier::new(context);
        let coerced = simplifier.coerce(logical, &columns).map_err(fault)?;
        let simplified = simplifier.simplify(coerced).map_err(fault)?;
        let physical = state.create_physical_expr(simplified, &columns).map_err(fault)?;
        let data_type = physical.data_type(schema).map_err(fault)?;
        Ok(Expression {
            physical,
            data_type,
            schema: Arc::clone(schema),
        })
    }
}

/// A planned query.
pub struct Query {
    plan: Arc<dyn ExecutionPlan>,
    schema: SchemaRef,
    context: SessionContext,
    runtime: Arc<tokio::runtime::Runtime>,
}

impl Query {
    /// Schema of the result: plain text and binary types whatever the engine works with; every column may be
    /// null, `_row` excepted.
    pub fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// Runs the query over what the relations hold now.
    ///
    /// # Errors
    /// When a value cannot be computed (a cast, say), `_row` comes out null, or `given_up` is set, which is looked at where
    /// the engine yields.
    pub fn run(&self, given_up: &AtomicBool) -> Result<Vec<RecordBatch>, ManifestError> {
        let failed = |e: datafusion::error::DataFusionError| explain(e, "", &[]);
        let plan = reset_plan_states(Arc::clone(&self.plan)).map_err(failed)?;
        let mut rows = pin!(collect(plan, self.context.task_ctx()));
        let rows = poll_fn(|waker| match given_up.load(Ordering::Acquire) {
            true => Poll::Ready(Err(DataFusionError::Execution("given up".into()))),
            false => rows.as_mut().poll(waker),
        });
        let batches = self.runtime.block_on(rows).map_err(failed)?;
        batches.into_iter().map(|batch| self.stored(batch)).collect()
    }

    fn stored(&self, batch: RecordBatch) -> Result<RecordBatch, ManifestError> {
        let mut columns: Vec<ArrayRef> = Vec::with_capacity(batch.num_columns());
        for (column, field) in batch.columns().iter().zip(self.schema.fields()) {
            columns.push(if column.data_type() == field.data_type() {
                Arc::clone(column)
            } else {
                arrow::compute::cast(column, field.data_type())?
            });
        }
        let options = arrow::array::RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
        Ok(RecordBatch::try_new_with_options(
            Arc::clone(&self.schema),
            columns,
            &options,
        )?)
    }
}

/// A planned expression.
pub struct Expression {
    physical: Arc<dyn PhysicalExpr>,
    data_type: DataType,
    schema: SchemaRef,
}

impl Expression {
    pub fn data_type(&self) -> &DataType {
        &self.data_type
    }

    /// One value per row of `batch`.
    ///
    /// # Errors
    /// When a value cannot be computed.
    pub fn evaluate(&self, batch: &RecordBatch) -> Result<ArrayRef, ManifestError> {
        let batch = with_schema(batch.clone(), &self.schema)?;
        let value = self.physical.evaluate(&batch).map_err(|e| explain(e, "", &[]))?;
        value.into_array(batch.num_rows()).map_err(|e| explain(e, "", &[]))
    }
}

/// The schema of results: views and dictionaries of the engine become plain arrays.
fn stored_schema(schema: &Schema) -> SchemaRef {
    let fields: Vec<Field> = schema
        .fields()
        .iter()
        .map(|field| Field::new(field.name(), plain(field.data_type()), field.name() != ROW))
        .collect();
    Arc::new(Schema::new(fields))
}

fn plain(data_type: &DataType) -> DataType {
    match data_type {
        DataType::Utf8View | DataType::LargeUtf8 | DataType::Null => DataType::Utf8,
        DataType::BinaryView | DataType::LargeBinary => DataType::Binary,
        DataType::Dictionary(_, values) => plain(values),
        other => other.clone(),
    }
}
