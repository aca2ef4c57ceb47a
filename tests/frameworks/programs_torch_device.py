# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_torch_device.py do: all on the CPU and on a device, and compare."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fastps.torch as fps
from aids import device

DEVICE = "testdev:1"
STEPS = 3


class Net(nn.Module):
    """Layers, statistics and a parameter that no worker uses."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(fps.rank())
        self.front, self.norm = nn.Linear(6, 40), norm(40)
        self.back, self.unused = nn.Linear(40, 3), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(torch.tanh(self.norm(self.front(x))))


class Halves(nn.Module):
    """A model whose two layers are on different devices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.first(x.to(self.first.weight.device))
        return found, self.second(found.to(self.second.weight.device))


def start() -> None:
    device.load()
    torch.set_num_threads(1)
    fps.init()


def end() -> str:
    fps.barrier()
    fps.shutdown()
    return "done"


def batch(step: int, place: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + fps.rank())
    return torch.randn(8, 6, generator=generator).to(place)


def train(
    model: nn.Module, step: Callable[[], Any], zero: Callable[[], Any], place: str
) -> dict[str, torch.Tensor]:
    """Train, and return parameters and buffers."""
    for number in range(STEPS):
        model(batch(number, place)).square().mean().backward()
        step()
        zero()
    return {name: one.detach().cpu().clone() for name, one in model.state_dict().items()}


def by_optimizer(place: str, label: str, **options: Any) -> dict[str, torch.Tensor]:
    """Train with DistributedOptimizer."""
    norm = nn.BatchNorm1d if options.pop("norm", None) else fps.SyncBatchNorm
    model = Net(norm).to(place)
    prefix = f"{label}.{place}."
    fps.broadcast_parameters(model.state_dict(), prefix=prefix)
    kind = options.pop("kind", torch.optim.Adam)
    plain = kind(model.parameters(), lr=0.05)
    fps.broadcast_optimizer_state(plain, prefix=prefix)
    optimizer = fps.DistributedOptimizer(plain, model.named_parameters(), prefix=prefix, **options)
    return train(model, optimizer.step, optimizer.zero_grad, place)


