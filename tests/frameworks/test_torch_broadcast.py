# SPDX-License-Identifier: Apache-2.0
"""Parameters, optimizer state and values of one rank arrive on all, with their types."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import pytest
from fake_session import FakeCluster

torch = pytest.importorskip("torch")

from fastps.frameworks.torch.ops.broadcast import (  # noqa: E402
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from fastps.frameworks.torch.ops.push_pull import push_pull  # noqa: E402

OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.99), "amsgrad": True}),
    (torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
    (torch.optim.Adagrad, {}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.Rprop, {}),
]


def small_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2, bias=False)]
    return torch.nn.Sequential(*layers)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.arange(20.0).reshape(5, 4) + step).square().sum().backward()
        optimizer.step()


def same(left: Any, right: Any) -> bool:
    """Compare nested values with their types, tensors by bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("form", ["state_dict", "named_parameters", "list", "parameters"])
@pytest.mark.parametrize("root", [0, 1])
def test_parameters(cluster: FakeCluster, form: str, root: int) -> None:
    models = [small_model(0), small_model(1)]
    want = {k: v.clone() for k, v in models[root].state_dict().items()}

    def body(rank: int) -> None:
        model = models[rank]
        params = list(model.state_dict().items()) if form == "list" else getattr(model, form)()
        broadcast_parameters(params, root_rank=root)

    cluster.run(body)
    for model in models:
        names = dict(model.named_parameters()) if form.endswith("parameters") else want
        got = model.state_dict()
        assert all(torch.equal(got[name], want[name]) for name in names)
    # One submit per rank and dtype (state_dict() has a counter), and names with BytePS's prefix.
    submits = {(e.rank, e.submit) for e in cluster.events}
    assert len(submits) == (2 if form.endswith("parameters") else 4)
    first = "Parameter.0" if form == "parameters" else "Parameter.0.weight"
    assert cluster.names(kind="broadcast")[0] == first


def test_parameters_of_mixed_kinds(cluster: FakeCluster) -> None:
    def body(rank: int) -> None:
        sign = 1.0 if rank == 1 else -1.0
        params = {
            "transposed": torch.full((2, 3), sign).t(),
            "strided": (torch.ones(8) * sign)[::2],
            "bf16": torch.full((3,), sign, dtype=torch.bfloat16),
            "scalar": torch.tensor(sign),
            "empty": torch.ones(0),
            "nan": torch.full((2,), math.nan if rank else 0.0),
            "count": torch.tensor(7 * rank),
            "flag": torch.tensor([bool(rank)]),
            "parameter": torch.nn.Parameter(torch.full((2,), sign)),
            "complex": torch.nn.Parameter(torch.full((2,), sign * 1j)),
            "conjugate": torch.full((2,), sign * 1j).conj(),
            "strided complex": torch.full((4,), sign + 1j, dtype=torch.complex128)[::2],
            "complex scalar": torch.tensor(sign * 1j),
            "no complex": torch.ones(0, dtype=torch.complex64).conj(),
        }
        params["tied"] = params["parameter"]
        broadcast_parameters(params, root_rank=1)
        for name in ("transposed", "strided", "bf16", "scalar", "parameter"):
            assert bool((params[name] == 1).all()), name
        for name, value in (("complex", 1j), ("conjugate", -1j), ("strided complex", 1 + 1j)):
            assert bool((params[name] == value).all()), name
        assert params["complex scalar"] == 1j
        assert params["nan"].isnan().all()
        assert params["count"] == 7
        assert params["flag"].tolist() == [True]
        assert params["transposed"].stride() == (1, 3)

    cluster.run(body)


@pytest.mark.parametrize("root", [0, 1])
def test_what_expand_made_takes_the_root_s_values(cluster: FakeCluster, root: int) -> None:
    """Position ids of transformers are such buffers."""
    tensors = [torch.arange(3.0).add(rank)[:, None].expand(3, 2) for rank in range(2)]
    want = tensors[root].clone()
    cluster.run(lambda rank: broadcast_parameters({"ids": tensors[rank]}, root))
    for tensor in tensors:
        assert tensor.stride() == (1, 0)
        assert torch.equal(tensor, want)


