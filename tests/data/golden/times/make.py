"""Speech with known times of words, by espeak-ng: `en.flac`, `hi.flac`, and `en.json`, `hi.json` with the beginning of each word.

Needs libespeak-ng (1.51) and `flac`. espeak-ng tells with each sample buffer where in it a word of the text begins.
"""

import ctypes
import json
import os
import struct
import subprocess
import wave

SENTENCES = {
    "en": (
        "en-us+m3",
        [
            "my teacher waits in the kitchen",
            "john and nina live in boston",
            "bring the yellow chair to the library",
            "there are seven steps to the river",
            "he bought rice and butter tomorrow",
            "the bus to london leaves on friday",
            "put the mango on the table",
            "your brother has a small green bucket",
        ],
    ),
    "hi": (
        "hi+f2",
        [
            "मेरा भाई बगीचा में खेलता है",
            "रवि और सीता पटना में रहते हैं",
            "नीला बाल्टी रसोई से लाओ",
            "नदी तक सात कदम हैं",
            "उसने कल आलू और दूध खरीदा",
            "पुराना दरवाज़ा कहाँ है",
            "सेब को थाली पर रखो",
            "अस्पताल सोमवार को बंद है",
        ],
    ),
}
PAUSE = 0.8  # seconds between sentences
WORD, LIST_END = 1, 0


class Event(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_char * 8),
    ]


CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(Event))
espeak = ctypes.CDLL("libespeak-ng.so.1")
rate = espeak.espeak_Initialize(1, 0, None, 0)
samples, events = [], []


@CALLBACK
def take(buffer, count, found):
    if buffer and count:
        samples.extend(buffer[:count])
    index = 0
    while found[index].type != LIST_END:
        if found[index].type == WORD:
            events.append((found[index].text_position, found[index].length, found[index].sample))
        index += 1
    return 0


espeak.espeak_SetSynthCallback(take)
for name, (voice, sentences) in SENTENCES.items():
    assert espeak.espeak_SetVoiceByName(voice.encode()) == 0, voice
    audio = [0] * int(PAUSE * rate)
    words = []
    for sentence in sentences:
        samples.clear()
        events.clear()
        text = sentence.encode() + b"\0"
        # UTF-8.
        assert espeak.espeak_Synth(text, len(text), 0, 1, 0, 1, None, None) == 0
        espeak.espeak_Synchronize()
        said = sentence.split(" ")
        begins = [sum(len(word) + 1 for word in said[:index]) for index in range(len(said))]
        places = {position - 1: sample for position, _, sample in events}
        for word, begin in zip(said, begins):
            # Words that espeak-ng joins have no time of their own.
            if begin in places:
                words.append([word, round((len(audio) + places[begin]) / rate, 4)])
            else:
                words.append([word, None])
        audio.extend(samples)
        audio.extend([0] * int(PAUSE * rate))
    with wave.open(name + ".wav", "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(struct.pack(f"<{len(audio)}h", *audio))
    subprocess.run(["flac", "--silent", "--force", "--best", name + ".wav"], check=True)
    os.remove(name + ".wav")
    with open(name + ".json", "w", encoding="utf-8") as file:
        json.dump(words, file, ensure_ascii=False)
        file.write("\n")
    print(name, len(audio) / rate, "s", len(words), "words", sum(word[1] is None for word in words), "without a time")
