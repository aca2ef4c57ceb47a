# SPDX-License-Identifier: Apache-2.0
from collections.abc import Mapping, Sequence
from typing import Self, final

from fastps._core import BufferPool
from fastps.contract.contract import Compensation, Gathering, Roster
from fastps.reduce._partition import Coder
from fastps.server._policies import CodedRule, KeptResidual, RuledRule
from fastps.transport._link import LinkOwner

@final
class ServerStore(LinkOwner):
    def __new__(
        cls,
        pool: BufferPool,
        *,
        member: int,
        n_members: int,
        lanes: int = 1,
        engine_threads: int = 1,
    ) -> Self: ...
    def declare(
        self,
        tensor_id: int,
        *,
        n_partitions: int,
        partitions: Sequence[tuple[int, int, Roster]],
        dtype: int,
        itemsize: int,
        chunk_bytes: int,
        kernel: int,
        inline_bytes: int,
        version: int = 0,
        policy: int = ...,
        staleness: int = 0,
        compensation: Compensation = ...,
        unit: int = ...,
        states: Mapping[int, CodedRule]
        | Mapping[int, RuledRule]
        | Mapping[int, KeptResidual]
        | None = None,
        is_ruled: bool = False,
        look: int = 0,
        gathering: Gathering = ...,
        least: int = 1,
        coders: Mapping[int, Coder] | None = None,
    ) -> None: ...
    def keep_buffers(self, limit_bytes: int) -> None: ...
    def take_back_idle(self) -> None: ...
    def fail_tensor(self, tensor_id: int, status: int) -> None: ...
    def forget_tensor(self, tensor_id: int, *, timeout_s: float) -> None: ...
    def wait_news(self, *, timeout_s: float) -> dict[int, int]: ...
    def refusals(self) -> dict[int, tuple[int, int]]: ...
    def end_late_rounds(self, *, ahead_s: float = 0.0) -> float: ...
    def absences(self) -> dict[int, tuple[int, int]]: ...
    def wake(self) -> None: ...
    def forget(self, *, timeout_s: float) -> None: ...
    def statistics(self) -> dict[str, int]: ...
    def close(self, *, timeout_s: float = 10.0) -> None: ...
