# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from typing import Any, Self, final

import numpy as np

from fastps.transport._shm import Mapping
from fastps.transport.shm import Arena
from fastps.worker._engine import EngineTensor, WorkerEngine
from fastps.worker._tensor import LentTensor

def control_bytes(n: int) -> int: ...
def stage_area_bytes(stage_bytes: int) -> int: ...

@final
class LocalTensor(LentTensor):
    @property
    def is_done(self) -> bool: ...
    @property
    def version(self) -> int: ...
    @property
    def culprit(self) -> int: ...
    def wait(self, *, timeout_s: float, spin_us: int = 50) -> int | None: ...

@final
class LocalEngine:
    def __new__(
        cls,
        *,
        ranks: Sequence[int],
        index: int,
        control: Mapping,
        arenas: Sequence[Mapping],
        arena: Arena,
        stage_bytes: int,
        n_workers: int,
        engine: WorkerEngine | None = None,
    ) -> Self: ...
    def declare(
        self,
        tensor_id: int,
        name: str,
        *,
        nbytes: int,
        itemsize: int,
        kernel: int,
        remote: EngineTensor | None = None,
    ) -> LocalTensor: ...
    def start(
        self,
        tensor: LocalTensor,
        array: np.ndarray[Any, Any],
        output: np.ndarray[Any, Any],
        *,
        average: bool = False,
        priority: int = 0,
    ) -> None: ...
    def start_many(
        self,
        tensors: Sequence[LocalTensor],
        arrays: Sequence[np.ndarray[Any, Any]],
        outputs: Sequence[np.ndarray[Any, Any]],
        *,
        average: bool = False,
        priorities: Sequence[int],
    ) -> None: ...
    def start_broadcast(
        self,
        tensors: Sequence[LocalTensor],
        arrays: Sequence[np.ndarray[Any, Any]],
        *,
        root: int,
        machine: int | None = None,
        priority: int = 0,
    ) -> None: ...
    @property
    def failure(self) -> int | None: ...
    def fail(self, status: int) -> None: ...
    def fail_tensor(self, tensor_id: int, status: int) -> None: ...
    def member_left(self, rank: int) -> None: ...
    def leave(self) -> None: ...
    def wait_closed(self, *, timeout_s: float) -> bool: ...
    def statistics(self) -> dict[str, int]: ...
