//! From SQL text to a statement: one SELECT, placeholders bound, nothing that changes from run to run.

use std::ops::ControlFlow;

use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::error::DataFusionError;
use datafusion::logical_expr::{Expr, LogicalPlan, Volatility};
use datafusion::sql::parser::{DFParser, DFParserBuilder, Statement};
use datafusion::sql::sqlparser::ast;
use datafusion::sql::sqlparser::dialect::GenericDialect;
use datafusion::sql::sqlparser::keywords::Keyword;
use datafusion::sql::sqlparser::tokenizer::{Token, Tokenizer};
use flow_corpus::ManifestError;

use super::mistakes::{explain, near};
use super::{Param, Params};

/// Functions that the engine declares stable, although their results differ between runs.
const CLOCKS: [&str; 6] = [
    "now",
    "current_timestamp",
    "current_date",
    "current_time",
    "today",
    "version",
];

/// Parses one SELECT and puts the values of `params` in the place of placeholders.
pub(super) fn query(text: &str, params: &Params) -> Result<Statement, ManifestError> {
    let mut query = parse_query(text)?;
    bind(&mut query, text, params)?;
    Ok(Statement::Statement(Box::new(ast::Statement::Query(query))))
}

/// Parses one expression and puts the values of `params` in the place of placeholders.
pub(super) fn expression(text: &str, params: &Params) -> Result<ast::ExprWithAlias, ManifestError> {
    let mut expression = parse_expression(text)?;
    bind(&mut expression.expr, text, params)?;
    Ok(expression)
}

fn parse_query(text: &str) -> Result<Box<ast::Query>, ManifestError> {
    let not_a_query = || ManifestError::Sql {
        message: "only one SELECT is allowed here".into(),
        offset: Some((1, 1)),
        help: Some("a stage reads its inputs and gives rows; it creates, changes and copies nothing".into()),
    };
    let mut statements = parser(text)
        .and_then(|mut parser| parser.parse_statements())
        .map_err(|e| explain(e, text, &[]))?;
    match (statements.pop_front(), statements.is_empty()) {
        (Some(Statement::Statement(statement)), true) => match *statement {
            ast::Statement::Query(query) => Ok(query),
            _ => Err(not_a_query()),
        },
        _ => Err(not_a_query()),
    }
}

fn parse_expression(text: &str) -> Result<ast::ExprWithAlias, ManifestError> {
    let expression = parser(text)
        .and_then(|mut parser| parser.parse_into_expr())
        .map_err(|e| explain(e, text, &[]))?;
    if let Some(alias) = &expression.alias {
        return Err(ManifestError::sql(format!(
            "an expression without a name belongs here, but it is called `{alias}`"
        )));
    }
    Ok(expression)
}

fn parser(text: &str) -> Result<DFParser<'_>, DataFusionError> {
    DFParserBuilder::new(text).with_dialect(&GenericDialect {}).build()
}

fn bind(tree: &mut impl ast::VisitMut, text: &str, params: &Params) -> Result<(), ManifestError> {
    let outcome = ast::visit_expressions_mut(tree, |expression| {
        let ast::Expr::Value(value) = expression else {
            return ControlFlow::Continue(());
        };
        let ast::Value::Placeholder(placeholder) = &value.value else {
            return ControlFlow::Continue(());
        };
        let name = placeholder.trim_start_matches('$');
        match params.get(name) {
            Some(param) => {
                *expression = literal(param, value.span);
                ControlFlow::Continue(())
            }
            None => ControlFlow::Break(ManifestError::Sql {
                message: format!("no value for the placeholder `{placeholder}`"),
                offset: offset_of(text, |token| matches!(token, Token::Placeholder(p) if p == placeholder)),
                help: near(name, params.keys().map(String::as_str)).map(|name| format!("did you mean `${name}`?")),
            }),
        }
    });
    match outcome {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(error) => Err(error),
    }
}

fn literal(param: &Param, span: datafusion::sql::sqlparser::tokenizer::Span) -> ast::Expr {
    let plain = |value| ast::Expr::Value(ast::ValueWithSpan { value, span });
    let number = |negative: bool, digits: String| {
        let number = plain(ast::Value::Number(digits, false));
        // In parentheses, so that an operator before the placeholder applies to the whole number.
        if negative {
            ast::Expr::Nested(Box::new(ast::Expr::UnaryOp {
                op: ast::UnaryOperator::Minus,
                expr: Box::new(number),
            }))
        } else {
            number
        }
    };
    match param {
        Param::Null => plain(ast::Value::Null),
        Param::Bool(value) => plain(ast::Value::Boolean(*value)),
        Param::Int(value) => number(*value < 0, value.unsigned_abs().to_string()),
        // `{:?}` writes the shortest digits that read back as the same number, with a point or an exponent.
        Param::Float(value) => number(
            value.is_sign_negative() && !value.is_nan(),
            format!("{:?}", value.abs()),
        ),
        Param::Text(value) => plain(ast::Value::SingleQuotedString(value.clone())),
    }
}

/// A clause of a query that can make rows vanish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dropping {
    pub clause: &'static str,
    /// Line and column of the clause, from 1.
    pub offset: Option<(usize, usize)>,
}

