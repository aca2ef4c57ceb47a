# SPDX-License-Identifier: Apache-2.0
"""Which program started this process, where it was none of ours, and what its word is worth.

Decides what only processes of one run share a name for, and whether they are on one machine.
Pure. Ranks and sizes are settings as all others; their aliases stand in the table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from fastps.config import Config

Environ = Mapping[str, str]
_IPV4 = re.compile(r"tcp://(\d+\.\d+\.\d+\.\d+)")


class Launcher(NamedTuple):
    """Who started this process."""

    name: str
    run: str  # what all processes of this run have, and those of no other run beside it
    is_one_machine: bool
    host: str = ""  # an address on the network that its machines have in common, if it is told
    folder: str = ""  # a directory that its machines have in common, if it is told
    has_pmix: bool = False


# By launcher: what makes the board (control/rendezvous.py) that it carries between machines, or
# None. Filled by who can, as torch's plugin for torchrun; what is not here may have PMIx.
CARRIERS: dict[str, Callable[[Launcher], Any]] = {}


def is_left_alone(config: Config) -> bool:
    """Return whether a worker is to meet others and nobody has named a scheduler."""
    is_worker = config.role == "worker" and config.size > 1
    return is_worker and not (config.scheduler_port or config.num_servers or config.num_validators)


def find(config: Config, environ: Environ) -> Launcher | None:
    """Name the launcher whose variables are there, the innermost of several; None: there is none.

    config: what the same variables gave.
    """
    for mark, make in _FOUND:
        if environ.get(mark, "").strip():
            return make(environ, config)
    return None


def _torchrun(environ: Environ, config: Config) -> Launcher:
    names = ("RUN_ID", "RESTART_COUNT")
    told = [environ.get(f"TORCHELASTIC_{name}", "") for name in names]
    told += [environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")]
    is_one = config.local_size == config.size
    return Launcher("torchrun", "/".join(told), is_one, host=environ.get("MASTER_ADDR", ""))


def _mpirun(environ: Environ, config: Config) -> Launcher:
    run = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    server = _IPV4.search(environ.get("OMPI_MCA_orte_hnp_uri", ""))
    return Launcher(
        "mpirun", run, config.local_size == config.size,
        host="" if server is None else server[1], has_pmix="PMIX_RANK" in environ,
    )  # fmt: skip


def _srun(environ: Environ, config: Config) -> Launcher:
    return Launcher(
        "srun",
        f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}",
        environ.get("SLURM_STEP_NUM_NODES", "") == "1",
        host=environ.get("SLURM_LAUNCH_NODE_IPADDR", ""),
        folder=environ.get("SLURM_SUBMIT_DIR", ""),
        has_pmix="PMIX_RANK" in environ,
    )


def _byteps(environ: Environ, config: Config) -> Launcher:
    """BytePS starts the workers of a machine as children of one process."""
    run = f"{environ.get('DMLC_PS_ROOT_PORT', '')}/{os.getppid()}"
    return Launcher("BytePS", run, environ["DMLC_NUM_WORKER"].strip() == "1")


def _by_hand(environ: Environ, config: Config) -> Launcher:
    """What torch.distributed's env:// wants is set without torchrun."""
    host = environ.get("MASTER_ADDR", "")
    is_here = config.local_size == config.size or host in ("localhost", "127.0.0.1", "::1")
    return Launcher("MASTER_ADDR", f"{host}/{environ.get('MASTER_PORT', '')}", is_here, host=host)


# What tells of each, the innermost first: torchrun may be started by srun, and so may mpirun.
_FOUND: tuple[tuple[str, Callable[[Environ, Config], Launcher]], ...] = (
    ("TORCHELASTIC_RUN_ID", _torchrun),
    ("OMPI_COMM_WORLD_SIZE", _mpirun),
    ("SLURM_STEP_ID", _srun),
    ("DMLC_NUM_WORKER", _byteps),
    ("MASTER_PORT", _by_hand),
)
