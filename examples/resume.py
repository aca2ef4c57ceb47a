# SPDX-License-Identifier: Apache-2.0
"""Resume from a checkpoint: rank 0 writes and reads it, and broadcasts it to the others.

fastps-run -np 2 python examples/resume.py /tmp/model.pt

Each run trains ten more epochs. With fastps-run --restarts 3 a job that lost a process starts
again from the last checkpoint.
"""

import os
import sys

import torch

import fastps.torch as fps

if len(sys.argv) != 2:
    sys.exit("usage: resume.py FILE")
path = sys.argv[1]
fps.init()
torch.manual_seed(0)
model = torch.nn.Linear(10, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
first = 0
if fps.rank() == 0 and os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["epoch"] + 1
first = fps.broadcast_object(first, root_rank=0)
fps.broadcast_parameters(model.state_dict(), root_rank=0)
fps.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = fps.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for epoch in range(first, first + 10):
    torch.manual_seed(1000 * epoch + fps.rank())
    x = torch.randn(32, 10)
    optimizer.zero_grad()
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    if fps.rank() == 0:  # under another name first, so that a crash leaves the old file whole
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, f"{path}.new")
        os.replace(f"{path}.new", path)
print(f"worker {fps.rank()}: epochs {first} to {epoch}, loss {loss.item():.4f}")
fps.shutdown()
