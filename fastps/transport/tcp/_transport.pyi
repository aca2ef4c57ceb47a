# SPDX-License-Identifier: Apache-2.0
from typing import Self, final

from fastps.security.ciphers import Sealing
from fastps.transport._link import BaseTransport, LinkOwner

@final
class TcpTransport(BaseTransport):
    def __new__(cls, *, io_threads: int = 1, spin_us: int = 0, silence_s: float = 0) -> Self: ...
    def unacknowledged(self) -> list[tuple[int, int, int, int]]: ...
    def damage_of(self, peer: int) -> tuple[int, int, int, int, int, bool] | None: ...
    def abandon(self) -> None: ...
    def forget_damages(self) -> None: ...
    def adopt(
        self,
        fd: int,
        owner: LinkOwner,
        *,
        peer: int,
        lane: int = 0,
        credit_bytes: int = 0,
        follows: bool = False,
        is_checked: bool = False,
        sealing: Sealing | None = None,
    ) -> None: ...
