# SPDX-License-Identifier: Apache-2.0
"""What test_torch_device.py runs in a process of its own, for loading the device lasts."""

from __future__ import annotations

from typing import Any

import pytest
from fake_session import FakeCluster
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import fastps.torch as fps  # noqa: E402
from aids import device  # noqa: E402
from fastps.frameworks.torch.ops import tensors  # noqa: E402
from fastps.session import current  # noqa: E402

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64,
    torch.uint8,
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def library() -> Any:
    device.build_or_skip()
    return device.load()


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a job of one rank in all threads: autograd has one of its own for each device."""
    job = FakeCluster(1)
    session = job.enter(0)
    for one in (job, current):
        monkeypatch.setattr(one, "current", lambda: session)


@st.composite
def places(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Draw a shape, the order of its dimensions in memory, and the step in each."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    return shape, list(order), [draw(st.integers(1, 2)) for _ in shape]


def laid_out(
    place: tuple[list[int], list[int], list[int]], dtype: torch.dtype, where: str
) -> torch.Tensor:
    """Return a tensor of a shape whose elements lie apart, and in another order, in memory."""
    shape, order, steps = place
    wide = [shape[one] * steps[one] for one in order]
    plain = torch.arange(torch.Size(wide).numel(), dtype=torch.float64) % 100
    values = plain.reshape(wide).to(dtype).to(where)
    turned = values.permute([order.index(one) for one in range(len(order))])
    for one, step in enumerate(steps):
        turned = turned[(slice(None),) * one + (slice(None, None, step),)]
    assert list(turned.shape) == shape
    return turned


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    packed = [one.detach().cpu().contiguous() for one in (found, wanted)]
    flat = [one.as_strided((one.numel(),), (1,)) for one in packed]  # one element has any stride
    assert torch.equal(*[one.view(torch.uint8) for one in flat])


@given(place=places(), dtype=st.sampled_from(DTYPES), average=st.booleans())
def test_push_pull_gives_the_bits_of_the_cpu(
    place: tuple[list[int], list[int], list[int]], dtype: torch.dtype, average: bool
) -> None:
    job = FakeCluster(2)

    def body(rank: int) -> list[tuple[torch.Tensor, ...]]:
        found = []
        for where in ("cpu", "testdev:0", "testdev:1"):
            x = laid_out(place, dtype, where) + rank
            x = x if dtype.is_floating_point else x.to(dtype)
            kept, own = x.clone(), x.clone(memory_format=torch.contiguous_format)
            out = fps.push_pull(x, average, f"a{where}")
            later = fps.push_pull_async(x, average, f"b{where}")
            assert fps.push_pull_inplace(own, average, f"c{where}") is own
            assert_same_bits(x, kept)
            all_of_them = out, later.wait(), own
            assert {str(one.device) for one in all_of_them} == {where}
            assert later.wait() is all_of_them[1]
            found.append(all_of_them)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(current, "current", job.current)
        for ours in job.run(body):
            for all_of_them in ours[1:]:
                for one, wanted in zip(all_of_them, ours[0], strict=True):
                    assert_same_bits(one, wanted)


@given(place=places(), dtype=st.sampled_from(DTYPES))
def test_a_copy_on_the_host_and_back(
    place: tuple[list[int], list[int], list[int]], dtype: torch.dtype
) -> None:
    there, here = laid_out(place, dtype, "testdev:1"), laid_out(place, dtype, "cpu")
    assert there.stride() == here.stride()
    sent = tensors.sendable(there)
    assert sent.is_cpu
    assert tensors.is_sendable(sent)
    assert_same_bits(sent, here)
    room = torch.empty_like(there)
    tensors.write_over(room, sent)
    assert_same_bits(room, here)
    assert not tensors.is_sendable(there)


def test_lazy_values_are_resolved() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j])
    assert tensors.sendable(x.to("testdev").conj()).tolist() == [1 - 2j, 3 + 1j]
    assert tensors.sendable(x.to("testdev").conj().imag).tolist() == [-2.0, 1.0]


def test_autograd_sees_what_is_written(anywhere: None) -> None:
    for where in ("cpu", "testdev"):
        x = torch.full((3,), 2.0, device=where, requires_grad=True)
        y = x * 2
        product = (y * y).sum()
        with pytest.raises(ValueError, match="an intermediate result of autograd"):
            fps.push_pull_inplace(y, name="y")
        plain, before = y.detach(), y._version
        fps.push_pull_inplace(plain, name="y")
        assert y._version > before
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
        fps.push_pull_inplace(x, name="x")  # a leaf: its data
        assert x.requires_grad
        fps.push_pull(x, name="z").sum().backward()
        assert x.grad is not None
        assert str(x.grad.device).startswith(where)
        assert x.grad.tolist() == [1.0] * 3


def test_in_place_needs_contiguous_tensors(alone: FakeCluster) -> None:
    for where in ("cpu", "testdev"):
        with pytest.raises(ValueError, match="is not contiguous"):
            fps.push_pull_inplace(torch.ones(2, 3, device=where).t(), name="x")


def test_what_stays_on_the_cpu_says_so(alone: FakeCluster) -> None:
    there = torch.nn.Linear(2, 1).to("testdev")
    with pytest.raises(TypeError, match=r"'w' is on testdev:0, and win_create.* tensor\.cpu\(\)"):
        fps.win_create(there.weight.data, "w")
    with pytest.raises(TypeError, match="can't convert testdev:0"):
        tensors.view_of(there.weight)


def test_devices_of_a_wrapped_module(alone: FakeCluster) -> None:
    there = torch.nn.Linear(2, 1).to("testdev:1")
    for given_ in ({"device_ids": [1]}, {"device_ids": ["testdev:1"], "output_device": 1}, {}):
        fps.DistributedDataParallel(there, **given_)
    for ids in ([0], [0, 1], ["cpu"]):
        with pytest.raises(ValueError, match="parameters are on testdev:1: leave both out"):
            fps.DistributedDataParallel(there, device_ids=ids)


def test_a_module_that_moves_after_it_was_wrapped(cluster: FakeCluster) -> None:
    models = []
    for _ in range(2):  # not in the threads, which share torch's generator
        torch.manual_seed(0)
        models.append(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)))

    def body(rank: int) -> list[torch.Tensor]:
        model = models[rank]
        optimizer = fps.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters(),
            gradient_views=True,
        )  # fmt: skip
        for place in ("cpu", "testdev:0", "testdev:1", "cpu"):
            model.to(place)
            model(torch.full((1, 2), rank + 1.0, device=place)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [one.detach() for one in model.parameters()]

    for one, other in zip(*cluster.run(body), strict=True):
        assert_same_bits(one, other)


def test_a_device_completes_its_work_before_gradients_are_copied(
    anywhere: None, library: Any
) -> None:
    model = torch.nn.Linear(2, 1).to("testdev")
    optimizer = fps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    before = library.waits_so_far()
    model(torch.ones(1, 2, device="testdev")).sum().backward()
    assert library.waits_so_far() > before
    optimizer.step()
