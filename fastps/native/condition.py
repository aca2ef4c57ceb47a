# SPDX-License-Identifier: Apache-2.0
"""A condition variable that Ctrl-C cannot leave locked.

threading.Condition locks and unlocks in Python functions. A signal handler runs when such a
function begins, or when a call in it returns. If that raises KeyboardInterrupt, the lock stays
held when the with statement ends, and other threads wait for it forever. Here the with statement
calls the methods of the lock itself, which are in C, and no handler runs in between.
"""

from __future__ import annotations

import operator
import threading
from typing import Any


class Condition(threading.Condition):
    """A threading.Condition for use in with statements on the main thread."""

    def __init__(self, lock: Any = None) -> None:
        """Take a lock (threading.RLock) that other conditions have too, or make one."""
        lock = lock or threading.RLock()
        super().__init__(lock)
        self._enter, self._exit = lock.__enter__, lock.__exit__

    __enter__: Any = property(operator.attrgetter("_enter"))
    __exit__: Any = property(operator.attrgetter("_exit"))
