# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_torch_horovod.py do: every check runs on all of them, in this order."""

from __future__ import annotations

import contextlib
import warnings
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import fastps
import fastps.torch as hvd

CHECKS = []


def check(function):
    """Add a check to the list."""
    CHECKS.append(function)
    return function


def checks(part: int, parts: int) -> None:
    """Run the checks of one part."""
    hvd.init()
    torch.set_num_threads(1)
    for function in CHECKS[part::parts]:
        torch.manual_seed(0)  # all begin with the same weights
        try:
            function(hvd.rank(), hvd.size())
        except BaseException as error:
            raise AssertionError(f"{function.__name__} on worker {hvd.rank()}") from error
    hvd.shutdown()


def sent() -> float:
    """Count the bytes that this worker has sent, whatever the way."""
    numbers = fastps.statistics()
    return sum(n for name, n in numbers.items() if name in ("bytes_sent", "bytes_started"))


class Table(nn.Module):
    """A large table of which few rows are touched, a small one, and something dense."""

    def __init__(self, rows: int, *, sparse: bool = True) -> None:
        super().__init__()
        self.large = nn.Embedding(rows, 16, sparse=sparse)
        self.small = nn.Embedding(20, 4, sparse=sparse)
        self.unused = nn.Embedding(30, 4, sparse=sparse)
        self.back = nn.Linear(20, 1)
        with torch.no_grad():
            for place, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) % 7 / 9)
                parameter.add_(place)

    def forward(self, places: torch.Tensor, *, is_first: bool) -> torch.Tensor:
        whole = [self.large(places), self.small(places % 20)]
        if not is_first:
            whole[1] = whole[1] + self.unused(places % 30)
        return self.back(torch.cat(whole, 1)).square().mean()


def places_of(step: int, rank: int, rows: int) -> torch.Tensor:
    """Give the rows that a worker touches; some twice, some of several workers."""
    generator = torch.Generator().manual_seed(step * 10 + rank)
    return torch.randint(0, rows, (12,), generator=generator).repeat(2)[: 18 - rank]


def same_everywhere(parameters) -> None:
    """Check that all workers have the same bits."""
    digest = [p.detach().double().sum().item() for p in parameters]
    assert all(one == digest for one in hvd.allgather_object(digest)), digest


@check
def sparse_gradients(rank, size):
    for name, how in (
        ("average", {}), ("sum", {"op": hvd.Sum}), ("dense", {"sparse_as_dense": True}),
        ("loose", {"bucket_bytes": 0, "gradient_views": False}), ("ddp", {}),
    ):  # fmt: skip
        model, twin = Table(50), Table(50, sparse=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        net = model
        if name == "ddp":
            net = hvd.DistributedDataParallel(model)
        else:
            optimizer = hvd.DistributedOptimizer(
                optimizer, model.named_parameters(), prefix=name, **how
            )
        alone = torch.optim.SGD(twin.parameters(), lr=1e-3)
        for step in range(4):
            optimizer.zero_grad()
            # in the first step one worker alone has the gradient of one table
            net(places_of(step, rank, 50), is_first=step == 0 and rank != 0).backward()
            optimizer.step()
            alone.zero_grad()
            for other in range(size):
                loss = twin(places_of(step, other, 50), is_first=step == 0 and other != 0)
                (loss if how.get("op") is hvd.Sum else loss / size).backward()
            alone.step()
            assert model.large.weight.grad.is_sparse == (name != "dense")
            assert model.unused.weight.grad.is_sparse == (name != "dense")
        for one, want in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one, want)
        same_everywhere(model.parameters())


@check
def sums_of_sparse_gradients_accumulate(rank, size):
    table = nn.Embedding(9, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=0.1), prefix="accumulated.", op=hvd.Sum
    )
    for step in range(3):
        table(torch.tensor([rank, 4])).sum().backward()
        optimizer.step()
        assert table.weight.grad.to_dense()[4].tolist() == [size * (step + 1)] * 2


