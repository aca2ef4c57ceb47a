# SPDX-License-Identifier: Apache-2.0
"""The two formats of a checkpoint: safetensors files, and the manifest that vouches for them.

A worker's share is a safetensors file: the length of a header, the header in JSON, and the bytes
of all pieces without a gap. Its metadata say where each piece lies in its tensor, in the words of
torch.distributed.checkpoint, whose HuggingFaceStorageReader reads the files.

The manifest is JSON too. Its first line has the digest of all lines that follow. These have the
plain values, and of each tensor the pieces, with file, place and digest. A file's digest is that
of its header, the pieces' cover the rest. So each bit of a checkpoint is covered. Pure.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastps.checkpoint.shares import Piece, covers
from fastps.checkpoint.trees import CODES, MARK, RESERVED, Tensor, itemsize_of
from fastps.collectives.objects import decode_object
from fastps.errors import ProtocolError

MANIFEST = "manifest.json"
FORMAT, VERSION = "fastps checkpoint", 1
_LENGTH = struct.Struct("<Q")
_ALIGNED = 8  # bytes; the data begin at a multiple
_HEX = hashlib.sha256().digest_size * 2
_FIRST = '{{"sha256": "{}",\n'
_FIRST_LINE = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')
_NAME = re.compile(r"\d{5,}-of-\d{5,}\.safetensors")


class Stored(NamedTuple):
    """A piece in a file. at: its first byte behind the header."""

    piece: Piece
    file: int
    at: int
    digest: str


class File(NamedTuple):
    """A file of a checkpoint. digest: of its header."""

    name: str
    nbytes: int
    header_nbytes: int
    digest: str


class Manifest(NamedTuple):
    """What a checkpoint consists of.

    plain: the state without its tensors. own: the same of what each worker had for itself, whose
    tensors count from first_own on.
    """

    step: int
    plain: bytes
    own: list[bytes]
    first_own: list[int]
    tensors: list[Tensor]
    files: list[File]
    stored: list[Stored]


def digest_of(data: bytes | memoryview) -> str:
    """Return the SHA-256 of bytes in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def file_name(worker: int, n_workers: int) -> str:
    """Return the name of a worker's file."""
    return f"{worker:05d}-of-{n_workers:05d}.safetensors"


def order_of(tensors: Sequence[Tensor], pieces: Sequence[Piece]) -> list[Piece]:
    """Return pieces in the order of a file: large elements first, so that all are aligned."""
    return sorted(pieces, key=lambda one: -itemsize_of(tensors[one.tensor].dtype))


def header_of(tensors: Sequence[Tensor], pieces: Sequence[Piece]) -> bytes:
    """Return what a safetensors file of these pieces begins with, in their order."""
    entries: dict[str, Any] = {}
    places: dict[str, Any] = {}
    at = 0
    for piece in pieces:
        tensor = tensors[piece.tensor]
        code, count = CODES[tensor.dtype]
        nbytes = piece.n_elements * itemsize_of(tensor.dtype)
        pair = [] if count == 1 else [count]
        entries[tensor.name] = {
            "dtype": code, "shape": [*piece.shape, *pair], "data_offsets": [at, at + nbytes],
        }  # fmt: skip
        places[tensor.name] = {"saved_offsets": [*piece.offsets, *[0 for _ in pair]]}
        at += nbytes
    about = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": _text(places)}
    text = _text({RESERVED: about, **entries}).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return _LENGTH.pack(len(text)) + text


