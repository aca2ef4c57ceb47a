# SPDX-License-Identifier: Apache-2.0
"""Train with automatic mixed precision: autocast to bfloat16, and a GradScaler as for float16.

fastps-run -np 2 python examples/mixed_precision.py

The scaler sees the averages of all workers, so all workers leave out the same steps. Gradients
travel as float16 (compression=), and are summed in float32.
"""

import torch

import fastps.torch as fps

fps.init()
torch.manual_seed(fps.rank())
model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
optimizer = fps.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=fps.Compression.fp16
)
fps.broadcast_parameters(model.state_dict(), root_rank=0)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for _ in range(50):
    x = torch.randn(32, 10)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        error = model(x) - x.sum(dim=1, keepdim=True)
    loss = error.float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print(f"worker {fps.rank()} of {fps.size()}: loss {loss.item():.4f}")
fps.shutdown()