@check
def sparse_adam_gets_rows_of_gradients_that_travel_dense(rank, size):
    steps, rows = torch.tensor([rank, 4]), []
    for op in (hvd.Average, hvd.Sum):
        tables = [nn.Embedding(9, 2, sparse=True) for _ in range(2)]
        hvd.broadcast_parameters(tables[0].state_dict(), prefix=f"of {op}.")
        tables[1].load_state_dict(tables[0].state_dict())
        for table, is_dense in zip(tables, (False, True), strict=True):
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SparseAdam(table.parameters(), lr=0.1),
                table.named_parameters(), prefix=f"{op} {is_dense}.", op=op,
                sparse_as_dense=is_dense,
            )  # fmt: skip
            for step in range(3):
                if step != 1:  # a sum of two steps in the third
                    optimizer.zero_grad()
                table(steps + step).sum().backward()
                optimizer.step()
                rows.append(table.weight.grad.coalesce().indices()[0].tolist())
        torch.testing.assert_close(tables[0].weight, tables[1].weight)
        same_everywhere(tables[1].parameters())
    assert rows[:3] == rows[3:6] == rows[6:9] == rows[9:]


@check
def optimizers_without_a_state_get_gradients_of_zeros(rank, size):
    for kind, is_sparse in ((torch.optim.Adam, False), (torch.optim.SparseAdam, True)):
        table = nn.Embedding(3, 2, sparse=True)
        frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        optimizer = kind([*table.parameters(), frozen], lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, prefix=f"zeros {is_sparse}.")
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        gradient = table.weight.grad
        assert gradient.is_sparse == is_sparse
        assert gradient.to_dense().tolist() == [[0.0, 0.0]] * 3
        assert frozen.grad is None


@check
def errors_have_the_types_of_horovod_s(rank, size):
    starts = (hvd.allreduce_async, lambda tensor, name: hvd.broadcast_async(tensor, 0, name))
    for number, start in enumerate(starts):
        for turn in (0, 1):  # so that nothing can be over before it is begun again
            if turn == min(rank, 1):
                handle = start(torch.ones(3), name=f"twice {number}")
                if not turn:
                    with pytest.raises(ValueError, match="already in flight"):
                        start(torch.ones(3), name=f"twice {number}")
            hvd.barrier()
        assert hvd.synchronize(handle).tolist() == [1.0] * 3
    assert issubclass(hvd.DuplicateNameError, hvd.HorovodInternalError)
    for kind in (ValueError, TypeError, hvd.HorovodInternalError):
        with pytest.raises(kind, match=r"splits must be integers"):
            hvd.alltoall(torch.ones(size), torch.ones(size))
        with pytest.raises(kind, match="op=Adasum is supported by"):
            hvd.reducescatter(torch.ones(size), op=hvd.Adasum)


@check
def a_large_table_costs_the_rows_touched(rank, size):
    model = nn.Embedding(10_000_000, 4, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SparseAdam(model.parameters()), model.named_parameters(), prefix="large."
    )
    for step in range(2):
        optimizer.zero_grad()
        places = torch.arange(1000) * 977 + step
        before = sent()
        model(places).sum().backward()
        optimizer.step()
        cost = sent() - before
        assert cost < (size - 1) * 1000 * (8 + 16) + 5000, cost
        assert model.weight.grad.coalesce().indices().shape == (1, 1000)


@check
def a_process_set_trains_by_itself(rank, size):
    some = hvd.add_process_set([size - 1])
    if some.included():
        net = hvd.DistributedDataParallel(
            nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)), process_set=some
        )
        for _ in range(2):
            net(torch.ones(4, 2)).sum().backward()
    whole = hvd.add_process_set(range(size))
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    net = hvd.DistributedDataParallel(model, process_set=whole)
    same_everywhere(model.parameters())
    for _ in range(2):
        net(torch.full((4, 2), rank + 1.0)).sum().backward()
        same_everywhere([p.grad for p in model.parameters()])
    assert model[2].bias.grad.item() == 8


