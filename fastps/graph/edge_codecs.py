# SPDX-License-Identifier: Apache-2.0
"""Codecs of what travels between neighbours: senders encode, receivers decode.

Without error feedback a call sends C(x). With it, both ends of each edge keep what the receiver
knows of the sender's array, y. A call sends C(x - y), and both ends add what that decodes to. So
what a codec leaves out goes with later calls, y follows x, and all workers come to agree by
    x <- x + step * (sum over j of w_j (y_j - y))
where with C(x) of a coarse codec they never would. Koloskova, Stich and Jaggi, "Decentralized
stochastic optimization and gossip algorithms with compressed communication", ICML 2019, algorithm
1. Here y belongs to an edge, so that edges may change; a worker's own y is the mean of what its
targets know. The thread that starts a call encodes, the thread that waits decodes, both without
the GIL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence

import numpy as np

from fastps.contract.codec import HEAD_BYTES, Codec, Coding, Option
from fastps.errors import FastPSError, MismatchError
from fastps.graph.combine import mix
from fastps.native._floats import DefaultFloats
from fastps.reduce._partition import Coder
from fastps.reduce.library import codec_kernel
from fastps.types import DType
from fastps.worker.handle import Array

CHUNK_BYTES = 64 << 10  # of elements that share a unit, where codecs have more than one
LINE_BYTES = 64
VERSIONS = 1 << 24
SPARSE_STEP = {
    Codec.TOPK: 1.0,
    Codec.SPARSE: 1.0,
    Codec.RANDOMK: 0.4,
}  # times the share that is sent
ONEBIT_STEP = 0.2
_CONVERT = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


def step_of(coding: Coding, count: int, wanted: float | None) -> float:
    """Return the step of mixing: the wanted one, or the codec's default (docs)."""
    if wanted is not None:
        if not 0 < wanted <= 1:
            raise ValueError(f"consensus_step={wanted:g} must be above 0 and at most 1")
        return wanted
    if coding.codec is Codec.ONEBIT:
        return ONEBIT_STEP
    share = coding.kept(count) / max(count, 1)
    return SPARSE_STEP[coding.codec] * share if coding.codec in SPARSE_STEP else 1.0


class Track:
    """What the receivers of an edge know of the sender's array; the same at both ends."""

    def __init__(self, count: int) -> None:
        self.known = np.zeros(count, np.float32)
        self.version = 0
        self._is_finite = True

    def copy(self) -> Track:
        """Return a copy, which may change apart from now on."""
        other = Track(0)
        other.known, other.version = self.known.copy(), self.version
        other._is_finite = self._is_finite
        return other

    def begin(self) -> None:
        """Start a call: set elements that are not finite to 0, or they would stay for ever."""
        self.version += 1
        if not self._is_finite:
            self.known[~np.isfinite(self.known)] = 0

    def add(self, difference: Array) -> None:
        """Add what a call decoded to, rounded alike at both ends."""
        with DefaultFloats():
            self.known += difference
        self._is_finite = bool(np.isfinite(self.known.sum(dtype=np.float64)))


