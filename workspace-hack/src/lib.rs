//! Nothing: the manifest of this crate is what it is for. See `.ci/workspace_hack`.
