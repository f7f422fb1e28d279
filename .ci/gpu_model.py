#!/usr/bin/env python3
"""The time of a training step of parakeet-tdt-0.6b on an H100, kernel by kernel, by a model: no measurement.

A kernel takes the bytes that it moves, or its operations, over a rate that such a kernel reaches, and a start. Where it waits for
one load after the other, it takes so long for each turn. `was` is before the changes that docs/gpu.md lists, `now` is after them. The
rates of `was` were fitted to the run in docs/gpu.md; those of `now` follow from loads in flight, instructions and bytes, which are read
from the machine code. A change of a kernel changes its line here.

    .ci/gpu_model.py [CLIPS SECONDS TOKENS]
"""
import math
import sys

LAYERS, D, HEADS, JOINT, OUTPUTS, PARAMETERS = 24, 1024, 8, 640, 8256, 627e6
SMS = 132
# Instructions for an element of SiLU: of 216 and 238 for four, by the machine code for 9.0.
SILU, SILU_BACKWARD = 54, 60
# Warp instructions a second.
ISSUE = SMS * 4 * 1.7e9


def half(n):
    return (n + 1) // 2


def step(clips, seconds, tokens):
    """(part, kernel, launches, seconds of each was, now)"""
    mel = int(seconds * 100) + 1
    time, valid = half(half(half(mel))), half(half(half(mel - 1)))
    rows, states = clips * time, tokens + 1
    cells = clips * valid * states
    # The share of cells that count, of random weights: of a posterior of 1e-20 or more, and of 1e-8.
    counts = (0.63, 0.43) if clips > 1 else (0.20, 0.12)
    chunks = cells / 12288
    out = []

    def kernel(part, name, launches, was, now=None):
        out.append((part, name, launches, was, was if now is None else now))

    def passes(part, name, launches, megabytes, was, now=None, start=3e-6, fewer=None):
        """Bound by memory, at so many TB/s; `fewer`: the megabytes now."""
        rates = ((megabytes, was), (fewer or megabytes, now or was))
        kernel(part, name, launches, *(moved / (rate * 1e6) + start for moved, rate in rates))

    def product(part, name, launches, m, n, k, was=600, now=None, factor=2, adds=False, result=4):
        """At so many TFLOP/s; `result`: bytes of a number of the result now."""
        moved = [factor * (m * k + k * n) + size * m * n * (2 if adds else 1) for size in (4, result)]
        rates = zip(moved, (was, now or was))
        kernel(part, name, launches, *(max(2.0 * m * n * k / (rate * 1e12), size / 3e12) + 3e-6 for size, rate in rates))

    x0, x1, x2 = (clips * t * bands * 256 * 4e-6 for t, bands in ((half(mel), 64), (half(half(mel)), 32), (time, 16)))
    kernel("features", "kernels", 1, 1.2e-3 * clips / 60 + 1e-4)
    kernel("features", "samples to page-locked memory", 1, *((2.5e-3, 0.8e-3) if clips > 1 else (0.5e-3, 0.2e-3)))
    passes("sub-sampling", "convolutions, forward", 1, 2 * x0 + 2 * x1 + x2, 2.2, 2.6)
    passes("sub-sampling", "bias and ReLU, both ways", 1, 3 * x1 + 6 * x2, 2.0, 2.7)
    passes("sub-sampling", "gradients of convolutions", 1, 4 * x0 + 6 * x1 + 2 * x2, 1.65, 2.0)
    # In f32 on CUDA cores, or in TF32 on tensor cores.
    for m, n, k in ((x1 / 1024e-6, 256, 256), (x2 / 1024e-6, 256, 256), (rows, D, 4096)):
        product("sub-sampling", f"product of {m:.0f}", 3, m, n, k, 30, 250, factor=4)

    for name, n, k, times in (("up", 4 * D, D, 2), ("down", D, 4 * D, 2), ("qkv", 3 * D, D, 1), ("other", D, D, 2), ("gate", 2 * D, D, 1)):
        product("encoder", f"products {name}", 2 * LAYERS * times, rows, n, k, result=2)
        product("encoder", f"gradient {name}", LAYERS * times, n, k, rows, 560)
    mb, wide = rows * D * 1e-6, rows * 4 * D
    # Instructions for an element, on the way of whole fours with a mask.
    issue = [wide * instructions / 32 / ISSUE * 1.1 for instructions in (84, SILU, SILU_BACKWARD)]
    # What products give is in bf16 now: the hidden values, branches of the residual sum, and gradients of both.
    kernel("encoder", "SiLU", 2 * LAYERS, max(6e-6 * wide / 2.6e6, issue[0]), max(4e-6 * wide / 2.8e6, issue[1]))
    kernel("encoder", "SiLU, backward", 2 * LAYERS, max(10e-6 * wide / 2.6e6, issue[0]), max(6e-6 * wide / 2.8e6, issue[2]))
    passes("encoder", "norms", 3 * LAYERS, 14 * mb, 1.9, 2.2, fewer=12 * mb)
    passes("encoder", "two norms", LAYERS, 18 * mb, 1.6, 2.0, fewer=16 * mb)
    # Turns of a block over its rows: 8 warps a block, of which two or three blocks run on a multiprocessor.
    passes("encoder", "norms, backward", 3 * LAYERS, 18 * mb, 1.55, 2.2, 12e-6, fewer=16 * mb)
    passes("encoder", "two norms, backward", LAYERS, 26 * mb, 1.25, 1.9, 20e-6, fewer=24 * mb)
    # Values and gates with the frames beside a block's, 1.25 times: 5 bytes for each channel, in f32 10; so are the two others
    # backward. What is between these kernels has 2, in f32 4.
    passes("encoder", "gate and convolution", LAYERS, 14 * mb, 1.2, 1.6, fewer=7 * mb)
    passes("encoder", "normalisation and SiLU", LAYERS, 6 * mb, 1.6, 2.2, fewer=4 * mb)
    passes("encoder", "sums of its gradient", LAYERS, 8 * mb, 1.6, 2.2, fewer=4 * mb)
    passes("encoder", "gate and convolution, backward", LAYERS, 24 * mb, 1.0, 1.3, fewer=14 * mb)
    sums = (2 * time - 1) * D * 4e-6
    groups = min(clips, max(1, int(16.8 / sums)))
    kernel("encoder", "sums over rows", LAYERS, 2 * clips * sums / 2.4e6 + 8e-6, 2 * groups * sums / 2.4e6 + 8e-6)
    tiles = math.ceil(time / 32)
    waves = clips * HEADS * tiles / 264
    kernel("encoder", "attention", LAYERS, math.ceil(waves) * tiles * 2 * 1.72e-6 + 3e-6)
    # Turns of a block of 16 queries and 16 keys: of blocks of queries, of keys and of distances.
    tiles = math.ceil(time / 16)
    turns = clips * HEADS * (3 * tiles * tiles + 2 * tiles - 1)
    kernel("encoder", "attention, backward", LAYERS, *(turns * each / SMS + 3e-6 for each in (1.95e-6, 1.25e-6)))

    product("prediction", "LSTM products", 8, states * clips, 2560, 640, 30, 200, factor=4)
    # A step goes over four rows of the batch at a time, each of which waits for 20 loads in turn or for all of them at once.
    kernel("prediction", "LSTM steps", 4 * states, *(math.ceil(clips / 4) * each + 1.8e-6 for each in (3.9e-6, 1.2e-6)))
    distinct = states * clips * clips * 3e-10
    kernel("prediction", "embedding and rest", 1, 5e-4 + distinct, 5e-4)

    def joint(name, of, was, now=None):
        """For each chunk of the forward pass, of the backward pass, or of both."""
        share = {"forward": (1, 1), "backward": counts, "both": (1 + counts[0], 1 + counts[1])}[of]
        now = was if now is None else now
        kernel("joint and loss", name, chunks, was * share[0], now * share[1])

    gflop = 2 * 12288 * OUTPUTS * JOINT * 1e-12
    logits = 12288 * OUTPUTS * 4e-12
    # The product writes 203 MB in bf16 beside its arithmetic, in place of 406: the rate of `now` is assumed.
    joint("logits", "both", gflop / 640 + 3e-6, gflop / 700 + 3e-6)
    # In bf16 a row is read once, all of it at once; the L2 cache still has the last 30 MB of a chunk of 203.
    joint("terms of cells", "forward", logits / 2.04, 0.85 * logits / 2 / 2.6 + 3e-6)
    hidden = 12288 * JOINT / 32 / ISSUE
    joint("hidden values", "both", hidden * 150 + 2e-6, hidden * 75 + 2e-6)
    joint("gradients of logits", "backward", 260e-6, (0.85 + 1) * logits / 2 / 2.6 + 3e-6)
    joint("products with these", "backward", gflop / 560 + gflop / 620 + 6e-6)
    # Each state went over the frames of all utterances.
    all_frames = clips * states * 2.5 * clips * valid * 216 / 9.27e11 / 0.62
    walk = [all_frames + cells * counts[0] * JOINT * 12e-12, cells * counts[1] * JOINT * 12e-12 / 2 + chunks / 5 * 4e-5]
    kernel("joint and loss", "sums of hidden gradients", 1, *walk)
    # A block of the recursion: 500 instructions for 32 cells, one in two cycles of each of four schedulers, and no less than 1000 cycles
    # and a barrier for each diagonal; both read weights of arcs and write sums, 264 bytes a cell. Beside it weights of arcs (64 bytes
    # in, 120 out for a cell) and posteriors (144 in, 57 out): 585 bytes in all, and 65 where terms are written and cells are listed.
    diagonals = valid + states - 1
    turns = valid * states / 32 + diagonals / 2
    blocks = math.ceil(2 * clips / SMS) * (max(turns * 500 / 4 / 0.5, diagonals * 1000) + diagonals * 200) / 1.7e9
    alignment = max(blocks, cells * 264 / 2.6e12) + cells * (184 + 201) / 2e12 + 1e-5
    kernel("joint and loss", "alignment", 1, (0.0033 if clips > 10 else 0.0029) if clips > 1 else 0.045, alignment)
    scan = 2 * math.ceil(valid * states / 256) * 0.6e-6
    kernel("joint and loss", "lists of cells", 1, scan, math.ceil(valid * states / 4096) * 2e-6 + 2e-5)
    product("joint and loss", "projections", 4, rows, JOINT, D)

    passes("optimizer", "norm", 1, 4e-6 * PARAMETERS, 1.25, 2.8)
    passes("optimizer", "AdamW", 1, 24e-6 * PARAMETERS, 2.3, 2.8)
    kernel("optimizer", "host between norm and AdamW", 1, 1e-3)
    kernel("launches", "gaps", 1, 1e-6 * (1300 + 9 * chunks))
    return out


def report(clips, seconds, tokens):
    lines = step(clips, seconds, tokens)
    parts = {}
    for part, name, launches, *times in lines:
        was, now = (1e3 * launches * time for time in times)
        sums = parts.setdefault(part, [0.0, 0.0])
        sums[0] += was
        sums[1] += now
        print(f"{part:16}{name:36}{launches:8.0f}{was:9.2f}{now:9.2f}")
    parts["step"] = [sum(of) for of in zip(*parts.values())]
    print(f"\n{clips} x {seconds} s, {tokens} tokens: ms before the changes and now, both by the model")
    for part, (was, now) in parts.items():
        print(f"{part:16}{was:9.1f}{now:9.1f}")
    print()


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    for shape in [given] if given else [[9, 10, 120], [1, 90, 512], [60, 10, 120]]:
        report(*shape)
