# SPDX-License-Identifier: Apache-2.0
"""Blocks of rows that travel behind their heads, among members in one process, against NumPy."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.collectives._exchange import Blocks, pack
from fastps.collectives.row_counts import Rows, tell
from fastps.collectives.size_cache import SizeCache
from fastps.errors import MismatchError
from fastps.types import DType, dtype_of

HEAD_BYTES = 40
DTYPES = [np.float32, np.float64, np.float16, np.int8, np.int64, np.bool_]


class GroupBase:
    """Groups of n members whose bytes are carried by lists; one thread each."""

    def __init__(self, n, n_machines=1):
        self.sent = [b""] * n
        self.meeting = threading.Barrier(n, timeout=20)
        self.groups = [
            SimpleNamespace(
                size=n,
                ranks=[3 * place for place in range(n)],
                is_on_one_machine=n_machines == 1,
                exchange_sizes=lambda kind, sent, found, name, key, me=place, **_: (
                    self.exchange_sizes(kind, sent, found, me)
                ),
                steady=SizeCache(),
                differing=MismatchError,
            )
            for place in range(n)
        ]

    def exchange_sizes(self, kind, sent, found, me):
        """Give a member what all of them send it."""
        self.sent[me] = bytes(sent)
        self.meeting.wait()
        n = len(self.sent)
        block = len(found) // n
        at = me * block if kind == "alltoall" else 0
        found[:] = b"".join(one[at : at + block] for one in self.sent)
        self.meeting.wait()
        return SimpleNamespace(about=None)

    def each(self, call):
        """Let every member do something; give what comes of it, errors too."""
        results = [None] * len(self.groups)

        def run(me):
            try:
                results[me] = call(me, self.groups[me])
            except Exception as error:
                results[me] = error

        threads = [threading.Thread(target=run, args=(me,)) for me in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def told_of(rows):
    """Go through all stages of tell()."""
    stages = tell(rows)
    while True:
        try:
            next(stages)
        except StopIteration as end:
            return end.value


def room(n, n_machines=1):
    """Say how many bytes have room behind a head."""
    return min(8192 if n_machines == 1 else 2048, 65536 // n) & ~7


counts = st.one_of(st.integers(0, 40), st.sampled_from([255, 256, 257, 2047, 2048, 2049]))


@given(
    n=st.integers(1, 4), data=st.data(), width=st.sampled_from([1, 2, 3, 0]),
    dtype=st.sampled_from(DTYPES), n_machines=st.integers(1, 2),
)  # fmt: skip
def test_an_allgather_of_rows(n, data, width, dtype, n_machines):
    rows = [data.draw(counts) for _ in range(n)]
    rng = np.random.default_rng(n)
    arrays = [rng.integers(0, 2, (count, width)).astype(dtype) for count in rows]
    code = dtype_of(np.dtype(dtype))
    members = GroupBase(n, n_machines)
    found = members.each(
        lambda me, group: told_of(
            Rows(group, "allgather", arrays[me], [rows[me]], code, None, "x")
        )
    )
    largest = max(array.nbytes for array in arrays)
    for told in found:
        assert told.counts == rows
        assert told.is_whole == (largest <= room(n, n_machines))
        out = np.empty((sum(rows), width), dtype)
        if told.is_whole:
            assert told.land(out) is out
            assert np.array_equal(out, np.concatenate(arrays))
        else:
            with pytest.raises(ValueError, match="do not land"):
                told.land(out)


@given(n=st.integers(1, 4), data=st.data(), dtype=st.sampled_from(DTYPES))
def test_an_alltoall_of_rows(n, data, dtype):
    splits = [[data.draw(counts) for _ in range(n)] for _ in range(n)]
    rng = np.random.default_rng(n)
    arrays = [rng.integers(0, 2, (sum(split), 2)).astype(dtype) for split in splits]
    cuts = [np.split(a, np.cumsum(s)[:-1]) for a, s in zip(arrays, splits, strict=True)]
    code = dtype_of(np.dtype(dtype))
    found = GroupBase(n).each(
        lambda me, group: told_of(Rows(group, "alltoall", arrays[me], splits[me], code, None, "x"))
    )
    largest = max(map(max, splits)) * 2 * np.dtype(dtype).itemsize
    for me, told in enumerate(found):
        assert told.counts == [split[me] for split in splits]
        assert told.is_whole == (largest <= room(n))
        if told.is_whole:
            out = np.empty((sum(told.counts), 2), dtype)
            expected = np.concatenate([cut[me] for cut in cuts])
            assert np.array_equal(told.land(out), expected)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 4), np.float32), ((2, 3), np.int32), ((2, 3, 1), np.float32)]
)
def test_rows_that_differ_are_an_error_for_everybody(shape, dtype):
    arrays = [np.ones((2, 3), np.float32), np.ones(shape, dtype), np.ones((5, 3), np.float32)]
    found = GroupBase(3).each(
        lambda me, group: told_of(
            Rows(
                group, "allgather", arrays[me], [len(arrays[me])], dtype_of(arrays[me].dtype),
                None, "x",
            )
        )
    )  # fmt: skip
    assert all(isinstance(one, MismatchError) for one in found), found


@pytest.mark.parametrize("other", [0, 2])
def test_roots_that_differ_are_an_error_for_everybody(other):
    own = np.ones((2, 3), np.float32)

    def gather(me, group):
        root = other if me == 1 else 1
        return told_of(Rows(group, "gather", own, [2], DType.FLOAT32, None, "gather", root))

    found = GroupBase(3).each(gather)
    assert all(isinstance(one, MismatchError) for one in found), found


def test_heads_that_lie_land_nowhere():
    packed = pack(np.arange(4.0), [4], 8, 1, DType.FLOAT64, 64)
    for rows in (-1, 9, 1 << 40):
        packed[:8] = rows.to_bytes(8, "little", signed=True)
        blocks = Blocks(packed, 1, 8, 1, DType.FLOAT64)
        assert not blocks.is_whole
        with pytest.raises(ValueError, match="do not land"):
            blocks.land(np.empty(4))


def test_what_has_no_room_leaves_the_head_alone():
    packed = pack(np.arange(9.0), [4, 5], 8, 1, DType.FLOAT64, 32)
    assert len(packed) == 2 * (HEAD_BYTES + 32)
    assert not any(packed[HEAD_BYTES : HEAD_BYTES + 32])
    blocks = Blocks(packed, 2, 8, 1, DType.FLOAT64)
    assert blocks.counts == [4, 5]
    assert not blocks.is_whole
