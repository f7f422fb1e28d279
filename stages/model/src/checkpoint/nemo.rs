//! NeMo's `.nemo` archive: a tar, possibly gzipped, of `model_config.yaml`, `model_weights.ckpt` (a PyTorch zip) and
//! the tokenizer's files, which the configuration names as `nemo:<member>`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, BufWriter, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;

use candle_core::DType;

use super::{Format, MAX_CONFIG, MAX_SMALL_FILE, OpenModel, broken};
use crate::config::ModelConfig;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use flow_nn::tensor_files::tar_members::tar_members;
use flow_nn::tensor_files::tensor_entry::{OpenFile, written_dtype};
use flow_nn::tensor_files::torch::{TorchFile, open_torch};
use flow_nn::tensor_files::zip::{Member, Region};

const CONFIG_MEMBER: &str = "model_config.yaml";
const WEIGHTS_MEMBER: &str = "model_weights.ckpt";

/// How often larger the tar may be than its gzip, beyond [`FREE`] bytes. Weights are numbers that hardly repeat: theirs is
/// below 2, and stays below 20 where nearly all are zero.
const MOST_PACKED: u64 = 32;
const FREE: u64 = 64 << 20;

/// Opens a `.nemo` archive. Errors name the file and the member that is at fault.
pub(super) fn open_nemo(path: &Path) -> Result<OpenModel> {
    let wrong = |what: String| broken(path, what);
    let file = Arc::new(OpenFile {
        path: path.to_path_buf(),
        file: open_tar(path).map_err(|error| broken(path, error))?,
    });
    let tar = tar_members(&file.file).map_err(|error| match error.kind() {
        ErrorKind::UnexpectedEof => broken(path, "is not a .nemo archive, or is cut off"),
        _ => broken(path, format!("is not a .nemo archive: {error}")),
    })?;
    let small = |name: &str, most: u64| {
        let member = find(&tar, path, name)?;
        if member.length > most {
            return Err(broken(
                path,
                format!(
                    "has a member `{name}` of {} bytes, where at most {most} are read",
                    member.length
                ),
            ));
        }
        let region = Region {
            file: &file.file,
            start: member.offset,
            length: member.length,
        };
        region
            .read(0, member.length)
            .map_err(|what| broken(path, format!("member `{name}` {what}")))
    };
    let config_yaml = String::from_utf8(small(CONFIG_MEMBER, MAX_CONFIG)?)
        .map_err(|_| broken(path, "has a model_config.yaml that is not UTF-8"))?;
    let tokenizer = match tokenizer_member(&config_yaml, &tar).map_err(wrong)? {
        Some(name) => Some(small(&name, MAX_SMALL_FILE)?),
        None => None,
    };
    let weights = find(&tar, path, WEIGHTS_MEMBER)?;
    let tensors = open_torch(&file, weights.offset, weights.length, |_, tensors| Ok(tensors))
        .map_err(|what| broken(path, format!("member `{WEIGHTS_MEMBER}` {what}")))?;
    Ok(OpenModel {
        path: path.to_path_buf(),
        format: Format::Nemo,
        config_yaml,
        no_tokenizer: tokenizer
            .is_none()
            .then(|| format!("{} holds no tokenizer.model", path.display())),
        tokenizer,
        tensors,
        notes: Vec::new(),
    })
}

fn find(tar: &BTreeMap<String, Member>, path: &Path, name: &str) -> Result<Member> {
    tar.get(name)
        .copied()
        .ok_or_else(|| broken(path, format!("has no member `{name}`")))
}

/// The archive as an uncompressed tar: the file itself, or a nameless temporary file with its gunzipped bytes.
fn open_tar(path: &Path) -> std::io::Result<File> {
    let mut file = File::open(path)?;
    let mut magic = [0; 2];
    let found = file.read(&mut magic)?;
    file.seek(SeekFrom::Start(0))?;
    if found == 2 && magic == [0x1f, 0x8b] {
        let mut plain = tempfile::tempfile()?;
        gunzip(&file, &mut plain)?;
        plain.seek(SeekFrom::Start(0))?;
        return Ok(plain);
    }
    Ok(file)
}

/// Unpacks a file, up to the size that weights could have.
fn gunzip(mut packed: &File, plain: &mut impl Write) -> std::io::Result<()> {
    let mut unpacked = flate2::read::MultiGzDecoder::new(BufReader::new(packed));
    let mut buffer = vec![0; 1 << 20];
    let mut written = 0u64;
    loop {
        let count = match unpacked.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        written = written.saturating_add(count as u64);
        let taken = packed.stream_position()?;
        if written > taken.saturating_mul(MOST_PACKED).saturating_add(FREE) {
            return Err(std::io::Error::other(format!(
                "its gzip grows beyond {MOST_PACKED} times its size, as that of weights does not ({taken} bytes to {written}); \
                 if it is to be trusted, unpack it with gunzip and give the tar"
            )));
        }
        plain.write_all(&buffer[..count])?;
    }
}

