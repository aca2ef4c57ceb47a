# SPDX-License-Identifier: Apache-2.0
"""Train with two Byzantine workers of eight, by every rule under every attack.

    fastps-run -np 8 -s 1 --env FASTPS_SHARED_MEMORY=0 python examples/byzantine.py

The model is a classifier of scikit-learn's digits. In each round every worker takes eight steps
with its own eighth of the data and pushes the change of its model. The server combines the eight
changes by a rule, and all workers add the result to the model. Workers 0 and 1 are Byzantine.

The program prints the held-out accuracy after the last round. --plot FILE draws it round by round,
a panel for each attack (needs matplotlib). Thresholds: under the attacks "negative" and "random"
the average ends below 60 %, and the geometric median, Krum and the trimmed mean end above 80 %.
The exit code is 1 if a threshold is missed. --grid compares rules by their worst attack, in one
process (byzantine_grid.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import numpy as np
from sklearn.datasets import load_digits

import fastps
from fastps import byzantine as bz
from fastps.byzantine import attacks

LIARS = attacks.Liars(fixed=frozenset({0, 1}), seed=7)
STEPS, BATCH, RATE, MOMENTUM, HIDDEN = 8, 16, 0.05, 0.9, 32
RULES: dict[str, bz.Choice] = {
    "average": "average",
    "median": "median",
    "trimmed mean": bz.TrimmedMean(2),
    "Phocas": bz.Phocas(2),
    "around median": bz.MeanAroundMedian(2),
    "Krum": bz.Krum(2),
    "multi-Krum": bz.MultiKrum(2),
    "Bulyan (f=1)": bz.Bulyan(1),
    "geometric": bz.GeometricMedian(),
    "centered clip": bz.CenteredClipping(1.0, iterations=3),
    "norm clip": bz.NormClipping(1.0),
    "NNM, trimmed": bz.NNM(bz.TrimmedMean(2)),
    "ARC, trimmed": bz.ARC(bz.TrimmedMean(2)),
}
ATTACKS = ("none", "negative", "random", "label flip", "ALIE", "inner product")
FAILS, HOLDS = ("average",), ("geometric", "Krum", "trimmed mean")
Array = np.ndarray


class Data:
    """The digits, cut into a part for each worker and one held out."""

    def __init__(self, n: int) -> None:
        raw = load_digits()
        order = np.random.default_rng(0).permutation(len(raw.target))
        x, y = raw.data[order] / 16, raw.target[order]
        self.x, self.y = x[:360], y[:360]
        self.parts = list(zip(np.array_split(x[360:], n), np.array_split(y[360:], n), strict=True))


def unpacked(flat: Array) -> tuple[Array, ...]:
    """View a model, 64 -> 32 -> 10, as its layers."""
    cuts = np.cumsum([64 * HIDDEN, HIDDEN, HIDDEN * 10])
    w1, b1, w2, b2 = np.split(flat, cuts)
    return w1.reshape(64, HIDDEN), b1, w2.reshape(HIDDEN, 10), b2


def gradient(flat: Array, x: Array, y: Array) -> Array:
    """Differentiate the cross entropy of a batch."""
    w1, b1, w2, b2 = unpacked(flat)
    hidden = np.maximum(x @ w1 + b1, 0)
    scores = hidden @ w2 + b2
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    error = odds / odds.sum(axis=1, keepdims=True)
    error[np.arange(len(y)), y] -= 1
    error /= len(y)
    back = error @ w2.T * (hidden > 0)
    return np.concatenate(
        [(x.T @ back).ravel(), back.sum(axis=0), (hidden.T @ error).ravel(), error.sum(axis=0)]
    )


def accuracy(flat: Array, data: Data) -> float:
    """Count what the model gets right of what was held out."""
    if not np.isfinite(flat).all():
        return 0.1
    w1, b1, w2, b2 = unpacked(flat)
    found = (np.maximum(data.x @ w1 + b1, 0) @ w2 + b2).argmax(axis=1)
    return float((found == data.y).mean())


def change(data: Data, start: Array, rank: int, step: int, *, flips: bool = False) -> Array:
    """Train for a round with a worker's data; give what the model changed by."""
    random = np.random.default_rng([rank, step])
    x, y = data.parts[rank]
    y = attacks.label_flip(y, 10) if flips else y
    model, speed = start.copy(), np.zeros_like(start)
    with np.errstate(all="ignore"):
        for _ in range(STEPS):
            chosen = random.choice(len(x), BATCH, replace=False)
            speed = MOMENTUM * speed - RATE * gradient(model, x[chosen], y[chosen])
            model += speed
    return (model - start).astype(np.float32)


