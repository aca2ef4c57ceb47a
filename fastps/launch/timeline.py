# SPDX-License-Identifier: Apache-2.0
"""The timeline of a job: where its processes write their traces, and how these are merged.

fastps-run merges them when all processes have ended, however they ended. If fastps-run itself is
killed, the traces stay in a folder beside the file, and the command `fastps timeline` merges them.
It also merges the traces that launchers on several machines have left, and sums a timeline up.
Threads: none.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from fastps.errors import FastPSError
from fastps.files import open_folder, text_of
from fastps.telemetry import digest
from fastps.telemetry.spans import NOTES_SUFFIX, SPANS_SUFFIX
from fastps.telemetry.timeline import Summary, merge

PARTS_SUFFIX = ".parts"
MOST_LAYERS, NAME_WIDTH = 20, 40
_OF_PROCESSES = "{:<14}{:>7}{:>10}{:>10}{:>11}{:>8}"
_OF_LAYERS = "{:<40}{:>7}{:>10}{:>11}{:>10}"
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
        "source", metavar="FILE|FOLDER", type=Path,
        help="a timeline to sum up, or a folder of traces: FASTPS_TRACE_DIR, or FILE.parts",
    )  # fmt: skip
    parser.add_argument(
        "target", metavar="FILE", nargs="?", type=Path,
        help="of a folder: the timeline file to write",
    )  # fmt: skip


def run(parsed: argparse.Namespace) -> None:
    """Merge a folder where a target is given, and sum the timeline up. Raises FastPSError."""
    target: Path = parsed.target or parsed.source
    if parsed.target is not None:
        sys.stdout.write(describe(target, _merge(parsed.source, target)) + "\n")
    elif target.is_dir():
        raise FastPSError(
            f"{target} is a folder: name the file to write too, fastps timeline {target} job.json"
        )
    sys.stdout.write("\n".join(lines_of(digest.read(target), target)) + "\n")


def lines_of(found: digest.Digest, path: Path) -> Iterator[str]:
    """Yield the summary of a timeline: processes, layers, and how to see the rest."""
    yield f"{len(found.processes)} processes, {found.seconds:.3g} s"
    yield _OF_PROCESSES.format("process", "steps", "ms/step", "busy ms", "waited ms", "hidden")
    for one in found.processes:
        numbers = [one.step_s, one.busy_s, one.waited_s]
        shown = [f"{seconds / digest.MS:.1f}" if seconds else "" for seconds in numbers]
        hidden = f"{one.hidden:.0%}" if one.is_worker and one.busy_s else ""
        yield _OF_PROCESSES.format(one.name, len(one.steps) or "", *shown, hidden).rstrip()
    all_waits = sum(one.waited_s for one in found.layers)
    if found.layers:
        yield ""
        yield _OF_LAYERS.format("layer", "calls", "ms/call", "waited ms", "of waits")
    for layer in found.layers[:MOST_LAYERS]:
        share = f"{layer.waited_s / all_waits:.0%}" if all_waits else ""
        yield _OF_LAYERS.format(
            shortened(layer.name), layer.calls,
            f"{layer.under_way_s / max(layer.calls, 1) / digest.MS:.2f}",
            f"{layer.waited_s / digest.MS:.1f}", share,
        ).rstrip()  # fmt: skip
    if len(found.layers) > MOST_LAYERS:
        yield f"... and {len(found.layers) - MOST_LAYERS} more"
    yield ""
    yield f"all of it: open {path} at https://ui.perfetto.dev, which keeps it in your browser;"
    yield f"as a page: fastps report {path}"


def shortened(name: str) -> str:
    """Return a name that fits its column: the end of a long one, which says more."""
    return name if len(name) <= NAME_WIDTH else "..." + name[3 - NAME_WIDTH :]
