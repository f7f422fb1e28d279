"""Folder of 16 kHz mono FLAC files -> seconds to decode them, and to decode them and make NeMo's features, on one thread."""

import glob
import sys
import time

import soundfile
import torch
from nemo.collections.asr.modules import AudioToMelSpectrogramPreprocessor

torch.set_num_threads(1)
features = AudioToMelSpectrogramPreprocessor(
    sample_rate=16000, window_size=0.025, window_stride=0.01, window="hann", normalize="per_feature",
    features=128, n_fft=512, dither=0.0, pad_to=0).eval()
paths = sorted(glob.glob(sys.argv[1] + "/*.flac"))


def decode():
    for path in paths:
        soundfile.read(path, dtype="float32")


def both():
    with torch.inference_mode():
        for path in paths:
            signal = torch.from_numpy(soundfile.read(path, dtype="float32")[0])
            features(input_signal=signal[None], length=torch.tensor([len(signal)]))


def best(run):
    times = []
    for _ in range(4):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times[1:])


print(best(decode), best(both))
