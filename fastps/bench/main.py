# SPDX-License-Identifier: Apache-2.0
"""Entry point of fastps-bench: driver of jobs, worker of one, or member of the user's job.

Every runner takes one turn per round, so that noise affects all alike. A runner that fails is
dropped, with its reason; the others continue. One thread.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence

from fastps import config
from fastps.bench import BenchError, figures, member, plot, screen
from fastps.bench.conditions import conditions, headline
from fastps.bench.figures import Floor, Row, Turn, make_floor, make_row
from fastps.bench.options import HERE, MODES, Options, Work, jobs_of, parse
from fastps.bench.screen import Step
from fastps.bench.teams import Team, job_command, job_environment
from fastps.config.closed_pipe import ends_quietly
from fastps.errors import ConfigError, FastPSError

FIRST_CALLS = 3  # of the turn that warms up and determines how many calls fill a turn
# Options in a result file: name in the file and attribute.
RECORDED = {"workers": "workers", "servers": "servers", "runs": "runs", "turn_s": "turn_s",
            "dtype": "dtype", "average": "is_average", "tcp": "is_tcp"}  # fmt: skip


@ends_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 if all modes were measured, 1 if not, 2 for wrong usage."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        if options.obey:
            return member.run(options.obey)
        if options.compare:
            return _compare(*map(figures.read, options.compare))
        if options.plot_path is not None:
            plot.check()
        if is_in_job(config.load()):
            return _in_job(options)
        with contextlib.ExitStack() as stack:
            return _measure(options, lambda: _start(options, stack))
    except (BenchError, FastPSError) as error:
        # The launcher recognizes the loss of another process by the name of the error.
        kind = "" if isinstance(error, BenchError) else f"{type(error).__name__}: "
        sys.stderr.write(f"fastps-bench: {kind}{error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("fastps-bench: stopped\n")
        return 130


def is_in_job(settings: config.Config) -> bool:
    """Return whether the environment makes this process part of a job."""
    return settings.rank is not None or bool(settings.scheduler_host)


def _compare(a: figures.Result, b: figures.Result) -> int:
    """Show the ratios of two results."""
    groups = screen.compare(a, b)
    if not groups:
        raise BenchError("the two results have no size and mode in common")
    shown = screen.make_screen()
    for line in screen.differences(a, b):
        shown.write(f"differs: {line}")
    shown.table(screen.COMPARED, groups)
    return 0


def _start(options: Options, stack: contextlib.ExitStack) -> RunnerSet:
    """Start all jobs at once, then wait for each; a job that does not start is a failure."""
    active, teams = RunnerSet(), list[tuple[list[str], Team]]()
    for names, mode, workers in jobs_of(options):
        with active.dropping(*names):
            team = Team(job_command(mode, workers, options), job_environment(mode, options))
            stack.callback(team.close)
            active.runners |= dict.fromkeys(names, team)
            teams.append((names, team))
    for names, team in teams:
        stack.callback(team.hang_up)  # runs first: all end at the same time
        with active.dropping(*names):
            team.gather()
    return active


def _in_job(options: Options) -> int:
    """Measure the job that this process is part of; worker 0 leads and prints."""
    modes = options.modes or HERE
    if others := [name for name in modes if name not in HERE]:
        raise BenchError(
            f"mode {others[0]!r} needs a job of its own; start fastps-bench without fastps-run, "
            f"or choose among {', '.join(HERE)}"
        )
    with member.joined() as ours:
        if ours.rank:
            return 0
        active = RunnerSet(dict.fromkeys([*ours.floors, *modes], ours), "".join(ours.floors))
        return _measure(dataclasses.replace(options, workers=ours.size), lambda: active)


def _measure(options: Options, start: Callable[[], RunnerSet]) -> int:
    """Measure with all runners, show the figures, and write them."""
    shown, found = screen.make_screen(), conditions()
    shown.write(headline(found))
    active = start()
    steps = len(options.works) * len(active.runners) * (options.runs + 1)
    with shown.progress(steps) as step:
        groups = list(measure(active, options, step))
    recorded = {name: getattr(options, attribute) for name, attribute in RECORDED.items()}
    rows = tuple(row for group, _ in groups for row in group)
    floors = tuple(floor for _, group in groups for floor in group)
    result = figures.Result(found, recorded, rows, floors, active.failures)
    if rows or floors:
        shown.table(screen.HEADS, [screen.cells_of(*group) for group in groups if any(group)])
    for name, reason in active.failures.items():
        shown.write(f"not measured: {name}: {reason}")
    _write(result, options, shown)
    return 1 if active.failures else 0


def _write(result: figures.Result, options: Options, shown: screen.PlainScreen) -> None:
    """Write the files that the options name."""
    if options.json_path is not None:
        figures.write(options.json_path, result)
        shown.write(f"figures and conditions: {options.json_path}")
    if options.plot_path is not None and result.rows:
        plot.draw(result, options.plot_path)
        shown.write(f"plot: {options.plot_path}")


@dataclasses.dataclass
class RunnerSet:
    """The runners that still take part, by name, and why others were dropped."""

    runners: dict[str, Team | member.Member] = dataclasses.field(default_factory=dict)
    floor: str = ""  # of every mode; empty: each mode has its own
    failures: dict[str, str] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def dropping(self, *names: str, where: str = "") -> Iterator[None]:
        """Drop runners from now on if they fail."""
        try:
            yield
        except (BenchError, ConfigError, OSError) as error:
            self.failures |= dict.fromkeys(names, f"{where}{error}")
            for runner in [self.runners.pop(name, None) for name in names]:
                if runner is not None and runner not in self.runners.values():
                    runner.close()


def measure(
    active: RunnerSet, options: Options, step: Step
) -> Iterator[tuple[list[Row], list[Floor]]]:
    """Measure one work after the other; yield the rows and floors of each when it is done."""
    for work in options.works:
        turns = _rounds(active, options, work, step)
        floors = {
            name: make_floor(found, work, name) for name, found in turns.items()
            if name not in MODES
        }  # fmt: skip
        beside = {name: floors.get(active.floor or mode.floor) for name, mode in MODES.items()}
        rows = [
            make_row(turns[name], work, name, workers=options.workers, floor=floor)
            for name, floor in beside.items() if name in turns
        ]  # fmt: skip
        yield rows, list(floors.values())


def _rounds(active: RunnerSet, options: Options, work: Work, step: Step) -> dict[str, list[Turn]]:
    """Return the turns of every runner that completed all rounds."""
    calls = dict.fromkeys(active.runners, FIRST_CALLS)
    turns: dict[str, list[Turn]] = {name: [] for name in active.runners}
    for number in range(options.runs + 1):
        names = collections.deque(active.runners)
        names.rotate(-number)  # every round starts with another runner
        for name in names:
            step(f"{work.label} {name}")
            with active.dropping(name, where=f"{work.label}: "):
                turn = _turn(active, name, options, work, calls[name])
                calls[name] = calls_within(options.turn_s, statistics.median(turn.seconds))
                turns[name] += [turn] if number else []
    return {name: found for name, found in turns.items() if name in active.runners}


def calls_within(turn_s: float, call_s: float) -> int:
    """Choose how many calls fill a turn."""
    return max(3, min(2000, math.ceil(turn_s / max(call_s, 1e-9))))


def _turn(active: RunnerSet, name: str, options: Options, work: Work, calls: int) -> Turn:
    command = {
        "runner": name,
        "workers": options.workers,
        "nbytes": work.nbytes,
        "count": work.count,
        "dtype": options.dtype,
        "is_registered": name in MODES and MODES[name].is_registered,
        "is_average": options.is_average,
        "calls": calls,
    }
    turn = Turn(**active.runners[name].ask(command))
    if not turn.is_right:
        raise BenchError("a sum was wrong; please report this with the conditions of this run")
    return turn
