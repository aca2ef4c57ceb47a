# SPDX-License-Identifier: Apache-2.0
# The Python face of _core; stubtest compares it with the module. The docstrings are there.

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self, final

__all__ = [
    "BufferPool",
    "PoolStatistics",
    "Pulse",
    "arm_fault",
    "debug_counters",
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
    def __new__(cls, fd: int, payload: bytes, interval_s: float) -> Self: ...
    def __del__(self) -> None: ...
    @property
    def is_alive(self) -> bool: ...
    @property
    def errno(self) -> int: ...
    def stop(self, *, timeout_s: float = 5.0) -> None: ...

def arm_fault(spec: str) -> None: ...
def debug_counters() -> dict[str, int]: ...
def set_thread_placement(cpus: Sequence[int], node: int) -> None: ...
