# SPDX-License-Identifier: Apache-2.0
"""CrossBarrier: step() waits for nothing, and results are those of DistributedOptimizer."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from fake_session import FakeCluster

torch = pytest.importorskip("torch")

from torch_models import assert_same_weights, batch, loss_of, make_model, part  # noqa: E402

import fastps.torch as fps  # noqa: E402
from fastps.errors import FastPSError, PeerLostError  # noqa: E402

nn = torch.nn
KINDS = [
    kind
    for name, kind in sorted(vars(torch.optim).items())
    if inspect.isclass(kind)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam")
]


class Odd(nn.Module):
    """Weights that are shared, used by another layer's forward, and by the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(6, 6, bias=False)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.first.weight
        self.bare = nn.Parameter(torch.randn(6, 3))
        self.elsewhere = nn.Linear(3, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.tied(torch.tanh(self.first(x)))) @ self.bare
        return nn.functional.linear(x, self.elsewhere.weight)


def make(kind: type, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Make an optimizer of two groups, with everything that has a default as it is."""
    first, *rest = [p for p in model.parameters() if kind.__name__ != "Muon" or p.ndim == 2]
    return kind([{"params": [first], "lr": 0.03}, {"params": rest}], lr=0.01, **options)


def train(
    model: nn.Module, optimizer: Any, rank: int, *, steps: int = 4, passes: int = 1,
    clip: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """Train with a scheduler that changes rates between step() and the next forward pass."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    for step in range(steps):
        for number in range(passes):
            loss_of(model, part(10 * step + number, rank)).backward()
        if clip is not None:
            clip()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)


def run_both(cluster: FakeCluster, make_one: Callable[[], nn.Module], wrap: Any, **how: Any):
    """Train with and without the barrier; give the models of rank 0, and compare all."""
    plain = [make_one() for _ in range(2)]
    crossed = [make_one() for _ in range(2)]
    states: list[Any] = [None, None]

    def with_barrier(rank: int) -> None:
        optimizer = fps.DistributedOptimizer(
            wrap(plain[rank]), prefix="plain.", backward_passes_per_step=how.get("passes", 1)
        )
        train(plain[rank], optimizer, rank, **how)
        states[0] = optimizer.state_dict()

    def without(rank: int) -> None:
        optimizer = fps.CrossBarrier(
            crossed[rank], wrap(crossed[rank]),
            named_parameters=[(n, p) for n, p in crossed[rank].named_parameters()],
            backward_passes_per_step=how.get("passes", 1), prefix="crossed.",
        )  # fmt: skip
        train(crossed[rank], optimizer, rank, **how)
        states[1] = optimizer.state_dict()

    cluster.run(with_barrier)
    cluster.run(without)
    assert_same_weights([*plain, *crossed], None)
    assert_same_state(*states)


def assert_same_state(one: Any, other: Any) -> None:
    """Compare state_dict()s bit for bit."""
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for key, values in one["state"].items():
        for name, value in values.items():
            found = other["state"][key][name]
            same = torch.equal(value, found) if torch.is_tensor(value) else value == found
            assert same, (key, name)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("passes", [1, 2])
def test_every_optimizer_gives_the_same_bits(
    cluster: FakeCluster, kind: type, passes: int
) -> None:
    model = Odd if kind.__name__ == "Muon" else make_model
    run_both(cluster, model, partial(make, kind), passes=passes)
    run_both(cluster, Odd, partial(make, kind), passes=passes, steps=3)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
def test_ways_to_step(cluster: FakeCluster, options: dict[str, Any]) -> None:
    run_both(cluster, make_model, partial(make, torch.optim.AdamW, **options))


