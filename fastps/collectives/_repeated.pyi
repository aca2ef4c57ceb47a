# SPDX-License-Identifier: Apache-2.0
from typing import Any, Self, final

from fastps.collectives._exchange import Operation
from fastps.worker.handle import Array

def repeated_of(operation: Operation, arrays: list[Array], result: Any) -> Repeated | None: ...

@final
class Repeated:
    def __new__(cls) -> Self: ...
    def run(self, arrays: list[Array], before: int) -> Any: ...
