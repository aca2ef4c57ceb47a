# SPDX-License-Identifier: Apache-2.0
"""What the user sees: a table that grows and a bar, or plain lines.

rich is used on a terminal if it is installed; everywhere else the same words come as plain text,
the table on stdout, how far we are on stderr.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, TextIO

from fastps.bench.tables import plain_table


class Screen(Protocol):
    """Where a run is shown; a context that ends the progress display."""

    def __enter__(self) -> Screen:
        """Begin to show progress."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Clear the progress display."""

    def expect(self, steps: int) -> None:
        """Say how many steps there will be."""

    def step(self, text: str) -> None:
        """Say that one more step begins."""

    def say(self, text: str) -> None:
        """Show a text."""

    def table(self, heads: Sequence[str], groups: Sequence[Sequence[Sequence[str]]]) -> None:
        """Show groups of lines with a rule between them."""


class PlainScreen:
    """Lines of text; progress is a line for each tenth of the way."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out, self._err = out, err
        self._steps, self._done = 0, 0

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._out.flush()

    def expect(self, steps: int) -> None:
        """Say how many steps there will be."""
        self._steps, self._done = steps, 0

    def step(self, text: str) -> None:
        """Say where we are, ten times in all."""
        self._done += 1
        tenths = self._done * 10 // max(self._steps, 1)
        if self._done == 1 or tenths > (self._done - 1) * 10 // max(self._steps, 1):
            self._err.write(f"{self._done} of {self._steps}: {text}\n")
            self._err.flush()

    def say(self, text: str) -> None:
        """Show a text."""
        self._out.write(text + "\n")
        self._out.flush()

    def table(self, heads: Sequence[str], groups: Sequence[Sequence[Sequence[str]]]) -> None:
        """Show all lines with an empty one between groups."""
        lines = plain_table(heads, [line for group in groups for line in group]).splitlines()
        shown, at = lines[:1], 1
        for group in groups:
            shown += ["", *lines[at : at + len(group)]]
            at += len(group)
        self.say("\n".join(shown))


class RichScreen:
    """A terminal with rich."""

    def __init__(self, rich: Any) -> None:
        self._rich = rich
        self._console = rich["console"].Console()
        progress = rich["progress"]
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task: Any = None

    def __enter__(self) -> RichScreen:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def expect(self, steps: int) -> None:
        """Say how many steps there will be."""
        self._task = self._progress.add_task("starting", total=steps)

    def step(self, text: str) -> None:
        """Move the bar on."""
        if self._task is not None:
            self._progress.update(self._task, advance=1, description=f"{text:<22}")

    def say(self, text: str) -> None:
        """Show a text as it is."""
        self._console.print(text, markup=False, highlight=False)

    def table(self, heads: Sequence[str], groups: Sequence[Sequence[Sequence[str]]]) -> None:
        """Show a table with a rule between groups; floors are dim."""
        rich = self._rich
        table = rich["table"].Table(box=rich["box"].SIMPLE_HEAD, pad_edge=False)
        for number, head in enumerate(heads):
            table.add_column(head, justify="left" if number < 2 else "right", no_wrap=True)
        for group in groups:
            for number, line in enumerate(group):
                style = "dim" if line[1].startswith("floor") else None
                cells = [rich["text"].Text(word) for word in line]
                table.add_row(*cells, style=style, end_section=number == len(group) - 1)
        self._console.print(table)


def make_screen(out: TextIO | None = None, err: TextIO | None = None) -> Screen:
    """Choose rich on a terminal when it is there, plain text otherwise."""
    out, err = out or sys.stdout, err or sys.stderr
    if out is sys.stdout and out.isatty():
        try:
            names = ("box", "console", "progress", "table", "text")
            return RichScreen({name: importlib.import_module(f"rich.{name}") for name in names})
        except ImportError:
            pass
    return PlainScreen(out, err)
