# SPDX-License-Identifier: Apache-2.0
from typing import Self, final

from fastps.worker.handle import Array

def pack(
    rows: Array, counts: list[int], row_bytes: int, width: int, dtype: int, room: int
) -> bytearray: ...

@final
class Blocks:
    counts: list[int]
    is_whole: bool
    is_full: bool
    odd: int
    its: tuple[int, int]
    def __new__(cls, found: bytearray, n: int, row_bytes: int, width: int, dtype: int) -> Self: ...
    def land(self, out: Array) -> Array: ...