@check
def complex_parameters(rank, size):
    weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    dense = nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight, dense], lr=1.0), prefix="complex."
    )
    for compression in (None, hvd.Compression.bf16):
        optimizer.zero_grad()
        (weight * (rank + 1j)).abs().square().sum().backward()
        dense.sum().backward()
        optimizer.synchronize()
        want = sum(2 * (other * other + 1) for other in range(size)) / size
        assert torch.allclose(weight.grad, torch.full((3,), want + 0j), rtol=1e-2), weight.grad
        if compression is None:
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([weight, dense], lr=1.0), compression=hvd.Compression.bf16,
                prefix="small complex.",
            )  # fmt: skip


@check
def batch_norm_over_all_workers(rank, size):
    sizes = [3 * other for other in range(size)]  # one has nothing
    for shape, momentum, dtype in (((4,), 0.1, torch.float32), ((4, 3, 2), None, torch.float64)):
        torch.manual_seed(3)
        make = nn.BatchNorm1d if len(shape) == 1 else nn.BatchNorm2d
        twin = nn.Sequential(make(4, momentum=momentum), nn.Tanh()).to(dtype)
        nn.init.uniform_(twin[0].weight)
        model = hvd.SyncBatchNorm.convert_sync_batchnorm(
            nn.Sequential(make(4, momentum=momentum), nn.Tanh()).to(dtype)
        )
        assert type(model[0]) is hvd.SyncBatchNorm
        model.load_state_dict(twin.state_dict())
        for _ in range(2):
            whole = torch.randn(sum(sizes), *shape, dtype=dtype).mul_(2).add_(5).requires_grad_()
            mine = whole.detach().split(sizes)[rank].clone().requires_grad_()
            factors = torch.randn(sum(sizes), *shape, dtype=dtype)
            wanted, output = twin(whole), model(mine)
            (wanted * factors).sum().backward()
            (output * factors.split(sizes)[rank]).sum().backward()
            near = {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(output, wanted.split(sizes)[rank], **near)
            torch.testing.assert_close(mine.grad, whole.grad.split(sizes)[rank], **near)
        for one, want in zip(model.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(one, want, **near)
        for one, want in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(hvd.allreduce(one.grad, op=hvd.Sum), want.grad, **near)
        same_everywhere(model.buffers())
        model.eval()
        twin.eval()
        torch.testing.assert_close(model(whole), twin(whole), **near)
    net = hvd.DistributedDataParallel(hvd.SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))))  # fmt: skip
    net(torch.randn(4, 2)).square().sum().backward()
    same_everywhere([p.grad for p in net.parameters()])
    hvd.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3, affine=False))(torch.ones(2, 3))


def linear_of(prefix, **how):
    """Make a model, its optimizer, and what a backward pass of a worker is."""
    model = nn.Linear(3, 2, bias=False)
    nn.init.ones_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), prefix=prefix, **how
    )

    def run(factor=1.0):
        model(torch.full((1, 3), factor * (hvd.rank() + 1.0))).sum().backward()

    return model, optimizer, run


def norm_of(size):
    """Give the norm of the averaged gradient of linear_of()."""
    return 6**0.5 * (size + 1) / 2


