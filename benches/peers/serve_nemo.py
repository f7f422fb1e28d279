"""NeMo behind FastAPI beside `flow serve`: MODEL.nemo."""

import logging
import os
import sys
import warnings

warnings.filterwarnings("ignore")

import torch
from nemo.collections.asr.models import ASRModel
from nemo.utils import logging as nemo_logging

from serving import serve

nemo_logging.setLevel(logging.ERROR)
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
model = ASRModel.restore_from(sys.argv[1], map_location="cpu").eval()


def transcribe(path):
    with torch.inference_mode():
        heard = model.transcribe([path], batch_size=1, verbose=False)
    # Hybrid models give a pair; hypotheses have a text.
    heard = heard[0] if isinstance(heard, tuple) else heard
    return heard[0] if isinstance(heard[0], str) else heard[0].text


serve(transcribe)
