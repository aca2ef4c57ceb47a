# SPDX-License-Identifier: Apache-2.0
"""Every kernel stays within its arrays: each has its exact size, and ends at a guard page.

KERNELS lists the kernels from the tables that make them, so a new kernel is tested, or it fails
here for want of a guard. Element counts have every rest that rows of up to 64 leave, below one row
and beyond many; Hypothesis draws others, and numbers of sources. A kernel that strays ends this
process by SIGSEGV; what it writes where alignment leaves room is noticed.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_codec
import test_codec_byteps
from codec_oracle import Reference
from hypothesis import given, settings
from hypothesis import strategies as st
from test_byzantine_rules import RULES

from aids import faces
from aids.fenced import Fenced
from aids.kernels import SUM_TYPE
from fastps import reduce
from fastps._core import CopyPool
from fastps.contract.codec import ELEMENTS, HEAD_BYTES, Codec, Coding, Option
from fastps.contract.rule import Kind
from fastps.reduce import codec_kernel, ordered_kernel, reduce_kernel, robust_kernel
from fastps.reduce._partition import Coder, Combiner, _k_of, _kernel_name
from fastps.reduce.codec import byteps, kernels
from fastps.reduce.codec.scratch import work_words
from fastps.reduce.combine_kernels import KINDS
from fastps.reduce.compiler import FAMILIES
from fastps.reduce.robust import _ROBUST
from fastps.types import DType, ReduceOp

FEW, MANY = range(65), range(1024, 1088)
N_SOURCES = 3
CHUNK_BYTES = 4096  # a unit of every partition here
FLOATS = tuple(code for code in DType if ReduceOp.MIX.has_meaning(code))
MEASURES: dict[str, Callable[[int], int]] = {  # float64 of the result, by sources
    "square_distances": lambda n: n,
    "pair_distances": lambda n: n * n,
    "square_norms": lambda n: n,
    "inner_products": lambda n: 2 * n,
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
CODINGS: dict[str, list[Coding]] = {}
for _coding in (*test_codec.CODINGS, *test_codec_byteps.CODINGS):
    CODINGS.setdefault(_kernel_name(_coding), []).append(_coding)
Kernel = tuple[Any, ...]
sides = pytest.mark.parametrize("is_last", [True, False], ids=["end", "begin"])


def list_kernels() -> list[Kernel]:
    """List all kernels: the family, and what its function in compiler.FAMILIES gets."""
    found: list[Kernel] = [
        ("reduce", op, code) for code in DType for op in ReduceOp
        if op.has_meaning(code) and op is not ReduceOp.TRIMMED_MEAN  # which is of robust.py
    ]  # fmt: skip
    found += [("robust", what, code) for what in _ROBUST for code in FLOATS]
    found += [("ordered", kind, code) for kind in KINDS for code in FLOATS]
    coders = {verb: ("pairs", "sparse", *made) for verb, made in
              (("encode", {**kernels.ENCODERS, **byteps.ENCODERS}),
               ("decode", {**kernels.DECODERS, **byteps.DECODERS}))}  # fmt: skip
    found += [(verb, what, does) for verb, names in coders.items() for what in names
              for does in (False, True)]  # fmt: skip
    found += [("prepare", what, does) for what in ("plain", "nesterov") for does in (False, True)]
    found.append(("prepare", "scale", False))
    return found + [(verb, code.name.lower(), False) for verb in ("widen", "narrow")
                    for code in ELEMENTS[1:]]  # fmt: skip


KERNELS = list_kernels()
each_kernel = pytest.mark.parametrize(
    "kernel", KERNELS, ids=lambda kernel: " ".join(getattr(x, "name", str(x)) for x in kernel)
)


class Fences:
    """Fenced arrays by name, of the same memory each time."""

    def __init__(self, is_last: bool) -> None:
        self._is_last = is_last
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


def call(
    address: int, fence: Fences, code: DType, count: int, args: Sequence[int],
    *, n: int = N_SOURCES, n_out: int | None = None,
) -> set[int]:  # fmt: skip
    """Call a kernel of n sources, apart from them and, if it makes one, in the first's place."""
    function, kind = SUM_TYPE(address), f"V{code.itemsize}"
    sources = [fence(f"source {j}", count, kind) for j in range(n)]
    for j, source in enumerate(sources):
        random_bytes(source, count + j)
    table = fence("table", n, np.uint64)
    table[:] = [source.ctypes.data for source in sources]
    numbers = fence("args", len(args), np.int64)
    numbers[:] = args
    out = fence("out", count, kind) if n_out is None else fence("out", n_out, np.float64)
    return {
        function(table.ctypes.data, n, target.ctypes.data, count,
                 numbers.ctypes.data if args else 0)
        for target in ((out, sources[0]) if n_out is None else (out,))
    }  # fmt: skip


# ---- one guard for each family ----


def guard_reduce(kernel: Kernel, fence: Fences, count: int, n: int) -> None:
    _, op, code = kernel
    address = reduce_kernel(op, code)
    weights = np.full(n, 0.5).view(np.int64).tolist()
    by_op = {ReduceOp.SUM: [[1], [1 if code is DType.BOOL else 3]], ReduceOp.MIX: [weights]}
    for args in by_op.get(op, [[]]):
        assert call(address, fence, code, count, args, n=n) == {1}


