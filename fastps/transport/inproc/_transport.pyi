# SPDX-License-Identifier: Apache-2.0
from typing import Self, final

from fastps.transport._base import BaseTransport
from fastps.transport._link import LinkOwner

@final
class InprocTransport(BaseTransport):
    def __new__(cls, *, io_threads: int = 1) -> Self: ...
    def connect(
        self,
        owner_a: LinkOwner,
        peer_for_a: int,
        owner_b: LinkOwner,
        peer_for_b: int,
        *,
        lane: int = 0,
        credit_bytes: int = 0,
        by_reference: bool = False,
    ) -> None: ...