def _nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


STRANGE = {
    "is nested.*unbind": lambda: _nested(torch.strided),
    "is nested.*to_padded_tensor": lambda: _nested(torch.jagged),
    r"is masked.*to_tensor\(0\.0\)": lambda: torch.masked.masked_tensor(
        torch.ones(2), torch.tensor([True, False])
    ),
    r"is a zero tensor.*clone\(\)": lambda: torch._efficientzerotensor(3),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of")
@pytest.mark.parametrize("told", STRANGE)
def test_strange_tensors_are_named_on_all_ranks(cluster: FakeCluster, told: str) -> None:
    tensor = STRANGE[told]()

    def body(rank: int) -> None:
        with pytest.raises((TypeError, ValueError), match=f"'Parameter.model.odd' {told}"):
            broadcast_parameters({"model.even": torch.ones(2), "model.odd": tensor})

    cluster.run(body)
    assert not cluster.names(kind="broadcast")


def test_zeros_of_autograd_are_sent_as_zeros(cluster: FakeCluster) -> None:
    def body(rank: int) -> None:
        zeros = torch._efficientzerotensor(3)
        assert push_pull(zeros, False, "zeros").tolist() == [0.0] * 3
        found = broadcast_object(zeros if rank == 0 else None)  # the root gets its own back
        assert rank == 0 or found.tolist() == [0.0] * 3

    cluster.run(body)


def test_no_parameters(cluster: FakeCluster) -> None:
    cluster.run(lambda rank: broadcast_parameters({}))
    assert not cluster.events


@pytest.mark.parametrize("params", [None, 3, torch.ones(2), ["a"], [(torch.ones(1),)], "ab"])
def test_parameters_of_a_wrong_form(alone: FakeCluster, params: Any) -> None:
    with pytest.raises(ValueError, match="params must be a mapping"):
        broadcast_parameters(params)


@pytest.mark.parametrize("root", [-1, 2, True, None, 0.0])
def test_wrong_root(cluster: FakeCluster, root: Any) -> None:
    def body(rank: int) -> None:
        with pytest.raises(ValueError, match="root_rank must be an integer from 0 to 1"):
            broadcast_parameters({"a": torch.ones(1)}, root_rank=root)
        with pytest.raises(ValueError, match="root_rank must be an integer from 0 to 1"):
            broadcast_object(1, root_rank=root)

    cluster.run(body)


def test_object(cluster: FakeCluster) -> None:
    value = {
        "epoch": 3,
        "best": 0.5,
        "betas": (0.9, [1, (2,)]),
        "none": None,
        "on": True,
        7: "seven",
        "big": 2**80,
        "raw": b"\x00\xff",
        "tensors": [torch.arange(3), torch.ones(2, 2, dtype=torch.bfloat16), torch.tensor(1.5)],
        "complex": [torch.tensor([1 + 2j, 3j]).conj(), torch.tensor(1j), torch.ones(0) + 0j],
    }

    def body(rank: int) -> Any:
        return broadcast_object(value if rank == 1 else None, root_rank=1, name="state")

    got = cluster.run(body)
    assert got[1] is value
    assert same(got[0], value)


def test_object_twice_with_other_shapes(cluster: FakeCluster) -> None:
    def body(rank: int) -> None:
        for count in (2, 5):
            got = broadcast_object([torch.ones(count)] if rank == 0 else "ignored")
            assert got[0].tolist() == [1.0] * count

    cluster.run(body)


def test_an_object_that_cannot_travel_is_refused_on_all_ranks(cluster: FakeCluster) -> None:
    def body(rank: int) -> None:
        with pytest.raises(TypeError, match="object cannot be broadcast"):
            broadcast_object({"lock": object()} if rank == 0 else None)

    cluster.run(body)


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_optimizer_state_is_made_where_there_is_none(
    cluster: FakeCluster, kind: type, options: dict[str, Any]
) -> None:
    models = [small_model(0), small_model(0)]
    optimizers = [kind(model.parameters(), **options) for model in models]
    train(models[1], optimizers[1], 3)
    optimizers[1].param_groups[0]["lr"] = 0.125
    want = optimizers[1].state_dict()
    models[0].load_state_dict(models[1].state_dict())
    cluster.run(lambda rank: broadcast_optimizer_state(optimizers[rank], root_rank=1))
    assert same(optimizers[0].state_dict(), want)
    assert same(optimizers[1].state_dict(), want)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 2)
    assert same(models[0].state_dict(), models[1].state_dict())


