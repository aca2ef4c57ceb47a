# SPDX-License-Identifier: Apache-2.0
"""BytePS's byte layouts and random numbers against NumPy: bytes, values and what is kept."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from byteps_oracle import BytePS, Xorshift, elias_delta
from hypothesis import given, settings
from hypothesis import strategies as st
from test_codec import CHUNK, SIZES, SPECIAL

from fastps import Compression, ConfigError
from fastps.reduce._partition import Coder
from fastps.reduce.codec.scratch import work_words
from fastps.reduce.library import codec_kernel
from fastps.types import DType

LIKE: dict[str, object] = {"layout": "byteps"}
CODINGS = [  # BytePS's grid, and error feedback
    *(Compression.onebit(scaling, **LIKE) for scaling in (False, True)),
    *(Compression.topk(k, **LIKE) for k in (1, 3, 5)),
    *(Compression.randomk(k, seed=seed, **LIKE) for k in (1, 3, 5) for seed in (1, 2020)),
    *(Compression.dithering(k, partition=partition, normalize=norm, seed=k, **LIKE)
      for k in (2, 4, 8) for partition in ("linear", "natural") for norm in ("max", "l2")),
    Compression.dithering(100, seed=7, **LIKE),
    *(make(ef="vanilla", **LIKE) for make in (
        Compression.onebit, lambda **how: Compression.topk(0.3, **how),
        lambda **how: Compression.randomk(0.5, seed=2**63 - 1, **how),
        lambda **how: Compression.dithering(20, seed=5, partition="linear", **how),
        lambda **how: Compression.dithering(5, seed=6, partition="natural", **how))),
]  # fmt: skip
all_codings = pytest.mark.parametrize("coding", CODINGS, ids=str)


def make(coding, count):
    coder = Coder(coding, DType.FLOAT32, nbytes=4 * count, chunk_bytes=CHUNK, rank=2, pushes=True)
    return coder, BytePS(coding, count)


def check(coder, reference, g):
    wire = coder.encode(g.view(np.uint8))
    raw, want = reference.round(g)
    assert bytes(wire[8:]) == raw
    out = np.full_like(g, 7)
    coder.decode(wire, out.view(np.uint8))
    np.testing.assert_array_equal(out, want)
    kept = coder.kept()[0]
    if kept is not None:
        np.testing.assert_array_equal(np.asarray(kept), reference.residual)
    return wire


@all_codings
def test_rounds_are_byteps(coding):
    """The generator goes on from round to round."""
    random = np.random.default_rng(7)
    for count in SIZES:
        coder, reference = make(coding, count)
        for _ in range(3):
            check(coder, reference, random.standard_normal(count, dtype=np.float32))


@all_codings
@settings(max_examples=15)
@given(data=st.data())
def test_any_floats(coding, data):
    """Equal ones, zeros and what is not finite."""
    numbers = st.sampled_from([*SPECIAL, *np.arange(-2, 3, dtype=np.float32)]) | st.floats(
        -(2.0**60), 2.0**60, width=32)  # fmt: skip
    values = data.draw(st.lists(numbers, min_size=1, max_size=300))
    coder, reference = make(coding, len(values))
    g = np.array(values, np.float32)
    wire = coder.encode(g.view(np.uint8))
    out = np.full_like(g, 7)
    coder.decode(wire, out.view(np.uint8))
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(out, reference.encode(g))


@all_codings
def test_sums_add_what_each_decodes_to(coding):
    """Of two pairs with one index the later counts, once; decoders that add are a server's."""
    count = 257
    g = np.random.default_rng(3).standard_normal(count, dtype=np.float32)
    coder, reference = make(coding, count)
    wire = coder.encode(g.view(np.uint8))
    want = reference.encode(g)
    total, work = np.ones(count, np.float32), np.zeros(work_words(count), np.uint32)
    kind = {1: "onebit", 2: "topk", 3: "randomk"}.get(
        int(coding.codec), "natural" if coding.options & 2 else "linear"
    )
    k = {1: coding.options & 1, 4: int(coding.k)}.get(int(coding.codec), coding.kept(count))
    pointers = [ctypes.c_void_p] + [ctypes.c_int64] + [ctypes.c_void_p] * 4
    add = ctypes.CFUNCTYPE(ctypes.c_int64, *pointers)(
        codec_kernel("decode", f"byteps_{kind}", True)
    )
    codes = np.frombuffer(wire, np.uint8)
    args = np.array([k, 0, 0, 0], np.int64)
    add(total.ctypes.data, count, codes[8:].ctypes.data, codes.ctypes.data, work.ctypes.data,
        args.ctypes.data)  # fmt: skip
    np.testing.assert_array_equal(total, 1 + want)


@settings(max_examples=60)
@given(data=st.data())
def test_damaged_bytes_write_nowhere_else(data):
    """Whatever comes, decoding ends and stays within the partition."""
    coding = data.draw(st.sampled_from([one for one in CODINGS if one.codec != 1]))
    count = data.draw(st.integers(1, 80))
    coder, _ = make(coding, count)
    wire = bytearray(data.draw(st.binary(min_size=coder.wire_bytes, max_size=coder.wire_bytes)))
    room = np.full(count + 64, 7, np.float32)
    coder.decode(wire, room[32:-32].view(np.uint8))
    assert (room[:32] == 7).all()
    assert (room[-32:] == 7).all()


def test_words_that_are_known():
    """Elias' codes as in his paper, and the first numbers from a state of (1, 1)."""
    assert [elias_delta(x) for x in (1, 2, 3, 4, 8, 17)] == [
        "1", "0100", "0101", "01100", "00100000", "001010001",
    ]  # fmt: skip
    random = Xorshift(1)
    t = 1 ^ 1 << 23
    assert random.next() == (t ^ t >> 17 ^ 1) + 1


def test_what_byteps_does_not_have():
    for wrong in (
        lambda: Compression.randomk(3, layout="byteps"),
        lambda: Compression.dithering(4, layout="byteps"),
        lambda: Compression.randomk(3, seed=1, unbiased=True, layout="byteps"),
        lambda: Compression.dithering(30, partition="natural", seed=1, layout="byteps"),
        lambda: Compression.onebit(layout="horovod"),
    ):
        with pytest.raises(ConfigError):
            wrong()
