# SPDX-License-Identifier: Apache-2.0
"""The driver and the table of the first day: grades, selection, and texts that pages print."""

from __future__ import annotations

import re

import pytest

from tools.firstday.__main__ import grade, play
from tools.firstday.room import Done
from tools.firstday.tasks import TASKS, Task, block, printed, select

TASK = Task("two", "echo", ("^two$", "thr.e"), status=3, limit_s=9, after="one")
ONE = Task("one", "echo", ("one",))


class Told:
    """A room in which commands write what they are told."""

    python = "3.11"

    def __init__(self, *outputs: str) -> None:
        self.outputs = list(outputs)

    def write(self, files: dict[str, str]) -> None:
        """Keep nothing."""

    def type(self, script: str, *, limit_s: float, machines: bool) -> Done:
        return Done(0, 1.0, self.outputs.pop(0))


@pytest.mark.parametrize(
    ("status", "output", "expected"),
    [
        (3, "one\ntwo\nand three more\n", ("good", "and three more")),
        (3, "two\n", ("fails", "did not write thr.e")),
        (0, "two\nthree\n", ("fails", "ended with 0 instead of 3")),
        (3, "two\nthree\nTraceback (most\n", ("fails", "wrote Traceback (most")),
        (None, "two\nthree\n", ("slow", "not over within 9 s")),
    ],
)
def test_grades(status, output, expected):
    assert grade(TASK, Done(status, 1.0, output)) == expected


def test_a_task_is_played_after_the_one_that_it_needs(tmp_path, capsys):
    assert select([ONE, TASK], ["two"]) == [ONE, TASK]
    assert select([ONE, TASK], ["one"]) == [ONE]
    assert play(Told("nothing"), [ONE, TASK], tmp_path, again=False) == ["fails", "-"]
    assert "needs: one" in capsys.readouterr().out
    assert "nothing" in (tmp_path / "one.log").read_text()


def test_the_table_is_in_order_and_its_patterns_are_valid():
    names = [task.name for task in TASKS]
    assert len(set(names)) == len(names) >= 25
    for number, task in enumerate(TASKS):
        assert not task.after or task.after in names[:number], task.name
        assert task.seen, task.name
        assert all(re.compile(pattern) for pattern in (*task.seen, *task.never))
        assert bool(task.pythons) == bool(task.why_not)


def test_texts_that_pages_do_not_print_are_errors():
    with pytest.raises(LookupError, match=r"README.md prints no block with 'sudo'"):
        block("README.md", "sudo")
    with pytest.raises(LookupError, match=r"does not print 'fastps walk'"):
        printed("README.md", "fastps walk")
