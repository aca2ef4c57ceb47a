# SPDX-License-Identifier: Apache-2.0
"""Train a classifier of handwritten digits on several workers, and verify the result.

    fastps-run -np 2 -s 2 python examples/train_digits.py --verify

The data are the 1797 images of 8 x 8 pixels that come with scikit-learn; a fifth of them is held
out for the test. Each worker takes its own part of every global batch. At the end rank 0 prints
the test accuracy, the rate, the bytes moved and the share of time spent waiting for other workers.
Then all workers check that their weights are bitwise equal. With --verify rank 0 trains once more,
alone, on the same global batches, and compares. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import hashlib
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import fastps
import fastps.torch as fps

try:
    from rich.live import Live
    from rich.text import Text
except ImportError:  # plain lines without rich
    Live = None

TEST_SHARE = 0.2
ACCURACY_FLOOR = 0.95
# Two orders of summing one batch differ in the last bit of each gradient (2^-24 relative). With
# smooth layers some hundred steps leave less than 1e-6 of that in the weights; kinks (ReLU,
# MaxPool) would let it grow to 1e-2. A gradient that is wrong once shows as 1e-3 and more.
TOLERANCE = 1e-4
LINE_S = 1.0  # between two lines of progress without a terminal


@dataclasses.dataclass(frozen=True)
class Digits:
    """Images float32[n, 1, 8, 8] in 0..1 and labels int64[n], for training and for the test."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one training run took."""

    steps: int
    seconds: float
    waiting_s: float
    images: int
    nbytes: int  # sent and received by this worker


def load(seed: int) -> Digits:
    """Load the images and split them the same way on every worker."""
    raw = load_digits()
    order = np.random.default_rng(seed).permutation(len(raw.target))
    images = torch.tensor(raw.images[order] / 16.0, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(raw.target[order], dtype=torch.int64)
    held_out = int(TEST_SHARE * len(labels))
    return Digits(images[held_out:], labels[held_out:], images[:held_out], labels[:held_out])


def make_model(kind: str) -> nn.Module:
    """Make an untrained network; its weights come from torch's random state."""
    if kind == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 128),
        nn.Tanh(),
        nn.Linear(128, 10),
    )


def shards(
    count: int, *, epochs: int, batch: int, rank: int, size: int, seed: int
) -> Iterator[torch.Tensor]:
    """Give the indices of this rank's part of each global batch of batch * size images.

    Rank 0 of size 1 with a batch `size` times larger sees the same global batches alone.
    """
    for epoch in range(epochs):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))
        for start in range(0, count - batch * size + 1, batch * size):
            yield order[start + rank * batch : start + (rank + 1) * batch]


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer that both ways of training use."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model: nn.Module, digits: Digits, options: argparse.Namespace) -> Outcome:
    """Train on all workers together."""
    optimizer = fps.DistributedOptimizer(
        make_sgd(model), named_parameters=model.named_parameters()
    )
    fps.broadcast_parameters(model.state_dict(), root_rank=0)
    parts = list(
        shards(
            len(digits.train_labels),
            epochs=options.epochs,
            batch=options.batch,
            rank=fps.rank(),
            size=fps.size(),
            seed=options.seed,
        )
    )
    waiting_s, moved = 0.0, bytes_moved()
    start = time.perf_counter()
    with Progress(len(parts), bytes_per_step(model)) as progress:
        for step, part in enumerate(parts, 1):
            optimizer.zero_grad()
            outputs = model(digits.train_images[part])
            loss = nn.functional.cross_entropy(outputs, digits.train_labels[part])
            loss.backward()
            begin = time.perf_counter()
            optimizer.synchronize()
            waiting_s += time.perf_counter() - begin
            with optimizer.skip_synchronize():
                optimizer.step()
            progress.show(step, loss, images=step * options.batch * fps.size())
    seconds = time.perf_counter() - start
    images = len(parts) * options.batch * fps.size()
    return Outcome(len(parts), seconds, waiting_s, images, bytes_moved() - moved)


def train_alone(model: nn.Module, digits: Digits, options: argparse.Namespace) -> None:
    """Train in this process alone on the same global batches, without fastps."""
    optimizer = make_sgd(model)
    for part in shards(
        len(digits.train_labels),
        epochs=options.epochs,
        batch=options.batch * fps.size(),
        rank=0,
        size=1,
        seed=options.seed,
    ):
        optimizer.zero_grad()
        outputs = model(digits.train_images[part])
        nn.functional.cross_entropy(outputs, digits.train_labels[part]).backward()
        optimizer.step()


def bytes_per_step(model: nn.Module) -> int:
    """Count the bytes that this worker sends and receives per step: each gradient, both ways."""
    if fps.size() == 1:
        return 0
    return 2 * sum(p.numel() * p.element_size() for p in model.parameters())


def bytes_moved() -> int:
    """Give the bytes this worker has sent and received, headers included, as fastps counts."""
    counts = fastps.statistics()
    return int(counts.get("bytes_sent", 0) + counts.get("bytes_received", 0))


