# SPDX-License-Identifier: Apache-2.0
"""Which parameters DistributedOptimizer takes charge of, by which names, and what it refuses."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
from fake_session import FakeCluster

from fastps.errors import FastPSError, MismatchError, PeerLostError

torch = pytest.importorskip("torch")

from torch_models import (  # noqa: E402
    assert_same_weights,
    batch,
    loss_of,
    make_model,
    make_models,
    part,
    wrap,
)

from fastps.frameworks.torch.optimizer.distributed import DistributedOptimizer  # noqa: E402

nn = torch.nn

pytestmark = pytest.mark.usefixtures("travel")


def test_several_groups_without_names(cluster: FakeCluster) -> None:
    models = make_models(cluster)

    def body(rank: int) -> None:
        m = models[rank]
        groups = [
            {"params": m[0].parameters(), "lr": 0.1},
            {"params": [*m[2].parameters(), *m[3].parameters()], "lr": 0.01},
        ]
        optimizer = DistributedOptimizer(torch.optim.SGD(groups), bucket_bytes=0)
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


def test_a_gradient_that_gets_sparse_later_is_refused(alone: FakeCluster) -> None:
    embedding = nn.Embedding(10, 3)
    optimizer = wrap(embedding)
    embedding(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    embedding.sparse = True
    with pytest.raises(TypeError, match=r"weight' is sparse.*sparse_as_dense=True"):
        embedding(torch.tensor([1, 2])).sum().backward()


def test_frozen_parameters_join_when_they_are_freed(cluster: FakeCluster) -> None:
    models = make_models(cluster)

    def body(rank: int) -> None:
        model = models[rank]
        model[0].requires_grad_(False)
        optimizer = wrap(model, bucket_bytes=0)
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


@pytest.mark.parametrize("bucket_bytes", [0, 1024])
def test_gradients_that_are_one_piece_of_memory(alone: FakeCluster, bucket_bytes: int) -> None:
    parameters = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))]
    optimizer = DistributedOptimizer(
        torch.optim.SGD(parameters, lr=1.0), gradient_views=False, bucket_bytes=bucket_bytes
    )
    with pytest.raises(FastPSError, match=r"group0\.\d' and .* share their memory"):
        (parameters[0].view(2, 2) + parameters[1].view(2, 2)).square().sum().backward()
    del optimizer


def test_gradients_side_by_side_in_one_storage(cluster: FakeCluster) -> None:
    def body(rank: int) -> None:
        parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
        optimizer = DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
        (torch.cat(parameters) * (torch.arange(5.0) + rank)).sum().backward()
        optimizer.step()
        assert torch.cat(parameters).tolist() == [-0.5, -1.5, -2.5, -3.5, -4.5]

    cluster.run(body)


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
        optimizer = wrap(models[rank], bucket_bytes=0)
        loss_of(models[rank], part(0, rank)).backward()
        with pytest.raises(PeerLostError, match="worker 1"):
            optimizer.step()
        assert not optimizer._exchange.round.in_flight

    cluster.run(body)


def test_workers_with_other_shapes(cluster: FakeCluster) -> None:
    def body(rank: int) -> None:
        with pytest.raises(MismatchError, match=r"\(1, 4\).* on worker 1 and .*\(1, 3\)"):
            wrap(nn.Linear(3 + rank, 1))

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
