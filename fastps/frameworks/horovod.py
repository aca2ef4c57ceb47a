# SPDX-License-Identifier: Apache-2.0
"""What scripts for Horovod call besides operations: how they start, where they are, traces.

Threads: any. What Horovod tells of its own building is in built_features.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import fastps
from fastps.config import load
from fastps.errors import ConfigError, FastPSError
from fastps.session.current import current
from fastps.session.process_sets import ProcessSet, add_unused

log = logging.getLogger(__name__)

# Horovod raises it for whatever an operation can end with but wrong arguments: a lost peer, ranks
# that disagree, a stall, the end of the job.
HorovodInternalError = FastPSError

_PART = "part of the program"  # the activity between start_timeline() and stop_timeline()


def init(
    comm: Iterable[int] | None = None,
    process_sets: Iterable[ProcessSet | Iterable[int]] | str | None = None,
    **settings: object,
) -> None:
    """Join the job, as fastps.init() does, and bring process sets into use.

    comm: None, [], or the ranks of all workers in order; ConfigError for others and for a
    communicator of MPI, which leaves nothing joined.
    process_sets: all workers give the same; "dynamic", which sets are always, adds none. Sets in
    use already are left alone. Raises what fastps.init() and add_process_set() do; blocks.
    """
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise ConfigError(f'process_sets is a list of process sets or "dynamic": {process_sets!r}')
    ranks = _ranks_of(comm)
    known = load(settings).size if ranks else 0
    _check_everybody(ranks, known if known > 1 else len(ranks))  # before others are waited for
    was_initialized = fastps.is_initialized()
    fastps.init(**settings)
    try:
        _check_everybody(ranks, fastps.size())
    except ConfigError:
        if not was_initialized:
            fastps.shutdown()
        raise
    if process_sets is not None and not isinstance(process_sets, str):
        add_unused(process_sets)


def _ranks_of(comm: Iterable[int] | None) -> list[int]:
    """Read the ranks of `comm`; ConfigError for a communicator of MPI."""
    found = [] if comm is None else list(comm) if isinstance(comm, Iterable) else [comm]
    if not all(isinstance(rank, int) for rank in found):
        raise ConfigError(
            f"comm={comm!r}: nothing here uses MPI; leave comm out, and give the workers of a "
            "part of the job as hvd.ProcessSet(ranks)"
        )
    return found


def _check_everybody(ranks: list[int], size: int) -> None:
    """Raise ConfigError where some workers are to be a job by themselves."""
    if ranks and ranks != list(range(size)):
        raise ConfigError(
            f"comm={ranks}: the workers of the job are {list(range(size))}, all of which take "
            "part; leave comm out, start as many workers as are wanted, and for some of them use "
            "process_sets=[hvd.ProcessSet(ranks)]"
        )


def cross_size() -> int:
    """Return the number of machines that have a worker of this one's local rank."""
    return len(_across())


def cross_rank() -> int:
    """Return the place of this worker among those of its local rank, one on each machine."""
    return _across().index(current().rank)


def _across() -> list[int]:
    """List the workers that have this one's place on their hosts, as local_rank() counts."""
    session, hosts = current(), dict[str, list[int]]()
    if session.size == 1:
        return [session.rank]
    for rank, worker in enumerate(session.connections.job.workers[: session.size]):
        hosts.setdefault(worker.hostname, []).append(rank)
    place = next(one.index(session.rank) for one in hosts.values() if session.rank in one)
    return [members[place] for members in hosts.values() if len(members) > place]


# ---- the timeline ----


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Show in the timeline, where one is made, that a part of the program of this name begins.

    Makes none: `fastps-run --timeline FILE` does, of the whole job, and a warning says so where
    there is none. mark_cycles: there are no cycles. Does not block.
    """
    recorder = current().steps.recorder
    if recorder is None:
        log.warning(
            "start_timeline(%r) writes nothing: start the job with fastps-run --timeline FILE, "
            "or with FASTPS_TRACE_ON=1", file_path,
        )  # fmt: skip
    else:
        recorder.end_activity(_PART)
        recorder.begin_activity(file_path, _PART)


def stop_timeline() -> None:
    """Show that the part ends which start_timeline() began; does nothing where there is none."""
    recorder = current().steps.recorder
    if recorder is not None:
        recorder.end_activity(_PART)
