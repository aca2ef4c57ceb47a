# SPDX-License-Identifier: Apache-2.0
"""Entry point of fastps-bench: driver of jobs, worker of one, or member of the user's own."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from fastps import config
from fastps.bench import BenchError, compare, here, member, plot, screen, tables
from fastps.bench.conditions import conditions, headline
from fastps.bench.figures import Floor, Result, Row, read, write
from fastps.bench.modes import FLOORS, HERE, MEMORY, MODES, NETWORK
from fastps.bench.options import Options, parse
from fastps.bench.teams import Runner, Team, start_floor, start_job
from fastps.bench.turns import Field, count_turns, measure
from fastps.errors import FastPSError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when every mode was measured, 1 otherwise, 2 for wrong words."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        if options.obey:
            return member.run(options.obey)
        if options.compare:
            return _compare(*map(read, options.compare))
        if options.plot_path is not None:
            plot.check()
        return _in_job(options) if here.is_in_job(config.load()) else _drive(options)
    except (BenchError, FastPSError) as error:
        sys.stderr.write(f"fastps-bench: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("fastps-bench: stopped\n")
        return 130


def _compare(a: Result, b: Result) -> int:
    """Show the ratios of two results."""
    groups = compare.compare(a, b)
    if not groups:
        raise BenchError("the two results have no size and mode in common")
    shown = screen.make_screen()
    for line in compare.differences(a, b):
        shown.say(f"differs: {line}")
    shown.table(compare.HEADS, groups)
    return 0


def _drive(options: Options) -> int:
    """Start a job per mode and the floors they need, measure, and report."""
    modes = options.modes or tuple(MODES)
    needed = {MODES[name].floor for name in modes}
    floors = [name for name in FLOORS if name in needed]
    found = conditions()
    with contextlib.ExitStack() as stack:
        shown = stack.enter_context(screen.make_screen())
        shown.say(headline(found))
        starts: dict[str, Callable[[], Team]] = {
            **{name: lambda name=name: start_floor(name, options) for name in floors},  # type: ignore[misc]
            **{name: lambda name=name: start_job(name, options) for name in modes},  # type: ignore[misc]
        }
        field = _start(starts, stack)
        result = _run(field, options, options.workers, found, shown)
    return _finish(result, options, shown)


def _start(starts: dict[str, Callable[[], Team]], stack: contextlib.ExitStack) -> Field:
    """Start all at once, then wait for each; who does not come is a failure."""
    field = Field({})
    teams: dict[str, Team] = {}
    for name, start in starts.items():
        try:
            teams[name] = start()
            stack.callback(teams[name].close)
        except (BenchError, OSError) as error:
            field.drop(name, str(error))
    for name, team in teams.items():
        stack.callback(team.hang_up)  # runs first: all end at the same time
        field.runners[name] = team
        try:
            team.gather()
        except BenchError as error:
            field.drop(name, str(error))
    return field


def _in_job(options: Options) -> int:
    """Measure the job that this process is part of; worker 0 leads and prints."""
    modes = options.modes or HERE
    for name in modes:
        if name not in HERE:
            raise BenchError(
                f"mode {name!r} needs a job of its own; start fastps-bench without fastps-run, "
                f"or choose among {', '.join(HERE)}"
            )
    ours = member.Member()
    try:
        machines = ours.machines()
        if len(machines) > 1:
            ours.connect_network(machines)
        if ours.rank:
            here.follow(ours)
            return 0
        options = dataclasses.replace(options, modes=modes, workers=ours.size)
        code = _lead(options, ours, len(machines))
        here.stop()
        return code
    finally:
        ours.close()


def _lead(options: Options, ours: member.Member, machines: int) -> int:
    """Measure this job as worker 0; the floor is that of its slowest part, memory or network."""
    found = conditions()
    with contextlib.ExitStack() as stack:
        shown = stack.enter_context(screen.make_screen())
        shown.say(headline(found))
        kind = NETWORK if machines > 1 else MEMORY
        is_plain = machines == 1 and ours.size > 1
        field = _start({MEMORY: lambda: start_floor(MEMORY, options)} if is_plain else {}, stack)
        names = [NETWORK, *options.modes] if machines > 1 else options.modes
        runners: dict[str, Runner] = {name: here.Here(name, ours) for name in names}
        field.runners.update(runners)
        field.floor_of = dict.fromkeys(options.modes, kind)
        result = _run(field, options, ours.size, found, shown)
    return _finish(result, options, shown)


def _run(
    field: Field, options: Options, workers: int, found: dict[str, Any], shown: screen.Screen
) -> Result:
    rows: list[Row] = []
    floors: list[Floor] = []
    shown.expect(count_turns(options, len(field.runners)))
    for _, more_rows, more_floors in measure(field, options, workers=workers, progress=shown):
        rows += more_rows
        floors += more_floors
    return Result(found, _recorded(options, workers), tuple(rows), tuple(floors), field.failures)


def _recorded(options: Options, workers: int) -> dict[str, Any]:
    """Give the options that made the figures, for the result file."""
    return {
        "workers": workers,
        "servers": options.servers,
        "runs": options.runs,
        "turn_s": options.turn_s,
        "dtype": options.dtype,
        "average": options.is_average,
        "tcp": options.is_tcp,
    }


def _finish(result: Result, options: Options, shown: screen.Screen) -> int:
    """Show the table and what failed; write the files."""
    labels = dict.fromkeys(
        [row.label for row in result.rows] + [floor.label for floor in result.floors]
    )
    groups = [
        tables.cells_of(
            [row for row in result.rows if row.label == label],
            [floor for floor in result.floors if floor.label == label],
        )
        for label in labels
    ]
    if groups:
        shown.table(tables.HEADS, groups)
    for name, reason in result.failures.items():
        shown.say(f"not measured: {name}: {reason}")
    if options.json_path is not None:
        write(options.json_path, result)
        shown.say(f"figures and conditions: {options.json_path}")
    if options.plot_path is not None and result.rows:
        plot.draw(result, options.plot_path)
        shown.say(f"plot: {options.plot_path}")
    return 1 if result.failures else 0
