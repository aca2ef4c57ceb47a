# SPDX-License-Identifier: Apache-2.0
"""What an error that ends a program does: it is shown without our own lines, and told to others.

A job of many processes shows the same error many times, so each is to be short: the user's lines
and what to do. Errors of this library, and interruptions, have causes that others know already;
any other is the first cause of what the others see.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TypeAlias

from fastps.config.package import PACKAGE
from fastps.errors import FastPSError

Show: TypeAlias = Callable[[type[BaseException], BaseException, TracebackType | None], object]

MAX_WORDS = 300  # of an error, as others hear it
_HERE = PACKAGE + os.sep
_OURS = ("fastps/", _HERE)  # as Cython names its files, and as Python does


class _Hook:
    """Goes before the excepthook that there was."""

    def __init__(self, before: Show, report: Callable[[str], None], *, is_brief: bool) -> None:
        self._before = before
        self._report = report
        self._is_brief = is_brief and before is sys.__excepthook__

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, FastPSError | KeyboardInterrupt):
            with contextlib.suppress(Exception):  # a text that cannot be made is none
                self._report(" ".join(f"{kind.__name__}: {error}".split())[:MAX_WORDS])
        elif self._is_brief:
            trace = error.__traceback__ = without_ours(error.__traceback__)
            error.__cause__, error.__suppress_context__ = None, True  # it says that already
        self._before(kind, error, trace)


def hook(report: Callable[[str], None], *, is_brief: bool) -> None:
    """From now on report what ends the program, and show errors of ours without our lines.

    is_brief: False shows all lines, as for programs with an excepthook of their own.
    """
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook, report, is_brief=is_brief)


def without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the lines of this library."""
    if trace is None:
        return None
    rest = without_ours(trace.tb_next)
    if trace.tb_frame.f_code.co_filename.startswith(_OURS):
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
