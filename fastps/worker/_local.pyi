# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from typing import Self, final

from fastps.transport._link import Mapping
from fastps.transport.pipe._transport import PipeTransport
from fastps.transport.shm import Arena

def control_bytes(n: int) -> int: ...
def stage_area_bytes(stage_bytes: int) -> int: ...

@final
class LocalStages:
    pipes: PipeTransport
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
        has_room: bool = False,
    ) -> Self: ...
