# SPDX-License-Identifier: Apache-2.0
"""Train with DistributedDataParallel: gradients are averages when backward() returns.

python examples/parallel_torch.py
fastps-run -np 2 -s 1 python examples/parallel_torch.py
"""

import torch

import fastps.torch as fps

fps.init()
torch.manual_seed(fps.rank())  # every worker draws data of its own
model = torch.nn.Sequential(
    torch.nn.Linear(10, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
)
model = fps.DistributedDataParallel(model)  # all begin with the weights of worker 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(100):
    optimizer.zero_grad()
    with model.no_sync():  # two batches per step, one exchange
        x = torch.randn(16, 10)
        (model(x) - x.sum(dim=1, keepdim=True)).square().mean().backward()
    x = torch.randn(16, 10)
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
print(f"worker {fps.rank()} of {fps.size()}: loss {loss.item():.6f}")
fps.shutdown()