def guard_robust(kernel: Kernel, fence: Fences, count: int, n: int) -> None:
    _, what, code = kernel
    args = {"trimmed_mean": [(n - 1) // 2], "nearest_mean": [(n - 1) // 2, n - (n - 1) // 2],
            "square_distances": [n - 1]}.get(what, [])  # fmt: skip
    n_out = MEASURES[what](n) if _ROBUST[what][2] else None
    assert call(robust_kernel(what, code), fence, code, count, args, n=n, n_out=n_out) == {1}


def guard_ordered(kernel: Kernel, fence: Fences, count: int, n: int) -> None:
    _, kind, code = kernel
    n = N_SOURCES + n % 2  # each number is another kernel, made in a second
    address = ordered_kernel(kind, code, n, 0 if kind == "average" else (n - 1) // 2)
    assert call(address, fence, code, count, [], n=n) <= {1, 2}  # 2: of NaN and infinity


def values(count: int, dtype: str = "f4") -> list[np.ndarray]:
    """Make arrays that codecs treat in different ways: most elements tie, or none does."""
    few = np.zeros(count, dtype)
    few[:4], few[-4:] = [5, 4, 3, 2][:count], [9, 8, 7, 6][-count:] if count else []
    anything = np.random.default_rng(count).standard_normal(count).astype(dtype)
    return [few, anything]


def guard_coder(kernel: Kernel, fence: Fences, count: int, _n: int) -> None:
    """Encode what there may be; decode that, and bytes that nobody has encoded."""
    verb, what, does = kernel
    code = CODER(codec_kernel(verb, what, does))
    encode = code if verb == "encode" else CODER(codec_kernel("encode", what))
    for coding in CODINGS[what] if count else ():
        size = coding.coded_bytes(count) - HEAD_BYTES
        v, codes = fence("v", count, np.float32), fence("codes", size, alignment=4)
        head, args = fence("head", 1, np.float32), fence("args", 4, np.int64)
        work = fence("work", work_words(count), np.uint32, alignment=8)
        pointers = [v.ctypes.data, count, *(x.ctypes.data for x in (codes, head, work, args))]
        option = Option.L2 if coding.codec is Codec.DITHERING else Option.UNBIASED
        args[:] = [_k_of(coding, count), 1, 2, int(coding.has(option))]
        for one in values(count):
            v[:] = one
            assert encode(*pointers) == code(*pointers) == 1
        random_bytes(codes, count)
        assert code(*pointers) == 1


def guard_prepare(kernel: Kernel, fence: Fences, count: int, _n: int) -> None:
    _, what, does = kernel
    v, g, momentum = (fence(name, count, np.float32) for name in ("v", "g", "momentum"))
    numbers = fence("numbers", 3, np.float32)
    for one in (v, g, momentum, numbers):
        random_bytes(one, count)
    pointers = [momentum.ctypes.data if what == "nesterov" else 0, numbers.ctypes.data]
    prepare = PREPARER(codec_kernel("prepare", what, does))
    assert prepare(v.ctypes.data, g.ctypes.data, count, *pointers) == 1


def guard_conversion(kernel: Kernel, fence: Fences, count: int, _n: int) -> None:
    verb, what, _ = kernel
    v = fence("v", count, np.float32)
    elements = fence("g", count, f"V{DType[what.upper()].itemsize}")
    random_bytes(v, count)
    random_bytes(elements, count)
    assert CONVERTER(codec_kernel(verb, what))(v.ctypes.data, elements.ctypes.data, count) == 1


GUARDS = {
    "reduce": guard_reduce, "robust": guard_robust, "ordered": guard_ordered,
    "encode": guard_coder, "decode": guard_coder, "prepare": guard_prepare,
    "widen": guard_conversion, "narrow": guard_conversion,
}  # fmt: skip
VERBS = {"encode", "decode", "prepare", "widen", "narrow"}  # of the families of codecs


@sides
@each_kernel
def test_kernels_of_every_count(kernel, is_last, fence):
    for count in (*FEW, *MANY) if is_last else (0, 1, 63, 1087):
        GUARDS[kernel[0]](kernel, fence, count, N_SOURCES)
        fence.check()


counts = st.one_of(
    st.integers(0, 3), st.integers(4, 300), st.integers(4000, 6000),
    st.builds(lambda power, rest: (1 << power) + rest, st.integers(3, 13), st.integers(-3, 3)),
)  # fmt: skip


@sides
@settings(max_examples=400)
@given(st.sampled_from(KERNELS), counts, st.integers(1, 9))
def test_kernels_of_any_count(is_last, kernel, count, n):
    fence = Fences(is_last)
    GUARDS[kernel[0]](kernel, fence, count, n)
    fence.check()


def test_every_family_has_a_guard():
    """A family or a verb that list_kernels() does not know is added there, and to GUARDS."""
    assert set(FAMILIES) == {"reduce", "robust", "ordered", "codec", "byteps", "pairs", "sparse"}
    assert set(GUARDS) == {kernel[0] for kernel in KERNELS}
    package = Path(reduce.__file__).parents[1]
    sources = [path.read_text() for path in package.rglob("*.p[yx]*") if path.suffix != ".pyc"]
    asked = {verb for text in sources for verb in re.findall(r'codec_kernel\(\s*"(\w+)"', text)}
    assert asked == VERBS


# ---- coders, whose scratch is laid out for several kernels ----


at_the_end = pytest.mark.parametrize("is_last", [True], ids=["end"])
one_of_each = pytest.mark.parametrize(
    "coding",
    {(_kernel_name(one), one.has(Option.FEEDBACK)): one for one in test_codec.CODINGS}.values(),
    ids=str,
)


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
        for version, brought in enumerate(values(count, dtype), 1):
            elements[:] = brought
            want = reference.encode(brought.astype(np.float32), version).astype(dtype)
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
        for version, brought in enumerate(values(count), 1):
            pushed = [one.encode(brought.view(np.uint8), version=version) for one, _ in workers]
            parts = [other.encode(brought, version) for _, other in workers]
            faces.sum_coded(coder, pushed, wire, scratch, divisor=1, version=version)
            coder.decode(wire, out.view(np.uint8), version=version)
            np.testing.assert_array_equal(out, reference.sum(parts, 1, version))
        fence.check()


# ---- rules, copies and sums in pieces, whose kernels get parts of arrays ----


@sides
@pytest.mark.parametrize("name", RULES)
def test_combiners(name, is_last, fence):
    """Updates, result, refusals and scratch have their exact sizes."""
    rule, n = RULES[name], 11
    for count in (0, 1, 7, 65, 4097) if is_last else (1, 63):
        combiner = Combiner(rule, DType.FLOAT32, n=n, count=count)
        for came, spoilt in ((n, 0), (n, 2), (n - 1, 1), (1, 0), (0, 0)):
            updates = [fence(f"update {j}", count, np.float32) for j in range(came)]
            for j, one in enumerate(updates):
                one[:] = np.random.default_rng(j).standard_normal(count)
                one[: 1 if j < spoilt else 0] = np.nan
            refused = fence("refused", came)
            scratch = fence("scratch", faces.combiner_scratch_bytes(combiner), alignment=64)
            out = fence("out", count, np.float32)
            faces.combine_into(combiner, updates, out, refused, scratch)
            assert refused.sum() == (spoilt if count else 0)
            fence.check()


def test_every_rule_is_among_them():
    assert {rule.kind for rule in RULES.values()} >= set(Kind) - {Kind.NONE, Kind.OWN}


PIECE = 32 << 10  # of long copies and sums that several threads share
LONG = 4 << 20  # from which on they do
LENGTHS = (*range(200), 383, *range(1020, 1030), 3071, 3072, 3079, 5888, 2 * PIECE, 7 * PIECE + 1)


FILES_OF_KERNELS = ("copy.pxd", "crc.pxd")


def copies(source: np.ndarray, fence: Fences) -> None:
    for whole in (0, 8 << 20):  # read soon, or past the caches
        target = fence("target", len(source))
        faces.copy(target, source, whole)
        assert (target == source).all()


NATIVE: dict[str, Callable[[np.ndarray, Fences], object]] = {
    "fps_copy": copies,
    "fps_crc": lambda source, _: faces.crc32c_of_payload(source),
    "fps_crc_chains": lambda source, _: faces.chained_crc32c_of_payload(source),
    "fps_crc_short": lambda source, _: faces.crc32c(source),
    "fps_crc_portable": lambda source, _: faces.portable_crc32c_of_payload(source),
}


@sides
@pytest.mark.parametrize("name", NATIVE)
def test_native_functions(name, is_last, fence):
    for nbytes in LENGTHS if is_last else (0, 1, 255, 3079, 7 * PIECE + 1):
        source = fence("source", nbytes)
        random_bytes(source, nbytes)
        NATIVE[name](source, fence)
        fence.check()


def test_every_native_function_is_among_them():
    """Those of native/ that C code is given memory to read or write."""
    native = Path(reduce.__file__).parents[1] / "native"
    text = "".join((native / name).read_text().rpartition('"""')[2] for name in FILES_OF_KERNELS)
    declared = set(re.findall(r"^    \w+ (fps_\w+)\(.*void\*", text, re.M))
    assert declared - {"fps_copy_way"} == set(NATIVE)  # which looks at addresses alone


@sides
def test_pieces_that_threads_share(is_last, fence):
    copiers = CopyPool(3)
    for nbytes in (2 * PIECE - 4, 2 * PIECE, 5 * PIECE + 4, 7 * PIECE + 12):
        source, target = fence("source", nbytes), fence("target", nbytes)
        random_bytes(source, nbytes)
        faces.copy_by_pool(target, source, LONG)
        assert (target == source).all()
        kernel = reduce_kernel(ReduceOp.SUM, DType.INT32)
        assert faces.fold_by_pool(kernel, [source, source], target, 4, 1, LONG) == 1
        assert (target.view("i4") == source.view("i4") + source.view("i4")).all()
        fence.check()
    assert copiers.close()
