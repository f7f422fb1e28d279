//! Sessions that ask who speaks. What is said is made up, who says it is found by the bundled networks.

use std::collections::BTreeMap;

use flow_speakers::diarizer::{Diarizer, KnownSpeakers, OnlineSettings};
use flow_speakers::rttm::read_rttm;
use flow_speakers::turns::Turn;
use flow_transcription::speakers::UNKNOWN;

use super::*;
use crate::live::Voices;
use crate::live::protocol::SPEAKERS;

struct WithSpeakers {
    hears: Fake<Hear>,
    stops: Arc<AtomicBool>,
    diarizer: Arc<Diarizer>,
    known: KnownSpeakers,
}

impl Decoder for WithSpeakers {
    fn models(&self) -> Vec<String> {
        self.hears.models()
    }

    fn is_stopping(&self) -> bool {
        self.stops.load(Ordering::SeqCst)
    }

    fn online_diarizer(
        &self,
        settings: OnlineSettings,
        named: Voices,
    ) -> Option<flow_speakers::Result<OnlineDiarizer>> {
        let diarizer = Arc::clone(&self.diarizer);
        let known = match named.is_empty() {
            true => self.known.clone(),
            false => KnownSpeakers::new(named, KnownSpeakers::THRESHOLD).unwrap(),
        };
        Some(OnlineDiarizer::new(diarizer, settings, Some(known)))
    }

    /// The recording of a name is the number of the second in which its voice begins.
    fn voices(&self, references: Vec<(String, Vec<u8>)>) -> BoxFuture<'static, Result<Voices, EngineError>> {
        let samples = conversation().0;
        let voice = |(name, recording): (String, Vec<u8>)| {
            let begin = usize::from(recording[0]) * 16_000;
            let part = &samples[begin..begin + 4 * 16_000];
            (name, self.diarizer.voice(part, &|| false).unwrap().unwrap())
        };
        Box::pin(std::future::ready(Ok(references.into_iter().map(voice).collect())))
    }

    fn decode(
        &self,
        model: Option<String>,
        asked: Arc<DecodingRequest>,
        request: DecodeRequest,
    ) -> BoxFuture<'static, Result<Heard, EngineError>> {
        self.hears.decode(model, asked, request)
    }
}

/// A client of a service that tells speakers apart and knows one of them, Ann, and what stops the service.
async fn client() -> (Client, Arc<AtomicBool>) {
    let stops = Arc::new(AtomicBool::new(false));
    let diarizer = Arc::new(Diarizer::bundled().unwrap());
    // `spk0` alone.
    let part = &conversation().0[22 * 16_000..26 * 16_000];
    let voice = diarizer.voice(part, &|| false).unwrap().unwrap();
    let decoder = WithSpeakers {
        hears: counting(),
        stops: Arc::clone(&stops),
        diarizer,
        known: KnownSpeakers::new(vec![("Ann".into(), voice)], KnownSpeakers::THRESHOLD).unwrap(),
    };
    let url = serve(decoder, LiveSettings::default()).await;
    (Client::connect(&url, &[]).await, stops)
}

/// A conversation of two voices, and who speaks when.
fn conversation() -> (Vec<f32>, Vec<Turn>) {
    let folder = root().join("tests/data/golden/speakers");
    let bytes = std::fs::read(folder.join("conv2.flac")).unwrap();
    let turns = std::fs::read_to_string(folder.join("conv2.rttm")).unwrap();
    let turns = read_rttm(&turns).unwrap().remove("conv2").unwrap();
    (flow_audio::decode::decode(&bytes, 100.0).unwrap(), turns)
}

/// What comes of items: transcripts, and segments.
#[derive(Default)]
struct Said {
    committed: usize,
    transcripts: BTreeMap<String, String>,
    segments: Vec<Value>,
}

impl Said {
    fn take(&mut self, event: Value) {
        let item = || event["item_id"].as_str().unwrap().to_owned();
        let kind = event["type"].as_str().unwrap();
        match kind
            .replace("conversation.item.input_audio_transcription.", "")
            .as_str()
        {
            "input_audio_buffer.committed" => self.committed += 1,
            "completed" => {
                let before = self
                    .transcripts
                    .insert(item(), event["transcript"].as_str().unwrap().into());
                assert_eq!(before, None);
            }
            "segment" => self.segments.push(event),
            _ => {}
        }
    }

