# SPDX-License-Identifier: Apache-2.0
"""The command `fastps top`: what the processes of this machine's jobs do, until they end.

On a terminal with rich it fills the screen: the processes, the busiest links, the stragglers and
the view. Elsewhere it prints a table. Threads: none; it sleeps from one look to the next.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fastps.config.words import number
from fastps.telemetry.watch import Flow, Look, Pace, in_bytes, in_one_line, in_short, look, paces

_CLEAR = "\x1b[H\x1b[J"
_ROW = "{:<23}{:>9}{:>9}{:>12}{:>12}{:>12}{:>9}{:>7}"
_HEAD = ("process", "steps/s", "ops/s", "reduced/s", "sent/s", "received/s", "waiting", "links")
_BAR = 10  # characters of a worker that waits all the time
_LATE = 0.05  # a straggler waits by so much less of its time than the mean
_FIXED_LINES = 7  # of a job's picture: all but processes and links
_MOST_STRAGGLERS = 5
_MISSED = "rounds_missed_of_worker_"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `fastps top`."""
    seconds = number("a number of seconds", float, 0.1, 3600)
    parser.add_argument(
        "--job", default="", metavar="ID", help="show only this job (FASTPS_JOB_ID)"
    )
    parser.add_argument(
        "--every",
        type=seconds,
        default=2.0,
        metavar="S",
        help="seconds per update (default 2)",
    )
    parser.add_argument("--once", action="store_true", help="show one table and exit")


def run(parsed: argparse.Namespace) -> int:
    """Show what the processes of a job do until they end, and return 1; return 130 on Ctrl-C."""
    try:
        with _shown(parsed) as show:
            return _show_until_over(parsed, show)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


@contextlib.contextmanager
def _shown(parsed: argparse.Namespace) -> Iterator[Callable[[list[Pace], list[Look]], None]]:
    """Yield the function that shows the latest paces and looks."""
    live: Any = None
    if not parsed.once and sys.stdout.isatty():
        with contextlib.suppress(ImportError):  # then as without a terminal
            live = _rich("live").Live(screen=True, auto_refresh=False)
    if live is None:
        yield lambda found, _: _print(found, is_last=parsed.once)
        return
    with live:
        yield lambda found, looks: live.update(
            picture(found, looks, live.console.height), refresh=True
        )


def _print(found: Sequence[Pace], *, is_last: bool) -> None:
    text = "\n".join(table(found))
    clear = "" if is_last or not sys.stdout.isatty() else _CLEAR
    sys.stdout.write(f"{clear}{text}\n")
    sys.stdout.flush()


def _show_until_over(
    parsed: argparse.Namespace, show: Callable[[list[Pace], list[Look]], None]
) -> int:
    before = look(parsed.job)
    while before:
        time.sleep(parsed.every)
        after = look(parsed.job)
        show(paces(before, after), after)
        if parsed.once:
            return 0
        before = after
    sys.stderr.write(
        "fastps top: no process of this user publishes its status on this machine; processes of "
        "a job do, unless FASTPS_STATUS=0\n"
    )
    return 1


# ---- the table ----


def table(found: Sequence[Pace]) -> Iterator[str]:
    """Yield the lines of a table: for each job its line, and a row for each process."""
    for job in dict.fromkeys(one.about["job"] for one in found):
        members = [one for one in found if one.about["job"] == job]
        yield f"{_title(job)}: {in_one_line(members)}"
        yield _ROW.format(*_HEAD)
        for one in members:
            yield _row(one)
            yield from map(_link_row, one.flows)


def _title(job: str) -> str:
    return job or "a job without a name"


def _name(one: Pace) -> str:
    return f"{one.about['role']} {one.about['rank']}"


def _numbers(one: Pace) -> list[str]:
    rates = [in_bytes(n) for n in (one.bytes_started, one.bytes_sent, one.bytes_received)]
    return [in_short(one.steps), in_short(one.operations), *rates]


def _row(one: Pace) -> str:
    return _ROW.format(_name(one), *_numbers(one), f"{one.waiting:.0%}", one.links)


