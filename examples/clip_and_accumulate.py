# SPDX-License-Identifier: Apache-2.0
"""Accumulate the gradients of four passes into one step, and clip their average before it.

fastps-run -np 2 python examples/clip_and_accumulate.py
"""

import torch

import fastps.torch as fps

PASSES = 4

fps.init()
torch.manual_seed(fps.rank())
model = torch.nn.Linear(10, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = fps.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    backward_passes_per_step=PASSES,  # gradients travel in the last of them
)
fps.broadcast_parameters(model.state_dict(), root_rank=0)
for _ in range(40):
    optimizer.zero_grad()
    for _ in range(PASSES):
        x = torch.randn(8, 10)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        (loss / PASSES).backward()
    optimizer.synchronize()  # now p.grad is the average of all workers
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=5.0)
    with optimizer.skip_synchronize():  # it has been waited for
        optimizer.step()
print(f"worker {fps.rank()} of {fps.size()}: loss {loss.item():.4f}")
fps.shutdown()
