# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
from typing_extensions import disjoint_base

from fastps.types import DType

@disjoint_base
class LentTensor:
    name: str
    nbytes: int
    def expect(self, shape: tuple[int, ...], code: DType) -> None: ...
    def fits(self, array: object) -> bool: ...
    @property
    def is_done(self) -> bool: ...
    @property
    def culprit(self) -> int: ...
    def wait(self, *, timeout_s: float, spin_us: int = 50) -> int | None: ...
    def lend(
        self, array: np.ndarray[Any, Any] | None, output: np.ndarray[Any, Any] | None
    ) -> None: ...
