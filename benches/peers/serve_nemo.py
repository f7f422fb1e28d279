"""NeMo behind FastAPI beside `flow serve`: MODEL.nemo."""

import sys
import warnings

warnings.filterwarnings("ignore")

import torch

from nemo_model import load
from serving import serve

model = load(sys.argv[1])


def transcribe(path):
    with torch.inference_mode():
        heard = model.transcribe([path], batch_size=1, verbose=False)
    # Hybrid models give a pair; hypotheses have a text.
    heard = heard[0] if isinstance(heard, tuple) else heard
    return heard[0] if isinstance(heard[0], str) else heard[0].text


serve(transcribe)
