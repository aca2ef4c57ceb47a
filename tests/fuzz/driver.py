# SPDX-License-Identifier: Apache-2.0
"""Run a target in a process of its own, so that a crash or a hang is one finding of many.

The child writes the number of each input into shared memory before it takes it, and findings into
a pipe. When it dies or does not go on, the parent notes that number and forks the next child
behind it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import mmap
import os
import resource
import select
import signal
import struct
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .target import Target

HANG_S = 30.0  # for one input
OPEN_S = 600.0  # for what all inputs share; kernels are compiled there
SLOW_S = 2.0  # of a processor's time, for one input of 64 KiB at most
MOST_MEMORY = 512 << 20  # beyond what a target has when it is open
MOST_CRASHES = 5  # then a target is given up
_ARENA_MAX = -8  # M_ARENA_MAX of mallopt()
_NUMBER = struct.Struct("<q")
_OPENING = -1
# Places in the shared memory: number of the next input, of valid ones, and the time of fuzzing.
_NEXT, _N_VALID, _SPENT_NS = range(0, 3 * _NUMBER.size, _NUMBER.size)


@dataclass
class Finding:
    """An input that a target did not survive, or took wrongly."""

    number: int
    what: str
    times: int = 1


@dataclass
class Outcome:
    """What one target did."""

    target: Target
    seed: int
    inputs: int = 0
    n_valid: int = 0  # without those of children that died
    seconds: float = 0.0
    findings: dict[str, Finding] = field(default_factory=dict)  # by where

    def note(self, where: str, number: int, what: str) -> None:
        """Count a finding; of those at one place the first is kept."""
        if where in self.findings:
            self.findings[where].times += 1
        else:
            self.findings[where] = Finding(number, what)

    def save(self, folder: Path, seeds: Sequence[bytes]) -> list[Path]:
        """Write the inputs of all findings into files."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for one in self.findings.values():
            paths.append(folder / f"{self.target.name}-{self.seed}-{one.number}.bin")
            paths[-1].write_bytes(self.target.make(seeds, self.seed, one.number))
        return paths


def is_sanitized() -> bool:
    """Return whether a sanitizer of the compiler watches this process."""
    return "san.so" in os.environ.get("LD_PRELOAD", "")


def run_one(target: Target, data: bytes, *, is_seed: bool = False) -> bool:
    """Give a target one input; return whether it was valid. Raises what is a finding."""
    began, is_valid = time.thread_time(), True
    try:
        target.run(data)
    except Exception as error:
        if is_seed or not target.is_refusal(error):
            raise
        is_valid = False
    took = time.thread_time() - began
    assert took < SLOW_S, f"{len(data)} bytes took {took:.1f} s"
    return is_valid


def fuzz(target: Target, *, seed: int, inputs: int = 0, seconds: float = 0.0) -> Outcome:
    """Run a target for a number of inputs, else for a time; to open it does not count."""
    outcome = Outcome(target, seed)
    last = inputs or 1 << 62
    limit_s = seconds or float("inf")
    first = n_crashes = 0
    while first < last and outcome.seconds < limit_s and n_crashes < MOST_CRASHES:
        number, how = _run_child(outcome, first, last, limit_s - outcome.seconds)
        outcome.inputs += number - first
        first = number
        if how:
            outcome.inputs += 1
            outcome.note(how, number, how)
            first, n_crashes = number + 1, n_crashes + 1
    return outcome


def _run_child(outcome: Outcome, first: int, last: int, seconds: float) -> tuple[int, str]:
    """Return the number of the input that comes next, and how the child ended at it, if it did."""
    with mmap.mmap(-1, mmap.PAGESIZE) as shared:
        _NUMBER.pack_into(shared, _NEXT, _OPENING)
        source, sink = os.pipe()
        child = os.fork()
        if not child:
            os.close(source)
            _work(outcome.target, outcome.seed, (first, last, seconds), shared, sink)
        os.close(sink)
        has_hung = False
        with os.fdopen(source, "rb") as news:
            before, since = _OPENING, time.monotonic()
            while not has_hung:
                if select.select([news], [], [], 0.5)[0]:
                    line = news.readline()
                    if not line:
                        break
                    outcome.note(*json.loads(line))
                number = _NUMBER.unpack_from(shared, _NEXT)[0]
                if number != before:
                    before, since = number, time.monotonic()
                limit = OPEN_S if number == _OPENING else HANG_S
                has_hung = time.monotonic() - since > limit
            if has_hung:
                os.kill(child, signal.SIGABRT)  # whose handler shows where it is
            for line in news:  # what the reader holds
                outcome.note(*json.loads(line))
        outcome.n_valid += _NUMBER.unpack_from(shared, _N_VALID)[0]
        outcome.seconds += _NUMBER.unpack_from(shared, _SPENT_NS)[0] / 1e9
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        number = max(_NUMBER.unpack_from(shared, _NEXT)[0], first)
    how = f"it did not end within {HANG_S:g} s" if has_hung else ""
    if status and not has_hung:
        how = f"the process died: exit code {status}"
    return number, how


def _work(target: Target, seed: int, span: tuple[int, int, float], shared: Any, sink: int) -> None:
    """Take inputs until the last, in the child; does not return."""
    code = 1
    try:
        faulthandler.enable()
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)  # else each thread reserves 128 MiB
        (number, last, seconds), n_valid = span, 0
        target.open()
        seeds = target.seeds()
        gc.collect()
        gc.freeze()  # targets that collect garbage look at their own
        _limit_memory()
        warnings.simplefilter("error")
        began = time.monotonic()
        while number < last and (number % 16 or time.monotonic() < began + seconds):
            _NUMBER.pack_into(shared, _NEXT, number)
            _NUMBER.pack_into(shared, _SPENT_NS, round(1e9 * (time.monotonic() - began)))
            data = target.make(seeds, seed, number)
            try:
                n_valid += run_one(target, data, is_seed=number < len(seeds))
            except BaseException as error:
                note = json.dumps([_where(error), number, traceback.format_exc(limit=-6)])
                os.write(sink, note.encode() + b"\n")
            number += 1
        _NUMBER.pack_into(shared, _NEXT, number)
        _NUMBER.pack_into(shared, _N_VALID, n_valid)
        _NUMBER.pack_into(shared, _SPENT_NS, round(1e9 * (time.monotonic() - began)))
        target.close()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _limit_memory() -> None:
    """Let what asks for much more than now get a MemoryError; sanitizers map terabytes."""
    if is_sanitized():
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * mmap.PAGESIZE + MOST_MEMORY
    with contextlib.suppress(ValueError):  # a lower one holds already
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _where(error: BaseException) -> str:
    """Return the kind of an error, and the innermost line of it that is not a library's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if "/site-packages/" not in one.filename] or frames
    return f"{type(error).__name__} at {Path(own[-1].filename).name}:{own[-1].lineno}"
