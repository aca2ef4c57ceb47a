# SPDX-License-Identifier: Apache-2.0
"""Each known defect of BytePS's torch plugin, shown to be absent here.

The comment above a test says what BytePS (v0.2.5) does. Its asynchronous mode and cross-barrier
have no counterpart here yet. Of its DistributedDataParallel, that there can be one instance per
process, that skipped layers need synchronize() by hand, and that gradients do not accumulate, are
tested in test_torch_parallel.py; its defect in shared parts (compression contexts) below.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from fake_session import FakeCluster, FakeHandle

torch = pytest.importorskip("torch")

from fastps.frameworks.torch.ops import push_pull  # noqa: E402
from fastps.frameworks.torch.ops.broadcast import (  # noqa: E402
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from fastps.frameworks.torch.ops.compression import Compression  # noqa: E402
from fastps.frameworks.torch.optimizer.distributed import DistributedOptimizer  # noqa: E402

nn = torch.nn


def two_layers() -> nn.Module:
    layers = [nn.Linear(3, 2), nn.Linear(2, 1)]
    for layer in layers:
        nn.init.constant_(layer.weight, 0.5)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


# BytePS: backward of push_pull gives 3 gradients for 5 inputs, so autograd raises.
def test_backward_gives_one_gradient_per_input(cluster: FakeCluster) -> None:
    def body(rank: int) -> None:
        x = torch.full((3,), float(rank), requires_grad=True)
        push_pull.push_pull(x, True, "x", 0, 0, Compression.none).sum().backward()
        assert torch.equal(x.grad, torch.ones(3))

    cluster.run(body)


# BytePS: push_pull(name=None) is an AssertionError (gone under python -O); the asynchronous forms
# call all unnamed tensors byteps.noname.0, so that they collide.
@pytest.mark.parametrize(
    "call", [push_pull.push_pull, push_pull.push_pull_async, push_pull.push_pull_inplace]
)
def test_a_missing_name_is_said(alone: FakeCluster, call: Any) -> None:
    with pytest.raises(ValueError, match="needs a name"):
        call(torch.ones(1))


# BytePS: no function for int8, none for bfloat16.
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16], ids=str)
def test_int8_and_bfloat16(cluster: FakeCluster, dtype: torch.dtype) -> None:
    def body(rank: int) -> None:
        x = torch.full((4,), 3 + rank, dtype=dtype)
        assert push_pull.push_pull(x, False, "x").tolist() == [7] * 4

    cluster.run(body)


# BytePS: averages of integers depend on the torch version (floor_divide or div_), on the worker.
def test_integer_average_is_the_floor(cluster: FakeCluster) -> None:
    def body(rank: int) -> None:
        x = torch.tensor([3, -3, 4]) + rank
        assert push_pull.push_pull(x, True, "x").tolist() == [3, -3, 4]

    cluster.run(body)


# BytePS: synchronize() of an unknown handle gives None.
def test_unknown_handles_are_refused(alone: FakeCluster) -> None:
    with pytest.raises(TypeError, match="handle"):
        push_pull.synchronize(10**6)


# BytePS: synchronize() polls with sleeps of 1 ms.
def test_waiting_is_one_wait(alone: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: FakeHandle) -> bool:
        raise AssertionError("polled")

    monkeypatch.setattr(FakeHandle, "poll", refuse)
    handle = push_pull.push_pull_async(torch.ones(1), name="x")
    push_pull.synchronize(handle)
    assert handle.handle.waits == 1


# BytePS: a tensor is initialised at its first use, which blocks at a global barrier: in the first
# backward pass, once per gradient.
def test_gradients_are_declared_before_the_first_backward(alone: FakeCluster) -> None:
    model = two_layers()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters()))
    declared = [event.name for event in alone.events if event.kind == "declare"]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert sorted(declared) == sorted(alone.names())


# BytePS: without named_parameters names count from zero in each group, and the table of delays
# has only given names, so the hook raises KeyError.
def test_no_names_and_several_groups(cluster: FakeCluster) -> None:
    models = [two_layers(), two_layers()]

    def body(rank: int) -> None:
        groups = [{"params": layer.parameters()} for layer in models[rank]]
        optimizer = DistributedOptimizer(torch.optim.SGD(groups, lr=0.1), bucket_bytes=0)
        models[rank](torch.ones(1, 3) * rank).sum().backward()
        optimizer.step()

    cluster.run(body)
    assert len(set(cluster.names())) == 4
    assert torch.equal(models[0][0].weight, models[1][0].weight)


# BytePS: nothing checks that all parameters are named; the unnamed ones are never averaged.
def test_unnamed_parameters_are_refused(alone: FakeCluster) -> None:
    model = two_layers()
    named = list(model.named_parameters())[:-1]
    with pytest.raises(ValueError, match="does not name every parameter"):
        DistributedOptimizer(torch.optim.SGD(model.parameters()), named)


# BytePS: the priority of gradients is always 0.
def test_priorities_differ(alone: FakeCluster) -> None:
    model = two_layers()
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters()), model.named_parameters(), bucket_bytes=0
    )
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    urgency = {event.name: event.priority for event in alone.events if event.kind == "push_pull"}
    assert urgency["Gradient.0.weight"] > urgency["Gradient.0.bias"]
    assert urgency["Gradient.0.bias"] > urgency["Gradient.1.weight"]


# BytePS: hooks only where size() > 1, so a script that accumulates wrongly runs alone and fails
# on two workers.
def test_one_worker_behaves_as_two(alone: FakeCluster) -> None:
    model = two_layers()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters()))
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(Exception, match="backward_passes_per_step"):
        model(torch.ones(1, 3)).sum().backward()
    del optimizer


# BytePS: p.grad is filled with zeros when the optimizer is made.
def test_gradients_stay_none_until_used(alone: FakeCluster) -> None:
    model = two_layers()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    del optimizer


# BytePS: the wrapped optimizer starts without the state the given one had.
def test_momentum_survives_wrapping(alone: FakeCluster) -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    wrapped = DistributedOptimizer(optimizer)
    assert len(wrapped.state) == 4


# BytePS: step(closure) averages before the closure computes the gradients, then steps with local
# ones.
def test_closure_gradients_are_reduced(cluster: FakeCluster) -> None:
    models = [two_layers(), two_layers()]

    def body(rank: int) -> None:
        optimizer = DistributedOptimizer(torch.optim.SGD(models[rank].parameters(), lr=0.1))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = models[rank](torch.ones(1, 3) * (rank + 1)).sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    cluster.run(body)
    assert torch.equal(models[0][0].weight, models[1][0].weight)


# BytePS: broadcast_parameters waits for each tensor before the next one starts.
def test_parameters_travel_together(cluster: FakeCluster) -> None:
    params = {f"p{i}": torch.ones(2) for i in range(50)}
    cluster.run(lambda rank: broadcast_parameters({k: v.clone() for k, v in params.items()}))
    assert len({event.submit for event in cluster.events if event.rank == 0}) == 1


# BytePS: broadcast is zeros plus a sum, so -0.0 becomes 0.0.
def test_broadcast_keeps_bits(cluster: FakeCluster) -> None:
    def body(rank: int) -> None:
        x = torch.tensor([-0.0, float("nan"), float("inf")]) if rank == 0 else torch.ones(3)
        broadcast_parameters({"x": x})
        assert x.view(torch.int32).tolist() == [-(2**31), 0x7FC00000, 0x7F800000]

    cluster.run(body)


# BytePS: broadcast_optimizer_state calls .cuda() on options, uses collections.Iterable (gone from
# Python 3.10), and fails on options that are None.
def test_optimizer_options_on_the_cpu(cluster: FakeCluster) -> None:
    models = [two_layers(), two_layers()]
    optimizers = [
        torch.optim.Adam(models[rank].parameters(), lr=0.1 * (rank + 1), foreach=None)
        for rank in range(2)
    ]
    cluster.run(lambda rank: broadcast_optimizer_state(optimizers[rank]))
    assert optimizers[1].param_groups[0]["lr"] == 0.1
    assert optimizers[1].param_groups[0]["foreach"] is None


# BytePS: state is made by a step with zero gradients, which changes weights under weight decay
# and fails for optimizers that need more than gradients.
def test_making_state_does_not_step(cluster: FakeCluster) -> None:
    models = [two_layers(), two_layers()]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.5, weight_decay=0.5) for m in models]
    cluster.run(lambda rank: broadcast_optimizer_state(optimizers[rank]))
    assert torch.equal(models[1][0].weight, two_layers()[0].weight)
    assert not optimizers[1].state


# BytePS: broadcast_object unpickles what came from the network.
def test_no_pickle_is_loaded() -> None:
    code = (
        "import sys, torch; before = 'cloudpickle' in sys.modules; "
        "import fastps.frameworks.torch.ops.broadcast as b; import inspect; "
        "print('cloudpickle' in sys.modules and not before, 'pickle' in vars(b))"
    )
    output = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    assert output.split() == ["False", "False"]


# BytePS: broadcast_object without a name takes the class of the object, which is another one on
# ranks that pass None.
def test_unnamed_object(cluster: FakeCluster) -> None:
    got = cluster.run(lambda rank: broadcast_object({"epoch": 3} if rank == 0 else None))
    assert got == [{"epoch": 3}] * 2


# BytePS: DistributedDataParallel decompresses every gradient with the context of the last one.
def test_each_gradient_has_its_own_compression_context(alone: FakeCluster) -> None:
    parameters = [
        nn.Parameter(torch.ones(2, dtype=dtype))
        for dtype in (torch.float64, torch.float32, torch.float16)
    ]
    optimizer = DistributedOptimizer(
        torch.optim.SGD(parameters, lr=1.0), compression=Compression.fp16
    )
    sum(p.double().sum() for p in parameters).backward()
    optimizer.step()
    assert [p.grad.dtype for p in parameters] == [torch.float64, torch.float32, torch.float16]
    assert all(torch.equal(p.detach(), torch.zeros_like(p)) for p in parameters)


# BytePS: there is no is_initialized() and no barrier(); importing a module of the plugin patches
# the optimizer for everybody and opens a log file.
def test_face_is_complete_and_import_is_quiet(tmp_path: Any) -> None:
    code = (
        "import torch; before = dict(vars(torch.optim.Optimizer)); import fastps.torch as fps; "
        "assert dict(vars(torch.optim.Optimizer)) == before; "
        "print(fps.is_initialized(), callable(fps.barrier), *map(callable, "
        "(getattr(fps, name) for name in fps.__all__ if name[0].islower()"
        " and name not in ('global_process_set', 'elastic', 'checkpoint'))))"
    )
    output = subprocess.check_output(
        [sys.executable, "-c", code], text=True, cwd=tmp_path, timeout=60
    )
    assert output.split()[0] == "False"
    assert set(output.split()[1:]) == {"True"}
    assert not list(tmp_path.iterdir())
