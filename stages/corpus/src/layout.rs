//! Names of layouts.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How a corpus is arranged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// Found out; the log says what it was taken for. Where several fit, it is an error that names them.
    #[default]
    Auto,
    /// Lhotse: recordings and supervisions (`x_recordings_train.jsonl.gz`, `x_supervisions_train.jsonl.gz`).
    LhotseRecordings,
    /// Lhotse: cuts (`x_cuts_train.jsonl.gz`).
    LhotseCuts,
    /// Lhotse Shar: `cuts.000000.jsonl.gz` beside `recording.000000.tar`.
    LhotseShar,
    /// Kaldi and ESPnet: `wav.scp` and `text`, perhaps `segments`, `utt2spk`, `utt2lang`.
    Kaldi,
    /// Hugging Face: Parquet files with a column of recordings, as on the hub.
    HuggingFaceParquet,
    /// Hugging Face: a folder that `save_to_disk` wrote, or Arrow files of its cache.
    HuggingFaceArrow,
    /// Hugging Face's AudioFolder: recordings and `metadata.csv`, `.tsv`, `.jsonl` or `.parquet`, in a folder or in `.zip` archives.
    AudioFolder,
    /// Common Voice: `clips` beside `validated.tsv`, `train.tsv` and others.
    CommonVoice,
    /// Common Voice, spontaneous speech: `audios` beside `ss-corpus-<locale>.tsv`.
    CommonVoiceSpontaneous,
    /// Multilingual LibriSpeech: `train/transcripts.txt` and `train/audio`.
    Mls,
    /// VoxPopuli: `asr_train.tsv` beside folders of years, or `transcribed_data` above them; or the annotations
    /// `asr_<lang>.tsv.gz` of whole sessions in `raw_audios`.
    Voxpopuli,
    /// FLEURS: `train.tsv` without a heading beside `audio/train`.
    Fleurs,
    /// GigaSpeech: `GigaSpeech.json` beside `audio`.
    Gigaspeech,
    /// GigaSpeech 2: `train_refined.tsv` without a heading beside folders of recordings.
    #[serde(rename = "gigaspeech_2")]
    Gigaspeech2,
    /// The People's Speech: lists of sessions, `train/clean.json`, beside the folders of their clips.
    PeoplesSpeech,
    /// LJSpeech: `metadata.csv` without a heading beside `wavs`.
    Ljspeech,
    /// SPGISpeech: `train.csv` with bars between the fields beside the folder `train`.
    Spgispeech,
    /// Granary: NeMo's lines in folders `yodas`, `voxpopuli`, `ytc` and `librilight`, without recordings.
    Granary,
    /// NeMo's tarred data: `manifest.json` or `sharded_manifests` beside `audio_0.tar`.
    NemoTarred,
    /// WebDataset: tars with a recording and its text (`.txt`, or in a `.json`) under one name.
    #[serde(rename = "webdataset")]
    WebDataset,
    /// YODAS: `text/00000000.txt` beside `audio/00000000.tar` or a folder of this name.
    Yodas,
    /// YODAS2: `text/00000000.json` beside `audio/00000000.tar` or a folder of this name, with recordings of whole videos.
    #[serde(rename = "yodas_2")]
    Yodas2,
    /// Long recordings, each with its subtitles (`.srt`, `.vtt`) beside it.
    Subtitles,
    /// Recordings, each with its text (`.txt`, `.lab`) beside it or in a list (`.trans.txt`), as LibriSpeech has them; in
    /// folders that are called by splits (`train-clean-100`, `dev-clean`) those of the chosen splits.
    Transcripts,
}
