"""PyTorch beside flow on the same GPU: the encoder of transformers, its LSTM's like and its TDT loss, at the shapes of `.ci/gpu`.

    gpu_peer.py CLIPSxSECONDSxTOKENS...

Random weights and features; bf16 by autocast, scaled_dot_product_attention, fused AdamW; the median of 5 steps after 3. Prints
tables in Markdown.
"""

import sys
import time

import torch
import transformers
from transformers import ParakeetEncoder, ParakeetEncoderConfig
from transformers.loss.loss_tdt import tdt_loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = DEVICE == "cpu"
VOCABULARY, DURATIONS = (50, 5) if SMALL else (8192, 5)


def median(work, warm=3, timed=5):
    """Milliseconds of `work`, and its peak memory in GB."""
    for _ in range(warm):
        work()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(timed):
        begun = time.perf_counter()
        work()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    peak = torch.cuda.max_memory_allocated() / 1e9 if DEVICE == "cuda" else float("nan")
    return sorted(times)[len(times) // 2] * 1e3, peak


def row(name, work, seconds=None):
    """Prints a row of the table; what does not run says why in its place."""
    try:
        ms, peak = median(work)
        rate = "" if seconds is None else f"{seconds / ms * 1e3:.0f}"
        print(f"| {name} | {ms:.2f} | {rate} | {peak:.1f} |", flush=True)
    except Exception as error:  # noqa: BLE001: the next row is measured all the same
        print(f"| {name} | {type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''} | | |", flush=True)


def encoder_steps(shapes):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "subsampling_conv_channels": 16} if SMALL else {}
    config = ParakeetEncoderConfig(
        num_mel_bins=128, attention_bias=False, convolution_bias=False, layerdrop=0.0, scale_input=False, **sizes
    )
    config._attn_implementation = "sdpa"
    for compiled in (False, True):
        model = ParakeetEncoder(config).to(DEVICE).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
        call = torch.compile(model, dynamic=False) if compiled else model
        for clips, seconds, _ in shapes:
            frames = int(seconds * 100) + 1
            features = torch.randn(clips, frames, 128, device=DEVICE)
            mask = torch.ones(clips, frames, dtype=torch.bool, device=DEVICE)

            def passes():
                with torch.autocast(DEVICE, dtype=torch.bfloat16):
                    out = call(features, attention_mask=mask).last_hidden_state
                out.float().square().mean().backward()

            def step():
                optimizer.zero_grad(set_to_none=True)
                passes()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()

            name = f"encoder {clips} x {seconds:g} s{', torch.compile' if compiled else ''}"
            row(f"{name}, forward and backward", passes, clips * seconds)
            row(f"{name}, with the norm and AdamW", step, clips * seconds)


def lstm(shapes):
    layers = torch.nn.LSTM(640, 640, num_layers=2).to(DEVICE)
    for clips, _, tokens in shapes:
        x = torch.randn(tokens + 1, clips, 640, device=DEVICE, requires_grad=True)
        row(f"LSTM of 2 x 640, {tokens + 1} steps of {clips}", lambda: layers(x)[0].square().mean().backward())


def loss(shape):
    """The joint network and the loss of all cells at once, as transformers computes them: memory bounds the shape."""
    clips, seconds, tokens = shape
    frames, width = int(seconds * 100 / 8) + 1, 640
    head = torch.nn.Linear(width, VOCABULARY + 1 + DURATIONS).to(DEVICE)
    f = torch.randn(clips, frames, 1, width, device=DEVICE, requires_grad=True)
    g = torch.randn(clips, 1, tokens + 1, width, device=DEVICE, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (clips, tokens), device=DEVICE)
    lengths = [torch.full((clips,), length, device=DEVICE) for length in (frames, tokens)]

    def passes():
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            logits = head(torch.relu(f + g)).float()
        tokens_of, durations_of = logits[..., : VOCABULARY + 1], logits[..., VOCABULARY + 1 :]
        tdt_loss(tokens_of, durations_of, targets.int(), lengths[0].int(), lengths[1].int(), VOCABULARY, [0, 1, 2, 3, 4], 0.02).backward()

    row(f"joint network and TDT loss {clips} x {seconds:g} s, {tokens} tokens", passes, clips * seconds)


def main():
    shapes = [(int(c), float(s), int(t)) for c, s, t in (text.split("x") for text in sys.argv[1:])]
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU, small sizes"
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {name}\n")
    print("| PyTorch | ms | times real time | peak GB |\n| --- | --- | --- | --- |", flush=True)
    lstm(shapes)
    if shapes:
        loss(shapes[0])
    encoder_steps(shapes)


main()
