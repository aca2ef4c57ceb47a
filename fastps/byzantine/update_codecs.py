# SPDX-License-Identifier: Apache-2.0
"""Codecs of updates: a worker encodes its blocks, and the validator judges the decoded ones.

Error feedback and momentum stay with the worker and go into its next update of that block; a
skipped block loses nothing. Blocks that are too small for a codec, or not floats, travel as they
are. Pure, except for what the coders keep; one object serves one worker, on one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastps.byzantine.scores import Array
from fastps.contract.codec import PLAIN
from fastps.contract.compression import Choice, coding_of
from fastps.reduce._partition import Coder
from fastps.types import dtype_of

CHUNK_BYTES = 64 << 10  # of elements that share a unit, where codecs have more than one
_VERSIONS = 1 << 32


class Codes:
    """How the blocks of one worker's updates travel."""

    def __init__(
        self, choice: Choice, names: Sequence[str], likes: Sequence[Array], worker: int, *,
        min_bytes: int,
    ) -> None:  # fmt: skip
        """Make the coders, which must be alike at both ends.

        likes: arrays of the shapes and types of blocks. min_bytes: size from which blocks are
        encoded. Raises ConfigError and TypeError for a choice that is not a codec.
        """
        self._coders = [
            _coder(choice, name, like, worker, min_bytes)
            for name, like in zip(names, likes, strict=True)
        ]
        self.sizes = [
            like.nbytes if coder is None else coder.wire_bytes
            for coder, like in zip(self._coders, likes, strict=True)
        ]

    def encode(self, place: int, block: Array, number: int) -> Array:
        """Return the bytes of a block of a round; without a codec they are the block's own."""
        raw, coder = block.reshape(-1).view(np.uint8), self._coders[place]
        if coder is None:
            return raw
        wire = np.empty(coder.wire_bytes, np.uint8)
        coder.encode_into(raw, wire, version=number % _VERSIONS)
        return wire

    def room(self, place: int, block: Array) -> Array:
        """Return the array into which the bytes of a block are to be read."""
        is_plain = self._coders[place] is None
        return block.reshape(-1).view(np.uint8) if is_plain else np.empty(self.sizes[place], "u1")

    def decode(self, place: int, wire: Array, block: Array, number: int) -> None:
        """Write a block from the bytes that were read into its room()."""
        coder = self._coders[place]
        if coder is not None:
            raw = block.reshape(-1).view(np.uint8)
            coder.decode(wire, raw, version=number % _VERSIONS)

    def kept(self) -> list[Any]:
        """Return copies of what error feedback and momentum keep, for a checkpoint."""
        return [
            None if coder is None else
            [None if one is None else np.array(one) for one in coder.kept()]
            for coder in self._coders
        ]  # fmt: skip

    def restore(self, kept: Sequence[Any]) -> None:
        """Restore what kept() returned."""
        for coder, one in zip(self._coders, kept, strict=True):
            if coder is not None:
                coder.restore(tuple(one))


def _coder(choice: Choice, name: str, like: Array, worker: int, min_bytes: int) -> Coder | None:
    coding, code = coding_of(choice, name) or PLAIN, dtype_of(like.dtype)
    if not coding.fits(code, like.nbytes, min_bytes=min_bytes):
        return None
    return Coder(coding, code, nbytes=like.nbytes, chunk_bytes=CHUNK_BYTES, name=name, rank=worker,
                 pushes=True)  # fmt: skip
