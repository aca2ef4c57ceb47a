# SPDX-License-Identifier: Apache-2.0
"""Where gradients lie, which travel together, and that neither changes a single bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_session import FakeCluster

from fastps.errors import FastPSError

torch = pytest.importorskip("torch")

import torch_models  # noqa: E402
from torch_models import WAYS, batch, loss_of, make_model, make_models, part, wrap  # noqa: E402

from fastps.frameworks.torch.gradients.buckets import bucket_name  # noqa: E402
from fastps.frameworks.torch.ops.compression import Compression  # noqa: E402
from fastps.frameworks.torch.optimizer.distributed import DistributedOptimizer  # noqa: E402

nn = torch.nn


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sessions give shared memory."""
    monkeypatch.setattr(FakeCluster, "can_share", True)


def holds(arrays: list[np.ndarray], address: int) -> bool:
    """Tell whether an address lies in one of the arrays."""
    return any(a.ctypes.data <= address < a.ctypes.data + max(a.nbytes, 1) for a in arrays)


def are_shared(cluster: FakeCluster, model: nn.Module) -> set[bool]:
    return {holds(cluster.shared, p.grad.data_ptr()) for p in model.parameters()}


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_live_in_shared_memory(
    cluster: FakeCluster, bucket_bytes: int, set_to_none: bool
) -> None:
    models = make_models(cluster)

    def body(rank: int) -> None:
        optimizer = wrap(models[rank], bucket_bytes=bucket_bytes)
        homes: list[list[int]] = []
        for step in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(models[rank], part(step, rank)).backward()
            homes.append([p.grad.data_ptr() for p in models[rank].parameters()])
            optimizer.step()
            assert are_shared(cluster, models[rank]) == {True}
        assert homes[0] == homes[1] == homes[2]

    cluster.run(body)
    assert all(holds(cluster.shared, array.ctypes.data) for array in cluster.sent)
    assert len(cluster.shared) == (12 if bucket_bytes == 0 else 2)
    assert len(set(cluster.names(0))) == (6 if bucket_bytes == 0 else 1)


@pytest.mark.usefixtures("shared")
def test_without_views_gradients_stay_where_autograd_puts_them(cluster: FakeCluster) -> None:
    models = make_models(cluster)

    def body(rank: int) -> None:
        optimizer = wrap(models[rank], gradient_views=False)
        optimizer.zero_grad()
        loss_of(models[rank], part(0, rank)).backward()
        kept = [p.grad for p in models[rank].parameters()]
        optimizer.step()
        assert are_shared(cluster, models[rank]) == {False}
        assert all(p.grad is g for p, g in zip(models[rank].parameters(), kept, strict=True))

    cluster.run(body)


def test_views_without_shared_memory(cluster: FakeCluster) -> None:
    """By default only small gradients are views then; True makes views of all."""
    big, small = [nn.Linear(200, 200) for _ in range(2)], [nn.Linear(200, 200) for _ in range(2)]

    def body(rank: int) -> None:
        for model, views in ((big[rank], True), (small[rank], "auto")):
            optimizer = wrap(model, gradient_views=views, prefix=f"{views}.")
            homes = set()
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(1, 200)).sum().backward()
                optimizer.step()
                homes.add(model.weight.grad)
            assert len(homes) == (1 if views is True else 3)

    cluster.run(body)


def test_a_deep_model_of_small_tensors_travels_in_one_piece(cluster: FakeCluster) -> None:
    def deep() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(8, 8) for _ in range(200)])

    models, apart = [deep(), deep()], [deep(), deep()]

    def body(rank: int) -> None:
        for model, options in ((models[rank], {}), (apart[rank], WAYS["loose"])):
            optimizer = wrap(model, prefix=f"{len(options)}.", **options)
            for step in range(2):
                optimizer.zero_grad()
                model(torch.ones(2, 8) * (rank + step)).square().sum().backward()
                optimizer.step()

    cluster.run(body)
    names = cluster.names(0)
    assert len([name for name in names if name.startswith("0.")]) == 2
    assert len([name for name in names if name.startswith("2.")]) == 800
    for one, other in zip(models[0].parameters(), apart[1].parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one.grad, other.grad)


def test_a_bucket_leaves_when_its_last_gradient_is_there(cluster: FakeCluster) -> None:
    models = make_models(cluster)
    seen: list[list[str]] = []

    def body(rank: int) -> None:
        optimizer = wrap(models[rank], bucket_bytes=256)
        first = models[rank][0](part(0, rank)[0])
        if rank == 0:
            first.register_hook(lambda _: seen.append(cluster.names(rank)))
        models[rank][1:](first).sum().backward()
        optimizer.step()

    cluster.run(body)
    # From the end: 3.bias 64, 3.weight 64, 2.bias 64, 2.weight 64 bytes; then 0.bias, 0.weight.
    front, back = sorted(set(cluster.names(0)))
    assert seen == [[back]]
    assert front.startswith("Gradient.0.weight and 1 more (")
    assert back.startswith("Gradient.2.weight and 3 more (")
    urgency = {e.name: e.priority for e in cluster.events if e.kind == "push_pull"}
    assert urgency == {front: 0, back: -2}


