# SPDX-License-Identifier: Apache-2.0
"""Save while training goes on, and continue with another number of workers.

fastps-run -np 2 python examples/checkpoint.py /tmp/digits

Each run trains a hundred more steps. All workers write their share of each checkpoint.
"""

import sys

import torch

import fastps.torch as fps

if len(sys.argv) != 2:
    sys.exit("usage: checkpoint.py FOLDER")
folder = sys.argv[1]
fps.init()
torch.manual_seed(0)
model = torch.nn.Linear(10, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
first = 0
if restored := fps.checkpoint.restore(folder):  # on all workers, whose states are the same then
    model.load_state_dict(restored.state["model"])
    optimizer.load_state_dict(restored.state["optimizer"])
    first = restored.step + 1
optimizer = fps.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for step in range(first, first + 100):
    torch.manual_seed(1000 * step + fps.rank())
    x = torch.randn(32, 10)
    optimizer.zero_grad()
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    if step % 50 == 49:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        saved = fps.checkpoint.save_async(state, folder, step=step, keep=2)
saved.wait()  # raises what went wrong; the next save and shutdown() would only log it
print(f"worker {fps.rank()}: steps {first} to {step}, loss {loss.item():.4f}")
fps.shutdown()
