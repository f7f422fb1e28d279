"""Golden data of confidence intervals: the bootstrap in numpy, with the draws of flow (SplitMix64).

    python3 bootstrap.py > bootstrap.json
"""

import json

import numpy as np

GAMMA = np.uint64(0x9E3779B97F4A7C15)


def nth(seed, n):
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + n.astype(np.uint64) * GAMMA
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def case(count, resamples, seed, effect):
    random = np.random.default_rng(seed)
    units = random.integers(1, 200, count)
    a = random.binomial(units, 0.2)
    b = random.binomial(units, 0.2 - effect)
    draws = nth(seed, np.arange(1, count * resamples + 1)).reshape(resamples, count) % np.uint64(count)
    of = lambda errors: errors[draws].sum(1) / units[draws].sum(1)
    differences = of(b) - of(a)
    tail = min((differences <= 0).sum(), (differences >= 0).sum())
    return {
        "clusters": np.stack([units, a, b], 1).tolist(),
        "resamples": resamples,
        "seed": seed,
        "interval": np.quantile(of(a), [0.025, 0.975]).tolist(),
        "difference": b.sum() / units.sum() - a.sum() / units.sum(),
        "difference_interval": np.quantile(differences, [0.025, 0.975]).tolist(),
        "p": float(min(1.0, 2 * (tail + 1) / (resamples + 1))),
    }


cases = [case(30, 1000, 7, 0.02), case(5, 333, 0, 0.0), case(120, 2000, 12345, 0.1), case(2, 50, 1, 0.0)]
print(json.dumps(cases))
