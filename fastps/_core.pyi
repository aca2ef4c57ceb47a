# SPDX-License-Identifier: Apache-2.0
# The Python face of _core; stubtest compares it with the module. The docstrings are there.

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, final

from numpy.typing import NDArray

__all__ = [
    "Beats",
    "BufferPool",
    "CopyPool",
    "Drain",
    "HugePages",
    "PoolStatistics",
    "Pulse",
    "arm_fault",
    "clock_ns",
    "copy_array",
    "debug_counters",
    "is_on",
    "mark",
    "may_gather",
    "overdue_s",
    "set_thread_placement",
]

class PoolStatistics(NamedTuple):
    mapped_bytes: int
    loaned_bytes: int
    peak_loaned_bytes: int
    slabs: int
    loans: int
    total_loans: int
    refusals: int

@final
class BufferPool:
    def __new__(
        cls,
        limit_bytes: int = 0,
        *,
        slab_bytes: int = ...,
        on_slab: Callable[[int, int], object] | None = None,
    ) -> Self: ...
    def __del__(self) -> None: ...
    def statistics(self) -> PoolStatistics: ...
    def close(self) -> None: ...

@final
class Pulse:
    def __new__(
        cls, fd: int, payload: bytes, interval_s: float, *, lease_s: float = 0.0,
        end_fd: int = -1, answer_fd: int = -1, cookie: bytes = b"", peer_stat: bytes = b"",
    ) -> Self: ...  # fmt: skip
    def __del__(self) -> None: ...
    @property
    def is_alive(self) -> bool: ...
    @property
    def errno(self) -> int: ...
    @property
    def silent_s(self) -> float: ...
    def stop(self, *, timeout_s: float = 5.0) -> None: ...

@final
class Beats:
    def __new__(cls, interval_s: float) -> Self: ...
    def add(self, fd: int, payload: bytes) -> int: ...
    def remove(self, number: int) -> None: ...
    def stop(self, *, timeout_s: float = 5.0) -> None: ...

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

@final
class CopyPool:
    count: int
    def __init__(self, count: int) -> None: ...
    def close(self, timeout_s: float = 10.0) -> bool: ...

@final
class HugePages:
    bytes_gathered: int
    def __init__(self, first: int = 0, nbytes: int = 0) -> None: ...

def arm_fault(spec: str) -> None: ...
def clock_ns() -> int: ...
def copy_array(to: NDArray[Any], source: NDArray[Any]) -> None: ...
def debug_counters() -> dict[str, int]: ...
def is_on() -> bool: ...
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
def may_gather(setting: Path = ...) -> bool: ...
def overdue_s() -> float: ...
def set_thread_placement(cpus: Sequence[int], node: int) -> None: ...
