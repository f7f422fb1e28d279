//! The normalisation of words by the options.

use flow_evaluation::normalize::{Normalization, Normalizer};

use crate::arguments::{NormalizationArguments, Normalize};
use flow_cli::failure::Failure;

/// The normaliser of the options.
///
/// # Errors
/// Where an option needs another normalisation.
pub fn normalizer(arguments: &NormalizationArguments) -> Result<Normalizer, Failure> {
    let normalization = |normalize| match normalize {
        Normalize::None => Normalization::None,
        Normalize::WhisperBasic => Normalization::WhisperBasic,
        Normalize::KeepMarks => Normalization::KeepMarks,
        Normalize::WhisperEnglish => Normalization::WhisperEnglish,
        Normalize::OpenAsrEnglish => Normalization::OpenAsrEnglish,
        Normalize::OpenAsrMultilingual => Normalization::OpenAsrMultilingual,
        Normalize::Indic => Normalization::Indic,
        Normalize::ByLanguage => Normalization::ByLanguage,
    };
    let languages = arguments.normalize_language.iter();
    let normalizer = Normalizer {
        normalization: normalization(arguments.normalize),
        languages: languages
            .map(|(lang, how)| (lang.clone(), normalization(*how)))
            .collect(),
        ascii_digits: arguments.ascii_digits,
        remove_diacritics: arguments.remove_diacritics,
        split_letters: arguments.split_letters,
    };
    normalizer.check().map_err(|(option, needed)| {
        let option = option.replace('_', "-");
        Failure::usage(
            format!("`--{option}` needs {needed} as `--normalize`"),
            "add it, or leave the other out",
        )
    })?;
    Ok(normalizer)
}
