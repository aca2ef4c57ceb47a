# SPDX-License-Identifier: Apache-2.0
from typing import Self, final

from fastps.reduce._combiner import Combiner
from fastps.reduce.codec._coder import Coder

@final
class RuledRule:
    def __new__(
        cls, combiner: Combiner, coder: Coder | None = None, is_at_once: bool = False
    ) -> Self: ...
    @property
    def combiner(self) -> Combiner: ...
    @property
    def coder(self) -> Coder | None: ...
    @property
    def kernel(self) -> int: ...
    @property
    def look(self) -> int: ...
    @property
    def state(self) -> int: ...
