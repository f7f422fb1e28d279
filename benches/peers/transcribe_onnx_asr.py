"""onnx-asr beside `flow transcribe`: a folder that transcribe_nemo.py exported and a folder of 16 kHz mono WAV files ->
the number of words that it hears."""

import glob
import os
import re
import sys

import onnx_asr
import onnxruntime

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = int(os.environ["OMP_NUM_THREADS"])
options.inter_op_num_threads = 1
model = onnx_asr.load_model("nemo-conformer-tdt", sys.argv[1], sess_options=options, providers=["CPUExecutionProvider"])
paths = sorted(glob.glob(sys.argv[2] + "/*.wav"))
words = 0
for first in range(0, len(paths), 16):
    # Tags of languages are no words.
    texts = (re.sub(r"<\|[^|]*\|>", " ", text) for text in model.recognize(paths[first : first + 16]))
    words += sum(len(text.split()) for text in texts)
print(words)
