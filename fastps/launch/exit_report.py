# SPDX-License-Identifier: Apache-2.0
"""How a run of fastps-run begins and ends: its screen, its restarts, its last line.

Shared by the launcher of one machine and the leader of several (leader.py).
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

EXIT_SETTINGS = 2  # wrong settings
_HURRY_S = 1.0  # for the reader to take the next byte, once the job was told to end
FIRST_PAUSE_S = 1.0  # before a restart; then twice as long each time
MAX_PAUSE_S = 60.0
STDOUT, STDERR = 1, 2


def make_screen(options: Options, environment: Mapping[str, str]) -> Screen:
    """Return the screen of the standard outputs, in colour if the options ask for it."""
    wants = options.colour == "always" or (
        options.colour == "auto" and os.isatty(STDOUT) and not environment.get("NO_COLOR")
    )
    return Screen(*outlets(STDOUT, STDERR), has_colour=wants)


def wants_live(options: Options, *, is_shown_here: bool = True) -> bool:
    """Return whether to make a live line: on a terminal, unless --no-live is given."""
    return not options.has_no_live and (not is_shown_here or os.isatty(STDERR))


def run_again(
    run: Callable[[], Cause | None], cause: Cause | None, screen: Screen, inbox: SignalInbox,
    restarts: int,
) -> Cause | None:  # fmt: skip
    """Run a failed job again, up to `restarts` times; return the cause of the last run's end."""
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
    """Wait before the next restart, longer each time; return the cause if a signal ends it."""
    wait_s = min(FIRST_PAUSE_S * 2.0 ** (number - 1), MAX_PAUSE_S)
    screen.report(f"{cause.text}; restart {number} of {restarts} in {wait_s:g} s", is_alarm=True)
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
    """Report the first cause, let the output be read to its end, and return the exit code.

    All processes have ended, so the wait for a slow reader has no limit, except after a signal or
    the job's time limit; a signal ends the wait.
    """
    for number in inbox.take():  # signals that came while the last processes were ended
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
