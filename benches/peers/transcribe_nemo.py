"""NeMo beside `flow transcribe`: MODEL.nemo and a folder of 16 kHz mono WAV files -> the number of words that it hears.

`--export MODEL.nemo FOLDER` writes the model for onnx-asr instead: encoder, decoder with joint network, and vocabulary.
"""

import glob
import os
import re
import sys
import warnings

warnings.filterwarnings("ignore")

import torch

from nemo_model import load

if sys.argv[1] == "--export":
    model, folder = load(sys.argv[2]), sys.argv[3]
    os.makedirs(folder, exist_ok=True)
    model.export(os.path.join(folder, "model.onnx"))
    pieces = list(model.joint.vocabulary) + ["<blk>"]
    # Last, as it says that all is there.
    with open(os.path.join(folder, "config.json"), "w") as config:
        config.write('{"model_type": "nemo-conformer-tdt", "features_size": %d}' % model.cfg.preprocessor.features)
    with open(os.path.join(folder, "vocab.txt"), "w", encoding="utf-8") as vocabulary:
        vocabulary.writelines(f"{piece} {number}\n" for number, piece in enumerate(pieces))
else:
    model = load(sys.argv[1])
    paths = sorted(glob.glob(sys.argv[2] + "/*.wav"))
    with torch.inference_mode():
        heard = model.transcribe(paths, batch_size=16, verbose=False)
    # Hybrid models give a pair; hypotheses have a text.
    heard = heard[0] if isinstance(heard, tuple) else heard
    texts = [one if isinstance(one, str) else one.text for one in heard]
    # Tags of languages are no words.
    print(sum(len(re.sub(r"<\|[^|]*\|>", " ", text).split()) for text in texts))