/// The member that holds the SentencePiece model.
fn tokenizer_member(config_yaml: &str, tar: &BTreeMap<String, Member>) -> std::result::Result<Option<String>, String> {
    let unreadable = |error: &dyn std::fmt::Display| format!("has an unreadable model_config.yaml: {error}");
    flow_yaml_guard::check(config_yaml).map_err(|error| unreadable(&error))?;
    let config: serde_yaml::Value = serde_yaml::from_str(config_yaml).map_err(|error| unreadable(&error))?;
    let tokenizer = &config["tokenizer"];
    if tokenizer["type"].as_str() == Some("agg") {
        return Err("has an aggregate tokenizer (`tokenizer.type: agg`), which is not supported".into());
    }
    let named = tokenizer["model_path"]
        .as_str()
        .and_then(|value| value.strip_prefix("nemo:"));
    Ok(match named {
        Some(name) => Some(name.to_string()),
        None => tar.keys().find(|name| name.ends_with("tokenizer.model")).cloned(),
    })
}

/// Writes a `.nemo` archive that NeMo restores. The same model gives the same bytes.
pub(super) fn write_nemo(file: &mut File, path: &Path, model: &OpenModel, dtype: Option<DType>) -> Result<()> {
    let mut config = ModelConfig::from_nemo_yaml(&model.config_yaml).map_err(|error| broken(&model.path, error))?;
    let bytes = model.tokenizer.as_deref().ok_or_else(|| {
        Error::Tokenizer(format!(
            "{}; a .nemo archive needs one: give a SentencePiece .model file",
            model.no_tokenizer.as_deref().unwrap_or("there is none")
        ))
    })?;
    let tokenizer = Tokenizer::from_bytes(bytes)?;
    let files = [
        ("tokenizer.model", bytes.to_vec()),
        ("vocab.txt", tokenizer.nemo_vocabulary().into_bytes()),
        ("tokenizer.vocab", scores_text(&tokenizer)?.into_bytes()),
    ]
    .map(|(name, bytes)| (format!("{:032x}_{name}", digest(&bytes)), bytes));
    if config.labels.is_empty() {
        config.labels = tokenizer.pieces();
    }
    let [model_path, vocab_path, scores_path] = files.each_ref().map(|(name, _)| Some(format!("nemo:{name}")));
    config.tokenizer.kind = "bpe".into();
    config.tokenizer.model_path = model_path;
    config.tokenizer.vocab_path = vocab_path;
    config.tokenizer.spe_tokenizer_vocab = scores_path;
    let config_yaml = config.to_nemo_archive_yaml()?;

    let dropout = config
        .transducer
        .as_ref()
        .map_or(0.0, |transducer| transducer.joint.dropout);
    let net = if dropout > 0.0 { 2 } else { 1 };
    let tensors = model
        .tensors
        .iter()
        .map(|entry| (entry, archive_name(&entry.name, net), written_dtype(entry, dtype)))
        .collect();
    let weights = TorchFile::new(tensors)?;
    let mut out = BufWriter::new(file);
    let io = |error| broken(path, error);
    write_member(&mut out, CONFIG_MEMBER, config_yaml.as_bytes()).map_err(io)?;
    for (name, bytes) in &files {
        write_member(&mut out, name, bytes).map_err(io)?;
    }
    let length = weights.length();
    write_header(&mut out, WEIGHTS_MEMBER, length).map_err(io)?;
    weights.write(&mut out, path)?;
    write_padding(&mut out, length).map_err(io)?;
    // Two empty blocks end a tar.
    out.write_all(&[0; 1024]).and_then(|()| out.flush()).map_err(io)
}

/// NeMo counts the modules of the joint network: its last layer is the third where there is dropout, else the second.
fn archive_name(name: &str, net: usize) -> String {
    match name
        .strip_prefix("joint.joint_net.")
        .and_then(|rest| rest.split_once('.'))
    {
        Some((_, part)) => format!("joint.joint_net.{net}.{part}"),
        None => name.to_string(),
    }
}

fn write_member(out: &mut impl Write, name: &str, bytes: &[u8]) -> std::io::Result<()> {
    write_header(out, name, bytes.len() as u64)?;
    out.write_all(bytes)?;
    write_padding(out, bytes.len() as u64)
}