@check
def gradients_are_clipped_when_they_are_complete(rank, size):
    whole = (size + 1) / 2
    # as Horovod has it
    model, optimizer, run = linear_of("skip.")
    run()
    optimizer.synchronize()
    total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert abs(total.item() - norm_of(size)) < 1e-5
    with optimizer.skip_synchronize(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer.step()
    assert not told
    assert torch.allclose(model.weight, torch.full((2, 3), 1 - 6**-0.5))
    # without skip_synchronize() it warns, and does the same
    optimizer.zero_grad()
    run()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer.step()
    assert "without optimizer.skip_synchronize()" in str(told[0].message)
    assert torch.allclose(model.weight.grad, torch.full((2, 3), whole))
    # a hook that was there before
    model = nn.Linear(3, 2, bias=False)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    norms = []
    plain.register_step_pre_hook(
        lambda *_: norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
    )
    optimizer = hvd.DistributedOptimizer(plain, prefix="hooked.")
    model(torch.full((1, 3), rank + 1.0)).sum().backward()
    optimizer.step()
    assert abs(norms[0] - norm_of(size)) < 1e-5, norms
    # the Trainer of Hugging Face clips right after backward()
    for passes in (1, 2):
        model, optimizer, run = linear_of(
            f"early {passes}.", finish_in_backward=True, backward_passes_per_step=passes
        )
        for _ in range(2):
            for _ in range(passes):
                run(1 / passes)
            total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert abs(total.item() - norm_of(size)) < 1e-5
            optimizer.step()
            model.zero_grad()


@check
def a_step_that_a_scaler_leaves_out(rank, size):
    for how in ({}, {"bucket_bytes": 0, "gradient_views": False}, {"gradient_views": True}):
        model, optimizer, _ = linear_of(f"scaled {sorted(how)}.", **how)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            model.zero_grad()
            factor = float("inf") if step == 1 and rank == 0 else 1.0
            scaler.scale(model(torch.full((1, 3), factor * (rank + 1.0))).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0
        assert torch.allclose(model.weight, torch.full((2, 3), 1 - (size + 1.0)))


def adasum_of(vectors):
    """Compute Adasum from its definition, in float64."""
    if len(vectors) == 1:
        return vectors[0]
    half = len(vectors) // 2
    a, b = adasum_of(vectors[:half]), adasum_of(vectors[half:])
    both = float((a * b).sum())
    shares = [1 - both / (2 * float((x * x).sum())) if x.any() else 1.0 for x in (a, b)]
    return shares[0] * a + shares[1] * b


@check
def adasum_is_what_its_definition_says(rank, size):
    def vector(other, dtype=torch.float64):
        generator = torch.Generator().manual_seed(other)
        return torch.randn(3, 5, generator=generator, dtype=torch.float64).to(dtype)

    if size & (size - 1):
        with pytest.raises(ValueError, match="power of two"):
            hvd.allreduce(vector(rank), op=hvd.Adasum)
        return
    for dtype, near in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 1e-2)):
        want = adasum_of([vector(other, dtype).double().numpy() for other in range(size)])
        for name in (None, f"adasum {dtype}"):
            found = hvd.allreduce(vector(rank, dtype), name=name, op=hvd.Adasum)
            assert np.allclose(found.double().numpy(), want, rtol=near, atol=near)
        x = vector(rank, dtype)
        assert hvd.allreduce_(x, op=hvd.Adasum) is x
        assert torch.equal(x, found)
    alone = fastps.allreduce(np.full(3, float(rank == 0)), op=fastps.Adasum)
    assert alone.tolist() == [1, 1, 1]
    with pytest.raises(TypeError, match="int64"):
        hvd.allreduce(torch.ones(2, dtype=torch.long), op=hvd.Adasum)


