# SPDX-License-Identifier: Apache-2.0
"""Compare synchronous, asynchronous and delayed training of a classifier of digits.

    fastps-run -np 3 -s 1 --env FASTPS_SHARED_MEMORY=0 python examples/asynchronous.py
    fastps-run -np 3 -s 1 --env FASTPS_SHARED_MEMORY=0 python examples/asynchronous.py \\
        --plot curves.png

The data are the 1797 images that come with scikit-learn; a fifth of them is held out. Each worker
draws its own batches. In six steps of ten one of the workers, drawn at random, takes ten times as
long as the others. (With one slow worker no bound could help for long, since all workers make
equally many steps.)

Thresholds: until all workers have made all steps, training with a bound of 32 is at least 1.5
times as fast as synchronous training. Its mean accuracy over the seeds is within 1 point of
synchronous training, as are those without a bound and with PipeSGD. The exit code is 1 if a
threshold is missed. --plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import fastps.torch as fps

BATCH, RATE, STEP_S = 32, 0.05, 0.01
PAUSE_SHARE, PAUSE_STEPS = 0.6, 10
FASTER, POINT = 1.5, 0.01
WAYS: dict[str, dict[str, Any]] = {
    "in step": {"asynchronous": False},
    "staleness 8": {"asynchronous": True, "staleness": 8},
    "staleness 32": {"asynchronous": True, "staleness": 32},
    "no bound": {"asynchronous": True},
    "PipeSGD": {"asynchronous": False, "staleness": 1, "pipesgd_warmup_iter": 10},
}


class Found(NamedTuple):
    """What one run gave: seconds of a step, accuracy in the end, and along the way."""

    step_s: float
    accuracy: float
    curve: list[float]


def split(seed: int) -> tuple[torch.Tensor, ...]:
    """Give images and labels to train with, then those to test with."""
    raw = load_digits()
    order = np.random.default_rng(seed).permutation(len(raw.target))
    images = torch.tensor(raw.data[order] / 16, dtype=torch.float32)
    labels = torch.tensor(raw.target[order])
    held = len(order) // 5
    return images[held:], labels[held:], images[:held], labels[:held]


def train(way: str, seed: int, steps: int) -> Found:
    """Train once; seconds count until all workers have made all steps."""
    images, labels, test_images, test_labels = split(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    options = WAYS[way]
    # changes are added, averages are divided: the same rate for both
    rate = RATE / fps.size() if options["asynchronous"] else RATE
    optimizer = fps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9),
        model.named_parameters(), prefix=f"{way}.{seed}.", **options,
    )  # fmt: skip
    random = np.random.default_rng(1000 * seed + fps.rank())
    fate = np.random.default_rng(seed)  # the same on all workers
    curve = []
    fps.barrier()
    began = time.perf_counter()
    for step in range(steps):
        chosen = torch.from_numpy(random.choice(len(images), BATCH, replace=False))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        pauses = (fate.random() < PAUSE_SHARE) & (fate.integers(fps.size()) == fps.rank())
        time.sleep(STEP_S * (PAUSE_STEPS if pauses else 1))
        optimizer.step()
        if step % max(steps // 10, 1) == 0:
            curve.append(accuracy_of(model, test_images, test_labels))
    fps.barrier()  # all have made all their steps
    seconds = (time.perf_counter() - began) / steps
    own = torch.tensor([seconds, accuracy_of(model, test_images, test_labels)])
    mean = fps.push_pull(own, name=f"{way}.{seed}.found")
    return Found(float(mean[0]), float(mean[1]), curve)


def accuracy_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Give the share of images whose digit is found."""
    with torch.no_grad():
        return float((model(images).argmax(dim=1) == labels).float().mean())


def plot(path: str, curves: dict[str, list[float]]) -> None:
    """Draw the accuracy over time of each way."""
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    for way, curve in curves.items():
        pyplot.plot(range(len(curve)), curve, label=way)
    pyplot.xlabel("tenths of the steps")
    pyplot.ylabel("accuracy on what was held out")
    pyplot.legend()
    pyplot.savefig(path)


def main() -> int:
    """Train in all ways and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--steps", type=int, default=400, help="steps of each worker")
    parser.add_argument("--plot", metavar="FILE", default="", help="draw the accuracies into it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fps.init()
    wrong, curves, base = [], {}, Found(0.0, 0.0, [])
    for way in WAYS:
        runs = [train(way, seed, options.steps) for seed in range(options.seeds)]
        step_s = float(np.mean([run.step_s for run in runs]))
        accuracy = float(np.mean([run.accuracy for run in runs]))
        curves[way] = [float(x) for x in np.mean([run.curve for run in runs], axis=0)]
        base = Found(step_s, accuracy, []) if way == "in step" else base
        if fps.rank() == 0:
            print(
                f"{way:12} {1e3 * step_s:6.2f} ms a step, {base.step_s / step_s:.2f} x, "
                f"accuracy {accuracy:.4f} ({100 * (accuracy - base.accuracy):+.2f} points)"
            )
        if accuracy < base.accuracy - POINT:
            wrong.append(f"accuracy of {way}")
        if way == "staleness 32" and step_s * FASTER > base.step_s:
            wrong.append(f"time of {way}")
    if fps.rank() == 0:
        print("not as expected: " + ", ".join(wrong) if wrong else "all as expected")
        if options.plot:
            plot(options.plot, curves)
    fps.shutdown()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