def by_module(place: str, label: str, **options: Any) -> dict[str, torch.Tensor]:
    """Train with DistributedDataParallel, which copies buffers."""
    model = Net(nn.BatchNorm1d).to(place)
    wrapped = fps.DistributedDataParallel(model, prefix=f"{label}.{place}.", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wrapped(batch(9, place)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    found = train(wrapped, optimizer.step, optimizer.zero_grad, place)
    assert all(one.device == torch.device(place) for one in model.state_dict().values())
    return found


def on_two_devices(place: str, label: str, **options: Any) -> dict[str, torch.Tensor]:
    """Train a model of which one part is on the CPU, or on another device."""
    model = Halves()
    second, is_module = options.pop("second"), options.pop("is_module", False)
    if place != "cpu":
        model.first.to("testdev:0")
        model.second.to(second)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    names = model.named_parameters()
    if is_module:
        wrapped = fps.DistributedDataParallel(model, prefix=f"{label}.{place}.", **options)
    else:
        wrapped = model
        fps.DistributedOptimizer(optimizer, names, prefix=f"{label}.{place}.", **options)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        both = wrapped(x)
        return both[0].square().mean().cpu() + both[1].square().mean().cpu()

    for number in range(5 * STEPS):
        loss_of(batch(number, "cpu")).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: one.detach().cpu() for name, one in model.state_dict().items()}


def assert_same(label: str, run: Callable[..., dict[str, torch.Tensor]], **options: Any) -> None:
    """Run on the CPU and on the device; all bits must be equal."""
    wanted, found = run("cpu", label, **options), run(DEVICE, label, **options)
    assert wanted.keys() == found.keys()
    for name, one in wanted.items():
        assert torch.equal(one, found[name]), (label, name, one, found[name])


def train_everywhere() -> str:
    """Train in each way in which gradients travel."""
    start()
    ways: dict[str, dict[str, Any]] = {
        "default": {},
        "views": {"gradient_views": True},
        "loose": {"bucket_bytes": 0, "gradient_views": False},
        "copied": {"gradient_views": False},
        "half": {"compression": fps.Compression.bf16},
        "sum": {"op": fps.Sum},
        "set": {"process_set": fps.add_process_set([0, 1])},
        "codec": {"compression": fps.Compression.topk(0.5)},
    }
    for label, options in ways.items():
        assert_same(f"optimizer {label}", by_optimizer, **options)
        assert_same(f"module {label}", by_module, **options)
    assert_same("stale", by_optimizer, staleness=1)
    assert_same("adasum", by_optimizer, op=fps.Adasum)
    assert_same("barrier", by_optimizer, cross_barrier=True, norm=True, kind=torch.optim.SGD)
    assert_same("two devices", on_two_devices, second="testdev:1")
    assert_same("device and cpu", on_two_devices, second="cpu")
    assert_same("module on two", on_two_devices, second="testdev:1", is_module=True)
    assert_same("loose on two", on_two_devices, second="testdev:1", bucket_bytes=0)
    assert_same("loose and cpu", on_two_devices, second="cpu", is_module=True, bucket_bytes=0)
    return end()


def mixed(place: str, label: str, make: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Train with an optimizer that mixes models with neighbours."""
    torch.manual_seed(fps.rank())
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).to(place)
    optimizer = make(torch.optim.SGD(model.parameters(), lr=0.05), model, f"{label}.{place}.")
    if hasattr(optimizer, "force_barrier"):
        optimizer.force_barrier = True
    return train(model, optimizer.step, optimizer.zero_grad, place)


def held_by_servers(place: str, label: str) -> dict[str, torch.Tensor]:
    """Step alone, one worker after the other; servers add. All numbers are exact in float32."""
    model = nn.Linear(6, 3)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model.to(place)
    optimizer = fps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters(),
        prefix=f"{label}.{place}.", asynchronous=True,
    )  # fmt: skip
    for turn in range(fps.size()):
        if turn == fps.rank():
            model(batch(turn, place).mul(8).round()).sum().backward()
            optimizer.step()
        fps.barrier()
    return {name: one.detach().cpu() for name, one in model.state_dict().items()}


def other_faces() -> str:
    """Mix with neighbours, put to windows, gather sparse rows, send values."""
    start()
    kinds = {
        "with": fps.DistributedAdaptWithCombineOptimizer,
        "then": fps.DistributedAdaptThenCombineOptimizer,
        "tracking": fps.DistributedGradientTrackingOptimizer,
    }
    for label, kind in kinds.items():
        assert_same(label, mixed, make=lambda one, model, prefix, kind=kind: kind(
            one, model, prefix=prefix, average_buffers=True))  # fmt: skip
    for label, kind in {"put": fps.DistributedWinPutOptimizer,
                        "pull": fps.DistributedPullGetOptimizer,
                        "push sum": fps.DistributedPushSumOptimizer}.items():  # fmt: skip
        assert_same(label, mixed, make=lambda one, model, prefix, kind=kind: kind(
            one, model, window_prefix=prefix, average_buffers=True))  # fmt: skip
    assert_same("held", held_by_servers)
    neighbors()
    windows()
    sparse_rows()
    objects()
    return end()


def neighbors() -> None:
    """Mix and gather tensors on the device."""
    x = batch(0, "cpu").t()
    for found, wanted in (
        (fps.neighbor_allreduce(x.to(DEVICE)), fps.neighbor_allreduce(x)),
        (fps.neighbor_allgather(x.to(DEVICE)), fps.neighbor_allgather(x)),
    ):
        assert found.device == torch.device(DEVICE)
        assert torch.equal(found.cpu(), wanted)
    some = fps.neighbor_allreduce([x.to("testdev:0"), x, x.to("testdev:1")])
    assert [str(one.device) for one in some] == ["testdev:0", "cpu", "testdev:1"]


def windows() -> None:
    """Put a tensor of the device into a window on the CPU."""
    own = torch.zeros(3)
    fps.win_create(own, "w", zero_init=True)
    fps.win_put(torch.full((3,), fps.rank() + 1.0, device=DEVICE), "w")
    fps.barrier()
    found = fps.win_update("w", 0.0, {1 - fps.rank(): 1.0})
    assert found.tolist() == [2.0 - fps.rank()] * 3
    with pytest.raises(TypeError, match="is on testdev:1, and self_weight"):
        fps.win_put(torch.ones(3, device=DEVICE), "w", self_weight=0.5)
    fps.win_free("w")


def sparse_rows() -> None:
    """Add sparse tensors; the test device knows how to make and to read them."""
    places = torch.tensor([[fps.rank(), 5, 5]])
    values = torch.arange(6.0).reshape(3, 2) + fps.rank()
    both = []
    for place in ("cpu", "testdev:0"):
        own = torch.sparse_coo_tensor(places.to(place), values.to(place), (10, 2))
        found = fps.allreduce(own, op=fps.Sum, name=f"rows {place}")
        assert found.device == torch.device(place)
        both.append((found.indices().cpu(), found.values().cpu()))
    assert all(torch.equal(one, other) for one, other in zip(*both, strict=True))


def objects() -> None:
    """Broadcast values with tensors in them."""
    value = {"x": torch.full((2,), fps.rank(), device="testdev:0"), "y": [torch.ones(1)]}
    found = fps.broadcast_object(value, 1)
    assert (str(found["x"].device), str(found["y"][0].device)) == ("testdev:0", "cpu")
    assert found["x"].tolist() == [1, 1]
    x = torch.full((2, 3), float(fps.rank()), device=DEVICE).t()
    fps.broadcast_parameters([("x", x)], 1, prefix="turned.")
    assert x.tolist() == [[1.0, 1.0]] * 3
    with pytest.raises(TypeError, match="supports tensors on the CPU only"):
        refused_by_backend(x)
    model = nn.Linear(6, 3).to(DEVICE)
    with pytest.raises(TypeError, match=r"LocalSGD\.weight' is on testdev:1, and LocalSGD"):
        fps.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=1.0), sync_every=2)


def refused_by_backend(x: torch.Tensor) -> None:
    """Call the backend's check of a tensor."""
    from fastps.frameworks.torch.distributed.tensor_layout import reading  # noqa: PLC0415

    reading(x, "all_gather")
