# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is read: nothing that has changed since it was written is handed out.

The manifest has its own digest, and those of all headers and pieces. A piece is digested where it
lands. Workers restore together: rank 0 says which checkpoint, each reads all that it wants, and
all say whether they could. Threads: the caller's.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from fastps.checkpoint import folders
from fastps.checkpoint.folders import CHUNK_BYTES, Saved
from fastps.checkpoint.formats import MANIFEST, File, Manifest, Stored, digest_of, read_manifest
from fastps.checkpoint.shares import Piece, flat_range
from fastps.checkpoint.team import Team, first_error
from fastps.checkpoint.trees import NUMPY, Kind, Tensor, itemsize_of, put_together
from fastps.errors import CheckpointError, ProtocolError
from fastps.files import Folder, open_folder, text_of
from fastps.worker.handle import Array

Box = tuple[slice, ...]
_TEAM = "fastps checkpoint restore"


@dataclass(frozen=True)
class Restored:
    """What a checkpoint holds.

    state: the tree that was saved. own: what each worker that saved it gave as own=, by its rank
    of then. path: its folder.
    """

    step: int
    state: Any
    own: list[Any]
    path: Path


def restore(
    folder: str | os.PathLike[str], step: int | None, parts: Mapping[str, Box], *,
    fallback: bool, kinds: Sequence[Kind],
) -> Restored | None:  # fmt: skip
    """Read a checkpoint on all workers; see fastps.checkpoint.restore()."""
    team, path = Team(_TEAM), Path(os.path.abspath(folder))
    chosen, error = [], ""
    if team.rank == 0:
        try:
            chosen = [tuple(one) for one in _choose(path, step)]
        except (OSError, CheckpointError) as why:
            error = _text_of(why)
    told = team.exchange_once({"error": error, "chosen": chosen})
    if told[0]["error"]:
        raise CheckpointError(told[0]["error"])
    candidates = [Saved(*one) for one in told[0]["chosen"]]
    errors = []
    for saved in candidates if fallback else candidates[:1]:
        found, mine = _try_one(path, saved, parts, kinds)
        if not (told_error := first_error(team.exchange_once({"error": mine}))):
            return found
        errors.append(told_error)
    if errors:
        raise CheckpointError("; ".join(errors) + _cure(candidates, fallback))
    return None


def verify(folder: str | os.PathLike[str], step: int | None) -> list[str]:
    """Return all that is wrong with a checkpoint; see fastps.checkpoint.verify()."""
    path = Path(os.path.abspath(folder))
    try:
        chosen = _choose(path, step)
        if not chosen:
            return [f"{path} has no complete checkpoint"]
        with open_folder(path, is_made=False) as outer, outer.subfolder(chosen[0].name) as inside:
            return _Reader(inside, (NUMPY,)).faults()
    except (OSError, CheckpointError) as error:
        return [_text_of(error)]


def list_steps(folder: str | os.PathLike[str]) -> list[int]:
    """Return the steps of complete checkpoints; see fastps.checkpoint.steps()."""
    path = Path(os.path.abspath(folder))
    try:
        return list(dict.fromkeys(one.step for one in reversed(_saved_in(path))))[::-1]
    except OSError as error:
        raise CheckpointError(text_of(error)) from error


def _saved_in(path: Path) -> list[Saved]:
    try:
        with open_folder(path, is_made=False) as folder:
            return folders.list_saved(folder)
    except FileNotFoundError:
        return []


def _choose(path: Path, step: int | None) -> list[Saved]:
    """Return the checkpoints to try, the newest first."""
    saved = _saved_in(path)[::-1]
    if step is None:
        return saved
    found = [one for one in saved if one.step == step]
    if not found:
        steps = [one.step for one in saved][::-1]
        raise CheckpointError(f"{path} has no complete checkpoint of step {step}, only {steps}")
    return found


def _cure(candidates: Sequence[Saved], fallback: bool) -> str:
    if fallback or len(candidates) < 2:
        return ""
    return (
        f"; the one before is of step {candidates[1].step}: pass fallback=True to use it, or its "
        "step="
    )


def _try_one(
    path: Path, saved: Saved, parts: Mapping[str, Box], kinds: Sequence[Kind]
) -> tuple[Restored | None, str]:
    """Read one checkpoint; return it, or why it cannot be used."""
    try:
        with open_folder(path, is_made=False) as outer, outer.subfolder(saved.name) as inside:
            return _Reader(inside, kinds).read(parts), ""
    except Exception as error:  # the others wait for the outcome
        return None, _text_of(error)