def test_optimizer_state_is_dropped_where_the_root_has_none(cluster: FakeCluster) -> None:
    models = [small_model(0), small_model(0)]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    train(models[1], optimizers[1], 2)
    # with the model, as scripts for Horovod say it
    cluster.run(lambda rank: broadcast_optimizer_state(optimizers[rank], 0, models[rank]))
    assert not optimizers[1].state_dict()["state"]
    cluster.run(lambda rank: broadcast_optimizer_state(optimizers[rank], 0, model=models[rank]))


def test_the_state_of_complex_parameters(cluster: FakeCluster) -> None:
    optimizers = []
    for steps in (0, 2):
        weight = torch.nn.Parameter(torch.tensor([1 + 2j, 3j]))
        optimizers.append(torch.optim.Adam([weight], lr=0.1))
        for _ in range(steps):
            (weight * (2 + 1j)).abs().square().sum().backward()
            optimizers[-1].step()
    cluster.run(lambda rank: broadcast_optimizer_state(optimizers[rank], root_rank=1))
    states = [one.state_dict()["state"] for one in optimizers]
    assert states[0][0]["exp_avg"].is_complex()
    assert same(*states)


def test_options_keep_their_types(cluster: FakeCluster) -> None:
    options = [{"foreach": None, "capturable": False, "lr": 1, "eps": 1e-8, "betas": (0.9, 0.99)},
               {"foreach": False, "lr": 0.5}]  # fmt: skip
    models = [small_model(0), small_model(0)]
    optimizers = [
        torch.optim.Adam(m.parameters(), **o) for m, o in zip(models, options, strict=True)
    ]
    cluster.run(lambda rank: broadcast_optimizer_state(optimizers[rank]))
    group = optimizers[1].param_groups[0]
    assert group["foreach"] is None
    assert type(group["lr"]) is int
    assert group["betas"] == (0.9, 0.99)
    assert type(group["betas"]) is tuple
    assert group["capturable"] is False


def test_lbfgs_is_refused(alone: FakeCluster) -> None:
    optimizer = torch.optim.LBFGS(small_model(0).parameters())
    with pytest.raises(ValueError, match="LBFGS"):
        broadcast_optimizer_state(optimizer)


def test_optimizers_of_other_groups(cluster: FakeCluster) -> None:
    model = small_model(0)
    parameters = list(model.parameters())
    optimizers = [
        torch.optim.SGD(parameters),
        torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:]}]),
    ]

    def body(rank: int) -> None:
        if rank == 0:
            broadcast_optimizer_state(optimizers[0])
            return
        with pytest.raises(ValueError, match="build the same optimizer"):
            broadcast_optimizer_state(optimizers[1])

    cluster.run(body)


def test_scheduler_state_as_an_object(cluster: FakeCluster) -> None:
    model = small_model(0)
    schedulers = []
    for steps in (0, 4):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        schedulers.append(scheduler)
    want = schedulers[1].state_dict()

    def body(rank: int) -> Any:
        return broadcast_object(want if rank == 1 else None, root_rank=1)

    got = cluster.run(body)[0]
    assert same(dict(got), dict(OrderedDict(want)))
