# SPDX-License-Identifier: Apache-2.0
"""The operations among neighbours on a graph of workers, as every face of the library has them.

The upper half starts them on C-contiguous arrays, for all faces, and lets small arrays travel
together. The lower half is the face for NumPy arrays, which `fastps` re-exports. Ranks are those
of the job. Threads: any, but nameless operations come from one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar, Unpack, overload

import numpy as np

from fastps.collectives.row_counts import gather_objects
from fastps.contract.compression import Choice, coding_of
from fastps.graph.neighbors import Neighbors
from fastps.graph.rules import ClippingRule, Rule
from fastps.ops.numpy_collectives import make_waiting
from fastps.ops.start import labels_of, width_of
from fastps.session.array_checks import readable
from fastps.session.current import current
from fastps.topology import Topology, with_destinations, with_sources
from fastps.types import DType, dtype_of
from fastps.worker.handle import Array, Handle, MappedHandle, Waitable

if TYPE_CHECKING:  # importing fastps loads as little as it can
    from fastps.graph.weights import Targets

FUSED_BYTES = 8 << 20  # of arrays that travel as one
SMALL_BYTES = 1 << 20  # an array above that gains nothing by company

StartMix = Callable[..., Waitable]  # an operation of Neighbors, or one with the same arguments
E = TypeVar("E")


# ---- for all faces ----


def start_fused(
    arrays: Sequence[Array],
    codes: Sequence[DType | None],
    name: str | None,
    mix: StartMix,
    outs: Sequence[Array] | None = None,
    **how: Any,
) -> Handle[list[Array]]:
    """Start one operation for several arrays: small ones are copied together, with one result.

    codes: their types, as dtype of push_pull_async(). mix, how: the operation and its keywords.
    outs: where results go; None: new arrays. All workers make the same packs, and each element
    has the same result as without. A clipping rule looks at whole arrays, so with it each array
    travels alone.
    """
    small_bytes = -1 if isinstance(how.get("rule"), ClippingRule) else SMALL_BYTES
    packs = _packs(arrays, codes, small_bytes)
    labels = [name] if len(packs) == 1 else labels_of(name, len(packs))
    empty = current().groups.empty
    found = [empty(one.shape, one.dtype) for one in arrays] if outs is None else list(outs)
    handles = [
        _start_pack(
            [arrays[i] for i in pack], [found[i] for i in pack],
            functools.partial(mix, current().groups.neighbors, name=label, dtype=codes[pack[0]],
                              **how),
        )
        for pack, label in zip(packs, labels, strict=True)
    ]  # fmt: skip
    return MappedHandle(handles, lambda _: found)


def _start_pack(
    arrays: Sequence[Array], outs: Sequence[Array], start: Callable[[Array, Array], Waitable]
) -> Waitable:
    if len(arrays) == 1:
        return start(arrays[0], outs[0])
    count = sum(array.size for array in arrays)
    own, result = (current().groups.empty((count,), arrays[0].dtype) for _ in range(2))
    np.concatenate([array.reshape(-1) for array in arrays], out=own)

    def finish(_: list[Any]) -> None:
        begin = 0
        for out in outs:
            out.reshape(-1)[...] = result[begin : begin + out.size]
            begin += out.size

    return MappedHandle([start(own, result)], finish)


def _packs(
    arrays: Sequence[Array], codes: Sequence[DType | None], small_bytes: int
) -> list[list[int]]:
    """Sort indices into packs: small arrays of one type together, each other array alone."""
    packs: list[list[int]] = []
    open_packs: dict[tuple[object, ...], tuple[list[int], int]] = {}
    for index, (array, code) in enumerate(zip(arrays, codes, strict=True)):
        key = (array.dtype, code)
        pack, nbytes = open_packs.get(key, ([], FUSED_BYTES))
        if array.nbytes > small_bytes:
            packs.append([index])
            continue
        if nbytes + array.nbytes > FUSED_BYTES:
            pack, nbytes = [], 0
            packs.append(pack)
        pack.append(index)
        open_packs[key] = (pack, nbytes + array.nbytes)
    return packs


def start_neighbor_allreduce(
    neighbors: Neighbors, array: Array, out: Array, *, compression: Choice = None,
    name: str | None, dtype: DType | None, **how: Any,
) -> Waitable:  # fmt: skip
    """Start Neighbors.allreduce(), with a codec if the array is worth one; how: its keywords."""
    session, coding = current(), coding_of(compression, name or "")
    code = dtype_of(array.dtype) if dtype is None else dtype
    least = session.config.min_compress_bytes
    if session.size == 1 or not (coding and coding.fits(code, array.nbytes, min_bytes=least)):
        coding = None
    return neighbors.allreduce(array, out, coding=coding, name=name, dtype=dtype, **how)


def start_neighbor_allgather(
    array: Array,
    src_ranks: Sequence[int] | None,
    dst_ranks: Sequence[int] | None,
    name: str | None,
    *,
    is_checked: bool,
    dtype: DType | None = None,
) -> tuple[Handle[Any], list[int]]:
    """Start to gather neighbours' rows; return the handle, and the rows of each source.

    Blocks until the sources have sent how many rows they have.
    """
    neighbors = current().groups.neighbors
    sources, targets = neighbors.ends(src_ranks, dst_ranks)
    rows = np.atleast_1d(array)
    how: dict[str, Any] = {"sources": sources, "targets": targets, "is_checked": is_checked}
    label = None if name is None else f"{name} rows"
    own, numbers = np.array([len(rows)], np.int64), np.empty(len(sources), np.int64)
    first = neighbors.allgather(own, numbers, counts=[1] * len(sources), name=label, **how)
    first.wait()
    counts = [0 if one in first.missed else int(number)
              for one, number in zip(sources, numbers, strict=True)]  # fmt: skip
    out = current().groups.empty((sum(counts), *rows.shape[1:]), rows.dtype)
    width = width_of(rows)
    handle = neighbors.allgather(
        rows, out, counts=[count * width for count in counts], name=name, dtype=dtype, **how
    )
    if not neighbors.goes_on:
        return handle, counts

    def without_lost(_: list[Any]) -> Array:
        lost = handle.missed
        if not lost:
            return out
        is_there = np.repeat([one not in lost for one in sources], counts)
        return np.ascontiguousarray(out[is_there])

    return MappedHandle([handle], without_lost), counts


# ---- the graph ----


def set_topology(topology: Any = None, is_weighted: bool = False) -> bool:
    """Set the graph of workers for operations among neighbours; all workers set the same.

    topology: fastps.topology.Topology, a networkx.DiGraph, or a matrix; None: exponential.
    is_weighted: its weights count; else a worker weighs its own array and those of others alike.
    Does not communicate; the next operation finds out where graphs differ. Raises ArgumentError (a
    ValueError and a TypeError) for a wrong number of nodes, or for anything but a graph. Returns
    True.
    """
    current().groups.neighbors.set_graph(topology, is_weighted=is_weighted)
    return True


def load_topology() -> Topology:
    """Return the graph of workers."""
    return current().groups.neighbors.graph.topology


def is_topo_weighted() -> bool:
    """Return whether the weights of the graph of workers count."""
    return current().groups.neighbors.graph.is_weighted


def in_neighbor_ranks() -> list[int]:
    """List the workers that this one receives from on the graph, ascending, without itself."""
    return load_topology().in_neighbors(current().rank)


def out_neighbor_ranks() -> list[int]:
    """List the workers that this one sends to on the graph, ascending, without itself."""
    return load_topology().out_neighbors(current().rank)


def lost_ranks() -> list[int]:
    """List the workers that are lost or have left the job before this one, ascending.

    Only with on_loss="reweight"; else the list is empty, since the job ends. Others may learn of
    a loss a little later; after barrier() all know of the losses before it.
    """
    session = current()
    return session.groups.world.gone() if session.config.goes_on else []


def machine_size() -> int:
    """Return the number of machines."""
    return len(current().groups.neighbors.machines)


def machine_rank() -> int:
    """Return the number of this machine, in the order of the lowest ranks on them."""
    return current().groups.neighbors.machine


def is_homogeneous() -> bool:
    """Return whether all machines have as many workers, with ranks one after the other."""
    machines = current().groups.neighbors.machines
    return [rank for members in machines for rank in members] == list(range(current().size)) and (
        len({len(members) for members in machines}) == 1
    )


def set_machine_topology(topology: Any = None, is_weighted: bool = False) -> bool:
    """Set the graph of machines, as set_topology() does that of workers."""
    current().groups.neighbors.set_machine_graph(topology, is_weighted=is_weighted)
    return True


def load_machine_topology() -> Topology:
    """Return the graph of machines."""
    return current().groups.neighbors.machine_graph.topology


def in_neighbor_machine_ranks() -> list[int]:
    """List the machines that this one receives from on their graph, ascending, without itself."""
    return load_machine_topology().in_neighbors(machine_rank())


def out_neighbor_machine_ranks() -> list[int]:
    """List the machines that this one sends to on their graph, ascending, without itself."""
    return load_machine_topology().out_neighbors(machine_rank())


def infer_source_from_destination_ranks(dst_ranks: Sequence[int]) -> tuple[list[int], Topology]:
    """Return the ranks that send to this worker, and the graph of all workers.

    dst_ranks: the ranks that this worker sends to. All workers call it; blocks until they have. On
    the graph each worker weighs its own array and those that it receives alike.
    """
    topology = with_destinations(_gathered(dst_ranks))
    return topology.in_neighbors(current().rank), topology


def infer_destination_from_source_ranks(src_ranks: Sequence[int]) -> tuple[list[int], Topology]:
    """Return the ranks that this worker sends to, and the graph of all workers.

    src_ranks: the ranks that this worker receives from. Otherwise as
    infer_source_from_destination_ranks().
    """
    topology = with_sources(_gathered(src_ranks))
    return topology.out_neighbors(current().rank), topology


def _gathered(ranks: Sequence[int]) -> list[list[int]]:
    return gather_objects(current().groups.world, [int(rank) for rank in ranks], "infer ranks")


# ---- operations on NumPy arrays ----


class MixOptions(TypedDict, total=False):
    """The keywords of neighbor_allreduce()."""

    self_weight: float | None
    src_weights: Mapping[int, float] | None
    dst_weights: Targets | None
    rule: Rule | None
    compression: Choice
    consensus_step: float | None
    enable_topo_check: bool
    name: str | None


class MachineMixOptions(TypedDict, total=False):
    """The keywords of hierarchical_neighbor_allreduce()."""

    self_weight: float | None
    src_machine_weights: Mapping[int, float] | None
    dst_machine_weights: Targets | None
    enable_topo_check: bool
    name: str | None


class GossipOptions(TypedDict, total=False):
    """The keywords of pair_gossip()."""

    self_weight: float | None
    pair_weight: float | None
    name: str | None


class Mix(Protocol[E]):
    """The types of neighbor_allreduce(): one array or tensor, or a list of them."""

    @overload
    def __call__(self, tensor: E, **options: Unpack[MixOptions]) -> E: ...

    @overload
    def __call__(self, tensor: Sequence[E], **options: Unpack[MixOptions]) -> list[E]: ...


class MachineMix(Protocol[E]):
    """The types of hierarchical_neighbor_allreduce()."""

    @overload
    def __call__(self, tensor: E, **options: Unpack[MachineMixOptions]) -> E: ...

    @overload
    def __call__(self, tensor: Sequence[E], **options: Unpack[MachineMixOptions]) -> list[E]: ...


class Gossip(Protocol[E]):
    """The types of pair_gossip()."""

    @overload
    def __call__(self, tensor: E, target_rank: int, **options: Unpack[GossipOptions]) -> E: ...

    @overload
    def __call__(
        self, tensor: Sequence[E], target_rank: int, **options: Unpack[GossipOptions]
    ) -> list[E]: ...


@overload
def neighbor_allreduce_async(tensor: Array, **options: Unpack[MixOptions]) -> Handle[Array]: ...


@overload
def neighbor_allreduce_async(
    tensor: Sequence[Array], **options: Unpack[MixOptions]
) -> Handle[list[Array]]: ...


def neighbor_allreduce_async(
    tensor: Array | Sequence[Array],
    *,
    self_weight: float | None = None,
    src_weights: Mapping[int, float] | None = None,
    dst_weights: Targets | None = None,
    rule: Rule | None = None,
    compression: Choice = None,
    consensus_step: float | None = None,
    enable_topo_check: bool = True,
    name: str | None = None,
) -> Handle[Any]:
    """Start neighbor_allreduce() and return a handle for synchronize(); does not block.

    The arrays must not be changed until synchronize() has returned.
    """
    return _start_some(
        tensor, name, start_neighbor_allreduce, self_weight=self_weight, src_weights=src_weights,
        dst_weights=dst_weights, rule=rule, compression=compression,
        consensus_step=consensus_step, is_checked=enable_topo_check,
    )  # fmt: skip


neighbor_allreduce: Mix[Array] = make_waiting(  # type: ignore[assignment]
    neighbor_allreduce_async,
    """Return the weighted average of this worker's array and those of its neighbours.

    tensor: of floats, or a sequence of such, which travel together; not changed. All workers
    call it. Without weights: on the graph of set_topology(). self_weight and src_weights (rank:
    weight, some in-neighbours) replace the graph's weights. dst_weights, with both, replaces its
    edges, for this call: ranks that get the array as it is, or rank: weight of what it gets,
    rounded once before it leaves. Products are added in the order of ranks, halves in float32.
    Weights are not normalised. rule: TrimmedMean(), CoordinateMedian(), SelfCentredClipping() or
    AdaptiveClipping(), against neighbours that lie. The first two ignore the weights' sizes. All
    workers give rules of one kind. compression: as of push_pull(), the same on all workers. With
    error feedback the call needs a name, whose arrays are then mixed by steps of consensus_step
    times the whole way; None: the codec's default. enable_topo_check: MismatchError where one
    worker sends what another does not expect, at the cost of a byte each way; without it such a
    call may wait until op_timeout_s. Blocks; raises ValueError, TypeError, PeerLostError,
    StallError. Bytes on the wire: nbytes to each target.
    """,
)


@overload
def hierarchical_neighbor_allreduce_async(
    tensor: Array, **options: Unpack[MachineMixOptions]
) -> Handle[Array]: ...


@overload
def hierarchical_neighbor_allreduce_async(
    tensor: Sequence[Array], **options: Unpack[MachineMixOptions]
) -> Handle[list[Array]]: ...


def hierarchical_neighbor_allreduce_async(
    tensor: Array | Sequence[Array],
    *,
    self_weight: float | None = None,
    src_machine_weights: Mapping[int, float] | None = None,
    dst_machine_weights: Targets | None = None,
    enable_topo_check: bool = True,
    name: str | None = None,
) -> Handle[Any]:
    """Start hierarchical_neighbor_allreduce() and return a handle for synchronize()."""
    return _start_some(
        tensor, name, Neighbors.hierarchical_allreduce, self_weight=self_weight,
        src_machine_weights=src_machine_weights, dst_machine_weights=dst_machine_weights,
        is_checked=enable_topo_check,
    )  # fmt: skip


hierarchical_neighbor_allreduce: MachineMix[Array] = make_waiting(  # type: ignore[assignment]
    hierarchical_neighbor_allreduce_async,
    """Average inside each machine, and mix the averages of neighbouring machines.

    All workers of a machine give the same weights, and get the same array. Machines may have
    different numbers of workers. Otherwise as neighbor_allreduce(), with the graph of
    set_machine_topology(). Bytes out of a machine: nbytes to each target.
    """,
)


@overload
def pair_gossip_async(
    tensor: Array, target_rank: int, **options: Unpack[GossipOptions]
) -> Handle[Array]: ...


@overload
def pair_gossip_async(
    tensor: Sequence[Array], target_rank: int, **options: Unpack[GossipOptions]
) -> Handle[list[Array]]: ...


def pair_gossip_async(
    tensor: Array | Sequence[Array],
    target_rank: int,
    *,
    self_weight: float | None = None,
    pair_weight: float | None = None,
    name: str | None = None,
) -> Handle[Any]:
    """Start pair_gossip() and return a handle for synchronize()."""
    return _start_some(
        tensor, name, Neighbors.pair_gossip, target=target_rank, self_weight=self_weight,
        pair_weight=pair_weight,
    )  # fmt: skip


pair_gossip: Gossip[Array] = make_waiting(  # type: ignore[assignment]
    pair_gossip_async,
    """Return the average, or weighted sum, of this worker's array and one other's; blocks.

    Only these two call it, each naming the other.
    """,
)


def neighbor_allgather_async(
    tensor: Array,
    *,
    src_ranks: Sequence[int] | None = None,
    dst_ranks: Sequence[int] | None = None,
    enable_topo_check: bool = True,
    name: str | None = None,
) -> Handle[Array]:
    """Start neighbor_allgather(); blocks until the sources have sent their first dimensions."""
    array = readable(tensor, name)
    return start_neighbor_allgather(
        array, src_ranks, dst_ranks, name, is_checked=enable_topo_check
    )[0]


neighbor_allgather = make_waiting(
    neighbor_allgather_async,
    """Return the neighbours' arrays one after the other along the first dimension, without ours.

    First dimensions may differ. Without ranks: on the graph, sources ascending. With both
    src_ranks and dst_ranks: of this call, sources in that order. All workers call it. Blocks.
    """,
)


def _start_some(
    tensor: Array | Sequence[Array], name: str | None, mix: StartMix, **how: Any
) -> Handle[Any]:
    """Start an operation on an array, or on several of which small ones travel together."""
    is_one = not isinstance(tensor, list | tuple)
    arrays = [readable(one, name) for one in ([tensor] if is_one else tensor)]
    handle = start_fused(arrays, [None] * len(arrays), name, mix, **how)
    return MappedHandle([handle], lambda found: found[0][0] if is_one else found[0])
