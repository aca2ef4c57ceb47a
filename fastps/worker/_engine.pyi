# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Sequence
from typing import Any, Self, final

import numpy as np

from fastps.transport._link import LinkOwner
from fastps.worker._tensor import LentTensor

@final
class EngineTensor(LentTensor):
    @property
    def is_done(self) -> bool: ...
    @property
    def version(self) -> int: ...
    @property
    def culprit(self) -> int: ...
    def wait(self, *, timeout_s: float, spin_us: int = 50) -> int | None: ...

@final
class WorkerEngine(LinkOwner):
    def __new__(cls, *, rank: int, n_servers: int, lanes: Sequence[int] | None = None) -> Self: ...
    def declare(
        self,
        tensor_id: int,
        name: str,
        *,
        nbytes: int,
        dtype: int,
        chunk_bytes: int,
        partitions: Sequence[tuple[int, int, int]],
    ) -> EngineTensor: ...
    def start(
        self,
        tensor: EngineTensor,
        array: np.ndarray[Any, Any],
        output: np.ndarray[Any, Any],
        *,
        average: bool = False,
        priority: int = 0,
    ) -> None: ...
    def start_many(
        self,
        tensors: Sequence[EngineTensor],
        arrays: Sequence[np.ndarray[Any, Any]],
        outputs: Sequence[np.ndarray[Any, Any]],
        *,
        average: bool = False,
        priorities: Sequence[int],
    ) -> None: ...
    def start_broadcast(
        self,
        tensors: Sequence[EngineTensor],
        arrays: Sequence[np.ndarray[Any, Any]],
        *,
        root: int,
        machine: int | None = None,
        priority: int = 0,
    ) -> None: ...
    def hold_with(self, holder: Callable[[Any], object] | None) -> None: ...
    @property
    def failure(self) -> tuple[int, int] | None: ...
    def fail(self, status: int) -> None: ...
    def fail_tensor(self, tensor_id: int, status: int) -> None: ...
    def leave(self) -> None: ...
    def wait_closed(self, *, timeout_s: float) -> bool: ...
    def statistics(self) -> dict[str, int]: ...

def check_pieces(
    name: str,
    nbytes: int,
    chunk_bytes: int,
    pieces: Sequence[tuple[int, int, int]],
    n_servers: int,
) -> None: ...
