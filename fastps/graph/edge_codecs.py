# SPDX-License-Identifier: Apache-2.0
"""What travels between neighbours with a codec: encoded by senders, decoded by receivers.

Without error feedback a call sends C(x). With it, of each edge both ends keep what the receiver
knows of the sender's array, y; a call sends C(x - y), and both add what that decodes to. So what
a codec left out goes with later calls, y follows x, and all come to agree by
    x <- x + step * (sum over j of w_j (y_j - y))
where with C(x) of a coarse codec they never would: Koloskova, Stich and Jaggi, "Decentralized
stochastic optimization and gossip algorithms with compressed communication", ICML 2019, algorithm
1, here with what is known of each edge, so that edges may change. Our own y is the mean of what
our targets know. Encoding is done by who starts a call, decoding by who waits for it, without the
GIL.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Collection, Sequence

import numpy as np

from fastps.contract.codec import HEAD_BYTES, Codec, Coding, Option
from fastps.errors import FastPSError, MismatchError
from fastps.native._floats import DefaultFloats
from fastps.reduce.codec._coder import Coder
from fastps.reduce.library import codec_kernel, reduce_kernel
from fastps.types import DType, ReduceOp
from fastps.worker.handle import Array

CHUNK_BYTES = 64 << 10  # of elements that share a unit, where codecs have more than one
LINE_BYTES = 64
VERSIONS = 1 << 24
SPARSE_STEP = {Codec.TOPK: 1.0, Codec.RANDOMK: 0.4}  # times the share that is sent
ONEBIT_STEP = 0.2
_CONVERT = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
_MIX = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64,
    ctypes.c_void_p,
)  # fmt: skip


def step_of(coding: Coding, count: int, wanted: float | None) -> float:
    """Return the step of mixing: what is wanted, or what a codec is known to stand (docs)."""
    if wanted is not None:
        if not 0 < wanted <= 1:
            raise ValueError(f"consensus_step={wanted:g} is not above 0 and at most 1")
        return wanted
    if coding.codec is Codec.ONEBIT:
        return ONEBIT_STEP
    share = coding.kept(count) / max(count, 1)
    return SPARSE_STEP[coding.codec] * share if coding.codec in SPARSE_STEP else 1.0


def check_coding(coding: Coding) -> None:
    """Raise ValueError for what has no meaning between neighbours."""
    if coding.mu or coding.has(Option.BYTEPS):
        raise ValueError(f"{coding}: momentum and BytePS's layout are of gradients by servers")


class Track:
    """What the receivers of an edge know of an array, kept alike at both ends."""

    def __init__(self, count: int) -> None:
        self.known = np.zeros(count, np.float32)
        self.version = 0
        self._is_finite = True

    def copy(self) -> Track:
        """Return one that goes its own way from here."""
        other = Track(0)
        other.known, other.version = self.known.copy(), self.version
        other._is_finite = self._is_finite
        return other

    def begin(self) -> None:
        """Forget what the last call brought that is not finite, or it would stay for ever."""
        self.version += 1
        if not self._is_finite:
            self.known[~np.isfinite(self.known)] = 0

    def add(self, difference: Array) -> None:
        """Know more, by the same rounding at both ends."""
        with DefaultFloats():
            self.known += difference
        self._is_finite = bool(np.isfinite(self.known.sum(dtype=np.float64)))


class Coded:
    """Arrays of one name that are mixed with a codec: its coder, and what is kept of edges."""

    def __init__(self, name: str, coding: Coding, code: DType, count: int, rank: int) -> None:
        self.about = (coding, code, count)
        self.name, self.coding, self.code, self.count = name, coding, code, count
        plain = coding._replace(options=coding.options & ~Option.FEEDBACK)
        self._coder = Coder(
            plain, DType.FLOAT32, nbytes=4 * count, chunk_bytes=CHUNK_BYTES, name=name, rank=rank
        )
        self.wire_bytes = self._coder.wire_bytes
        self.stride = -(-self.wire_bytes // LINE_BYTES) * LINE_BYTES
        self.is_busy = False
        self._version = 0
        self._sent: dict[int, Track] = {}
        self._heard: dict[int, Track] = {}

    def encode(
        self, x: Array, targets: Sequence[int], gone: Collection[int]
    ) -> tuple[Array, list[int], Array]:
        """Return blocks of bytes, which of them each target gets, and what those know of x then.

        gone: who is lost, and knows nothing.
        """
        if not self.coding.has(Option.FEEDBACK):
            self._version += 1
            return self._block(x, self._version).reshape(1, -1), [0] * len(targets), x
        fresh = Track(self.count)
        for target in targets:
            self._sent.setdefault(target, fresh)
        tracks = list(dict.fromkeys(self._sent[target] for target in targets))
        blocks = [self._send(track, targets, x) for track in tracks]
        order = list(dict.fromkeys(self._sent[target] for target in targets))
        places = [order.index(self._sent[target]) for target in targets]
        return np.array(blocks), places, self._known([*set(targets) - set(gone)], x)

    def _send(self, track: Track, targets: Sequence[int], x: Array) -> Array:
        """Encode for all targets that know the same; others that did are left behind."""
        if any(one is track and who not in targets for who, one in self._sent.items()):
            apart = track.copy()
            for who in targets:
                if self._sent[who] is track:
                    self._sent[who] = apart
            track = apart
        track.begin()
        block = self._block(x - track.known, track.version)
        track.add(self._decoded(block, track.version))
        return block

    def _known(self, targets: Sequence[int], x: Array) -> Array:
        tracks = [self._sent[target] for target in sorted(targets)]
        if not tracks:
            return x
        if all(one is tracks[0] for one in tracks):
            return tracks[0].known
        return mix([one.known for one in tracks], [1 / len(tracks)] * len(tracks))

    def _block(self, v: Array, version: int) -> Array:
        block = np.zeros(self.stride, np.uint8)
        if self.count:
            self._coder.encode_into(
                np.ascontiguousarray(v).view(np.uint8), block[: self.wire_bytes], version=version
            )
            block[4:HEAD_BYTES].view(np.uint32)[0] = self._tag(version)
        return block

    def _tag(self, version: int) -> int:
        return version % VERSIONS | self.coding.codec << 24

    def _decoded(self, block: Array, version: int) -> Array:
        v = np.empty(self.count, np.float32)
        if self.count:
            self._coder.decode(block[: self.wire_bytes], v.view(np.uint8), version=version)
        return v

    def decode(self, block: Array, source: int) -> Array:
        """Return what a source's bytes say of its array. Raises MismatchError."""
        if not self.count:
            return np.empty(0, np.float32)
        tag = int(block[4:HEAD_BYTES].view(np.uint32)[0])
        if not self.coding.has(Option.FEEDBACK):
            self._check(tag >> 24 == self.coding.codec, source)
            return self._decoded(block, tag % VERSIONS)
        track = self._heard.setdefault(source, Track(self.count))
        track.begin()
        self._check(tag == self._tag(track.version), source)
        track.add(self._decoded(block, track.version))
        return track.known

    def _check(self, is_right: bool, source: int) -> None:
        if not is_right:
            raise MismatchError(
                f"what worker {source} sent of {self.name!r} does not follow what it sent before, "
                f"or is not {self.coding}: all neighbors give a name the same compression, in "
                "every call of it; use another name to begin anew"
            )

    def lose(self, source: int) -> None:
        """Forget what a worker had that is lost."""
        self._heard.pop(source, None)