def lie(attack: str, data: Data, start: Array, rank: int, step: int) -> Array:
    """Give what a liar pushes; colluding ones compute what the honest will push."""
    if attack == "label flip":
        return change(data, start, rank, step, flips=True)
    if attack in ("ALIE", "inner product"):
        n = len(data.parts)
        honest = [change(data, start, i, step) for i in range(n) if not LIARS.lies(i, step)]
        if attack == "ALIE":
            return attacks.alie(honest, n, len(LIARS.fixed))
        return attacks.inner_product(honest, scale=2.0)
    own = change(data, start, rank, step)
    if attack == "negative":
        return attacks.negative(own, scale=6)
    return attacks.random(own, LIARS.generator(rank, step), scale=10.0)


def train(data: Data, name: str, attack: str, rounds: int) -> list[float]:
    """Train by a rule under an attack; give the accuracy after every round."""
    random = np.random.default_rng(1)
    model = np.zeros(64 * HIDDEN + HIDDEN + HIDDEN * 10 + 10)
    w1, _, w2, _ = unpacked(model)  # views
    w1[...] = random.normal(0, np.sqrt(2 / 64), w1.shape)
    w2[...] = random.normal(0, np.sqrt(2 / HIDDEN), w2.shape)
    found, rank = [], fastps.rank()
    for step in range(rounds):
        is_lie = attack != "none" and LIARS.lies(rank, step)
        push: Callable[..., Array] = fastps.push_pull
        mine = lie(attack, data, model, rank, step) if is_lie else change(data, model, rank, step)
        model = model + push(mine, f"{name} {attack}", rule=RULES[name])
        found.append(accuracy(model, data))
    return found


def plot(path: str, curves: dict[tuple[str, str], list[float]]) -> None:
    """Draw accuracy against rounds, a panel for each attack."""
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    chosen = list(dict.fromkeys(attack for _, attack in curves))
    figure, panels = pyplot.subplots(
        -(-len(chosen) // 3), min(len(chosen), 3), sharey=True, squeeze=False, figsize=(12, 7)
    )
    for attack, panel in zip(chosen, panels.flat, strict=False):
        for (name, there), curve in curves.items():
            if there == attack:
                panel.plot(range(1, len(curve) + 1), curve, label=name)
        panel.set_title(attack)
        panel.set_xlabel("rounds")
    panels[0][0].set_ylabel("accuracy on what was held out")
    panels[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def missed(curves: dict[tuple[str, str], list[float]]) -> list[str]:
    """List what did not end as said above."""
    out = []
    for (name, attack), curve in curves.items():
        if attack not in ("negative", "random"):
            continue
        if (name in FAILS and curve[-1] > 0.6) or (name in HOLDS and curve[-1] < 0.8):
            out.append(f"{name} under {attack}: {curve[-1]:.3f}")
    return out


def main() -> int:
    """Compare rules under attacks."""
    if "--grid" in sys.argv:
        from byzantine_grid import main as compare  # noqa: PLC0415

        return compare()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--rounds", type=int, default=40, help="number of rounds")
    parser.add_argument("--plot", metavar="FILE", default="", help="draw the accuracies into it")
    options = parser.parse_args()
    fastps.init()
    data = Data(fastps.size())
    curves = {}
    for name in options.rules:
        for attack in options.attacks:
            curves[name, attack] = train(data, name, attack, options.rounds)
        if fastps.rank() == 0:
            ends = "  ".join(f"{one} {curves[name, one][-1]:.3f}" for one in options.attacks)
            print(f"{name:14} {ends}", flush=True)
    wrong = missed(curves)
    if fastps.rank() == 0:
        if options.plot:
            plot(options.plot, curves)
        for text in wrong:
            print(f"not as expected: {text}")
    fastps.shutdown()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
