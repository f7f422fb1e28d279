"""Parts of the model in PyTorch, timed beside ours: `torch_parts.py THREADS`, see serve.py.

A case is a name and numbers: `matmul nt 1200 256 1024`, `layer_norm 1200 256`. Everything but the products is a
forward and a backward pass with gradients of inputs and parameters.
"""

import torch
from serve import serve
from torch.nn import functional as F

torch.manual_seed(0)


def both(make, *tensors):
    """Forward and backward of `make(*tensors)` with a fixed gradient of the result."""
    for tensor in tensors:
        tensor.requires_grad_()
    weight = torch.randn_like(make(*tensors))

    def run():
        for tensor in tensors:
            tensor.grad = None
        make(*tensors).backward(weight)

    return run


def matmul(layout, m, k, n):
    a = torch.randn(m, k) if layout[0] == "n" else torch.randn(k, m).t()
    b = torch.randn(k, n) if layout[1] == "n" else torch.randn(n, k).t()
    return lambda: (torch.mm(a, b), None)[1]


def batched(batch, m, k, n):
    a, b = torch.randn(batch, m, k), torch.randn(batch, k, n)
    return lambda: (torch.bmm(a, b), None)[1]


def rel_shift_softmax(heads, batch, time):
    content, position = torch.randn(batch, heads, time, time), torch.randn(batch, heads, time, 2 * time - 1)
    mask = torch.zeros(batch, 1, time, time, dtype=torch.bool)

    def weights(content, position):
        b, h, t, p = position.shape
        shifted = F.pad(position, (1, 0)).view(b, h, p + 1, t)[:, :, 1:].reshape(b, h, t, p)[..., :t]
        scores = ((content + shifted) * 0.17).masked_fill(mask, -10000.0)
        return torch.softmax(scores, dim=-1).masked_fill(mask, 0.0)

    return both(weights, content, position)


def lstm(steps, batch, width):
    layer = torch.nn.LSTM(width, width)
    run = both(lambda x: layer(x)[0], torch.randn(steps, batch, width))

    def with_parameters():
        layer.zero_grad(set_to_none=True)
        run()

    return with_parameters


def module_case(module, call, *tensors):
    run = both(call, *tensors)

    def with_parameters():
        module.zero_grad(set_to_none=True)
        run()

    return with_parameters


def block(width, heads, batch, time):
    """NeMo's own layer, in training mode, dropout 0."""
    from nemo.collections.asr.parts.submodules.conformer_modules import ConformerLayer
    from nemo.collections.asr.parts.submodules.multi_head_attention import RelPositionalEncoding

    layer = ConformerLayer(
        d_model=width,
        d_ff=4 * width,
        self_attention_model="rel_pos",
        n_heads=heads,
        conv_kernel_size=9,
        dropout=0.0,
        dropout_att=0.0,
        pos_bias_u=None,
        pos_bias_v=None,
        use_bias=False,
    ).train()
    table = RelPositionalEncoding(d_model=width, dropout_rate=0.0, xscale=None, dropout_rate_emb=0.0)
    table.extend_pe(time, torch.device("cpu"), torch.float32)
    _, positions = table(torch.zeros(1, time, width))
    mask = torch.zeros(batch, time, time, dtype=torch.bool)
    padding = torch.zeros(batch, time, dtype=torch.bool)
    x = torch.randn(batch, time, width)
    return module_case(layer, lambda x: layer(x=x, att_mask=mask, pos_emb=positions, pad_mask=padding), x)


def tdt_loss(batch, frames, tokens, vocabulary):
    """The loss on given logits, by transformers' vectorised version."""
    from transformers.loss.loss_tdt import tdt_loss as loss

    logits = torch.randn(batch, frames, tokens + 1, vocabulary + 6)
    targets = torch.randint(0, vocabulary, (batch, tokens))
    lengths, target_lengths = torch.full((batch,), frames), torch.full((batch,), tokens)

    def run():
        x = logits.detach().requires_grad_()
        value = loss(
            x[..., : vocabulary + 1],
            x[..., vocabulary + 1 :],
            targets,
            lengths,
            target_lengths,
            vocabulary,
            [0, 1, 2, 3, 4],
            sigma=0.02,
            reduction="mean_batch",
        )
        value.backward()

    return run


def cases(line):
    name, *rest = line.split()
    if name == "matmul":
        return matmul(rest[0], *map(int, rest[1:]))
    sizes = [int(size) for size in rest]
    if name == "batched":
        return batched(*sizes)
    if name == "layer_norm":
        rows, width = sizes
        tensors = torch.randn(rows, width), torch.ones(width), torch.zeros(width)
        return both(lambda x, w, b: F.layer_norm(x, (width,), w, b), *tensors)
    if name == "softmax":
        return rel_shift_softmax(*sizes)
    if name == "depthwise":
        batch, time, width, taps = sizes
        tensors = torch.randn(batch, width, time), torch.randn(width, 1, taps)
        return both(lambda x, w: F.conv1d(x, w, padding=taps // 2, groups=width), *tensors)
    if name == "glu":
        batch, time, width = sizes
        return both(lambda x: F.glu(x, dim=1), torch.randn(batch, 2 * width, time))
    if name == "silu":
        return both(F.silu, torch.randn(*sizes))
    if name == "batch_norm_silu":
        batch, time, width = sizes
        norm = torch.nn.BatchNorm1d(width).train()
        return module_case(norm, lambda x: F.silu(norm(x)), torch.randn(batch, width, time))
    if name == "lstm":
        return lstm(*sizes)
    if name == "block":
        return block(*sizes)
    if name == "tdt_loss":
        return tdt_loss(*sizes)
    raise SystemExit(f"no case {line!r}")


serve(cases)