def accuracy_of(model: nn.Module, digits: Digits) -> float:
    """Give the share of test images that the model names rightly."""
    with torch.no_grad():
        named = model(digits.test_images).argmax(dim=1)
    return (named == digits.test_labels).double().mean().item()


def all_hold_equal_weights(model: nn.Module) -> tuple[bool, str]:
    """Compare the hash of all weights with rank 0's on every worker; the same answer on all."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.contiguous().numpy().tobytes())
    of_root = fps.broadcast_object(digest.hexdigest(), root_rank=0, name="proof.digest")
    flags = np.zeros(fps.size(), dtype=np.float32)
    flags[fps.rank()] = digest.hexdigest() == of_root
    flags = fastps.push_pull(flags, "proof.flags", average=False)
    return bool((flags == 1).all()), str(of_root)


def difference(model: nn.Module, other: nn.Module) -> float:
    """Give the largest absolute difference between the weights of two models."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


class Progress:
    """Show rank 0's progress: one line that is redrawn on a terminal, some lines elsewhere."""

    def __init__(self, steps: int, nbytes_per_step: int) -> None:
        """Count to `steps`; nothing is shown by other ranks."""
        self._steps = steps
        self._nbytes = nbytes_per_step
        self._start = self._shown = time.perf_counter()
        is_live = fps.rank() == 0 and Live is not None and sys.stdout.isatty()
        self._live = Live() if is_live else None

    def __enter__(self) -> Progress:
        """Begin to draw."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last state on the screen."""
        if self._live is not None:
            self._live.stop()

    def show(self, step: int, loss: torch.Tensor, *, images: int) -> None:
        """Show one step, or leave it out if the last line is younger than LINE_S."""
        now = time.perf_counter()
        is_due = step in (1, self._steps) or now - self._shown >= LINE_S
        if fps.rank() != 0 or not (is_due or self._live):
            return
        self._shown = now
        passed = now - self._start
        line = (
            f"step {step:4d}/{self._steps}  loss {loss.item():.4f}  "
            f"{images / passed:8.0f} images/s  {self._nbytes * step / passed / 1e6:7.1f} MB/s"
        )
        if self._live is not None:
            self._live.update(Text(line))
        else:
            print(line, flush=True)


def report(
    outcome: Outcome, *, accuracy: float, equal: bool, digest: str, gap: float | None
) -> None:
    """Print the summary."""
    seconds, rate = outcome.seconds, outcome.steps / outcome.seconds
    moved_mbps = outcome.nbytes / seconds / 1e6
    verdict = "bitwise equal" if equal else "DIFFERENT"
    rows = [
        ("workers", f"{fps.size()}"),
        ("test accuracy", f"{100 * accuracy:.2f} %  (at least {100 * ACCURACY_FLOOR:.0f} %)"),
        ("training", f"{outcome.steps} steps in {seconds:.2f} s, {rate:.1f} steps/s"),
        ("images", f"{outcome.images / seconds:.0f} images/s"),
        ("moved per worker", f"{outcome.nbytes / 1e6:.1f} MB, {moved_mbps:.1f} MB/s"),
        ("waiting for others", f"{100 * outcome.waiting_s / seconds:.1f} % of the time"),
        ("weights on all workers", f"{verdict}, sha256 {digest[:16]}"),
    ]
    if gap is not None:
        verdict = "equal" if gap <= TOLERANCE else "DIFFERENT"
        rows.append(("one process alone", f"{verdict}, largest difference {gap:.2e}"))
    print("\n".join(f"{name:>24}  {text}" for name, text in rows), flush=True)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=("mlp", "cnn"), default="cnn")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the data")
    parser.add_argument("--batch", type=int, default=32, help="images per worker and step")
    parser.add_argument("--seed", type=int, default=0, help="of data, weights and batches")
    parser.add_argument(
        "--verify", action="store_true", help="train again in one process and compare the weights"
    )
    return parser.parse_args()


def main() -> int:
    """Train, measure and prove; give the exit code."""
    options = parse()
    torch.set_num_threads(1)  # the network is too small to share
    fps.init()
    digits = load(options.seed)
    torch.manual_seed(options.seed + fps.rank())  # different until the broadcast
    model = make_model(options.model)
    twin = copy.deepcopy(model)
    outcome = train(model, digits, options)
    accuracy = accuracy_of(model, digits)
    equal, digest = all_hold_equal_weights(model)
    gap = None
    if fps.rank() == 0:
        if options.verify:
            train_alone(twin, digits, options)
            gap = difference(model, twin)
        report(outcome, accuracy=accuracy, equal=equal, digest=digest, gap=gap)
    is_right = equal and accuracy >= ACCURACY_FLOOR and (gap is None or gap <= TOLERANCE)
    is_right = bool(fps.broadcast_object(is_right, root_rank=0, name="proof.verdict"))
    fps.shutdown()
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
