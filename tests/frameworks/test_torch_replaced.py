# SPDX-License-Identifier: Apache-2.0
"""What a user replaces, converts or wraps again after wrapping: it works, or says what to do."""

from __future__ import annotations

from typing import Any

import pytest
from fake_session import FakeCluster

from fastps.errors import FastPSError

torch = pytest.importorskip("torch")

from torch.nn.parallel import DistributedDataParallel as TorchParallel  # noqa: E402
from torch_models import ALL_WAYS, batch, loss_of, make_model, make_models, part  # noqa: E402

from fastps.frameworks.gradient_round import Sum  # noqa: E402
from fastps.frameworks.torch.gradients.data_parallel import DistributedDataParallel  # noqa: E402
from fastps.frameworks.torch.optimizer.distributed import DistributedOptimizer  # noqa: E402

nn = torch.nn


def one_weight(value: float = 1.0) -> nn.Module:
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, value)
    return module


def slope(model: nn.Module, value: float) -> None:
    model(torch.full((1, 1), float(value))).sum().backward()


def test_sums_are_added_once(cluster: FakeCluster, travel: str) -> None:
    """Over backward passes with and without no_sync(), after changes by the user, and alone."""

    def body(rank: int) -> list[float]:
        module = one_weight()
        model = DistributedDataParallel(module, op=Sum, **ALL_WAYS[travel])
        weight, seen = module.weight, []

        def note() -> None:
            seen.append(weight.grad.item())

        slope(model, 1.0)
        note()  # 2
        slope(model, 1.0)
        note()  # 4
        with model.no_sync():
            slope(model, 1.0 + rank)
        slope(model, 1.0)
        note()  # 4 + 3 + 2
        weight.grad.mul_(2)
        torch.autograd.grad(model(torch.ones(1, 1)).sum(), weight)
        note()  # 18: nothing was added
        slope(model, rank)
        note()  # 19
        slope(module, 1.0 + rank)  # without the wrapper
        slope(model, 0.0)
        note()  # 22
        model.zero_grad(set_to_none=False)
        slope(model, 1.0)
        note()  # 2
        with model.no_sync():
            slope(model, 1.0)
        model.zero_grad()
        slope(model, 3.0)
        note()  # 6
        return seen

    assert cluster.run(body) == [[2, 4, 9, 18, 19, 22, 2, 6]] * 2


@pytest.mark.filterwarnings("ignore:optimizer.step.. called without:UserWarning")
def test_sums_of_an_optimizer_are_added_once(cluster: FakeCluster, travel: str) -> None:
    """Over steps without zero_grad(), each with all the ways of doing one."""

    def body(rank: int) -> list[float]:
        model = one_weight()
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), op=Sum, **ALL_WAYS[travel]
        )
        weight, seen = model.weight, []

        def note() -> None:
            seen.append(weight.grad.item())

        for _ in range(2):
            slope(model, 1.0)
            optimizer.step()
            note()  # 2, 4
        slope(model, 1.0 + rank)
        optimizer.synchronize()
        weight.grad.mul_(2)
        optimizer.step()
        note()  # 14
        torch.autograd.grad(model(torch.ones(1, 1)).sum(), weight)
        optimizer.step(lambda: slope(model, rank))
        note()  # 15
        optimizer.set_backward_passes_per_step(2)
        slope(model, 1.0)
        slope(model, rank)
        assert optimizer.param_groups
        optimizer.step()
        note()  # 18
        slope(model, 5.0)
        optimizer.zero_grad(set_to_none=False)
        slope(model, 1.0)
        slope(model, 1.0)
        optimizer.step()
        note()  # 4
        weight.grad = torch.full_like(weight, 1.0 + rank)  # this worker's own
        optimizer.step()
        note()  # 3
        optimizer.zero_grad()
        optimizer.step()
        note()  # 0
        return seen

    assert cluster.run(body) == [[2, 4, 14, 15, 18, 4, 3, 0]] * 2


