# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, final

import numpy as np

from fastps.reduce._partition import Coder
from fastps.transport._link import LinkOwner
from fastps.worker._plan import LocalStages, PlannedTensor, StageHolder, Ticket

@final
class WorkerEngine(LinkOwner):
    def __new__(
        cls, *, me: int, n_members: int, lanes: Mapping[int, int] | None = None
    ) -> Self: ...
    def insert(self, place: int, stage: StageHolder) -> None: ...
    def share(self, local: LocalStages) -> None: ...
    def declare(
        self,
        tensor_id: int,
        name: str,
        *,
        nbytes: int,
        dtype: int,
        chunk_bytes: int = 0,
        partitions: Sequence[tuple[int, int, int]] = ...,
        itemsize: int = 1,
        kernel: int = 0,
        version: int = 0,
        coders: Sequence[Coder | None] | None = None,
        frame_bytes: int = 0,
        is_ruled: bool = False,
        waits_for_whole: bool = False,
        adds: bool = False,
    ) -> PlannedTensor: ...
    def forget(self, tensor: PlannedTensor) -> None: ...
    def start(
        self,
        tensor: PlannedTensor,
        array: np.ndarray[Any, Any],
        output: np.ndarray[Any, Any],
        *,
        average: bool = False,
        priority: int = 0,
    ) -> Ticket: ...
    def start_many(
        self,
        tensors: Sequence[PlannedTensor],
        arrays: Sequence[np.ndarray[Any, Any]],
        outputs: Sequence[np.ndarray[Any, Any]],
        *,
        average: bool = False,
        priorities: Sequence[int],
        contributes: bool = True,
    ) -> list[Ticket]: ...
    def start_broadcast(
        self,
        tensors: Sequence[PlannedTensor],
        arrays: Sequence[np.ndarray[Any, Any]],
        *,
        root: int,
        machine: int | None = None,
        priority: int = 0,
    ) -> list[Ticket]: ...
    def start_pull(
        self,
        tensors: Sequence[PlannedTensor],
        outputs: Sequence[np.ndarray[Any, Any]],
        *,
        stamp: int = 0,
        priority: int = 0,
        is_coded: bool = False,
    ) -> list[Ticket]: ...
    def hold_with(self, holder: Callable[[Any], object] | None) -> None: ...
    @property
    def failure(self) -> tuple[int, int] | None: ...
    def fail(self, status: int) -> None: ...
    def fail_tensor(self, tensor_id: int, status: int) -> None: ...
    def member_left(self, rank: int) -> None: ...
    def leave(self) -> None: ...
    def wait_closed(self, *, timeout_s: float) -> bool: ...
    def close_memory(self, *, timeout_s: float) -> bool: ...
    def measure_speed(self) -> None: ...
    def speed(self) -> tuple[int, float] | None: ...
    def busy_seconds(self) -> float: ...
    def statistics(self) -> dict[str, int]: ...