    /// Whether all items are complete, and all of their words in segments.
    fn is_whole(&self) -> bool {
        let mut texts: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for segment in &self.segments {
            let item = segment["item_id"].as_str().unwrap().to_owned();
            texts.entry(item).or_default().push(segment["text"].as_str().unwrap());
        }
        let is_said = |(item, transcript): (&String, &String)| match texts.get(item) {
            Some(texts) => {
                let text = texts.join(" ");
                assert!(transcript.starts_with(&text), "{text} is not {transcript}");
                text == *transcript
            }
            None => transcript.is_empty(),
        };
        self.transcripts.len() == self.committed && self.transcripts.iter().all(is_said)
    }
}

#[test]
fn words_have_the_speakers_of_the_conversation() {
    let (samples, turns) = conversation();
    let said = run(async {
        let (mut client, _) = client().await;
        client.expect("session.created").await;
        let input = json!({"format": {"type": "audio/pcm", "rate": 16_000}});
        let session = json!({"include": [WORDS, SPEAKERS], "audio": {"input": input}});
        client.send(json!({"type": "session.update", "session": session})).await;
        let updated = client.expect("session.updated").await;
        assert_eq!(updated["session"]["include"], json!([WORDS, SPEAKERS]));
        for block in pcm(&samples).chunks(32_000) {
            client.append(block).await;
        }
        // The last turn may have ended by itself. What is answered to the second comes after all that the first commits.
        client.send(json!({"type": "input_audio_buffer.commit"})).await;
        client.send(json!({"type": "input_audio_buffer.clear"})).await;
        let (mut said, mut is_cleared) = (Said::default(), false);
        while !is_cleared || !said.is_whole() {
            let event = client.next().await.unwrap();
            is_cleared |= event["type"] == "input_audio_buffer.cleared";
            said.take(event);
        }
        said
    });
    assert!(said.committed > 1 && !said.segments.is_empty());
    // For each voice, how often it has each label, where nobody else speaks.
    let mut counts: BTreeMap<&str, BTreeMap<String, usize>> = BTreeMap::new();
    for (number, segment) in said.segments.iter().enumerate() {
        assert_eq!(segment["id"], format!("seg_{:03}", number + 1));
        let words = segment["words"].as_array().unwrap();
        assert_eq!(segment["start"], words[0]["start"]);
        for word in words {
            assert_eq!(word["speaker"], segment["speaker"]);
            let time = (word["start"].as_f64().unwrap() + word["end"].as_f64().unwrap()) / 2.0;
            let speaking: Vec<&Turn> = turns
                .iter()
                .filter(|turn| (turn.start..turn.end).contains(&time))
                .collect();
            if let [turn] = speaking[..] {
                let label = word["speaker"].as_str().unwrap().to_owned();
                *counts.entry(&turn.speaker).or_default().entry(label).or_default() += 1;
            }
        }
    }
    let most = |counts: &BTreeMap<String, usize>| counts.iter().max_by_key(|(_, count)| **count).unwrap().0.clone();
    let labels: Vec<String> = counts.values().map(most).collect();
    // In order of the voices' names.
    assert!(
        labels.len() == 2 && labels[0] == "Ann" && labels[1].starts_with("SPEAKER_"),
        "{counts:?}"
    );
    let all: usize = counts.values().flat_map(BTreeMap::values).sum();
    let right: usize = counts.values().zip(&labels).map(|(counts, label)| counts[label]).sum();
    println!("{right} of {all} words have the label of their voice: {counts:?}");
    assert!(all > 40 && right * 100 >= all * 85, "{counts:?}");
}