def _link_row(one: Flow) -> str:
    """Return a link's row below that of its process, with the same columns."""
    name = f"  to {one.peer}, {one.way}"
    rates = [in_bytes(n) for n in (one.bytes_sent, one.bytes_received)]
    return _ROW.format(name, "", "", "", *rates, "", "").rstrip()


# ---- the screen ----


def picture(found: Sequence[Pace], looks: Sequence[Look], height: int) -> Any:
    """Return what fills a screen of so many lines, for rich to show."""
    jobs = list(dict.fromkeys(one.about["job"] for one in found))
    parts = [
        part
        for job in jobs
        for part in _job(
            [one for one in found if one.about["job"] == job],
            [one for one in looks if one.about["job"] == job],
            height // len(jobs),
        )
    ]
    return _rich("console").Group(*parts)


def _job(members: Sequence[Pace], looks: Sequence[Look], height: int) -> Iterator[Any]:
    """Yield a job's lines: its pace, the processes, the busiest links, stragglers and view."""
    room = max(height - _FIXED_LINES, 2)
    links = [(_name(one), flow) for one in members for flow in one.flows]
    links.sort(key=lambda one: -(one[1].bytes_sent + one[1].bytes_received))
    n_links = min(len(links), max(room - len(members), room // 3))
    n_members = room - n_links
    late = stragglers(members)
    yield _text(f"{_title(members[0].about['job'])}: {in_one_line(members)}", "bold")
    shown = _table("process", "steps/s", "ops/s", "reduced/s", "sent/s", "received/s", "waiting")
    for one in members[:n_members]:
        bar = "█" * round(_BAR * one.waiting)
        style = "yellow" if one in late else None
        shown.add_row(_name(one), *_numbers(one), f"{bar} {one.waiting:4.0%}", style=style)
    yield shown
    yield _text(_more(len(members) - n_members, "processes"))
    shown = _table("link", "sent/s", "received/s")
    for name, flow in links[:n_links]:
        rates = [in_bytes(n) for n in (flow.bytes_sent, flow.bytes_received)]
        shown.add_row(f"{name} to {flow.peer}, {flow.way}", *rates)
    yield shown
    yield _text(_more(len(links) - n_links, "links"))
    yield _text(_about_stragglers(late, looks))
    yield _text(_about_view(looks))


def stragglers(members: Sequence[Pace]) -> list[Pace]:
    """Return the workers that the others wait for, the slowest first: they wait least."""
    workers = [one for one in members if one.about["role"] == "worker"]
    mean = sum(one.waiting for one in workers) / max(len(workers), 1)
    return sorted(
        (one for one in workers if mean - one.waiting > _LATE), key=lambda one: one.waiting
    )


def _about_stragglers(late: Sequence[Pace], looks: Sequence[Look]) -> str:
    missed = {
        name.removeprefix(_MISSED): value
        for one in looks for name, value in one.numbers.items()
        if name.startswith(_MISSED) and value
    }  # fmt: skip
    said = [f"{_name(one)} waits {one.waiting:.0%}" for one in late[:_MOST_STRAGGLERS]]
    said += [f"worker {rank} missed {value:g} rounds" for rank, value in missed.items()]
    return f"stragglers: {', '.join(said) or 'none'}"


def _about_view(looks: Sequence[Look]) -> str:
    """Return the number of the view and of its members, which the scheduler knows."""
    for one in looks:
        if one.about["role"] == "scheduler":
            number, members = (one.numbers.get(n, 0) for n in ("generation", "members"))
            return f"view {number:g}, {members:g} members"
    return "view: the scheduler is on another machine"


def _more(number: int, what: str) -> str:
    return f"and {number} more {what}" if number > 0 else ""


def _table(*heads: str) -> Any:
    """Return a table without lines, of which the first column is text."""
    made = _rich("table").Table(box=None, pad_edge=False, expand=True, header_style="reverse")
    for place, head in enumerate(heads):
        justify = "right" if place else "left"
        made.add_column(head, justify=justify, no_wrap=True, ratio=None if place else 1)
    return made


def _text(words: str, style: str = "") -> Any:
    return _rich("text").Text(words, style=style, no_wrap=True, overflow="ellipsis")


def _rich(name: str) -> Any:
    return importlib.import_module(f"rich.{name}")
