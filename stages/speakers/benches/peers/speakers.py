"""The networks of diarization in PyTorch, beside ours: speakers.py FOLDER THREADS [CASE].

The benchmark writes a case on each line of standard input; the answer is a line of JSON: CPU seconds of one run, and values of
the result. The first mention of a case also prepares it and runs it once, so that set-up is not counted. FOLDER holds inputs as
f32 (`samples`, `features`, `part`) and weights as safetensors. With CASE it runs that once, and prints the result.
"""

import json
import math
import os
import struct
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

FOLDER = sys.argv[1]
RATE = 16_000
CHUNK = 10 * RATE
# Chunks that go through the segmentation together: 32 is pyannote's own number.
BATCH = 32
TYPES = {"F32": torch.float32, "F16": torch.float16}


def numbers(name):
    with open(os.path.join(FOLDER, name), "rb") as file:
        return torch.frombuffer(bytearray(file.read()), dtype=torch.float32)


def weights(name):
    with open(os.path.join(FOLDER, name + ".safetensors"), "rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(size))
        data = bytearray(file.read())
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] in TYPES:
            start, end = entry["data_offsets"]
            tensor = torch.frombuffer(data[start:end], dtype=TYPES[entry["dtype"]])
            tensors[name] = tensor.reshape(entry["shape"]).float()
    return tensors


class PyanNet(nn.Module):
    """pyannote's segmentation-3.0: chunks (n, 160000) to log-probabilities (n, 589, 7)."""

    def __init__(self, tensors):
        super().__init__()
        self.t = {name.removeprefix("sincnet."): tensor for name, tensor in tensors.items()}
        self.filters = self.sinc_filters()
        self.lstm = nn.LSTM(60, 128, num_layers=4, bidirectional=True, batch_first=True)
        lstm = {name.removeprefix("lstm."): tensor for name, tensor in tensors.items() if name.startswith("lstm.")}
        self.lstm.load_state_dict(lstm)

    def sinc_filters(self):
        """40 even filters and 40 odd ones, of 251 taps."""
        low = 50.0 + self.t["conv1d.0.filterbank.low_hz_"].abs()
        high = (low + 50.0 + self.t["conv1d.0.filterbank.band_hz_"].abs()).clamp(50.0, RATE / 2)
        band = high - low
        half = 2 * math.pi * torch.arange(-125.0, 0.0) / RATE
        window = torch.hamming_window(251, periodic=False)[:125]
        even = (torch.sin(high * half) - torch.sin(low * half)) / (half / 2) * window
        odd = (torch.cos(low * half) - torch.cos(high * half)) / (half / 2) * window
        even = torch.cat([even, 2 * band, even.flip(1)], 1)
        odd = torch.cat([odd, torch.zeros_like(band), -odd.flip(1)], 1)
        return (torch.cat([even, odd]) / torch.cat([2 * band, 2 * band])).unsqueeze(1)

    def norm(self, x, name):
        return F.instance_norm(x, weight=self.t[name + ".weight"], bias=self.t[name + ".bias"], eps=1e-5)

    def forward(self, chunks):
        x = self.norm(chunks.unsqueeze(1), "wav_norm1d")
        x = F.conv1d(x, self.filters, stride=10).abs()
        x = F.leaky_relu(self.norm(F.max_pool1d(x, 3), "norm1d.0"))
        for layer in (1, 2):
            x = F.conv1d(x, self.t[f"conv1d.{layer}.weight"], self.t[f"conv1d.{layer}.bias"])
            x = F.leaky_relu(self.norm(F.max_pool1d(x, 3), f"norm1d.{layer}"))
        x, _ = self.lstm(x.transpose(1, 2))
        for layer in (0, 1):
            x = F.leaky_relu(F.linear(x, self.t[f"linear.{layer}.weight"], self.t[f"linear.{layer}.bias"]))
        return F.linear(x, self.t["classifier.weight"], self.t["classifier.bias"]).log_softmax(-1)


def batch_norm(t, x, name):
    return F.batch_norm(
        x, t[name + ".running_mean"], t[name + ".running_var"], t.get(name + ".weight"), t.get(name + ".bias"), eps=1e-5
    )


def residual(t, x, name, stride):
    """A block of two convolutions, with a convolution beside it where the shape changes."""
    y = F.relu(batch_norm(t, F.conv2d(x, t[name + ".conv1.weight"], stride=stride, padding=1), name + ".bn1"))
    y = batch_norm(t, F.conv2d(y, t[name + ".conv2.weight"], padding=1), name + ".bn2")
    if name + ".shortcut.0.weight" in t:
        x = batch_norm(t, F.conv2d(x, t[name + ".shortcut.0.weight"], stride=stride), name + ".shortcut.1")
    return F.relu(y + x)


