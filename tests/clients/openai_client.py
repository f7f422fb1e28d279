"""The official Python client of OpenAI's API against `flow serve`: ADDRESS KEY RECORDING, a WAV file of 16 kHz and 16 bits.

The service takes 1 MiB at most and tells speakers apart. Ends with an error where something is not as the client's users expect.
"""

import base64
import sys

import openai
from openai import OpenAI

address, key, path = sys.argv[1:]
client = OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)
recording = open(path, "rb").read()
print("openai", openai.__version__)


def transcribe(by=client, file=("talk.wav", recording), model="small", **fields):
    return by.audio.transcriptions.create(model=model, file=file, **fields)


def refused(kind, status, call):
    try:
        call()
    except kind as error:
        assert type(error) is kind and error.status_code == status, error
        assert error.body["message"] and error.request_id, error.body
        return error
    raise AssertionError(f"{kind.__name__} is not raised")


names = [model.id for model in client.models.list()]
assert names == ["small"], names
assert client.models.retrieve("small").object == "model"

# Every form.
plain = transcribe().text
assert len(plain.split()) >= 3, plain
assert transcribe(response_format="json").usage.type == "duration"
assert transcribe(response_format="text") == plain + "\n"
srt = transcribe(response_format="srt")
assert srt.startswith("1\n00:00:0") and " --> " in srt, srt
vtt = transcribe(response_format="vtt")
assert vtt.startswith("WEBVTT\n\n"), vtt
verbose = transcribe(response_format="verbose_json", timestamp_granularities=["word", "segment"])
assert verbose.text == plain and verbose.duration > 1, verbose
assert [word.word.strip() for word in verbose.words] == plain.split(), verbose.words
assert all(0 <= word.start <= word.end <= verbose.duration for word in verbose.words), verbose.words
assert " ".join(segment.text.strip() for segment in verbose.segments) == plain, verbose.segments
diarized = transcribe(response_format="diarized_json", chunking_strategy="auto")
assert diarized.text == plain and all(segment.speaker for segment in diarized.segments), diarized
reference = "data:audio/wav;base64," + base64.b64encode(recording).decode()
named = transcribe(
    response_format="diarized_json",
    chunking_strategy="auto",
    known_speaker_names=["Ada Lovelace"],
    known_speaker_references=[reference],
)
assert {segment.speaker for segment in named.segments} == {"Ada Lovelace"}, named
print("forms: as expected")

# Streams.
events = list(transcribe(stream=True))
assert "".join(event.delta for event in events[:-1]) == plain, events
assert (events[-1].type, events[-1].text) == ("transcript.text.done", plain), events
events = list(transcribe(stream=True, response_format="diarized_json", chunking_strategy="auto"))
assert {event.type for event in events[:-1]} == {"transcript.text.segment"}, events
assert events[-1].text == plain, events
print("streams: as expected")

# Log probabilities, in the client's own types.
scored = transcribe(include=["logprobs"])
assert "".join(token.token for token in scored.logprobs) == plain, scored
assert bytes(int(byte) for token in scored.logprobs for byte in token.bytes).decode() == plain, scored
assert all(-100 < token.logprob <= 0 for token in scored.logprobs), scored
*deltas, done = transcribe(include=["logprobs"], stream=True)
assert "".join(token.token for token in done.logprobs) == plain, done
assert [token.token for event in deltas for token in event.logprobs] == [token.token for token in done.logprobs], deltas
assert plain and transcribe().logprobs is None
print("log probabilities: as expected")

# Languages, names and channels.
def letters(text, first, last):
    return bool(text) and all(first <= letter <= last for letter in text if letter.isalpha())


tamil = transcribe(language="ta", response_format="verbose_json")
assert letters(tamil.text, "\u0b80", "\u0bff") and tamil.language == "ta", tamil
either = transcribe(extra_body={"languages": ["hi"]}).text
assert letters(either, "\u0900", "\u097f"), either
strong = {"boost_weight": 100}
assert "seventeen" in transcribe(language="en", prompt="seventeen.", extra_body=strong).text
assert "seventeen" in transcribe(language="en", extra_body=strong | {"phrases": ["seventeen"]}).text
split = transcribe(response_format="diarized_json", extra_body={"channels": "split"})
assert {segment.speaker for segment in split.segments} == {"CHANNEL_1"}, split
one = transcribe(response_format="diarized_json", extra_body={"num_speakers": 1})
assert len({segment.speaker for segment in one.segments}) == 1, one
wrong = refused(openai.BadRequestError, 400, lambda: transcribe(language="klingon"))
assert (wrong.code, wrong.param) == ("invalid_value", "language"), wrong
print("languages, names and channels: as expected")

# What has no effect is named.
raw = client.audio.transcriptions.with_raw_response.create(
    model="small", file=("talk.wav", recording), language="auto", prompt="", temperature=0.5
)
assert raw.headers["x-flow-ignored"] == "temperature", raw.headers["x-flow-ignored"]
assert raw.parse().text == plain

# Errors.
wrong_key = client.with_options(api_key="sk-wrong")
assert refused(openai.AuthenticationError, 401, lambda: transcribe(wrong_key)).code == "invalid_api_key"
unknown = refused(openai.NotFoundError, 404, lambda: transcribe(model="whisper-1"))
assert (unknown.code, unknown.param) == ("model_not_found", "model"), unknown
large = ("talk.wav", recording + bytes(2 << 20))
assert refused(openai.APIStatusError, 413, lambda: transcribe(file=large)).code == "request_too_large"
broken = refused(openai.BadRequestError, 400, lambda: transcribe(file=("talk.wav", b"no recording")))
assert broken.param == "file", broken
refused(openai.BadRequestError, 400, lambda: transcribe(response_format="docx"))
translation = client.audio.translations.create
no_translation = refused(openai.BadRequestError, 400, lambda: translation(model="small", file=("talk.wav", recording)))
assert no_translation.code == "translation_not_supported", no_translation
print("errors: as expected")

# Live. 44 bytes are the header of the file.
with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
    assert connection.recv().type == "session.created"
    audio = {
        "format": {"type": "audio/pcm", "rate": 16000},
        "transcription": {"model": "small", "language": "hi", "prompt": "Ada"},
        "turn_detection": None,
    }
    connection.session.update(session={"type": "transcription", "audio": {"input": audio}})
    updated = connection.recv()
    assert updated.type == "session.updated" and updated.session.audio.input.transcription.language == "hi", updated
    for start in range(44, len(recording), 32000):
        part = base64.b64encode(recording[start : start + 32000]).decode()
        connection.input_audio_buffer.append(audio=part)
    connection.input_audio_buffer.commit()
    heard = ""
    while (event := connection.recv()).type != "conversation.item.input_audio_transcription.completed":
        assert event.type != "error", event
        if event.type == "conversation.item.input_audio_transcription.delta":
            heard += event.delta
    assert event.transcript == heard and letters(heard, "\u0900", "\u097f"), (event, heard)
print("live: as expected")
