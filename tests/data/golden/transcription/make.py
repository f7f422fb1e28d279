"""Makes beam.json.zst, confidence.json.zst and confidence_logits.safetensors.zst again, with another small.nemo.

Needs NeMo 3.0.0 (`pip install "nemo_toolkit[asr]==3.0.0" torch`, CPU), soundfile and zstd. Settings, recordings and methods are
those of the files that are there; numbers that do not depend on the model (lm.arpa, lm_scores.json, boosting.json) stay.

    python tests/data/golden/transcription/make.py configs/models/small.nemo
"""

import io
import json
import pathlib
import subprocess
import sys
import tarfile
import tempfile

import soundfile
import torch
from nemo.collections.asr.models import ASRModel
from nemo.collections.asr.parts.submodules.rnnt_decoding import RNNTBPEDecodingConfig
from nemo.collections.asr.parts.utils.asr_confidence_utils import ConfidenceConfig, ConfidenceMethodConfig
from omegaconf import OmegaConf
from safetensors.torch import save_file

FOLDER = pathlib.Path(__file__).parent
CORPUS = FOLDER / "../../corpus/mini/shards"
TOKENS = 1025  # with the blank, which is the last one
MAX_SYMBOLS = 10


def packed(name):
    return subprocess.run(["zstd", "-dcq", FOLDER / name], capture_output=True, check=True).stdout


def write_packed(name, data, size=1):
    """Packs elements of `size` bytes: their first bytes come first, then their second ones (see ../model/README.md)."""
    data = b"".join(data[first::size] for first in range(size))
    subprocess.run(["zstd", "-19", "-qfo", FOLDER / name, "-"], input=data, check=True)


def write_json(name, value):
    write_packed(name, json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode())


def seven_digits(value):
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [seven_digits(each) for each in value]
    return float("%.7g" % value)


def whole(values):
    return [int(value) for value in values]


