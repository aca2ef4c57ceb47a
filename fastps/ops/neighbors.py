# SPDX-License-Identifier: Apache-2.0
"""The operations among neighbours on a graph of workers, as every face of the library has them.

The upper half starts them on C-contiguous arrays, for all faces, and lets small arrays travel
together. The lower half is the face for NumPy arrays; fastps hands it on. Ranks are those of the
job. Threads: any, but nameless operations come from one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastps.collectives.row_counts import gather_objects
from fastps.contract.codec import PLAIN, Coding
from fastps.contract.compression import Choice, coding_of
from fastps.graph.rules import AdaptiveClipping, Rule, SelfCentredClipping
from fastps.ops.start import labels_of
from fastps.session.array_checks import readable
from fastps.session.current import current
from fastps.topology import Topology, with_destinations, with_sources
from fastps.types import DType, dtype_of
from fastps.worker.handle import Array, MappedHandle, Waitable

if TYPE_CHECKING:  # importing fastps brings as little as it can
    from fastps.graph.neighbors import Neighbors
    from fastps.graph.weights import Targets

FUSED_BYTES = 8 << 20  # of arrays that travel as one
SMALL_BYTES = 1 << 20  # an array above that gains nothing by company

CLIPPING = (SelfCentredClipping, AdaptiveClipping)

Start = Callable[[Array, Array, str | None, DType | None], Waitable]


# ---- for all faces ----


def start_fused(
    arrays: Sequence[Array],
    codes: Sequence[DType | None],
    name: str | None,
    start: Start,
    outs: Sequence[Array] | None = None,
    rule: Rule | None = None,
) -> MappedHandle[list[Array]]:
    """Start one operation for several arrays: small ones are copied together, with one result.

    codes: their types, as dtype of push_pull_async(). start: begins it for one array, into an
    out. outs: where results go; None: new arrays. The same packs are made on all workers, and
    element by element the same is computed as without; clipping looks at whole arrays, so with
    such a rule each goes alone.
    """
    packs = _packs(arrays, codes, -1 if isinstance(rule, CLIPPING) else SMALL_BYTES)
    labels = [name] if len(packs) == 1 else labels_of(name, len(packs))
    found = list(outs) if outs is not None else [_result_of(array) for array in arrays]
    flights = [
        _start_pack(
            [arrays[i] for i in pack], [found[i] for i in pack], codes[pack[0]], label, start
        )
        for pack, label in zip(packs, labels, strict=True)
    ]
    return MappedHandle(flights, lambda _: found)


def _start_pack(
    arrays: Sequence[Array],
    outs: Sequence[Array],
    code: DType | None,
    label: str | None,
    start: Start,
) -> Waitable:
    if len(arrays) == 1:
        return start(arrays[0], outs[0], label, code)
    count = sum(array.size for array in arrays)
    own, result = (current().groups.empty((count,), arrays[0].dtype) for _ in range(2))
    np.concatenate([array.reshape(-1) for array in arrays], out=own)

    def finish(_: list[Any]) -> None:
        begin = 0
        for out in outs:
            out.reshape(-1)[...] = result[begin : begin + out.size]
            begin += out.size

    return MappedHandle([start(own, result, label, code)], finish)


def _packs(
    arrays: Sequence[Array], codes: Sequence[DType | None], small_bytes: int
) -> list[list[int]]:
    """Sort indices into packs: small ones of one type together, each other one alone."""
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


def _result_of(array: Array) -> Array:
    return current().groups.empty(array.shape, array.dtype)


def start_neighbor_allreduce(
    neighbors: Neighbors,
    array: Array,
    out: Array,
    *,
    rule: Rule | None = None,
    compression: Choice = None,
    consensus_step: float | None = None,
    **how: Any,
) -> Waitable:
    """Start to combine an array with neighbours', by a rule or weights; how: of Neighbors."""
    coding = coding_of(compression, how["name"] or "") or PLAIN
    if _is_coded(coding, array, how["dtype"]):
        promise, finish = neighbors.coded(array, out, coding, step=consensus_step, rule=rule,
                                          **how)  # fmt: skip
        return MappedHandle([promise], lambda _: finish())
    if not (isinstance(rule, CLIPPING) or neighbors.goes_on):
        return neighbors.allreduce(array, out, rule=rule, **how)
    promise, finish = neighbors.combined(array, out, rule=rule, **how)
    return MappedHandle([promise], lambda _: finish())


