# SPDX-License-Identifier: Apache-2.0
"""A script for BytePS: the shape of its three PyTorch benchmarks, with their import lines changed.

    fastps-run -np 2 python examples/byteps_benchmark.py
    fastps-run -np 2 python examples/byteps_benchmark.py --ddp
    fastps-run -np 2 python examples/byteps_benchmark.py --cross-barrier

The script builds a small model, so it does not need torchvision.
"""

import argparse
import timeit

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim

# was: import byteps.torch as bps, or import byteps.torch.cross_barrier as bps
import fastps.torch as bps

# was: from byteps.torch.parallel import DistributedDataParallel as DDP
from fastps.torch import DistributedDataParallel as DDP

parser = argparse.ArgumentParser(description="Synthetic benchmark")
parser.add_argument("--fp16-pushpull", action="store_true", default=False)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--num-warmup-batches", type=int, default=2)
parser.add_argument("--num-batches-per-iter", type=int, default=4)
parser.add_argument("--num-iters", type=int, default=3)
parser.add_argument("--ddp", action="store_true", default=False)
parser.add_argument("--cross-barrier", action="store_true", default=False)
args = parser.parse_args()

bps.init()
torch.set_num_threads(1)

model = nn.Sequential(
    nn.Conv2d(3, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Conv2d(32, 64, 3, stride=2), nn.BatchNorm2d(64), nn.ReLU(),
    nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 1000),
)  # fmt: skip
optimizer = optim.SGD(model.parameters(), lr=0.01)
compression = bps.Compression.fp16 if args.fp16_pushpull else bps.Compression.none
num_steps = args.num_warmup_batches + args.num_iters * args.num_batches_per_iter
if args.ddp:
    model = DDP(model, device_ids=None)
elif args.cross_barrier:
    optimizer = bps.CrossBarrier(
        model,
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        num_steps=num_steps,
    )
else:
    optimizer = bps.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
if not args.ddp:
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    bps.broadcast_optimizer_state(optimizer, root_rank=0)

data = torch.rand(args.batch_size, 3, 64, 64)
target = torch.LongTensor(args.batch_size).random_() % 1000


def benchmark_step():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()


def log(s):
    if bps.local_rank() == 0:
        print(s)


log("Running warmup...")
timeit.timeit(benchmark_step, number=args.num_warmup_batches)
log("Running benchmark...")
img_secs = []
for x in range(args.num_iters):
    time = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
    img_sec = args.batch_size * args.num_batches_per_iter / time
    log(f"Iter #{x}: {img_sec:.1f} img/sec per CPU")
    img_secs.append(img_sec)
mean, conf = np.mean(img_secs), 1.96 * np.std(img_secs)
log(f"Img/sec per CPU: {mean:.1f} +-{conf:.1f}")
log(f"Total img/sec on {bps.size()} CPU(s): {bps.size() * mean:.1f} +-{bps.size() * conf:.1f}")
