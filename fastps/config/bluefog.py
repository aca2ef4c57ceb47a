# SPDX-License-Identifier: Apache-2.0
"""BlueFog's variables: values for settings, and what to use instead of the others. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from fastps.errors import ConfigError

NODES_PER_MACHINE = "BLUEFOG_NODES_PER_MACHINE"
_NO_MPI = "there is no MPI or NCCL here, and nothing to choose"
INSTEAD = {
    **{f"BLUEFOG_{name}_BY_MPI": _NO_MPI for name in (
        "ALLREDUCE", "BROADCAST", "ALLGATHER", "NEIGHBOR_ALLREDUCE", "NEIGHBOR_ALLGATHER",
        "WIN_OPS")},
    **{f"BLUEFOG_{name}": _NO_MPI for name in (
        "MPI_THREAD_LEVEL", "OPS_ON_CPU", "WIN_ON_GPU", "NUM_FINALIZER_THREADS",
        "SLEEP_USEC_FOR_WIN_PASSIVE", "MAX_WIN_SENT_LENGTH")},
    "BLUEFOG_CYCLE_TIME": "operations begin at once, without cycles",
    "BLUEFOG_FUSION_THRESHOLD": "give several tensors to one call, which travel together",
    "BLUEFOG_LOG_HIDE_TIME": "set up `logging` as you like it",
}  # fmt: skip


def machine_of(environ: Mapping[str, str], values: Mapping[str, Any]) -> str | None:
    """Return the name of a worker's machine where each N consecutive workers count as one."""
    text, rank = environ.get(NODES_PER_MACHINE, "").strip(), values["rank"]
    if not text or rank is None or values["role"] != "worker":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"{NODES_PER_MACHINE}={text!r} is not a number of workers from 1; example: "
            f"{NODES_PER_MACHINE}=2"
        )
    return f"machine {rank // int(text)}"


def if_traced(value: object) -> Callable[[Mapping[str, str], Mapping[str, Any]], object | None]:
    """Return a rule that returns a value where BlueFog's timeline, of everything, is wanted."""
    return lambda environ, _: value if environ.get("BLUEFOG_TIMELINE", "").strip() else None
