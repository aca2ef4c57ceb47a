# SPDX-License-Identifier: Apache-2.0
"""Commands end quietly when the reader of their output has gone, as in `fastps doctor | head -1`.

The exit status is then 141, as of a program that SIGPIPE ended. SIGPIPE itself stays ignored,
for the links of jobs are sockets. Threads: the one that runs the command.
"""

from __future__ import annotations

import functools
import os
import select
import sys
from collections.abc import Callable
from typing import ParamSpec

EXIT_CLOSED_PIPE = 128 + 13  # SIGPIPE
_STANDARD_OUTPUTS = (1, 2)

P = ParamSpec("P")


def ends_quietly(main: Callable[P, int | None]) -> Callable[P, int]:
    """Make a command return 141, without a traceback, when standard output or error is closed.

    A BrokenPipeError of anything else passes through, and so does another exit status than 0.
    A main() without a result has the status 0.
    """

    @functools.wraps(main)
    def run(*args: P.args, **options: P.kwargs) -> int:
        code, end = 0, None
        try:
            try:
                code = main(*args, **options) or 0
            except SystemExit as error:  # of argparse, which ignores that an output is closed
                end = error
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
            is_closed = end is not None and _discard_closed_outputs()
        except BrokenPipeError:
            is_closed = _discard_closed_outputs()
            if not is_closed:
                raise
        if is_closed and not (end.code if end else code):
            return EXIT_CLOSED_PIPE
        if end is not None:
            raise end
        return code

    return run


def _discard_closed_outputs() -> bool:
    """Replace outputs without a reader by /dev/null; return whether there were any."""
    poll = select.poll()
    for descriptor in _STANDARD_OUTPUTS:
        poll.register(descriptor, 0)
    closed = [one for one, events in poll.poll(0) if events & (select.POLLERR | select.POLLHUP)]
    if closed:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in closed:
            os.dup2(nowhere, descriptor)
        os.close(nowhere)
    return bool(closed)
