# SPDX-License-Identifier: Apache-2.0
"""Programs of test_at_once.py: _async forms that have to find out sizes return at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import fastps
from fastps.errors import DuplicateNameError, FastPSError, StallError

WAIT_S = 60.0


def starts(face: str) -> dict[str, Callable[..., Any]]:
    """Make what begins each form; it gets arrays, a name and what else the form takes."""
    import fastps as numpy_face  # noqa: PLC0415

    if face == "numpy":
        return {
            "allgather": lambda own, **how: numpy_face.allgather_async(own, **how),
            "gather": lambda own, **how: numpy_face.gather_async(own, 0, **how),
            "alltoall": lambda own, splits, **how: numpy_face.alltoall_async(own, splits, **how),
            "grouped": lambda own, **how: numpy_face.grouped_allgather_async([own, own], **how),
        }
    import torch  # noqa: PLC0415  (jobs of the NumPy face have no need of it)

    import fastps.torch as torch_face  # noqa: PLC0415

    def sparse(own: np.ndarray, **how: Any) -> Any:
        places = torch.arange(len(own)).reshape(1, -1)
        tensor = torch.sparse_coo_tensor(places, torch.from_numpy(own), (5000, 3))
        return torch_face.sparse_allreduce_async(tensor, op=torch_face.Sum, **how)

    of = torch.from_numpy
    return {
        "allgather": lambda own, **how: torch_face.allgather_async(of(own), **how),
        "gather": lambda own, **how: torch_face.gather_async(of(own), 0, **how),
        "alltoall": lambda own, splits, **how: torch_face.alltoall_async(of(own), splits, **how),
        "grouped": lambda own, **how: torch_face.grouped_allgather_async([of(own)] * 2, **how),
        "sparse": sparse,
    }


def rows_of(rank: int, rows: int) -> np.ndarray:
    """Make what a rank brings: a row more than the rank before."""
    return np.arange((rows + rank) * 3.0).reshape(-1, 3) + 100 * rank


def wanted(form: str, me: int, size: int, rows: int) -> list[np.ndarray]:
    """Make what a form gives, with NumPy."""
    each = [rows_of(rank, rows) for rank in range(size)]
    if form == "alltoall":
        firsts = [0 if me == 0 else len(one) - size + me for one in each]
        lasts = [len(one) - size + me + 1 for one in each]
        cut = [one[a:b] for one, a, b in zip(each, firsts, lasts, strict=True)]
        return [np.concatenate(cut), np.array([len(one) for one in cut])]
    if form == "sparse":
        total = np.zeros((len(each[-1]), 3))
        for one in each:
            total[: len(one)] += one
        return [total]
    if form == "gather" and me:
        return []
    return [np.concatenate(each)] * (2 if form == "grouped" else 1)


def given(form: str, found: Any) -> list[np.ndarray]:
    """Make arrays of what a handle gives."""
    if found is None:
        return []
    if form == "sparse":
        return [found.to_dense()[: found.indices().max() + 1].numpy()]
    return [np.asarray(one) for one in (found if isinstance(found, (list, tuple)) else [found])]


def at_once(face: str, rows: list[int], *, is_polled: bool) -> float:
    """Begin all forms while nobody else does; give the seconds that the slowest call took.

    rank 0 begins everything twice, with names and without, before others come; then all compare
    with NumPy. is_polled: until poll() says so, nothing is waited for.
    """
    fastps.init(op_timeout_s=WAIT_S)
    me, size = fastps.rank(), fastps.size()
    fastps.allgather(np.ones(1 + me))  # what is imported at the first use
    fastps.barrier()
    handles, slowest = [], 0.0
    if me:  # until rank 0 has begun all
        fastps.receive(np.empty(1), 0)
    for turn in range(2):
        for count in rows:
            for form, start in starts(face).items():
                for name in (None, f"{form} {count} {turn}"):
                    own = rows_of(me, count)
                    more = {}
                    if form == "alltoall":
                        more["splits"] = [len(own) - size + 1] + [1] * (size - 1)
                    began = time.perf_counter()
                    handles.append((form, count, start(own, name=name, **more)))
                    slowest = max(slowest, time.perf_counter() - began)
    if me == 0:
        assert not any(handle.poll() for _, _, handle in handles)
        for other in range(1, size):
            fastps.send(np.ones(1), other)
    order = handles[::-1] if me == 1 else handles  # in any order
    deadline = time.monotonic() + WAIT_S
    while is_polled and not all(handle.poll() for _, _, handle in order):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for form, count, handle in order:
        found, want = given(form, handle.wait(WAIT_S)), wanted(form, me, size, count)
        assert len(found) == len(want), (form, found)
        for one, other in zip(found, want, strict=True):
            assert np.array_equal(one, other), (form, count, one, other)
    assert (fastps.allgather(np.ones(2)) == 1).all()
    fastps.shutdown()
    return slowest


def ends() -> list[str]:
    """Close the session while handles wait for others; give what they raise."""
    fastps.init(op_timeout_s=WAIT_S)
    fastps.allgather(np.ones(1 + fastps.rank()))
    fastps.barrier()
    if fastps.rank():
        fastps.shutdown()
        return []
    handles = [fastps.allgather_async(np.ones(3), name) for name in (None, "a", "b")]
    texts = []
    try:
        fastps.allgather_async(np.ones(3), "a")
    except DuplicateNameError as error:
        texts.append(str(error))
    try:
        handles[0].wait(0.01)
    except (StallError, FastPSError) as error:
        texts.append(type(error).__name__)
    fastps.shutdown()
    for handle in handles:
        try:
            handle.wait()
        except FastPSError as error:
            texts.append(f"{type(error).__name__}")
        assert handle.poll()
    return texts


def failing() -> list[str]:
    """Bring rows of other widths; the next operation goes on."""
    fastps.init(op_timeout_s=WAIT_S)
    me, texts = fastps.rank(), []
    for name in (None, "wide"):
        first = fastps.allgather_async(np.ones((4000, 2 + me)), name)
        second = fastps.allgather_async(np.full((4000, 2), me), f"after {name}")
        try:
            first.wait()
        except FastPSError as error:
            texts.append(str(error))
        found = second.wait()
        assert [int(one) for one in found[::4000, 0]] == list(range(fastps.size()))
    fastps.shutdown()
    return texts
