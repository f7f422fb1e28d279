//! `flow check --deep`: what a training begins from, and how the texts of its manifests fit that model.

use std::collections::BTreeMap;
use std::io::Write;

use flow_base::escape::escape_line;
use flow_evaluation::text_style::TextStyle;
use flow_inspect::table::count;
use flow_model::ModelConfig;
use flow_model::checkpoint::OpenModel;
use flow_model::tokenizer::Tokenizer;
use flow_spec::Checked;
use flow_storage::Storage;
use flow_text::language_tag::split_tag;
use flow_training::init::is_remote;
use flow_training::prompts::RowPrompts;
use flow_training::resolved_settings::ResolvedSettings;
use flow_training::settings::TrainSettings;
use flow_training::start_report::{BaseRecipe, WordsAndTokens, many_tokens};

use super::manifests::Texts;
use flow_cli::failure::Failure;

/// Letters that a line names.
const LETTERS: usize = 10;

/// Prints, for each stage that trains, its recipe beside that of the model that it begins from, and how texts of the manifests
/// are written and cut into tokens. A model that is not on this machine is left out.
pub fn look_at_training(
    storage: &Storage,
    checked: &Checked,
    texts: &Texts,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    for stage in &checked.stages {
        if stage.kind.name() != "training.train" {
            continue;
        }
        let settings: TrainSettings = serde_json::from_value(stage.settings.all()).map_err(Failure::unreadable)?;
        let settings = ResolvedSettings::from(settings);
        if is_remote(&settings.init) || (settings.init != "none" && !OpenModel::exists(settings.init_path())) {
            continue;
        }
        let wrong = |error: flow_training::TrainingError| Failure::unreadable(format!("{}: {error}", stage.name));
        writeln!(out, "{}", escape_line(&recipe(&stage.name, &settings).map_err(wrong)?))?;
        let tokenizer = tokenizer(storage, &settings).map_err(wrong)?;
        let lines = of_texts(texts, tokenizer.as_ref());
        let prompts = of_prompts(&settings, texts).map_err(wrong)?;
        for line in lines.into_iter().chain(prompts) {
            writeln!(out, "{}", escape_line(&line))?;
        }
    }
    Ok(())
}

/// The tokenizer of a training; none if it is still to be made.
fn tokenizer(
    storage: &Storage,
    settings: &ResolvedSettings,
) -> Result<Option<Tokenizer>, flow_training::TrainingError> {
    let bytes = match settings.tokenizer_file(storage)? {
        None if settings.init != "none" => OpenModel::open(settings.init_path())?.tokenizer,
        bytes => bytes,
    };
    // One that cannot be read is an error of `flow plan` with its place.
    Ok(bytes.and_then(|bytes| Tokenizer::from_bytes(&bytes).ok()))
}

fn recipe(stage: &str, settings: &ResolvedSettings) -> Result<String, flow_training::TrainingError> {
    let base = BaseRecipe::of_init(settings)?;
    let rates = match settings.unfreeze_step {
        0 => format!("rate {:e}", settings.phase2_lr),
        step => format!(
            "rate {:e} with the encoder frozen for {step} steps, then {:e}",
            settings.phase1_lr, settings.phase2_lr
        ),
    };
    let known: Vec<String> = [
        base.optimizer,
        base.rate.map(|rate| format!("rate {rate}")),
        base.schedule,
        base.batch,
    ]
    .into_iter()
    .flatten()
    .collect();
    let with = match (settings.init.as_str(), known.is_empty()) {
        ("none", _) => "begins from nothing".to_owned(),
        (init, true) => format!("begins from {init}, which does not say how it was trained"),
        (init, false) => format!("begins from {init}, which was trained with {}", known.join(", ")),
    };
    Ok(format!("{stage}: {rates}; {with}"))
}

/// A line about languages without a prompt, where the model has prompts.
fn of_prompts(settings: &ResolvedSettings, texts: &Texts) -> Result<Option<String>, flow_training::TrainingError> {
    if settings.init == "none" {
        return Ok(None);
    }
    let opened = OpenModel::open(settings.init_path())?;
    // One that cannot be read is an error of the run with its reason.
    let Ok(config) = ModelConfig::from_nemo_yaml(&opened.config_yaml) else {
        return Ok(None);
    };
    let Some(prompts) = RowPrompts::of_model(&config, &settings.prompts, settings.seed)? else {
        return Ok(None);
    };
    let mut rows_of: BTreeMap<String, u64> = BTreeMap::new();
    for (language, _) in texts {
        *rows_of.entry(language.clone()).or_default() += 1;
    }
    let refusal = prompts.check("the manifest", &rows_of).err();
    Ok(refusal.map(|error| format!("  warning: training refuses these rows: {}", error.with_help())))
}