class CamPlusPlus(nn.Module):
    """3D-Speaker's CAM++: features (n, frames, 80) to embeddings (n, 192)."""

    def __init__(self, tensors):
        super().__init__()
        self.t = tensors

    def normalized(self, x, name):
        return F.relu(batch_norm(self.t, x, name + ".batchnorm"))

    def dense(self, x, name, dilation):
        t = self.t
        y = F.conv1d(self.normalized(x, name + ".nonlinear1"), t[name + ".linear1.weight"])
        y = self.normalized(y, name + ".nonlinear2")
        name += ".cam_layer"
        local = F.conv1d(y, t[name + ".linear_local.weight"], padding=dilation, dilation=dilation)
        near = F.avg_pool1d(y, 100, stride=100, ceil_mode=True)
        near = near.repeat_interleave(100, dim=-1)[..., : y.shape[-1]]
        context = y.mean(-1, keepdim=True) + near
        context = F.relu(F.conv1d(context, t[name + ".linear1.weight"], t[name + ".linear1.bias"]))
        mask = torch.sigmoid(F.conv1d(context, t[name + ".linear2.weight"], t[name + ".linear2.bias"]))
        return torch.cat([x, local * mask], 1)

    def forward(self, features):
        t = self.t
        x = features.transpose(1, 2).unsqueeze(1)
        x = F.relu(batch_norm(t, F.conv2d(x, t["head.conv1.weight"], padding=1), "head.bn1"))
        for layer in (1, 2):
            x = residual(t, x, f"head.layer{layer}.0", (2, 1))
            x = residual(t, x, f"head.layer{layer}.1", 1)
        x = F.relu(batch_norm(t, F.conv2d(x, t["head.conv2.weight"], stride=(2, 1), padding=1), "head.bn2"))
        x = F.conv1d(x.flatten(1, 2), t["xvector.tdnn.linear.weight"], stride=2, padding=2)
        x = self.normalized(x, "xvector.tdnn.nonlinear")
        for block, (layers, dilation) in enumerate([(12, 1), (24, 2), (16, 2)], 1):
            for layer in range(1, layers + 1):
                x = self.dense(x, f"xvector.block{block}.tdnnd{layer}", dilation)
            name = f"xvector.transit{block}"
            x = F.conv1d(self.normalized(x, name + ".nonlinear"), t[name + ".linear.weight"])
        x = self.normalized(x, "xvector.out_nonlinear")
        x = torch.cat([x.mean(-1), x.std(-1)], 1).unsqueeze(-1)
        x = F.conv1d(x, t["xvector.dense.linear.weight"])
        return batch_norm(t, x, "xvector.dense.nonlinear.batchnorm").squeeze(-1)


class ResNet34(nn.Module):
    """WeSpeaker's ResNet34: features (frames, 80) and masks (n, frames of the segmentation) to embeddings (n, 256)."""

    def __init__(self, tensors):
        super().__init__()
        self.t = tensors

    def forward(self, features, masks):
        t = self.t
        x = features.t().unsqueeze(0).unsqueeze(0)
        x = F.relu(batch_norm(t, F.conv2d(x, t["conv1.weight"], padding=1), "bn1"))
        for layer, blocks in enumerate((3, 4, 6, 3), 1):
            for block in range(blocks):
                x = residual(t, x, f"layer{layer}.{block}", 2 if layer > 1 and block == 0 else 1)
        x = x.flatten(1, 2)
        w = F.interpolate(masks.unsqueeze(1), size=x.shape[-1], mode="nearest")
        sum_of_weights = w.sum(-1) + 1e-8
        mean = (x * w).sum(-1) / sum_of_weights
        squares = ((x - mean.unsqueeze(-1)) ** 2 * w).sum(-1)
        var = squares / (sum_of_weights - (w**2).sum(-1) / sum_of_weights + 1e-8)
        return F.linear(torch.cat([mean, var.sqrt()], 1), t["seg_1.weight"], t["seg_1.bias"])


def segmentation():
    network = PyanNet(weights("segmentation"))
    chunks = numbers("samples").unfold(0, CHUNK, RATE)

    def run():
        # As pyannote cuts them: what is of chunks that overlap is computed for each of them.
        return torch.cat([network(batch.contiguous()) for batch in chunks.split(BATCH)])[-1]

    return run


def campplus(name):
    network, features = CamPlusPlus(weights("campplus")), numbers(name).reshape(1, -1, 80)
    return lambda: network(features)


def resnet34():
    network, features, masks = ResNet34(weights("resnet34")), numbers("features").reshape(-1, 80), torch.ones(3, 589)
    return lambda: network(features, masks)


def silero():
    from silero_vad import load_silero_vad

    network, windows = load_silero_vad(onnx=True), numbers("samples").split(512)
    windows = [window for window in windows if len(window) == 512]

    def run():
        network.reset_states()
        return torch.stack([network(window, RATE).reshape(()) for window in windows])

    return run


CASES = {
    "segmentation": segmentation,
    "campplus part": lambda: campplus("part"),
    "campplus chunk": lambda: campplus("features"),
    "resnet34": resnet34,
    "silero": silero,
}


def main():
    torch.set_num_threads(int(sys.argv[2]))
    ready = {}
    with torch.inference_mode():
        if len(sys.argv) > 3:
            print(CASES[sys.argv[3]]()().flatten()[:20])
            return
        print(json.dumps({"torch": torch.__version__}), flush=True)
        for line in sys.stdin:
            name = line.strip()
            try:
                if name not in ready:
                    ready.clear()
                    ready[name] = CASES[name]()
                    ready[name]()
            except ImportError as error:
                print(json.dumps({"missing": str(error)}), flush=True)
                continue
            begun = time.process_time()
            result = ready[name]()
            seconds = time.process_time() - begun
            print(json.dumps({"cpu": seconds, "values": result.flatten()[:2000].tolist()}), flush=True)


main()
