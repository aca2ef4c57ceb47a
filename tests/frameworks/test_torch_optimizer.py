# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer in a job of threads, compared with one process over the same batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from fake_session import FakeCluster

from fastps.errors import FastPSError

torch = pytest.importorskip("torch")

from torch_models import (  # noqa: E402
    Branches,
    assert_same_weights,
    batch,
    loss_of,
    make_model,
    make_models,
    part,
    wrap,
)

from fastps.frameworks.gradient_round import Average, Sum  # noqa: E402
from fastps.frameworks.torch.ops.compression import Compression  # noqa: E402

nn = torch.nn

pytestmark = pytest.mark.usefixtures("travel")


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_two_workers_equal_one_process(cluster: FakeCluster, kind: type) -> None:
    models, twin = make_models(cluster), make_model()

    def body(rank: int) -> None:
        optimizer = wrap(models[rank], kind(models[rank].parameters(), lr=0.05))
        for step in range(10):
            optimizer.zero_grad()
            loss_of(models[rank], part(step, rank)).backward()
            optimizer.step()

    cluster.run(body)
    optimizer = kind(twin.parameters(), lr=0.05)
    for step in range(10):
        optimizer.zero_grad()
        loss_of(twin, batch(step)).backward()
        optimizer.step()
    assert_same_weights(models, twin, 1e-6)