def _is_coded(coding: Coding, array: Array, dtype: DType | None) -> bool:
    """Return whether an array is worth a codec, and can have it."""
    session = current()
    code = dtype_of(array.dtype) if dtype is None else dtype
    least = session.config.min_compress_bytes
    return session.size > 1 and coding.fits(code, array.nbytes, min_bytes=least)


def start_pair_gossip(
    neighbors: Neighbors, array: Array, out: Array, *, target: int, **how: Any
) -> Waitable:
    """Start to mix an array with that of one other worker; how: of Neighbors."""
    if not neighbors.goes_on:
        return neighbors.pair_gossip(array, out, target, **how)
    promise, finish = neighbors.pair_combined(array, out, target, **how)
    return MappedHandle([promise], lambda _: finish())


def start_neighbor_allgather(
    array: Array,
    src_ranks: Sequence[int] | None,
    dst_ranks: Sequence[int] | None,
    name: str | None,
    *,
    is_checked: bool,
    dtype: DType | None = None,
) -> tuple[Waitable, list[int]]:
    """Start to gather neighbours' rows, and give how many come from each source.

    Blocks until the sources have told how many rows they have.
    """
    neighbors = current().groups.neighbors
    sources, targets = neighbors.ends(src_ranks, dst_ranks)
    rows = np.atleast_1d(array)
    how: dict[str, Any] = {"sources": sources, "targets": targets, "is_checked": is_checked}
    label = None if name is None else f"{name} rows"
    own, counts = np.array([len(rows)], np.int64), np.empty(len(sources), np.int64)
    told = neighbors.allgather(own, counts, counts=[1] * len(sources), name=label, **how)
    told.wait()
    lost = told.missed
    found = [0 if one in lost else int(count)
             for one, count in zip(sources, counts, strict=True)]  # fmt: skip
    out = current().groups.empty((sum(found), *rows.shape[1:]), rows.dtype)
    width = int(np.prod(rows.shape[1:], dtype=np.int64))
    flight = neighbors.allgather(
        rows, out, counts=[count * width for count in found], name=name, dtype=dtype, **how
    )
    if not neighbors.goes_on:
        return flight, found
    return MappedHandle([flight], lambda _: _rows_of(out, sources, found, flight.missed)), found


def _rows_of(
    out: Array, sources: Sequence[int], counts: Sequence[int], missed: Sequence[int]
) -> Array:
    """Leave out the rows of those that were lost before they had come."""
    if not missed:
        return out
    is_there = np.repeat([one not in missed for one in sources], counts)
    return np.ascontiguousarray(out[is_there])


# ---- the graph ----


def set_topology(topology: Any = None, is_weighted: bool = False) -> bool:
    """Choose the graph of workers on which operations go; all workers choose the same.

    topology: fastps.topology.Topology, a networkx.DiGraph, or a matrix; None: exponential.
    is_weighted: its weights count; else what is received and one's own are weighed alike. Does
    not communicate; a graph that others do not have is found by the next operation. Raises
    ArgumentError (a ValueError and a TypeError) for a wrong number of nodes, or what is no graph.
    Always True.
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
    """List whom this worker receives from on the graph, ascending, without itself."""
    return load_topology().in_neighbors(current().rank)


def out_neighbor_ranks() -> list[int]:
    """List whom this worker sends to on the graph, ascending, without itself."""
    return load_topology().out_neighbors(current().rank)


def lost_ranks() -> list[int]:
    """List the workers that this one goes on without, ascending: lost, or gone before us.

    Only with on_loss="reweight", else empty: the job ends. Others may hear of a loss a little
    later; after barrier() all know of those before it.
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
    """Choose the graph of machines, as set_topology() does that of workers."""
    current().groups.neighbors.set_machine_graph(topology, is_weighted=is_weighted)
    return True


