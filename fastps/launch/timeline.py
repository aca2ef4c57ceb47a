# SPDX-License-Identifier: Apache-2.0
"""The timeline of a job: where its processes write their traces, and how these are merged.

fastps-run merges them when all processes have ended, however they ended. If fastps-run itself is
killed, the traces stay in a folder beside the file, and the command `fastps timeline` merges them.
It also merges the traces that launchers on several machines have left. Threads: none.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from fastps.errors import FastPSError
from fastps.files import open_folder, text_of
from fastps.telemetry.spans import NOTES_SUFFIX, SPANS_SUFFIX
from fastps.telemetry.timeline import Summary, merge

PARTS_SUFFIX = ".parts"
_STEPS = ("TRACE_START_STEP", "TRACE_END_STEP")


def parts_of(target: Path) -> Path:
    """Return the folder of the traces of a job's processes."""
    return target.with_name(target.name + PARTS_SUFFIX)


def variables(target: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make a process trace all steps, or those that `given` names."""
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
    """Make the folder of the traces, and remove those of an earlier job. Raises OSError."""
    with open_folder(parts_of(target)) as folder:
        for name in folder.names():
            if name.endswith((SPANS_SUFFIX, NOTES_SUFFIX)):
                folder.remove(name)


def collect(target: Path, *, is_whole: bool) -> Summary:
    """Merge the traces of a job; is_whole: no other machine has more of them.

    Raises FastPSError when there are none, or the file cannot be written.
    """
    summary = _merge(parts_of(target), target)
    if is_whole:
        with contextlib.suppress(OSError):
            shutil.rmtree(parts_of(target))
    return summary


def _merge(folder: Path, target: Path) -> Summary:
    try:
        held = open_folder(folder, is_made=False)
    except OSError as error:
        raise FastPSError(
            f"cannot read the traces ({text_of(error)}); give the FASTPS_TRACE_DIR of "
            "the job, as the user of the job"
        ) from error
    try:
        with held:
            return merge(held, target)
    except OSError as error:
        raise FastPSError(
            f"cannot make the timeline {target} ({text_of(error)}); name a file "
            f"that can be written: fastps timeline {folder} FILE"
        ) from error


def describe(target: Path, summary: Summary) -> str:
    """Return in a line what was merged."""
    lost = f", {summary.dropped} dropped because buffers were full" if summary.dropped else ""
    bound = summary.clock_bound_us
    clocks = f", clocks within {bound:.0f} us" if bound > 0 else ""
    return (
        f"timeline {target}: {summary.spans} spans of {summary.processes} processes{lost}{clocks}"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument(
        "folder", type=Path, help="folder of the traces: FASTPS_TRACE_DIR, or FILE.parts"
    )
    parser.add_argument("target", type=Path, help="the timeline file to write")


def run(parsed: argparse.Namespace) -> None:
    """Merge a folder for the command line. Raises FastPSError."""
    summary = _merge(parsed.folder, parsed.target)
    sys.stdout.write(describe(parsed.target, summary) + "\n")
