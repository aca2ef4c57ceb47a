# SPDX-License-Identifier: Apache-2.0
"""Workers in a notebook: cells run on all of them, and they keep their state in between.

    %load_ext fastps.notebook
    %fastps start -np 4

    %%fastps
    x = fastps.allreduce(np.ones(3))

`Team` is the same as an object: run(), execute(), push(), pull(), interrupt(), restart(), close().
A kernel's interrupt (Ctrl-C) goes to the workers; they join the job again and keep their state.
Needs `fastps[notebook]`. Importing starts nothing.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import shlex
import sys
from typing import Any, NoReturn

from fastps.launch.team import Team

__all__ = ["Team", "load_ipython_extension"]

FIRST_CELL = "import fastps, numpy as np"  # what every worker has from the start
USAGE = "%fastps start [-np N] | stop | restart | status, or %%fastps and a cell for all workers"


class _Workers:
    """The team of one notebook, made by `%fastps start` or by its first cell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._team: Team | None = None
        atexit.register(self.stop)

    def start(self, np: int) -> Team:
        """Start a team instead of the present one; also set it as the variable `workers`."""
        self.stop()
        self._team = Team(np)
        self._team.execute(FIRST_CELL)
        self._shell.push({"workers": self._team})
        return self._team

    def stop(self) -> None:
        """End the team, if there is one."""
        team, self._team = self._team, None
        if team is not None:
            team.close()

    def line(self, words: str) -> None:
        """Run the line magic."""
        parser = _Parser(prog="%fastps", add_help=False)
        parser.add_argument("what", choices=("start", "stop", "restart", "status"))
        parser.add_argument("-np", type=int, default=4)
        found = parser.parse_args(shlex.split(words))
        if found.what == "start":
            self.start(found.np)
        elif found.what == "stop":
            self.stop()
        elif found.what == "restart" and self._team is not None:
            self._team.restart()
            self._team.execute(FIRST_CELL)
        sys.stdout.write(f"{self.describe()}\n")

    def cell(self, words: str, source: str) -> None:
        """Run a cell on all workers; words: -np N for the first one, --timeout S."""
        parser = _Parser(prog="%%fastps", add_help=False)
        parser.add_argument("-np", type=int, default=None)
        parser.add_argument("--timeout", type=float, default=None)
        found = parser.parse_args(shlex.split(words))
        team = self._team or self.start(found.np or 4)
        if found.np not in (None, team.size):
            raise ValueError(
                f"-np {found.np}, but there are {team.size} workers; run %fastps start "
                f"-np {found.np}"
            )
        team.execute(source, timeout_s=found.timeout)

    def describe(self) -> str:
        """Return the number of workers as text."""
        return "no workers" if self._team is None else f"{self._team.size} workers"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise ValueError instead of SystemExit, which would end the notebook."""
        raise ValueError(f"{message}; {USAGE}")


def load_ipython_extension(shell: Any) -> None:
    """Add the magics to a notebook; `%load_ext fastps.notebook` calls it."""
    importlib.import_module("cloudpickle")  # ImportError names what is missing
    workers = _Workers(shell)
    shell.register_magic_function(workers.line, "line", "fastps")
    shell.register_magic_function(workers.cell, "cell", "fastps")
