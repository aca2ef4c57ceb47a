# SPDX-License-Identifier: Apache-2.0
"""Random training programs on two ranks, compared with the sum of their gradients in one process.

A program is a list of steps; in each, every rank uses layers of its own choice in some backward
passes and then steps in one of the ways that users have. Ranks must agree to the bit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from fake_session import FakeCluster
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastps.session import current

torch = pytest.importorskip("torch")

from torch_models import WAYS  # noqa: E402

from fastps.frameworks.gradient_round import Average, Sum  # noqa: E402
from fastps.frameworks.torch.optimizer.distributed import DistributedOptimizer  # noqa: E402

RANKS, LAYERS = 2, 3


@dataclasses.dataclass(frozen=True)
class Step:
    """What happens between two updates of the weights."""

    uses: tuple[tuple[frozenset[int], ...], ...]  # [rank][pass] -> layers used
    passes: int  # announced; a rank may do fewer
    way: str
    keeps_zeros: bool
    readers: frozenset[int]  # ranks that look at the learning rate before the step


@st.composite
def steps(draw: st.DrawFn) -> Step:
    way = draw(st.sampled_from(["plain", "skip", "synchronized", "closure"]))
    passes = 1 if way == "closure" else draw(st.integers(1, 3))
    layers = st.frozensets(st.integers(0, LAYERS - 1))
    uses = st.lists(layers, max_size=passes).map(tuple)
    return Step(
        uses=tuple(draw(uses) for _ in range(RANKS)),
        passes=passes,
        way=way,
        keeps_zeros=draw(st.booleans()),
        readers=draw(st.frozensets(st.integers(0, RANKS - 1))),
    )


def make_model() -> Any:
    model = torch.nn.ModuleList([torch.nn.Linear(2, 1) for _ in range(LAYERS)])
    for place, p in enumerate(model.parameters()):
        torch.nn.init.constant_(p, 0.1 * (place + 1))
    return model


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, weight_decay=0.01)


def backward(model: Any, layers: frozenset[int], step: int, rank: int) -> None:
    x = torch.tensor([[1.0 + step, -1.0 * rank], [0.5, 2.0]])
    if layers:
        sum(model[layer](x).square().mean() for layer in sorted(layers)).backward()


def take(model: Any, optimizer: Any, step: Step, place: int, rank: int) -> None:
    def run() -> None:
        for layers in step.uses[rank]:
            backward(model, layers, place, rank)

    def closure() -> None:
        optimizer.zero_grad()
        run()

    optimizer.set_backward_passes_per_step(step.passes)
    optimizer.zero_grad(set_to_none=not step.keeps_zeros)
    if step.way == "closure":
        optimizer.step(closure)
        return
    run()
    if rank in step.readers:
        assert optimizer.param_groups[0]["lr"] == 0.1
    if step.way == "plain":
        optimizer.step()
        return
    optimizer.synchronize()
    for p in model.parameters():
        p.grad.mul_(0.5)
    if step.way == "synchronized":
        optimizer.step()
        return
    with optimizer.skip_synchronize():
        optimizer.step()


def take_alone(model: Any, optimizer: Any, step: Step, place: int, scale: float) -> None:
    """Do in one process what the ranks do together."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for rank in range(RANKS):
        for layers in step.uses[rank]:
            backward(model, layers, place, rank)
    halved = step.way in ("skip", "synchronized")
    for p in model.parameters():
        p.grad.mul_(scale * (0.5 if halved else 1))
    optimizer.step()


@pytest.mark.filterwarnings("ignore:optimizer.step.. called without:UserWarning")
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    program=st.lists(steps(), min_size=1, max_size=5),
    op=st.sampled_from([Average, Sum]),
    way=st.sampled_from([*WAYS, "shared"]),
)
def test_ranks_do_what_one_process_would(
    monkeypatch: pytest.MonkeyPatch, program: list[Step], op: Any, way: str
) -> None:
    cluster = FakeCluster(RANKS)
    cluster.can_share = way == "shared"
    monkeypatch.setattr(current, "current", cluster.current)
    models, twin = [make_model() for _ in range(RANKS)], make_model()

    def body(rank: int) -> None:
        model = models[rank]
        optimizer = DistributedOptimizer(
            make_optimizer(model), model.named_parameters(), op=op, **WAYS.get(way, {})
        )
        for place, step in enumerate(program):
            take(model, optimizer, step, place, rank)

    cluster.run(body)
    optimizer = make_optimizer(twin)
    for place, step in enumerate(program):
        take_alone(twin, optimizer, step, place, 1 / RANKS if op is Average else 1.0)
    everybody = [list(model.parameters()) for model in (*models, twin)]
    for first, second, want in zip(*everybody, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, want, rtol=1e-4, atol=1e-5)
    counts = {cluster.names(rank).count(name) for rank in range(RANKS) for name in cluster.names()}
    assert counts == {len(program)}