def test_sums_of_layers_that_a_backward_pass_leaves_out(cluster: FakeCluster, travel: str) -> None:
    class Arms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.arms = nn.ModuleList([one_weight(), one_weight()])

        def forward(self, x: torch.Tensor, arm: int) -> torch.Tensor:
            return self.arms[arm](x)

    def body(rank: int) -> list[float]:
        model = DistributedDataParallel(Arms(), op=Sum, **ALL_WAYS[travel])
        for arm in (0, rank, 1 - rank):
            model(torch.ones(1, 1), arm).sum().backward()
        return [p.grad.item() for p in model.parameters()]

    assert cluster.run(body) == [[4, 2]] * 2


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
def test_sums_and_a_module_that_was_converted(alone: FakeCluster) -> None:
    module = one_weight()
    model = DistributedDataParallel(module, op=Sum)
    slope(model, 1.0)
    module.double().float()
    with pytest.raises(FastPSError, match=r"weight' was converted.*zero_grad\(\)"):
        slope(model, 1.0)
    model.zero_grad()
    model.synchronize()
    model.zero_grad()
    for _ in range(2):
        slope(model, 1.0)
    assert module.weight.grad.item() == 2
    module.double().float()
    model.zero_grad()
    for _ in range(2):
        slope(model, 1.0)
    assert module.weight.grad.item() == 2


def replace_parameter(module: nn.Module) -> None:
    module[2].weight = nn.Parameter(torch.zeros(3, 5))


def replace_layer(module: nn.Module) -> None:
    module[2] = nn.Linear(5, 3)


def add_layer(module: nn.Module) -> None:
    module[2].more = nn.Sequential(nn.Identity(), nn.Linear(2, 2))


def assign_state(module: nn.Module) -> None:
    module.load_state_dict(make_model(1).state_dict(), assign=True)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (replace_parameter, r"2\.weight"),
        (replace_layer, r"2\.weight, 2\.bias"),
        (add_layer, r"2\.more\.1\.weight"),
        (assign_state, r"0\.weight, 0\.bias, .* and 1 more came "),
    ],
)
def test_parts_replaced_after_wrapping(cluster: FakeCluster, change: Any, name: str) -> None:
    models = make_models(cluster)

    def body(rank: int) -> None:
        model = DistributedDataParallel(models[rank])
        loss_of(model, part(0, rank)).backward()
        change(models[rank])
        for _ in range(2):
            with pytest.raises(FastPSError, match=rf"{name}.*wrap it again"):
                model(part(0, rank)[0])
        with torch.no_grad():
            model(part(0, rank)[0])
        again = DistributedDataParallel(model.module)
        again.zero_grad()
        loss_of(again, part(0, rank)).backward()

    cluster.run(body)
    for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert (first.grad is None) == (second.grad is None)
        assert torch.equal(first, second)
        assert first.grad is None or torch.equal(first.grad, second.grad)


def test_the_module_itself_replaced(alone: FakeCluster) -> None:
    model = DistributedDataParallel(make_model())
    model.module = make_model(1)
    with pytest.raises(FastPSError, match=r"0\.weight"):
        model(batch(0)[0])


def test_parts_without_parameters_may_come_and_go(cluster: FakeCluster) -> None:
    def body(rank: int) -> list[float]:
        module = nn.Sequential(nn.BatchNorm1d(6, affine=False), nn.Linear(6, 6), nn.Linear(6, 1))
        model = DistributedDataParallel(module)
        loss_of(model, part(0, rank)).backward()
        module[0] = nn.BatchNorm1d(6, affine=False)
        module[1] = nn.Dropout(0.0)
        for step in range(2):
            loss_of(model, part(step, rank)).backward()
        model(part(0, rank)[0])
        momentum = module[0].momentum
        begun = module[0].running_mean - momentum * part(0, rank)[0].mean(0)
        return [round(value, 4) for value in begun.tolist()]

    first, second = cluster.run(body)
    assert first == second  # the new layer's buffers are those of worker 0


