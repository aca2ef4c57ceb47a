# SPDX-License-Identifier: Apache-2.0
"""Decide whether the scheduler of an elastic job hangs: it is asked again and again, and answers.

A scheduler that is stopped, or whose event loop hangs, answers nothing within a lease. One that
waits for a processor or a disk has STARVED_S more, as members have. Looks are counted, not
seconds: a launcher that gets no processor itself looks less often, and never blames the scheduler
for that.
Pure, except for what the kernel says about the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from fastps.control.silence import STARVED_S, WAITING

LOOKS = 4  # in a lease


def waits_for_processor(pid: int) -> bool:
    """Return whether a thread of a process waits for a processor or a disk, as far as is known."""
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if path.read_bytes().rpartition(b")")[2].split()[0].decode() in WAITING:
                return True
    return False


class SchedulerLife:
    """The questions to one scheduler; used from the launcher's main thread."""

    def __init__(
        self, lease_s: float, ask: Callable[[int], None], is_starved: Callable[[], bool]
    ) -> None:
        """ask: sends a question with a number. is_starved: as waits_for_processor."""
        self.every_s = lease_s / LOOKS
        self.answered = 0  # number of the last question with an answer
        self._ask, self._is_starved = ask, is_starved
        self._max_looks = int((lease_s + STARVED_S) / self.every_s)
        self._asked = self._n_looks = self._n_silent = 0
        self._look_at = 0.0

    def hangs(self, now: float) -> bool:
        """Return whether it hangs; look where that is due. Call when all answers were read."""
        if now < self._look_at:
            return False
        self._look_at = now + self.every_s
        if self.answered >= self._asked:
            self._asked, self._n_looks, self._n_silent = self._asked + 1, 0, 0
            self._ask(self._asked)
            return False
        self._n_looks += 1
        self._n_silent += not self._is_starved()
        return self._n_silent >= LOOKS or self._n_looks >= self._max_looks
