//! `flow transcribe --stream`: words as they are heard, by a cache-aware model.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use flow_audio::format::{Format, recognise};
use flow_audio::recording_reader::Channels;
use flow_audio::samples::OnDamage;
use flow_audio::wire_audio::{AudioFormat, PCM_RATES, WireAudio};
use flow_kernels::device::DeviceChoice;
use flow_model::Weights;
use flow_model::decoding::DecodingOptions;
use flow_model::heads::HeadKind;
use flow_storage::Storage;
use flow_transcription::Word;
use flow_transcription::decoding_request::DecodingRequest;
use flow_transcription::language_prior::parse_languages;
use flow_transcription::recognizer::Recognizer;
use flow_transcription::recognizer::listen::{HeardNext, Listener, Spoken};
use flow_transcription::segments::ends_sentence;
use flow_transcription::streamed::StreamedRecording;
use flow_transcription::transcribe::MAX_DURATION;
use serde_json::json;

use crate::arguments::{ChannelUse, Decoder, Progress, TranscribeArguments, WindowMethod};
use flow_cli::failure::{Exit, Failure};
use flow_cli::fetch::{local_model, tell};

/// Bytes of standard input that are read at once: at most 32 ms at 16 kHz, so that nothing waits for more.
const BLOCK: usize = 1_024;
/// Bytes within which the data of a WAV file begin.
const MOST_HEADER: usize = 1 << 20;

pub fn transcribe_stream(
    storage: &Storage,
    arguments: &TranscribeArguments,
    out: &mut dyn Write,
) -> Result<Exit, Failure> {
    let as_json = check(arguments)?;
    let [delay, boost_weight] = parameters(&arguments.recordings.set)?;
    let Some(model) = &arguments.decoding.model else {
        return Err(Failure::usage(
            "the bundled small model hears whole recordings",
            "--stream takes a cache-aware model: name one by --model",
        ));
    };
    let speaks = !matches!(arguments.recordings.progress, Progress::None | Progress::Json);
    let device: DeviceChoice = arguments
        .decoding
        .device
        .parse()
        .map_err(|error| Failure::usage(format!("--device: {error}"), "cpu, cuda or cuda:1"))?;
    let device = device.open(0).map_err(Failure::unreadable)?;
    let (weights, precision) = (Weights::default().into(), arguments.decoding.precision.into());
    let recognizer = Recognizer::load_in(&local_model(storage, model, speaks)?, weights, precision, &device);
    let options = DecodingOptions {
        head: arguments.decoding.decoder.map(|decoder| match decoder {
            Decoder::Transducer => HeadKind::Transducer,
            Decoder::Ctc => HeadKind::Ctc,
        }),
        beam: arguments.decoding.beam.map_or(0, usize::from),
        lm: arguments.decoding.lm.clone(),
        boost: arguments.boost.clone(),
        boost_weight,
        ..DecodingOptions::default()
    };
    let recognizer = recognizer.and_then(|recognizer| recognizer.with_decoding(&options));
    let recognizer = recognizer.map_err(Failure::unreadable)?;
    let latency = arguments.latency.map(|milliseconds| f64::from(milliseconds) / 1000.0);
    let context = recognizer.context_for(latency).map_err(Failure::unreadable)?;
    if speaks {
        let milliseconds = (recognizer.latency(context) * 1000.0).round();
        tell(&format!("attention context {context}: a latency of {milliseconds} ms"));
    }
    let languages = arguments
        .decoding
        .language
        .as_deref()
        .map_or(Ok(Vec::new()), parse_languages);
    let request = DecodingRequest {
        languages: languages.map_err(|why| Failure::usage(format!("--language: {why}"), "such as fr"))?,
        ..DecodingRequest::default()
    };
    let decoding = recognizer.decoding_for(&request).map_err(Failure::unreadable)?;
    if speaks {
        let precision = flow_model::Precision::from(arguments.decoding.precision);
        let notes = recognizer.notes().iter().chain(&decoding.notes).map(String::as_str);
        let warning = precision.warning();
        for note in notes.chain(warning.as_deref()) {
            tell(&format!("warning: {note}"));
        }
    }
    let listener = recognizer.listen(context, &request).map_err(Failure::unreadable)?;
    let mut hearing = Hearing {
        recognizer: &recognizer,
        listener,
        delay,
        to: Printer {
            out,
            as_json,
            partial: String::new(),
            is_at_start: true,
        },
    };
    match &arguments.recordings.input[0] {
        input if input == "-" => hear_bytes(&mut io::stdin().lock(), &mut hearing)?,
        input => hear_file(storage, Path::new(input), arguments.recordings.track, &mut hearing)?,
    }
    hearing.hear(&[], true)?;
    hearing.to.end()?;
    Ok(Exit::Done)
}

