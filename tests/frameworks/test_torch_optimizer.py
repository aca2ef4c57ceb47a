# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer in a job of threads, compared with one process over the same batches."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from fake_session import FakeCluster

from fastps.errors import FastPSError, MismatchError, PeerLostError

torch = pytest.importorskip("torch")

from fastps.frameworks._adapter import Average, Sum  # noqa: E402
from fastps.frameworks.torch.compression import Compression  # noqa: E402
from fastps.frameworks.torch.optimizer import DistributedOptimizer  # noqa: E402

nn = torch.nn


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 1))


def batch(step: int, count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(count, 6, generator=generator), torch.randn(count, 1, generator=generator)


def part(step: int, rank: int, size: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(x.chunk(size)[rank] for x in batch(step))


def loss_of(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(data[0]), data[1])


def make_models(cluster: FakeCluster) -> list[nn.Module]:
    return [make_model() for _ in range(cluster.size)]


def assert_same_weights(models: list[nn.Module], twin: nn.Module | None, tol: float = 0) -> None:
    for name, value in models[0].state_dict().items():
        for other in models[1:]:
            assert torch.equal(value, other.state_dict()[name]), name
        if twin is not None:
            torch.testing.assert_close(value, twin.state_dict()[name], rtol=tol, atol=tol)


def wrap(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> Any:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return DistributedOptimizer(optimizer, model.named_parameters(), **options)


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
        optimizer = wrap(models[rank])
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


class Branches(nn.Module):
    """Ranks use different layers; one layer is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.arms = nn.ModuleList([nn.Linear(6, 1) for _ in range(2)])
        self.nobody = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, arm: int) -> torch.Tensor:
        return self.arms[arm](x)


def test_unused_parameters_count_as_zero(cluster: FakeCluster) -> None:
    models = [Branches(), Branches()]
    before = models[0].nobody.weight.clone()

    def body(rank: int) -> None:
        optimizer = wrap(models[rank])
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
    optimizer = wrap(model)
    optimizer.set_backward_passes_per_step(2)
    loss_of(model, batch(0)).backward()
    assert not alone.names()
    loss_of(model, batch(0)).backward()
    assert len(alone.names()) == 6
    with pytest.raises(FastPSError, match="communicated"):
        optimizer.set_backward_passes_per_step(3)
    optimizer.step()
    with pytest.raises(ValueError, match="integer from 1"):
        optimizer.set_backward_passes_per_step(0)


def test_more_passes_than_announced(alone: FakeCluster) -> None:
    model = make_model()
    optimizer = wrap(model)
    loss_of(model, batch(0)).backward()
    with pytest.raises(FastPSError, match=r"more than 1 time.*backward_passes_per_step"):
        loss_of(model, batch(0)).backward()
    with pytest.raises(FastPSError, match="changed while"):
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


@pytest.mark.parametrize("with_skip", [True, False])
def test_clipping_between_synchronize_and_step(cluster: FakeCluster, with_skip: bool) -> None:
    models, twin = make_models(cluster), make_model()

    def body(rank: int) -> None:
        optimizer = wrap(models[rank], op=Sum)
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


def test_a_foreign_compression(cluster: FakeCluster) -> None:
    models, twin = make_models(cluster), make_model()

    def body(rank: int) -> None:
        optimizer = wrap(models[rank], compression=Doubling())
        loss_of(models[rank], part(0, rank)).backward()
        optimizer.step()

    cluster.run(body)
    loss_of(twin, batch(0)).backward()
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
            optimizer = wrap(models[rank], plain)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        if before:
            optimizer = wrap(models[rank], plain)
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
        optimizer = wrap(models[rank])
        for step in range(3):
            optimizer.zero_grad()
            x, y = part(step, rank)
            nn.functional.mse_loss(models[rank](x, 0), y).backward()
            if rank == 0:
                assert optimizer.param_groups[0]["lr"] == 0.1
                assert not optimizer._exchange.round.in_flight
            nn.functional.mse_loss(models[rank](x, 1), y).backward()
            optimizer.step()

    cluster.run(body)
    assert_same_weights(models, None)
    assert len(cluster.names(0)) == 18


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


def test_several_groups_without_names(cluster: FakeCluster) -> None:
    models = make_models(cluster)

    def body(rank: int) -> None:
        m = models[rank]
        groups = [
            {"params": m[0].parameters(), "lr": 0.1},
            {"params": [*m[2].parameters(), *m[3].parameters()], "lr": 0.01},
        ]
        optimizer = DistributedOptimizer(torch.optim.SGD(groups))
        for step in range(2):
            optimizer.zero_grad()
            loss_of(m, part(step, rank)).backward()
            optimizer.step()

    cluster.run(body)
    assert_same_weights(models, None)
    names = [e.name for e in cluster.events if e.kind == "declare" and e.rank == 0]
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert names == [f"Gradient.group{group}.{place}" for group, place in places]


def test_names_are_checked(alone: FakeCluster) -> None:
    model = make_model()

    def attempt(named: Any) -> None:
        DistributedOptimizer(torch.optim.SGD(model.parameters()), named)

    named = list(model.named_parameters())
    with pytest.raises(ValueError, match=r"tuples \(name, parameter\)"):
        attempt(model.parameters())
    with pytest.raises(ValueError, match=r"tuples \(name, parameter\)"):
        attempt([list(pair) for pair in named])
    with pytest.raises(ValueError, match=r"more than once: a, b$"):
        attempt([(name, named[i][1]) for i, name in enumerate("aabbcd")])
    with pytest.raises(ValueError, match=r"model\.named_parameters\(\).*group 0 parameter 5"):
        attempt(named[:5])
    assert not alone.events


def test_arguments_are_checked(alone: FakeCluster) -> None:
    model = make_model()
    for options in ({"op": "sum"}, {"backward_passes_per_step": 0}):
        with pytest.raises(ValueError, match=r"op must be|backward_passes"):
            wrap(model, **options)
    with pytest.raises(TypeError, match="torch optimizer"):
        DistributedOptimizer(model)
    optimizer = wrap(model)
    with pytest.raises(ValueError, match="already"):
        DistributedOptimizer(optimizer)
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)


def test_sparse_gradients_are_refused(alone: FakeCluster) -> None:
    embedding = nn.Embedding(10, 3, sparse=True)
    optimizer = wrap(embedding)
    with pytest.raises(TypeError, match=r"weight' is sparse.*sparse=False"):
        embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match=r"weight' is sparse.*sparse=False"):
        optimizer.step()
    assert not alone.names()


def test_complex_parameters_are_refused(alone: FakeCluster) -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match="complex64"):
        DistributedOptimizer(torch.optim.SGD([parameter]))


def test_frozen_parameters_join_when_they_are_freed(cluster: FakeCluster) -> None:
    models = make_models(cluster)

    def body(rank: int) -> None:
        model = models[rank]
        model[0].requires_grad_(False)
        optimizer = wrap(model)
        for step in range(4):
            model[0].requires_grad_(step >= 2)
            optimizer.zero_grad()
            loss_of(model, part(step, rank)).backward()
            optimizer.step()

    cluster.run(body)
    assert_same_weights(models, None)
    assert cluster.names(0).count("Gradient.0.weight") == 2
    assert not torch.equal(models[0][0].weight, make_model()[0].weight)


def test_add_param_group(cluster: FakeCluster) -> None:
    models = make_models(cluster)

    def body(rank: int) -> None:
        m = models[rank]
        optimizer = wrap(m, torch.optim.SGD(m[0].parameters(), lr=0.1))
        optimizer.add_param_group({"params": list(m[3].parameters()), "lr": 0.2})
        with pytest.raises(ValueError, match="does not name every"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        assert len(optimizer.param_groups) == 2
        for step in range(2):
            optimizer.zero_grad()
            loss_of(m, part(step, rank)).backward()
            optimizer.step()

    cluster.run(body)
    assert torch.equal(models[0][3].weight, models[1][3].weight)
    assert not torch.equal(models[0][3].weight, make_model()[3].weight)


def test_unusual_parameters(cluster: FakeCluster) -> None:
    """Scalars, empty and transposed ones, bfloat16, and two that share storage."""

    def body(rank: int) -> list[torch.Tensor]:
        base = torch.zeros(4)
        parameters = [
            nn.Parameter(torch.tensor(0.0)),
            nn.Parameter(torch.zeros(0)),
            nn.Parameter(torch.zeros(3, 2).t()),
            nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)),
            nn.Parameter(base[:2]),
            nn.Parameter(base[2:]),
            nn.Parameter(torch.zeros(1, 2, 3, 3).to(memory_format=torch.channels_last)),
            nn.Parameter(torch.zeros(2, dtype=torch.float64)),
        ]
        optimizer = DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
        for _ in range(2):
            optimizer.zero_grad()
            coefficients = [torch.arange(p.numel()).reshape(p.shape) + rank for p in parameters]
            sum((p * c).sum() for p, c in zip(parameters, coefficients, strict=True)).backward()
            optimizer.step()
        return parameters

    for parameters in cluster.run(body):
        for p in parameters:
            want = -2 * (torch.arange(p.numel()).reshape(p.shape) + 0.5)
            assert torch.equal(p.detach(), want.to(p.dtype))


def test_tied_weights(cluster: FakeCluster) -> None:
    models = make_models(cluster)

    def body(rank: int) -> None:
        m = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
        m[1].weight = m[0].weight
        m[0].weight.data.copy_(torch.eye(6))
        models[rank] = m
        optimizer = DistributedOptimizer(
            torch.optim.SGD(m.parameters(), lr=0.1),
            m.named_parameters(remove_duplicate=False),
        )
        m(part(0, rank)[0]).square().mean().backward()
        optimizer.step()

    cluster.run(body)
    assert_same_weights(models, None)


def test_errors_reach_step_and_name_the_cause(cluster: FakeCluster) -> None:
    cluster.fail("2.weight", PeerLostError("worker 1 (host h, pid 7) died"))
    models = make_models(cluster)

    def body(rank: int) -> None:
        optimizer = wrap(models[rank])
        loss_of(models[rank], part(0, rank)).backward()
        with pytest.raises(PeerLostError, match="worker 1"):
            optimizer.step()
        assert not optimizer._exchange.round.in_flight

    cluster.run(body)


def test_workers_with_other_shapes(cluster: FakeCluster) -> None:
    def body(rank: int) -> None:
        wrap(nn.Linear(3 + rank, 1))

    with pytest.raises(MismatchError):
        cluster.run(body)


def test_a_dropped_optimizer_leaves_no_hooks(alone: FakeCluster) -> None:
    model = make_model()
    optimizer = wrap(model)
    alive = weakref.ref(optimizer._exchange)
    del optimizer
    gc.collect()
    assert alive() is None
    loss_of(model, batch(0)).backward()
    assert not alone.names()
    again = wrap(model)
    again.zero_grad()
    loss_of(model, batch(0)).backward()
    again.step()


def test_two_models_with_the_same_names(cluster: FakeCluster) -> None:
    """As in adversarial training: one prefix each."""
    pairs = [(make_model(), nn.Sequential(nn.Linear(2, 6))) for _ in range(2)]

    def body(rank: int) -> None:
        judge, maker = pairs[rank]
        first = wrap(judge)
        second = wrap(maker, prefix="Maker.")
        for _ in range(2):
            noise = torch.randn(4, 2)
            judge.requires_grad_(False)
            second.zero_grad()
            judge(maker(noise)).mean().backward()
            second.step()
            judge.requires_grad_(True)
            first.zero_grad()
            judge(maker(noise).detach()).mean().backward()
            first.step()

    cluster.run(body)
    assert_same_weights([pair[0] for pair in pairs], None)
    assert_same_weights([pair[1] for pair in pairs], None)


def test_gradients_of_gradients(cluster: FakeCluster) -> None:
    """A gradient penalty: p.grad stays out of the graph, the step stays equal."""
    models = make_models(cluster)

    def body(rank: int) -> None:
        model = models[rank]
        optimizer = wrap(model)
        x = part(0, rank)[0].requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().mean().backward()
        optimizer.step()

    cluster.run(body)
    assert_same_weights(models, None)
