# SPDX-License-Identifier: Apache-2.0
"""Recommend items to users: large tables of embeddings, of which few rows travel.

    fastps-run -np 2 python examples/recommend.py

Ratings are generated from hidden tastes. A batch has gradients for some hundred rows of the
tables; nn.Embedding(sparse=True) lets workers exchange those rows instead of whole tables.
"""

import argparse

import torch
from torch import nn

import fastps.torch as fps

HIDDEN = 4


class Factors(nn.Module):
    """Rate an item for a user by the product of their embeddings."""

    def __init__(self, users: int, items: int, width: int) -> None:
        """Make one table of users, and one of items."""
        super().__init__()
        self.user = nn.Embedding(users, width, sparse=True)
        self.item = nn.Embedding(items, width, sparse=True)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        """Return the ratings of pairs."""
        return (self.user(user) * self.item(item)).sum(1)


def main() -> None:
    """Train, and print the error on pairs that were not trained, and what travelled."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--users", type=int, default=20_000)
    parser.add_argument("--items", type=int, default=5_000)
    parser.add_argument("--active", type=int, default=200, help="users and items with ratings")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=256, help="ratings of each worker in a step")
    options = parser.parse_args()
    fps.init()
    torch.manual_seed(7)  # the same tastes on all workers
    tastes = torch.randn(options.active, HIDDEN), torch.randn(options.active, HIDDEN)
    model = Factors(options.users, options.items, options.width)
    optimizer = fps.DistributedOptimizer(
        torch.optim.SparseAdam(list(model.parameters()), lr=0.05),
        named_parameters=model.named_parameters(),
    )
    fps.broadcast_parameters(model.state_dict(), root_rank=0)
    torch.manual_seed(fps.rank())  # other ratings on each worker

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        user, item = torch.randint(options.active, (2, count))
        return user, item, (tastes[0][user] * tastes[1][item]).sum(1)

    rows = 0
    for step in range(options.steps):
        user, item, rating = draw(options.batch)
        loss = nn.functional.mse_loss(model(user, item), rating)
        optimizer.zero_grad()
        loss.backward()
        rows += len(user.unique()) + len(item.unique())
        optimizer.step()
        if fps.rank() == 0 and step % 50 == 0:
            print(f"step {step}: error {loss.item():.2f}", flush=True)
    user, item, rating = draw(10_000)
    error = nn.functional.mse_loss(model(user, item), rating).detach()
    error = fps.allreduce(error, name="error")
    whole = options.steps * (options.users + options.items)
    print(
        f"worker {fps.rank()} of {fps.size()}: loss {error.item():.4f} (zero would have "
        f"{rating.square().mean().item():.1f}); sent {rows / whole:.1%} of the rows"
    )
    fps.shutdown()


if __name__ == "__main__":
    main()