def held(cluster: FakeCluster, body: Callable[[int, Any, nn.Module, Callable[[], None]], None]):
    """Run one step whose averages are kept in flight until body() calls its last argument."""
    barrier = threading.Barrier(2)
    models = [make_model() for _ in range(2)]

    def release() -> None:
        barrier.wait(20)
        cluster.release()

    def run(rank: int) -> None:
        optimizer = fps.CrossBarrier(
            models[rank], torch.optim.SGD(models[rank].parameters(), lr=0.1), bucket_bytes=0
        )
        loss_of(models[rank], part(0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        barrier.wait(20)
        cluster.hold()
        barrier.wait(20)
        loss_of(models[rank], part(1, rank)).backward()
        optimizer.step()
        body(rank, optimizer, models[rank], release)

    cluster.run(run)
    assert_same_weights(models, expected(2), tol=1e-6)
    return models


def expected(steps: int) -> nn.Module:
    """Train in one process."""
    twin = make_model()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(twin, batch(step)).backward()
        optimizer.step()
    return twin


def kinds_of(model: nn.Module) -> set[str]:
    """Name the classes of the parameters."""
    return {type(p).__name__ for p in model.parameters()}


def zeroed(optimizer: Any) -> None:
    optimizer.zero_grad()


USES: dict[str, Callable[[Any, nn.Module], Any]] = {
    "forward": lambda optimizer, model: model(batch(3)[0]),
    "state_dict": lambda optimizer, model: model.state_dict(),
    "optimizer's": lambda optimizer, model: optimizer.state_dict(),
    "settle": lambda optimizer, model: optimizer.settle(),
    "functional": lambda optimizer, model: [p.norm() for p in model.parameters()],
    "data": lambda optimizer, model: [p.data for p in model.parameters()],
    "lists": lambda optimizer, model: torch._foreach_norm(list(model.parameters())),
    "copies": lambda optimizer, model: copy.deepcopy(model),
    "zero_grad": lambda optimizer, model: model.zero_grad(),
}


@pytest.mark.parametrize("use", USES)
def test_whoever_uses_a_parameter_gets_it_stepped(cluster: FakeCluster, use: str) -> None:
    before = [make_model(), make_model()]

    def body(rank: int, optimizer: Any, model: nn.Module, release: Callable[[], None]) -> None:
        assert kinds_of(model) == {"PendingParameter"}, "step() has waited"
        assert all(isinstance(p, nn.Parameter) and p.shape for p in model.parameters())
        optimizer.zero_grad()  # waits for nothing
        assert kinds_of(model) == {"PendingParameter"}
        release()
        USES[use](optimizer, model)
        assert kinds_of(model) == {"Parameter"}
        assert all(p.grad is None for p in model.parameters())
        before[rank] = model

    held(cluster, body)


def test_each_layer_waits_for_its_own(cluster: FakeCluster) -> None:
    def body(rank: int, optimizer: Any, model: nn.Module, release: Callable[[], None]) -> None:
        release()
        model[0](batch(0)[0])
        pending = [name for name, p in model.named_parameters() if type(p) is not nn.Parameter]
        assert pending == ["2.weight", "2.bias", "3.weight", "3.bias"]

    held(cluster, body)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_what_is_compiled_waits_for_all_of_its_own(cluster: FakeCluster) -> None:
    models = [nn.Sequential(torch.jit.script(make_model())) for _ in range(2)]
    seen: list[Any] = [None, None]

    def run(rank: int) -> None:
        model = models[rank]
        optimizer = fps.CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, part(step, rank)).backward()
            optimizer.step()
        model(batch(3)[0])
        seen[rank] = model[0].state_dict()

    cluster.run(run)
    for name, value in expected(2).state_dict().items():
        torch.testing.assert_close(seen[0][name], value)
        assert torch.equal(seen[0][name], seen[1][name])


def test_clipping_by_value(cluster: FakeCluster) -> None:
    models, twins = [make_model(), make_model()], [make_model(), make_model()]

    def crossed(rank: int) -> None:
        optimizer = torch.optim.Adam(models[rank].parameters())
        train(models[rank], fps.CrossBarrier(models[rank], optimizer, clip_value=0.01), rank)

    def plain(rank: int) -> None:
        parameters = list(twins[rank].parameters())
        optimizer = fps.DistributedOptimizer(torch.optim.Adam(parameters), prefix="p.")

        def clip() -> None:
            optimizer.synchronize()
            nn.utils.clip_grad_value_(parameters, 0.01)

        with optimizer.skip_synchronize():
            train(twins[rank], optimizer, rank, clip=clip)

    cluster.run(crossed)
    cluster.run(plain)
    assert_same_weights([*models, *twins], None)


def test_scaler_and_hooks_wait_for_all(cluster: FakeCluster) -> None:
    models, calls = [make_model(), make_model()], []

    def run(rank: int) -> None:
        model = models[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = fps.CrossBarrier(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(loss_of(model, part(0, rank))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert kinds_of(model) == {"Parameter"}
        optimizer.register_step_post_hook(lambda *_: calls.append(rank))
        loss_of(model, part(1, rank)).backward()
        optimizer.step()
        assert kinds_of(model) == {"Parameter"}

    cluster.run(run)
    assert sorted(calls) == [0, 1]
    assert_same_weights(models, expected(2), tol=1e-6)


def test_scaler_leaves_steps_out(cluster: FakeCluster) -> None:
    models = [make_model(), make_model()]

    def run(rank: int) -> None:
        model = models[rank]
        optimizer = fps.CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step, factor in enumerate([1.0, float("inf"), 1.0]):
            optimizer.zero_grad()
            loss = loss_of(model, part(min(step, 1), rank)) * factor
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    cluster.run(run)
    assert_same_weights(models, expected(2), tol=1e-6)


def test_switched_on_at_a_wrapped_optimizer_and_off_by_num_steps(alone: FakeCluster) -> None:
    model = make_model()
    optimizer = fps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    crossed = fps.CrossBarrier(model, optimizer, num_steps=2)
    assert crossed is optimizer
    assert type(crossed).__name__ == "CrossBarrierSGD"
    for step in range(2):
        crossed.zero_grad()
        loss_of(model, batch(step)).backward()
        crossed.step()
    assert kinds_of(model) == {"Parameter"}
    assert_same_weights([model], expected(2))
    other = make_model()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    optimizer = fps.DistributedOptimizer(optimizer, cross_barrier=True, prefix="other.")
    for step in range(2):
        optimizer.zero_grad()
        loss_of(other, batch(step)).backward()
        optimizer.step()
    assert kinds_of(other) == {"PendingParameter"}
    assert_same_weights([other], expected(2))


def test_groups_can_be_added_and_states_loaded(alone: FakeCluster) -> None:
    model, twin = make_model(), make_model()
    kept = []
    for net, prefix in ((model, "a."), (twin, "b.")):
        optimizer = torch.optim.Adam(net[0].parameters())
        if net is model:
            optimizer = fps.CrossBarrier(net, optimizer, prefix=prefix)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(net, batch(step)).backward()
            optimizer.step()
            if step == 1:
                optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 0.1})
            if step == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        kept.append(optimizer.state_dict())
    assert_same_weights([model], twin)
    assert_same_state(*kept)


def test_what_wants_the_barrier_is_refused(alone: FakeCluster) -> None:
    model = make_model()
    optimizer = fps.CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of(model, batch(0)).backward()
    with pytest.raises(FastPSError, match="clipping by norm"):
        optimizer.synchronize()
    with pytest.raises(FastPSError, match="needs all gradients at once"):
        optimizer.skip_synchronize()
    with pytest.raises(FastPSError, match="supports neither step"):
        optimizer.step(lambda: None)
    optimizer.step()
    net = make_model()
    with pytest.raises(ValueError, match="nor LBFGS"):
        fps.CrossBarrier(net, torch.optim.LBFGS(net.parameters()), prefix="x.")
    with pytest.raises(ValueError, match="above 0"):
        fps.CrossBarrier(net, torch.optim.SGD(net.parameters()), prefix="y.", clip_value=0)
    with pytest.raises(TypeError, match="a torch module"):
        fps.CrossBarrier(optimizer, net)
    with pytest.raises(ValueError, match="cross_barrier=True needs op=Average"):
        fps.DistributedOptimizer(
            torch.optim.SGD(net.parameters()), op=fps.Sum, cross_barrier=True, prefix="z."
        )


def test_backward_after_step_of_an_earlier_forward(cluster: FakeCluster) -> None:
    def run(rank: int) -> None:
        model = nn.Linear(6, 1)
        optimizer = fps.CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses = [loss_of(model, part(step, rank)) for step in range(2)]
        losses[0].backward()
        optimizer.step()
        with pytest.raises(FastPSError, match="from a forward pass before it"):
            losses[1].backward()

    cluster.run(run)


def test_a_failure_reaches_whoever_uses_the_parameter(alone: FakeCluster) -> None:
    model = make_model()
    optimizer = fps.CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=0.1))
    alone.fail("3.weight|more", PeerLostError("worker 1 is gone"))
    loss_of(model, batch(0)).backward()
    optimizer.step()
    with pytest.raises(PeerLostError, match="worker 1 is gone"):
        model(batch(0)[0])
