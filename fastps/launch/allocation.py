# SPDX-License-Identifier: Apache-2.0
"""Find the nodes of a SLURM allocation in which fastps-run was started once, for all nodes.

Applies only where the user named no machines and SLURM has not started a fastps-run on each node:
within salloc and sbatch, not within a step of srun.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
from collections.abc import Mapping

from fastps.errors import ConfigError
from fastps.launch.hosts import Host
from fastps.launch.layout import make_layout
from fastps.launch.options import Options

_FIRST_OWN_STEP = 0xFFFFFFF0  # SLURM's own steps, of salloc's shell and sbatch's script, are above
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_SCONTROL_S = 30.0  # for scontrol to answer


def spread(options: Options, environment: Mapping[str, str]) -> Options:
    """Put the job on all nodes of an allocation of several nodes. Raises ConfigError.

    Each node gets -np workers, else as many as the allocation has tasks there.
    """
    if options.is_placed or not _is_of_several(environment):
        return options
    names = names_of(environment["SLURM_JOB_NODELIST"])
    here = options.layout
    workers = here.workers if options.is_counted else _tasks(environment, len(names))
    layout = make_layout(workers, here.servers, here.validators, machines=len(names), machine=0)
    layout = dataclasses.replace(layout, names=tuple(names))
    hosts = tuple(Host(name) for name in names)
    return dataclasses.replace(options, layout=layout, hosts=hosts, has_srun=True)


def _is_of_several(environment: Mapping[str, str]) -> bool:
    step = environment.get("SLURM_STEP_ID", "").strip()
    if step.isdecimal() and int(step) < _FIRST_OWN_STEP:
        return False
    count = environment.get("SLURM_JOB_NUM_NODES", "").strip()
    return count.isdecimal() and int(count) > 1 and bool(environment.get("SLURM_JOB_NODELIST"))


def names_of(nodes: str) -> list[str]:
    """Return the host names that SLURM means by n[0-3]."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes],
            capture_output=True, text=True, timeout=_SCONTROL_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"cannot list the nodes of the SLURM allocation {nodes}: scontrol failed ({error}); "
            "name the hosts with -H, or use --machines 1 to run on this machine alone"
        ) from error
    return done.stdout.split()


def _tasks(environment: Mapping[str, str], nodes: int) -> tuple[int, ...]:
    """Read 4(x2),1 where the user asked for tasks; else one for each node."""
    is_asked = environment.get("SLURM_NTASKS") or environment.get("SLURM_NTASKS_PER_NODE")
    found: list[int] = []
    for number, times in _TASKS.findall(environment.get("SLURM_TASKS_PER_NODE", "")):
        found += [int(number)] * int(times or 1)
    return tuple(found) if is_asked and len(found) == nodes else (1,)