def test_dtypes_and_large_gradients_travel_apart(cluster: FakeCluster) -> None:
    def body(rank: int) -> list[torch.Tensor]:
        kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float64]
        parameters = [nn.Parameter(torch.zeros(3, dtype=kind)) for kind in kinds]
        parameters.append(nn.Parameter(torch.zeros(20_000)))
        parameters.append(nn.Parameter(torch.zeros(2, 3).t()))
        optimizer = DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
        for _ in range(2):
            optimizer.zero_grad()
            sum((p.double() * (rank + 1)).sum() for p in parameters).backward()
            optimizer.step()
        return parameters

    for parameters in cluster.run(body):
        for p in parameters:
            assert torch.equal(p.detach(), torch.full_like(p, -3.0))
    heads = sorted(name.split(" ")[0] for name in set(cluster.names(0)))
    assert heads == [f"Gradient.group0.{place}" for place in (0, 1, 2, 5)]


@pytest.mark.usefixtures("travel")
@pytest.mark.filterwarnings("ignore:optimizer.step.. called without:UserWarning")
def test_gradients_replaced_by_the_user(cluster: FakeCluster) -> None:
    models = make_models(cluster)

    def body(rank: int) -> None:
        model = models[rank]
        optimizer = wrap(model)
        for step in range(5):
            model.zero_grad(set_to_none=step % 2 == 0)
            loss_of(model, part(0, rank)).backward()
            optimizer.synchronize()
            for p in model.parameters():
                p.grad = p.grad.clone() if step == 1 else p.grad * 0.5
            optimizer.step()
        for p in model.parameters():  # gradients that no backward pass has made
            p.grad = torch.full_like(p, float(rank))
        optimizer.step()
        assert all(torch.all(p.grad == 0.5) for p in model.parameters())

    cluster.run(body)
    for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
@pytest.mark.usefixtures("travel")
def test_a_gradient_that_autograd_follows_stays_in_its_graph(cluster: FakeCluster) -> None:
    def body(rank: int) -> None:
        parameter = nn.Parameter(torch.tensor([2.0, 3.0]))
        optimizer = DistributedOptimizer(
            torch.optim.SGD([parameter], lr=1.0), **torch_models.TRAVEL
        )
        (parameter**3 * (rank + 1)).sum().backward(create_graph=True)
        optimizer.synchronize()
        assert parameter.grad.tolist() == [18.0, 40.5]
        (slope,) = torch.autograd.grad(parameter.grad.sum(), parameter)
        assert slope.tolist() == [12.0 * (rank + 1), 18.0 * (rank + 1)]
        parameter.grad = None

    cluster.run(body)


def test_frozen_members_of_a_bucket(cluster: FakeCluster) -> None:
    models = make_models(cluster)

    def body(rank: int) -> None:
        model = models[rank]
        optimizer = wrap(model)
        for step in range(6):
            model[2].requires_grad_(step % 2 == 0)
            optimizer.zero_grad()
            loss_of(model, part(step, rank)).backward()
            optimizer.step()
            assert (model[2].weight.grad is None) == (step % 2 == 1)

    cluster.run(body)
    for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(first, second)


def test_a_frozen_model_takes_no_room(alone: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCluster, "can_share", True)
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = wrap(model)
    assert len(alone.shared) == 1
    model[0].requires_grad_(True)
    loss_of(model, batch(0)).backward()
    optimizer.step()
    assert len(alone.shared) == 2


@pytest.mark.parametrize("compression", [Compression.fp16, Compression.bf16])
def test_compression_gives_the_same_in_buckets(cluster: FakeCluster, compression: Any) -> None:
    models, apart = make_models(cluster), make_models(cluster)

    def body(rank: int) -> None:
        for model, bucket_bytes in ((models[rank], 1 << 20), (apart[rank], 0)):
            optimizer = wrap(
                model,
                compression=compression,
                bucket_bytes=bucket_bytes,
                prefix=f"{bucket_bytes}.",
            )
            for step in range(3):
                optimizer.zero_grad(set_to_none=step == 1)
                loss_of(model, part(step, rank)).backward()
                optimizer.step()

    cluster.run(body)
    for one, other in zip(models[0].parameters(), apart[1].parameters(), strict=True):
        assert torch.equal(one, other)
    assert len(set(cluster.names(0))) == 1 + 6


def test_a_changed_member_of_a_bucket_is_named(alone: FakeCluster) -> None:
    model = make_model()
    optimizer = wrap(model)
    loss_of(model, batch(0)).backward()
    model[2].bias.grad.mul_(2)
    with pytest.raises(FastPSError, match=r"'Gradient\.2\.bias' was changed while"):
        optimizer.step()


def test_only_the_same_gradients_give_a_bucket_the_same_name() -> None:
    name = bucket_name(["a", "b", "c"], [(1, 2), (3,), ()])
    assert name.startswith("a and 2 more (")
    assert name == bucket_name(["a", "b", "c"], [torch.Size([1, 2]), [3], ()])
    others = [
        bucket_name(["a", "b", "d"], [(1, 2), (3,), ()]),
        bucket_name(["a", "b", "c"], [(2, 1), (3,), ()]),
        bucket_name(["a", "b"], [(1, 2), (3,)]),
    ]
    assert len({name, *others}) == 4
    assert bucket_name(["a"], [(9,)]) == "a"
