# SPDX-License-Identifier: Apache-2.0
"""Commits on disk: each tensor and the whole file have a digest, and the commit before is kept.

A file is the bytes of all tensors, then the head (plain values, and of each tensor its type, shape
and digest), then the end: magic, length and digest of the head. So a file that was cut off or in
which a bit has changed is noticed before anything of it is used.

Order of a write: the new file under another name, and fsync; the last commit becomes the one
before; the new one becomes the last; fsync of the folder. Whenever the machine stops, one commit
at least is whole. Knows nothing of jobs and ranks; one process at a time writes in a folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import uuid
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fastps.errors import ConfigError, FastPSError
from fastps.frameworks.torch.broadcast import describe, make_room
from fastps.frameworks.torch.tensors import sendable
from fastps.frameworks.torch.trees import put_back, take_out
from fastps.objects import decode_object, encode_object
from fastps.worker.handle import Array

_log = logging.getLogger(__name__)
_MAGIC = b"fastps commit 2\n"
_END = struct.Struct("<16sQ32s")  # magic, bytes of the head, digest of the head


def exists(path: Path) -> bool:
    """Return whether there is a commit, or one before it."""
    return path.exists() or _before(path).exists()


def write(path: Path, saved: dict[str, Any]) -> None:
    """Make values the last commit, and what was that the one before; FastPSError if impossible."""
    fresh = path.with_suffix(".new")
    tensors: list[torch.Tensor] = []
    mark = uuid.uuid4().hex
    plain = {"mark": mark, "value": take_out(saved, mark, tensors)}
    encode_object(plain)  # TypeError for what cannot be kept
    described = [describe(tensor) for tensor in tensors]
    try:
        with fresh.open("wb") as file:
            digests = [_put(file, _bytes_of(sendable(tensor))) for tensor in tensors]
            head = encode_object(plain | {"tensors": described, "digests": digests})
            file.write(_END.pack(_MAGIC, len(head), _put(file, head)))
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            path.replace(_before(path))
        fresh.replace(path)
        _keep_names(path.parent)
    except OSError as error:
        raise FastPSError(
            f"a commit could not be written to {path}, where the one before it still is: {error}; "
            "make room there, or give another directory as FASTPS_COMMIT_DIR"
        ) from error


def read(path: Path) -> dict[str, Any]:
    """Return the last commit; if it is damaged, the one before, with a warning; or ConfigError.

    A damaged file is put aside under another name, lest it take the place of the one before.
    """
    before = _before(path)
    try:
        return _read_one(path)
    except (OSError, ValueError) as error:
        if not before.exists():
            raise _nothing_whole(path, error) from error
        if path.exists():
            path.replace(path.with_suffix(".damaged"))
        try:
            saved = _read_one(before)
        except (OSError, ValueError) as other:
            raise _nothing_whole(before, other) from error
        _log.warning(
            "the last commit %s is damaged (%s): training goes on from the one before it, %s",
            path, error, before,
        )  # fmt: skip
        return saved


def _before(path: Path) -> Path:
    return path.with_suffix(".before")


def _nothing_whole(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{path} is not a commit, or damaged, and there is none before it: {error}; give an empty "
        "directory as FASTPS_COMMIT_DIR to begin anew"
    )


def _put(file: BinaryIO, data: bytes | memoryview) -> bytes:
    """Write bytes and return their digest."""
    file.write(data)
    return _digest(data)


def _read_one(path: Path) -> dict[str, Any]:
    """Read one file; ValueError, OSError where it is not a whole commit."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head, room = _read_head(file, size)
        file.seek(0)
        tensors: list[torch.Tensor] = []
        for (code, shape), digest in zip(head["tensors"], head["digests"], strict=True):
            tensor = make_room(code, shape)
            room -= tensor.nbytes
            data = _bytes_of(tensor)
            if room < 0 or file.readinto(data) != tensor.nbytes:
                raise ValueError("tensors are missing")
            if _digest(data) != digest:
                raise ValueError(f"tensor {len(tensors)}, {code} of shape {shape}, has changed")
            tensors.append(tensor)
        if room:
            raise ValueError(f"{room} bytes belong to no tensor")
    saved: dict[str, Any] = put_back(head["value"], head["mark"], tensors)
    return saved


def _read_head(file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """Return the head, and how many bytes stand before it."""
    if size < _END.size:
        raise ValueError(f"{size} bytes are too few")
    file.seek(size - _END.size)
    magic, length, digest = _END.unpack(file.read(_END.size))
    if magic != _MAGIC or length > size - _END.size:
        raise ValueError("its end is missing, or of another version of fastps")
    file.seek(size - _END.size - length)
    data = file.read(length)
    if _digest(data) != digest:
        raise ValueError("its list of values has changed")
    return decode_object(data), size - _END.size - length


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def _keep_names(folder: Path) -> None:
    """Have the names of a folder written, not only the contents of its files."""
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # one element has any stride
    array: Array = flat.view(torch.uint8).numpy()
    return array.data
