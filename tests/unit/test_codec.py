# SPDX-License-Identifier: Apache-2.0
"""Codecs against their formulas in NumPy: decoded values and what is kept, bit for bit."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from codec_oracle import Reference, finite
from hypothesis import given, settings
from hypothesis import strategies as st

from fastps.contract.codec import BLOCK, Codec, Coding, Option, cut_units, wire_chunk
from fastps.reduce._partition import Coder
from fastps.reduce.library import codec_kernel
from fastps.types import DType

CHUNK = 4096
SIGMAS = 5.0  # a right mean is rejected once in two million times
FEEDBACK, SCALING = Option.FEEDBACK, Option.SCALING
CODINGS = [
    Coding(Codec.ONEBIT), Coding(Codec.ONEBIT, options=SCALING | FEEDBACK),
    Coding(Codec.TOPK, 3, FEEDBACK), Coding(Codec.TOPK, 0.01), Coding(Codec.TOPK, 0.4, FEEDBACK),
    Coding(Codec.RANDOMK, 5, FEEDBACK), Coding(Codec.RANDOMK, 0.1, Option.UNBIASED, seed=3),
    *(Coding(Codec.DITHERING, k, options | FEEDBACK)
      for k in (1, 4, 7, 20) for options in (0, Option.NATURAL, Option.L2, 6)),
    *(Coding(codec, 0, options) for codec in (Codec.FP16, Codec.BF16, Codec.INT8, Codec.INT4)
      for options in (0, FEEDBACK)),
    Coding(Codec.INT4, 11), Coding(Codec.INT4, 11, FEEDBACK),
    Coding(Codec.SPARSE, 64), Coding(Codec.SPARSE, 1500, FEEDBACK),
    Coding(Codec.SPARSE, 200, FEEDBACK, decay=0.95),
    Coding(Codec.INT8, 0, FEEDBACK, mu=0.9), Coding(Codec.TOPK, 0.05, FEEDBACK, mu=0.5),
    Coding(Codec.ONEBIT, 0, SCALING, mu=0.9),
]  # fmt: skip
SIZES = [1, 2, 3, 31, 33, 64, 255, BLOCK, 257, 515, 1000, 5000]
SPECIAL = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-40, 3e38, 1.0, -1.0], "f4")
all_codings = pytest.mark.parametrize("coding", CODINGS, ids=str)


def make(coding: Coding, count: int, **options: object) -> tuple[Coder, Reference]:
    """Make a worker's coder and its reference."""
    coder = Coder(
        coding, DType.FLOAT32, nbytes=4 * count, chunk_bytes=CHUNK, name="t", rank=2, pushes=True,
        **options,
    )  # fmt: skip
    return coder, Reference(coding, count, name="t", rank=2, pushes=True, chunk_bytes=CHUNK)


def turn(coder: Coder, g: np.ndarray, version: int = 1, ratio: float = 1.0) -> np.ndarray:
    """Encode and decode one round."""
    before = g.copy()
    wire = coder.encode(g.view(np.uint8), version=version, ratio=ratio)
    assert len(wire) == coder.wire_bytes
    assert np.array_equal(g.view(np.uint32), before.view(np.uint32))  # the user's memory
    out = np.full_like(g, 7)
    coder.decode(wire, out.view(np.uint8), version=version)
    return out


def check(coder: Coder, reference: Reference, g: np.ndarray, version: int, ratio: float) -> None:
    """Compare one round, and what is kept after it; signs of zeros count for nothing."""
    np.testing.assert_array_equal(
        turn(coder, g, version, ratio), reference.encode(g, version, ratio)
    )
    for ours, theirs in zip(coder.kept(), (reference.residual, reference.momentum), strict=True):
        if ours is not None:
            np.testing.assert_array_equal(finite(np.asarray(ours)), finite(theirs))


