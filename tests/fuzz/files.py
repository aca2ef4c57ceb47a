# SPDX-License-Identifier: Apache-2.0
"""Targets: files of commits, of logs of views, of traces, and of compiled kernels."""

from __future__ import annotations

import hashlib
import json
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fastps.control.view_log import Replay, ViewRecord, read_records, write_records
from fastps.files import open_folder
from fastps.frameworks import saved_states
from fastps.frameworks.elastic import _described, _room
from fastps.reduce.machine_code import Code
from fastps.telemetry.spans import RECORD
from fastps.telemetry.timeline import merge

from .target import Target

WHO = {"role": "worker", "rank": 1, "number": 1, "host": "h", "boot": "b", "pid": 7}


class _Folder(Target):
    """A target that reads files of a folder of its own."""

    def open(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.path = Path(self._folder.name)

    def close(self) -> None:
        self._folder.cleanup()


class Commits(_Folder):
    """A commit: the bytes of tensors, and its head, for which run() makes the digest."""

    name = "commits"
    per_round = 2500
    tree = (msgspec.msgpack.decode, msgspec.msgpack.encode)

    def seeds(self) -> Sequence[bytes]:
        arrays = [np.arange(12, dtype=np.float32).reshape(3, 4), np.ones(5, np.int64)]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a.commit"
            described = [_described(array) for array in arrays]
            data = [array.reshape(-1).view(np.uint8).data for array in arrays]
            saved_states.write(path, {"step": 3, "sampler": (1, [2])}, described, data)
            whole = path.read_bytes()
        length = saved_states._END.unpack(whole[-saved_states._END.size :])[1]
        head = whole[-saved_states._END.size - length : -saved_states._END.size]
        return [self.join([whole[: -saved_states._END.size - length], head])]

    def run(self, data: bytes) -> None:
        tensors, head = self.split(data)
        end = saved_states._END.pack(saved_states._MAGIC, len(head), saved_states._digest(head))
        path = self.path / "a.commit"
        for old in self.path.iterdir():
            old.unlink()
        path.write_bytes(tensors + head + end)
        saved_states.read(path, _room)

    def split(self, data: bytes) -> list[bytes]:
        size = struct.unpack("<I", data[:4].ljust(4, b"\0"))[0]
        return [data[4 : 4 + size], data[4 + size :]]

    def join(self, items: Sequence[bytes]) -> bytes:
        first, *rest = [*items, b""]
        return struct.pack("<I", len(first)) + first + b"".join(rest)


class _Lines(_Folder):
    tree = (json.loads, lambda value: json.dumps(value).encode() + b"\n")

    def split(self, data: bytes) -> list[bytes]:
        return data.splitlines(keepends=True)


class ViewLog(_Lines):
    """A log of views, and the job that is made again from it."""

    name = "view-log"
    per_round = 1000

    def seeds(self) -> Sequence[bytes]:
        views = [ViewRecord(1, (0, 1, 2), {"a": 3, "b#": 1}), ViewRecord(2, (0, 1, 2), {"a": 4}),
                 ViewRecord(3, (0, 2), {"a": 9}, "worker 1 is lost")]  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            write_records(f"{folder}/log", views)
            return [(Path(folder) / "log").read_bytes()]

    def run(self, data: bytes) -> None:
        (self.path / "log").write_bytes(data)
        replay = Replay(read_records(str(self.path / "log")))
        for number in range(1, 4):
            if replay.allows("a", number):
                replay.commit("a", number)
            if replay.next_loss is not None:
                replay.next_view((0, 2))


class Timeline(_Lines):
    """Traces of a process: spans of 64 bytes behind a number of them, then notes."""

    name = "timeline"
    per_round = 150

    def seeds(self) -> Sequence[bytes]:
        records = np.zeros(12, RECORD)
        for place, record in enumerate(records):
            record["kind"], record["began"], record["ended"] = place + 1, place * 10, place * 25
            record["key"], record["version"], record["nbytes"] = 3 << 16 | 1, place % 3, 1000
        notes = [{"who": WHO}, {"tensor": 3, "name": "layer", "since": 0}, {"clock": [1, 2, 3]},
                 {"activity": 1, "name": "step", "of": "x"}, {"end": True}]  # fmt: skip
        text = b"".join(json.dumps(note).encode() + b"\n" for note in notes)
        return [bytes([len(records)]) + records.tobytes() + text, b"\0" + text]

    def run(self, data: bytes) -> None:
        spans, *notes = self.split(data)
        (self.path / "job-1.spans").write_bytes(spans[1:])
        (self.path / "job-1.jsonl").write_bytes(b"".join(notes))
        (self.path / "job-2.jsonl").write_text(json.dumps({"who": {**WHO, "number": 2}}))
        with open_folder(self.path) as folder:
            merge(folder, self.path / "out.json")
        whole: Any = json.loads((self.path / "out.json").read_bytes())
        assert whole["traceEvents"]

    def split(self, data: bytes) -> list[bytes]:
        at = 1 + RECORD.itemsize * (data[0] if data else 0)
        return [data[:at], *super().split(data[at:])]


class MachineCode(Target):
    """A file of the cache of compiled kernels: its head, and code that is never run."""

    name = "machine-code"
    per_round = 15_000
    errors = (ValueError,)

    def seeds(self) -> Sequence[bytes]:
        return [Code(bytes(range(100)), 16).pack()]

    def run(self, data: bytes) -> None:
        code = Code.unpack(data)
        assert hashlib.sha256(struct.pack("<Q", code.entry) + code.text).digest() in data
