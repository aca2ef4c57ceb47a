# SPDX-License-Identifier: Apache-2.0
"""fastps moves gradients between the processes that train one neural network.

Workers push tensors, CPU servers add them, workers pull the sums. This face is for NumPy
arrays; `import fastps.torch` has the same names for PyTorch. Importing starts nothing: init()
joins the job that the environment (fastps-run) describes, or works alone when there is none.
"""

from __future__ import annotations

import contextlib
import importlib
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import numpy as np

from fastps.config import package as _package  # noqa: F401  (ImportError if nothing is compiled)
from fastps.contract.compression import Choice, Compression
from fastps.contract.contract import Compensation
from fastps.contract.rule import Choice as RuleChoice
from fastps.errors import (
    ArgumentError,
    AuthError,
    CheckpointError,
    ConfigError,
    DuplicateNameError,
    FastPSError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    ProtocolError,
    ShutdownError,
    StallError,
    TransportError,
    TransportTimeout,
    ViewChangedError,
)
from fastps.ops.numpy_collectives import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_async,
    alltoall,
    alltoall_async,
    barrier_async,
    broadcast,
    broadcast_async,
    gather,
    gather_async,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    receive,
    receive_async,
    reduce_to,
    reduce_to_async,
    reducescatter,
    reducescatter_async,
    scatter,
    scatter_async,
    send,
    send_async,
)
from fastps.ops.start import (
    BAND,
    BOR,
    BXOR,
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather_object,
)
from fastps.session import current as _current
from fastps.session.process_sets import (
    ProcessSet,
    add_process_set,
    checked_set,
    global_process_set,
    remove_process_set,
)
from fastps.session.view import (
    Elastic,
    View,
)
from fastps.types import dtype_of
from fastps.worker.handle import Array, Handle

if TYPE_CHECKING:
    from fastps import checkpoint
    from fastps.algorithms import outer
    from fastps.algorithms.async_local_sgd import AsyncLocalSGD, Constant, Hinge, Polynomial
    from fastps.algorithms.held_parameters import (
        HeldParameters,
        pull,
        pull_async,
        push,
        push_async,
        role,
        validator_rank,
        validator_size,
    )
    from fastps.algorithms.local_sgd import LocalSGD
    from fastps.algorithms.server_parameters import ServerParameters
    from fastps.algorithms.validated_steps import ValidatedSteps
    from fastps.algorithms.validator import Judged, Validator
    from fastps.graph.rules import (
        AdaptiveClipping,
        CoordinateMedian,
        SelfCentredClipping,
        TrimmedMean,
    )
    from fastps.ops.neighbors import (
        hierarchical_neighbor_allreduce,
        hierarchical_neighbor_allreduce_async,
        in_neighbor_machine_ranks,
        in_neighbor_ranks,
        infer_destination_from_source_ranks,
        infer_source_from_destination_ranks,
        is_topo_weighted,
        load_machine_topology,
        load_topology,
        lost_ranks,
        machine_rank,
        machine_size,
        neighbor_allgather,
        neighbor_allgather_async,
        neighbor_allreduce,
        neighbor_allreduce_async,
        out_neighbor_machine_ranks,
        out_neighbor_ranks,
        pair_gossip,
        pair_gossip_async,
        set_machine_topology,
        set_topology,
    )
    from fastps.ops.windows import (
        get_current_created_window_names,
        get_win_version,
        turn_off_win_ops_with_associated_p,
        turn_on_win_ops_with_associated_p,
        win_accumulate,
        win_accumulate_async,
        win_associated_p,
        win_create,
        win_flush,
        win_free,
        win_get,
        win_get_async,
        win_mutex,
        win_poll,
        win_put,
        win_put_async,
        win_update,
        win_update_then_collect,
        win_wait,
    )

    __version__: str

