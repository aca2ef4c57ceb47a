# SPDX-License-Identifier: Apache-2.0
"""A script for Horovod: the steps of its pytorch_imagenet_resnet50.py, one import line changed.

It warms up learning rates with the number of workers, uses several batches for each exchange, and
resumes from its checkpoints: start it again with more epochs. The script generates small images
and a small model, so it downloads nothing.

fastps-run -np 2 python examples/horovod_imagenet.py --epochs 3 --folder out/imagenet
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import fastps.torch as hvd  # was: import horovod.torch as hvd

CLASSES = 10

parser = argparse.ArgumentParser(description="Pictures of ten classes by data parallelism")
parser.add_argument("--folder", type=Path, default=Path("out/imagenet"), help="for checkpoints")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--warmup-epochs", type=float, default=1)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--batches-per-allreduce", type=int, default=1)
parser.add_argument("--base-lr", type=float, default=0.02, help="for one worker and one batch")
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)


class Metric:
    """An average over all batches of all workers."""

    def __init__(self, name):
        self.name, self.total, self.count = name, torch.tensor(0.0), 0

    def update(self, value):
        self.total += hvd.allreduce(value.detach(), name=self.name)
        self.count += 1

    @property
    def average(self):
        return (self.total / self.count).item()


def pictures(count, seed):
    """Make one pattern for each class, and noise over it."""
    patterns = torch.randn(CLASSES, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    return TensorDataset(
        patterns[labels] + torch.randn(count, 3, 16, 16, generator=generator), labels
    )


def loader_of(dataset, batch_size):
    """Give each worker its share of the data, in batches."""
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler)


def residual_net():
    """Make a small network with batch normalisation and a shortcut."""

    class Shortcut(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.inner = nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
            )

        def forward(self, x):
            return x + self.inner(x)

    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), Shortcut(16),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, CLASSES),
    )  # fmt: skip


def learning_rate(progress):
    """Grow from the rate of one worker to that of all of them; progress: epochs, fractions too."""
    share = min(progress / args.warmup_epochs, 1) if args.warmup_epochs else 1
    workers = 1 if args.use_adasum else 1 + share * (hvd.size() - 1)
    return args.base_lr * args.batches_per_allreduce * workers


def correct(output, target):
    return (output.argmax(1) == target).float().mean()


def train(epoch):
    """Take a step for each large batch, whose parts go through the model one by one."""
    model.train()
    train_loader.sampler.set_epoch(epoch)
    loss_metric = Metric("train_loss")
    for number, (data, target) in enumerate(train_loader):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(epoch + (number + 1) / len(train_loader))
        optimizer.zero_grad()
        parts = math.ceil(len(data) / args.batch_size)
        for some, labels in zip(
            data.split(args.batch_size), target.split(args.batch_size), strict=True
        ):
            loss = F.cross_entropy(model(some), labels)
            loss_metric.update(loss)
            (loss / parts).backward()
        optimizer.step()
    return loss_metric.average


@torch.no_grad()
def validate():
    model.eval()
    accuracy = Metric("val_accuracy")
    for data, target in val_loader:
        accuracy.update(correct(model(data), target))
    return accuracy.average


def checkpoint_of(epoch):
    return args.folder / f"checkpoint-{epoch}.pt"


def last_checkpoint():
    """Find on worker 0 how many epochs are done, and tell all: others may see another folder."""
    done = max((e for e in range(1, args.epochs + 1) if checkpoint_of(e).exists()), default=0)
    return hvd.broadcast(torch.tensor(done), root_rank=0, name="resume_from_epoch").item()


def save(epoch):
    if hvd.rank() == 0:
        args.folder.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, checkpoint_of(epoch))


if __name__ == "__main__":
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    done = last_checkpoint()

    train_loader = loader_of(pictures(640, 1), args.batch_size * args.batches_per_allreduce)
    val_loader = loader_of(pictures(320, 2), 40)
    model = residual_net()
    optimizer = optim.SGD(model.parameters(), lr=args.base_lr, momentum=0.9, weight_decay=5e-5)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=args.batches_per_allreduce,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    if done and hvd.rank() == 0:
        state = torch.load(checkpoint_of(done))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(done, args.epochs):
        loss, accuracy = train(epoch), validate()
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.3f}, accuracy {accuracy:.1%}", flush=True)
        save(epoch + 1)