def _text_of(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"a checkpoint cannot be used: {text_of(error)}"
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


class _Reader:
    """One checkpoint, opened."""

    def __init__(self, folder: Folder, kinds: Sequence[Kind]) -> None:
        self._folder = folder
        self._kinds = {kind.name: kind for kind in kinds}
        self._manifest = self._read_manifest()

    def _read_manifest(self) -> Manifest:
        path = self._folder.path / MANIFEST
        try:
            with self._folder.read(MANIFEST) as file:
                return read_manifest(file.read())
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing") from error
        except (ValueError, ProtocolError) as error:
            raise CheckpointError(f"{path} cannot be used: {error}") from error

    def read(self, parts: Mapping[str, Box]) -> Restored:
        """Return all, or of some tensors a part; CheckpointError names what has changed."""
        manifest = self._manifest
        names = {tensor.name for tensor in manifest.tensors}
        if unknown := sorted(set(parts) - names):
            raise CheckpointError(
                f"{self._folder.path} has no tensor {unknown[0]!r}, which parts= names"
            )
        landings = [
            _Landing(tensor, self._kinds.get(tensor.kind, NUMPY), parts.get(tensor.name))
            for tensor in manifest.tensors
        ]
        for number, file in enumerate(manifest.files):
            pieces = self._pieces_of(number)
            with self._open(file) as source:
                for stored in pieces:
                    landings[stored.piece.tensor].read(source, file, stored, self._folder.path)
        values = [landing.value for landing in landings]
        own = [
            put_together(plain, values[first:].__getitem__)
            for plain, first in zip(manifest.own, manifest.first_own, strict=True)
        ]
        state = put_together(manifest.plain, values.__getitem__)
        return Restored(manifest.step, state, own, self._folder.path)

    def faults(self) -> list[str]:
        """Return all that has changed."""
        found = []
        scratch: Array = np.empty(CHUNK_BYTES, np.uint8)
        for number, file in enumerate(self._manifest.files):
            try:
                source = self._open(file)
            except (OSError, CheckpointError) as error:
                found.append(_text_of(error))
                continue
            with source:
                for stored in self._pieces_of(number):
                    tensor = self._manifest.tensors[stored.piece.tensor]
                    left = stored.piece.n_elements * itemsize_of(tensor.dtype)
                    digest = hashlib.sha256()
                    while left:
                        some = scratch[: min(left, CHUNK_BYTES)]
                        _read_into(source, some)
                        digest.update(some.data)
                        left -= len(some)
                    if digest.hexdigest() != stored.digest:
                        found.append(_changed(tensor, stored.piece, self._folder.path / file.name))
        return found

    def _pieces_of(self, number: int) -> list[Stored]:
        its = [stored for stored in self._manifest.stored if stored.file == number]
        return sorted(its, key=lambda stored: (stored.at, stored.piece.n_elements))

    def _open(self, file: File) -> BufferedReader:
        """Open a file whose length and header are right; it stands behind its header."""
        path = self._folder.path / file.name
        try:
            source = self._folder.read(file.name)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing") from error
        try:
            nbytes = os.fstat(source.fileno()).st_size
            if nbytes != file.nbytes:
                raise CheckpointError(
                    f"{path} has {nbytes} bytes; {file.nbytes} bytes were written"
                )
            if digest_of(source.read(file.header_nbytes)) != file.digest:
                raise CheckpointError(f"the header of {path} has changed: its SHA-256 is another")
        except BaseException:
            source.close()
            raise
        return source


class _Landing:
    """A tensor, or a part of it, into which pieces are read."""

    def __init__(self, tensor: Tensor, kind: Kind, part: Box | None) -> None:
        self._tensor = tensor
        self._bounds = _bounds_of(tensor, part)
        self._shape = tuple(stop - start for start, stop in self._bounds)
        self._is_whole = self._shape == tensor.shape
        self.value, self._data = kind.make(tensor.dtype, self._shape)

    def read(self, source: BufferedReader, file: File, stored: Stored, folder: Path) -> None:
        """Read a piece, which lies next in the file; CheckpointError if it has changed."""
        size, piece = itemsize_of(self._tensor.dtype), stored.piece
        span = flat_range(self._tensor, piece) if self._is_whole else None
        if span is None:
            data: Array = np.empty(piece.n_elements * size, np.uint8)
        else:
            data = self._data[span[0] * size : span[1] * size]
        digest = hashlib.sha256()
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            _read_into(source, chunk)
            digest.update(chunk.data)
        if digest.hexdigest() != stored.digest:
            raise CheckpointError(_changed(self._tensor, piece, folder / file.name))
        if span is None:
            self._place(piece, data, size)

    def _place(self, piece: Piece, data: Array, size: int) -> None:
        """Copy what is wanted of a piece to its place."""
        there, here = [], []
        for (start, stop), at, length in zip(
            self._bounds, piece.offsets, piece.shape, strict=True
        ):
            low, high = max(start, at), min(stop, at + length)
            if low >= high:
                return
            there.append(slice(low - start, high - start))
            here.append(slice(low - at, high - at))
        dtype = np.dtype((np.void, size))
        whole = self._data.view(dtype).reshape(self._shape)
        whole[tuple(there)] = data.view(dtype).reshape(piece.shape)[tuple(here)]


def _bounds_of(tensor: Tensor, part: Box | None) -> list[tuple[int, int]]:
    """Return the first and last row of each dimension that are wanted."""
    part = part if isinstance(part, tuple) else () if part is None else (part,)
    if len(part) > len(tensor.shape):
        raise CheckpointError(
            f"parts= has {len(part)} slices for tensor {tensor.name!r} of shape {tensor.shape}"
        )
    part = (*part, *[slice(None)] * (len(tensor.shape) - len(part)))
    found = []
    for one, length in zip(part, tensor.shape, strict=True):
        start, stop, stride = one.indices(length)
        if stride != 1:
            raise CheckpointError(f"parts= of tensor {tensor.name!r} must have slices of stride 1")
        found.append((start, max(start, stop)))
    return found


def _read_into(source: BufferedReader, data: Array) -> None:
    if source.readinto(data.data) != len(data):
        raise CheckpointError(f"{source.name} became shorter while it was read")


def _changed(tensor: Tensor, piece: Piece, path: Path) -> str:
    at = "" if piece.shape == tensor.shape else f" at {list(piece.offsets)}"
    return f"tensor {tensor.name!r}{at} in {path} has changed: its SHA-256 is another"
