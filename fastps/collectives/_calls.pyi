# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from typing import Any, Final, Self, final

from fastps.collectives._exchange import Operation

CACHE_MISS: Final[object]

def invalidate_call_cache() -> None: ...
def current_epoch() -> int: ...

@final
class Calls:
    def __new__(cls, *same: type[Any]) -> Self: ...
    def again(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any: ...
    def begin(
        self, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[Operation, Any] | None: ...
    def remember(
        self,
        args: tuple[Any, ...],
        options: dict[str, Any],
        result: Any,
        operations: Sequence[Operation],
        before: int,
    ) -> None: ...
