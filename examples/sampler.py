# SPDX-License-Identifier: Apache-2.0
"""Give each worker its own part of a data set, another part in each epoch.

fastps-run -np 2 python examples/sampler.py
"""

import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import fastps.torch as fps

fps.init()
torch.manual_seed(0)  # the same data set on all workers
x = torch.randn(256, 10)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
sampler = DistributedSampler(data, num_replicas=fps.size(), rank=fps.rank())
loader = DataLoader(data, batch_size=16, sampler=sampler)
model = torch.nn.Linear(10, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = fps.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
fps.broadcast_parameters(model.state_dict(), root_rank=0)
for epoch in range(5):
    sampler.set_epoch(epoch)  # else every epoch has the same order
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = (model(inputs) - labels).square().mean()
        loss.backward()
        optimizer.step()
mean = fps.allreduce(loss.detach(), name="loss")
print(f"worker {fps.rank()} read {len(sampler)} of {len(data)}: mean loss {mean.item():.4f}")
fps.shutdown()
