"""Calls NeMo as its users write it, on a .nemo archive of ours.

    python nemo_calls.py MODEL.nemo WORKFOLDER AUDIO.wav [AUDIO.wav ...]

Prints a line `RESULT` with one JSON object: what each call gave. Ends with a traceback where a call fails.
"""
import json
import os
import sys
import tarfile

import nemo.collections.asr as nemo_asr
import soundfile
from omegaconf import open_dict


def texts(hypotheses):
    return [hypothesis.text if hasattr(hypothesis, "text") else hypothesis for hypothesis in hypotheses]


def main(archive, folder, recordings):
    result = {}
    model = nemo_asr.models.ASRModel.restore_from(archive, map_location="cpu")
    result["class"] = type(model).__name__
    result["texts"] = texts(model.transcribe(recordings))
    result["one_by_one"] = [texts(model.transcribe([recording]))[0] for recording in recordings]

    timed = model.transcribe(recordings, timestamps=True)
    result["timestamps"] = [
        [[word["word"], word["start"], word["end"]] for word in hypothesis.timestamp["word"]] for hypothesis in timed
    ]

    manifest = os.path.join(folder, "manifest.json")
    with open(manifest, "w", encoding="utf-8") as out:
        for recording, text in zip(recordings, result["texts"]):
            seconds = soundfile.info(recording).duration
            line = {"audio_filepath": os.path.abspath(recording), "duration": seconds, "text": text or "a"}
            out.write(json.dumps(line) + "\n")
    for name in ["train_ds", "validation_ds", "test_ds"]:
        with open_dict(model.cfg):
            model.cfg[name].manifest_filepath = manifest
            model.cfg[name].batch_size = 2
    model.setup_training_data(model.cfg.train_ds)
    model.setup_validation_data(model.cfg.validation_ds)
    model.setup_test_data(model.cfg.test_ds)
    result["batches"] = [len(list(loader)) for loader in (model.train_dataloader(), model.val_dataloader())]
    with open_dict(model.cfg):
        model.cfg.optim.sched.warmup_steps = 2
        model.cfg.optim.sched.max_steps = 10
    model.setup_optimization(model.cfg.optim)
    result["optimizer"] = type(model._optimizer).__name__

    again = os.path.join(folder, "again.nemo")
    model.save_to(again)
    back = nemo_asr.models.ASRModel.restore_from(again, map_location="cpu")
    result["saved_texts"] = texts(back.transcribe(recordings))

    # The tokenizer's files of the archive as a folder: a change of vocabulary by NeMo's own means.
    tokenizer = os.path.join(folder, "tokenizer")
    os.makedirs(tokenizer, exist_ok=True)
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            for name in ["tokenizer.model", "tokenizer.vocab", "vocab.txt"]:
                if member.name.endswith("_" + name):
                    with open(os.path.join(tokenizer, name), "wb") as out:
                        out.write(tar.extractfile(member).read())
    back.change_vocabulary(new_tokenizer_dir=tokenizer, new_tokenizer_type="bpe")
    result["changed_vocabulary"] = len(back.joint.vocabulary)
    changed = os.path.join(folder, "changed.nemo")
    back.save_to(changed)
    nemo_asr.models.ASRModel.restore_from(changed, map_location="cpu").transcribe(recordings[:1])
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