/// Whether events are JSON; an error where the arguments ask for what a stream does not give.
fn check(arguments: &TranscribeArguments) -> Result<bool, Failure> {
    let (recordings, speakers) = (&arguments.recordings, &arguments.speakers);
    let has_count = [speakers.num_speakers, speakers.min_speakers, speakers.max_speakers]
        .iter()
        .any(Option::is_some);
    let is_standard_input = recordings.input.iter().any(|input| input == "-");
    let refused = [
        (arguments.diarize, "--diarize"),
        (has_count, "--num-speakers"),
        (speakers.known_speakers.is_some(), "--known-speakers"),
        (speakers.diarization_model.is_some(), "--diarization-model"),
        (arguments.decoding.window != WindowMethod::Auto, "--window"),
        (arguments.channels == ChannelUse::Split, "--channels split"),
        (
            arguments.coverage.is_some() || arguments.require_coverage.is_some(),
            "--coverage",
        ),
        (arguments.decoding.language_prior.is_some(), "--language-prior"),
        (recordings.track.is_some() && is_standard_input, "--track"),
        (recordings.out.is_some(), "--out"),
        (recordings.overwrite, "--overwrite"),
        (recordings.state.is_some(), "--state"),
        (recordings.workers.is_some(), "--workers"),
        (recordings.events.is_some(), "--events"),
    ];
    if let Some((_, option)) = refused.iter().find(|(is_given, _)| *is_given) {
        let message = format!("`{option}` does not go with --stream");
        return Err(Failure::usage(message, "leave out one of them"));
    }
    if arguments.recordings.input.len() != 1 {
        let message = format!(
            "--stream takes one recording, and {} are named",
            arguments.recordings.input.len()
        );
        return Err(Failure::usage(message, "name one, or `-` for standard input"));
    }
    match &arguments.format[..] {
        [format] if format == "txt" => Ok(false),
        [format] if format == "json" => Ok(true),
        _ => Err(Failure::usage(
            format!("--stream prints txt or json, not {}", arguments.format.join(",")),
            "json is one event per line",
        )),
    }
}

/// The values of `delay` and `boost_weight`, the parameters of the pipeline that a stream has.
fn parameters(set: &[String]) -> Result<[f64; 2], Failure> {
    let mut values = [0.0, DecodingOptions::default().boost_weight];
    let known = [("delay", 1.0, "0 to 1 second"), ("boost_weight", 100.0, "0 to 100")];
    for setting in set {
        let given = setting.split_once('=');
        let found = given.and_then(|(name, value)| Some((known.iter().position(|known| known.0 == name)?, value)));
        let Some((at, value)) = found else {
            let message = format!("`--set {setting}` does not go with --stream");
            let help = "with it there are `--set delay=SECONDS` and `--set boost_weight=WEIGHT`";
            return Err(Failure::usage(message, help));
        };
        let (name, most, range) = known[at];
        let number = value.trim().parse().ok().filter(|number| (0.0..=most).contains(number));
        values[at] =
            number.ok_or_else(|| Failure::usage(format!("`--set {setting}`"), format!("`{name}` is from {range}")))?;
    }
    Ok(values)
}

