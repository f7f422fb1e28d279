//! Conditions on the values of a column.

/// What a value has to be.
#[derive(Clone, Debug, PartialEq)]
pub enum Test {
    /// The value as text is equal to this.
    Equals(String),
    /// The value as text is one of these.
    OneOf(Vec<String>),
    /// The value as text contains this, case-insensitively.
    Contains(String),
    AtLeast(f64),
    AtMost(f64),
    IsNull,
}

/// A condition of a filter on a column, compared with its statistics.
#[derive(Clone, Debug, PartialEq)]
pub struct Bound {
    pub column: String,
    pub test: Test,
}