fn write_header(out: &mut impl Write, name: &str, length: u64) -> std::io::Result<()> {
    let mut header = tar::Header::new_gnu();
    // NeMo's own archives name their members so; the tar library would drop the dot.
    let name = format!("./{name}");
    let field = &mut header.as_old_mut().name;
    field
        .get_mut(..name.len())
        .ok_or_else(|| std::io::Error::other("a member's name is too long"))?
        .copy_from_slice(name.as_bytes());
    header.set_size(length);
    header.set_mode(0o644);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header.set_entry_type(tar::EntryType::Regular);
    header.set_cksum();
    out.write_all(header.as_bytes())
}

fn write_padding(out: &mut impl Write, length: u64) -> std::io::Result<()> {
    let padding = length.next_multiple_of(512) - length;
    out.write_all(&[0; 512][..padding as usize])
}

/// 128 bits of the contents (FNV-1a), where NeMo writes a random number: it only has to differ between files.
fn digest(bytes: &[u8]) -> u128 {
    bytes
        .iter()
        .fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |hash: u128, byte| {
            (hash ^ u128::from(*byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
        })
}

/// SentencePiece's `tokenizer.vocab`: pieces and scores.
fn scores_text(tokenizer: &Tokenizer) -> Result<String> {
    let scores = tokenizer.scores()?;
    let lines = tokenizer.pieces().into_iter().zip(scores);
    Ok(lines
        .map(|(piece, score)| format!("{piece}\t{}\n", six_digits(score)))
        .collect())
}

/// A number as C++ prints it by default: six significant digits.
fn six_digits(value: f32) -> String {
    if value == 0.0 {
        return if value.is_sign_negative() { "-0" } else { "0" }.into();
    }
    if !value.is_finite() {
        return value.to_string().to_lowercase();
    }
    let scientific = format!("{:.5e}", f64::from(value));
    let Some((digits, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let short = |text: &str| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => text.to_string(),
    };
    if (-4..6).contains(&exponent) {
        let decimals = usize::try_from(5 - exponent).unwrap_or(0);
        short(&format!("{:.decimals$}", f64::from(value)))
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{}e{sign}{:02}", short(digits), exponent.abs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_printed_as_in_sentencepiece_vocabularies() {
        let cases = [
            (0.0, "0"),
            (-0.0, "-0"),
            (-41.0, "-41"),
            (-3.456_789_2, "-3.45679"),
            (-12.5, "-12.5"),
            (-100_000.0, "-100000"),
            (-1_234_567.0, "-1.23457e+06"),
            (0.000_012, "1.2e-05"),
            (-9.999_999, "-10"),
        ];
        for (value, text) in cases {
            assert_eq!(six_digits(value), text);
        }
    }

    /// A file of an archive with one member.
    fn archive(name: &str, contents: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        write_member(&mut bytes, name, contents).unwrap();
        bytes.extend([0; 1024]);
        bytes
    }

    fn refused(bytes: &[u8]) -> String {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        let error = open_nemo(file.path()).unwrap_err().to_string();
        assert!(error.starts_with(&file.path().display().to_string()), "{error}");
        error
    }

    #[test]
    fn a_gzip_that_grows_as_no_weights_do_is_not_unpacked() {
        let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packer.write_all(&archive(WEIGHTS_MEMBER, &vec![0; 256 << 20])).unwrap();
        let packed = packer.finish().unwrap();
        assert!(packed.len() < 4 << 20);
        assert!(refused(&packed).contains("unpack it with gunzip"));
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&packed).unwrap();
        file.rewind().unwrap();
        let mut plain = Vec::new();
        gunzip(&file, &mut plain).unwrap_err();
        // Not all that it could unpack to comes to the disk.
        assert!(plain.len() <= 128 << 20, "{}", plain.len());
    }

    #[test]
    fn a_configuration_larger_than_any_is_not_read() {
        let config = vec![b'#'; (MAX_CONFIG + 1) as usize];
        assert!(refused(&archive(CONFIG_MEMBER, &config)).contains("at most 4194304 are read"));
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(CONFIG_MEMBER), &config).unwrap();
        let error = OpenModel::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains("model_config.yaml: has 4194305 bytes"), "{error}");
    }

    #[test]
    fn a_configuration_nested_without_end_is_refused_at_once() {
        let deep = format!("encoder: {}", "[".repeat(100_000));
        let error = refused(&archive(CONFIG_MEMBER, deep.as_bytes()));
        assert!(
            error.contains("model_config.yaml") && error.contains("128 deep"),
            "{error}"
        );
        let error = ModelConfig::from_nemo_yaml(&deep).unwrap_err().to_string();
        assert!(
            error.contains("128 deep") && error.contains("at line 1 column"),
            "{error}"
        );
    }
}
