# SPDX-License-Identifier: Apache-2.0
"""Use your own codec with PyTorch, so that less data travels than the gradient has.

    fastps-run -np 2 python examples/own_codec.py

Any object with compress() and decompress() can be passed as compression=. This one rounds each
element to eight bits of a scale that all workers share, and sends int16, half of float32. int16
has room for the sum of up to 258 workers.
"""

import torch
from torch import nn

import fastps.torch as fps


class EightBits:
    """Send int16 sums of int8 values; scale: the largest gradient that can be sent."""

    def __init__(self, scale):
        self.scale = scale

    def compress(self, tensor):
        """Return the tensor to send, and what decompress() needs."""
        small = (tensor / self.scale * 127).round().clamp(-127, 127)
        return small.to(torch.int16), tensor.dtype

    def decompress(self, tensor, dtype):
        """Return the tensor in its first form."""
        return tensor.to(dtype) * (self.scale / 127)


def main():
    fps.init()
    torch.manual_seed(0)
    model = nn.Linear(10, 1)
    goal = torch.arange(10.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    optimizer = fps.DistributedOptimizer(
        optimizer, model.named_parameters(), op=fps.Sum, compression=EightBits(64.0)
    )
    torch.manual_seed(fps.rank())
    for _ in range(300):
        x = torch.randn(32, 10)
        loss = (model(x).squeeze(1) - x @ goal).square().mean() / fps.size()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    error = (model.weight[0] - goal).abs().max()
    if fps.rank() == 0:
        print(f"largest error of a weight {error:.3f}")
    assert error < 0.2
    fps.shutdown()


if __name__ == "__main__":
    main()
