# SPDX-License-Identifier: Apache-2.0
from typing import Self, final

from fastps.reduce._combiner import Combiner

@final
class RuledRule:
    def __new__(cls, combiner: Combiner) -> Self: ...
    @property
    def combiner(self) -> Combiner: ...
    @property
    def kernel(self) -> int: ...
    @property
    def state(self) -> int: ...