/// A recording that is heard, and where its words go.
struct Hearing<'a> {
    recognizer: &'a Recognizer,
    listener: Listener,
    /// Seconds that are subtracted from the times of words.
    delay: f64,
    to: Printer<'a>,
}

impl Hearing<'_> {
    fn hear(&mut self, samples: &[f32], is_last: bool) -> Result<(), Failure> {
        let listener = &mut self.listener;
        let spoken = &mut [Spoken {
            listener,
            samples,
            is_last,
        }];
        let heard = self.recognizer.hear_next(spoken).map_err(Failure::unreadable)?;
        for mut next in heard {
            for word in &mut next.heard.words {
                *word = std::mem::take(word).earlier(self.delay);
            }
            self.to.print(&next)?;
        }
        Ok(())
    }
}

/// A file of any format, block by block.
fn hear_file(storage: &Storage, path: &Path, track: Option<u32>, hearing: &mut Hearing) -> Result<(), Failure> {
    let shown = path.display();
    let of_audio = |error: &dyn std::fmt::Display| Failure::unreadable(format!("{shown}: {error}"));
    let recording = StreamedRecording::new(storage, PathBuf::from(path), Channels::Mix).with_track(track);
    let mut failure = None;
    let extent = recording.first_pass(MAX_DURATION, OnDamage::Keep, &mut |block| {
        failure = hearing.hear(block, false).err();
        Ok(failure.is_none())
    });
    if let Some(failure) = failure {
        return Err(failure);
    }
    let extent = extent.map_err(|error| of_audio(&error))?;
    let extent = extent.map_err(|refusal| of_audio(&refusal.detail))?;
    for note in extent.note.iter().chain(&extent.damage) {
        tell(&format!("{shown}: {note}"));
    }
    Ok(())
}

/// Bytes as they come: a WAV file of one channel of 16 bit PCM, or such samples at 16 kHz without a header.
fn hear_bytes(input: &mut dyn Read, hearing: &mut Hearing) -> Result<(), Failure> {
    let unreadable = |error: io::Error| Failure::unreadable(format!("standard input: {error}"));
    let mut bytes = Vec::new();
    let mut block = [0; BLOCK];
    let mut audio: Option<(WireAudio, u64)> = None;
    let mut samples = Vec::new();
    loop {
        let count = match input.read(&mut block) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(unreadable(error)),
        };
        bytes.extend_from_slice(&block[..count]);
        if audio.is_none() {
            let Some(start) = start_of(&bytes, count == 0)? else {
                continue;
            };
            bytes.drain(..start.at);
            let wire = WireAudio::new(AudioFormat::Pcm { rate: start.rate }).map_err(Failure::unreadable)?;
            audio = Some((wire, start.bytes));
        }
        if let Some((wire, left)) = &mut audio {
            let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
            samples.clear();
            wire.feed(&bytes[..taken], &mut samples);
            bytes.clear();
            *left -= taken as u64;
            // No header states more; without one there is no end.
            if count == 0 && (1..1 << 32).contains(left) {
                tell(&format!(
                    "warning: standard input ends {left} bytes before the end that its header states"
                ));
            }
            if count == 0 || *left == 0 {
                wire.flush(&mut samples);
                return hearing.hear(&samples, false);
            }
        }
        hearing.hear(&samples, false)?;
    }
}

/// Where samples begin, how many they are in a second, and how many bytes of them follow.
#[derive(Debug, PartialEq)]
struct Start {
    at: usize,
    rate: u32,
    bytes: u64,
}

