"""Makes the recordings beside this file: one second of a rising tone, in formats that only other programs write.

    pip install av numpy soundfile && python make.py

It calls ffmpeg for Vorbis in MP4 and FLAC in Ogg.
"""
import subprocess

import av
import numpy as np
import soundfile

RATE = 16_000
t = np.arange(RATE) / RATE
# From 200 Hz to 1200 Hz, at half of full scale.
tone = (0.5 * np.sin(2 * np.pi * (200 * t + 500 * t * t)) * 32768).round().astype(np.int16)

for name, codec, rate, length in [
    ("tone.mp3", "libmp3lame", RATE, RATE),
    ("tone.m4a", "aac", RATE, RATE),
    ("tone.mov", "aac", RATE, RATE),
    # A third of a second, in fragments of an eighth, each with an index of its own.
    ("tone.mp4", "aac", RATE, RATE * 5 // 16),
    ("tone.mkv", "aac", RATE, RATE),
    ("tone.webm", "libopus", 48_000, RATE),
    # The first fifth of a second.
    ("tone.caf", "alac", RATE, RATE // 5),
    ("tone.aac", "aac", RATE, RATE // 5),
]:
    fragments = {"movflags": "empty_moov+default_base_moof", "frag_duration": "125000"}
    options = fragments if name == "tone.mp4" else {}
    with av.open(name, "w", options=options, format={"m4a": "mp4", "mkv": "matroska", "aac": "adts"}.get(name[5:], name[5:])) as out:
        stream = out.add_stream(codec, rate=rate, layout="mono")
        stream.bit_rate = 32_000 if codec == "libopus" else 64_000
        frame = av.AudioFrame.from_ndarray(tone[None, :length], format="s16", layout="mono")
        frame.sample_rate = RATE
        frame.pts = 0
        resampler = av.AudioResampler(format=stream.codec_context.format.name, layout="mono", rate=rate, frame_size=0)
        fifo = av.AudioFifo()
        for part in resampler.resample(frame) + resampler.resample(None):
            fifo.write(part)
        while True:
            size = stream.codec_context.frame_size or 1024
            part = fifo.read(size, partial=True)
            if part is None:
                break
            for packet in stream.encode(part):
                out.mux(packet)
        for packet in stream.encode(None):
            out.mux(packet)

for name, subtype in [("tone.ogg", "VORBIS"), ("tone.opus", "OPUS")]:
    soundfile.write(name, tone, RATE, format="OGG", subtype=subtype)

subprocess.run(["ffmpeg", "-y", "-i", "tone.ogg", "-c:a", "libvorbis", "tone.vorbis.mp4"], check=True)
subprocess.run(["ffmpeg", "-y", "-bitexact", "-i", "tone.caf", "-c:a", "flac", "-bitexact", "tone.oga"], check=True)