@pytest.mark.parametrize("how", ["replace", "append", "group"])
def test_parameters_put_into_groups_unseen(cluster: FakeCluster, how: str) -> None:
    models = make_models(cluster)

    def body(rank: int) -> None:
        model = models[rank]
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loss_of(model, part(0, rank)).backward()
        optimizer.step()
        fresh, groups = nn.Parameter(torch.zeros(3, 5)), optimizer.param_groups
        if how == "replace":
            model[2].weight = groups[0]["params"][2] = fresh
        elif how == "append":
            groups[0]["params"].append(fresh)
        else:
            groups.append({**groups[0], "params": [fresh]})
        loss_of(model, part(0, rank)).backward()
        where = {"replace": "group 0 parameter 2", "append": "group 0 parameter 6"}
        with pytest.raises(
            FastPSError, match=where.get(how, "group 1 parameter 0") + r".*add_param_group\(\)"
        ):
            optimizer.step()
        optimizer.synchronize()
        again = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        again.zero_grad()
        loss_of(model, part(1, rank)).backward()
        again.step()

    cluster.run(body)
    for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(first, second)


def test_loaded_states_and_moved_parameters_are_no_new_ones(alone: FakeCluster) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.load_state_dict(optimizer.state_dict())
    groups = optimizer.param_groups
    groups.append({**groups[0], "params": [groups[0]["params"].pop()]})
    loss_of(model, batch(0)).backward()
    optimizer.step()


def test_synchronised_batch_norm_of_torch_is_refused(alone: FakeCluster) -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    model = DistributedDataParallel(module)
    with pytest.raises(ValueError, match=r"'1' is torch's SyncBatchNorm.*use fastps.torch"):
        DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(module))
    with pytest.raises(ValueError, match="SyncBatchNorm"):  # converted after wrapping
        model(batch(0)[0])


def test_a_wrapped_module_is_not_wrapped_again(alone: FakeCluster) -> None:
    model = DistributedDataParallel(make_model())
    with pytest.raises(ValueError, match=r"'the module' is a Distributed.* already.*\.module"):
        DistributedDataParallel(model)
    with pytest.raises(ValueError, match="'0' is a Distributed"):
        DistributedDataParallel(nn.Sequential(model, nn.Linear(1, 1)))
    theirs = TorchParallel.__new__(TorchParallel)
    nn.Module.__init__(theirs)
    with pytest.raises(ValueError, match="'0' is a Distributed"):
        DistributedDataParallel(nn.Sequential(theirs))
    again = DistributedDataParallel(model.module)
    for one in (model, again, model):
        loss_of(one, batch(0)).backward()


@pytest.mark.parametrize("first", ["ddp", "optimizer"])
@pytest.mark.parametrize("second", ["ddp", "optimizer"])
def test_the_one_that_wrapped_last_is_in_charge(
    cluster: FakeCluster, first: str, second: str
) -> None:
    models = make_models(cluster)

    def body(rank: int) -> None:
        module = models[rank]
        plain = torch.optim.SGD(module.parameters(), lr=0.1)

        def wrapped(kind: str) -> tuple[nn.Module, Any]:
            if kind == "ddp":
                return DistributedDataParallel(module), plain
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            return module, DistributedOptimizer(optimizer, module.named_parameters())

        old_model, old_optimizer = wrapped(first)
        loss_of(old_model, part(0, rank)).backward()
        old_optimizer.step()
        model, optimizer = wrapped(second)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, part(step, rank)).backward()
            optimizer.step()
        if (first, second) == ("ddp", "ddp"):  # each sends what its own forward() announces
            loss_of(old_model, part(0, rank)).backward()
            return
        if first == "ddp":
            with pytest.raises(FastPSError, match=r"created later for the same parameters"):
                old_model(part(0, rank)[0])
        else:
            with pytest.raises(FastPSError, match=r"created later for the same parameters"):
                old_optimizer.step()

    cluster.run(body)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_wrapping_again_while_gradients_are_in_flight(alone: FakeCluster) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of(model, batch(0)).backward()
    with pytest.raises(FastPSError, match=r"call step\(\) or synchronize\(\) first"):
        DistributedDataParallel(model)
    optimizer.step()
    DistributedDataParallel(model)


