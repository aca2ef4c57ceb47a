# SPDX-License-Identifier: Apache-2.0
from enum import IntEnum
from typing import Self, final

from fastps.reduce._partition import Coder, Combiner

class RoundState(IntEnum):
    IDLE = 0
    OPEN = 1
    DONE = 2
    FAILED = 3

class RoundEvent(IntEnum):
    BEGIN = 0
    LAST_SUM = 1
    FAIL = 2

TRANSITIONS: dict[tuple[RoundState, RoundEvent], RoundState]

@final
class CodedRule:
    def __new__(cls, coder: Coder) -> Self: ...
    @property
    def kernel(self) -> int: ...
    @property
    def state(self) -> int: ...
    @property
    def wire_bytes(self) -> int: ...

@final
class KeptResidual:
    def __new__(cls, coder: Coder) -> Self: ...
    @property
    def state(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

@final
class RuledRule:
    def __new__(
        cls, combiner: Combiner, coder: Coder | None = None, is_at_once: bool = False
    ) -> Self: ...
    @property
    def combiner(self) -> Combiner: ...
    @property
    def coder(self) -> Coder | None: ...
    @property
    def kernel(self) -> int: ...
    @property
    def look(self) -> int: ...
    @property
    def state(self) -> int: ...
