# SPDX-License-Identifier: Apache-2.0
"""The shortest program that trains on several workers: the example of the README."""

import torch

import fastps.torch as fps

fps.init()
torch.manual_seed(fps.rank())  # every worker draws data of its own
model = torch.nn.Linear(10, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = fps.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
fps.broadcast_parameters(model.state_dict(), root_rank=0)  # all begin with the same weights
for _ in range(100):
    x = torch.randn(32, 10)
    optimizer.zero_grad()
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    loss.backward()  # gradients travel while the rest of backward() runs
    optimizer.step()  # waits for their average, then steps
print(f"worker {fps.rank()} of {fps.size()}: loss {loss.item():.6f}")
fps.shutdown()
