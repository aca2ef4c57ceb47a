# SPDX-License-Identifier: Apache-2.0
from typing import Any, Self, final

from typing_extensions import disjoint_base

from fastps.transport._base import BaseTransport
from fastps.transport._link import LinkOwner

@disjoint_base
class VerbsDevice:
    def __new__(cls, *args: Any, **options: Any) -> Self: ...
    @property
    def inline_bytes(self) -> int: ...
    @property
    def max_message_bytes(self) -> int: ...
    @property
    def has_windows(self) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def data_path(self) -> str: ...

@final
class PythonDevice(VerbsDevice):
    def __new__(cls, handler: Any, *, name: str) -> Self: ...
    def close(self) -> None: ...

@final
class Memory:
    def __new__(cls, device: VerbsDevice) -> Self: ...

@final
class RdmaRegion:
    @property
    def nbytes(self) -> int: ...
    def close(self) -> bool: ...

@final
class Opening:
    def wait(self, *, timeout_s: float = 10.0) -> None: ...

@final
class RdmaTransport(BaseTransport):
    def __new__(
        cls,
        device: VerbsDevice,
        *,
        io_threads: int = 1,
        spin_us: int = 0,
        pinned_bytes: int = ...,
        greeting_timeout_s: float = 10.0,
    ) -> Self: ...
    def adopt(
        self,
        fd: int,
        owner: LinkOwner,
        *,
        peer: int,
        lane: int = 0,
        credit_bytes: int = 0,
        greets_first: bool = True,
    ) -> Opening: ...
    def register(self, address: int, nbytes: int) -> RdmaRegion: ...
    def hold(self, array: Any) -> bool: ...
    def statistics(self) -> dict[str, int]: ...
    def close(self, *, timeout_s: float = 10.0) -> None: ...
    @property
    def has_trouble(self) -> bool: ...
    def failure_of(self, peer: int) -> str: ...
    def forget_failures(self) -> None: ...
