# SPDX-License-Identifier: Apache-2.0
"""Errors that end a program: shown without our own lines, and told to the other workers."""

from __future__ import annotations

import sys
import traceback

import pytest

import fastps
from fastps.session import excepthook


@pytest.fixture
def hook(monkeypatch):
    """Put the hook before the interpreter's; give what is reported and a way to raise."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    reports: list[str] = []
    excepthook.hook(reports.append, is_brief=True)
    return reports


def end_with(error: BaseException) -> None:
    """Do what the interpreter does at the end of a program."""
    sys.excepthook(type(error), error, error.__traceback__)


def failing_call() -> BaseException:
    """Give an error of ours with lines of ours."""
    try:
        fastps.push_pull([1.0], "x")
    except fastps.NotInitializedError as error:
        return error
    raise AssertionError("no error")


def test_errors_of_ours_show_the_users_lines_alone(hook, capsys):
    error = failing_call()
    before = traceback.format_exception(error)
    end_with(error)
    shown = capsys.readouterr().err
    assert "fastps/session/current.py" in "".join(before)
    assert "fastps/session/current.py" not in shown
    assert "in failing_call" in shown
    assert shown.rstrip().endswith(
        "NotInitializedError: fastps is not initialized; call fastps.init() first"
    )
    assert hook == []


def test_what_an_error_of_ours_came_from_is_not_shown(hook, capsys):
    error = failing_call()
    error.__context__, error.__cause__ = KeyError("inner"), OSError("outer")
    end_with(error)
    shown = capsys.readouterr().err
    assert "inner" not in shown
    assert "outer" not in shown


def test_what_ends_a_program_is_told_to_others(hook, capsys):
    end_with(ValueError("no data"))
    assert hook == ["ValueError: no data"]
    end_with(KeyboardInterrupt())
    assert len(hook) == 1
    assert "ValueError: no data" in capsys.readouterr().err


def test_a_hook_of_the_users_own_goes_on(monkeypatch):
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(kind))
    excepthook.hook(lambda text: None, is_brief=True)
    first = sys.excepthook
    excepthook.hook(lambda text: None, is_brief=True)
    assert sys.excepthook is first
    error = failing_call()
    end_with(error)
    assert seen == [fastps.NotInitializedError]
    assert "session/current.py" in "".join(traceback.format_exception(error))


def test_others_hear_of_an_error_in_one_line(hook, capsys):
    end_with(ValueError("bad batch\n  in data.bin"))
    assert hook == ["ValueError: bad batch in data.bin"]


def test_a_long_error_is_cut_for_others(hook, capsys):
    end_with(ValueError("x" * 1000))
    assert len(hook[0]) == 300