__all__ = [
    "BAND",
    "BOR",
    "BXOR",
    "AdaptiveClipping",
    "Adasum",
    "ArgumentError",
    "AsyncLocalSGD",
    "AuthError",
    "Average",
    "CheckpointError",
    "Compensation",
    "Compression",
    "ConfigError",
    "Constant",
    "CoordinateMedian",
    "DuplicateNameError",
    "Elastic",
    "FastPSError",
    "Handle",
    "HeldParameters",
    "Hinge",
    "Judged",
    "LocalSGD",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "Polynomial",
    "ProcessSet",
    "Product",
    "ProtocolError",
    "SelfCentredClipping",
    "ServerParameters",
    "ShutdownError",
    "StallError",
    "Sum",
    "TransportError",
    "TransportTimeout",
    "TrimmedMean",
    "ValidatedSteps",
    "Validator",
    "View",
    "ViewChangedError",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "barrier_async",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "checkpoint",
    "declare",
    "empty",
    "forget",
    "gather",
    "gather_async",
    "get_current_created_window_names",
    "get_pushpull_speed",
    "get_win_version",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "hierarchical_neighbor_allreduce",
    "hierarchical_neighbor_allreduce_async",
    "in_neighbor_machine_ranks",
    "in_neighbor_ranks",
    "infer_destination_from_source_ranks",
    "infer_source_from_destination_ranks",
    "init",
    "is_initialized",
    "is_topo_weighted",
    "join",
    "leave",
    "load_machine_topology",
    "load_topology",
    "local_rank",
    "local_size",
    "lost_ranks",
    "machine_rank",
    "machine_size",
    "mark_step",
    "neighbor_allgather",
    "neighbor_allgather_async",
    "neighbor_allreduce",
    "neighbor_allreduce_async",
    "out_neighbor_machine_ranks",
    "out_neighbor_ranks",
    "outer",
    "pair_gossip",
    "pair_gossip_async",
    "poll",
    "pull",
    "pull_async",
    "push",
    "push_async",
    "push_pull",
    "push_pull_async",
    "rank",
    "receive",
    "receive_async",
    "reduce_to",
    "reduce_to_async",
    "reducescatter",
    "reducescatter_async",
    "register",
    "remove_process_set",
    "role",
    "run",
    "scatter",
    "scatter_async",
    "send",
    "send_async",
    "set_machine_topology",
    "set_topology",
    "shutdown",
    "size",
    "span",
    "statistics",
    "synchronize",
    "turn_off_win_ops_with_associated_p",
    "turn_on_win_ops_with_associated_p",
    "validator_rank",
    "validator_size",
    "win_accumulate",
    "win_accumulate_async",
    "win_associated_p",
    "win_create",
    "win_flush",
    "win_free",
    "win_get",
    "win_get_async",
    "win_mutex",
    "win_poll",
    "win_put",
    "win_put_async",
    "win_update",
    "win_update_then_collect",
    "win_wait",
]

A = TypeVar("A", bound=Array)
T = TypeVar("T")

# Modules that many programs never use are imported with the first of their names, which halves
# the time of `import fastps`.
_LATER = (
    "fastps.ops.windows",
    "fastps.graph.rules",
    "fastps.ops.neighbors",
    "fastps.algorithms.server_parameters",
    "fastps.algorithms.held_parameters",
    "fastps.algorithms.validator",
    "fastps.algorithms.validated_steps",
    "fastps.algorithms.local_sgd",
    "fastps.algorithms.async_local_sgd",
)
_MODULES = {"checkpoint": "fastps.checkpoint", "outer": "fastps.algorithms.outer"}

if not TYPE_CHECKING:  # type checkers know the names from above, and find misspelt ones

    def __getattr__(name: str) -> Any:
        """Return a public name of the modules that are imported later, or the version."""
        if name == "__version__":
            return importlib.import_module("fastps.config.versions").version_of("fastps")
        if name in _MODULES:
            return importlib.import_module(_MODULES[name])
        if name in __all__:
            for module in map(importlib.import_module, _LATER):
                if name in vars(module):
                    return vars(module)[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)


def __dir__() -> list[str]:
    """List the loaded names, and those that are imported later."""
    return sorted({*globals(), *__all__})


def init(*, elastic: Elastic | None = None, **settings: object) -> None:
    """Join the job and wait until all its workers and servers are connected.

    elastic: how training goes on when members are lost; see Elastic. settings: fields of
    docs/env.md in lower case without the prefix, like partition_bytes; they win over the
    environment. A job of one worker without servers needs no other process. Blocks up to
    start_timeout_s. A second call does nothing. Raises ConfigError, AuthError,
    TransportTimeout (no scheduler), StallError (a process is missing), PeerLostError.
    """
    if elastic is not None:
        settings["elastic_min"] = elastic.min
        if elastic.max:
            settings["elastic_max"] = elastic.max
    on_view = None if elastic is None else elastic.on_view
    _current.init(settings, () if on_view is None else (on_view,))


def shutdown() -> None:
    """Leave the job in order; init() may be called again. Also runs when the process exits."""
    _current.shutdown()


def leave() -> None:
    """Let this worker of an elastic job leave at its next commit() within elastic.run.

    commit() raises SystemExit(0) then, and the others go on in a new view. Returns at once.
    """
    from fastps.session.regroup import leave_at_boundary  # noqa: PLC0415  (few programs need it)

    leave_at_boundary(_current.current())


def is_initialized() -> bool:
    """Return whether this process is part of a job."""
    return _current.is_initialized()