/// The beginning of standard input; none where more of it has to come.
fn start_of(bytes: &[u8], is_all: bool) -> Result<Option<Start>, Failure> {
    let wrong = |what: String| {
        Err(Failure::unreadable(format!(
            "standard input is a WAV file {what}: one channel of 16 bit PCM is heard as it comes \
             (ffmpeg -i INPUT -f wav -ac 1 -ar 16000 -c:a pcm_s16le -)"
        )))
    };
    let raw = Start {
        at: 0,
        rate: 16_000,
        bytes: u64::MAX,
    };
    if bytes.len() < 12 {
        return Ok(is_all.then_some(raw));
    }
    if &bytes[..4] != b"RIFF" || &bytes[8..12] != b"WAVE" {
        // Samples may look like a frame of MPEG audio, which has no signature.
        let format = match recognise(bytes) {
            _ if bytes.starts_with(b"OggS") => "ogg",
            _ if bytes.starts_with(b"ID3") => "mp3",
            Ok(Format::Mp3 | Format::Aac) | Err(_) => return Ok(Some(raw)),
            Ok(format) => format.as_str(),
        };
        return Err(Failure::unreadable(format!(
            "standard input is {format}: with --stream it has to be a WAV file, or raw samples of 16 bit \
             (ffmpeg -i INPUT -f wav -ac 1 -ar 16000 -c:a pcm_s16le -)"
        )));
    }
    let number = |at: usize, width: usize| -> u64 {
        let bytes = bytes[at..at + width].iter().rev();
        bytes.fold(0, |number, byte| number << 8 | u64::from(*byte))
    };
    let (mut at, mut rate) = (12, None);
    while at + 8 <= bytes.len() {
        let (name, size) = (&bytes[at..at + 4], number(at + 4, 4));
        let begin = at + 8;
        if name == b"data" {
            let Some(rate) = rate else {
                return wrong("without a format before its samples".into());
            };
            // Who writes into a pipe does not know the size.
            let bytes = if size == 0 || size >= 0x7fff_0000 {
                u64::MAX
            } else {
                size
            };
            return Ok(Some(Start { at: begin, rate, bytes }));
        }
        if name == b"fmt " {
            if size < 16 {
                return wrong("with a damaged header".into());
            }
            if begin + 16 > bytes.len() {
                break;
            }
            let (format, channels, bits) = (number(begin, 2), number(begin + 2, 2), number(begin + 14, 2));
            let found = number(begin + 4, 4) as u32;
            // 0xfffe: the format is told further behind, and is PCM where samples have 16 bits.
            if !(format == 1 || format == 0xfffe) || channels != 1 || bits != 16 || !PCM_RATES.contains(&found) {
                return wrong(format!(
                    "of {channels} channels, {bits} bits, {found} samples a second, format {format}"
                ));
            }
            rate = Some(found);
        }
        at = begin.saturating_add(usize::try_from(size + size % 2).unwrap_or(usize::MAX));
        if at > MOST_HEADER {
            return wrong("with a header of more than a megabyte".into());
        }
    }
    match is_all {
        true => wrong("that ends in its header".into()),
        false => Ok(None),
    }
}

/// Words to standard output, as they are heard.
struct Printer<'a> {
    out: &'a mut dyn Write,
    as_json: bool,
    /// The words that may go on, as they were told last.
    partial: String,
    is_at_start: bool,
}

impl Printer<'_> {
    fn print(&mut self, next: &HeardNext) -> Result<(), Failure> {
        let words = &next.heard.words;
        if self.as_json {
            for word in words {
                self.line(&word_event(word))?;
            }
            let partial: Vec<&str> = next.partial.iter().map(|word| word.word.trim()).collect();
            let partial = partial.join(" ");
            if partial != self.partial || !words.is_empty() {
                if !partial.is_empty() {
                    self.line(&json!({"type": "partial", "text": partial}))?;
                }
                self.partial = partial;
            }
            return Ok(());
        }
        for word in words {
            let space = if self.is_at_start { "" } else { " " };
            write!(self.out, "{space}{}", word.word.trim())?;
            self.is_at_start = ends_sentence(&word.word);
            if self.is_at_start {
                writeln!(self.out)?;
            }
        }
        Ok(self.out.flush()?)
    }

    fn line(&mut self, event: &serde_json::Value) -> Result<(), Failure> {
        writeln!(self.out, "{event}")?;
        Ok(self.out.flush()?)
    }

    fn end(&mut self) -> Result<(), Failure> {
        if !self.as_json && !self.is_at_start {
            writeln!(self.out)?;
        }
        Ok(self.out.flush()?)
    }
}

