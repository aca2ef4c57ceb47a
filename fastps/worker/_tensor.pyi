# SPDX-License-Identifier: Apache-2.0
from typing import Any, final

import numpy as np
from typing_extensions import disjoint_base

from fastps.types import DType

@disjoint_base
class StageHolder: ...

@disjoint_base
class PlanHolder: ...

@final
class PlannedTensor:
    name: str
    nbytes: int
    def expect(self, shape: tuple[int, ...], code: DType) -> None: ...
    def fits(self, array: object) -> bool: ...
    @property
    def is_done(self) -> bool: ...
    @property
    def version(self) -> int: ...
    @property
    def culprit(self) -> int: ...
    def wait(self, *, timeout_s: float, spin_us: int = 50) -> int | None: ...
    def lend(
        self, array: np.ndarray[Any, Any] | None, output: np.ndarray[Any, Any] | None
    ) -> None: ...
