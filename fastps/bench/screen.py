# SPDX-License-Identifier: Apache-2.0
"""The output for the user: figures in a table, and progress.

rich is used on a terminal if it is installed; otherwise the same text is plain, with the table on
stdout and the progress on stderr.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from fastps.bench.figures import Floor, Result, Row, Times

HEADS = ("size", "mode", "p50", "p90", "p99", "min", "alg GB/s", "bus GB/s", "CPU s/GB",
         "memory MB", "floor %")  # fmt: skip
COMPARED = ("size", "mode", "p50 A", "p50 B", "B/A", "p99 B/A", "CPU B/A", "memory B/A",
            "floor % A", "floor % B")  # fmt: skip
Cells = tuple[str, ...]
Step = Callable[[str], None]
_UNITS = ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (float("inf"), 1.0, "s"))
_DIGITS = ((99.95, 0), (9.995, 1), (0.9995, 2), (float("-inf"), 3))  # decimals, from a value on
_CHANGING = ("began", "load_average")  # differ in every run


def format_time(seconds: float) -> str:
    """Return a time in a suitable unit, with three digits."""
    factor, unit = next((f, unit) for below, f, unit in _UNITS if seconds < below * 0.9995)
    return f"{_number(seconds * factor)} {unit}"


def _number(value: float) -> str:
    return f"{value:.{next(digits for least, digits in _DIGITS if value >= least)}f}"


def cells_of(rows: Sequence[Row], floors: Sequence[Floor]) -> list[Cells]:
    """Return the lines of one size: a line per mode, then a line per floor."""
    return [_cells(row) for row in rows] + [
        (floor.label, f"floor: {floor.name}", *_spread(floor.times), "", "", "", "", "")
        for floor in floors
    ]


def _cells(row: Row) -> Cells:
    rates = map(_number, (row.algorithm_gb_s, row.bus_gb_s, row.cpu_s_per_gb))
    return row.label, row.mode, *_spread(row.times), *rates, f"{row.memory_mb:.0f}", _share(row)


def _spread(times: Times) -> Iterator[str]:
    return map(format_time, (times.p50_s, times.p90_s, times.p99_s, times.min_s))


def _share(row: Row) -> str:
    return "" if row.floor_percent is None else f"{row.floor_percent:.0f}"


def compare(a: Result, b: Result) -> list[list[Cells]]:
    """Return the lines of a table, a group per size, in the order of A; B/A below 1 is faster."""
    others = {(row.label, row.mode): row for row in b.rows}
    pairs = [(row, others.get((row.label, row.mode))) for row in a.rows]
    both = [(row.label, _compared(row, other)) for row, other in pairs if other]
    groups = itertools.groupby(both, key=lambda line: line[0])
    return [[line for _, line in group] for _, group in groups]


def _compared(a: Row, b: Row) -> Cells:
    ratios = (
        (a.times.p50_s, b.times.p50_s),
        (a.times.p99_s, b.times.p99_s),
        (a.cpu_s_per_gb, b.cpu_s_per_gb),
        (a.memory_mb, b.memory_mb),
    )
    shown = (f"{value / base:.2f}" if base > 0 else "" for base, value in ratios)
    return a.label, a.mode, *map(format_time, ratios[0]), *shown, _share(a), _share(b)


def differences(a: Result, b: Result) -> list[str]:
    """Return the conditions and options in which two results differ, a line each."""
    flat_a, flat_b = dict(_flat(a)), dict(_flat(b))
    return [
        f"{name}: {flat_a.get(name, 'none')} -> {flat_b.get(name, 'none')}"
        for name in {**flat_a, **flat_b}
        if flat_a.get(name) != flat_b.get(name)
    ]


def _flat(result: Result) -> Iterator[tuple[str, Any]]:
    for name, value in result.conditions.items():
        if isinstance(value, Mapping):
            yield from value.items()
        elif name not in _CHANGING:
            yield name, value
    yield from ((f"option {name}", value) for name, value in result.options.items())


def plain_table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table with two left-aligned columns, then right-aligned ones."""
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    sides = "<<" + ">" * (len(widths) - 2)
    columns = [f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True)]
    return "\n".join("  ".join(columns).format(*line).rstrip() for line in (heads, *lines))


class PlainScreen:
    """Lines of text; progress is a line for each tenth of the way."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out, self._err = out, err

    def write(self, text: str) -> None:
        """Show a text."""
        self._out.write(text + "\n")
        self._out.flush()

    @contextlib.contextmanager
    def progress(self, steps: int) -> Iterator[Step]:
        """Yield a function to call at the start of each step; about ten steps are shown."""
        numbers = itertools.count(1)

        def step(text: str) -> None:
            done = next(numbers)
            if done == 1 or done * 10 // steps > (done - 1) * 10 // steps:
                self._err.write(f"{done} of {steps}: {text}\n")
                self._err.flush()

        yield step

    def table(self, heads: Sequence[str], groups: Sequence[Sequence[Cells]]) -> None:
        """Show all lines, with an empty line between groups."""
        every = [line for group in groups for line in group]
        shown = iter(plain_table(heads, every).splitlines())
        self.write(next(shown))
        for group in groups:
            self.write("\n".join(["", *(next(shown) for _ in group)]))


class RichScreen(PlainScreen):
    """Output on a terminal with rich."""

    @contextlib.contextmanager
    def progress(self, steps: int) -> Iterator[Step]:
        """Yield a function to call at the start of each step, which moves a progress bar."""
        rich = _rich("progress")
        columns = rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeRemainingColumn()
        with rich.Progress("{task.description}", *columns, transient=True) as bar:
            task = bar.add_task("starting", total=steps)
            yield lambda text: bar.update(task, advance=1, description=f"{text:<22}")

    def table(self, heads: Sequence[str], groups: Sequence[Sequence[Cells]]) -> None:
        """Show a table with a rule between groups; floors are dim."""
        table = _rich("table").Table(box=_rich("box").SIMPLE_HEAD, pad_edge=False)
        for number, head in enumerate(heads):
            table.add_column(head, justify="left" if number < 2 else "right", no_wrap=True)
        for group in groups:
            for line in group:
                style = "dim" if line[1].startswith("floor") else None
                table.add_row(*map(_rich("text").Text, line), style=style)
            table.add_section()
        _rich("console").Console().print(table)


def _rich(name: str) -> Any:
    return importlib.import_module(f"rich.{name}")


def make_screen(out: TextIO | None = None, err: TextIO | None = None) -> PlainScreen:
    """Return a rich screen on a terminal if rich is installed, else a plain one."""
    out, err = out or sys.stdout, err or sys.stderr
    with contextlib.suppress(ImportError):
        if out is sys.stdout and out.isatty() and _rich("console"):
            return RichScreen(out, err)
    return PlainScreen(out, err)
