# SPDX-License-Identifier: Apache-2.0
"""The command `fastps report`: one page of HTML about a run, from its timeline and its logs.

The page needs no other file, no script and no network. Threads: none.
"""

from __future__ import annotations

import argparse
import html
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fastps.errors import FastPSError, guide_of
from fastps.files import open_shared, text_of
from fastps.telemetry import digest
from fastps.telemetry.digest import MS, Digest
from fastps.telemetry.watch import in_bytes, in_short

MOST_LAYERS, MOST_FAULTS, MOST_POINTS = 25, 50, 400
WIDTH, HEIGHT = 860, 220
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8a6d00", "#555555")
_FAULT = re.compile(r"\b\w*Error\b|\bis lost\b|\bkilled by\b|\bTransportTimeout\b|^Traceback")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 900px; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; } td, th { padding: .2em .8em; text-align: right; }
.text { text-align: left; } tr { border-bottom: 1px solid #ddd; }
.bar { background: #0072B2; height: .8em; display: inline-block; } .note { color: #666; }
.tiles { display: flex; flex-wrap: wrap; gap: 1em; }
.tile { background: #f3f5f7; padding: .6em 1em; }
.tile b { display: block; font-size: 1.3em; } code { background: #f3f5f7; }
@media (prefers-color-scheme: dark) { body { background: #181a1b; color: #ddd; }
.tile, code { background: #26292b; } tr { border-color: #444; } text { fill: #ddd; }
.note { color: #aaa; } polyline, .bar, .name { filter: brightness(1.5); } }
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("run", metavar="FILE", type=Path, help="the job's timeline (--timeline)")
    parser.add_argument("--logs", metavar="FOLDER", type=Path, help="the job's --output-dir")
    parser.add_argument(
        "-o", "--output", metavar="PAGE", type=Path, help="page to write (default: FILE.html)"
    )


def run(parsed: argparse.Namespace) -> None:
    """Write the page. Raises FastPSError."""
    path: Path = parsed.output or parsed.run.with_suffix(".html")
    faults = None if parsed.logs is None else list(faults_of(parsed.logs))
    text = page(digest.read(parsed.run), parsed.run.name, faults)
    try:
        with open_shared(path.parent) as place, place.replace(path.name) as file:
            file.write(text.encode())
    except OSError as error:
        raise FastPSError(
            f"cannot write the page ({text_of(error)}); name another with -o PAGE"
        ) from error
    sys.stdout.write(f"wrote {path}\n")


def faults_of(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (process, line) of what went wrong, by the logs of an --output-dir."""
    try:
        logs = sorted(folder.glob("*.stderr"))
        if not logs:
            raise FastPSError(f"no logs in {folder}; name the --output-dir of the job")
        for log in logs:
            for line in log.read_text(errors="replace").splitlines():
                if _FAULT.search(line) and not line.startswith("Traceback"):
                    yield log.stem, line
    except OSError as error:
        raise FastPSError(f"cannot read the logs ({text_of(error)})") from error


def page(found: Digest, name: str, faults: Sequence[tuple[str, str]] | None) -> str:
    """Return the whole page; faults: None where no logs were given."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width'>",
        f"<title>{html.escape(name)}</title><style>{_STYLE}</style>",
        f"<h1>{html.escape(name)}</h1>", *_tiles(found), "<h2>Steps</h2>", *_steps(found),
        "<h2>Communication of each process</h2>", *_processes(found), "<h2>Waits by layer</h2>",
        *_waits(found), "<h2>Links</h2>", *_links(found), "<h2>Faults</h2>",
        *_faults(found, faults),
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def _tiles(found: Digest) -> Iterator[str]:
    workers = found.workers
    steps = max((len(one.steps) for one in workers), default=0)
    rate = max((_rate(one.steps) for one in workers), default=0.0)
    hidden = [one.hidden for one in workers if one.busy_s]
    tiles = [
        ("workers", str(len(workers))),
        ("other processes", str(len(found.processes) - len(workers))),
        ("time", f"{found.seconds:.3g} s"), ("steps", str(steps)),
        ("steps/s", in_short(rate) if rate else "not marked"),
        ("sent by workers", in_bytes(sum(one.nbytes for one in found.layers))),
        ("communication hidden", f"{sum(hidden) / len(hidden):.0%}" if hidden else ""),
    ]  # fmt: skip
    yield "<div class=tiles>"
    yield from (f"<div class=tile><b>{value}</b>{title}</div>" for title, value in tiles if value)
    yield "</div>"


def _rate(steps: Sequence[tuple[float, float]]) -> float:
    """Return the steps per second from the first to the last, waits and pauses included."""
    seconds = steps[-1][1] - steps[0][0] if steps else 0.0
    return len(steps) / seconds if seconds else 0.0


def _steps(found: Digest) -> Iterator[str]:
    """Yield the chart of each worker's steps: when they ended, and how long they took."""
    lines = [
        (one.name, [(end, (end - begin) / MS) for begin, end in one.steps])
        for one in found.workers if one.steps
    ]  # fmt: skip
    if not lines:
        yield "<p class=note>No steps were marked: call <code>fastps.mark_step()</code>, or use "
        yield "an optimizer of fastps.</p>"
        return
    yield chart(lines, "seconds", "ms per step")
    yield "<p class=note>A peak on all lines is a step that one worker kept the others waiting "
    yield "in; the waits below say for which layer.</p>"


def chart(lines: Sequence[tuple[str, Sequence[tuple[float, float]]]], across: str, up: str) -> str:
    """Return a picture of lines as SVG, with a scale from 0 and the name of each line."""
    points = [point for _, some in lines for point in some]
    right, top = max(x for x, _ in points) or 1.0, max(y for _, y in points) or 1.0
    left, low = 60, HEIGHT - 40
    parts = [
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' width='100%' font-size=12>",
        f"<path d='M{left} 10V{low}H{WIDTH - 10}' fill=none stroke='#999'/>",
        f"<text x={left - 6} y=18 text-anchor=end>{top:.3g}</text>",
        f"<text x={left + 6} y=18>{up}</text>",
        f"<text x={left - 6} y={low} text-anchor=end>0</text>",
        f"<text x={left} y={low + 16}>0</text>",
        f"<text x={WIDTH - 10} y={low + 16} text-anchor=end>{right:.3g} {across}</text>",
    ]
    for number, (name, some) in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        part = len(some) // MOST_POINTS + 1  # of which the highest point is shown
        shown = [max(some[i : i + part], key=lambda point: point[1])
                 for i in range(0, len(some), part)]  # fmt: skip
        places = " ".join(
            f"{left + (WIDTH - 10 - left) * x / right:.1f},{low - (low - 14) * y / top:.1f}"
            for x, y in shown
        )
        parts.append(
            f"<polyline points='{places}' fill=none stroke='{colour}' stroke-width=1.5 />"
        )
        if number < len(COLOURS):
            x = left + 100 * number
            parts.append(
                f"<text class=name x={x} y={HEIGHT - 6} style='fill:{colour}'>{name}</text>"
            )
    return "".join([*parts, "</svg>"])


def _table(head: Iterable[str], rows: Iterable[Iterable[str]], texts: int = 1) -> Iterator[str]:
    """Yield a table; its last columns, after so many of text, are numbers."""

    def line(tag: str, cells: Iterable[str]) -> str:
        kinds = (" class=text" if place < texts else "" for place in itertools.count())
        return "<tr>" + "".join(
            f"<{tag}{kind}>{cell}" for kind, cell in zip(kinds, cells, strict=False)
        )

    yield "<table>" + line("th", head)
    yield from (line("td", row) for row in rows)
    yield "</table>"


def _processes(found: Digest) -> Iterator[str]:
    yield from _table(
        ("process", "steps", "ms/step, median", "communicating, s", "of it waited, s", "hidden"),
        (
            (html.escape(one.name), str(len(one.steps) or ""),
             f"{one.step_s / MS:.1f}" if one.step_s else "",
             f"{one.busy_s:.3f}" if one.is_worker else "",
             f"{one.waited_s:.3f}" if one.is_worker else "",
             f"{one.hidden:.0%}" if one.is_worker and one.busy_s else "")
            for one in found.processes
        ),
    )  # fmt: skip


def _waits(found: Digest) -> Iterator[str]:
    longest = max((one.waited_s for one in found.layers), default=0.0)
    yield from _table(
        ("layer", "", "waited, s", "calls", "ms/call"),
        (
            (html.escape(one.name),
             f"<span class=bar style='width:{200 * one.waited_s / longest:.0f}px'></span>"
             if longest else "",
             f"{one.waited_s:.3f}", str(one.calls),
             f"{one.under_way_s / max(one.calls, 1) / MS:.2f}")
            for one in found.layers[:MOST_LAYERS]
        ),
        texts=2,
    )  # fmt: skip
    if len(found.layers) > MOST_LAYERS:
        yield f"<p class=note>and {len(found.layers) - MOST_LAYERS} more layers</p>"


def _links(found: Digest) -> Iterator[str]:
    if not found.links:
        yield "<p class=note>No link carried tensors: workers of one machine add in shared memory."
        return
    yield from _table(
        ("from", "to", "sent", "while sending"),
        (
            (html.escape(one.source), html.escape(found.names.get(one.target, str(one.target))),
             in_bytes(one.nbytes),
             f"{in_bytes(one.nbytes / one.sending_s)}/s" if one.sending_s else "")
            for one in found.links
        ),
        texts=2,
    )  # fmt: skip


def _faults(found: Digest, faults: Sequence[tuple[str, str]] | None) -> Iterator[str]:
    if found.dropped:
        yield f"<p>{found.dropped} spans found no room, so the numbers above lack them.</p>"
    if faults is None:
        yield "<p class=note>No logs were given: <code>fastps run --output-dir logs</code>, and "
        yield "<code>fastps report FILE --logs logs</code>.</p>"
    elif not faults:
        yield "<p>No error is in the logs.</p>"
    else:
        yield from _table(
            ("process", "what it wrote", "about it"),
            ((html.escape(name), f"<code>{html.escape(line[:300])}</code>", guide_of(line))
             for name, line in faults[:MOST_FAULTS]),
            texts=3,
        )  # fmt: skip