class EdgeCodec:
    """The codec of arrays of one name, and what both ends of their edges know."""

    def __init__(self, name: str, coding: Coding, code: DType, count: int, rank: int) -> None:
        self.key = (coding, code, count)
        self.name, self.coding, self.count = name, coding, count
        self.has_feedback = coding.has(Option.FEEDBACK)
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
        """Return blocks of bytes, the block of each target, and what targets then know of x.

        gone: workers that are lost, which are not counted among the targets that know x.
        """
        if not self.has_feedback:
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
        """Encode for the targets of this call that share a track.

        Where targets of earlier calls share it too, those of this call get a copy to follow.
        """
        if any(one is track and peer not in targets for peer, one in self._sent.items()):
            copy = track.copy()
            for peer in targets:
                if self._sent[peer] is track:
                    self._sent[peer] = copy
            track = copy
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
        weights = [1 / len(tracks)] * len(tracks)
        return _mixed([one.known for one in tracks], weights)

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

    def decode_all(
        self, rows: Array, senders: Sequence[int], lost: Collection[int]
    ) -> dict[int, Array]:
        """Return the arrays of all senders that are not lost, by rank. Raises MismatchError.

        Ends the call. What lost senders had is forgotten.
        """
        for one in lost:
            self._heard.pop(one, None)
        found = {
            sender: self._decode(block, sender)
            for sender, block in zip(senders, rows, strict=True)
            if sender not in lost
        }
        self.is_busy = False
        return found

    def _decode(self, block: Array, sender: int) -> Array:
        if not self.count:
            return np.empty(0, np.float32)
        tag = int(block[4:HEAD_BYTES].view(np.uint32)[0])
        if not self.has_feedback:
            self._check(tag >> 24 == self.coding.codec, sender)
            return self._decoded(block, tag % VERSIONS)
        track = self._heard.setdefault(sender, Track(self.count))
        track.begin()
        self._check(tag == self._tag(track.version), sender)
        track.add(self._decoded(block, track.version))
        return track.known

    def _check(self, is_right: bool, sender: int) -> None:
        if not is_right:
            raise MismatchError(
                f"{self.name!r}: the block of worker {sender} does not follow its last one, or is "
                f"not encoded by {self.coding}: all neighbors give a name the same compression, "
                "in every call of it; use another name to begin anew"
            )


def codec_of(
    codecs: dict[str, EdgeCodec], name: str | None, coding: Coding, code: DType, count: int,
    rank: int,
) -> EdgeCodec:  # fmt: skip
    """Return the codec of a name for one call; a new one where type, size or coding changed.

    Raises ValueError for a coding without a meaning between neighbours.
    """
    if coding.mu or coding.decay != 1.0 or coding.has(Option.BYTEPS):
        raise ValueError(
            f"compression={coding}: momentum, decay and BytePS's layout are for what servers sum, "
            "not for neighbors; give a codec without them"
        )
    has_feedback = coding.has(Option.FEEDBACK)
    if name is None and has_feedback:
        raise ValueError(
            f"compression={coding} keeps error feedback from call to call: give the call a name"
        )
    key = name or ""
    found = codecs.get(key)
    if found is None or found.key != (coding, code, count):
        found = codecs[key] = EdgeCodec(key, coding, code, count, rank)
    if found.is_busy:
        raise FastPSError(
            f"{key!r}: the last call with error feedback is still in flight, or has failed; wait "
            "for it, or use another name to begin anew"
        )
    found.is_busy = has_feedback
    return found


def widened(array: Array, code: DType) -> Array:
    """Return an array as float32, without a copy where it is that already."""
    if code is DType.FLOAT32:
        return array.reshape(-1)
    v = np.empty(array.size, np.float32)
    kernel = codec_kernel("widen", code.name.lower())
    _CONVERT(kernel)(v.ctypes.data, array.ctypes.data, array.size)
    return v


def narrowed(v: Array, out: Array, code: DType) -> None:
    """Write float32 into an array of another type."""
    if code is DType.FLOAT32:
        out.reshape(-1)[...] = v
        return
    kernel = codec_kernel("narrow", code.name.lower())
    _CONVERT(kernel)(v.ctypes.data, out.ctypes.data, out.size)


def moved(
    arrays: Sequence[Array], place: int, own: Array, weights: Sequence[float], step: float
) -> Array:
    """Return x + step * sum of w_j (y_j - y); arrays: x in its place among all y_j; own: y."""
    shares = [step * weight for other, weight in enumerate(weights) if other != place]
    others = [one for other, one in enumerate(arrays) if other != place]
    return _mixed([arrays[place], own, *others], [1.0, -sum(shares), *shares])


def _mixed(arrays: Sequence[Array], weights: Sequence[float]) -> Array:
    return mix(arrays, weights, np.empty(arrays[0].size, np.float32), DType.FLOAT32)