def run(
    function: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int = 4,
    timeout_s: float | None = None,
    **settings: Any,
) -> list[T]:
    """Run a function as a job of np new workers on this machine; return its results by rank.

    The workers have called init() when it begins. It and its arguments are pickled; those of a
    script or a notebook by value, with cloudpickle (`fastps[notebook]`). settings: of init(), for
    all. Output appears with the rank. Blocks, without limit if timeout_s is None; Ctrl-C ends all.
    Raises the first exception of a worker, with its traceback as a note (a RuntimeError with its
    text where it cannot be unpickled, or was sys.exit()), StallError after timeout_s, and
    PeerLostError when a worker ends. fastps.notebook.Team keeps workers between calls.
    """
    from fastps.launch.team import run as run_team  # noqa: PLC0415  (processes are the launcher's)

    return run_team(function, args, kwargs, np=np, timeout_s=timeout_s, **settings)


def rank() -> int:
    """Return the rank of this worker, 0 to size() - 1; also in processes forked from it.

    Validators come after the workers: size() + validator_rank().
    """
    session = _current.known()
    return session.rank if session.expected is None else session.expected[0]


def size() -> int:
    """Return the number of workers."""
    session = _current.known()
    return session.size if session.expected is None else session.expected[1]


def local_rank() -> int:
    """Return the number of this worker among those on its machine."""
    return _current.known().local_rank


def local_size() -> int:
    """Return the number of workers on this machine."""
    return _current.known().local_size


def declare(
    name: str,
    tensor: Array | tuple[tuple[int, ...], Any],
    *,
    compression: Choice = None,
    rule: RuleChoice = None,
) -> None:
    """Declare a tensor, by an array like it or (shape, dtype), before its first use.

    Saves the first push_pull a round trip; never necessary. compression, rule: as for push_pull(),
    which then needs no more of them. Blocks until the servers are ready. Raises MismatchError when
    another worker declared it differently.
    """
    if isinstance(tensor, np.ndarray):
        shape, dtype = tensor.shape, tensor.dtype
    else:
        shape, dtype = tensor[0], np.dtype(tensor[1])
    _current.current().declare(
        [(name, shape, dtype_of(dtype))], compression=compression, rule=rule
    )


def forget(name: str | Sequence[str]) -> None:
    """Forget tensors that declare() or their first use has declared, and free their memory.

    Also the names of operations among workers, those of grouped ones and of process sets too. All
    workers must call it with the same names in the same order, best many at once. A name may then
    be used again, for another shape or dtype. Blocks until every server has dropped them. Raises
    ConfigError for an unknown name, FastPSError for one in flight, MismatchError for one that
    workers declared differently, and StallError, which names the workers that did not call. After
    an error all names go on working, except for those that a server fails to drop.
    """
    _current.current().forget(name)


def empty(shape: int | Sequence[int], dtype: Any = np.float32) -> Array:
    """Return an uninitialised array that the workers of this machine can all reach.

    push_pull of it, in place or into another such array, copies nothing: the workers add right
    where the arrays are. C-contiguous views count as well. It is plain memory where no other
    worker shares this machine. The array lives on after shutdown(). Forked children share it.
    Raises ValueError for a negative extent, MemoryError with the limit and what to do. Does not
    block.
    """
    given = (shape,) if isinstance(shape, int | np.integer) else shape
    extents = tuple(operator.index(one) for one in given)
    if min(extents, default=0) < 0:
        raise ValueError(f"the shape {extents} has a negative extent; give 0 or more for each")
    return _current.current().empty(extents, np.dtype(dtype))


def register(array: A) -> A:
    """Return an array with the same contents that the workers of this machine can all reach.

    The array itself if it is such an array already, or if no other worker shares this machine;
    else a copy: use it instead of the old one. Raises MemoryError as empty() does.
    """
    current = _current.current()
    if current.is_shared(array) or not current.can_share:
        return array
    copy = current.empty(array.shape, array.dtype)
    copy[...] = array
    return cast("A", copy)


@overload
def push_pull(
    tensor: A,
    name: str,
    *,
    average: bool = True,
    priority: int = 0,
    out: A | None = None,
    compression: Choice = None,
    learning_rate: float | None = None,
    rule: RuleChoice = None,
) -> A: ...


@overload
def push_pull(
    tensor: Sequence[A],
    name: Sequence[str],
    *,
    average: bool = True,
    priority: int | Sequence[int] = 0,
    out: Sequence[A] | None = None,
    compression: Choice = None,
    learning_rate: float | None = None,
    rule: RuleChoice = None,
) -> list[A]: ...


