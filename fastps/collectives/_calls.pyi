# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Sequence
from typing import Any, Final, ParamSpec, Self, TypeVar, final

from fastps.collectives._exchange import Operation
from fastps.worker.handle import Handle

_P = ParamSpec("_P")
_H = TypeVar("_H", bound=Handle[Any])

CACHE_MISS: Final[object]

class MeanwhileError(Exception):
    def __init__(self, operation: Operation, result: Any) -> None: ...
    operation: Operation
    result: Any

def invalidate_call_cache() -> None: ...
def current_epoch() -> int: ...
def tell_apart(*types: type[Any]) -> None: ...
def cached(start: Callable[_P, _H]) -> Callable[_P, _H]: ...

@final
class Calls:
    def __new__(cls) -> Self: ...
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