def write_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest."""
    pieces: list[list[Any]] = [[] for _ in manifest.tensors]
    for piece, file, at, digest in manifest.stored:
        pieces[piece.tensor].append({
            "file": file, "at": at, "offsets": piece.offsets, "shape": piece.shape,
            "sha256": digest,
        })  # fmt: skip
    tensors = [
        {**tensor._asdict(), "pieces": its}
        for tensor, its in zip(manifest.tensors, pieces, strict=True)
    ]
    words = {
        "format": FORMAT, "version": VERSION, "step": manifest.step,
        "files": [file._asdict() for file in manifest.files],
        "first_own": manifest.first_own,
        "plain": base64.b64encode(manifest.plain).decode(),
        "own": [base64.b64encode(one).decode() for one in manifest.own],
        "tensors": tensors,
    }  # fmt: skip
    rest = json.dumps(words, indent=1)[1:].lstrip().encode() + b"\n"
    return _FIRST.format(digest_of(rest)).encode() + rest


def read_manifest(data: bytes) -> Manifest:
    """Return what a manifest says; ValueError for all that write_manifest() does not write."""
    first = _FIRST_LINE.match(data)
    if first is None:
        raise ValueError("it is not a manifest of fastps")
    if digest_of(memoryview(data)[first.end() :]) != first[1].decode():
        raise ValueError("it has changed: its SHA-256 is another")
    try:
        words = json.loads(data)
        if words["format"] != FORMAT or words["version"] != VERSION:
            raise ValueError(
                f"it has the format {words['format']!r}, version {words['version']!r}; this "
                f"fastps reads {FORMAT!r}, version {VERSION}"
            )
        manifest = _manifest_of(words)
        _check(manifest)
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"it is malformed ({type(error).__name__}: {error})") from error
    return manifest


def _manifest_of(words: dict[str, Any]) -> Manifest:
    tensors, stored = [], []
    for number, one in enumerate(words["tensors"]):
        tensors.append(
            Tensor(
                str(one["name"]), str(one["dtype"]), _numbers(one["shape"]), str(one["kind"]),
                bool(one["is_sharded"]),
            )
        )  # fmt: skip
        for its in one["pieces"]:
            piece = Piece(number, _numbers(its["offsets"]), _numbers(its["shape"]))
            stored.append(Stored(piece, _number(its["file"]), _number(its["at"]), its["sha256"]))
    files = [
        File(one["name"], _number(one["nbytes"]), _number(one["header_nbytes"]), one["digest"])
        for one in words["files"]
    ]
    return Manifest(
        _number(words["step"]), base64.b64decode(words["plain"], validate=True),
        [base64.b64decode(one, validate=True) for one in words["own"]],
        list(_numbers(words["first_own"])), tensors, files, stored,
    )  # fmt: skip


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} must be a number")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(map(_number, values))


def _check(manifest: Manifest) -> None:
    """Raise ValueError where files, pieces, tensors and marks do not fit each other."""
    for file in manifest.files:
        if not _NAME.fullmatch(file.name) or not _LENGTH.size <= file.header_nbytes <= file.nbytes:
            raise ValueError(f"{file.name!r} cannot be a file of a checkpoint")
    of_file: list[list[Stored]] = [[] for _ in manifest.files]
    of_tensor: list[list[Piece]] = [[] for _ in manifest.tensors]
    for stored in manifest.stored:
        if stored.file >= len(of_file) or len(stored.digest) != _HEX:
            raise ValueError("a piece is in none of its files")
        of_file[stored.file].append(stored)
        of_tensor[stored.piece.tensor].append(stored.piece)
    for tensor, pieces in zip(manifest.tensors, of_tensor, strict=True):
        if tensor.dtype not in CODES:
            raise ValueError(f"tensor {tensor.name!r} has the unknown dtype {tensor.dtype!r}")
        if not covers(tensor.shape, pieces):
            raise ValueError(f"the pieces of tensor {tensor.name!r} do not cover it")
    for file, its in zip(manifest.files, of_file, strict=True):
        at = 0
        for stored in sorted(its, key=lambda one: (one.at, one.piece.n_elements)):
            tensor = manifest.tensors[stored.piece.tensor]
            if stored.at != at:
                raise ValueError(f"{file.name} has a gap at byte {at} of its data")
            at += stored.piece.n_elements * itemsize_of(tensor.dtype)
        if at != file.nbytes - file.header_nbytes:
            raise ValueError(f"{file.name} has bytes of no piece")
    _check_marks(manifest)


def _check_marks(manifest: Manifest) -> None:
    bounds = [*manifest.first_own, len(manifest.tensors)]
    first = [0, *manifest.first_own]
    if len(manifest.own) != len(manifest.first_own) or sorted(bounds) != bounds:
        raise ValueError("the values of workers do not fit their number")
    for plain, low, high in zip([manifest.plain, *manifest.own], first, bounds, strict=True):
        try:
            marks = list(_marks_of(decode_object(plain)))
        except ProtocolError as error:
            raise ValueError(str(error)) from error
        if any(type(one) is not int or not 0 <= one < high - low for one in marks):
            raise ValueError("a value stands for a tensor that there is not")


def _marks_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [mark for item in value.values() for mark in _marks_of(item)]
    if isinstance(value, tuple) and len(value) and isinstance(value[0], str) and value[0] == MARK:
        return [value[1] if len(value) == 2 else None]
    if isinstance(value, list | tuple):
        return [mark for item in value for mark in _marks_of(item)]
    return []


def _text(words: Any) -> str:
    return json.dumps(words, separators=(",", ":"))
