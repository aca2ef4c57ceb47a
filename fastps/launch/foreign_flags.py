# SPDX-License-Identifier: Apache-2.0
"""Flags of other launchers: synonyms of ours, flags to ignore, and advice for the rest.

From torchrun, horovodrun, mpirun, deepspeed and bfrun. Pure. A flag is a synonym only where its
meaning is unambiguous. Flags without effect here are ignored with a message; every other flag is
an error whose text says what to do instead.
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
    "--mpi-args": "fastps does not use MPI",
    "--mca": "fastps does not use MPI; docs/env.md has the settings",
    "--ipython-profile": "use %load_ext fastps.notebook in a notebook",
    "--enable-heartbeat": "leases are always on: FASTPS_HEARTBEAT_S, FASTPS_LEASE_S",
    "--standalone": "one machine needs no flag: fastps-run -np 4 python train.py",
    "--rdzv-backend": "the scheduler is the rendezvous; on several machines use -H a:4,b:4, or "
    "--scheduler-host and --scheduler-port",
    "--rdzv-endpoint": "name machine 0 with --scheduler-host and --scheduler-port",
    "--rdzv-id": "name the job with --job-id",
    "--max-restarts": "--restarts N starts the whole job again",
    "--gloo": "fastps moves the data itself",
    "--mpi": "fastps does not use MPI",
    "--oversubscribe": "any number of workers may be started",
    "--allow-run-as-root": "root may run jobs",
    "--output-filename": "use --output-dir DIR",
    "--log-dir": "use --output-dir DIR",
}

# Flags of bfrun and horovodrun that have no effect here.
IGNORED = {
    "--use-infiniband": "RDMA is used where there is a device (FASTPS_TRANSPORT=rdma requires it)",
    "--extra-mpi-flags": "fastps does not use MPI",
    "--prefix": "fastps does not use MPI, so its path does not matter",
}
INTERFACES = ("--network-interface", "--network-interfaces", "--nics")


def field_of(flag: str) -> str:
    """Return the name under which argparse stores a long flag."""
    return flag.lstrip("-").replace("-", "_")


def add_advice(group: argparse._ArgumentGroup) -> None:
    """Add the flags that have advice or are ignored to the parser; --help does not list them."""
    for flag in ADVICE:
        names = dict.fromkeys((flag, "--" + field_of(flag)))
        if flag in _SWITCHES:
            group.add_argument(*names, action="store_const", const=True, help=argparse.SUPPRESS)
        else:
            group.add_argument(*names, help=argparse.SUPPRESS)
    for flag in IGNORED:
        action = "store_true" if flag == "--use-infiniband" else "store"
        group.add_argument(flag, dest=field_of(flag), action=action, default=None,
                           help=argparse.SUPPRESS)  # fmt: skip


def remove_ignored(found: dict[str, object]) -> list[str]:
    """Remove the flags without effect; return a message for each that was given."""
    return [
        f"{flag} is ignored: {why}"
        for flag, why in IGNORED.items()
        if found.pop(field_of(flag)) is not None
    ]


def timeline_of(text: str) -> str:
    """Return the timeline's file name; bfrun and horovodrun give it without its suffix."""
    return text if text.endswith(".json") else f"{text}.json"
