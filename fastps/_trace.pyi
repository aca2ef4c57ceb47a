# SPDX-License-Identifier: Apache-2.0
# The Python face of _trace; stubtest compares it with the module. The docstrings are there.

from typing import Self, final

__all__ = ["Drain", "clock_ns", "is_on", "mark"]

@final
class Drain:
    def __new__(
        cls, fd: int, *, first: int = 0, last: int = 0xFFFFFFFF, max_bytes: int = ...
    ) -> Self: ...
    @property
    def trouble(self) -> str: ...
    @property
    def dropped(self) -> int: ...
    def stop(self) -> None: ...
    def abandon(self) -> None: ...

def is_on() -> bool: ...
def clock_ns() -> int: ...
def mark(
    kind: int,
    began: int,
    ended: int,
    *,
    key: int = 0,
    version: int = 0,
    peer: int = 0,
    nbytes: int = 0,
) -> None: ...
