"""onnx-asr behind FastAPI beside `flow serve`: a folder that transcribe_nemo.py exported."""

import os
import sys

import onnx_asr
import onnxruntime

from serving import serve

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = int(os.environ["OMP_NUM_THREADS"])
options.inter_op_num_threads = 1
model = onnx_asr.load_model("nemo-conformer-tdt", sys.argv[1], sess_options=options, providers=["CPUExecutionProvider"])
serve(model.recognize)
