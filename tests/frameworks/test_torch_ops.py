# SPDX-License-Identifier: Apache-2.0
"""push_pull on torch tensors, with a job of threads; sums are compared with torch's own."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref

import pytest
from fake_session import FakeCluster

from fastps.errors import MismatchError, NotInitializedError, PeerLostError

torch = pytest.importorskip("torch")

import fastps  # noqa: E402
import fastps.torch as fps  # noqa: E402
from fastps.frameworks.torch.ops import push_pull  # noqa: E402
from fastps.frameworks.torch.ops.compression import Compression  # noqa: E402
from fastps.worker.handle import MappedHandle  # noqa: E402

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
CALLS = [
    push_pull.push_pull,
    push_pull.push_pull_inplace,
    push_pull.push_pull_async,
    push_pull.push_pull_async_inplace,
]


def contribution(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 7 + 2 * rank).reshape(shape).to(dtype)


def expected(shape: tuple[int, ...], dtype: torch.dtype, average: bool) -> torch.Tensor:
    total = contribution(0, shape, torch.float64) + contribution(1, shape, torch.float64)
    if average:
        total = total / 2
    return (total if dtype.is_floating_point else total.floor()).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@pytest.mark.parametrize("average", [True, False])
def test_all_forms_and_dtypes(cluster: FakeCluster, dtype: torch.dtype, average: bool) -> None:
    shapes = [(5,), (2, 3), (), (0,), (3, 0, 2)]

    def body(rank: int) -> None:
        for shape in shapes:
            x = contribution(rank, shape, dtype)
            kept = x.clone()
            want = expected(shape, dtype, average)
            out = push_pull.push_pull(x, average, f"a{shape}")
            assert torch.equal(out, want)
            assert out.dtype == dtype
            handle = push_pull.push_pull_async(x, average, f"b{shape}")
            assert torch.equal(push_pull.synchronize(handle), want)
            assert push_pull.poll(handle)
            assert torch.equal(x, kept)
            handle = push_pull.push_pull_async_inplace(x, average, f"c{shape}")
            assert push_pull.synchronize(handle) is x
            assert torch.equal(x, want)
            assert push_pull.push_pull_inplace(kept, average, f"d{shape}") is kept
            assert torch.equal(kept, want)

    cluster.run(body)


def test_bool_is_or_and_has_no_average(cluster: FakeCluster) -> None:
    def body(rank: int) -> None:
        x = torch.tensor([rank == 0, rank == 1, False])
        assert push_pull.push_pull(x, False, "flags").tolist() == [True, True, False]
        for call in CALLS:
            with pytest.raises(ValueError, match="no average"):
                call(x, True, "flags")

    cluster.run(body)


def test_positional_order_is_that_of_byteps(cluster: FakeCluster) -> None:
    def body(rank: int) -> None:
        x = torch.ones(3)
        push_pull.push_pull(x, False, "x", 0, -5, Compression.fp16)
        push_pull.push_pull_inplace(x, False, "y", 0, -6)

    cluster.run(body)
    priorities = {(e.name, e.priority) for e in cluster.events}
    assert priorities == {("x", -5), ("y", -6)}


@pytest.mark.parametrize("call", CALLS)
def test_no_name(alone: FakeCluster, call: object) -> None:
    with pytest.raises(ValueError, match=r"needs a name .* for example push_pull"):
        call(torch.ones(2))
    assert not alone.events


@pytest.mark.parametrize("call", CALLS)
def test_before_init(monkeypatch: pytest.MonkeyPatch, call: object) -> None:
    from fastps.session import current  # noqa: PLC0415

    monkeypatch.setattr(current, "current", FakeCluster(1).current)
    with pytest.raises(NotInitializedError):
        call(torch.ones(2), True, "x")


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.eye(3).to_sparse(), "is sparse"),
        (lambda: torch.ones(2, dtype=torch.complex64), "complex64; supported are float32"),
        (quantised, "qint8; supported"),
        (lambda: torch.ones(2, device="meta"), "is on meta"),
        (lambda: [1.0, 2.0], "must be a torch.Tensor, not list"),
        (lambda: torch.ones(2).numpy(), r"not ndarray: pass torch.from_numpy\(array\)"),
    ],
    ids=["sparse", "complex", "quantised", "meta", "list", "array"],
)
def test_what_cannot_be_added(alone: FakeCluster, call: object, make: object, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call(make(), True, "x")
    assert not alone.events


def test_the_name_may_come_second(alone: FakeCluster) -> None:
    for call in (push_pull.push_pull, push_pull.push_pull_inplace):
        assert call(torch.ones(2), "x").tolist() == [1, 1]
    for call in (push_pull.push_pull_async, push_pull.push_pull_async_inplace):
        assert push_pull.synchronize(call(torch.ones(2), "x")).tolist() == [1, 1]
    with pytest.raises(TypeError, match="True or False, not 'x', as the name is 'y'"):
        push_pull.push_pull(torch.ones(2), "x", "y")
    with pytest.raises(TypeError, match="average must be True or False, not of type Tensor"):
        push_pull.push_pull("x", torch.ones(2))


def test_non_contiguous(cluster: FakeCluster) -> None:
    def body(rank: int) -> None:
        base = torch.arange(12.0).reshape(3, 4) + rank
        for x in (base.t(), base[:, ::2], base[1], torch.ones(1).expand(5) * (rank + 0.0)):
            want = x.clone() + (0.5 if rank == 0 else -0.5)
            assert torch.equal(push_pull.push_pull(x, name=f"x{tuple(x.shape)}"), want)
        for call in (push_pull.push_pull_inplace, push_pull.push_pull_async_inplace):
            with pytest.raises(ValueError, match=r"not contiguous .*\.contiguous\(\)"):
                call(base.t(), name="y")
        negative = torch.imag(torch.tensor([1 + 2j, 3 + 4j]).conj())
        assert negative.is_neg()
        assert push_pull.push_pull(negative, name="n").tolist() == [-2.0, -4.0]

    cluster.run(body)


def test_gradient_of_average_and_sum(cluster: FakeCluster) -> None:
    """With y_j = scale * sum_i x_i and L = sum_j w_j y_j: dL/dx_i = scale * sum_j w_j."""

    def body(rank: int) -> None:
        weight = torch.tensor([1.0, 10.0]) * (rank + 1)
        for average in (True, False):
            x = torch.tensor([2.0, 3.0], requires_grad=True)
            y = push_pull.push_pull(x * (rank + 1), average, f"x{average}")
            (y * weight).sum().backward()
            total = torch.tensor([3.0, 30.0]) * (0.5 if average else 1)
            assert torch.equal(x.grad, total * (rank + 1))

    cluster.run(body)
    assert "xTrue.gradient" in cluster.names()


def test_gradient_passes_gradcheck_also_of_second_order(alone: FakeCluster) -> None:
    x = torch.rand(4, dtype=torch.float64, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        return push_pull.push_pull(x * x, True, "x")

    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


def test_gradient_goes_through_compression(cluster: FakeCluster) -> None:
    def body(rank: int) -> None:
        x = torch.tensor([1.0 + 2**-9, 2.0], requires_grad=True)
        y = push_pull.push_pull(x, True, "x", compression=Compression.bf16)
        assert y.dtype == torch.float32
        assert torch.equal(y, x.detach().bfloat16().float())
        y.sum().backward()
        assert torch.equal(x.grad, torch.ones(2))

    cluster.run(body)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + [torch.bool], ids=str)
@pytest.mark.parametrize("compression", [Compression.fp16, Compression.bf16])
def test_compression_touches_only_wide_floats(dtype: torch.dtype, compression: object) -> None:
    x = torch.tensor([1, 0, 3]).to(dtype)
    wire, context = compression.compress(x)
    is_wide = dtype in (torch.float32, torch.float64)
    assert wire.element_size() == (2 if is_wide else x.element_size())
    assert (wire is x) is not is_wide
    back = compression.decompress(wire, context)
    assert back.dtype == dtype
    assert torch.equal(back, x)


def test_in_place_and_autograd(alone: FakeCluster) -> None:
    leaf = torch.ones(3, requires_grad=True)
    assert push_pull.push_pull_inplace(leaf, name="leaf") is leaf
    result = leaf * 2
    with pytest.raises(ValueError, match="result of autograd"):
        push_pull.push_pull_inplace(result, name="result")
    with torch.no_grad():
        push_pull.push_pull_inplace(result, name="result")
    saved = torch.ones(3)
    loss = (leaf * saved).sum()
    push_pull.push_pull_inplace(saved, name="saved")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_mode(alone: FakeCluster) -> None:
    with torch.inference_mode():
        x = torch.ones(2)
        assert torch.equal(push_pull.push_pull_inplace(x, name="x"), torch.ones(2))
        assert torch.equal(push_pull.push_pull(x, name="x"), torch.ones(2))


def test_a_tensor_in_flight_can_be_dropped_but_not_resized(cluster: FakeCluster) -> None:
    cluster.hold()
    both = threading.Barrier(2, action=cluster.release)

    def body(rank: int) -> None:
        x = torch.full((1000,), float(rank))
        alive = weakref.ref(x)
        handle = push_pull.push_pull_async(x, name="x")
        with pytest.raises(RuntimeError, match="not resizable"):
            x.resize_(10_000_000)
        del x
        gc.collect()
        assert alive() is None
        assert not push_pull.poll(handle)
        both.wait(20)
        assert torch.equal(push_pull.synchronize(handle), torch.full((1000,), 0.5))

    cluster.run(body)


def test_tensors_that_share_storage(cluster: FakeCluster) -> None:
    def body(rank: int) -> None:
        base = torch.full((6,), float(rank))
        handles = [
            push_pull.push_pull_async_inplace(base[:3], False, "low"),
            push_pull.push_pull_async_inplace(base[3:], False, "high"),
        ]
        for handle in handles:
            push_pull.synchronize(handle)
        assert base.tolist() == [1.0] * 6

    cluster.run(body)


def test_errors_reach_synchronize(cluster: FakeCluster) -> None:
    cluster.fail("^bad$", PeerLostError("worker 1 died"))

    def body(rank: int) -> None:
        handle = push_pull.push_pull_async(torch.ones(2), name="bad")
        with pytest.raises(PeerLostError, match="worker 1 died"):
            push_pull.synchronize(handle)
        with pytest.raises(PeerLostError):
            push_pull.push_pull(torch.ones(2), name="bad")

    cluster.run(body)


def test_declare(cluster: FakeCluster) -> None:
    def body(rank: int) -> None:
        push_pull.declare("x", torch.ones(2, 3, dtype=torch.bfloat16))
        with pytest.raises(MismatchError):
            push_pull.declare("x", torch.ones(2, 4, dtype=torch.bfloat16))
        with pytest.raises(ValueError, match="declare needs a name"):
            push_pull.declare("", torch.ones(2))

    cluster.run(body)


def test_synchronize_takes_handles_only(alone: FakeCluster) -> None:
    for call in (push_pull.synchronize, push_pull.poll):
        with pytest.raises(TypeError, match="handle of an operation, as push_pull_async"):
            call(17)


def test_handles_are_of_the_one_kind(alone: FakeCluster) -> None:
    x = torch.ones(2)
    for call in (push_pull.push_pull_async, push_pull.push_pull_async_inplace):
        seen: list[torch.Tensor] = []
        handle = call(x, name=call.__name__)
        assert isinstance(handle, fastps.Handle)
        assert handle.then(seen.append) is handle
        found = handle.wait(timeout_s=5.0)
        assert isinstance(found, torch.Tensor)
        assert seen[0] is found
        assert handle.poll()


def test_a_handle_shows_what_its_operation_does() -> None:
    def lose(_: list[object]) -> None:
        raise PeerLostError("worker 1 is lost")

    handle = push_pull.PushPullHandle(MappedHandle([], lose), torch.ones(1))
    assert not handle.has_failed
    for _ in range(2):
        with pytest.raises(PeerLostError, match="worker 1"):
            handle.wait()
        assert handle.has_failed


def test_handle_may_be_synchronized_twice(alone: FakeCluster) -> None:
    handle = push_pull.push_pull_async(torch.ones(2), name="x")
    assert push_pull.synchronize(handle) is push_pull.synchronize(handle)


NEEDED = {"root_rank": 0, "destination": 0, "out": torch.ones(2), "name": "x", "target_rank": 0,
          "target": 0}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "cure"),
    [(torch.ones(2).numpy(), "from_numpy"), ([1.0, 2.0], "as_tensor"), (7, "as_tensor")],
    ids=["array", "list", "number"],
)
def test_every_operation_says_what_it_wants_in_the_place_of_a_tensor(given, cure) -> None:
    found = [getattr(fps, name) for name in fps.__all__ if hasattr(getattr(fps, name), "__code__")]
    firsts = {one: list(inspect.signature(one).parameters) for one in found}
    fps.init(size=1, num_servers=0)
    try:
        for call, words in firsts.items():
            if words[:1] in (["tensor"], ["tensors"]):
                more = {word: NEEDED[word] for word in words if word in NEEDED}
                with pytest.raises(TypeError, match=f"must be a torch.Tensor, not .*{cure}"):
                    call([given] if words[0] == "tensors" else given, **more)
    finally:
        fps.shutdown()
    assert len([words for words in firsts.values() if words[:1] == ["tensor"]]) > 30
