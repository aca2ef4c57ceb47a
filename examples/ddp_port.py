# SPDX-License-Identifier: Apache-2.0
"""A script of torch's DistributedDataParallel; comments mark the two new lines.

fastps-run -np 2 python examples/ddp_port.py
"""

import torch
import torch.distributed as dist

import fastps.torch as fps

fps.init()  # new, only so that it runs alone, too
dist.init_process_group("fastps")  # new: was "gloo"
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(50):
    x = torch.randn(32, 10)
    optimizer.zero_grad()
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: loss {loss.item():.4f}")
dist.destroy_process_group()
fps.shutdown()
