//! Text, independent of where it comes from: codes and tags of languages, normalisation, and Unicode forms.

pub mod language_codes;
pub mod language_names;
pub mod language_tag;
pub mod normalize;
pub mod written_form;
