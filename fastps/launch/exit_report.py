# SPDX-License-Identifier: Apache-2.0
"""What a run of fastps-run begins and ends with: its screen, its pauses, its last line.

The same for a launcher of one machine and for one that leads those of several.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping

from fastps.launch.cause import Cause, report
from fastps.launch.job import SignalInbox, interrupted
from fastps.launch.options import Options
from fastps.launch.output import Screen, outlets

_HURRY_S = 1.0  # without a byte read, once the job was told to end
FIRST_PAUSE_S = 1.0  # before a restart; then twice as long each time
MAX_PAUSE_S = 60.0
STDOUT, STDERR = 1, 2


def make_screen(options: Options, environment: Mapping[str, str]) -> Screen:
    """Make the screen of the standard outputs, in colour where that is wanted."""
    wants = options.colour == "always" or (
        options.colour == "auto" and os.isatty(STDOUT) and not environment.get("NO_COLOR")
    )
    return Screen(*outlets(STDOUT, STDERR), has_colour=wants)


def wants_live(options: Options, *, is_shown_here: bool = True) -> bool:
    """Return whether a live line is to be made: on a terminal, unless --no-live."""
    return not options.has_no_live and (not is_shown_here or os.isatty(STDERR))


def run_again(
    run: Callable[[], Cause | None], cause: Cause | None, screen: Screen, inbox: SignalInbox,
    restarts: int,
) -> Cause | None:  # fmt: skip
    """Run a job that has failed up to so many times more; give why the last run ended."""
    for number in range(1, restarts + 1):
        if cause is None or cause.part is None or not cause.has_time:
            break
        stop = _pause(screen, inbox, cause, number, restarts)
        if stop is not None:
            return stop
        cause = run()
    return cause


def _pause(
    screen: Screen, inbox: SignalInbox, cause: Cause, number: int, restarts: int
) -> Cause | None:
    """Wait before the whole job is started again, longer each time; give a cause not to."""
    wait_s = min(FIRST_PAUSE_S * 2.0 ** (number - 1), MAX_PAUSE_S)
    screen.say(f"{cause.text}; restart {number} of {restarts} in {wait_s:g} s", is_alarm=True)
    until = time.monotonic() + wait_s
    with selectors.DefaultSelector() as selector:
        selector.register(inbox, selectors.EVENT_READ)
        while (left_s := until - time.monotonic()) > 0:
            selector.select(left_s)
            if numbers := inbox.take():
                return interrupted(None, numbers[0])
    return None


def show_end(
    screen: Screen,
    inbox: SignalInbox,
    cause: Cause | None,
    options: Options,
    *,
    has_report: bool = True,
) -> int:
    """Report the first cause, let the output be read to its end, and give the exit code.

    Nothing else is left of the job, so the reader has all the time it wants, but after a signal or
    the time limit; a signal ends the wait.
    """
    for number in inbox.take():  # they came while everything was being cleared away
        cause = interrupted(cause, number)
    code = 0 if cause is None else cause.exit_code
    patience_s = None if cause is None or cause.has_time else _HURRY_S
    try:
        if cause is not None and has_report:
            report(screen, cause, output_dir=options.output_dir)
        while not screen.finish(patience_s=patience_s, or_readable=(inbox.fileno(),)):
            if numbers := inbox.take():
                return code or 128 + numbers[0]
    except BrokenPipeError:
        return code or 128 + signal.SIGPIPE
    return code
