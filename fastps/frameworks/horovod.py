# SPDX-License-Identifier: Apache-2.0
"""Functions of Horovod besides operations: init(), numbers across machines, the timeline.

Threads: any. Horovod's functions about its build are in built_features.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import fastps
from fastps.config import load
from fastps.errors import ConfigError, FastPSError
from fastps.session.current import current
from fastps.session.process_sets import ProcessSet, add_unused

log = logging.getLogger(__name__)

# Horovod raises it for all errors of operations except wrong arguments: a lost peer, ranks that
# disagree, a stall, the end of the job.
HorovodInternalError = FastPSError

_PART = "part of the program"  # the activity between start_timeline() and stop_timeline()


def init(
    comm: Iterable[int] | None = None,
    process_sets: Iterable[ProcessSet | Iterable[int]] | str | None = None,
    **settings: Any,
) -> None:
    """Join the job, as fastps.init() does, and add process sets.

    comm: None, [], or the ranks of all workers in order. ConfigError, before joining, for others
    and for a communicator of MPI. process_sets: the same on all workers; "dynamic" adds none, for
    sets always are. Sets that were added before are left alone. Raises the errors of fastps.init()
    and add_process_set(); blocks.
    """
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise ConfigError(
            f'process_sets must be a list of process sets or "dynamic", got {process_sets!r}'
        )
    ranks = _ranks_of(comm)
    fields = {name: value for name, value in settings.items() if name != "elastic"}
    known = load(fields).size if ranks else 0
    _check_all_ranks(ranks, known if known > 1 else len(ranks))  # before init() waits for others
    was_initialized = fastps.is_initialized()
    fastps.init(**settings)
    try:
        _check_all_ranks(ranks, fastps.size())
    except ConfigError:
        if not was_initialized:
            fastps.shutdown()
        raise
    if process_sets is not None and not isinstance(process_sets, str):
        add_unused(process_sets)


def _ranks_of(comm: Iterable[int] | None) -> list[int]:
    """Return the ranks of `comm`; ConfigError for a communicator of MPI."""
    found = [] if comm is None else list(comm) if isinstance(comm, Iterable) else [comm]
    if not all(isinstance(rank, int) for rank in found):
        raise ConfigError(
            f"comm must be a list of ranks, not {comm!r}, for fastps does not use MPI: leave comm "
            "out, and use hvd.ProcessSet(ranks) for some of the workers"
        )
    return found


def _check_all_ranks(ranks: list[int], size: int) -> None:
    """Raise ConfigError unless the ranks, if there are any, are those of all workers."""
    if ranks and ranks != list(range(size)):
        raise ConfigError(
            f"comm must be all workers of the job, {list(range(size))}, not {ranks}: leave comm "
            "out, and for some of the workers use process_sets=[hvd.ProcessSet(ranks)]"
        )


def cross_size() -> int:
    """Return the number of machines that have a worker of this one's local rank."""
    return len(_across())


def cross_rank() -> int:
    """Return the place of this worker among the workers of its local rank on all machines."""
    return _across().index(current().rank)


def _across() -> list[int]:
    """List the workers that have this worker's local rank on their hosts."""
    session, hosts = current(), dict[str, list[int]]()
    if session.size == 1:
        return [session.rank]
    for rank, worker in enumerate(session.connections.job.workers[: session.size]):
        hosts.setdefault(worker.hostname, []).append(rank)
    place = next(one.index(session.rank) for one in hosts.values() if session.rank in one)
    return [members[place] for members in hosts.values() if len(members) > place]


# ---- the timeline ----


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start a part of the program, named file_path, in the job's timeline, if there is one.

    Does not write a file: `fastps-run --timeline FILE` does, for the whole job. Logs a warning if
    the job has no timeline. mark_cycles is ignored, for there are no cycles. Does not block.
    """
    recorder = current().steps.recorder
    if recorder is None:
        log.warning(
            "start_timeline(%r) has no effect, for the job has no timeline: start it with "
            "fastps-run --timeline FILE, or with FASTPS_TRACE_ON=1", file_path,
        )  # fmt: skip
    else:
        recorder.end_activity(_PART)
        recorder.begin_activity(file_path, _PART)


def stop_timeline() -> None:
    """End the part that start_timeline() began, if any, in the timeline."""
    recorder = current().steps.recorder
    if recorder is not None:
        recorder.end_activity(_PART)
