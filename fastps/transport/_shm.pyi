# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import Self, final

@final
class Mapping:
    nbytes: int
    def __new__(cls, descriptor: int, nbytes: int, *, is_forked: bool = False) -> Self: ...
    @property
    def address(self) -> int: ...
    def populate(self, offset: int, nbytes: int) -> None: ...

@final
class Block:
    def __new__(
        cls, mapping: Mapping, offset: int, nbytes: int, returned: Callable[[int], object] | None
    ) -> Self: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
