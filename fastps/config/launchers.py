# SPDX-License-Identifier: Apache-2.0
"""Which other program started this process: torchrun, mpirun, srun, BytePS, or none.

Decides what identifies the processes of one run, and whether they are on one machine. Pure. Ranks
and sizes are settings as all others; their aliases are in the table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from fastps.config import Config

Environ = Mapping[str, str]
BY_HAND = "MASTER_ADDR"  # the name where nothing but torch's variables is set
_IPV4 = re.compile(r"tcp://(\d+\.\d+\.\d+\.\d+)")


class Launcher(NamedTuple):
    """The launcher of this process."""

    name: str
    run: str  # the same in all processes of this run, another in every other run
    is_one_machine: bool
    host: str = ""  # an address on the network that its machines share, if known
    folder: str = ""  # a directory that its machines share, if known
    has_pmix: bool = False


# By launcher: makes the board (control/rendezvous.py) that it carries between machines, or None.
# Filled by plugins, as torch's for torchrun; launchers without an entry may have PMIx.
CARRIERS: dict[str, Callable[[Launcher], Any]] = {}


def is_left_alone(config: Config) -> bool:
    """Return whether a worker has peers to meet and no setting names a scheduler."""
    is_worker = config.role == "worker" and config.size > 1
    return is_worker and not (config.scheduler_port or config.num_servers or config.num_validators)


def find(config: Config, environ: Environ) -> Launcher | None:
    """Return the launcher whose variables are set, the innermost of several, or None.

    config: the settings of the same variables.
    """
    for mark, make in _FOUND:
        if environ.get(mark, "").strip():
            return make(environ, config)
    return None


def _torchrun(environ: Environ, config: Config) -> Launcher:
    names = ("RUN_ID", "RESTART_COUNT")
    run = [environ.get(f"TORCHELASTIC_{name}", "") for name in names]
    run += [environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")]
    is_one = config.local_size == config.size
    return Launcher("torchrun", "/".join(run), is_one, host=environ.get("MASTER_ADDR", ""))


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
    """Return the launcher of BytePS, which starts a machine's workers from one process."""
    run = f"{environ.get('DMLC_PS_ROOT_PORT', '')}/{os.getppid()}"
    return Launcher("BytePS", run, environ["DMLC_NUM_WORKER"].strip() == "1")


def _by_hand(environ: Environ, config: Config) -> Launcher:
    """Return the launcher of torch.distributed's env:// variables, set without torchrun."""
    host = environ.get("MASTER_ADDR", "")
    is_here = config.local_size == config.size or host in ("localhost", "127.0.0.1", "::1")
    return Launcher(BY_HAND, f"{host}/{environ.get('MASTER_PORT', '')}", is_here, host=host)


# The variable that reveals each, the innermost first: srun may start torchrun or mpirun.
_FOUND: tuple[tuple[str, Callable[[Environ, Config], Launcher]], ...] = (
    ("TORCHELASTIC_RUN_ID", _torchrun),
    ("OMPI_COMM_WORLD_SIZE", _mpirun),
    ("SLURM_STEP_ID", _srun),
    ("DMLC_NUM_WORKER", _byteps),
    ("MASTER_PORT", _by_hand),
)
