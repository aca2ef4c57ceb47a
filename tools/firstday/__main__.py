# SPDX-License-Identifier: Apache-2.0
"""Play a newcomer's first day in a clean Debian that has a wheel of fastps, and no repository.

    make first-day                                       wheels, then all tasks in both rooms
    python -m tools.firstday --room bookworm --only torch
    python -m tools.firstday --again --only ssh          with what the last run has installed

It needs root, debootstrap, a mirror of Debian and one of PyPI. Rooms are kept in out/firstday; so
is what each task wrote. The exit code is 1 if a task fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fastps.config.closed_pipe import ends_quietly
from tools.firstday.room import PYTHONS, Done, Room
from tools.firstday.tasks import ROOT, TASKS, Task, select

TABLE = "{:<42} {:<6} {:>5} {:>5}  {}"


def grade(task: Task, done: Done) -> tuple[str, str]:
    """Return the grade of what was seen, and the line that explains it."""
    if done.status is None:
        return "slow", f"not over within {task.limit_s:.0f} s"
    for pattern in task.never:
        if found := re.search(pattern, done.output, re.M):
            return "fails", f"wrote {_line_of(done.output, found)}"
    for pattern in task.seen:
        if not re.search(pattern, done.output, re.M):
            return "fails", f"did not write {pattern}"
    if done.status != task.status:
        return "fails", f"ended with {done.status} instead of {task.status}"
    return "good", _line_of(done.output, re.search(task.seen[-1], done.output, re.M))


def _line_of(text: str, found: re.Match[str] | None) -> str:
    begin = text.rfind("\n", 0, found.end() - 1) + 1 if found else 0
    return text[begin:].partition("\n")[0].strip()


def play(room: Room, tasks: Sequence[Task], logs: Path, *, again: bool) -> list[str]:
    """Play tasks in a room, and print a line for each; return their grades.

    again: leave out installations that an earlier run has noted in the file that is beside logs.
    """
    notes = logs.with_suffix(".installed")
    installed = notes.read_text().splitlines() if again and notes.exists() else []
    needed = {task.after for task in TASKS}
    grades: dict[str, str] = {}
    for task in tasks:
        done, said = Done(0, 0.0, ""), ""
        if task.pythons and room.python not in task.pythons:
            grades[task.name], said = "-", task.why_not
        elif grades.get(task.after, "good") != "good":
            grades[task.name], said = "-", f"needs: {task.after}"
        elif task.name in installed:
            continue
        else:
            room.write(task.files)
            done = room.type(task.types, limit_s=task.limit_s, machines=task.machines)
            grades[task.name], said = grade(task, done)
            if task.name in needed and grades[task.name] == "good":
                installed.append(task.name)
            text = f"{task.types}\n# {'-' * 70}\n{done.output}# status {done.status}\n"
            (logs / f"{task.name.replace(' ', '-').replace('/', '-')}.log").write_text(text)
        seconds = f"{done.seconds:.0f}" if done.output else ""
        row = (task.name, grades[task.name], seconds, f"{task.limit_s:.0f}", said)
        print(TABLE.format(*row), flush=True)
    notes.write_text("\n".join(installed))
    return list(grades.values())


@ends_quietly
def main() -> int:
    """Play what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.firstday", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--room", action="append", choices=PYTHONS, help="default: all")
    parser.add_argument("--only", action="append", default=[], metavar="WORD",
                        help="tasks whose name has this word; may be repeated")  # fmt: skip
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist", help="default: dist")
    parser.add_argument("--folder", type=Path, default=ROOT / "out/firstday",
                        help="of rooms and logs; default: out/firstday")  # fmt: skip
    parser.add_argument("--again", action="store_true", help="keep what the last run installed")
    parser.add_argument("--patience", type=float, default=1.0, metavar="TIMES",
                        help="multiply all limits, on a machine that is busy")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the tasks, and play none")
    options = parser.parse_args()
    tasks = select(
        (replace(task, limit_s=task.limit_s * options.patience) for task in TASKS), options.only
    )
    if not tasks:
        names = ", ".join(task.name for task in TASKS)
        parser.error(f"no task's name has {' or '.join(options.only)}; there are: {names}")
    if options.list:
        print("\n".join(task.name for task in tasks))
        return 0
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        parser.error("this needs root and debootstrap; run: apt-get install debootstrap gpgv")
    grades: list[str] = []
    for suite in options.room or PYTHONS:
        room = Room(suite, options.folder.resolve())
        wheels = sorted(options.wheels.glob(f"fastps-*-cp{room.python.replace('.', '')}-*.whl"))
        if not wheels:
            parser.error(f"no wheel for Python {room.python} in {options.wheels}; run: make wheel")
        logs = options.folder / f"{suite}.logs"
        logs.mkdir(parents=True, exist_ok=True)
        print(f"{suite}, Python {room.python}, {wheels[-1].name}; logs in {logs}", flush=True)
        room.make()
        if not options.again:
            room.empty()
            room.bring(wheels[-1])
        print(TABLE.format("task", "grade", "s", "limit", "seen"), flush=True)
        mine = play(room, tasks, logs, again=options.again)
        played = [one for one in mine if one != "-"]
        print(f"{played.count('good')} of {len(played)} good, {mine.count('-')} left out\n")
        grades += mine
    return int(not set(grades) <= {"good", "-"})


if __name__ == "__main__":
    sys.exit(main())