def recording_of_corpus(name):
    """FLAC of a recording, such as rec_en_0012_002."""
    for path in sorted(CORPUS.glob(f"{name.split('_')[1]}/*/*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith(f"{name}.flac"):
                    return io.BytesIO(tar.extractfile(member).read())
    raise FileNotFoundError(name)


class Model:
    def __init__(self, path):
        self.nemo = ASRModel.restore_from(path, map_location="cpu").eval()
        self.nemo.preprocessor.featurizer.dither = 0.0
        self.nemo.preprocessor.featurizer.pad_to = 0

    def encode(self, file):
        samples, rate = soundfile.read(file, dtype="float32")
        assert rate == 16000 and samples.ndim == 1
        signal, length = torch.tensor(samples)[None], torch.tensor([len(samples)])
        features, frames = self.nemo.preprocessor(input_signal=signal, length=length)
        return self.nemo.encoder(audio_signal=features, length=frames)

    def decode_by(self, strategy, change):
        config = OmegaConf.structured(RNNTBPEDecodingConfig())
        OmegaConf.set_struct(config, False)
        config.strategy, config.model_type, config.durations = strategy, "tdt", [0, 1, 2, 3, 4]
        config.greedy.max_symbols_per_step = MAX_SYMBOLS
        config.tdt_include_token_duration = True
        change(config)
        self.nemo.change_decoding_strategy(config, verbose=False)
        self.nemo.eval()

    def hypotheses(self, encoded):
        found = self.nemo.decoding.rnnt_decoder_predictions_tensor(*encoded, return_hypotheses=True)[0]
        return getattr(found, "n_best_hypotheses", None) or (found if isinstance(found, list) else [found])


def make_beam(model):
    golden = json.loads(packed("beam.json.zst"))
    encoded = [model.encode(FOLDER / recording["file"]) for recording in golden["recordings"]]
    with tempfile.TemporaryDirectory() as place:
        arpa, phrases = pathlib.Path(place, "lm.arpa"), pathlib.Path(place, "phrases.txt")
        arpa.write_bytes(packed("lm.arpa.zst"))
        phrases.write_text("\n".join(json.loads((FOLDER / "boosting.json").read_text())["phrases"]) + "\n")
        for name, settings in golden["configs"].items():

            def change(config):
                part = config.greedy if settings["strategy"] == "greedy_batch" else config.beam
                if part is config.beam:
                    part.return_best_hypothesis = False
                for key in ("beam_size", "score_norm", "pruning_mode", "blank_lm_score_mode"):
                    if key in settings:
                        part[key] = settings[key]
                if "ngram_lm_model" in settings:
                    part.ngram_lm_model, part.ngram_lm_alpha = str(arpa), golden["alpha_lm"]
                if "boosting_tree" in settings:
                    part.boosting_tree.key_phrases_file = str(phrases)
                    part.boosting_tree_alpha = golden["alpha_boost"]

            model.decode_by(settings["strategy"], change)
            golden["nbest"][name] = [
                [
                    {
                        "score": seven_digits(float(found.score)),
                        "ids": whole(found.y_sequence),
                        "frames": whole(found.timestamp),
                        "durations": whole(found.token_duration),
                    }
                    for found in model.hypotheses(each)
                ]
                for each in encoded
            ]
    write_json("beam.json.zst", golden)


def method_of(name):
    measure, alpha = name.rsplit("_", 1)
    if measure == "max_prob":
        return ConfidenceMethodConfig(name=measure, alpha=float(alpha))
    _, entropy, norm = measure.split("_")
    return ConfidenceMethodConfig(name="entropy", entropy_type=entropy, entropy_norm=norm, alpha=float(alpha))


def make_confidence(model):
    golden = json.loads(packed("confidence.json.zst"))
    for index, recording in enumerate(golden["recordings"].values()):
        encoded = model.encode(recording_of_corpus(recording["id"]))
        recording["frames_total"] = int(encoded[1][0])
        for name, method in recording["methods"].items():
            for setting in method["token"]:
                durations, blanks, aggregation = setting.split(",")

                def change(config):
                    config.preserve_alignments = blanks == "with_blank"
                    config.confidence_cfg = ConfidenceConfig(
                        preserve_frame_confidence=True,
                        preserve_token_confidence=True,
                        preserve_word_confidence=True,
                        exclude_blank=blanks == "exclude_blank",
                        aggregation=aggregation,
                        tdt_include_duration=durations == "dur",
                        method_cfg=method_of(name),
                    )

                model.decode_by("greedy_batch", change)
                found = model.hypotheses(encoded)[0]
                method["token"][setting] = seven_digits(found.token_confidence)
                method["word"][setting] = seven_digits(found.word_confidence)
                if blanks == "exclude_blank":
                    steps = found.non_blank_step_confidence_precomputed
                    method["step_non_blank"][durations] = seven_digits(steps)
                    recording["durations"] = whole(found.token_duration)
                else:
                    method["frame"][durations] = seven_digits(found.frame_confidence)
                    recording["steps"] = [whole(step[-1] for step in frame) for frame in found.alignments]
                recording["ids"], recording["frames"] = whole(found.y_sequence), whole(found.timestamp)
                recording["text"], recording["words"] = found.text, found.text.split()
        if index == 0:
            logits, labels = steps_of_greedy_search(model, encoded)
            assert labels == [label for frame in recording["steps"] for label in frame]
            with tempfile.NamedTemporaryFile() as file:
                save_file({"logits": logits, "labels": torch.tensor(labels)}, file.name)
                write_packed("confidence_logits.safetensors.zst", pathlib.Path(file.name).read_bytes(), 4)
    write_json("confidence.json.zst", golden)


def steps_of_greedy_search(model, encoded):
    """log-softmax over tokens and durations together (steps, 1030), and the best token of each step."""
    joint, decoder = model.nemo.joint, model.nemo.decoder
    frames, count = joint.project_encoder(encoded[0].transpose(1, 2)), int(encoded[1][0])
    predicted, state = decoder.predict(None, None, add_sos=False, batch_size=1)
    rows, labels, frame, on_frame = [], [], 0, 0
    while frame < count:
        outputs = joint.joint_after_projection(frames[:, frame : frame + 1], joint.project_prednet(predicted))
        row = outputs[0, 0, 0].log_softmax(-1)
        label, duration = int(row[:TOKENS].argmax()), int(row[TOKENS:].argmax())
        rows.append(row)
        labels.append(label)
        if label != TOKENS - 1:
            predicted, state = decoder.predict(torch.tensor([[label]]), state, add_sos=False, batch_size=1)
            on_frame += 1
        if duration == 0 and (label == TOKENS - 1 or on_frame >= MAX_SYMBOLS):
            duration = 1
        if duration > 0:
            on_frame = 0
        frame += duration
    return torch.stack(rows), labels


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        model = Model(sys.argv[1])
        make_beam(model)
        make_confidence(model)