def push_pull(
    tensor: Array | Sequence[Array],
    name: str | Sequence[str],
    *,
    average: bool = True,
    priority: int | Sequence[int] = 0,
    out: Array | Sequence[Array] | None = None,
    compression: Choice = None,
    learning_rate: float | None = None,
    rule: RuleChoice = None,
) -> Any:
    """Average (or sum) a tensor over all workers and return the result.

    tensor: C-contiguous array, or a sequence of them that travels as one; read. name: the same
    on all workers, one per tensor. average: divide by size(), or by the number of workers that
    take part where some have called join(); integers, whose sums wrap around, are rounded down;
    False sums. priority: larger leaves first. out: array of the result, None for a new one, tensor
    itself for in place. Sums are made in rank order: the same bits on every worker and in every
    run. Half types are summed in float32 and rounded once; NaN and infinities pass through.
    compression: one of fastps.Compression, a function that returns one for a name, or BytePS's
    dictionary of parameters; a name keeps that of its first use. Tensors below min_compress_bytes,
    elements other than floats, and jobs without servers go without. learning_rate: of this step;
    error feedback is scaled by the ratio of the last one to it. rule: one of fastps.byzantine, or
    a name such as "median": how servers combine the workers' tensors instead of the average; a
    name keeps that of its first use. A rule needs servers, and refuses NaN and infinities. Blocks;
    raises PeerLostError, MismatchError, StallError. Bytes on the wire: nbytes each way.
    """
    return _current.current().push_pull(
        tensor, name, average=average, priority=priority, out=out, compression=compression,
        learning_rate=learning_rate, rule=rule,
    )  # fmt: skip


@overload
def push_pull_async(
    tensor: A,
    name: str,
    *,
    average: bool = True,
    priority: int = 0,
    out: A | None = None,
    compression: Choice = None,
    learning_rate: float | None = None,
    rule: RuleChoice = None,
) -> Handle[A]: ...


@overload
def push_pull_async(
    tensor: Sequence[A],
    name: Sequence[str],
    *,
    average: bool = True,
    priority: int | Sequence[int] = 0,
    out: Sequence[A] | None = None,
    compression: Choice = None,
    learning_rate: float | None = None,
    rule: RuleChoice = None,
) -> Handle[list[A]]: ...


def push_pull_async(
    tensor: Array | Sequence[Array],
    name: str | Sequence[str],
    *,
    average: bool = True,
    priority: int | Sequence[int] = 0,
    out: Array | Sequence[Array] | None = None,
    compression: Choice = None,
    learning_rate: float | None = None,
    rule: RuleChoice = None,
) -> Handle[Any]:
    """Start push_pull() and return a handle for synchronize(); does not block.

    The arrays must not be changed until synchronize() has returned.
    """
    return _current.current().push_pull_async(
        tensor, name, average=average, priority=priority, out=out, compression=compression,
        learning_rate=learning_rate, rule=rule,
    )  # fmt: skip


def poll(handle: Handle[Any]) -> bool:
    """Return whether synchronize() would return at once."""
    return handle.poll()


def synchronize(handle: Handle[T], timeout_s: float | None = None) -> T:
    """Wait for an operation and return its result; see Handle.wait()."""
    return handle.wait(timeout_s)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    *,
    name: str = "object",
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object on all workers, made of plain Python values and arrays; blocks.

    Nothing is pickled: TypeError on all workers names a type that cannot travel.
    """
    if process_set is not global_process_set:
        is_root = rank() == root_rank
        member = checked_set(process_set).member(root_rank, "root_rank")
        return allgather_object(obj if is_root else None, name, process_set=process_set)[member]
    return _current.current().broadcast_object(obj, root_rank, name)


def barrier(
    process_set: ProcessSet = global_process_set, *, timeout_s: float | None = None
) -> None:
    """Wait until every member has called it; a StallError names the missing worker.

    Blocks up to timeout_s seconds (default: op_timeout_s). A worker that calls it again after a
    StallError in shared memory waits for the same barrier.
    """
    if process_set is not global_process_set:
        checked_set(process_set).group().barrier().wait(timeout_s)
        return
    _current.current().groups.barrier(timeout_s)


def mark_step() -> None:
    """Mark the end of a training step, for statistics() and the timeline. Does not block.

    Optimizers and DistributedDataParallel of fastps.torch call it themselves.
    """
    _current.current().steps.mark()


@contextlib.contextmanager
def span(name: str, of: str = "") -> Iterator[None]:
    """Show the block as an activity in the timeline, where one is made.

    name: the activity. of: its tensor, or anything else. Any thread; spans may be nested. Costs
    next to nothing without a timeline.
    """
    recorder, began = _current.current().steps.recorder, time.monotonic_ns()
    try:
        yield
    finally:
        if recorder is not None:
            recorder.mark_activity(name, began, of=of)


def get_pushpull_speed() -> tuple[int, float]:
    """Take the oldest measurement: milliseconds since 1970, and MB/s (1e6) of tensors pushed.

    Every 10 seconds with pushes there is a new one, and 1024 are kept; (0, -5.0) when there is
    none, as in BytePS. FASTPS_TELEMETRY_ON=0 measures nothing.
    """
    return _current.current().steps.speed() or (0, -5.0)


def statistics() -> dict[str, float]:
    """Count operations, bytes, frames, system calls and seconds spent waiting, so far."""
    return _current.current().statistics()
