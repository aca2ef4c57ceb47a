# SPDX-License-Identifier: Apache-2.0
"""The timeline of a job: where its processes trace to, and who merges what they leave.

fastps-run does, when all have ended, however they ended. Where it is killed itself, what was
traced stays in a folder beside the file, and the command `fastps timeline` merges it; so it does
on one machine what the launchers of several have left. Threads: none.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from fastps.errors import FastPSError
from fastps.telemetry.spans import NOTES_SUFFIX, SPANS_SUFFIX
from fastps.telemetry.timeline import Summary, merge

PARTS_SUFFIX = ".parts"
_STEPS = ("TRACE_START_STEP", "TRACE_END_STEP")


def parts_of(target: Path) -> Path:
    """Name the folder of what the processes of a job trace."""
    return target.with_name(target.name + PARTS_SUFFIX)


def variables(target: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make a process trace; all of the job unless given says which."""
    target = target.absolute()
    settings = {
        "FASTPS_TRACE_ON": "1",
        "FASTPS_TRACE_DIR": str(parts_of(target)),
        "FASTPS_TRACE_FILE": str(target),
    }
    if not any(prefix + name in given for prefix in ("FASTPS_", "BYTEPS_") for name in _STEPS):
        settings |= {"FASTPS_TRACE_START_STEP": "1", "FASTPS_TRACE_END_STEP": "0"}
    return settings


def clear(target: Path) -> None:
    """Remove what an earlier job has left; OSError where that cannot be done, or not written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = parts_of(target)
    if folder.is_dir():
        for path in folder.iterdir():
            if path.suffix in (SPANS_SUFFIX, NOTES_SUFFIX):
                path.unlink()


def collect(target: Path, *, is_whole: bool) -> Summary:
    """Merge what the processes of a job left; is_whole: nothing more comes from elsewhere.

    FastPSError when nothing is there, or the file cannot be written.
    """
    try:
        summary = merge(parts_of(target), target)
    except OSError as error:
        raise FastPSError(f"the timeline {target} cannot be written: {error.strerror}") from error
    if is_whole:
        with contextlib.suppress(OSError):
            shutil.rmtree(parts_of(target))
    return summary


def describe(target: Path, summary: Summary) -> str:
    """Return in a line what was merged."""
    lost = f", {summary.dropped} lost for lack of room" if summary.dropped else ""
    bound = summary.clock_bound_us
    clocks = f", clocks within {bound:.0f} us" if bound > 0 else ""
    return (
        f"timeline {target}: {summary.spans} spans of {summary.processes} processes{lost}{clocks}"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("folder", type=Path, help="what FASTPS_TRACE_DIR was, or FILE.parts")
    parser.add_argument("target", type=Path, help="the timeline to write")


def run(parsed: argparse.Namespace) -> None:
    """Merge a folder by hand; raises FastPSError."""
    try:
        summary = merge(parsed.folder, parsed.target)
    except OSError as error:
        raise FastPSError(f"{parsed.target}: {error.strerror}") from error
    sys.stdout.write(describe(parsed.target, summary) + "\n")