def test_two_optimizers_with_equal_names(alone: FakeCluster) -> None:
    models = [nn.Linear(6, 1), nn.Linear(6, 1)]
    alone.hold()
    optimizers = [DistributedOptimizer(torch.optim.SGD(m.parameters())) for m in models[:1]]
    optimizers.append(DistributedOptimizer(torch.optim.SGD(models[1].parameters())))
    x = batch(0)[0]
    with pytest.raises(FastPSError, match=r"in flight already; .*prefix='Second\.'"):
        (models[0](x) + models[1](x)).sum().backward()
    alone.release()
    for optimizer in optimizers:
        optimizer.step()
    optimizers[1] = DistributedOptimizer(torch.optim.SGD(models[1].parameters()), prefix="Second.")
    (models[0](x) + models[1](x)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("keep", [True, False])
def test_a_module_converted_after_wrapping(alone: FakeCluster, wrap: Any, keep: bool) -> None:
    module = make_model()
    model, optimizer = wrap(module)
    loss_of(model, batch(0)).backward()
    optimizer.step()
    if not keep:
        module.zero_grad()
    module.double()
    data = [x.double() for x in batch(0)]
    with pytest.raises(TypeError, match=r"float32 when .* torch.float64 now.*wrap it again"):
        loss_of(model, data).backward()
    prefix = {} if isinstance(model, DistributedDataParallel) else {"prefix": "Double."}
    model, optimizer = wrap(module, **prefix)
    optimizer.zero_grad()
    loss_of(model, data).backward()
    optimizer.step()
    assert all(p.grad.dtype is torch.float64 for p in module.parameters())


def test_meta_parameters_and_buffers(alone: FakeCluster) -> None:
    module = nn.Linear(2, 1, device="meta")
    with pytest.raises(TypeError, match=r"weight.*to_empty"):
        DistributedDataParallel(module)
    with pytest.raises(TypeError, match="to_empty"):
        DistributedOptimizer(torch.optim.SGD(module.parameters()))
    module.to_empty(device="cpu")
    module.register_buffer("mask", torch.ones(2, device="meta"))
    with pytest.raises(TypeError, match=r"mask.*to_empty"):
        DistributedDataParallel(module, broadcast_buffers=False)
    module.to_empty(device="cpu")
    DistributedDataParallel(module)


def test_a_module_taken_apart(alone: FakeCluster) -> None:
    dist = pytest.importorskip("torch.distributed")
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("FSDP2 has another name before torch 2.6")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = nn.Linear(2, 1)
        fsdp.fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match=r"weight' is a DTensor.*do not shard.*_shard\(\)"):
            DistributedDataParallel(module)
        with pytest.raises(TypeError, match="DTensor"):
            DistributedOptimizer(torch.optim.SGD(module.parameters()))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("shapes", [[(0,)], [(0,), (3, 0)], [(3,), (0, 2)], [(0,), (3,)]])
def test_empty_buffers(cluster: FakeCluster, shapes: list[tuple[int, ...]]) -> None:
    def body(rank: int) -> None:
        module = nn.Linear(6, 1)
        for place, shape in enumerate(shapes):
            for dtype in (torch.float32, torch.float64, torch.bool):
                name = f"{place}{dtype}".replace(".", "")
                module.register_buffer(name, torch.zeros(shape, dtype=dtype))
        loss_of(DistributedDataParallel(module), part(0, rank)).backward()

    cluster.run(body)
