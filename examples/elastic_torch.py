# SPDX-License-Identifier: Apache-2.0
"""Training that goes on when workers die: kill one, by the pid that it prints, and watch.

fastps-run -n 3 --min 1 python examples/elastic_torch.py
"""

import os
import time

import torch

import fastps.torch as fps
from fastps import View


def told(view: View) -> None:
    """Print who is lost, and who goes on; called with each new view."""
    print(f"now worker {view.rank} of {view.size}: {view}", flush=True)


fps.init(elastic=fps.Elastic(min=1, on_view=told))
print(f"worker {fps.rank()} of {fps.size()} has pid {os.getpid()}", flush=True)
torch.manual_seed(fps.rank())  # each worker has data of its own
model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = fps.DistributedOptimizer(
    torch.optim.Adam(model.parameters(), lr=0.02), model.named_parameters()
)
fps.broadcast_parameters(model.state_dict(), root_rank=0)
for step in range(300):
    x = 2 * torch.rand(64, 2) - 1
    loss = (model(x) - x.prod(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # of all workers that are left: a loss costs no step
    if step % 50 == 49:
        print(f"step {step + 1}: worker {fps.rank()} has loss {loss.item():.4f}", flush=True)
    time.sleep(0.01)  # time for you to kill a worker
weights = torch.cat([one.detach().reshape(-1) for one in model.parameters()])
print(f"worker {fps.rank()} of {fps.size()} ends with weights of sum {weights.sum():.9f}")
fps.shutdown()
