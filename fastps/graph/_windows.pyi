# SPDX-License-Identifier: Apache-2.0
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self, final

from fastps.collectives._exchange import Exchange

MAX_BYTES: int
NAP_S: float

def window_bytes(nbytes: int, n_buffers: int) -> int: ...
def buffer_offset(nbytes: int, place: int) -> int: ...

@final
class Windows:
    def __new__(cls, exchange: Exchange) -> Self: ...
    def pin(self, array: Any) -> None: ...
    @property
    def lost(self) -> list[int]: ...
    def stop(self, *, timeout_s: float = 10.0) -> bool: ...

@final
class Window:
    name: str
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    engine: Windows
    def __init__(
        self,
        engine: Windows,
        name: str,
        number: int,
        own: Any,
        memory: Any,
        sources: Sequence[int],
        *,
        itemsize: int,
        dtype: int,
        sum: int,
        mix: int,
        zero_init: bool,
    ) -> None: ...
    def connect(
        self,
        targets: Sequence[tuple[int, int]],
        direct: Collection[int],
        theirs: Mapping[int, tuple[int, int]],
        *,
        keep: Any = None,
    ) -> None: ...
    def put(
        self,
        array: Any,
        weights: Mapping[int, float],
        *,
        adds: bool = False,
        self_weight: float = 1.0,
        is_locked: bool = False,
        has_p: bool = False,
        is_inline: bool = False,
        timeout_s: float = 60.0,
    ) -> WindowAction: ...
    def get(
        self,
        weights: Mapping[int, float],
        *,
        is_locked: bool = False,
        is_inline: bool = False,
        timeout_s: float = 60.0,
    ) -> WindowAction: ...
    def update(
        self,
        self_weight: float,
        weights: Mapping[int, float],
        *,
        out: Any = None,
        resets: Collection[int] = (),
        is_mean: bool = False,
        is_locked: bool = False,
        has_p: bool = False,
        timeout_s: float = 60.0,
    ) -> WindowAction: ...
    def lock(
        self,
        members: Sequence[int],
        *,
        excluded: Collection[int] | None = None,
        timeout_s: float = 60.0,
    ) -> WindowAction: ...
    @property
    def actions(self) -> list[WindowAction]: ...
    @property
    def p(self) -> float: ...
    def versions(self) -> dict[int, int]: ...
    def masses(self) -> dict[int, float]: ...
    def peek(self, peer: int) -> bytes: ...
    def free(self, *, timeout_s: float = 10.0) -> bool: ...

@final
class WindowAction:
    name: str
    @property
    def is_done(self) -> bool: ...
    @property
    def culprit(self) -> int: ...
    @property
    def awaited(self) -> list[int]: ...
    def wait(self, *, timeout_s: float, spin_us: int = 50) -> int | None: ...
    def unlock(self) -> None: ...