def load_machine_topology() -> Topology:
    """Return the graph of machines."""
    return current().groups.neighbors.machine_graph.topology


def in_neighbor_machine_ranks() -> list[int]:
    """List which machines this one receives from on their graph, ascending, without itself."""
    return load_machine_topology().in_neighbors(machine_rank())


def out_neighbor_machine_ranks() -> list[int]:
    """List which machines this one sends to on their graph, ascending, without itself."""
    return load_machine_topology().out_neighbors(machine_rank())


def infer_source_from_destination_ranks(dst_ranks: Sequence[int]) -> tuple[list[int], Topology]:
    """Return the ranks that send to this worker, when each says to whom, and the graph of all.

    All workers call it; blocks until they have. Each weighs what it receives, and its own, alike.
    """
    return _inferred(dst_ranks, with_destinations, Topology.in_neighbors)


def infer_destination_from_source_ranks(src_ranks: Sequence[int]) -> tuple[list[int], Topology]:
    """Return to whom this worker sends, when each says from whom it receives; else as above."""
    return _inferred(src_ranks, with_sources, Topology.out_neighbors)


def _inferred(
    ranks: Sequence[int],
    make: Callable[[Sequence[Sequence[int]]], Topology],
    ends: Callable[[Topology, int], list[int]],
) -> tuple[list[int], Topology]:
    told = gather_objects(current().groups.world, [int(rank) for rank in ranks], "infer ranks")
    topology = make(told)
    return ends(topology, current().rank), topology


# ---- operations on NumPy arrays ----


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
) -> MappedHandle[Any]:
    """Start neighbor_allreduce() and give a handle for synchronize(); does not block.

    The arrays must not be changed until synchronize() has returned.
    """

    def start(array: Array, out: Array, label: str | None, code: DType | None) -> Waitable:
        return start_neighbor_allreduce(
            current().groups.neighbors, array, out, self_weight=self_weight,
            src_weights=src_weights, dst_weights=dst_weights, rule=rule,
            compression=compression, consensus_step=consensus_step,
            is_checked=enable_topo_check, name=label, dtype=code,
        )  # fmt: skip

    return _start_some(tensor, name, start, rule)


def neighbor_allreduce(
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
) -> Any:
    """Return the weighted average of this worker's array and those of its neighbours.

    tensor: of floats, or a sequence of such, which travel together; not changed. All workers
    call it. Without weights: on the graph of set_topology(). self_weight and src_weights (rank:
    weight, some in-neighbours) replace the graph's weights. dst_weights, with both, replaces its
    edges, for this call: ranks that get what we have, or rank: weight of what it gets, rounded
    once before it leaves. Products are added in the order of ranks, halves in float32. Weights
    are not normalised. rule: TrimmedMean(), CoordinateMedian(), SelfCentredClipping() or
    AdaptiveClipping(), against neighbours that lie; the first two look only at whose arrays are
    weighed, not how. All workers give rules of one kind. compression: as of push_pull(), the same
    on all workers; with error feedback the call needs a name, whose arrays are then mixed by steps
    of consensus_step times the whole way, None for what the codec stands. enable_topo_check:
    MismatchError where one worker sends what another does not expect, at the cost of a byte each
    way; without it such a call may wait until op_timeout_s. Blocks; raises ValueError, TypeError,
    PeerLostError, StallError. Bytes on the wire: nbytes to each target.
    """
    return neighbor_allreduce_async(
        tensor, self_weight=self_weight, src_weights=src_weights, dst_weights=dst_weights,
        rule=rule, compression=compression, consensus_step=consensus_step,
        enable_topo_check=enable_topo_check, name=name,
    ).wait()  # fmt: skip


