# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from typing import Any, Self, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from fastps.contract.codec import Coding
from fastps.contract.rule import Rule
from fastps.types import DType

@final
class Coder:
    def __new__(
        cls,
        coding: Coding,
        code: DType,
        *,
        nbytes: int,
        chunk_bytes: int,
        name: str = "",
        partition: int = 0,
        rank: int = 0,
        pushes: bool = False,
    ) -> Self: ...
    @property
    def wire_bytes(self) -> int: ...
    def encode(
        self, elements: npt.NDArray[np.uint8], *, version: int = 1, ratio: float = 1.0
    ) -> bytearray: ...
    def encode_into(
        self,
        elements: npt.NDArray[np.uint8],
        wire: bytearray | npt.NDArray[np.uint8],
        *,
        version: int = 1,
        ratio: float = 1.0,
    ) -> None: ...
    def decode(
        self,
        wire: bytearray | npt.NDArray[np.uint8],
        elements: npt.NDArray[np.uint8],
        *,
        version: int = 1,
    ) -> None: ...
    def kept(self) -> tuple[memoryview | None, memoryview | None]: ...
    def restore(self, kept: tuple[Buffer | None, Buffer | None]) -> None: ...

@final
class Combiner:
    def __new__(
        cls, rule: Rule, code: DType, *, n: int, count: int, function: Any = None
    ) -> Self: ...
    def adopt(self, function: Any) -> None: ...
    def combine(
        self, updates: Sequence[np.ndarray[Any, Any] | None], *, version: int = 1
    ) -> tuple[np.ndarray[Any, Any], list[int]]: ...
