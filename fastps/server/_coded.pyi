# SPDX-License-Identifier: Apache-2.0
from typing import Self, final

from fastps.reduce.codec._coder import Coder

@final
class CodedRule:
    def __new__(cls, coder: Coder) -> Self: ...
    @property
    def kernel(self) -> int: ...
    @property
    def state(self) -> int: ...
    @property
    def wire_bytes(self) -> int: ...
