# SPDX-License-Identifier: Apache-2.0
"""Every kernel stays within its arrays: each has its exact size, and ends at a guard page.

Element counts have every rest that rows of up to 64 leave, below one row and beyond many. A kernel
that strays ends this process by SIGSEGV; what it writes where alignment leaves room is noticed.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import test_codec
import test_codec_byteps
from codec_oracle import Reference

from aids import faces
from aids.fenced import Fenced
from aids.kernels import SUM_TYPE
from fastps.contract.codec import ELEMENTS, HEAD_BYTES, Coding, Option
from fastps.reduce import codec_kernel, ordered_kernel, reduce_kernel, robust_kernel
from fastps.reduce._partition import Coder, _k_of, _kernel_name
from fastps.reduce.codec.scratch import work_words
from fastps.reduce.combine_kernels import KINDS
from fastps.types import DType, ReduceOp

FEW, MANY = range(1, 65), range(1024, 1088)
N_SOURCES = 3
CHUNK_BYTES = 4096  # a unit of every partition here
FLOATS = tuple(code for code in DType if ReduceOp.MIX.has_meaning(code))
MEASURES = {  # of robust.py: float64 of the result, by sources
    "square_distances": N_SOURCES,
    "pair_distances": N_SOURCES**2,
    "square_norms": N_SOURCES,
    "inner_products": 2 * N_SOURCES,
}
CODER = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 4
)  # fmt: skip
PREPARER = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 2
)
CONVERTER = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64
)  # fmt: skip
sides = pytest.mark.parametrize("is_last", [True, False], ids=["end", "begin"])
dtypes = pytest.mark.parametrize("code", list(DType), ids=lambda code: code.name.lower())
floats = pytest.mark.parametrize("code", FLOATS, ids=lambda code: code.name.lower())
all_codings = pytest.mark.parametrize(
    "coding", [*test_codec.CODINGS, *test_codec_byteps.CODINGS], ids=str
)

at_the_end = pytest.mark.parametrize("is_last", [True], ids=["end"])
one_of_each = pytest.mark.parametrize(
    "coding",
    {(_kernel_name(one), one.has(Option.FEEDBACK)): one for one in test_codec.CODINGS}.values(),
    ids=str,
)


class Fences:
    """Fenced arrays by name, of the same memory each time."""

    def __init__(self, is_last: bool) -> None:
        self._is_last = is_last
        self.counts = (*FEW, *MANY) if is_last else (1, 63, 1087)
        self._rooms: dict[str, Fenced] = {}

    def __call__(
        self, name: str, count: int, dtype: type | str = np.uint8, *, alignment: int = 0
    ) -> np.ndarray:
        """Return an array; alignment: of its beginning, if not that of an element."""
        if name not in self._rooms:
            self._rooms[name] = Fenced(1 << 18)
        room = self._rooms[name]
        alignment = alignment or np.dtype(dtype).itemsize
        return room.array(count, dtype, alignment=alignment, is_last=self._is_last)

    def check(self) -> None:
        """Raise AssertionError where something beside the arrays was written."""
        for room in self._rooms.values():
            room.check()


@pytest.fixture
def fence(is_last: bool) -> Fences:
    """Arrays before or behind pages of PROT_NONE."""
    return Fences(is_last)


def random_bytes(array: np.ndarray, seed: int) -> None:
    """Fill an array with anything: NaN, infinities and subnormals among it."""
    flat = array.view(np.uint8)
    flat[:] = np.random.default_rng(seed).integers(0, 256, flat.size, np.uint8)


def call(address: int, fence: Fences, code: DType, n_out: int | None, args: list[int]) -> set[int]:
    """Call a kernel of sources with every count, apart from them and in the first one's place."""
    function, found = SUM_TYPE(address), set()
    kind = f"V{code.itemsize}"
    for count in fence.counts:
        sources = [fence(f"source {j}", count, kind) for j in range(N_SOURCES)]
        for j, source in enumerate(sources):
            random_bytes(source, count + j)
        table = fence("table", N_SOURCES, np.uint64)
        table[:] = [source.ctypes.data for source in sources]
        numbers = fence("args", len(args), np.int64)
        numbers[:] = args
        out = fence("out", count, kind) if n_out is None else fence("out", n_out, np.float64)
        for target in (out, sources[0]) if n_out is None else (out,):
            found.add(function(table.ctypes.data, N_SOURCES, target.ctypes.data, count,
                               numbers.ctypes.data if args else 0))  # fmt: skip
        fence.check()
    return found


@sides
@dtypes
def test_operations(code, fence):
    weights = np.full(N_SOURCES, 0.5).view(np.int64).tolist()
    for op in ReduceOp:
        if not op.has_meaning(code):
            continue
        args = {ReduceOp.SUM: [1], ReduceOp.TRIMMED_MEAN: [1]}.get(op, [])
        args = weights if op is ReduceOp.MIX else args
        assert call(reduce_kernel(op, code), fence, code, None, args) == {1}, op


@sides
@dtypes
def test_averages(code, fence):
    divisor = 1 if code is DType.BOOL else 3
    assert call(reduce_kernel(ReduceOp.SUM, code), fence, code, None, [divisor]) == {1}


@sides
@floats
def test_rules_for_any_number_of_sources(code, fence):
    for what, args in {"nearest_mean": [1, 2], "sign_majority": []}.items():
        assert call(robust_kernel(what, code), fence, code, None, args) == {1}, what
    for what, n_out in MEASURES.items():
        args = [1] if what == "square_distances" else []
        assert call(robust_kernel(what, code), fence, code, n_out, args) == {1}, what


