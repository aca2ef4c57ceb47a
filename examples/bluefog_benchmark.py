# SPDX-License-Identifier: Apache-2.0
"""A script for BlueFog: the shape of its pytorch_benchmark.py and pytorch_resnet.py.

One import line is changed. Images are random, and the residual network is small. The script
measures throughput; --train-steps shows that the network learns its images by heart.

fastps-run -np 4 -s 0 python examples/bluefog_benchmark.py --model lenet --atc-style
"""

import argparse
import timeit
import warnings

import torch
import torch.nn.functional as F
from torch import nn, optim

import fastps.bluefog.torch as bf  # was: import bluefog.torch as bf

parser = argparse.ArgumentParser(description="Synthetic benchmark")
parser.add_argument("--model", default="resnet", choices=["resnet", "lenet"])
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--batches-per-allreduce", type=int, default=1)
parser.add_argument("--num-warmup-batches", type=int, default=2)
parser.add_argument("--num-batches-per-iter", type=int, default=3)
parser.add_argument("--num-iters", type=int, default=2)
parser.add_argument("--train-steps", type=int, default=15)
parser.add_argument("--atc-style", action="store_true")
parser.add_argument(
    "--dist-optimizer", default="neighbor_allreduce",
    choices=["neighbor_allreduce", "allreduce", "gradient_allreduce", "win_put", "local"],
)  # fmt: skip
parser.add_argument("--disable-dynamic-topology", action="store_true")


class Block(nn.Module):
    def __init__(self, width_in, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.short = nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x):
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.short(x))


def make_model(name):
    if name == "lenet":
        return nn.Sequential(
            nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 5 * 5, 120), nn.ReLU(),
            nn.Linear(120, 10),
        )  # fmt: skip
    return nn.Sequential(
        Block(3, 8, 2), Block(8, 16, 2), Block(16, 32, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 10),
    )  # fmt: skip


def wrap(optimizer):
    style = (bf.DistributedAdaptThenCombineOptimizer if args.atc_style
             else bf.DistributedAdaptWithCombineOptimizer)  # fmt: skip
    if args.dist_optimizer == "win_put":
        return bf.DistributedWinPutOptimizer(optimizer, model=model)
    if args.dist_optimizer == "gradient_allreduce":
        return bf.DistributedGradientAllreduceOptimizer(optimizer, model=model)
    if args.dist_optimizer == "local":
        return style(optimizer, model=model, communication_type=bf.CommunicationType.empty)
    kind = bf.CommunicationType[args.dist_optimizer]
    return style(optimizer, model=model, communication_type=kind)


def dynamic_topology_update(batch_idx):
    if args.dist_optimizer == "win_put":
        neighbors = bf.out_neighbor_ranks()
        optimizer.dst_weights = {neighbors[batch_idx % len(neighbors)]: 1.0}
    elif args.dist_optimizer == "neighbor_allreduce":
        to_ranks, from_ranks = next(turns)
        share = 1 / (len(from_ranks) + 1)
        optimizer.dst_weights, optimizer.self_weight = to_ranks, share
        optimizer.src_weights = dict.fromkeys(from_ranks, share)
        optimizer.enable_topo_check = False


def benchmark_step():
    """Step with gradients of so many batches, as BlueFog lets programs do."""
    global batch_idx
    if not args.disable_dynamic_topology:
        dynamic_topology_update(batch_idx)
    batch_idx += 1
    optimizer.zero_grad()
    for first in range(0, len(data), args.batch_size):
        some = slice(first, first + args.batch_size)
        loss = F.cross_entropy(model(data[some]), target[some]) / args.batches_per_allreduce
        loss.backward()
    optimizer.step()


def mean_loss():
    with torch.no_grad():
        loss = F.cross_entropy(model(data), target)
    return bf.allreduce(loss, name="loss").item()


args = parser.parse_args()
warnings.simplefilter("ignore")
bf.init()
torch.set_num_threads(1)
torch.manual_seed(1)
model = make_model(args.model)
n_images = args.batch_size * args.batches_per_allreduce
data = torch.rand(n_images, 3, 32, 32)  # the same images on all workers
target = torch.randint(0, 10, (n_images,))
optimizer = wrap(optim.SGD(model.parameters(), lr=0.1))
bf.broadcast_parameters(model.state_dict(), root_rank=0)
bf.broadcast_optimizer_state(optimizer, root_rank=0)
turns = bf.topology_util.GetDynamicOnePeerSendRecvRanks(bf.load_topology(), bf.rank())
batch_idx = 0
before = mean_loss()
timeit.timeit(benchmark_step, number=args.num_warmup_batches)
speeds = []
for _ in range(args.num_iters):
    seconds = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
    speeds.append(n_images * args.num_batches_per_iter / seconds)
for _ in range(args.train_steps):
    benchmark_step()
after = mean_loss()
total = bf.allreduce(torch.tensor(speeds), average=False)
if bf.rank() == 0:
    print(f"loss {before:.3f} at first, {after:.3f} at last")
    print(f"Total img/sec on {bf.size()} CPU(s): {total.mean():.1f} +-{1.96 * total.std():.1f}",
          flush=True)  # fmt: skip
assert after < before - 0.1, (before, after)
bf.barrier()
bf.shutdown()
