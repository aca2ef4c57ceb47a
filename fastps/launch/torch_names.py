# SPDX-License-Identifier: Apache-2.0
"""The variables by which tools around PyTorch know a worker's place, as torchrun sets them.

Hugging Face's Trainer, Accelerate and Lightning take a process without LOCAL_RANK for one that
trains alone, whatever group it is in. None of the TORCHELASTIC_ names is set: they promise a store
that torchrun itself serves. fastps reads its own names first, so these change nothing for it.
"""

from __future__ import annotations

import socket

from fastps.launch.layout import Layout

# What a process must not inherit from an outer launcher; OUTER_PREFIX likewise.
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
         "MASTER_ADDR", "MASTER_PORT")  # fmt: skip
OUTER_PREFIX = "TORCHELASTIC_"
_LAST_PORT = 65535


def place_variables(
    rank: int, size: int, *, local_rank: int, local_size: int, group: int, groups: int
) -> dict[str, str]:
    """Return the variables of a worker's place; group: its machine among those with workers."""
    counts = (rank, local_rank, size, local_size, group, groups)
    return dict(zip(NAMES, map(str, counts), strict=False))


def worker_variables(layout: Layout, rank: int, master: tuple[str, int] | None) -> dict[str, str]:
    """Return what one worker of this machine is told; master: where rank 0 may bind a port."""
    ranks = layout.worker_ranks
    found = place_variables(
        rank, layout.size, local_rank=rank - ranks.start, local_size=len(ranks),
        group=sum(map(bool, layout.workers[: layout.machine])),
        groups=sum(map(bool, layout.workers)),
    )  # fmt: skip
    if master is not None:
        found |= {"MASTER_ADDR": master[0], "MASTER_PORT": str(master[1])}
    return found


def port_beside(scheduler_port: int) -> int:
    """Return the MASTER_PORT that launchers which cannot ask each other agree on."""
    return scheduler_port + 1 if scheduler_port < _LAST_PORT else scheduler_port - 1


class KeptPort:
    """A TCP port of this machine that only a process which asks for it by number gets.

    It is bound and not listened on. With SO_REUSEADDR on both sides, as torch's store and Python's
    servers have it, rank 0 binds it too, while the kernel gives it to nobody who takes any port.
    """

    def __init__(self, port: int = 0) -> None:
        """Bind a port, any free one for 0; OSError when another process has it."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(("", port))
        except OSError:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Keep it no longer. Idempotent."""
        self._socket.close()
