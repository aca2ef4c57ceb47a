# SPDX-License-Identifier: Apache-2.0
"""Spans as they are stored in the files of a trace, and the notes beside them.

Each process of a job leaves two files in the directory of the trace. NAME.spans has records of 64
bytes in the order in which they were drained. NAME.jsonl has one object a line: the process, names
of tensors, offsets of its clock, how it ended. Both are valid up to their last whole record,
however the process ended. Threads: none.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias, TypedDict

import msgspec
import numpy as np
from msgspec import Meta

from fastps.files import Folder

# by number: SpanKind of fastps/_core.pxd
KINDS = (
    "", "QUEUE", "PUSH", "AWAIT", "PULL", "COMPRESS", "DECOMPRESS", "REDUCE", "SPREAD", "RECEIVE",
    "SUM", "RESULT", "OPERATION", "WAIT", "STEP", "ACTIVITY", "DROPPED",
)  # fmt: skip
(
    QUEUE, PUSH, AWAIT, PULL, COMPRESS, DECOMPRESS, REDUCE, SPREAD, RECEIVE, SUM, RESULT,
    OPERATION, WAIT, STEP, ACTIVITY, DROPPED,
) = range(1, len(KINDS))  # fmt: skip
OF_A_WORKER = (QUEUE, PUSH, AWAIT, PULL, COMPRESS, DECOMPRESS, REDUCE, SPREAD, OPERATION)
SPANS_SUFFIX, NOTES_SUFFIX = ".spans", ".jsonl"
INDEX_BITS = 16  # of a key: which partition

RECORD = np.dtype(
    [
        ("began", "<i8"), ("ended", "<i8"), ("key", "<u8"), ("nbytes", "<u8"),
        ("version", "<u4"), ("peer", "<u4"), ("thread", "<u4"), ("kind", "<u4"),
        ("spare", "V16"),
    ]
)  # fmt: skip

Spans: TypeAlias = np.ndarray[Any, np.dtype[np.void]]
Number: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
Time: TypeAlias = Annotated[int, Meta(gt=-(1 << 60), lt=1 << 60)]  # ns; sums have 64 bits


class Who(TypedDict):
    """The process of a trace; boot: the same on processes that read one clock.

    rank: among those of its role; number: among all members.
    """

    role: str
    rank: Number
    number: Number
    host: str
    boot: str
    pid: Number


class Note(msgspec.Struct, frozen=True):
    """One line of notes; what it is about, and the fields that belong to that, are there."""

    who: Who | None = None
    tensor: Number | None = None
    since: Time = 0
    activity: Number | None = None
    name: str = ""
    of: str = ""
    clock: tuple[Time, Time, Time] | None = None
    end: Time | None = None


@dataclass
class Recording:
    """The trace of one process; missing notes are empty."""

    who: dict[str, Any]
    spans: Spans
    names: dict[int, list[tuple[int, str]]] = field(default_factory=dict)  # id -> (since, name)
    clocks: list[tuple[int, int, int]] = field(default_factory=list)  # time, offset, bound; ns
    activities: dict[int, tuple[str, str]] = field(default_factory=dict)  # (what, of what)
    has_ended: bool = False

    def name_of(self, key: int, when: int) -> str:
        """Return the name of the tensor that had the id of a key at that time."""
        known = [name for since, name in self.names.get(key >> INDEX_BITS, ()) if since <= when]
        return known[-1] if known else f"tensor {key >> INDEX_BITS}"


def read_spans(data: bytes) -> Spans:
    """Read the whole records of a file's bytes, up to the first that is invalid."""
    spans = np.frombuffer(data[: len(data) // RECORD.itemsize * RECORD.itemsize], RECORD)
    wrong = (
        (spans["kind"] == 0) | (spans["kind"] >= len(KINDS)) | (spans["ended"] < spans["began"])
    )
    return spans[: int(np.argmax(wrong))] if wrong.any() else spans


def read_notes(folder: Folder, name: str) -> Iterator[Note]:
    """Read the notes of a file up to the first line that is not whole, or is no note."""
    with folder.read(name) as file:
        text = file.read().decode(errors="replace")
    for line in text.splitlines():
        try:
            note = msgspec.convert(json.loads(line), Note)
        except (ValueError, RecursionError):
            return
        yield note


def read_recording(folder: Folder, name: str) -> Recording:
    """Read the trace of one process; name: of its notes."""
    spans = np.empty(0, RECORD)
    with (
        contextlib.suppress(FileNotFoundError),
        folder.read(name.removesuffix(NOTES_SUFFIX) + SPANS_SUFFIX) as file,
    ):
        spans = read_spans(file.read())
    recording = Recording({}, spans)
    for note in read_notes(folder, name):
        if note.who is not None:
            recording.who = dict(note.who)
        elif note.tensor is not None:
            recording.names.setdefault(note.tensor, []).append((note.since, note.name))
        elif note.activity is not None:
            recording.activities[note.activity] = (note.name, note.of)
        elif note.clock is not None:
            recording.clocks.append(note.clock)
        elif note.end is not None:
            recording.has_ended = True
    return recording


def names_of_notes(folder: Folder) -> list[str]:
    """List the notes of all processes in a directory."""
    return [name for name in folder.names() if name.endswith(NOTES_SUFFIX)]


def read_folder(folder: Folder) -> list[Recording]:
    """Read the traces of all processes in a directory, workers first, by number."""
    found = [read_recording(folder, name) for name in names_of_notes(folder)]
    known = [recording for recording in found if recording.who]
    return sorted(known, key=lambda one: (one.who["role"] != "worker", one.who["number"]))