#[test]
fn a_session_names_its_speakers_and_how_many_there_are() {
    let (samples, _) = conversation();
    run(async {
        let (mut client, _) = client().await;
        let transcription = json!({
            "language": "hi",
            "max_speakers": 1,
            "known_speaker_names": ["Bob"],
            "known_speaker_references": [format!("data:;base64,{}", STANDARD.encode([22]))],
        });
        let input = json!({"format": {"type": "audio/pcm", "rate": 16_000}, "transcription": transcription});
        let session = json!({"include": [SPEAKERS], "audio": {"input": input}});
        client.send(json!({"type": "session.update", "session": session})).await;
        let updated = client.wait_for("session.updated").await["session"]["audio"]["input"]["transcription"].clone();
        assert_eq!(updated, json!({"model": "small", "language": "hi", "max_speakers": 1}));
        client.append(&pcm(&samples[22 * 16_000..34 * 16_000])).await;
        client.send(json!({"type": "input_audio_buffer.commit"})).await;
        client.send(json!({"type": "input_audio_buffer.clear"})).await;
        let (mut said, mut is_cleared) = (Said::default(), false);
        while !is_cleared || !said.is_whole() {
            let event = client.next().await.unwrap();
            is_cleared |= event["type"] == "input_audio_buffer.cleared";
            said.take(event);
        }
        let mut speakers: Vec<&str> = said.segments.iter().map(|it| it["speaker"].as_str().unwrap()).collect();
        // Words between turns are nobody's.
        speakers.retain(|speaker| *speaker != UNKNOWN);
        assert!(
            !speakers.is_empty() && speakers.iter().all(|speaker| *speaker == "Bob"),
            "{speakers:?}"
        );
        // Once there was audio it is too late.
        let late = json!({"audio": {"input": {"transcription": {"max_speakers": 2}}}});
        client.send(json!({"type": "session.update", "session": late})).await;
        client.wait_for("error").await;
        // Languages may change at any time.
        let language = json!({"audio": {"input": {"transcription": {"language": "en"}}}});
        client
            .send(json!({"type": "session.update", "session": language}))
            .await;
        client.wait_for("session.updated").await;
    });
}

#[test]
fn a_service_that_is_stopped_says_who_said_what_it_heard() {
    let (samples, _) = conversation();
    run(async {
        let (mut client, stops) = client().await;
        let session = json!({"turn_detection": null, "include": [SPEAKERS], "input_audio_format": "pcm16"});
        client
            .send(json!({"type": "transcription_session.update", "session": session}))
            .await;
        client.wait_for("transcription_session.updated").await;
        // 24 kHz: what 16 kHz are played at sounds faster, which is as good here.
        client.append(&pcm(&samples[..8 * 24_000])).await;
        client.send(json!({"type": "none"})).await;
        client.wait_for("error").await;
        stops.store(true, Ordering::SeqCst);
        let mut said = Said::default();
        let code = loop {
            match client.next().await {
                Ok(event) => said.take(event),
                Err(code) => break code,
            }
        };
        assert_eq!(code, 1001);
        assert!(said.committed == 1 && !said.segments.is_empty() && said.is_whole());
    });
}

#[test]
fn who_speaks_is_asked_before_the_first_audio_and_where_the_service_knows() {
    let update = |include: Value| json!({"type": "session.update", "session": {"include": include}});
    run(async {
        let url = serve(counting(), LiveSettings::default()).await;
        let mut client = Client::connect(&url, &[]).await;
        client.send(update(json!([SPEAKERS]))).await;
        let error = client.wait_for("error").await["error"].clone();
        assert_eq!(
            (&error["code"], &error["param"]),
            (&"invalid_value".into(), &"session.include".into())
        );
        assert_eq!(error["message"], EngineError::NotDiarizing.to_string());

        let (mut client, _) = self::client().await;
        for include in [json!([SPEAKERS]), json!([]), json!([SPEAKERS])] {
            client.send(update(include.clone())).await;
            let updated = client.wait_for("session.updated").await;
            assert_eq!(updated["session"]["include"], include);
        }
        client.append(&[0; 4_800]).await;
        client.send(update(json!([]))).await;
        let error = client.wait_for("error").await["error"].clone();
        assert!(
            error["message"].as_str().unwrap().contains("before the first audio"),
            "{error}"
        );
        // The session goes on, as it was.
        client.send(update(json!([SPEAKERS, WORDS]))).await;
        let updated = client.wait_for("session.updated").await;
        assert_eq!(updated["session"]["include"], json!([WORDS, SPEAKERS]));
    });
}
