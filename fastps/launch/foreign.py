# SPDX-License-Identifier: Apache-2.0
"""Words of other launchers' command lines: those that mean the same here, and advice for others.

From torchrun, horovodrun, mpirun, deepspeed and bfrun. Pure. A word is taken over only where it
can mean but one thing; for every other one there is a sentence that says what to do instead.
"""

from __future__ import annotations

import argparse

PER_MACHINE = ("--nproc-per-node", "--nproc_per_node")
MACHINES_TOO = ("--nnodes",)
RANK_TOO = ("--node-rank", "--node_rank")
HOSTFILE = ("--hostfile", "-hostfile", "--machinefile", "-machinefile")
_SWITCHES = ("--use-infiniband", "--enable-heartbeat", "--standalone", "--oversubscribe", "--gloo",
             "--mpi", "--allow-run-as-root")  # fmt: skip
ADVICE = {
    "--use-infiniband": "RDMA is used where there is a device; FASTPS_TRANSPORT=rdma insists",
    "--extra-mpi-flags": "there is no MPI",
    "--mpi-args": "there is no MPI",
    "--mca": "there is no MPI; docs/env.md has the settings",
    "--prefix": "give the path of the program, or --env PATH=...",
    "--timeline-filename": "fastps-run --timeline writes one; see docs/timeline.md",
    "--ipython-profile": "use %load_ext fastps.notebook in a notebook",
    "--enable-heartbeat": "leases are always on: FASTPS_HEARTBEAT_S, FASTPS_LEASE_S",
    "--network-interface": "say --env FASTPS_INTERFACE=NAME",
    "--network-interfaces": "say --env FASTPS_INTERFACE=NAME",
    "--standalone": "one machine needs nothing: fastps-run -np 4 python train.py",
    "--rdzv-backend": "the scheduler is the meeting; on several machines -H a:4,b:4, or "
    "--scheduler-host and --scheduler-port",
    "--rdzv-endpoint": "name machine 0 by --scheduler-host and --scheduler-port",
    "--rdzv-id": "a job's name is --job-id",
    "--max-restarts": "the whole job is started again by --restarts N",
    "--gloo": "fastps moves the data itself",
    "--mpi": "there is no MPI",
    "--oversubscribe": "any number of workers may be started",
    "--allow-run-as-root": "root may",
    "--min-np": "a job has a fixed number of workers; --restarts N starts it again",
    "--max-np": "a job has a fixed number of workers; --restarts N starts it again",
    "--host-discovery-script": "a job has fixed hosts: -H a:4,b:4, or --hostfile",
    "--output-filename": "say --output-dir DIR",
    "--log-dir": "say --output-dir DIR",
}


def field_of(flag: str) -> str:
    """Give the name that argparse keeps a long word under."""
    return flag.lstrip("-").replace("-", "_")


def add_advice(group: argparse._ArgumentGroup) -> None:
    """Let the parser know the words that there is advice for, and not show them."""
    for flag in ADVICE:
        names = dict.fromkeys((flag, "--" + field_of(flag)))
        if flag in _SWITCHES:
            group.add_argument(*names, action="store_const", const=True, help=argparse.SUPPRESS)
        else:
            group.add_argument(*names, help=argparse.SUPPRESS)
