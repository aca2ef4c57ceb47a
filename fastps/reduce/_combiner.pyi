# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from typing import Any, Self, final

import numpy as np

from fastps.contract.rule import Rule
from fastps.types import DType

@final
class Combiner:
    def __new__(
        cls, rule: Rule, code: DType, *, n: int, count: int, function: Any = None
    ) -> Self: ...
    def adopt(self, function: Any) -> None: ...
    def combine(
        self, updates: Sequence[np.ndarray[Any, Any] | None], *, version: int = 1
    ) -> tuple[np.ndarray[Any, Any], list[int]]: ...
