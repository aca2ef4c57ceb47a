# SPDX-License-Identifier: Apache-2.0
"""Compare all compressions on a small convolutional model and on a small transformer.

    fastps-run -np 2 -s 1 --env FASTPS_SHARED_MEMORY=0 python examples/compression_models.py
    fastps-run -np 2 -s 1 --env FASTPS_SHARED_MEMORY=0 python examples/compression_models.py \\
        --model transformer

The data are the digits of scikit-learn; a fifth of them is held out. Thresholds: with error
feedback every codec's mean accuracy over the seeds is at most 1 point below the uncompressed one.
Without it onebit and topk of 1 % lose more than 1 point to themselves with it. The exit code is 1
if a threshold is missed; docs/compression.md says how the setup was chosen. --plot FILE draws the
accuracies (needs matplotlib).

A transformer's accuracy differs by points between runs that differ in their last bits. So the
average of its weights over the second half of the steps is tested (Polyak and Juditsky, 1992).
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
import torch
from compression import POINT, WITH_FEEDBACK, WITHOUT, split
from torch import nn

import fastps.torch as fps

BATCH = 32
RATE = 0.1
STEPS = {"conv": 600, "transformer": 3000}
BESIDE = {name: name.removesuffix(", no feedback") for name in WITHOUT}  # compared with


class Transformer(nn.Module):
    """Read the rows of an image as eight words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Linear(8, 32)
        self.places = nn.Parameter(0.1 * torch.randn(8, 32))
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.last = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give the scores of the digits."""
        return self.last(self.layer(self.words(x.view(-1, 8, 8)) + self.places).mean(dim=1))


def make_model(kind: str, seed: int) -> nn.Module:
    """Make a model, the same on every worker."""
    torch.manual_seed(seed)
    if kind == "transformer":
        return Transformer()
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(128, 10),
    )  # fmt: skip


def train(kind: str, name: str, compression: Any, seed: int, steps: int) -> float:
    """Train once and give the accuracy on what was held out."""
    images, labels, test_images, test_labels = map(torch.from_numpy, split(seed))
    model = make_model(kind, seed)
    if kind == "conv":
        images, test_images = images.view(-1, 8, 8), test_images.view(-1, 8, 8)
    optimizer = fps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=RATE), model.named_parameters(),
        compression=compression, prefix=f"{kind}.{name}.{seed}.",
    )  # fmt: skip
    average = torch.optim.swa_utils.AveragedModel(model)
    random = np.random.default_rng(seed)
    for step in range(steps):
        chosen = random.choice(len(images), BATCH * fps.size(), replace=False)
        mine = torch.from_numpy(chosen[fps.rank() :: fps.size()])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()
        if step >= steps // 2:
            average.update_parameters(model)
    tested = average if kind == "transformer" else model
    with torch.no_grad():
        return float((tested(test_images).argmax(dim=1) == test_labels).float().mean())


def plot(path: str, found: dict[str, float]) -> None:
    """Draw the accuracies as bars."""
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    pyplot.barh(list(found), [100 * value for value in found.values()])
    pyplot.xlim(100 * min(found.values()) - 2, 100)
    pyplot.xlabel("accuracy on what was held out, %")
    pyplot.tight_layout()
    pyplot.savefig(path)


def main() -> int:
    """Train with all compressions and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=sorted(STEPS), default="conv")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="0: those of the measurements")
    parser.add_argument(
        "--only", default="", help="names of compressions, separated by semicolons"
    )
    parser.add_argument("--plot", metavar="FILE", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fps.init(min_compress_bytes=0)
    ways: dict[str, Any] = {"none": fps.Compression.none, **WITH_FEEDBACK, **WITHOUT}
    if options.only:
        ways = {name: ways[name] for name in ["none", *options.only.split(";")] if name}
    found: dict[str, float] = {}
    wrong = []
    for name, way in ways.items():
        seeds = range(options.first_seed, options.first_seed + options.seeds)
        steps = options.steps or STEPS[options.model]
        runs = [train(options.model, name, way, seed, steps) for seed in seeds]
        found[name] = float(np.mean(runs))
        loss = found.get(BESIDE.get(name, "none"), found["none"]) - found[name]
        if fps.rank() == 0:
            print(f"{name:24} accuracy {found[name]:.4f} ({-100 * loss:+.2f} points)", flush=True)
        if (loss < POINT) != (name not in WITHOUT):
            wrong.append(name)
    if fps.rank() == 0:
        print("not as expected: " + ", ".join(wrong) if wrong else "all as expected")
        if options.plot:
            plot(options.plot, found)
    fps.shutdown()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