/// The query in a fixed layout, and the first clause in it that can make rows vanish. Text that does not
/// parse comes back as it is.
pub fn normal_query(text: &str) -> (String, Option<Dropping>) {
    match parse_query(text) {
        Ok(query) => {
            let dropping = dropping_in_query(&query).map(|(clause, keyword)| Dropping {
                clause,
                offset: offset_of(
                    text,
                    |token| matches!(token, Token::Word(word) if word.keyword == keyword),
                ),
            });
            (query.to_string(), dropping)
        }
        Err(_) => (text.to_string(), None),
    }
}

/// The expression in a fixed layout. Text that does not parse comes back as it is.
pub fn normal_expression(text: &str) -> String {
    parse_expression(text).map_or_else(|_| text.to_string(), |expression| expression.to_string())
}

fn dropping_in_query(query: &ast::Query) -> Option<(&'static str, Keyword)> {
    let in_ctes = query
        .with
        .iter()
        .flat_map(|with| &with.cte_tables)
        .find_map(|cte| dropping_in_query(&cte.query));
    let in_body = || dropping_in_set(&query.body);
    let limit = || match &query.limit_clause {
        Some(ast::LimitClause::LimitOffset {
            limit: None,
            offset: Some(_),
            ..
        }) => Some(("OFFSET", Keyword::OFFSET)),
        Some(_) => Some(("LIMIT", Keyword::LIMIT)),
        None => query.fetch.as_ref().map(|_| ("FETCH", Keyword::FETCH)),
    };
    in_ctes.or_else(in_body).or_else(limit)
}

fn dropping_in_set(body: &ast::SetExpr) -> Option<(&'static str, Keyword)> {
    match body {
        ast::SetExpr::Select(select) => dropping_in_select(select),
        ast::SetExpr::Query(query) => dropping_in_query(query),
        ast::SetExpr::SetOperation { left, right, .. } => dropping_in_set(left).or_else(|| dropping_in_set(right)),
        _ => None,
    }
}

fn dropping_in_select(select: &ast::Select) -> Option<(&'static str, Keyword)> {
    let grouped = match &select.group_by {
        ast::GroupByExpr::All(_) => true,
        ast::GroupByExpr::Expressions(expressions, modifiers) => !expressions.is_empty() || !modifiers.is_empty(),
    };
    let tables = select
        .from
        .iter()
        .flat_map(|t| std::iter::once(&t.relation).chain(t.joins.iter().map(|join| &join.relation)));
    let derived = tables.filter_map(|table| match table {
        ast::TableFactor::Derived { subquery, .. } => dropping_in_query(subquery),
        _ => None,
    });
    if select.distinct.is_some() {
        Some(("DISTINCT", Keyword::DISTINCT))
    } else if select.selection.is_some() {
        Some(("WHERE", Keyword::WHERE))
    } else if grouped {
        Some(("GROUP BY", Keyword::GROUP))
    } else if select.having.is_some() {
        Some(("HAVING", Keyword::HAVING))
    } else if select.qualify.is_some() {
        Some(("QUALIFY", Keyword::QUALIFY))
    } else if select.top.is_some() {
        Some(("TOP", Keyword::TOP))
    } else {
        let mut derived = derived;
        derived.next()
    }
}

/// Where the first token that `wanted` accepts begins.
fn offset_of(text: &str, wanted: impl Fn(&Token) -> bool) -> Option<(usize, usize)> {
    let tokens = Tokenizer::new(&GenericDialect {}, text).tokenize_with_location().ok()?;
    let start = tokens.iter().find(|token| wanted(&token.token))?.span.start;
    Some((usize::try_from(start.line).ok()?, usize::try_from(start.column).ok()?))
}

/// Refuses a plan whose result changes from run to run.
pub(super) fn refuse_changing_plan(plan: &LogicalPlan, text: &str) -> Result<(), ManifestError> {
    let mut found = None;
    plan.apply_with_subqueries(|node| {
        node.apply_expressions(|expression| {
            found = found.take().or_else(|| changing(expression));
            Ok(TreeNodeRecursion::Continue)
        })
    })
    .map_err(|e| explain(e, text, &[]))?;
    found.map_or(Ok(()), |name| Err(changes(&name, text)))
}

/// Refuses an expression whose result changes from run to run.
pub(super) fn refuse_changing_expression(expression: &Expr, text: &str) -> Result<(), ManifestError> {
    changing(expression).map_or(Ok(()), |name| Err(changes(&name, text)))
}

fn changing(expression: &Expr) -> Option<String> {
    use datafusion::common::tree_node::TreeNode;
    let mut found = None;
    // The closure never fails, so neither does the walk.
    let _ = expression.apply(|part| {
        if let Expr::ScalarFunction(function) = part
            && (function.func.signature().volatility == Volatility::Volatile || CLOCKS.contains(&function.name()))
        {
            found = Some(function.name().to_string());
            return Ok(TreeNodeRecursion::Stop);
        }
        Ok(TreeNodeRecursion::Continue)
    });
    found
}

fn changes(name: &str, text: &str) -> ManifestError {
    ManifestError::Sql {
        message: format!("`{name}` gives another result in every run"),
        offset: offset_of(
            text,
            |token| matches!(token, Token::Word(word) if word.value.eq_ignore_ascii_case(name)),
        ),
        help: Some("what a stage writes must follow from its inputs and settings alone".into()),
    }
}
