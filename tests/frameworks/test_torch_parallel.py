# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel in a job of threads, compared with one process over the same batches."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
from fake_session import FakeCluster

from fastps.errors import FastPSError, MismatchError, PeerLostError

torch = pytest.importorskip("torch")

import torch_models  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_models import (  # noqa: E402
    Branches,
    assert_same_weights,
    batch,
    loss_of,
    make_model,
    make_models,
    part,
)

from fastps.frameworks.torch.gradients.data_parallel import DistributedDataParallel  # noqa: E402
from fastps.frameworks.torch.ops.compression import Compression  # noqa: E402

nn = torch.nn

pytestmark = pytest.mark.usefixtures("travel")


@pytest.fixture(params=["copied", "shared"])
def travel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send gradients in the two ways that differ most; those of the optimizer cover the rest."""
    monkeypatch.setattr(torch_models, "TRAVEL", torch_models.WAYS.get(request.param, {}))
    monkeypatch.setattr(FakeCluster, "can_share", request.param == "shared")


def parallel(module: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, **{**torch_models.TRAVEL, **options})


def sent(cluster: FakeCluster, rank: int = 0) -> list[str]:
    return [name for name in cluster.names(rank) if "Gradient" in name]


def rounds(cluster: FakeCluster, rank: int = 0) -> set[int]:
    """Say how often a rank has sent each gradient."""
    names = sent(cluster, rank)
    return {names.count(name) for name in names}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_two_workers_equal_one_process(cluster: FakeCluster) -> None:
    models, twin = [make_model(0), make_model(1)], make_model(0)

    def body(rank: int) -> None:
        model = parallel(models[rank])
        optimizer = sgd(model)
        for step in range(6):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss_of(model, part(step, rank)).backward()
            assert not model._exchange.round.in_flight
            optimizer.step()

    cluster.run(body)
    optimizer = sgd(twin)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(twin, batch(step)).backward()
        optimizer.step()
    assert_same_weights(models, twin, 1e-6)


def test_gradients_are_averages_when_backward_returns(cluster: FakeCluster) -> None:
    models, twin = make_models(cluster), make_model()

    def body(rank: int) -> None:
        loss_of(parallel(models[rank]), part(0, rank)).backward()

    cluster.run(body)
    loss_of(twin, batch(0)).backward()
    for first, second, want in zip(*(m.parameters() for m in (*models, twin)), strict=True):
        assert torch.equal(first.grad, second.grad)
        torch.testing.assert_close(first.grad, want.grad)


def test_no_sync_accumulates(cluster: FakeCluster) -> None:
    models, twin = make_models(cluster), make_model()

    def body(rank: int) -> None:
        model = parallel(models[rank])
        optimizer = sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            with model.no_sync():
                for one in range(2):
                    loss_of(model, part(3 * step + one, rank)).backward()
            assert rounds(cluster, rank) == ({step} if step else set())
            loss_of(model, part(3 * step + 2, rank)).backward()
            optimizer.step()

    cluster.run(body)
    optimizer = sgd(twin)
    for step in range(3):
        optimizer.zero_grad()
        for one in range(3):
            loss_of(twin, batch(3 * step + one)).backward()
        optimizer.step()
    assert_same_weights(models, twin, 1e-6)
    assert rounds(cluster) == {3}


@pytest.mark.parametrize("is_late", [True, False])
def test_the_last_of_several_backward_passes_sends(cluster: FakeCluster, is_late: bool) -> None:
    """As Accelerate's trigger_sync_in_backward() and torch's pipelines have it, or nanoGPT."""
    models, twin = make_models(cluster), make_model()

    def body(rank: int) -> None:
        model = parallel(models[rank])
        assert isinstance(model, nn.parallel.DistributedDataParallel)
        for step in range(2):
            model.zero_grad()
            losses = []
            for one in range(3):
                model.require_backward_grad_sync = one == 2 and not is_late
                losses.append(loss_of(model, part(one, rank)))
                if not is_late:
                    losses.pop().backward()
            for loss in losses:
                if loss is losses[-1]:
                    model.reducer.prepare_for_backward([])
                loss.backward()
            assert rounds(cluster, rank) == {step + 1}
        (0 * loss_of(model.module, part(0, rank))).backward()
        assert rounds(cluster, rank) == {2}

    cluster.run(body)
    for one in range(3):
        loss_of(twin, batch(one)).backward()
    for first, second, want in zip(*(m.parameters() for m in (*models, twin)), strict=True):
        assert torch.equal(first.grad, second.grad)
        torch.testing.assert_close(first.grad, want.grad)


def test_gradients_add_up_without_no_sync(cluster: FakeCluster) -> None:
    models, twin = make_models(cluster), make_model()

    def body(rank: int) -> None:
        model = parallel(models[rank])
        for step in range(3):
            loss_of(model, part(step, rank)).backward()

    cluster.run(body)
    for step in range(3):
        loss_of(twin, batch(step)).backward()
    for first, second, want in zip(*(m.parameters() for m in (*models, twin)), strict=True):
        assert torch.equal(first.grad, second.grad)
        torch.testing.assert_close(first.grad, want.grad)


@pytest.mark.parametrize("one_backward", [True, False])
def test_several_forward_passes_before_backward(cluster: FakeCluster, one_backward: bool) -> None:
    models, twin = make_models(cluster), make_model()

    def body(rank: int) -> None:
        model = parallel(models[rank])
        losses = [loss_of(model, part(step, rank)) for step in range(2)]
        if one_backward:
            (losses[0] + losses[1]).backward()
        else:
            losses[0].backward()
            losses[1].backward()

    cluster.run(body)
    for step in range(2):
        loss_of(twin, batch(step)).backward()
    for ours, want in zip(models[0].parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, want.grad)
    assert rounds(cluster) == {1 if one_backward else 2}


def test_unused_parameters_count_as_zero(cluster: FakeCluster) -> None:
    models = [Branches(), Branches()]

    def body(rank: int) -> None:
        model = parallel(models[rank], find_unused_parameters=rank == 0)
        optimizer = sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            x, y = part(step, rank)
            nn.functional.mse_loss(model(x, rank), y).backward()
            optimizer.step()
        assert torch.equal(models[rank].nobody.weight.grad, torch.zeros(1, 6))

    cluster.run(body)
    assert_same_weights(models, None)
    assert torch.equal(models[0].nobody.weight, Branches().nobody.weight)
    assert not torch.equal(models[0].arms[1].weight, Branches().arms[1].weight)


def test_frozen_parameters_stay_alone(cluster: FakeCluster) -> None:
    models = make_models(cluster)

    def body(rank: int) -> None:
        models[rank][0].requires_grad_(False)
        model = parallel(models[rank])
        for step in range(2):
            loss_of(model, part(step, rank)).backward()
        assert models[rank][0].weight.grad is None
        models[rank][0].requires_grad_(True)
        loss_of(model, part(2, rank)).backward()
        loss_of(model, part(3, rank)).backward()

    cluster.run(body)
    for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(first.grad, second.grad)
    assert not any("0.weight" in name for name in sent(cluster)[:2])


class Statistics(nn.Module):
    """Buffers of many kinds; one is replaced in each forward pass."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.BatchNorm1d(6)
        self.line = nn.Linear(6, 1)
        self.register_buffer("mask", torch.ones(6))
        self.register_buffer("angles", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("flag", torch.tensor(seed == 0))
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("mean", torch.zeros(1), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + x.mean().detach()
        return self.line(self.norm(x * self.mask))


def test_buffers_are_those_of_rank_0(cluster: FakeCluster) -> None:
    models = [Statistics(0), Statistics(1)]
    seen: list[list[float]] = [[], []]

    def body(rank: int) -> None:
        model = parallel(models[rank])
        assert models[rank].flag.item() is True
        for step in range(3):
            losses = [loss_of(model, part(step, rank)), loss_of(model, part(step + 9, rank))]
            sum(losses).backward()
        model.eval()
        model(part(0, rank)[0]) if rank else None  # no exchange outside training
        with torch.no_grad():
            model(part(0, rank)[0]) if rank else None
        model.train()
        before = copy.deepcopy(models[rank].state_dict())
        seen[rank] = before["norm.running_mean"].tolist()
        model(part(0, rank)[0])

    cluster.run(body)
    assert seen[0] != seen[1]  # each has seen its own batch since the last exchange
    assert torch.equal(torch.view_as_real(models[0].angles), torch.view_as_real(models[1].angles))
    # The last pass began with the same statistics and added a batch of their own each.
    momentum = models[0].norm.momentum
    begun = [
        (model.norm.running_mean - momentum * part(0, rank)[0].mean(0)) / (1 - momentum)
        for rank, model in enumerate(models)
    ]
    torch.testing.assert_close(begun[0], begun[1])
    submits = [e.submit for e in cluster.events if e.rank == 0 and "Buffers" in e.name]
    assert len(submits) == len(set(submits)) == 1 + 6 + 1


class Cached(nn.Module):
    """Has a buffer that grows with the batch, one module deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 1)
        self.cache = nn.Module()
        self.cache.register_buffer("angles", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > len(self.cache.angles):
            self.cache.angles = torch.full((len(x),), self.line.bias.item())
        return self.line(x) * self.cache.angles[: len(x), None]


def test_a_buffer_made_by_expand(cluster: FakeCluster) -> None:
    def body(rank: int) -> None:
        module = nn.Linear(6, 1)
        module.register_buffer("ids", torch.arange(3.0).add(rank).expand(2, -1))
        model = parallel(module)
        assert module.ids.tolist() == [[0.0, 1.0, 2.0]] * 2
        module.ids[0, 0] += 5 + rank
        model(torch.ones(2, 6)).sum().backward()
        assert module.ids.tolist() == [[5.0, 1.0, 2.0]] * 2

    cluster.run(body)


def test_buffers_may_grow_on_all_ranks_alike(cluster: FakeCluster) -> None:
    def body(rank: int) -> None:
        model = parallel(Cached())
        for size in (3, 20, 20, 40, 5):
            model(torch.ones(size, 6)).sum().backward()
        assert len(model.module.cache.angles) == 40

    cluster.run(body)
    names = {event.name for event in cluster.events if "Buffers" in event.name}
    assert names == {"DDP0.Buffers", "DDP0.Buffers (2)", "DDP0.Buffers (3)"}


@pytest.mark.parametrize("grows", [0, 1])
def test_a_buffer_that_grows_on_one_rank_is_named_on_all(cluster: FakeCluster, grows: int) -> None:
    def body(rank: int) -> None:
        model = parallel(Cached())
        model(torch.ones(5 if rank == grows else 3, 6)).sum().backward()
        for _ in range(2):  # no second call is left waiting either
            with pytest.raises(MismatchError, match=r"'cache\.angles' of shape \(4,\)") as caught:
                model(torch.ones(3, 6))
            assert "'cache.angles' of shape (5,)" in str(caught.value)
            assert "broadcast_buffers=False" in str(caught.value)

    cluster.run(body)


def test_a_buffer_that_autograd_has_saved_is_not_changed_unseen(cluster: FakeCluster) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(6, 1)
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.line(x) * self.scale

    def body(rank: int) -> None:
        model = parallel(Scaled())
        first = model(part(0, rank)[0]).sum()
        model(part(0, rank)[0]).sum().backward()  # equal buffers are left alone
        first.backward()
        model.module.scale.fill_(2.0 + rank)
        first = model(part(0, rank)[0]).sum()
        assert model.module.scale == 2
        model.module.scale.data.fill_(3.0 + rank)
        model(part(0, rank)[0])
        if rank == 1:  # before it has sent anything, so worker 0 need not take part
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                first.backward()

    cluster.run(body)


def test_without_broadcast_buffers(cluster: FakeCluster) -> None:
    models = [Statistics(0), Statistics(1)]

    def body(rank: int) -> None:
        model = parallel(models[rank], broadcast_buffers=False)
        loss_of(model, part(0, rank)).backward()

    cluster.run(body)
    assert not torch.equal(models[0].norm.running_mean, models[1].norm.running_mean)
    assert len([e for e in cluster.events if e.rank == 0 and "Buffers" in e.name]) == 1


def test_several_instances_in_one_backward_pass(cluster: FakeCluster) -> None:
    """Ranks meet the two in different order; one of them has a parameter nobody uses."""
    pairs = [(make_model(), Branches()) for _ in range(2)]

    def body(rank: int) -> None:
        first, second = (parallel(m) for m in pairs[rank])
        for step in range(3):
            x, _ = part(step, rank)
            outputs = [first(x), second(x, 0)]
            if rank == 1:
                (outputs[0].tanh().tanh() + outputs[1]).sum().backward()
            else:
                (outputs[0] + outputs[1].tanh().tanh()).sum().backward()

    cluster.run(body)
    for place in range(2):
        for a, b in zip(pairs[0][place].parameters(), pairs[1][place].parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    assert {name.partition(".")[0] for name in sent(cluster)} == {"DDP0", "DDP1"}


def test_gradient_penalty(cluster: FakeCluster) -> None:
    """torch.autograd.grad() sends nothing; the backward pass through its result does."""
    models = make_models(cluster)

    def body(rank: int) -> None:
        model = parallel(models[rank])
        x = part(0, rank)[0].requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        assert not sent(cluster, rank)
        assert models[rank][0].weight.grad is None
        slope.square().mean().backward()

    cluster.run(body)
    for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(first.grad, second.grad)
    assert rounds(cluster) == {1}


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(cluster: FakeCluster, use_reentrant: bool) -> None:
    models, twin = [Checkpointed(use_reentrant) for _ in range(2)], Checkpointed(False)

    def body(rank: int) -> None:
        model = parallel(models[rank])
        for step in range(2):
            model(part(step, rank)[0].requires_grad_()).square().mean().backward()

    cluster.run(body)
    for step in range(2):
        twin(batch(step)[0]).square().mean().backward()
    for first, second, want in zip(*(m.parameters() for m in (*models, twin)), strict=True):
        assert torch.equal(first.grad, second.grad)
        torch.testing.assert_close(first.grad, want.grad)
    assert rounds(cluster) == {2}


def test_a_layer_in_two_reentrant_checkpoints_is_refused(alone: FakeCluster) -> None:
    layer = nn.Linear(6, 6)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.layer, x, use_reentrant=True)
            return checkpoint(self.layer, x, use_reentrant=True)

    model = parallel(Twice())
    with pytest.raises(FastPSError, match="use_reentrant=False"):
        model(batch(0)[0].requires_grad_()).sum().backward()


@dataclass
class Result:
    value: torch.Tensor
    more: Any


class Foreign:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


@pytest.mark.parametrize("kind", ["dict", "dataclass", "foreign"])
def test_outputs_of_any_class(cluster: FakeCluster, kind: str) -> None:
    class Boxed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(6, 1)
            nn.init.ones_(self.line.weight)

        def forward(self, x: torch.Tensor) -> Any:
            y = self.line(x)
            if kind == "dict":
                return {"a": [y.detach(), {"b": (y,)}]}
            return Result(y.detach(), (y,)) if kind == "dataclass" else Foreign(y)

    def value_of(result: Any) -> torch.Tensor:
        if kind == "dict":
            return result["a"][1]["b"][0]
        return result.more[0] if kind == "dataclass" else result.value

    def body(rank: int) -> torch.Tensor:
        model = parallel(Boxed())
        for step in range(2):
            model.zero_grad()
            value_of(model(part(step, rank)[0])).sum().backward()
        return model.module.line.weight.grad

    first, second = cluster.run(body)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, batch(1)[0].sum(0, keepdim=True) / 2)


def test_a_module_used_without_its_wrapper_sends_nothing(alone: FakeCluster) -> None:
    module = make_model()
    model = parallel(module)
    loss_of(model, batch(0)).backward()
    before = len(sent(alone))
    loss_of(module, batch(0)).backward()
    with torch.no_grad():
        loss_of(model, batch(0))
    assert len(sent(alone)) == before


def test_an_error_in_backward_leaves_nothing_unseen(cluster: FakeCluster) -> None:
    """It fails on both ranks; the next forward pass says so, and synchronize() goes on."""
    models = make_models(cluster)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("boom")

    def body(rank: int) -> None:
        model = parallel(models[rank], bucket_bytes=0)
        x, _ = part(0, rank)
        handle = models[rank][1].register_forward_hook(lambda m, i, out: Fails.apply(out))
        with pytest.raises(ValueError, match="boom"):
            model(x).sum().backward()
        handle.remove()
        assert model._exchange.round.in_flight
        with pytest.raises(FastPSError, match=r"failed before its end.*3\.weight.*synchronize"):
            model(x)
        model.synchronize()
        assert not model._exchange.round.in_flight
        assert torch.equal(models[rank][0].weight.grad, torch.zeros(5, 6))
        model.zero_grad()
        model(x).sum().backward()
        model.synchronize()

    cluster.run(body)
    for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(first.grad, second.grad)


def test_errors_come_out_of_backward(cluster: FakeCluster) -> None:
    cluster.fail(r"Gradient\.2\.weight", PeerLostError("worker 1 (host h, pid 7) died"))
    models = make_models(cluster)

    def body(rank: int) -> None:
        model = parallel(models[rank], bucket_bytes=0)
        with pytest.raises(PeerLostError, match="worker 1"):
            loss_of(model, part(0, rank)).backward()
        assert not model._exchange.round.in_flight

    cluster.run(body)


@pytest.mark.parametrize("kind", ["shape", "name", "frozen", "buffer", "missing"])
def test_workers_with_other_modules(cluster: FakeCluster, kind: str) -> None:
    """All workers raise the same error, which names both sides."""

    def make(is_other: bool) -> nn.Module:
        module = nn.Module()
        name = "b" if is_other and kind == "name" else "a"
        setattr(module, name, nn.Linear(4 if is_other and kind == "shape" else 3, 1))
        module.requires_grad_(not (is_other and kind == "frozen"))
        if not (is_other and kind == "missing"):
            length = 5 if is_other and kind == "buffer" else 2
            module.register_buffer("c", torch.zeros(length))
        return module

    def body(rank: int) -> str:
        with pytest.raises(MismatchError) as info:
            parallel(make(rank == 1))
        return str(info.value)

    first, second = cluster.run(body)
    assert first == second
    assert "on worker 1 and '" in first
    parts = {"shape": "(1, 4)", "name": "b.weight", "frozen": "frozen", "buffer": "(5,)"}
    assert parts.get(kind, "missing") in first


def test_amp_with_scaler_and_clipping(cluster: FakeCluster) -> None:
    models = make_models(cluster)

    def body(rank: int) -> list[float]:
        model = parallel(models[rank])
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scales = []
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, part(step, rank))
            if step == 2 and rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    first, second = cluster.run(body)
    assert first == second == [1024.0, 1024.0, 512.0, 512.0]
    assert_same_weights(models, None)


@pytest.mark.parametrize("compression", [Compression.fp16, Compression.bf16])
def test_compression(cluster: FakeCluster, compression: Any) -> None:
    models, twin = make_models(cluster), make_model()

    def body(rank: int) -> None:
        model = parallel(models[rank], compression=compression)
        for step in range(2):
            model.zero_grad(set_to_none=step == 0)
            loss_of(model, part(step, rank)).backward()

    cluster.run(body)
    loss_of(twin, batch(1)).backward()
    for first, second, want in zip(*(m.parameters() for m in (*models, twin)), strict=True):
        assert torch.equal(first.grad, second.grad)
        assert first.grad.dtype == torch.float32
        torch.testing.assert_close(first.grad, want.grad, rtol=2e-2, atol=1e-2)


def test_it_is_a_module(alone: FakeCluster) -> None:
    module = make_model()
    model = parallel(module)
    assert model.module is module
    assert list(model.state_dict()) == [f"module.{name}" for name in module.state_dict()]
    model.load_state_dict({f"module.{k}": v for k, v in make_model(1).state_dict().items()})
    assert torch.equal(module[0].weight, make_model(1)[0].weight)
    assert not model.eval().module.training
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    loss_of(module, batch(0)).backward()
    assert not sent(alone)


def test_a_copy_is_for_evaluation(alone: FakeCluster) -> None:
    model = parallel(make_model())
    average = torch.optim.swa_utils.AveragedModel(model)
    loss_of(model, batch(0)).backward()
    average.update_parameters(model)
    count = len(sent(alone))
    twin = copy.deepcopy(model)
    assert type(twin) is type(model)
    assert twin.module[0].weight is not model.module[0].weight
    with torch.no_grad():
        assert torch.equal(average(batch(0)[0]), model.module(batch(0)[0]))
    with pytest.raises(FastPSError, match="copy of a Distributed"):
        twin(batch(0)[0])
    loss_of(twin.eval(), batch(0)).backward()
    assert len(sent(alone)) == count


def test_words_of_torch_are_known(alone: FakeCluster) -> None:
    model = parallel(
        make_model(), bucket_cap_mb=0.5, gradient_as_bucket_view=True, static_graph=True
    )
    assert model._exchange._layout.bucket_bytes == 1 << 19
    assert model._exchange._views is True


def test_arguments_are_checked(alone: FakeCluster) -> None:
    with pytest.raises(TypeError, match="torch module"):
        parallel(torch.ones(1))
    with pytest.raises(ValueError, match="device_ids"):
        parallel(make_model(), device_ids=[0])
    with pytest.raises(ValueError, match=r"no shape yet \(weight, bias\): run one forward pass"):
        parallel(nn.LazyLinear(3))
    with pytest.raises(ValueError, match="gradient_views"):
        parallel(make_model(), gradient_views="yes")
    with pytest.raises(ValueError, match="bucket_bytes"):
        parallel(make_model(), bucket_bytes=-1)