@all_codings
def test_rounds_are_those_of_the_formulas(coding):
    random = np.random.default_rng(7)
    for count in SIZES:
        coder, reference = make(coding, count)
        for version in range(1, 5):
            g = random.standard_normal(count, dtype=np.float32)
            check(coder, reference, g, version, (1.0, 2.0, 0.5, 1.0)[version - 1])


@all_codings
@settings(max_examples=15)
@given(values=st.lists(st.sampled_from(list(SPECIAL)), min_size=1, max_size=300))
def test_special_values(coding, values):
    """What is not finite spoils what shares its scale, in its own round alone."""
    coder, reference = make(coding, len(values))
    check(coder, reference, np.array(values, np.float32), 1, 1.0)
    check(coder, reference, np.ones(len(values), np.float32), 2, 1.0)
    assert np.isfinite(turn(coder, np.ones(len(values), np.float32), 3)).all()


@all_codings
@settings(max_examples=15)
@given(data=st.data())
def test_any_floats(coding, data):
    numbers = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**60),
                        max_value=2.0**60)  # fmt: skip
    values = data.draw(st.lists(numbers, min_size=1, max_size=600))
    coder, reference = make(coding, len(values))
    check(coder, reference, np.array(values, np.float32), 1, 1.0)


@all_codings
def test_nothing_encodes_to_nothing(coding):
    coder = Coder(coding, DType.FLOAT32, nbytes=0, chunk_bytes=CHUNK)
    nothing = np.empty(0, np.uint8)
    assert coder.wire_bytes == 0
    assert coder.encode(nothing) == b""


@pytest.mark.parametrize("coding", [one for one in CODINGS if one.has(FEEDBACK)], ids=str)
def test_what_was_applied_is_all_there_was_but_for_the_residual(coding):
    coding = coding._replace(mu=0.0, decay=1.0)
    random, count, rounds = np.random.default_rng(1), 3000, 40
    coder, _ = make(coding, count)
    given_, applied, largest = np.zeros(count), np.zeros(count), 0.0
    for version in range(1, rounds):
        g = random.standard_normal(count, dtype=np.float32)
        given_ += g
        out = turn(coder, g, version)
        applied += out
        largest = max(largest, float(np.abs(out).max()))  # dithering with few levels loses much
    left = np.asarray(coder.kept()[0], np.float64)
    bound = 2 * rounds * largest * 2.0**-24  # two roundings in each round
    np.testing.assert_allclose(applied + left, given_, rtol=0, atol=bound)


@pytest.mark.parametrize(
    "coding",
    [Coding(Codec.RANDOMK, 10, Option.UNBIASED)]
    + [Coding(Codec.DITHERING, k, option) for k in (2, 4, 8) for option in (0, 2, 4, 6)],
    ids=str,
)
def test_the_mean_stays(coding):
    """Over many rounds each element's mean is its value, within SIGMAS standard errors."""
    random, rounds = np.random.default_rng(5), 4000
    g = random.standard_normal(103, dtype=np.float32)
    coder, _ = make(coding, g.size)
    drawn = np.array([turn(coder, g, version) for version in range(1, rounds + 1)], np.float64)
    error = drawn.std(axis=0) / np.sqrt(rounds) + 1e-6
    assert (np.abs(drawn.mean(axis=0) - g) < SIGMAS * error).all()


def test_a_sum_is_scaled_where_it_lies():
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    made = ctypes.CFUNCTYPE(number, pointer, pointer, number, pointer, pointer)
    kernel = made(codec_kernel("prepare", "scale"))
    v, factor = np.arange(67, dtype=np.float32), np.float32([0.25, 7, 7])
    assert kernel(v.ctypes.data, None, 66, None, factor.ctypes.data) == 1
    np.testing.assert_array_equal(v, [*np.arange(66) / 4, 66])


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@all_codings
def test_other_element_types(coding, dtype):
    """They are encoded as the float32 they are widened to."""
    g = np.random.default_rng(2).standard_normal(1000).astype(dtype)
    coder = Coder(coding, DType[dtype.upper()], nbytes=g.nbytes, chunk_bytes=CHUNK, name="t",
                  rank=2, pushes=True)  # fmt: skip
    _, reference = make(coding, g.size)
    want = reference.encode(g.astype(np.float32)).astype(dtype)
    np.testing.assert_array_equal(turn(coder, g), want)


