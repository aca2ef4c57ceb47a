# SPDX-License-Identifier: Apache-2.0
"""Who moves when: every runner one turn per round, so that noise hits all alike.

A runner that fails is left out from then on, with its reason; the others go on. Used by one
thread, the driver's.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from fastps.bench import BenchError
from fastps.bench.figures import Floor, Row, Turn, make_row, times_of
from fastps.bench.member import calls_within
from fastps.bench.modes import MODES
from fastps.bench.options import Options, Work
from fastps.bench.teams import Runner

FIRST_CALLS = 3  # of the turn that warms up and tells how many calls fill a turn


class Progress(Protocol):
    """Whoever tells the user how far we are."""

    def step(self, text: str) -> None:
        """Say that one more turn begins."""


@dataclasses.dataclass
class Field:
    """The runners that still take part, by name, and why others do not."""

    runners: dict[str, Runner]
    floor_of: dict[str, str] = dataclasses.field(
        default_factory=lambda: {name: mode.floor for name, mode in MODES.items()}
    )
    failures: dict[str, str] = dataclasses.field(default_factory=dict)

    def drop(self, name: str, reason: str) -> None:
        """Leave a runner out from now on."""
        self.failures[name] = reason
        runner = self.runners.pop(name, None)
        if runner is not None:
            runner.close()


def count_turns(options: Options, runners: int) -> int:
    """Give the number of steps that `measure` reports when nothing fails."""
    return len(options.works) * runners * (options.runs + 1)


def measure(
    field: Field, options: Options, *, workers: int, progress: Progress
) -> Iterator[tuple[Work, list[Row], list[Floor]]]:
    """Measure one work after the other; give each one's rows and floors as soon as it is done."""
    for work in options.works:
        turns = _rounds(field, options, work, progress)
        floors = {
            name: _floor(name, work, found) for name, found in turns.items() if name not in MODES
        }
        rows = [
            make_row(
                turns[name],
                label=work.label,
                nbytes=work.nbytes,
                count=work.count,
                mode=name,
                workers=workers,
                floor=floors.get(field.floor_of[name]),
            )
            for name in MODES
            if name in turns
        ]
        yield work, rows, list(floors.values())


def _floor(name: str, work: Work, turns: Sequence[Turn]) -> Floor:
    moved = turns[0].moved_bytes
    return Floor(work.label, work.nbytes, work.count, name, moved, times_of(turns))


def _rounds(
    field: Field, options: Options, work: Work, progress: Progress
) -> dict[str, list[Turn]]:
    """Give the turns of every runner that came through all rounds."""
    calls: dict[str, int] = {}
    turns: dict[str, list[Turn]] = {name: [] for name in field.runners}
    for number in range(options.runs + 1):
        for name in _in_turn(list(field.runners), number):
            progress.step(f"{work.label} {name}")
            try:
                turn = _turn(field.runners[name], options, work, calls.get(name, FIRST_CALLS))
            except BenchError as error:
                field.drop(name, f"{work.label}: {error}")
                del turns[name]
                continue
            if number:
                turns[name].append(turn)
            calls[name] = calls_within(options.turn_s, statistics.median(turn.seconds))
    for name in list(field.runners):
        try:
            field.runners[name].ask(_command("forget", name, options, work))
        except BenchError as error:
            field.drop(name, f"after {work.label}: {error}")
    return turns


def _in_turn(names: list[str], number: int) -> list[str]:
    """Begin every round with another runner."""
    shift = number % max(len(names), 1)
    return names[shift:] + names[:shift]


def _command(op: str, name: str, options: Options, work: Work, **more: object) -> dict[str, Any]:
    return {
        "op": op,
        "runner": name,
        "nbytes": work.nbytes,
        "count": work.count,
        "dtype": options.dtype,
        "is_average": options.is_average,
        "is_registered": name in MODES and MODES[name].is_registered,
        **more,
    }


def _turn(runner: Runner, options: Options, work: Work, calls: int) -> Turn:
    answers = runner.ask(_command("turn", runner.name, options, work, calls=calls))
    if not all(answer["is_right"] for answer in answers):
        raise BenchError("a sum was wrong; please report it with the conditions of this run")
    return _turn_of(answers[0])


def _turn_of(answer: Mapping[str, Any]) -> Turn:
    return Turn(
        tuple(answer["seconds"]),
        answer.get("cpu_s", 0.0),
        answer.get("memory_bytes", 0),
        answer.get("moved_bytes", 0),
    )
