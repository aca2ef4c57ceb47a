# SPDX-License-Identifier: Apache-2.0
"""Train with three Byzantine workers and one honest one; a validator tells them apart.

fastps-run -np 4 -s 1 -v 1 python examples/validated_torch.py
"""

from __future__ import annotations

import numpy as np
import torch

import fastps.torch as fps
from fastps import byzantine

ROUNDS, STEPS = 10, 8


class Liar(fps.ValidatedOptimizer):
    """Pushes six times the opposite of what its steps have changed."""

    def told(self, change: np.ndarray, place: int) -> np.ndarray:
        """Give what is pushed in the place of a change."""
        return np.asarray(-6 * change)


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer | Liar) -> None:
    """Train with data of this process's own."""
    for _ in range(STEPS):
        x = torch.randn(32, 10)
        optimizer.zero_grad()
        (model(x) - x.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()


def main() -> None:
    """Be a worker or the validator."""
    fps.init()
    torch.manual_seed(fps.rank())
    model = torch.nn.Linear(10, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    if fps.role() == "validator":
        judge = fps.Validator(model, byzantine.Zeno(), lambda: steps(model, inner), by_block=False)
        for _ in range(ROUNDS):
            judge.round()
        judge.close()
        x = torch.randn(1000, 10)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean().item()
        shares = judge.statistics()
        print(f"loss {loss:.4f}, accepted", *(
            f"{shares[f'accepted_share_of_worker_{worker}']:.0%}" for worker in range(fps.size())
        ))  # fmt: skip
    else:  # worker 0 is honest
        kind = fps.ValidatedOptimizer if fps.rank() == 0 else Liar
        optimizer = kind(model, inner, sync_every=STEPS, participation=0.9, sparsity=0.2)
        for _ in range(ROUNDS):
            steps(model, optimizer)
    fps.shutdown()


if __name__ == "__main__":
    main()
