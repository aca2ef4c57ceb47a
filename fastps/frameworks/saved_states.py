# SPDX-License-Identifier: Apache-2.0
"""Commits of training state on disk, with digests; the previous commit is kept.

A file has three parts: the bytes of all tensors; the head, with plain values, and description and
digest of each tensor; the end, with magic, length and digest of the head. So a file that is
truncated or has a changed bit is detected before any of its values is used.

A write has four steps: the new file under another name, with fsync; the last commit is renamed to
the previous one; the new file is renamed to the last one; fsync of the folder. Whenever the
machine stops, at least one commit is complete. Knows nothing of jobs, ranks and frameworks; one
process at a time writes in a folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar

from fastps.collectives.objects import decode_object, encode_object
from fastps.errors import ConfigError, FastPSError, ProtocolError
from fastps.files import Folder, open_folder, text_of

_log = logging.getLogger(__name__)
_MAGIC = b"fastps commit 2\n"
_END = struct.Struct("<16sQ32s")  # magic, bytes of the head, digest of the head
_T = TypeVar("_T")
Room: TypeAlias = Callable[[Any], tuple[_T, memoryview]]  # f(description): a tensor, its bytes


def exists(path: Path) -> bool:
    """Return whether there is a commit, the last or the previous one."""
    try:
        with open_folder(path.parent, is_made=False) as folder:
            return folder.has(path.name) or folder.has(_before(path).name)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _not_trusted(error) from error


def write(path: Path, plain: Any, described: Sequence[Any], tensors: Iterable[memoryview]) -> None:
    """Write values as the last commit; the last one becomes the previous one.

    plain: values for encode_object(), else TypeError. described: a plain description of each
    tensor. tensors: the bytes of each. FastPSError if the files cannot be written.
    """
    encode_object(plain)  # raises TypeError before a file is written
    fresh = path.with_suffix(".new").name
    try:
        with open_folder(path.parent) as folder:
            with os.fdopen(folder.make(fresh), "wb") as file:
                digests = [_put(file, data) for data in tensors]
                words = {"value": plain, "tensors": list(described), "digests": digests}
                head = encode_object(words)
                file.write(_END.pack(_MAGIC, len(head), _put(file, head)))
                file.flush()
                os.fsync(file.fileno())
            if folder.has(path.name):
                folder.rename(path.name, _before(path).name)
            folder.rename(fresh, path.name)
            folder.sync()
    except OSError as error:
        raise FastPSError(
            f"a commit could not be written to {path}, where the one before it still is: {error}; "
            "free disk space there, or set FASTPS_COMMIT_DIR to another directory"
        ) from error


def read(path: Path, room: Room[_T]) -> tuple[Any, list[_T]]:
    """Return the plain values and the tensors of the last commit.

    If it is damaged, return those of the previous one, with a warning, and rename the damaged
    file, so that it never replaces the previous one. ConfigError if both are damaged or missing.
    """
    try:
        folder = open_folder(path.parent, is_made=False)
    except FileNotFoundError as error:
        raise _nothing_whole(path, error) from error
    except OSError as error:
        raise _not_trusted(error) from error
    with folder:
        return _read_last(folder, path, room)


def _read_last(folder: Folder, path: Path, room: Room[_T]) -> tuple[Any, list[_T]]:
    before = _before(path)
    try:
        return _read_one(folder, path.name, room)
    except PermissionError as error:  # another user's is not damaged, and stays as it is
        raise _not_trusted(error) from error
    except (OSError, ValueError, ProtocolError) as error:
        if not folder.has(before.name):
            raise _nothing_whole(path, error) from error
        if folder.has(path.name):
            folder.rename(path.name, path.with_suffix(".damaged").name)
        try:
            saved = _read_one(folder, before.name, room)
        except (OSError, ValueError, ProtocolError) as other:
            raise _nothing_whole(before, other) from error
        _log.warning(
            "the last commit %s is damaged (%s): training continues from the previous one, %s",
            path, error, before,
        )  # fmt: skip
        return saved


def _before(path: Path) -> Path:
    return path.with_suffix(".before")


def _nothing_whole(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{path} is damaged or not a commit, and there is none before it: {error}; set "
        "FASTPS_COMMIT_DIR to an empty directory to begin anew"
    )


def _not_trusted(error: OSError) -> ConfigError:
    return ConfigError(
        f"the commits of this job cannot be used: {text_of(error)}; FASTPS_COMMIT_DIR must be a "
        "directory that only this user can write"
    )


def _put(file: BinaryIO, data: bytes | memoryview) -> bytes:
    """Write bytes and return their digest."""
    file.write(data)
    return _digest(data)


def _read_one(folder: Folder, name: str, room: Room[_T]) -> tuple[Any, list[_T]]:
    """Read one file; ValueError or OSError if it is not a complete commit."""
    with folder.read(name) as file:
        size = os.fstat(file.fileno()).st_size
        head, left = _read_head(file, size)
        file.seek(0)
        tensors: list[_T] = []
        for about, digest in zip(head["tensors"], head["digests"], strict=True):
            tensor, data = _make_room(room, about, len(tensors))
            left -= data.nbytes
            if left < 0 or file.readinto(data) != data.nbytes:
                raise ValueError("tensors are missing")
            if _digest(data) != digest:
                raise ValueError(f"tensor {len(tensors)}, {about}, has changed")
            tensors.append(tensor)
        if left:
            raise ValueError(f"{left} bytes belong to no tensor")
    return head["value"], tensors


def _read_head(file: BufferedReader, size: int) -> tuple[dict[str, Any], int]:
    """Return the head, and the number of bytes before it."""
    if size < _END.size:
        raise ValueError(f"{size} bytes are too few for a commit")
    file.seek(size - _END.size)
    magic, length, digest = _END.unpack(file.read(_END.size))
    if magic != _MAGIC or length > size - _END.size:
        raise ValueError("its end is missing, or from another version of fastps")
    file.seek(size - _END.size - length)
    data = file.read(length)
    if _digest(data) != digest:
        raise ValueError("its list of values has changed")
    head = decode_object(data)
    if not (
        isinstance(head, dict) and head.keys() == {"value", "tensors", "digests"}
        and isinstance(head["tensors"], list) and isinstance(head["digests"], list)
    ):  # fmt: skip
        raise ValueError("its list of values is not one of fastps")
    return head, size - _END.size - length


def _make_room(room: Room[_T], about: Any, place: int) -> tuple[_T, memoryview]:
    """Return what a framework makes of a description; ValueError where that is none of its."""
    try:
        return room(about)
    except MemoryError as error:
        raise FastPSError(
            f"no memory for tensor {place}, {about!r}, of a commit; free some and start again"
        ) from error
    except Exception as error:
        raise ValueError(f"tensor {place}, {about!r}, cannot be made: {error}") from error


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()