/// A word as a transcript has it.
fn word_event(word: &Word) -> serde_json::Value {
    let mut event = json!(word);
    event["type"] = json!("word");
    event["word"] = json!(word.word.trim());
    event
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_has_a_delay_and_a_weight_of_phrases() {
        let of = |set: &[&str]| parameters(&set.iter().map(|&set| set.to_owned()).collect::<Vec<_>>());
        assert_eq!(of(&[]).unwrap(), [0.0, 1.0]);
        assert_eq!(of(&["delay=0.08", "boost_weight=0.25"]).unwrap(), [0.08, 0.25]);
        for wrong in [
            "delay=nan",
            "delay=2",
            "delay=-0.1",
            "delay=",
            "max_window=3",
            "delay",
            "boost_weight=101",
            "boost_weight=-1",
        ] {
            let error = of(&[wrong]).unwrap_err().to_string();
            assert!(error.contains(wrong), "{error}");
        }
    }

    #[test]
    fn events_have_the_digits_of_transcripts() {
        let word = Word {
            word: " a ".to_owned(),
            start: 0.1 + 0.2,
            end: 0.7 + 0.1,
            confidence: Some(1.0 / 3.0),
            speaker: None,
        };
        let expected = json!({"type": "word", "word": "a", "start": 0.3, "end": 0.8, "confidence": 0.333_333});
        assert_eq!(word_event(&word), expected);
    }

    #[test]
    fn beginnings_of_standard_input() {
        let wav = |format: u16, channels: u16, rate: u32, bits: u16, size: u32| {
            let mut bytes = b"RIFF\0\0\0\0WAVELIST\x03\0\0\0abc\0fmt \x10\0\0\0".to_vec();
            bytes.extend(format.to_le_bytes());
            bytes.extend(channels.to_le_bytes());
            bytes.extend(rate.to_le_bytes());
            bytes.extend((rate * 2).to_le_bytes());
            bytes.extend([2, 0]);
            bytes.extend(bits.to_le_bytes());
            bytes.extend(b"data");
            bytes.extend(size.to_le_bytes());
            bytes
        };
        let right = wav(1, 1, 8_000, 16, 1_000);
        let expected = Start {
            at: right.len(),
            rate: 8_000,
            bytes: 1_000,
        };
        assert_eq!(start_of(&right, false).unwrap(), Some(expected));
        for end in 12..right.len() {
            assert_eq!(start_of(&right[..end], false).unwrap(), None, "{end}");
            assert!(start_of(&right[..end], true).is_err(), "{end}");
        }
        let unknown = start_of(&wav(1, 1, 16_000, 16, u32::MAX), false).unwrap().unwrap();
        assert_eq!(unknown.bytes, u64::MAX);
        for wrong in [
            wav(3, 1, 16_000, 16, 0),
            wav(1, 2, 16_000, 16, 0),
            wav(1, 1, 16_000, 24, 0),
            wav(1, 1, 12_345, 16, 0),
        ] {
            assert!(start_of(&wrong, false).unwrap_err().to_string().contains("one channel"));
        }
        let mut endless = b"RIFF\0\0\0\0WAVELIST".to_vec();
        endless.extend(u32::MAX.to_le_bytes());
        assert!(start_of(&endless, false).is_err());
        // What is no WAV file is samples.
        let raw = Start {
            at: 0,
            rate: 16_000,
            bytes: u64::MAX,
        };
        assert_eq!(start_of(&[1; 12], false).unwrap().as_ref(), Some(&raw));
        assert_eq!(start_of(&[1; 3], false).unwrap(), None);
        assert_eq!(start_of(&[1; 3], true).unwrap(), Some(raw));
    }
}