@check
def adasum_of_an_optimizer_s_steps(rank, size):
    if size & (size - 1):
        return
    for compression, near in ((hvd.Compression.none, 1e-5), (hvd.Compression.fp16, 1e-2)):
        models = []
        for _ in range(size + 1):
            torch.manual_seed(0)
            models.append(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
        mine, twins = models[-1], models[:-1]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(mine.parameters(), lr=0.01), mine.named_parameters(),
            compression=compression, op=hvd.Adasum, prefix=f"adasum {near}",
        )  # fmt: skip
        others = [torch.optim.Adam(twin.parameters(), lr=0.01) for twin in twins]
        for step in range(3):
            optimizer.zero_grad()
            mine(torch.full((2, 3), rank + step + 1.0)).square().sum().backward()
            optimizer.synchronize()
            optimizer.step()
            before = [p.detach().clone() for p in twins[0].parameters()]
            for other, (twin, one) in enumerate(zip(twins, others, strict=True)):
                one.zero_grad()
                twin(torch.full((2, 3), other + step + 1.0)).square().sum().backward()
                one.step()
            for place, old in enumerate(before):
                each = [list(twin.parameters())[place] for twin in twins]
                total = adasum_of([(p - old).detach().double().numpy() for p in each])
                for p in each:
                    p.data.copy_(old + torch.from_numpy(total))
        for p, want in zip(mine.parameters(), twins[0].parameters(), strict=True):
            assert torch.allclose(p, want, rtol=near, atol=near)
        same_everywhere(mine.parameters())


def steps_of(model, optimizer, rank, steps=3):
    """Train some steps with data of this worker's own."""
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), rank + step + 1.0)).square().sum().backward()
        optimizer.step()


def small_model():
    """Make the same model on all workers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


@check
def torch_s_own_wrappers(rank, size):
    dist.init_process_group("fastps")
    model = DistributedDataParallel(small_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
    with Join([model, optimizer]):
        steps_of(model, optimizer, rank, 2 + rank)
    same_everywhere(model.parameters())
    from torch import _dynamo as dynamo  # noqa: PLC0415  (takes seconds)
    from torch._dynamo import compiled_autograd as compiled  # noqa: PLC0415

    made = []
    for is_compiled in (False, True):
        how = {"optimize_ddp": "python_reducer"} if is_compiled else {}
        with dynamo.config.patch(**how), contextlib.ExitStack() as stack:
            model, plain = DistributedDataParallel(small_model()), small_model()
            ours = hvd.DistributedOptimizer(
                torch.optim.SGD(plain.parameters(), lr=0.01), prefix=f"compiled {is_compiled}"
            )
            if is_compiled:
                stack.enter_context(compiled._enable(torch.compile(backend="eager")))
            steps_of(model, torch.optim.SGD(model.parameters(), lr=0.01), rank)
            steps_of(plain, ours, rank)
            is_averaged = not is_compiled or torch.__version__ >= (2, 7)  # else over gloo neither
            made += [model, plain] if is_averaged else [plain]
    for one in made[1:]:
        for p, want in zip(one.parameters(), made[0].parameters(), strict=True):
            torch.testing.assert_close(p, want)
    dist.destroy_process_group()


class Hidden:
    """An output of a class in which nobody finds the tensor."""

    def __init__(self, tensor):
        self.tensor = tensor


class Varied(nn.Module):
    """A model whose output may be hidden; of a weight it uses the value alone, of another none."""

    def __init__(self, *, is_hidden):
        super().__init__()
        self.inner, self.scale = small_model(), nn.Parameter(torch.full((1,), 2.0))
        self.unused = nn.Linear(2, 2)
        self.is_hidden = is_hidden

    def forward(self, x):
        y = self.inner(x) * self.scale.detach()
        return Hidden(y) if self.is_hidden else y


def trained(where, rank, *, passes=1, is_hidden=False, **options):
    """Train with our wrapper, where compiled autograd runs; give all its gradients and weights."""
    from torch import _dynamo as dynamo  # noqa: PLC0415  (takes seconds)
    from torch._dynamo import compiled_autograd as compiled  # noqa: PLC0415

    dynamo.reset()
    dynamo.utils.counters.clear()
    compiler = torch.compile(backend="aot_eager")
    torch.manual_seed(0)
    model = hvd.DistributedDataParallel(Varied(is_hidden=is_hidden), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def run(x):
        outputs = model(x)
        loss = getattr(outputs, "tensor", outputs).square().sum()
        with compiled._enable(compiler) if where == "backward" else contextlib.nullcontext():
            loss.backward()

    found = []
    with contextlib.ExitStack() as stack:
        if where == "step":
            stack.enter_context(dynamo.config.patch(compiled_autograd=True))
            run = torch.compile(run, backend="aot_eager")
        if where == "both":
            model.module.compile(backend="aot_eager")
            stack.enter_context(compiled._enable(compiler))
        for step in range(3):
            optimizer.zero_grad()
            with model.no_sync():
                for part in range(passes - 1):
                    run(torch.full((2, 3), rank + step + part + 2.0))
            run(torch.full((2, 3), rank + step + 1.0))
            found += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
    assert (dynamo.utils.counters["compiled_autograd"]["captures"] > 0) is (where != "nowhere")
    same_everywhere([*found, *model.parameters()])
    return [*found, *(p.detach() for p in model.parameters())]


def compiles(size):
    """Return whether to compile: it takes seconds, and no result of it depends on more workers."""
    return size == 2 and torch.__version__ >= (2, 8)  # refused before


def our_wrapper_in_compiled_autograd(rank, size, where, **options):
    """Compare with the bits that autograd's own engine makes; each graph runs several times."""
    if not compiles(size):
        return
    want, got = (trained(at, rank, **options) for at in ("nowhere", where))
    for one, other in zip(want, got, strict=True):
        assert torch.equal(one, other)


