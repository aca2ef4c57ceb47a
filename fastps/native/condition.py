# SPDX-License-Identifier: Apache-2.0
"""A condition variable and a flag that Ctrl-C cannot leave locked.

threading.Condition locks and unlocks in Python functions. A signal handler runs when such a
function begins, or when a call in it returns. If that raises KeyboardInterrupt, the lock stays
held when the with statement ends, and other threads wait for it forever. Here the with statement
calls the methods of the lock itself, which are in C, and no handler runs in between.

threading.Event has a threading.Condition within. A Flag has no lock that two threads take in turn:
each wait() has one of its own, which set() releases.
"""

from __future__ import annotations

import contextlib
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


class Flag:
    """A threading.Event for the main thread, which signal handlers may set as well."""

    def __init__(self) -> None:
        """Make one that is not set."""
        self._is_set = False
        self._waiting: list[threading.Lock] = []

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it, and wake all threads that wait."""
        self._is_set = True
        for lock in tuple(self._waiting):
            with contextlib.suppress(RuntimeError):  # another thread has released it
                lock.release()

    def clear(self) -> None:
        """Undo set()."""
        self._is_set = False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set, or up to timeout_s seconds; return whether it was set."""
        if self._is_set:
            return True
        timeout = -1 if timeout_s is None else max(timeout_s, 0)
        lock = threading.Lock()
        lock.acquire()
        self._waiting.append(lock)
        try:  # set() either finds the lock, or was before this look
            return self._is_set or lock.acquire(timeout=timeout)
        finally:
            self._waiting.remove(lock)
