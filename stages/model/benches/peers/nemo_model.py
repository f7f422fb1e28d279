"""Whole models made of NeMo's modules, timed beside ours: `nemo_model.py THREADS`, see serve.py.

`step d layers heads channels prediction joint vocabulary batch seconds tokens`: features, encoder, prediction and
joint network, loss (transformers' vectorised one: NeMo's own needs a GPU), backward; dropout 0, no optimizer.
`encode ...`, `onnx ...` and `transcribe ...` with the same numbers: features and encoder; features and the exported
encoder in onnxruntime; features, encoder and greedy batched decoding.
"""

import logging
import os
import warnings

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
warnings.filterwarnings("ignore")

import torch
from nemo.collections.asr.modules import AudioToMelSpectrogramPreprocessor, ConformerEncoder, RNNTDecoder, RNNTJoint
from nemo.utils import logging as nemo_logging
from serve import serve

nemo_logging.setLevel(logging.ERROR)
DURATIONS = [0, 1, 2, 3, 4]


class Model(torch.nn.Module):
    def __init__(self, d, layers, heads, channels, prediction, joint, vocabulary):
        super().__init__()
        torch.manual_seed(0)
        self.vocabulary = vocabulary
        self.features = AudioToMelSpectrogramPreprocessor(
            sample_rate=16000,
            normalize="per_feature",
            window_size=0.025,
            window_stride=0.01,
            window="hann",
            features=128,
            n_fft=512,
            dither=0.0,
            pad_to=0,
        )
        self.encoder = ConformerEncoder(
            feat_in=128,
            n_layers=layers,
            d_model=d,
            use_bias=False,
            subsampling="dw_striding",
            subsampling_factor=8,
            subsampling_conv_channels=channels,
            ff_expansion_factor=4,
            self_attention_model="rel_pos",
            n_heads=heads,
            xscaling=False,
            conv_kernel_size=9,
            dropout=0.0,
            dropout_pre_encoder=0.0,
            dropout_emb=0.0,
            dropout_att=0.0,
        )
        self.decoder = RNNTDecoder(
            prednet={"pred_hidden": prediction, "pred_rnn_layers": 2, "dropout": 0.0},
            vocab_size=vocabulary,
            blank_as_pad=True,
        )
        self.joint = RNNTJoint(
            jointnet={
                "encoder_hidden": d,
                "pred_hidden": prediction,
                "joint_hidden": joint,
                "activation": "relu",
                "dropout": 0.0,
            },
            num_classes=vocabulary,
            num_extra_outputs=len(DURATIONS),
            log_softmax=False,
        )

    def encode(self, signals, lengths):
        features, lengths = self.features(input_signal=signals, length=lengths)
        return self.encoder(audio_signal=features, length=lengths)


def noise(batch, seconds):
    samples = 16000 * seconds
    return torch.randn(batch, samples) * 0.1, torch.full((batch,), samples)


made = {}


def model(sizes):
    if sizes not in made:
        made.clear()
        made[sizes] = Model(*sizes)
    return made[sizes]


def step(sizes, batch, seconds, tokens):
    from transformers.loss.loss_tdt import tdt_loss

    net = model(sizes).train()
    net.features.eval()
    signals, lengths = noise(batch, seconds)
    targets = torch.randint(0, net.vocabulary, (batch, tokens))
    target_lengths = torch.full((batch,), tokens)

    def run():
        net.zero_grad(set_to_none=True)
        encoded, frames = net.encode(signals, lengths)
        predicted, _, _ = net.decoder(targets=targets, target_length=target_lengths)
        logits = net.joint(encoder_outputs=encoded, decoder_outputs=predicted)[:, : int(frames.max())]
        loss = tdt_loss(
            logits[..., : net.vocabulary + 1],
            logits[..., net.vocabulary + 1 :],
            targets,
            frames,
            target_lengths,
            net.vocabulary,
            DURATIONS,
            sigma=0.02,
            reduction="mean_batch",
        )
        loss.backward()
        return {"loss": float(loss)}

    return run


def encode(sizes, batch, seconds):
    net = model(sizes).eval()
    signals, lengths = noise(batch, seconds)

    @torch.no_grad()
    def run():
        net.encode(signals, lengths)

    return run


def onnx(sizes, batch, seconds):
    import tempfile

    import onnxruntime

    net = model(sizes).eval()
    signals, lengths = noise(batch, seconds)
    with torch.no_grad():
        features, frames = net.features(input_signal=signals, length=lengths)
        folder = tempfile.TemporaryDirectory()
        path = folder.name + "/encoder.onnx"
        net.encoder.export(path, input_example=(features, frames), check_trace=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    @torch.no_grad()
    def run():
        features, frames = net.features(input_signal=signals, length=lengths)
        session.run(None, dict(zip(names, [features.numpy(), frames.numpy()])))
        # Keeps the folder for as long as the case.
        return {"onnxruntime": onnxruntime.__version__, "folder": folder.name}

    return run


def transcribe(sizes, batch, seconds):
    """Blank's bias is set so that about 3.5 tokens are emitted per second."""
    from nemo.collections.asr.parts.submodules.rnnt_greedy_decoding import GreedyBatchedTDTInfer

    net = model(sizes).eval()
    signals, lengths = noise(batch, seconds)
    with torch.no_grad():
        encoded, frames = net.encode(signals, lengths)
        last = net.joint.joint_net[-1]
        hidden = torch.relu(net.joint.enc(encoded.transpose(1, 2)) + net.joint.pred.bias)
        last.bias -= last(hidden).mean((0, 1))
        last.bias[net.vocabulary + 1 :] = torch.tensor([-2.0, 1.0, 2.0, 1.0, 0.0])
        search = GreedyBatchedTDTInfer(
            net.decoder, net.joint, blank_index=net.vocabulary, durations=DURATIONS, max_symbols_per_step=10
        )

        def found(encoded, frames):
            return search(encoder_output=encoded, encoded_lengths=frames)[0]

        low, high = -40.0, 40.0
        for _ in range(12):
            last.bias[net.vocabulary] = (low + high) / 2
            emitted = sum(len(one.y_sequence) for one in found(encoded, frames))
            low, high = ((low + high) / 2, high) if emitted > 3.5 * seconds * batch else (low, (low + high) / 2)

    @torch.no_grad()
    def run():
        return {"tokens": sum(len(one.y_sequence) for one in found(*net.encode(signals, lengths)))}

    return run


def cases(line):
    name, *rest = line.split()
    numbers = tuple(int(number) for number in rest)
    make = {"step": step, "encode": encode, "onnx": onnx, "transcribe": transcribe}[name]
    return make(numbers[:7], *numbers[7:])


serve(cases)
