# SPDX-License-Identifier: Apache-2.0
"""The variables from which tools around PyTorch read a worker's rank, as torchrun sets them.

Hugging Face's Trainer, Accelerate and Lightning train alone in a process without LOCAL_RANK,
whatever group it is in. No TORCHELASTIC_ variable is set: these promise a store that torchrun
serves. fastps reads its own variables first, so these do not affect it.
"""

from __future__ import annotations

import socket

from fastps.launch.layout import Layout

# A process must not inherit these from an outer launcher, nor names with OUTER_PREFIX.
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
         "MASTER_ADDR", "MASTER_PORT")  # fmt: skip
OUTER_PREFIX = "TORCHELASTIC_"
_LAST_PORT = 65535


def place_variables(
    rank: int, size: int, *, local_rank: int, local_size: int, group: int, groups: int
) -> dict[str, str]:
    """Return the variables of a worker's rank; group: its machine among those with workers."""
    counts = (rank, local_rank, size, local_size, group, groups)
    return dict(zip(NAMES, map(str, counts), strict=False))


def worker_variables(
    layout: Layout, rank: int, local_rank: int, master: tuple[str, int] | None
) -> dict[str, str]:
    """Return all variables of a worker of this machine; master: MASTER_ADDR and MASTER_PORT."""
    found = place_variables(
        rank, layout.size, local_rank=local_rank, local_size=len(layout.worker_ranks),
        group=sum(map(bool, layout.workers[: layout.machine])),
        groups=sum(map(bool, layout.workers)),
    )  # fmt: skip
    if master is not None:
        found |= {"MASTER_ADDR": master[0], "MASTER_PORT": str(master[1])}
    return found


def port_beside(scheduler_port: int) -> int:
    """Return the MASTER_PORT that launchers choose alike without communication."""
    return scheduler_port + 1 if scheduler_port < _LAST_PORT else scheduler_port - 1


class KeptPort:
    """A reserved TCP port of this machine: only a bind to this very number gets it.

    It is bound, but not listened on. With SO_REUSEADDR on both sides, as torch's store and
    Python's servers set it, rank 0 can bind it too; the kernel never picks it as a free port.
    """

    def __init__(self, port: int = 0) -> None:
        """Bind a port, any free one for 0. Raises OSError when another process has it."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(("", port))
        except OSError:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Release the port. Idempotent."""
        self._socket.close()
