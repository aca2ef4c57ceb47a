# SPDX-License-Identifier: Apache-2.0
from typing import final

def overdue_s() -> float: ...

@final
class Hands:
    count: int
    def __init__(self, count: int) -> None: ...
    def close(self, timeout_s: float = 10.0) -> bool: ...
