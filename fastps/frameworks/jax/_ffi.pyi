# SPDX-License-Identifier: Apache-2.0
# The Python face of _ffi; stubtest compares it with the module. The docstrings are there.

from collections.abc import Callable
from typing import Any

from typing_extensions import disjoint_base

from fastps.frameworks._borrowed_memory import BorrowedMemory

@disjoint_base
class Buffers(BorrowedMemory): ...

def handler(functions: list[Callable[..., None]]) -> Any: ...
