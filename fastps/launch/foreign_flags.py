# SPDX-License-Identifier: Apache-2.0
"""Words of other launchers' command lines: those that mean the same here, and advice for others.

From torchrun, horovodrun, mpirun, deepspeed and bfrun. Pure. A word is taken over only where it
can mean but one thing; some that asked for what nobody needs here are said to be left out, and for
every other one there is a sentence that says what to do instead.
"""

from __future__ import annotations

import argparse

PER_MACHINE = ("--nproc-per-node", "--nproc_per_node")
MACHINES_TOO = ("--nnodes",)
RANK_TOO = ("--node-rank", "--node_rank")
HOSTFILE = ("--hostfile", "-hostfile", "--machinefile", "-machinefile")
_SWITCHES = ("--enable-heartbeat", "--standalone", "--oversubscribe", "--gloo",
             "--mpi", "--allow-run-as-root")  # fmt: skip
ADVICE = {
    "--mpi-args": "there is no MPI",
    "--mca": "there is no MPI; docs/env.md has the settings",
    "--ipython-profile": "use %load_ext fastps.notebook in a notebook",
    "--enable-heartbeat": "leases are always on: FASTPS_HEARTBEAT_S, FASTPS_LEASE_S",
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
    "--min-np": "a job has a fixed number of workers; --restarts N starts it again, and "
    "hvd.elastic goes on",
    "--max-np": "a job has a fixed number of workers; --restarts N starts it again",
    "--host-discovery-script": "a job has fixed hosts: -H a:4,b:4, or --hostfile",
    "--output-filename": "say --output-dir DIR",
    "--log-dir": "say --output-dir DIR",
}

# Words of bfrun and horovodrun that a job starts without.
LEFT_OUT = {
    "--use-infiniband": "RDMA is used where there is a device (FASTPS_TRANSPORT=rdma insists)",
    "--extra-mpi-flags": "there is no MPI",
    "--prefix": "there is no MPI whose path could matter",
}
INTERFACES = ("--network-interface", "--network-interfaces", "--nics")


def field_of(flag: str) -> str:
    """Return the name that argparse keeps a long word under."""
    return flag.lstrip("-").replace("-", "_")


def add_advice(group: argparse._ArgumentGroup) -> None:
    """Let the parser know the words that there is advice for, and not show them."""
    for flag in ADVICE:
        names = dict.fromkeys((flag, "--" + field_of(flag)))
        if flag in _SWITCHES:
            group.add_argument(*names, action="store_const", const=True, help=argparse.SUPPRESS)
        else:
            group.add_argument(*names, help=argparse.SUPPRESS)
    for flag in LEFT_OUT:
        action = "store_true" if flag == "--use-infiniband" else "store"
        group.add_argument(flag, dest=field_of(flag), action=action, default=None,
                           help=argparse.SUPPRESS)  # fmt: skip


def left_out(found: dict[str, object]) -> list[str]:
    """Take the words out that a job starts without; give a sentence for each that was said."""
    return [
        f"{flag} is left out: {why}"
        for flag, why in LEFT_OUT.items()
        if found.pop(field_of(flag)) is not None
    ]


def timeline_of(text: str) -> str:
    """Name the file of a timeline of which bfrun's word, or horovodrun's, is the beginning."""
    return text if text.endswith(".json") else f"{text}.json"
