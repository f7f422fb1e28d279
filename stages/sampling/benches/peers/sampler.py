"""The batches of one rank for one epoch, in plain CPython: what `benches/plan.rs` compares itself with.

sampler.py DURATIONS LANGUAGES WORLD RANK ACCUM EPOCH

DURATIONS holds float64, LANGUAGES uint16 codes, both little-endian and without a header. Prints the CPU seconds of
making the batches, their number, and the SHA-256 of them all as uint32: length, rows, length, rows, ...
"""
import array
import bisect
import hashlib
import random
import sys
import time

MAX_SECONDS, BOUNDARIES, TEMPERATURE, SEED = 90.0, [3.0, 5.0, 8.0, 12.0, 16.0], 0.3, 42


def weights(languages):
    counts = {}
    for language in languages:
        counts[language] = counts.get(language, 0) + 1
    powers = {language: count ** TEMPERATURE for language, count in counts.items()}
    total = 0.0
    for power in powers.values():
        total += power
    return {
        language: powers[language] / total / (counts[language] / len(languages)) for language in counts
    }


def batches(durations, languages, world, rank, accum, epoch):
    rng = random.Random(SEED + epoch)
    weight = weights(languages)
    buckets = {}
    for row, seconds in enumerate(durations):
        buckets.setdefault(bisect.bisect_right(BOUNDARIES, seconds), []).append(row)
    packed = []
    for rows in buckets.values():
        keyed = [(rng.random() ** (1.0 / max(weight[languages[row]], 1e-12)), row) for row in rows]
        keyed.sort(reverse=True)
        batch, filled = [], 0.0
        for _, row in keyed:
            seconds = durations[row]
            if batch and filled + seconds > MAX_SECONDS:
                packed.append(batch)
                batch, filled = [], 0.0
            batch.append(row)
            filled += seconds
        if batch:
            packed.append(batch)
    packed.sort(key=lambda batch: len(batch) * max(durations[row] for row in batch), reverse=True)
    mine = packed[rank : len(packed) // world * world : world]
    if accum > 1:
        mine = mine[: len(mine) - len(mine) % accum]
    rng.shuffle(mine)
    return mine


def read(path, code):
    values = array.array(code)
    with open(path, "rb") as file:
        values.frombytes(file.read())
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def main():
    durations, languages = read(sys.argv[1], "d"), read(sys.argv[2], "H")
    world, rank, accum, epoch = map(int, sys.argv[3:7])
    start = time.process_time()
    made = batches(durations, languages, world, rank, accum, epoch)
    seconds = time.process_time() - start
    digest = hashlib.sha256()
    for batch in made:
        flat = array.array("I", [len(batch)] + batch)
        if sys.byteorder == "big":
            flat.byteswap()
        digest.update(flat.tobytes())
    print(seconds, len(made), digest.hexdigest())


if __name__ == "__main__":
    main()
