//! Speech to text over HTTP.