@check
def our_wrapper_where_the_backward_is_compiled(rank, size):
    ways = {"passes": 2, "find_unused_parameters": True}
    our_wrapper_in_compiled_autograd(rank, size, "backward", **ways)


@check
def our_wrapper_where_both_passes_are_compiled(rank, size):
    ways = {"gradient_as_bucket_view": True, "static_graph": True, "bucket_cap_mb": 1e-4}
    our_wrapper_in_compiled_autograd(rank, size, "both", **ways)


@check
def our_wrapper_where_the_step_is_compiled(rank, size):
    our_wrapper_in_compiled_autograd(rank, size, "step")


@check
def two_of_our_wrappers_in_one_pass(rank, size):
    """Workers meet them in different order, in the first pass too, which asks more."""
    models = [hvd.DistributedDataParallel(small_model()) for _ in range(2)]
    for step in range(2):
        x = torch.full((2, 3), rank + step + 1.0)
        outputs = [model(x) for model in models[:: 1 if rank % 2 else -1]]
        sum(output.square().sum() for output in outputs).backward()
        same_everywhere(p.grad for model in models for p in model.parameters())


@check
def our_wrapper_where_outputs_are_hidden(rank, size):
    ways = {"is_hidden": True, "op": hvd.Sum, "gradient_views": False}
    our_wrapper_in_compiled_autograd(rank, size, "backward", **ways)


@check
def passes_in_compiled_autograd_that_fail(rank, size):
    from torch._dynamo import compiled_autograd as compiled  # noqa: PLC0415

    from fastps.frameworks.torch.gradients import backward_end  # noqa: PLC0415

    model, x = hvd.DistributedDataParallel(small_model()), torch.ones(2, 3) + rank
    bias = list(model.parameters())[-1]
    eager = compiled._enable(torch.compile(backend="eager"))
    unknown = patch.object(backward_end, "_graph_that_runs", lambda: None)  # of another torch
    with eager, unknown, pytest.raises(fastps.FastPSError, match=r"compiled autograd.*no grad"):
        model(x).sum().backward()
    if not compiles(size):
        return
    failing = patch.object(model.reducer, "wait", side_effect=fastps.PeerLostError("lost"))
    model.zero_grad()
    eager = compiled._enable(torch.compile(backend="eager"))
    with eager, failing, pytest.raises(fastps.PeerLostError, match="lost"):
        model(x).sum().backward()
    with pytest.raises(fastps.FastPSError, match="failed before its end"):
        model(x)
    model.synchronize()
    for is_compiled in (True, False):
        model.zero_grad()
        eager = compiled._enable(torch.compile(backend="eager"))
        with eager if is_compiled else contextlib.nullcontext():
            model(x).sum().backward()
        assert torch.equal(bias.grad, torch.full_like(bias, 2.0))