class CodedNames:
    """What is kept by name."""

    def __init__(self) -> None:
        self._names: dict[str, Coded] = {}

    def take(self, name: str | None, coding: Coding, code: DType, count: int, rank: int) -> Coded:
        """Return what is kept under a name, anew if it was something else, for one call at a time.

        Raises ValueError for what is never the same: error feedback without a name.
        """
        check_coding(coding)
        has_feedback = coding.has(Option.FEEDBACK)
        if name is None and has_feedback:
            raise ValueError("what error feedback keeps belongs to a name: give one")
        words = name or ""
        found = self._names.get(words)
        if found is None or found.about != (coding, code, count):
            found = self._names[words] = Coded(words, coding, code, count, rank)
        if found.is_busy:
            raise FastPSError(
                f"{words!r}: the last call with error feedback is under way, or has failed; wait "
                "for it, or use another name to begin anew"
            )
        found.is_busy = has_feedback
        return found


def widened(array: Array, code: DType) -> Array:
    """Return float32 of an array; it itself if it is that already."""
    if code is DType.FLOAT32:
        return array.reshape(-1)
    v = np.empty(array.size, np.float32)
    kernel = codec_kernel("widen", code.name.lower())
    _CONVERT(kernel)(v.ctypes.data, array.ctypes.data, array.size)
    return v


def narrowed(v: Array, out: Array, code: DType) -> None:
    """Put float32 into an array of another type."""
    if code is DType.FLOAT32:
        out.reshape(-1)[...] = v
        return
    kernel = codec_kernel("narrow", code.name.lower())
    _CONVERT(kernel)(v.ctypes.data, out.ctypes.data, out.size)


def mix(arrays: Sequence[Array], weights: Sequence[float]) -> Array:
    """Return the weighted sum, in order."""
    n, out = len(arrays), np.empty(arrays[0].size, np.float32)
    addresses = (ctypes.c_void_p * n)(*[one.ctypes.data for one in arrays])
    values = (ctypes.c_double * n)(*weights)
    kernel = reduce_kernel(ReduceOp.MIX, DType.FLOAT32)
    _MIX(kernel)(addresses, n, out.ctypes.data, out.size, ctypes.byref(values))
    return out


def finish_coded(
    coded: Coded, rows: Array, heard: Sequence[int], missed: Sequence[int]
) -> dict[int, Array]:
    """Return what all that were heard have, by rank; who is lost is forgotten."""
    for one in missed:
        coded.lose(one)
    found = {one: coded.decode(row, one)
             for one, row in zip(heard, rows, strict=True) if one not in missed}  # fmt: skip
    coded.is_busy = False
    return found


def moved(
    arrays: Sequence[Array], place: int, own: Array, weights: Sequence[float], step: float
) -> Array:
    """Return x + step * sum of w_j (y_j - y); arrays: x in its place among all y_j."""
    shares = [step * weight for other, weight in enumerate(weights) if other != place]
    others = [one for other, one in enumerate(arrays) if other != place]
    return mix([arrays[place], own, *others], [1.0, -sum(shares), *shares])


def in_order(found: dict[int, Array], own: Array, me: int) -> tuple[list[int], list[Array], int]:
    """Return ranks and arrays, ours among them, ascending, and our place."""
    members = sorted(found)
    place = bisect.bisect(members, me)
    arrays = [found[one] for one in members]
    return [*members[:place], me, *members[place:]], [*arrays[:place], own, *arrays[place:]], place