/// Lines about texts: their style, tokens a word, and letters that the tokenizer does not know.
fn of_texts(texts: &Texts, tokenizer: Option<&Tokenizer>) -> Vec<String> {
    let mut style = TextStyle::default();
    texts.iter().for_each(|(_, text)| style.add(text));
    if style.texts == 0 {
        return Vec::new();
    }
    let mut lines = vec![format!(
        "  {} texts: {}",
        count(style.texts),
        style.in_words().join(", ")
    )];
    let Some(tokenizer) = tokenizer else { return lines };
    let mut languages: BTreeMap<String, WordsAndTokens> = BTreeMap::new();
    let mut unknown: BTreeMap<char, u64> = BTreeMap::new();
    let mut pieces = TextStyle::default();
    tokenizer.pieces().iter().for_each(|piece| pieces.add(piece));
    for (language, text) in texts {
        let words = split_tag(text).1;
        let found = languages.entry(language.clone()).or_default();
        found.words += words.split_whitespace().count() as u64;
        found.tokens += tokenizer.encode(words).len() as u64;
        for letter in tokenizer.unknown_letters(text) {
            *unknown.entry(letter).or_default() += 1;
        }
    }
    let tokens = languages
        .iter()
        .map(|(name, found)| format!("{name} {:.2}", found.tokens_per_word()));
    lines.push(format!("  tokens a word: {}", tokens.collect::<Vec<_>>().join(", ")));
    lines.extend(many_tokens(&languages).map(|warning| format!("  warning: {warning}")));
    if !unknown.is_empty() {
        let named = unknown
            .iter()
            .take(LETTERS)
            .map(|(letter, times)| format!("{letter:?} {times}"));
        let more = if unknown.len() > LETTERS { ", ..." } else { "" };
        lines.push(format!(
            "  warning: letters that the tokenizer does not know: {}{more}",
            named.collect::<Vec<_>>().join(", ")
        ));
    }
    let lacks = [
        ("capital letters", style.capitals, pieces.capitals),
        ("punctuation", style.marks, pieces.marks),
        ("digits", style.digits, pieces.digits),
    ];
    for (what, in_texts, in_pieces) in lacks {
        if in_texts == 0 && in_pieces > 0 {
            lines.push(format!(
                "  the tokenizer has {what}, and these texts have none: a model that writes them forgets to"
            ));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use flow_model::model::TdtModel;

    use super::*;

    #[test]
    fn texts_are_compared_with_what_the_tokenizer_can_write() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/configs/tokenizers/mini.model");
        let tokenizer = Tokenizer::from_bytes(&std::fs::read(path).unwrap()).unwrap();
        let texts = vec![
            ("hi".to_owned(), "<|hi|> एक दो".to_owned()),
            ("de".to_owned(), "Straße ☃".to_owned()),
            ("de".to_owned(), String::new()),
        ];
        let lines = of_texts(&texts, Some(&tokenizer)).join("\n");
        assert!(
            lines.starts_with("  2 texts: capital letters in 100 %, punctuation in 0 %"),
            "{lines}"
        );
        assert!(
            lines.contains("tokens a word: de ") && lines.contains("'☃' 1"),
            "{lines}"
        );
        assert!(of_texts(&Vec::new(), Some(&tokenizer)).is_empty());
    }

    #[test]
    fn languages_without_a_prompt_are_told() {
        let place = tempfile::tempdir().unwrap();
        let yaml = "
preprocessor: {sample_rate: 16000, window_size: 0.025, window_stride: 0.01, features: 16, n_fft: 512, pad_to: 0}
encoder:
  {feat_in: 16, n_layers: 1, d_model: 8, n_heads: 2, use_bias: false, xscaling: false, conv_kernel_size: 5,
   subsampling: dw_striding, subsampling_factor: 8, subsampling_conv_channels: 4}
decoder: {vocab_size: 8, prednet: {pred_hidden: 8, pred_rnn_layers: 1}}
joint: {jointnet: {joint_hidden: 8}}
loss: {loss_name: default}
model_defaults: {initialize_prompt_feature: true, num_prompts: 3, prompt_dictionary: {hi-IN: 0, auto: 2}}
";
        let config = ModelConfig::from_nemo_yaml(yaml).unwrap();
        let model = TdtModel::new(config, None, 1, DType::F32, &Device::Cpu).unwrap();
        model.save(place.path()).unwrap();
        let mut settings = TrainSettings {
            init: place.path().display().to_string(),
            ..TrainSettings::default()
        };
        let texts = vec![("hi".to_owned(), "x".to_owned()), ("ta".to_owned(), "y".to_owned())];
        let line = |settings: &TrainSettings| of_prompts(&ResolvedSettings::from(settings.clone()), &texts).unwrap();
        let told = line(&settings).unwrap();
        assert!(
            told.contains("ta (1 rows)") && told.contains("prompt_of") && !told.contains("hi ("),
            "{told}"
        );
        settings.prompts.prompt_of.insert("ta".into(), "hi".into());
        assert_eq!(line(&settings), None);
    }
}
