# SPDX-License-Identifier: Apache-2.0
# The Python face of _ops; stubtest compares it with the module. The docstrings are there.

from collections.abc import Callable, Sequence

from typing_extensions import disjoint_base

from fastps.frameworks._borrowed_memory import BorrowedMemory
from fastps.worker.handle import Array

FUNCTIONS: tuple[str, ...]
MAX_RANK: int

@disjoint_base
class Tensors(BorrowedMemory): ...

@disjoint_base
class Outputs(Tensors):
    def set_slot(self, place: int, slot: Slot) -> None: ...
    def copy_array(self, place: int, array: Array) -> None: ...

@disjoint_base
class Pending:
    def run(self) -> None: ...

@disjoint_base
class Slot:
    def __init__(self, array: Array) -> None: ...
    @property
    def array(self) -> Array: ...
    @property
    def is_busy(self) -> bool: ...

def register(
    addresses: Sequence[int],
    functions: list[Callable[[Tensors, Outputs], None]],
    results: dict[int, tuple[bool, list[tuple[int, tuple[int, ...] | None, bool]]]],
    defer: Callable[[Callable[[], object]], object],
) -> None: ...
