# SPDX-License-Identifier: Apache-2.0
"""A script for BlueFog: the shape of its pytorch_mnist.py, two import lines changed.

The digits are scikit-learn's, of 8 by 8 pixels, so the script downloads nothing.

fastps-run -np 4 -s 0 python examples/bluefog_mnist.py --dist-optimizer neighbor_allreduce
"""

import argparse

import torch
import torch.nn.functional as F
import torch.utils.data.distributed
from sklearn.datasets import load_digits
from torch import nn, optim

import fastps.bluefog.torch as bf  # was: import bluefog.torch as bf
from fastps.bluefog.common import topology_util  # was: from bluefog.common import topology_util

parser = argparse.ArgumentParser(description="Digits by decentralized training")
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--atc-style", action="store_true")
parser.add_argument(
    "--dist-optimizer", default="neighbor_allreduce",
    choices=["neighbor_allreduce", "hierarchical_neighbor_allreduce", "allreduce",
             "gradient_allreduce", "win_put", "empty"],
)  # fmt: skip
parser.add_argument("--disable-dynamic-topology", action="store_true")
parser.add_argument(
    "--average-every", type=int, default=20, help="iterations for a global average, or a barrier"
)
parser.add_argument("--threshold", type=float, default=85.0, help="least accuracy in per cent")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(256, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def wrap(optimizer):
    style = (bf.DistributedAdaptThenCombineOptimizer if args.atc_style
             else bf.DistributedAdaptWithCombineOptimizer)  # fmt: skip
    if args.dist_optimizer == "win_put":
        return bf.DistributedWinPutOptimizer(optimizer, model=model)
    if args.dist_optimizer == "gradient_allreduce":
        return bf.DistributedGradientAllreduceOptimizer(optimizer, model=model)
    kind = bf.CommunicationType[args.dist_optimizer]
    return style(optimizer, model=model, communication_type=kind)


def rounds():
    """Give whom to send to and receive from, iteration by iteration."""
    if args.dist_optimizer == "hierarchical_neighbor_allreduce":
        return topology_util.GetExp2DynamicSendRecvMachineRanks(
            world_size=bf.size(), local_size=bf.local_size(), self_rank=bf.rank(),
            local_rank=bf.local_rank(),
        )  # fmt: skip
    if bf.is_homogeneous() and bf.size() > bf.local_size() > 2:
        return topology_util.GetInnerOuterExpo2DynamicSendRecvRanks(
            bf.size(), local_size=bf.local_size(), self_rank=bf.rank()
        )
    return topology_util.GetDynamicOnePeerSendRecvRanks(bf.load_topology(), bf.rank())


def dynamic_topology_update(epoch, batch_idx):
    if args.dist_optimizer == "win_put":
        if epoch > 1:
            neighbors = bf.out_neighbor_ranks()
            optimizer.dst_weights = {neighbors[batch_idx % len(neighbors)]: 1.0}
        return
    if "neighbor" not in args.dist_optimizer:
        return
    to_ranks, from_ranks = next(turns)
    share = 1 / (len(from_ranks) + 1)
    machine = "machine_" if args.dist_optimizer.startswith("hierarchical") else ""
    setattr(optimizer, f"dst_{machine}weights", to_ranks)
    setattr(optimizer, f"src_{machine}weights", dict.fromkeys(from_ranks, share))
    optimizer.self_weight = share
    optimizer.enable_topo_check = False
    if not machine:
        is_global = batch_idx % args.average_every == args.average_every - 1
        optimizer.communication_type = (
            bf.CommunicationType.allreduce if is_global
            else bf.CommunicationType.neighbor_allreduce
        )  # fmt: skip


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    for batch_idx, (data, target) in enumerate(train_loader):
        if not args.disable_dynamic_topology:
            dynamic_topology_update(epoch, batch_idx)
        if args.dist_optimizer == "win_put":  # else a fast worker would soon train alone
            optimizer.force_barrier = batch_idx % args.average_every == 0
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()


def metric_average(value, name):
    return bf.allreduce(torch.tensor(value), name=name).item()


def test():
    model.eval()
    with torch.no_grad():
        right = (model(test_images).argmax(dim=1) == test_labels).float().mean().item()
    return 100 * metric_average(right, "avg_accuracy")


args = parser.parse_args()
bf.init()
torch.manual_seed(args.seed)
torch.set_num_threads(1)
digits = load_digits()
order = torch.randperm(len(digits.target))
images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
labels = torch.tensor(digits.target)[order]
test_images, test_labels = images[:360], labels[:360]
train_dataset = torch.utils.data.TensorDataset(images[360:], labels[360:])
train_sampler = torch.utils.data.distributed.DistributedSampler(
    train_dataset, num_replicas=bf.size(), rank=bf.rank()
)
train_loader = torch.utils.data.DataLoader(
    train_dataset, batch_size=args.batch_size, sampler=train_sampler
)
model = Net()
bf.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
bf.broadcast_optimizer_state(optimizer, root_rank=0)
if args.dist_optimizer.startswith("hierarchical"):
    bf.set_machine_topology(topology_util.ExponentialGraph(bf.machine_size()))
optimizer = wrap(optimizer)
turns = rounds()
for epoch in range(args.epochs):
    train(epoch)
accuracy = test()
if bf.rank() == 0:
    print(f"accuracy of all models: {accuracy:.2f} %", flush=True)
assert accuracy > args.threshold
bf.barrier()
bf.shutdown()