def test_bfloat16():
    g = np.arange(500, dtype=np.float32)
    words = (g.view(np.uint32) >> 16).astype(np.uint16)
    coding = Coding(Codec.TOPK, 100)
    coder = Coder(coding, DType.BFLOAT16, nbytes=1000, chunk_bytes=CHUNK)
    want = Reference(coding, 500).encode((words.astype(np.uint32) << 16).view(np.float32))
    assert np.array_equal(turn(coder, words), (want.view(np.uint32) >> 16).astype(np.uint16))


def test_layout_of_onebit():
    """Four bytes of scale, four of the ratio, then signs, the first in the lowest bit."""
    g = np.random.default_rng(3).standard_normal(100, dtype=np.float32)
    wire = make(Coding(Codec.ONEBIT), 100)[0].encode(g.view(np.uint8), ratio=0.25)
    assert np.frombuffer(wire[:8], "f4").tolist() == [1.0, 0.25]
    bits = np.unpackbits(np.frombuffer(wire[8:], np.uint8), bitorder="little")[:100]
    assert np.array_equal(bits, g < 0)


def test_layout_of_topk():
    g = np.array([0.0, -5, 1, 5, 0, 2, 0, 0], np.float32)
    wire = make(Coding(Codec.TOPK, 2), 8)[0].encode(g.view(np.uint8))
    assert np.frombuffer(wire[8:16], "u4").tolist() == [1, 3]
    assert np.frombuffer(wire[16:], "f4").tolist() == [-5, 5]


@pytest.mark.parametrize("coding", [Coding(codec, 7) for codec in list(Codec)[1:]], ids=str)
@given(count=st.integers(1, 3000000), chunk=st.integers(64, 1 << 14))
def test_units_cover_a_partition_in_frames(coding, count, chunk):
    """Each unit but the last fills a frame that is no larger than a plain one may be."""
    chunk *= 64
    units = cut_units(coding, DType.FLOAT32, 4 * count, chunk)
    frame = wire_chunk(coding, chunk)
    n_units = -(-count // units.unit_count)
    assert frame <= chunk
    assert frame % 64 == 0
    assert units.wire_bytes == (n_units - 1) * units.unit_bytes + coding.coded_bytes(
        count - (n_units - 1) * units.unit_count
    )
    assert n_units == 1 if coding.is_whole else units.unit_bytes == frame


def test_damaged_indices_write_nowhere():
    wire = make(Coding(Codec.TOPK, 2), 8)[0].encode(np.ones(8, "f4").view(np.uint8))
    wire[8:12] = b"\xff\xff\xff\xff"
    out = np.zeros(8, np.float32)
    make(Coding(Codec.TOPK, 2), 8)[0].decode(wire, out.view(np.uint8))
    assert out.sum() == 1


@pytest.mark.parametrize(
    "coding",
    [
        Coding(Codec.TOPK), Coding(Codec.RANDOMK, 1.5), Coding(Codec.DITHERING, 128),
        Coding(Codec.DITHERING, 31, Option.NATURAL), Coding(Codec.INT4, 13),
        Coding(Codec.RANDOMK, 3, Option.UNBIASED | FEEDBACK),
        Coding(Codec.SPARSE, 2049), Coding(Codec.SPARSE, 64, decay=0.95),
        Coding(Codec.INT8, mu=1.0), Coding(Codec.INT8, seed=-1), Coding(Codec.TOPK, float("nan")),
    ],
    ids=str,
)  # fmt: skip
def test_parameters_that_mean_nothing(coding):
    with pytest.raises(ValueError, match=r"k=|unbiased|mu of|decay"):
        coding.check()
