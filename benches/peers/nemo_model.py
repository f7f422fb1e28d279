"""A model as NeMo restores it, for the CPU."""

import logging
import os

import torch
from nemo.collections.asr.models import ASRModel
from nemo.utils import logging as nemo_logging
from omegaconf import open_dict


def load(path):
    nemo_logging.setLevel(logging.ERROR)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = ASRModel.restore_from(path, map_location="cpu").eval()
    # `transcribe` looks into this section, which the configuration of the bundled model does not have.
    with open_dict(model.cfg):
        if "validation_ds" not in model.cfg:
            model.cfg.validation_ds = {"use_start_end_token": False}
    return model
