# SPDX-License-Identifier: Apache-2.0
from enum import IntEnum

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
