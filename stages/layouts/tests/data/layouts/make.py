"""Makes the corpora of this folder with the tools whose layouts they have.

    pip install lhotse==1.33.0 datasets==5.2.0 soundfile==0.14.0 kaldiio webdataset==1.0.2
    cd <this folder> && python make.py

Recordings are sines of 0.5, 0.75 and 0.25 s at 16 kHz.
"""

import os
import shutil
import zipfile

import kaldiio
import numpy as np
import pyarrow as pa
import soundfile
import webdataset
from pyarrow import feather
from datasets import Audio, ClassLabel, Dataset, DatasetDict, Features, Value
from lhotse import CutSet, Recording, RecordingSet, SupervisionSegment, SupervisionSet

for folder in ["wav", "lhotse", "cuts", "shar", "hub", "saved", "saved_dict", "kaldi", "webdataset", "lists", "compressed", "zip"]:
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)

signals = {}
for number, (name, seconds) in enumerate([("a", 0.5), ("b", 0.75), ("c", 0.25)]):
    time = np.arange(int(16000 * seconds)) / 16000
    signals[name] = (0.3 * np.sin(2 * np.pi * 220 * (number + 1) * time)).astype("float32")
    soundfile.write(f"wav/{name}.flac", signals[name], 16000, subtype="PCM_16")

# Lhotse
recordings = RecordingSet.from_recordings(Recording.from_file(f"wav/{name}.flac") for name in "ab")
supervisions = [
    SupervisionSegment("u1", "a", 0.1, 0.3, 0, "ek", "hi", "s1", custom={"k": 1}),
    SupervisionSegment("u2", "b", 0.0, 0.75, 0, "do", "hi", "s2"),
]
lost = SupervisionSegment("u3", "zz", 0.0, 0.75, 0, "teen", "hi", "s2")
recordings.to_file("lists/x_recordings_train.json.gz")
SupervisionSet.from_segments(supervisions).to_file("lists/x_supervisions_train.json")
recordings.to_file("lhotse/x_recordings_train.jsonl.gz")
SupervisionSet.from_segments(supervisions + [lost]).to_file("lhotse/x_supervisions_train.jsonl.gz")
cuts = list(CutSet.from_manifests(recordings=recordings, supervisions=SupervisionSet.from_segments(supervisions)))
CutSet.from_cuts(
    cuts
    + [
        cuts[0].append(cuts[1]).with_id("mixed"),
        cuts[0].pad(duration=1.0).with_id("padded"),
        cuts[1].perturb_speed(1.1),
        cuts[1].truncate(offset=0.25, duration=0.5).with_id("truncated"),
    ]
).to_file("cuts/x_cuts_train.jsonl.gz")
CutSet.from_cuts(cuts).to_file("lists/x_cuts_dev.json")
# Of a cut that begins later the tar has the part alone.
later = cuts[0].truncate(offset=0.1, duration=0.35).with_id("of/folder.1")
CutSet.from_cuts(cuts + [later]).to_shar("shar", fields={"recording": "flac"}, shard_size=2)

# Hugging Face
rows = {
    "audio": [
        {"bytes": open("wav/a.flac", "rb").read(), "path": "0.wav"},
        {"bytes": open("wav/b.flac", "rb").read(), "path": "0.wav"},
        None,
        {"bytes": open("wav/c.flac", "rb").read(), "path": None},
    ],
    "sentence": ["ek", "do", "null audio", None],
    "gender": [0, 1, -1, 1],
    "begin_time": [7.5, 8.0, 9.0, 9.5],
    "lang": ["hindi"] * 4,
}
features = {
    "audio": Audio(sampling_rate=48000),
    "sentence": Value("string"),
    "gender": ClassLabel(names=["male", "female"]),
    "begin_time": Value("float64"),
    "lang": Value("string"),
}
data = Dataset.from_dict(rows, features=Features(features))
data.save_to_disk("saved")
DatasetDict({"train": data.select([0, 1]), "test": data.select([3])}).save_to_disk("saved_dict")
os.makedirs("hub/data")
data.to_parquet("hub/data/train-00000-of-00001.parquet")
data.select([1]).to_parquet("hub/data/test-00000-of-00001.parquet")

# Arrow with compressed buffers: the file format and the stream format.
feather.write_feather(data.data.table, "compressed/lz4.arrow", compression="lz4")
with pa.ipc.new_stream("compressed/zstd.arrow", data.data.table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
    writer.write_table(data.data.table)

# AudioFolder in archives: as `zip -0` writes them, compressed, and in the form of large ones.
def archive(name, table, text, compressed=False):
    with zipfile.ZipFile(f"zip/{name}", "w") as file:
        def write(name, content, method):
            file.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), content, method)
        write(table, text, zipfile.ZIP_DEFLATED)
        for recording in "ab":
            content = open(f"wav/{recording}.flac", "rb").read()
            write(os.path.join(os.path.dirname(table), f"clips/{recording}.flac"), content, zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED)

TABLE = "file_name,transcription,speaker\nclips/a.flac,\"ek, do\",s1\nclips/b.flac,teen,s2\nclips/c.flac,gone,s2\n../a.flac,out,s2\n"
archive("train.zip", "metadata.csv", TABLE)
archive("test.zip", "inner/metadata.jsonl", '{"file_name": "clips/b.flac", "text": "teen", "duration": 0.75}\n')
archive("packed.zip", "metadata.csv", TABLE, compressed=True)
zipfile.ZIP64_LIMIT = zipfile.ZIP_FILECOUNT_LIMIT = 1
archive("large.zip", "metadata.csv", TABLE)

# Kaldi's archives, as ESPnet writes them: of WAV as they are, of FLAC behind a mark and their length.
kaldiio.save_ark("kaldi/flac.ark", {"a": (16000, signals["a"])}, scp="kaldi/flac.scp", write_function="soundfile", write_kwargs={"format": "flac"})
kaldiio.save_ark("kaldi/wav.ark", {"b": (16000, (signals["b"] * 32767).astype("int16"))}, scp="kaldi/wav_only.scp")

# WebDataset: texts, and JSON as Emilia has it.
for split, names in [("train", "ab"), ("test", "c")]:
    with webdataset.TarWriter(f"webdataset/{split}-000000.tar", mtime=0) as tar:
        for name in names:
            sample = {"__key__": f"de/{name}", "flac": open(f"wav/{name}.flac", "rb").read()}
            about = {"id": name, "text": f"text of {name}", "duration": {"a": 0.5, "b": 0.75, "c": 0.25}[name], "speaker": "s1", "language": "de", "dnsmos": 3.25}
            tar.write(sample | ({"txt": "ek"} if name == "a" else {"json": about}))
