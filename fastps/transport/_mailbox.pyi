# SPDX-License-Identifier: Apache-2.0
from typing import Self, final

from fastps.transport._link import LinkOwner

@final
class Parcel:
    def wait(self, *, timeout_s: float) -> None: ...

@final
class Mailbox(LinkOwner):
    def __new__(cls, *, max_frame: int = 1073741824, adopts: bool = False) -> Self: ...
    def post(
        self,
        peer: int,
        payload: bytes | bytearray | memoryview,
        *,
        kind: int = 1,
        key: int = 0,
        priority: int = 0,
        chunk_bytes: int = 0,
        is_credited: bool = False,
        kick: int = 1,
        dtype: int = 0,
        flags: int = 0,
        key_version: int = 0,
        sender: int = 0,
        offset: int = 0,
        status: int = 0,
        subject: int = 0,
    ) -> Parcel: ...
    def kick(self, peer: int, kick: int = 1) -> None: ...
    def end(self, peer: int, status: int) -> None: ...
    def receive(self, *, timeout_s: float) -> tuple[int, dict[str, int], bytes]: ...
    def hesitate(self, peer: int, times: int) -> None: ...
    def hesitations(self, peer: int) -> int: ...
    def ended(self, peer: int) -> int: ...
    def wait_ended(self, peer: int, *, timeout_s: float) -> int: ...
