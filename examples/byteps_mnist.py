# SPDX-License-Identifier: Apache-2.0
"""A script for BytePS: the shape of its train_mnist_byteps.py, one import line changed.

The script generates the digits, so it downloads nothing.

fastps-run -np 2 python examples/byteps_mnist.py --epochs 2 --no-cuda
"""

import argparse

import torch
import torch.nn.functional as F
import torch.utils.data.distributed
from torch import nn, optim

import fastps.torch as bps  # was: import byteps.torch as bps

parser = argparse.ArgumentParser(description="MNIST by data parallelism")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--test-batch-size", type=int, default=200)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--momentum", type=float, default=0.5)
parser.add_argument("--no-cuda", action="store_true")
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--log-interval", type=int, default=10)
parser.add_argument("--fp16-pushpull", action="store_true")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.view(-1, 320)))
        return F.log_softmax(self.fc2(x), dim=1)


def digits(count, seed):
    """Make pictures in the place of datasets.MNIST: ten patterns, and noise."""
    patterns = torch.randn(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    noise = torch.randn(count, 1, 28, 28, generator=generator)
    return torch.utils.data.TensorDataset(patterns[labels] + noise, labels)


def loader_of(dataset, batch_size):
    sampler = torch.utils.data.distributed.DistributedSampler(
        dataset, num_replicas=bps.size(), rank=bps.rank()
    )
    return torch.utils.data.DataLoader(dataset, batch_size=batch_size, sampler=sampler)


def train(epoch):
    model.train()
    train_loader.sampler.set_epoch(epoch)
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            seen = batch_idx * len(data)
            total = len(train_loader.sampler)
            print(f"Train Epoch: {epoch} [{seen}/{total}]\tLoss: {loss.item():.6f}")


def metric_average(val, name):
    avg_tensor = bps.push_pull(torch.tensor(val), name=name)
    return avg_tensor.item()


def test():
    model.eval()
    right = 0.0
    with torch.no_grad():
        for data, target in test_loader:
            right += (model(data).argmax(1) == target).float().sum().item()
    accuracy = metric_average(right / len(test_loader.sampler), "avg_accuracy")
    if bps.rank() == 0:
        print(f"\nTest set: Accuracy: {100 * accuracy:.2f}%\n")


if __name__ == "__main__":
    args = parser.parse_args()
    bps.init()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    train_loader = loader_of(digits(1600, 1), args.batch_size)
    test_loader = loader_of(digits(400, 2), args.test_batch_size)
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=args.lr * bps.size(), momentum=args.momentum)
    compression = bps.Compression.fp16 if args.fp16_pushpull else bps.Compression.none
    optimizer = bps.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    bps.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(1, args.epochs + 1):
        train(epoch)
        test()
