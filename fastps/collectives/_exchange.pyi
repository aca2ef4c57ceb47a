# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Sequence
from typing import Any, Self, final

from fastps._pages import LargePages
from fastps.collectives.schedule import Step
from fastps.transport._link import LinkOwner
from fastps.worker._engine import WorkerEngine

@final
class Program:
    peers: tuple[int, ...]
    scratch_bytes: int
    is_linked: bool
    def __init__(
        self, steps: Sequence[Step], scratch_bytes: int, ranks: Sequence[int]
    ) -> None: ...
    def offer(self) -> Self: ...

@final
class Operation:
    name: str
    @property
    def is_done(self) -> bool: ...
    about: Any
    group: Any
    guess: Any
    @property
    def number(self) -> int: ...
    channel: int
    @property
    def culprit(self) -> int: ...
    @property
    def mistake(self) -> int: ...
    @property
    def differs(self) -> bool: ...
    @property
    def met(self) -> int: ...
    @property
    def missed(self) -> list[int]: ...
    @property
    def awaited(self) -> list[int]: ...
    def wait(self, *, timeout_s: float, spin_us: int = 50) -> int | None: ...

@final
class Exchange(LinkOwner):
    pin: Callable[[Any], object] | None
    pages: LargePages | None
    def __new__(
        cls, *, me: int, n_members: int, engine: WorkerEngine, goes_on: bool = False
    ) -> Self: ...
    def is_linked(self, peer: int) -> bool: ...
    def start(
        self,
        program: Program,
        channel: int,
        *,
        name: str,
        input: Any = None,
        output: Any = None,
        itemsize: int = 1,
        rule: int = 0,
        divisor: int = 1,
        dtype: int = 0,
        code: int = 0,
        priority: int = 0,
        is_numbered: bool = False,
        mix: int = 0,
        weights: Sequence[float] = (),
        goes_on: bool = False,
        may_differ: bool = False,
    ) -> Operation: ...
    def count(self, channel: int) -> int: ...
    def is_forgettable(self, channel: int) -> bool: ...
    def forget(self, channel: int) -> None: ...
    def refuse(self, operation: Operation) -> None: ...
    @property
    def operations(self) -> list[Operation]: ...
    @property
    def failure(self) -> tuple[int, int] | None: ...
    @property
    def gone(self) -> list[int]: ...
    def lose(self, member: int) -> None: ...
    def fail(self, status: int) -> None: ...
    def leave(self) -> None: ...
    def dismiss(self) -> None: ...
    def statistics(self) -> dict[str, int]: ...