def hierarchical_neighbor_allreduce_async(
    tensor: Array | Sequence[Array],
    *,
    self_weight: float | None = None,
    src_machine_weights: Mapping[int, float] | None = None,
    dst_machine_weights: Targets | None = None,
    enable_topo_check: bool = True,
    name: str | None = None,
) -> MappedHandle[Any]:
    """Start hierarchical_neighbor_allreduce() and give a handle for synchronize()."""

    def start(array: Array, out: Array, label: str | None, code: DType | None) -> Waitable:
        return current().groups.neighbors.hierarchical_allreduce(
            array, out, self_weight=self_weight, src_machine_weights=src_machine_weights,
            dst_machine_weights=dst_machine_weights, is_checked=enable_topo_check, name=label,
            dtype=code,
        )  # fmt: skip

    return _start_some(tensor, name, start)


def hierarchical_neighbor_allreduce(
    tensor: Array | Sequence[Array],
    *,
    self_weight: float | None = None,
    src_machine_weights: Mapping[int, float] | None = None,
    dst_machine_weights: Targets | None = None,
    enable_topo_check: bool = True,
    name: str | None = None,
) -> Any:
    """Average inside each machine, and mix the averages of neighbouring machines.

    All workers of a machine give the same weights, and get the same array. Machines may have
    different numbers of workers. Otherwise as neighbor_allreduce(), with the graph of
    set_machine_topology(). Bytes out of a machine: nbytes to each target.
    """
    return hierarchical_neighbor_allreduce_async(
        tensor, self_weight=self_weight, src_machine_weights=src_machine_weights,
        dst_machine_weights=dst_machine_weights, enable_topo_check=enable_topo_check, name=name,
    ).wait()  # fmt: skip


def pair_gossip_async(
    tensor: Array | Sequence[Array],
    target_rank: int,
    *,
    self_weight: float | None = None,
    pair_weight: float | None = None,
    name: str | None = None,
) -> MappedHandle[Any]:
    """Start pair_gossip() and give a handle for synchronize()."""

    def start(array: Array, out: Array, label: str | None, code: DType | None) -> Waitable:
        return start_pair_gossip(
            current().groups.neighbors, array, out, target=target_rank, self_weight=self_weight,
            pair_weight=pair_weight, name=label, dtype=code,
        )  # fmt: skip

    return _start_some(tensor, name, start)


def pair_gossip(
    tensor: Array | Sequence[Array],
    target_rank: int,
    *,
    self_weight: float | None = None,
    pair_weight: float | None = None,
    name: str | None = None,
) -> Any:
    """Return the average, or weighted sum, of this worker's array and one other's; blocks.

    Only these two call it, each naming the other.
    """
    return pair_gossip_async(
        tensor, target_rank, self_weight=self_weight, pair_weight=pair_weight, name=name
    ).wait()


def neighbor_allgather_async(
    tensor: Array,
    *,
    src_ranks: Sequence[int] | None = None,
    dst_ranks: Sequence[int] | None = None,
    enable_topo_check: bool = True,
    name: str | None = None,
) -> Waitable:
    """Start neighbor_allgather(); blocks until the sources have told their first dimensions."""
    array = readable(tensor, name)
    return start_neighbor_allgather(
        array, src_ranks, dst_ranks, name, is_checked=enable_topo_check
    )[0]


def neighbor_allgather(
    tensor: Array,
    *,
    src_ranks: Sequence[int] | None = None,
    dst_ranks: Sequence[int] | None = None,
    enable_topo_check: bool = True,
    name: str | None = None,
) -> Array:
    """Return the neighbours' arrays one after the other along the first dimension, without ours.

    First dimensions may differ. Without ranks: on the graph, sources ascending; with both
    src_ranks, in that order, and dst_ranks: of this call. All workers call it. Blocks.
    """
    found: Array = neighbor_allgather_async(
        tensor, src_ranks=src_ranks, dst_ranks=dst_ranks, enable_topo_check=enable_topo_check,
        name=name,
    ).wait()  # fmt: skip
    return found


def _start_some(
    tensor: Array | Sequence[Array], name: str | None, start: Start, rule: Rule | None = None
) -> MappedHandle[Any]:
    is_one = not isinstance(tensor, list | tuple)
    arrays = [readable(one, name) for one in ([tensor] if is_one else tensor)]
    flight = start_fused(arrays, [None] * len(arrays), name, start, rule=rule)
    return MappedHandle([flight], lambda found: found[0][0] if is_one else found[0])
