# SPDX-License-Identifier: Apache-2.0
"""A script for Elastic Horovod: training continues after a worker was lost.

fastps-run -np 2 --restarts 3 python examples/horovod_elastic.py --lose-worker-at 7
fastps-run -np 3 --min 1 python examples/horovod_elastic.py --lose-worker-at 7

The script generates its data. With --restarts the whole job is started again and repeats the steps
since the last commit, so the weights are those of a run without a loss. With --min the survivors
go on in their processes: no step is lost, and they share the data that is left.
"""

import argparse
import os
import signal

import torch
import torch.nn.functional as F
from torch import nn

import fastps.torch as hvd  # was: import horovod.torch as hvd

parser = argparse.ArgumentParser(description="Training that survives the loss of a worker")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--batches-per-commit", type=int, default=3)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument(
    "--lose-worker-at",
    type=int,
    default=-1,
    help="kill the last worker at this batch of the second epoch",
)
args = parser.parse_args()


def lose_a_worker(state):
    """Kill the last worker, once."""
    is_time = state.epoch == 2 and state.batch == args.lose_worker_at
    if is_time and not state.lives and is_last:
        os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, args.epochs + 1):  # noqa: B020  (as Horovod has it)
        before = state.batch
        for batch_idx, (data, target) in enumerate(train_loader):
            state.batch = before + batch_idx
            lose_a_worker(state)
            state.optimizer.zero_grad()
            loss = F.cross_entropy(state.model(data), target)
            loss.backward()
            state.optimizer.step()
            state.train_sampler.record_batch(batch_idx, args.batch_size)
            state.loss = loss.item()
            if (state.batch + 1) % args.batches_per_commit == 0:
                state.batch += 1
                state.commit()
        state.batch = 0
        state.train_sampler.set_epoch(state.epoch + 1)
        if hvd.rank() == 0:
            print(f"epoch {state.epoch}: loss {state.loss:.4f}, lives before: {state.lives}")


def on_state_reset():
    state.lives += 1


hvd.init()
is_last = hvd.rank() == hvd.size() - 1
torch.manual_seed(42)
generator = torch.Generator().manual_seed(0)
patterns = torch.randn(10, 64, generator=generator)
labels = torch.randint(0, 10, (640,), generator=generator)
pictures = patterns[labels] + torch.randn(640, 64, generator=generator)
train_dataset = torch.utils.data.TensorDataset(pictures, labels)
train_sampler = hvd.elastic.ElasticSampler(train_dataset)
train_loader = torch.utils.data.DataLoader(
    train_dataset, batch_size=args.batch_size, sampler=train_sampler
)
model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(
    model, optimizer, train_sampler=train_sampler, epoch=1, batch=0, loss=0.0, lives=0
)
state.register_reset_callbacks([on_state_reset])
train(state)
total = sum(parameter.double().sum() for parameter in model.parameters()).item()
if hvd.rank() == 0:
    print(f"weights: {total!r}")
hvd.shutdown()