@check
def gradients_complete_in_compiled_autograd(rank, size):
    """Where torch looks for NaN at the end of a pass, it still does."""
    if not compiles(size):
        return
    from torch._dynamo import compiled_autograd as compiled  # noqa: PLC0415

    model, x = small_model(), torch.ones(2, 3) + rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, finish_in_backward=True, prefix="early")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow
        with (
            torch.autograd.set_detect_anomaly(True),
            compiled._enable(torch.compile(backend="eager")),
        ):
            for _ in range(2):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                same_everywhere(p.grad for p in model.parameters())
                optimizer.step()
            with pytest.raises(RuntimeError, match="NaN gradients"):
                (model(x).sum() * float("nan")).backward()
    optimizer.synchronize()
    optimizer.zero_grad()


@check
def where_workers_are_and_what_is_built(rank, size):
    assert hvd.is_homogeneous()
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.local_size() * hvd.cross_size() == size
    for told in (
        hvd.ccl_built, hvd.cuda_built, hvd.ddl_built, hvd.gloo_built, hvd.gloo_enabled,
        hvd.mpi_built, hvd.mpi_enabled, hvd.mpi_threads_supported, hvd.nccl_built, hvd.rocm_built,
    ):  # fmt: skip
        assert not told()


@check
def errors_have_horovod_s_name(rank, size):
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(torch.ones(2 + rank), name="of different shapes")
    assert issubclass(hvd.PeerLostError, hvd.HorovodInternalError)


@check
def timelines_that_nobody_makes(rank, size):
    hvd.start_timeline("nowhere.json", mark_cycles=True)  # a warning, and training goes on
    hvd.stop_timeline()


@check
def workers_outside_a_process_set_step_by_themselves(rank, size):
    some = hvd.add_process_set(range(size - 1))
    for op in (hvd.Average, hvd.Sum):
        model, optimizer, run = linear_of(f"outside {op}.", process_set=some, op=op)
        with pytest.raises(ValueError, match="already"):
            hvd.DistributedOptimizer(optimizer, process_set=some)
        for _ in range(2):
            optimizer.zero_grad()
            run()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        total = size * (size - 1) / 2 / (1 if op is hvd.Sum else size - 1)
        want = 1.0 - 2 * (total if some.included() else rank + 1)
        assert torch.allclose(model.weight, torch.full((2, 3), want)), (model.weight, want)
    assert hvd.remove_process_set(some)


@check
def a_process_set_in_its_place(rank, size):
    """Scripts for Horovod give it as the third argument."""
    some, weights = hvd.add_process_set([0, 1]), [torch.full((2,), rank + 1.0)]
    if some.included():
        hvd.broadcast_parameters(weights, 1, some)
        assert weights[0].tolist() == [2.0, 2.0]
        assert hvd.allgather_object(rank, None, some) == [0, 1]
    assert hvd.remove_process_set(some)


@check
def begun_with_process_sets(rank, size):
    first, rest = hvd.ProcessSet([0]), hvd.ProcessSet(range(1, size))
    hvd.init(process_sets=[first])  # is in the job already
    hvd.init(process_sets=[hvd.global_process_set, first, rest])
    mine = rest if rank else first
    for _ in range(2):
        total = hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum, process_set=mine)
        assert total.item() == mine.size()
        hvd.init(None, "dynamic")
    everybody = list(range(size))
    hvd.init(comm=everybody)
    for comm, words in (([0], "ProcessSet"), (everybody[::-1], "ProcessSet"), (object(), "MPI")):
        with pytest.raises(hvd.ConfigError, match=words):
            hvd.init(comm=comm)
    assert hvd.is_initialized()
    with pytest.raises(hvd.ConfigError, match="dynamic"):
        hvd.init(process_sets="static")
