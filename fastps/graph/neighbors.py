# SPDX-License-Identifier: Apache-2.0
"""The graphs of a session, of workers and of machines, and operations among neighbours on them.

Takes C-contiguous arrays, chooses edges and weights (weights.py) and steps (schedule.py), and
starts them on the group of all workers. Graphs are each worker's own knowledge: nothing is
communicated when they change. Threads: any; operations without a name from one.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastps.collectives.group import Group
from fastps.contract.codec import Coding, Option
from fastps.errors import ArgumentError
from fastps.graph import schedule as plans
from fastps.graph.rules import (
    ClippingRule,
    OrderRule,
    Rule,
    clipped_weights,
)
from fastps.graph.schedule import Edges
from fastps.graph.survivor_weights import is_of_columns, redirected, renormalised, without
from fastps.graph.weights import Graph, Mixing, Targets, check_peers, mixing
from fastps.topology import Topology, as_topology, exponential_graph
from fastps.types import DType, ReduceOp, dtype_of
from fastps.worker.handle import Array, OperationHandle

if TYPE_CHECKING:
    from fastps.graph.edge_codecs import CodedNames

_RULE = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64,
    ctypes.c_void_p,
)  # fmt: skip


class Neighbors:
    """Who this worker's neighbours are, and the operations among them.

    pair: gives the group of this worker and another one; living: that of all who are left.
    goes_on: who is lost is left out.
    """

    def __init__(
        self, group: Group, pair: Callable[[int], Group], *, living: Callable[[], Group],
        goes_on: bool = False,
    ) -> None:  # fmt: skip
        self.goes_on = goes_on
        self._living, self._left = living, group  # kept, with what it has ready
        self._group = group
        self._pair = pair
        numbers = dict.fromkeys(group.machines)  # in the order of their first members
        self.machines = [
            tuple(rank for rank, there in enumerate(group.machines) if there == one)
            for one in numbers
        ]
        self.machine = list(numbers).index(group.machines[group.rank])
        self._graph: Graph | None = None
        self._machine_graph: Graph | None = None
        self._coded: CodedNames | None = None

    # ---- graphs ----

    @property
    def graph(self) -> Graph:
        """The graph of workers: an exponential one, if none was set."""
        if self._graph is None:
            self._graph = Graph(exponential_graph(self._group.size), False)
        return self._graph

    @property
    def machine_graph(self) -> Graph:
        """The graph of machines."""
        if self._machine_graph is None:
            self._machine_graph = Graph(exponential_graph(len(self.machines)), False)
        return self._machine_graph

    def set_graph(self, graph: Any, *, is_weighted: bool) -> None:
        """Make a graph that of the workers; None: the exponential one."""
        self._graph = None if graph is None else _sized(graph, self._group.size, is_weighted)

    def set_machine_graph(self, graph: Any, *, is_weighted: bool) -> None:
        """Make a graph that of the machines."""
        size = len(self.machines)
        self._machine_graph = None if graph is None else _sized(graph, size, is_weighted)

    # ---- operations ----

    def allreduce(
        self,
        array: Array,
        out: Array,
        *,
        self_weight: float | None = None,
        src_weights: Mapping[int, float] | None = None,
        dst_weights: Targets | None = None,
        rule: OrderRule | None = None,
        is_checked: bool = True,
        name: str | None = None,
        dtype: DType | None = None,
    ) -> OperationHandle:
        """Start to mix our array with those of neighbours, or to combine them by a rule."""
        group = self._group
        how = mixing(self.graph, group.rank, self_weight, src_weights, dst_weights,
                     is_checked=is_checked)  # fmt: skip
        if rule is None:
            return _start_mix(group, how, array, out, name, dtype)
        if isinstance(rule, type) or not isinstance(rule, OrderRule):
            raise TypeError(
                f"rule={rule!r}: neighbors take fastps.TrimmedMean(b), CoordinateMedian(), "
                "SelfCentredClipping(radius) and AdaptiveClipping(share); those of "
                "fastps.byzantine are for what servers reduce, as push_pull()"
            )
        return _start_trimmed(group, how, rule, array, out, name, dtype)

    def combined(
        self,
        array: Array,
        out: Array,
        *,
        rule: Rule | None = None,
        self_weight: float | None = None,
        src_weights: Mapping[int, float] | None = None,
        dst_weights: Targets | None = None,
        is_checked: bool = True,
        name: str | None = None,
        dtype: DType | None = None,
    ) -> tuple[OperationHandle, Callable[[], Array]]:
        """Start to gather what neighbours have; when it is there, the second puts it into out.

        So a rule may look at whole arrays, and who is lost midway is left out with all it has.
        """
        self_weight, targets = redirected(self_weight, dst_weights, self._group.gone())
        how = mixing(self.graph, self._group.rank, self_weight, src_weights, targets,
                     is_checked=is_checked)  # fmt: skip
        if isinstance(rule, ClippingRule) and how.edges.n_copies:
            raise ValueError("what is clipped is sent as it is: give dst_weights without factors")
        return self._combine(self._group, how, array, out, rule, name, dtype,
                             keeps_row=not is_of_columns(dst_weights))  # fmt: skip

    def _combine(
        self, group: Group, how: Mixing, array: Array, out: Array, rule: Rule | None,
        name: str | None, dtype: DType | None, *, keeps_row: bool = True,
    ) -> tuple[OperationHandle, Callable[[], Array]]:  # fmt: skip
        edges, code = how.edges, _floats(array, dtype)
        heard, count = [*edges.sources, *edges.ignored], len(edges.sources) + 1
        rows = np.empty((len(heard), array.size), array.dtype)
        handle = group.among_neighbors(
            ("neighbor_gather", array.nbytes, *edges),
            lambda: plans.neighbor_allgather(
                group.rank, edges, array.nbytes, [array.nbytes] * len(heard), heard),
            array, rows, name=name, dtype=code, weights=how.weights[count:], goes_on=self.goes_on,
        )  # fmt: skip
        weights = how.weights[:count] or (1 / count,) * count
        own = bisect.bisect(edges.sources, group.rank)
        arrays = [*rows[: count - 1]]
        arrays.insert(own, array.reshape(-1))
        members = [*edges.sources]
        members.insert(own, group.rank)

        def finish() -> Array:
            missed = handle.missed
            is_there = [one not in missed for one in members]
            left = list(itertools.compress(arrays, is_there))
            shares = (
                renormalised(weights, is_there)
                if keeps_row
                else list(itertools.compress(weights, is_there))
            )
            place = own - is_there[:own].count(False)
            return _finish_mix(rule, left, place, shares, out, code, is_mean=edges.is_mean)

        return handle, finish

    def coded(
        self,
        array: Array,
        out: Array,
        coding: Coding,
        *,
        step: float | None = None,
        rule: Rule | None = None,
        self_weight: float | None = None,
        src_weights: Mapping[int, float] | None = None,
        dst_weights: Targets | None = None,
        is_checked: bool = True,
        name: str | None = None,
        dtype: DType | None = None,
    ) -> tuple[OperationHandle, Callable[[], Array]]:
        """Start to mix what neighbours send with a codec; the second decodes, mixes, fills out."""
        from fastps.graph import edge_codecs  # noqa: PLC0415  (few jobs need it)

        group, code, me = self._group, _floats(array, dtype), self._group.rank
        how = mixing(self.graph, me, self_weight, src_weights, dst_weights, is_checked=is_checked)
        _check_coded(coding, how, rule)
        step = edge_codecs.step_of(coding, array.size, step)
        self._coded = self._coded or edge_codecs.CodedNames()
        kept = self._coded.take(name, coding, code, array.size, me)
        x = edge_codecs.widened(array, code)
        heard = [*how.edges.sources, *how.edges.ignored]
        targets = [peer for peer, _ in how.edges.targets]
        blocks, places, own = kept.encode(x, targets, group.gone())
        rows = np.empty((len(heard), kept.stride), np.uint8)
        edges = how.edges._replace(targets=tuple(zip(targets, places, strict=True)))
        handle = group.among_neighbors(
            ("neighbor_coded", kept.wire_bytes, *edges),
            lambda: plans.neighbor_exchange(me, edges, kept.wire_bytes, kept.stride, heard),
            blocks, rows, name=name, dtype=DType.UINT8, goes_on=self.goes_on,
        )  # fmt: skip
        members = sorted((me, *edges.sources))
        weights = how.weights or (1 / len(members),) * len(members)

        def finish() -> Array:
            found = edge_codecs.finish_coded(kept, rows, heard, handle.missed)
            found = {one: found[one] for one in edges.sources if one in found}
            order, arrays, place = edge_codecs.in_order(found, x, me)
            shares = renormalised(weights, [one in order for one in members])
            if coding.has(Option.FEEDBACK):
                result = edge_codecs.moved(arrays, place, own, shares, step)
            else:
                result = np.empty(x.size, np.float32)
                _finish_mix(rule, arrays, place, shares, result, DType.FLOAT32,
                            is_mean=edges.is_mean)  # fmt: skip
            edge_codecs.narrowed(result, out, code)
            return out

        return handle, finish

    def pair_gossip(
        self,
        array: Array,
        out: Array,
        target: int,
        *,
        self_weight: float | None = None,
        pair_weight: float | None = None,
        name: str | None = None,
        dtype: DType | None = None,
    ) -> OperationHandle:
        """Start to mix our array with that of one other worker, who calls it too."""
        group, how = self._pair_mixing(target, self_weight, pair_weight)
        return _start_mix(group, how, array, out, name, dtype)

    def pair_combined(
        self,
        array: Array,
        out: Array,
        target: int,
        *,
        self_weight: float | None = None,
        pair_weight: float | None = None,
        name: str | None = None,
        dtype: DType | None = None,
    ) -> tuple[OperationHandle, Callable[[], Array]]:
        """Start pair_gossip() with one that may be lost: then ours is all there is."""
        group, how = self._pair_mixing(target, self_weight, pair_weight)
        return self._combine(group, how, array, out, None, name, dtype)

    def _pair_mixing(
        self, target: int, self_weight: float | None, pair_weight: float | None
    ) -> tuple[Group, Mixing]:
        check_peers("target_rank", [target], self._group.rank, self._group.size)
        if (self_weight is None) != (pair_weight is None):
            raise ValueError("self_weight and pair_weight are given both or not at all")
        group = self._pair(target)
        other = 1 - group.rank
        own = 0.5 if self_weight is None else self_weight
        weights = {other: 0.5 if pair_weight is None else pair_weight}
        pair = Graph(exponential_graph(2), False)
        return group, mixing(pair, group.rank, own, weights, [other], is_checked=False)

    def hierarchical_allreduce(
        self,
        array: Array,
        out: Array,
        *,
        self_weight: float | None = None,
        src_machine_weights: Mapping[int, float] | None = None,
        dst_machine_weights: Targets | None = None,
        is_checked: bool = True,
        name: str | None = None,
        dtype: DType | None = None,
    ) -> OperationHandle:
        """Start to mix the average of our machine with those of neighbouring machines.

        Of those that are left, when it begins; it fails if another one is lost meanwhile.
        """
        group = self._left = self._living() if self.goes_on else self._group
        machines = [tuple(group.ranks.index(one) for one in members if one in group.ranks)
                    for members in self.machines]  # fmt: skip
        gone = [index for index, members in enumerate(machines) if not members]
        self_weight, targets = redirected(self_weight, dst_machine_weights, gone)
        how = mixing(self.machine_graph, self.machine, self_weight, src_machine_weights, targets,
                     is_checked=is_checked)  # fmt: skip
        how = without(how, self.machine, gone, keeps_row=not is_of_columns(dst_machine_weights))
        edges, size = how.edges, len(how.edges.sources) + 1
        weights = how.weights if len(how.weights) >= size else (1 / size,) * size
        code = _floats(array, dtype)
        if group.size == 1:
            return _alone(group, how, array, out, code)
        return group.among_neighbors(
            ("hierarchical_neighbor_allreduce", array.nbytes, *edges), lambda:
            plans.hierarchical_neighbor_allreduce(
                group.rank, machines, edges, array.nbytes, array.itemsize),
            array, out, name=name, dtype=code, divisor=len(machines[self.machine]),
            weights=weights,
        )  # fmt: skip

    def allgather(
        self,
        array: Array,
        out: Array,
        *,
        sources: Sequence[int],
        targets: Sequence[int],
        counts: Sequence[int],
        is_checked: bool = True,
        name: str | None = None,
        dtype: DType | None = None,
    ) -> OperationHandle:
        """Start to gather the arrays of sources, in that order; counts: elements of each."""
        group = self._group
        edges = Edges((), tuple((one, -1) for one in targets), is_checked=is_checked)
        sizes = [count * array.itemsize for count in counts]
        return group.among_neighbors(
            ("neighbor_allgather", array.nbytes, *edges, *sizes, *sources),
            lambda: plans.neighbor_allgather(group.rank, edges, array.nbytes, sizes, sources),
            array, out, name=name, dtype=dtype, goes_on=self.goes_on,
        )  # fmt: skip

    def ends(
        self, src_ranks: Sequence[int] | None, dst_ranks: Sequence[int] | None
    ) -> tuple[list[int], list[int]]:
        """Check whom a call names, or take who is in the graph: sources, targets."""
        me, topology = self._group.rank, self.graph.topology
        if src_ranks is None and dst_ranks is None:
            return topology.in_neighbors(me), topology.out_neighbors(me)
        if src_ranks is None or dst_ranks is None:
            raise ValueError("src_ranks and dst_ranks are given both or not at all")
        for what, ranks in (("src_ranks", src_ranks), ("dst_ranks", dst_ranks)):
            check_peers(what, ranks, me, topology.size)
            if len(set(ranks)) != len(ranks):
                raise ValueError(f"{what} name somebody twice: {list(ranks)}")
        return list(src_ranks), list(dst_ranks)


def _sized(graph: Any, size: int, is_weighted: bool) -> Graph:
    topology: Topology = as_topology(graph)
    if topology.size != size:
        raise ArgumentError(
            f"the graph has {topology.size} nodes; it needs one for each of {size} members"
        )
    return Graph(topology, is_weighted)


def _floats(array: Array, dtype: DType | None) -> DType:
    code = dtype_of(array.dtype) if dtype is None else dtype
    ReduceOp.MIX.check(code)
    return code


def _check_coded(coding: Coding, how: Mixing, rule: Rule | None) -> None:
    if how.edges.n_copies:
        raise ValueError("what is encoded is sent as it is: give dst_weights without factors")
    if rule is not None and coding.has(Option.FEEDBACK):
        raise ValueError("a rule looks at what neighbors have, and with error feedback they send "
                         "differences: give compression without ef")  # fmt: skip


def _start_mix(
    group: Group, how: Mixing, array: Array, out: Array, name: str | None, dtype: DType | None
) -> OperationHandle:
    edges, code = how.edges, _floats(array, dtype)
    if group.size == 1:
        return _alone(group, how, array, out, code)
    return group.among_neighbors(
        ("neighbor_allreduce", array.nbytes, *edges),
        lambda: plans.neighbor_allreduce(group.rank, edges, array.nbytes, array.itemsize),
        array, out, name=name, dtype=code, divisor=len(edges.sources) + 1, weights=how.weights,
    )  # fmt: skip


def _start_trimmed(
    group: Group, how: Mixing, rule: OrderRule, array: Array, out: Array, name: str | None,
    dtype: DType | None,
) -> OperationHandle:  # fmt: skip
    """Start to combine; weights say only whose arrays, and what is sent."""
    edges, code = how.edges._replace(is_mean=True), _floats(array, dtype)
    trim = rule.trim_of(len(edges.sources) + 1)
    if group.size == 1:
        return _alone(group, Mixing(edges, ()), array, out, code)
    return group.among_neighbors(
        ("neighbor_trimmed_mean", array.nbytes, *edges),
        lambda: plans.neighbor_allreduce(group.rank, edges, array.nbytes, array.itemsize),
        array, out, name=name, dtype=code, divisor=trim,
        weights=how.weights if edges.n_copies else (),
    )  # fmt: skip


def _finish_mix(
    rule: Rule | None, arrays: Sequence[Array], own: int, weights: Sequence[float], out: Array,
    code: DType, *, is_mean: bool,
) -> Array:  # fmt: skip
    """Combine arrays that are there, as folds do while they come."""
    from fastps.reduce import reduce_kernel  # noqa: PLC0415  (few need kernels)

    if isinstance(rule, ClippingRule):
        return _clip(rule, arrays, own, weights, out, code)
    n, values = len(arrays), (ctypes.c_double * len(weights))(*weights)
    kind, args = ReduceOp.MIX, ctypes.byref(values)
    if rule is not None:
        trim = min(getattr(rule, "trim", n), (n - 1) // 2)  # of those that are left
        kind, args = ReduceOp.TRIMMED_MEAN, ctypes.byref(ctypes.c_int64(trim))
    elif is_mean:
        kind, args = ReduceOp.SUM, ctypes.byref(ctypes.c_int64(n))
    addresses = (ctypes.c_void_p * n)(*[one.ctypes.data for one in arrays])
    _RULE(reduce_kernel(kind, code))(addresses, n, out.ctypes.data, out.size, args)
    return out


def _clip(
    rule: ClippingRule, arrays: Sequence[Array], own: int, weights: Sequence[float], out: Array,
    code: DType,
) -> Array:  # fmt: skip
    """Mix with the weights that clipping makes, whatever cannot be used left out."""
    from fastps.reduce import distance_kernel, reduce_kernel  # noqa: PLC0415  (few need kernels)

    squares = (ctypes.c_double * len(arrays))()
    _run(distance_kernel(code), arrays, squares, out.size, ctypes.c_int64(own))
    found = clipped_weights(rule, own, weights, list(squares))
    used = [one == own or weight != 0.0 for one, weight in enumerate(found)]
    kept = list(itertools.compress(found, used))
    values = (ctypes.c_double * len(kept))(*kept)
    target = out.ctypes.data
    _run(reduce_kernel(ReduceOp.MIX, code), list(itertools.compress(arrays, used)), target,
         out.size, values)  # fmt: skip
    return out


def _run(kernel: int, arrays: Sequence[Array], target: Any, count: int, args: Any) -> None:
    addresses = (ctypes.c_void_p * len(arrays))(*[one.ctypes.data for one in arrays])
    _RULE(kernel)(addresses, len(arrays), target, count, ctypes.byref(args))


def _alone(group: Group, how: Mixing, array: Array, out: Array, code: DType) -> OperationHandle:
    """Do the operation of a job of one: what is our own has a weight too."""
    handle = group.allreduce(array, out, dtype=code)  # copies
    if how.weights:
        from fastps.reduce import reduce_kernel  # noqa: PLC0415  (few need kernels)

        kernel, weight = reduce_kernel(ReduceOp.MIX, code), ctypes.c_double(how.weights[0])
        _run(kernel, [out], out.ctypes.data, out.size, weight)
    return handle
