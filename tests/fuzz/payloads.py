# SPDX-License-Identifier: Apache-2.0
"""Targets: what other members encoded - tensors, objects, updates for validators."""

from __future__ import annotations

import enum
from collections import OrderedDict, namedtuple
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import test_codec
import test_codec_byteps

from aids import faces
from aids.fenced import Fenced
from fastps.byzantine.updates import HEADER_BYTES, UpdateAssembler, UpdateHeader, unpack
from fastps.collectives.objects import decode_object, decode_of, encode_for_all, encode_object
from fastps.contract.codec import ELEMENTS
from fastps.reduce._partition import Coder

from .target import Target

CODINGS = [*test_codec.CODINGS, *test_codec_byteps.CODINGS]
COUNTS = (1, 31, 257, 1000)  # elements
CHUNK_BYTES = 4096


class Codecs(Target):
    """Encoded partitions before a guard page: coding, count, element type, and the wire.

    Any bytes of the right length are a partition; so run() cuts or fills up what changes made.
    """

    name = "codecs"
    is_native = True
    per_round = 4000

    def open(self) -> None:
        self.rooms = {name: Fenced(1 << 16) for name in ("wire", "out", "again")}
        self.coders: dict[tuple[int, int, int], Coder] = {}
        for which in range(len(CODINGS)):
            self._make(which, 0, which % len(ELEMENTS))  # compiles kernels

    def seeds(self) -> Sequence[bytes]:
        found, random = [], np.random.default_rng(1)
        for which in range(len(CODINGS)):
            count = which % len(COUNTS)
            values = random.standard_normal(COUNTS[count], np.float32)
            wire = self._make(which, count, 0).encode(values.view(np.uint8))
            found.append(bytes([which, count, 0]) + bytes(wire))
        return found

    def run(self, data: bytes) -> None:
        which, count, kind = data[:3].ljust(3, b"\0")
        key = which % len(CODINGS), count % len(COUNTS), kind % len(ELEMENTS)
        if key not in self.coders:
            self.coders[key] = self._make(*key)
        coder, code = self.coders[key], ELEMENTS[key[2]]
        wire = self.rooms["wire"].array(coder.wire_bytes, alignment=4, is_last=True)
        given = np.frombuffer(data[3 : 3 + len(wire)], np.uint8)
        wire[:], wire[: len(given)] = 0, given
        out = self.rooms["out"].array(
            COUNTS[key[1]] * code.itemsize, alignment=code.itemsize, is_last=True
        )
        coder.decode(wire, out, version=1)
        if key[2] == 0:
            again = self.rooms["again"].array(coder.wire_bytes, alignment=4, is_last=True)
            scratch = np.zeros(faces.scratch_bytes(coder) + 64, np.uint8)
            at = -scratch.ctypes.data % 64
            faces.sum_coded(coder, [wire, wire], again, scratch[at:], divisor=2)
        for room in self.rooms.values():
            room.check()

    def split(self, data: bytes) -> list[bytes]:
        return [data[:3], data[3:11], data[11:]]

    def _make(self, which: int, count: int, kind: int) -> Coder:
        code = ELEMENTS[kind]
        nbytes = COUNTS[count] * code.itemsize
        return Coder(CODINGS[which], code, nbytes=nbytes, chunk_bytes=CHUNK_BYTES)


class Colour(enum.Enum):
    """A class that objects name."""

    RED = 1


Pair = namedtuple("Pair", "a b")


class Objects(Target):
    """Objects of collectives, decoded as those of worker 3."""

    name = "objects"
    is_native = True  # msgspec and NumPy
    per_round = 12_000
    errors = (TypeError,)  # of decode_of(), where the other worker could not send its object
    tree = (msgspec.msgpack.decode, msgspec.msgpack.encode)

    def seeds(self) -> Sequence[bytes]:
        objects = [
            None, [1, -2.5, "text", b"bytes", True], {"a": 1, 2: [3], (4, 5): {6}}, 1 << 200,
            np.arange(6, dtype=np.float32).reshape(2, 3), np.float64(1.5), np.zeros((0, 3), "i2"),
            np.dtype("<f4"), Path("/a/b"), OrderedDict(a=1), Colour.RED, Pair(1, [2]), "\udc80",
        ]  # fmt: skip
        return [*map(encode_for_all, objects), encode_object(objects)]

    def run(self, data: bytes) -> None:
        found = decode_object(data)
        if isinstance(found, tuple) and len(found) == 2:
            decode_of(3, data)


class Updates(Target):
    """Headers of the blocks of an update, as a validator reads them."""

    name = "updates"
    per_round = 12_000

    def seeds(self) -> Sequence[bytes]:
        rounds = [UpdateHeader(3, step, 0, block, block == 1, (0 if block == 1 else 8 * block))
                  for step in (1, 2) for block in range(3)]  # fmt: skip
        return [self.join([one.pack() for one in rounds])]

    def run(self, data: bytes) -> None:
        assembly = UpdateAssembler(3, sizes=(0, 8, 16))
        for header in self.split(data):
            if len(header) < HEADER_BYTES:
                return
            found = unpack(header)
            step = assembly.take(found)
            if step.is_end or found is None:
                return
            if step.is_taken:
                assembly.put(found, None)

    def split(self, data: bytes) -> list[bytes]:
        return [data[at : at + HEADER_BYTES] for at in range(0, len(data), HEADER_BYTES)]