@sides
@floats
@pytest.mark.parametrize("kind", KINDS)
def test_rules_for_a_fixed_number_of_sources(kind, code, fence):
    address = ordered_kernel(kind, code, N_SOURCES, 0 if kind == "average" else 1)
    assert call(address, fence, code, None, []) <= {1, 2}  # 2: of NaN and infinity


def values(count: int, dtype: str = "f4") -> list[np.ndarray]:
    """Make arrays that codecs treat in different ways: most elements tie, or none does."""
    few = np.zeros(count, dtype)
    few[:4], few[-4:] = [5, 4, 3, 2][:count], [9, 8, 7, 6][-count:]
    anything = np.random.default_rng(count).standard_normal(count).astype(dtype)
    return [few, anything]


@sides
@all_codings
@pytest.mark.parametrize("does", [False, True], ids=["plain", "keeps or adds"])
def test_codecs(coding, does, fence):
    """Encode what there may be; decode that, and bytes that nobody has encoded."""
    name = _kernel_name(coding)
    encode, decode = (CODER(codec_kernel(verb, name, does)) for verb in ("encode", "decode"))
    for count in fence.counts:
        size = coding.coded_bytes(count) - HEAD_BYTES
        v, codes = fence("v", count, np.float32), fence("codes", size, alignment=4)
        head = fence("head", 1, np.float32)
        work = fence("work", work_words(count), np.uint32, alignment=8)
        args = fence("args", 4, np.int64)
        for given in values(count):
            v[:] = given
            args[:] = [_k_of(coding, count), 1, 2, int(coding.has(4))]
            pointers = [one.ctypes.data for one in (codes, head, work, args)]
            assert encode(v.ctypes.data, count, *pointers) == 1
            assert decode(v.ctypes.data, count, *pointers) == 1
        random_bytes(codes, count)
        assert decode(v.ctypes.data, count, *pointers) == 1
        fence.check()


@sides
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("kind", ["plain", "nesterov", "scale"])
def test_what_comes_before_codecs(kind, has_residual, fence):
    prepare = PREPARER(codec_kernel("prepare", kind, has_residual))
    for count in fence.counts:
        v, g, momentum = (fence(name, count, np.float32) for name in ("v", "g", "momentum"))
        numbers = fence("numbers", 3, np.float32)
        for one in (v, g, momentum, numbers):
            random_bytes(one, count)
        pointers = [momentum.ctypes.data if kind == "nesterov" else 0, numbers.ctypes.data]
        assert prepare(v.ctypes.data, g.ctypes.data, count, *pointers) == 1
        fence.check()


@sides
@pytest.mark.parametrize("code", ELEMENTS[1:], ids=lambda code: code.name.lower())
def test_conversions(code, fence):
    for verb in ("widen", "narrow"):
        convert = CONVERTER(codec_kernel(verb, code.name.lower()))
        for count in fence.counts:
            v, elements = fence("v", count, np.float32), fence("g", count, f"V{code.itemsize}")
            random_bytes(v, count)
            random_bytes(elements, count)
            assert convert(v.ctypes.data, elements.ctypes.data, count) == 1
            fence.check()


# ---- coders, whose scratch is laid out for several kernels ----


def pair(
    coding: Coding, code: DType, count: int, *, pushes: bool, rank: int = 0
) -> tuple[Coder, Reference]:
    """Make a coder of a worker or a server, and what it is compared with."""
    who: dict[str, object] = {"name": "t", "rank": rank, "pushes": pushes}
    coder = Coder(coding, code, nbytes=count * code.itemsize, chunk_bytes=CHUNK_BYTES, **who)
    return coder, Reference(coding, count, chunk_bytes=CHUNK_BYTES, **who)


@at_the_end
@one_of_each
@pytest.mark.parametrize(
    "code", [DType.FLOAT16, DType.FLOAT64], ids=lambda code: code.name.lower()
)
def test_coders_of_workers(coding, code, fence):
    dtype = code.name.lower()
    for count in MANY:
        coder, reference = pair(coding, code, count, pushes=True)
        elements, wire = fence("g", count, dtype), fence("wire", coder.wire_bytes, alignment=4)
        out = fence("out", count, dtype)
        for version, given in enumerate(values(count, dtype), 1):
            elements[:] = given
            want = reference.encode(given.astype(np.float32), version).astype(dtype)
            coder.encode_into(elements.view(np.uint8), wire, version=version)
            coder.decode(wire, out.view(np.uint8), version=version)
            np.testing.assert_array_equal(out, want)
        fence.check()


@at_the_end
@one_of_each
def test_coders_of_servers(coding, fence):
    """What two workers pushed is decoded, added and encoded in scratch of the exact size."""
    for count in MANY:
        coder, reference = pair(coding, DType.FLOAT32, count, pushes=False)
        workers = [pair(coding, DType.FLOAT32, count, pushes=True, rank=rank) for rank in range(2)]
        wire = fence("wire", coder.wire_bytes, alignment=4)
        scratch = fence("scratch", faces.scratch_bytes(coder), alignment=64)
        out = fence("out", count, np.float32)
        for version, given in enumerate(values(count), 1):
            pushed = [one.encode(given.view(np.uint8), version=version) for one, _ in workers]
            parts = [other.encode(given, version) for _, other in workers]
            faces.sum_coded(coder, pushed, wire, scratch, divisor=1, version=version)
            coder.decode(wire, out.view(np.uint8), version=version)
            np.testing.assert_array_equal(out, reference.sum(parts, 1, version))
        fence.check()