def test_sum(cluster: FakeCluster) -> None:
    models = make_models(cluster)

    def body(rank: int) -> None:
        optimizer = wrap(models[rank], op=Sum)
        loss_of(models[rank], part(0, rank)).backward()
        optimizer.synchronize()

    cluster.run(body)
    twin = make_model()
    (2 * loss_of(twin, batch(0))).backward()
    for ours, theirs in zip(models[0].parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_gradients_leave_during_backward_front_layers_most_urgent(cluster: FakeCluster) -> None:
    models = make_models(cluster)
    order: list[str] = []

    def body(rank: int) -> None:
        optimizer = wrap(models[rank], bucket_bytes=0)
        first = models[rank][0](part(0, rank)[0])
        if rank == 0:
            first.register_hook(lambda _: order.extend(cluster.names(rank)))
        models[rank][1:](first).sum().backward()
        optimizer.step()

    cluster.run(body)
    # Before the first layer's backward began, all later layers had sent.
    assert sorted(order) == sorted(
        f"Gradient.{layer}.{kind}" for layer in (2, 3) for kind in ("weight", "bias")
    )
    urgency = {e.name: e.priority for e in cluster.events if e.kind == "push_pull"}
    names = [name for name, _ in models[0].named_parameters()]
    assert [urgency[f"Gradient.{name}"] for name in names] == [0, -1, -2, -3, -4, -5]
    declared = [e.name for e in cluster.events if e.kind == "declare" and e.rank == 1]
    assert declared == [f"Gradient.{name}" for name in names]


def test_unused_parameters_count_as_zero(cluster: FakeCluster) -> None:
    models = [Branches(), Branches()]
    before = models[0].nobody.weight.clone()

    def body(rank: int) -> None:
        optimizer = wrap(models[rank], bucket_bytes=0)
        for step in range(3):
            optimizer.zero_grad()
            x, y = part(step, rank)
            nn.functional.mse_loss(models[rank](x, rank), y).backward()
            optimizer.step()
        assert torch.equal(models[rank].nobody.weight.grad, torch.zeros(1, 6))

    cluster.run(body)
    assert_same_weights(models, None)
    assert torch.equal(models[0].nobody.weight, before)
    # The four that one rank did not use, sent in one submit.
    submits = [e.submit for e in cluster.events if e.rank == 0 and e.kind == "push_pull"]
    assert len(set(submits[:6])) == 3


def test_a_rank_without_any_backward(cluster: FakeCluster) -> None:
    models = make_models(cluster)

    def body(rank: int) -> None:
        optimizer = wrap(models[rank])
        if rank == 0:
            loss_of(models[rank], part(0, rank)).backward()
        optimizer.step()

    cluster.run(body)
    assert_same_weights(models, None)


def test_accumulation_sums_the_passes(cluster: FakeCluster) -> None:
    models, twin = make_models(cluster), make_model()

    def body(rank: int) -> None:
        optimizer = wrap(models[rank], backward_passes_per_step=2)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(models[rank], part(2 * step, rank)).backward()
            assert not optimizer._exchange.round.in_flight
            loss_of(models[rank], part(2 * step + 1, rank)).backward()
            optimizer.step()

    cluster.run(body)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(twin, batch(2 * step)).backward()
        loss_of(twin, batch(2 * step + 1)).backward()
        optimizer.step()
    assert_same_weights(models, twin, 1e-6)


def test_step_before_all_passes_sends_what_there_is(cluster: FakeCluster) -> None:
    models = make_models(cluster)

    def body(rank: int) -> None:
        optimizer = wrap(models[rank], backward_passes_per_step=4)
        for passes in (1, 4, 2):
            optimizer.zero_grad()
            for _ in range(passes):
                loss_of(models[rank], part(0, rank)).backward()
            optimizer.step()

    cluster.run(body)
    assert_same_weights(models, None)


def test_set_backward_passes_per_step(alone: FakeCluster) -> None:
    model = make_model()
    optimizer = wrap(model, bucket_bytes=0)
    optimizer.set_backward_passes_per_step(2)
    loss_of(model, batch(0)).backward()
    assert not alone.names()
    loss_of(model, batch(0)).backward()
    assert len(alone.names()) == 6
    with pytest.raises(FastPSError, match="communicated"):
        optimizer.set_backward_passes_per_step(3)
    optimizer.step()
    with pytest.raises(ValueError, match="integer >= 1"):
        optimizer.set_backward_passes_per_step(0)


def test_more_passes_than_announced(alone: FakeCluster) -> None:
    model = make_model()
    optimizer = wrap(model)
    loss_of(model, batch(0)).backward()
    with pytest.raises(FastPSError, match=r"more than 1 time.*backward_passes_per_step.*synchr"):
        loss_of(model, batch(0)).backward()
    with pytest.raises(FastPSError, match="changed while"):
        optimizer.step()


def test_a_step_is_left_out_as_the_error_says(alone: FakeCluster) -> None:
    model = make_model()
    optimizer = wrap(model)
    loss_of(model, batch(0)).backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    loss_of(model, batch(1)).backward()
    optimizer.step()


def test_zero_grad_while_in_flight(alone: FakeCluster) -> None:
    model = make_model()
    optimizer = wrap(model)
    loss_of(model, batch(0)).backward()
    with pytest.raises(FastPSError, match=r"zero_grad\(\) was called while.* and 1 more"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    loss_of(model, batch(1)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())
    loss_of(model, batch(1)).backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore:optimizer.step.. called without:UserWarning")
@pytest.mark.parametrize("with_skip", [True, False])
def test_clipping_between_synchronize_and_step(cluster: FakeCluster, with_skip: bool) -> None:
    models, twin = make_models(cluster), make_model()

    def body(rank: int) -> None:
        optimizer = wrap(models[rank], op=Sum, bucket_bytes=0)
        for step in range(4):
            optimizer.zero_grad()
            (loss_of(models[rank], part(step, rank)) / 2).backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(models[rank].parameters(), 0.1)
            if with_skip:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()

    cluster.run(body)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(twin, batch(step)).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        optimizer.step()
    assert_same_weights(models, twin, 1e-6)
    assert len(cluster.names(0)) == 4 * 6


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def forget(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)


def clear(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


@pytest.mark.parametrize("compression", [Compression.none, Compression.bf16])
@pytest.mark.parametrize("change", [clip, forget, clear])
def test_gradients_changed_in_flight_are_noticed(
    alone: FakeCluster, change: Callable[[nn.Module], None], compression: Any
) -> None:
    model = make_model()
    optimizer = wrap(model, compression=compression)
    loss_of(model, batch(0)).backward()
    change(model)
    with pytest.raises(FastPSError, match=r"changed while .*synchronize\(\) before clipping"):
        optimizer.step()


def test_skip_while_in_flight(alone: FakeCluster) -> None:
    model = make_model()
    optimizer = wrap(model)
    loss_of(model, batch(0)).backward()
    with pytest.raises(FastPSError, match="skip_synchronize"), optimizer.skip_synchronize():
        optimizer.step()
    optimizer.step()


@pytest.mark.parametrize("by_keyword", [True, False])
def test_closure(cluster: FakeCluster, by_keyword: bool) -> None:
    models, twin = make_models(cluster), make_model()

    def steps(model: nn.Module, optimizer: Any, data: Callable[[int], Any]) -> None:
        for step in range(4):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, data(step))
                loss.backward()
                return loss

            loss = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
            assert loss.ndim == 0

    def body(rank: int) -> None:
        steps(models[rank], wrap(models[rank]), lambda step: part(step, rank))

    cluster.run(body)
    steps(twin, torch.optim.SGD(twin.parameters(), lr=0.1), batch)
    assert_same_weights(models, twin, 1e-6)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # in torch 2.8 LBFGS
def test_lbfgs_with_closure(cluster: FakeCluster) -> None:
    models = make_models(cluster)

    def body(rank: int) -> None:
        model = models[rank]
        optimizer = wrap(model, torch.optim.LBFGS(model.parameters(), max_iter=3), op=Average)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, part(0, 0))
            loss.backward()
            return loss

        optimizer.step(closure)

    cluster.run(body)
    assert_same_weights(models, None)


@pytest.mark.parametrize(
    ("compression", "dtype"),
    [(Compression.fp16, torch.float16), (Compression.bf16, torch.bfloat16)],
)
def test_compression(cluster: FakeCluster, compression: Any, dtype: torch.dtype) -> None:
    models = make_models(cluster)
    plains = make_models(cluster)
    sent: list[list[torch.Tensor]] = [[], []]

    def body(rank: int) -> None:
        plain = plains[rank]
        loss_of(plain, part(0, rank)).backward()
        sent[rank] = [p.grad.to(dtype) for p in plain.parameters()]
        optimizer = wrap(models[rank], compression=compression)
        loss_of(models[rank], part(0, rank)).backward()
        optimizer.synchronize()

    cluster.run(body)
    for p, low, high in zip(models[0].parameters(), *sent, strict=True):
        want = ((low.float() + high.float()) * 0.5).to(dtype).float()
        assert p.grad.dtype == torch.float32
        assert torch.equal(p.grad, want)
    assert_same_weights(models, None)


class Doubling:
    """A compressor that somebody else wrote."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return torch.cat([tensor.flatten(), tensor.flatten()]), tensor.shape

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        return tensor[: tensor.numel() // 2].reshape(context)


class Front:
    """A compressor that sends a view of the gradient: its first half, the rest stays zero."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.flatten()[: tensor.numel() // 2 + 1], tensor.shape

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        whole = torch.zeros(context).flatten()
        whole[: tensor.numel()] = tensor
        return whole.reshape(context)


def step_with(cluster: FakeCluster, compression: Any) -> tuple[list[Any], Any]:
    """Step once with a compression; give the models, and a twin with the whole gradients."""
    models, twin = make_models(cluster), make_model()

    def body(rank: int) -> None:
        optimizer = wrap(models[rank], compression=compression)
        loss_of(models[rank], part(0, rank)).backward()
        optimizer.step()

    cluster.run(body)
    loss_of(twin, batch(0)).backward()
    return models, twin


def test_a_compression_that_sends_a_view(cluster: FakeCluster) -> None:
    models, twin = step_with(cluster, Front())
    for p in twin.parameters():
        p.grad.view(-1)[p.numel() // 2 + 1 :] = 0
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert_same_weights(models, twin, 1e-6)


def test_a_foreign_compression(cluster: FakeCluster) -> None:
    models, twin = step_with(cluster, Doubling())
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert_same_weights(models, twin, 1e-6)


def test_real_subclass_and_state_dict_round_trip(alone: FakeCluster) -> None:
    model = make_model()
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = wrap(model, plain)
    assert optimizer is plain
    assert isinstance(optimizer, torch.optim.Adam)
    loss_of(model, batch(0)).backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    other = make_model()
    fresh = wrap(other, torch.optim.Adam(other.parameters()), prefix="Other.")
    fresh.load_state_dict(saved)
    assert str(fresh.state_dict()) == str(saved)
    other.load_state_dict(model.state_dict())
    for m, o in ((model, optimizer), (other, fresh)):
        o.zero_grad()
        loss_of(m, batch(1)).backward()
        o.step()
    assert_same_weights([model, other], None)


def test_state_from_before_wrapping_is_kept(alone: FakeCluster) -> None:
    model, twin = make_model(), make_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for m, o in ((model, plain), (twin, theirs)):
        loss_of(m, batch(0)).backward()
        o.step()
        o.zero_grad()
    optimizer = wrap(model, plain)
    for m, o in ((model, optimizer), (twin, theirs)):
        loss_of(m, batch(1)).backward()
        o.step()
    assert_same_weights([model, twin], None)


@pytest.mark.parametrize("before", [True, False])
def test_learning_rate_schedulers(cluster: FakeCluster, before: bool) -> None:
    models = make_models(cluster)

    def body(rank: int) -> None:
        plain = torch.optim.SGD(models[rank].parameters(), lr=1.0)
        optimizer: Any = plain
        if not before:
            optimizer = wrap(models[rank], plain, bucket_bytes=0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        if before:
            optimizer = wrap(models[rank], plain, bucket_bytes=0)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(models[rank], part(step, rank)).backward()
            optimizer.step()
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.125

    cluster.run(body)
    assert_same_weights(models, None)
    assert len(cluster.names(0)) == 18


def test_reading_groups_on_one_rank_does_no_harm(cluster: FakeCluster) -> None:
    models = [Branches(), Branches()]

    def body(rank: int) -> None:
        optimizer = wrap(models[rank], bucket_bytes=0)
        for step in range(3):
            optimizer.zero_grad()
            x, y = part(step, rank)
            nn.functional.mse_loss(models[rank](x, rank), y).backward()
            if rank == 0:
                assert optimizer.param_groups[0]["lr"] == 0.1
                assert not optimizer._exchange.round.in_flight
            optimizer.step()

    cluster.run(body)
    assert_same_weights(models, None)
    assert len(cluster.names(0)) == 18


def test_reading_groups_between_two_backward_passes(alone: FakeCluster) -> None:
    model = Branches()
    optimizer = wrap(model)
    x, _ = batch(0)
    model(x, 0).sum().backward()
    assert len(optimizer.param_groups) == 1
    with pytest.raises(FastPSError, match=r"do not read optimizer\.param_groups"):
        model(x, 1).sum().backward()


def test_two_backward_passes_over_different_layers(cluster: FakeCluster) -> None:
    models = [Branches(), Branches()]

    def body(rank: int) -> None:
        optimizer = wrap(models[rank], bucket_bytes=0)
        for step in range(2):
            optimizer.zero_grad()
            x, y = part(step, rank)
            for arm in (rank, 1 - rank):
                nn.functional.mse_loss(models[rank](x, arm), y).backward()
            optimizer.step()

    cluster.run(body)
    assert_same_weights(models, None)
    assert len(cluster.names(0)) == 12


def scaled_step(optimizer: Any, scaler: Any, how: str) -> None:
    if how == "explicit":
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
    elif how == "unscale":
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    else:
        scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("how", ["explicit", "unscale", "plain"])
def test_amp_with_scaler_on_the_cpu(cluster: FakeCluster, how: str) -> None:
    """An overflow on one rank lets all ranks leave the step out; scales stay equal."""
    models = make_models(cluster)
    scales: list[list[float]] = [[], []]

    def body(rank: int) -> None:
        optimizer = wrap(models[rank])
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(models[rank], part(step, rank))
            if step == 2 and rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaled_step(optimizer, scaler, how)
            scales[rank].append(scaler.get_scale())

    cluster.run(body)
    assert scales[0] == scales[1]
    assert scales[0][:3] == [1024.0, 2048.0, 1024.0]
    assert_same_weights(models, None)
    assert all(p.isfinite().all() for p in models[0].parameters())


@pytest.mark.parametrize("how", ["explicit", "unscale", "plain"])
def test_scaler_with_layers_that_one_rank_does_not_use(cluster: FakeCluster, how: str) -> None:
    models, twins = [Branches(), Branches()], [Branches(), Branches()]

    def steps(model: nn.Module, optimizer: Any, rank: int, scaler: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            x, y = part(step, rank)
            loss = nn.functional.mse_loss(model(x, rank), y)
            if scaler is None:
                loss.backward()
                optimizer.step()
                continue
            scaler.scale(loss).backward()
            scaled_step(optimizer, scaler, how)

    def body(rank: int) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        steps(models[rank], wrap(models[rank]), rank, scaler)
        steps(twins[rank], wrap(twins[rank], prefix="Twin."), rank, None)

    cluster.run(body)
    assert_same_weights(twins, None)
    assert_same_weights(models, twins[0], 1e-6)


def test_scaler_divides_what_was_reduced(cluster: FakeCluster) -> None:
    models, twin = make_models(cluster), make_model()

    def body(rank: int) -> None:
        optimizer = wrap(models[rank])
        scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(models[rank], part(step, rank))).backward()
            scaler.step(optimizer)
            scaler.update()

    cluster.run(body)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(twin, batch(step)).backward()
        optimizer.step()
    assert_same_weights(models, twin, 1e-6)
