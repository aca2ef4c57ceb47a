# SPDX-License-Identifier: Apache-2.0
"""One process of a training that is measured: takes commands from a benchmark, steps, answers.

Started by train_torch.py with the system's name; connects to the driver at BENCH_DRIVER and obeys
one JSON line after the other, until the connection ends. Every system trains the same models on
the same batches; they differ in who averages the gradients, if anybody does.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

BATCH = 16
LEARNING_RATE = 1e-3


class Many(nn.Module):
    """200 layers of 32 x 32, added to what goes past them so that gradients stay normal."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(200)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers one after the other."""
        for layer in self.layers:
            x = x + 0.05 * layer(x)
        return x


def make_mlp() -> nn.Module:
    """Make a perceptron of 0.27 million parameters in 6 tensors."""
    return nn.Sequential(
        nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def make_wide() -> nn.Module:
    """Make a perceptron of 25.2 million parameters, nearly all in 6 tensors."""
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(2048, 2048), nn.ReLU()]
    return nn.Sequential(*layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "mlp": (make_mlp, 784),
    "wide": (make_wide, 2048),
    "many": (Many, 32),
}


class System(Protocol):
    """Who averages the gradients."""

    rank: int

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, name: str
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Give the model and the optimizer that a training uses."""


class Local:
    """Nobody: the step itself."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, name: str
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Leave both as they are."""
        return model, optimizer


class Gloo:
    """torch's DistributedDataParallel over gloo on the loopback."""

    backend = "gloo"

    def __init__(self) -> None:
        import torch.distributed as dist  # noqa: PLC0415

        import fastps.torch  # noqa: F401, PLC0415  (its backend)

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(self.backend)
        self.rank = dist.get_rank()

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, name: str
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Wrap the model; gradients are views of buckets, its quickest way."""
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer


class Backend(Gloo):
    """The same over torch's backend "fastps"."""

    backend = "fastps"


class Sharded(Gloo):
    """torch's FSDP2 over gloo: every layer shards its parameters."""

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, name: str
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Shard the model; the optimizer is made anew for its shards."""
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
        from torch.distributed.fsdp import FSDPModule, fully_shard  # noqa: PLC0415

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in [each for each in model.modules() if isinstance(each, nn.Linear)]:
            fully_shard(layer, mesh=mesh)
        sharded = fully_shard(model, mesh=mesh)
        for each in [each for each in sharded.modules() if isinstance(each, FSDPModule)]:
            each.set_allocate_memory_from_process_group_for_comm(True)  # if the backend has any
        return model, type(optimizer)(model.parameters(), **optimizer.defaults)


class BackendSharded(Sharded):
    """The same over torch's backend "fastps"."""

    backend = "fastps"


class UnsentSharded(Sharded):
    """FSDP2 alone, over torch's backend that sends nothing; its weights mean nothing."""

    def __init__(self) -> None:
        import torch.distributed as dist  # noqa: PLC0415
        from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

        torch.set_flush_denormal(True)  # of memory that nobody wrote
        self.rank = int(os.environ["RANK"])
        size = int(os.environ["WORLD_SIZE"])
        dist.init_process_group("fake", store=FakeStore(), rank=self.rank, world_size=size)


class Parallel:
    """fastps.torch.DistributedDataParallel."""

    def __init__(self) -> None:
        import fastps.torch as fps  # noqa: PLC0415

        self.face = fps
        fps.init()
        self.rank = fps.rank()

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, name: str
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Wrap the model."""
        return self.face.DistributedDataParallel(model), optimizer


class Optimizer(Parallel):
    """fastps.torch.DistributedOptimizer."""

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, name: str
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Wrap the optimizer."""
        named = model.named_parameters()
        prefix = f"{name}."
        return model, self.face.DistributedOptimizer(optimizer, named, prefix=prefix)


SYSTEMS: dict[str, Callable[[], System]] = {
    "local": Local,
    "gloo": Gloo,
    "backend": Backend,
    "fsdp-none": UnsentSharded,
    "fsdp-gloo": Sharded,
    "fsdp-backend": BackendSharded,
    "ddp": Parallel,
    "optimizer": Optimizer,
}


class Training:
    """One model in training; every rank has its own batch, the same in each step."""

    def __init__(self, system: System, name: str) -> None:
        make, width = MODELS[name]
        torch.manual_seed(0)
        self.module = make()
        optimizer = torch.optim.SGD(self.module.parameters(), lr=LEARNING_RATE)
        self.model, self.optimizer = system.wrap(self.module, optimizer, name)
        generator = torch.Generator().manual_seed(1 + system.rank)
        self.inputs = torch.randn(BATCH, width, generator=generator)

    def step(self) -> None:
        """Do what every training does."""
        self.optimizer.zero_grad()
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()

    def time(self, steps: int) -> list[float]:
        """Give the seconds of each step."""
        seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - began)
        return seconds

    def describe(self) -> dict[str, Any]:
        """Give a digest of the weights, their length, and how many there are."""
        hashes, square, count = hashlib.sha256(), 0.0, 0
        for parameter in self.module.parameters():
            shards = parameter.detach()
            whole = shards.full_tensor() if hasattr(shards, "full_tensor") else shards
            hashes.update(whole.numpy().tobytes())
            square += float(whole.double().square().sum())
            count += whole.numel()
        return {"digest": hashes.hexdigest(), "length": square**0.5, "parameters": count}


def obey(
    system: System, trainings: dict[str, Training], command: dict[str, Any]
) -> dict[str, Any]:
    """Do what the driver asks for."""
    name = command["model"]
    if command["op"] == "forget":
        return {"known": trainings.pop(name, None) is not None}
    if name not in trainings:
        trainings[name] = Training(system, name)
    if command["op"] == "describe":
        return trainings[name].describe()
    return {"seconds": trainings[name].time(command["steps"])}


def main() -> int:
    """Obey the driver until it hangs up."""
    torch.set_num_threads(1)
    system = SYSTEMS[sys.argv[1]]()
    host, _, port = os.environ["BENCH_DRIVER"].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        sock.settimeout(None)
        file = sock.makefile("rw", encoding="utf-8")
        _say(file, {"rank": system.rank})
        trainings: dict[str, Training] = {}
        for line in file:
            _say(file, obey(system, trainings, json.loads(line)))
    return 0


def _say(file: Any, message: dict[str, Any]) -> None:
    file.write(json.dumps(message) + "\n")
    file.flush()


if __name__ == "__main__":
    sys.exit(main())
