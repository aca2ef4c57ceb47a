# SPDX-License-Identifier: Apache-2.0
"""The trace of one process: its files, the drain that fills them, and samples of its clock.

native/core_trace.pxi writes spans; this file writes the rest. Threads: the drain (no GIL);
fastps:clock, which asks the scheduler for the time now and then.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastps import _core
from fastps.config import Config
from fastps.errors import ConfigError, FastPSError
from fastps.files import Folder, open_folder
from fastps.native.condition import Flag
from fastps.telemetry.clock import Sample, best_of, sample_of
from fastps.telemetry.spans import (
    ACTIVITY,
    NOTES_SUFFIX,
    SPANS_SUFFIX,
    names_of_notes,
    read_notes,
)
from fastps.telemetry.timeline import merge

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 28  # of one process: four million spans
PINGS = 8  # of which the shortest counts
CLOCK_PERIOD_S = 5.0  # a clock that drifts by 50 parts in a million moves 250 us meanwhile
MERGED = "timeline.json"
ANY = 0xFFFFFFFF

Ping = Callable[[], int]  # asks for the reference's time; nanoseconds


class Recorder:
    """The trace of one process of a job, from its construction to close()."""

    def __init__(
        self,
        config: Config,
        *,
        role: str,
        rank: int,
        number: int,
        host_id: str,
        ping: Ping,
        ending: str = "",
    ) -> None:
        """Open the files and start to record. Raises ConfigError.

        rank, number, host_id: of the member; see Who. ping: blocks for a round trip. ending: of
        the files' names, for all but the first trace of a process.
        """
        self._config = config
        self._ping = ping
        folder = Path(config.trace_dir)
        held: Folder | None = None
        name = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', config.job_id)}-{role}{number}-{os.getpid()}"
        name += ending
        try:
            held = open_folder(folder)
            self._notes = held.make(f"{name}{NOTES_SUFFIX}", flags=_FLAGS)
            self._spans = held.make(f"{name}{SPANS_SUFFIX}", flags=_FLAGS)
        except OSError as error:
            if held is not None:
                held.close()
            raise ConfigError(
                f"FASTPS_TRACE_DIR={folder}: the trace cannot be written there "
                f"({error.strerror or error}); set it to a directory that only this user can write"
            ) from error
        self._folder = held
        self._is_closed = self._is_full = False
        self._activities: dict[tuple[str, str], int] = {}  # numbers, by (what, of what)
        self._begun: dict[str, list[tuple[str, int]]] = {}  # (what, since), by of what
        self._naming = threading.Lock()
        self.note(who=_describe(role, rank, number, host_id))
        last = config.trace_end_step or ANY
        self._drain = _core.Drain(
            self._spans, first=config.trace_start_step, last=last, max_bytes=MAX_BYTES
        )
        self._ending = Flag()
        self._clock = threading.Thread(target=self._follow_clock, name="fastps:clock", daemon=True)
        self._clock.start()

    def note(self, **what: Any) -> None:
        """Write a note; where the disk is full, log that once and write no more."""
        line = json.dumps(what, separators=(",", ":")).encode() + b"\n"
        try:
            if self._is_full or os.write(self._notes, line) == len(line):
                return
            trouble = "no room for a whole line"
        except OSError as error:
            trouble = error.strerror or str(error)
        self._is_full = True
        log.warning("the trace of this process ends here, and the job goes on: %s", trouble)

    def name_tensor(self, tensor_id: int, name: str) -> None:
        """Record the name of the tensor that has this id from now on."""
        if not self._is_closed:
            self.note(tensor=tensor_id, name=name, since=_core.clock_ns())

    # ---- activities of the program; from any thread ----

    def begin_activity(self, what: str, of: str) -> None:
        """Start an activity of a tensor, or of anything with a name."""
        self._begun.setdefault(of, []).append((what, _core.clock_ns()))

    def end_activity(self, of: str) -> bool:
        """End the activity that was begun last; return False if none of that name is open."""
        begun = self._begun.get(of)
        if not begun:
            return False
        self.mark_activity(*begun.pop(), of=of)
        return True

    def mark_activity(self, what: str, began: int, *, of: str) -> None:
        """Record an activity that began at a time of the trace's clock and ends now."""
        ended = _core.clock_ns()
        with self._naming:
            number = self._activities.get((what, of))
            if number is None and not self._is_closed:
                number = self._activities[what, of] = len(self._activities)
                self.note(activity=number, name=what, of=of)
        if number is not None:
            _core.mark(ACTIVITY, began, ended, key=number)

    # ---- clocks ----

    def _follow_clock(self) -> None:
        with contextlib.suppress(FastPSError):  # the scheduler does not answer any more
            while True:
                self.note(clock=self._sample_clock())
                if self._ending.wait(CLOCK_PERIOD_S):
                    return

    def _sample_clock(self) -> Sample:
        samples = []
        for _ in range(PINGS):
            sent = _core.clock_ns()
            remote = self._ping()
            samples.append(sample_of(sent, remote, _core.clock_ns()))
        return best_of(samples)

    # ---- the end ----

    def stop_clock(self) -> None:
        """End the clock's thread, while the scheduler still answers."""
        self._ending.set()
        self._clock.join(self._config.shutdown_timeout_s)

    def close(self) -> None:
        """Write what is left; without fastps-run, the last process that ends merges all."""
        if self._is_closed:
            return
        self.stop_clock()
        self._is_closed = True
        trouble = self._drain.trouble
        self._drain.stop()
        if trouble:
            log.warning("the trace of this process ended early: %s", trouble)
        if self._drain.dropped:
            log.warning("the trace lost %d spans: its buffers were full", self._drain.dropped)
        self.note(end=_core.clock_ns(), dropped=self._drain.dropped)
        os.close(self._spans)
        if not self._config.trace_file:
            self._merge_as_last()
        self._folder.close()
        os.close(self._notes)

    def _merge_as_last(self) -> None:
        """Merge the traces of this directory if all their processes have ended."""
        folder, target = self._folder, self._folder.path / MERGED
        try:
            fcntl.flock(folder.descriptor, fcntl.LOCK_EX)
            if all(_has_ended(folder, name) for name in names_of_notes(folder)):
                merge(folder, target)
        except OSError as error:
            log.warning(
                "cannot write the timeline %s: %s; make room for it, or merge the traces into "
                "another file: fastps timeline %s FILE",
                target, error.strerror or error, folder.path,
            )  # fmt: skip

    def abandon(self) -> None:
        """Close the descriptors in a forked child."""
        self._is_closed = True
        self._drain.abandon()
        self._folder.close()
        for descriptor in (self._notes, self._spans):
            with contextlib.suppress(OSError):
                os.close(descriptor)


_FLAGS = os.O_WRONLY | os.O_APPEND


def _describe(role: str, rank: int, number: int, host_id: str) -> dict[str, Any]:
    return {
        "role": role,
        "rank": rank,
        "number": number,
        "host": os.uname().nodename,
        "boot": host_id.partition("/")[0],  # the same on processes that read one clock
        "pid": os.getpid(),
    }


def _has_ended(folder: Folder, name: str) -> bool:
    return any(note.end is not None for note in read_notes(folder, name))
