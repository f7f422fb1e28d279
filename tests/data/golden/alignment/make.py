"""Writes paths.json: see README.md."""
import importlib.metadata
import importlib.util
import json
import random
import struct
from pathlib import Path

import numpy
import zstandard

GOLDEN = Path(__file__).parent.parent


def aligner():
    """The module of the search alone: the package itself imports what finds words in texts, and audio."""
    path = importlib.metadata.distribution("ctc-forced-aligner").locate_file("ctc_forced_aligner/ctc_aligner.py")
    spec = importlib.util.spec_from_file_location("ctc_aligner", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unpacked(path):
    return zstandard.ZstdDecompressor().stream_reader(path.open("rb")).read()


def tensors(path):
    """Tensors of 32 bits of a packed file, whose bytes are shuffled by four."""
    shuffled = numpy.frombuffer(unpacked(path), numpy.uint8)
    data, at = numpy.empty_like(shuffled), 0
    for place in range(4):
        count = len(range(place, len(data), 4))
        data[place::4] = shuffled[at : at + count]
        at += count
    data = data.tobytes()
    (length,) = struct.unpack("<Q", data[:8])
    found = {}
    for name, about in json.loads(data[8 : 8 + length]).items():
        if about.get("dtype") == "F32":
            begin, end = (8 + length + offset for offset in about["data_offsets"])
            found[name] = numpy.frombuffer(data[begin:end], numpy.float32).reshape(about["shape"])
    return found


def places(path, ids, blank):
    """First and last frame of each token of a path of outputs."""
    found, last = [], blank
    for frame, output in enumerate(path.tolist()):
        if output != blank:
            if output == last:
                found[-1][1] = frame
            else:
                found.append([frame, frame])
        last = output
    assert len(found) == len(ids)
    return found


align_sequences = aligner().align_sequences
cases = []
for name in ["ctc", "hybrid"]:
    golden = tensors(GOLDEN / name / "eval.safetensors.zst")
    own = [of["ids"] for of in json.loads(unpacked(GOLDEN / name / "decode.json.zst"))["ctc_own"]]
    draw = random.Random(0)
    for recording, said in enumerate(own):
        log_probs = golden[f"ctc_logprobs{recording}"]
        frames, blank = log_probs.shape[0], log_probs.shape[1] - 1
        texts = {
            "said": said,
            "each third token left out": [token for at, token in enumerate(said) if at % 3 != 1],
            "each third token another": [draw.randrange(blank) if at % 3 == 1 else token for at, token in enumerate(said)],
            "each fourth token twice": [token for at, token in enumerate(said) for _ in range(1 + (at % 4 == 2))],
            "of the next recording": own[(recording + 1) % len(own)],
            "at random": [draw.randrange(blank) for _ in range(frames // 3)],
        }
        for text, ids in texts.items():
            equal = sum(a == b for a, b in zip(ids, ids[1:]))
            if len(ids) + equal > frames:
                continue
            path, _ = align_sequences(log_probs[None], numpy.array([ids]), blank)
            cases.append({"set": name, "recording": recording, "text": text, "ids": ids, "frames": places(path[0], ids, blank)})
lines = ",\n".join(json.dumps(case) for case in cases)
(Path(__file__).parent / "paths.json").write_text(f"[\n{lines}\n]\n")
