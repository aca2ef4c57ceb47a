# SPDX-License-Identifier: Apache-2.0
"""The graphs of a session, of workers and of machines, and operations among neighbours on them.

Takes C-contiguous arrays, chooses edges and weights (weights.py) and steps (schedule.py), and
starts them on the group of all workers. Each worker sets its graphs by itself: nothing is
communicated when they change. Threads: any; operations without a name from one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastps.collectives.group import Group
from fastps.contract.codec import Coding, Option
from fastps.errors import ArgumentError
from fastps.graph import schedule as plans
from fastps.graph.combine import combine, mix
from fastps.graph.rules import ClippingRule, OrderRule, Rule, TrimmedMean
from fastps.graph.schedule import Edges
from fastps.graph.survivor_weights import is_of_columns, redirected, remaining, without
from fastps.graph.weights import Graph, Mixing, Targets, check_peers, mixing
from fastps.topology import Topology, as_topology, exponential_graph
from fastps.types import DType, ReduceOp, dtype_of
from fastps.worker.handle import Array, OperationHandle

if TYPE_CHECKING:
    from fastps.graph.edge_codecs import EdgeCodec

log = logging.getLogger(__name__)


class Neighbors:
    """Who this worker's neighbours are, and the operations among them.

    Each operation writes its result into `out` by the time its handle is done. pair: returns the
    group of this worker and another one. living: returns the group of all workers that are not
    lost. goes_on: operations leave lost workers out instead of failing.
    """

    def __init__(
        self, group: Group, pair: Callable[[int], Group], *, living: Callable[[], Group],
        goes_on: bool = False,
    ) -> None:  # fmt: skip
        self.goes_on = goes_on
        self._living, self._left = living, group  # kept with its prepared operations
        self._group = group
        self._pair = pair
        numbers = list(dict.fromkeys(group.machines))  # in the order of their first members
        self.machines = [
            tuple(rank for rank, there in enumerate(group.machines) if there == one)
            for one in numbers
        ]
        self.machine = numbers.index(group.machines[group.rank])
        self._graph: Graph | None = None
        self._machine_graph: Graph | None = None
        self._codecs: dict[str, EdgeCodec] = {}
        self._warned: set[Rule] = set()  # about too few arrays

    # ---- graphs ----

    @property
    def graph(self) -> Graph:
        """The graph of workers: an exponential one unless another was set."""
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
        """Set the graph of workers; None: the exponential one."""
        self._graph = None if graph is None else _sized(graph, self._group.size, is_weighted)

    def set_machine_graph(self, graph: Any, *, is_weighted: bool) -> None:
        """Set the graph of machines; None: the exponential one."""
        size = len(self.machines)
        self._machine_graph = None if graph is None else _sized(graph, size, is_weighted)

    # ---- operations ----

    def allreduce(
        self,
        array: Array,
        out: Array,
        *,
        rule: Rule | None = None,
        coding: Coding | None = None,
        consensus_step: float | None = None,
        self_weight: float | None = None,
        src_weights: Mapping[int, float] | None = None,
        dst_weights: Targets | None = None,
        is_checked: bool = True,
        name: str | None = None,
        dtype: DType | None = None,
    ) -> OperationHandle:
        """Start to mix our array with those of neighbours, or to combine them by a rule.

        coding: the codec that encodes what is sent. Arrays are folded as they arrive, unless a
        rule looks at whole arrays or lost workers are left out: those wait for all.
        """
        group, code = self._group, _floats(array, dtype)
        if not isinstance(rule, Rule | None):
            raise TypeError(
                f"rule={rule!r}: neighbors take fastps.TrimmedMean(b), CoordinateMedian(), "
                "SelfCentredClipping(radius) and AdaptiveClipping(share); those of "
                "fastps.byzantine are for what servers reduce, as push_pull()"
            )
        is_clipped = isinstance(rule, ClippingRule)
        is_gathered = coding is None and (is_clipped or self.goes_on)
        gone = group.gone() if self.goes_on and coding is None else ()
        own_weight, targets = redirected(self_weight, dst_weights, gone)
        how = mixing(self.graph, group.rank, own_weight, src_weights, targets,
                     is_checked=is_checked)  # fmt: skip
        if how.edges.n_copies and (coding is not None or is_clipped):
            raise ValueError(
                f"dst_weights={dst_weights!r} scale what is sent, and arrays that are encoded or "
                "clipped are sent as they are: give ranks, without factors"
            )
        if isinstance(rule, OrderRule):  # with lost workers too: then it ends without them
            rule.trim_of(len(how.edges.sources) + len(gone) + 1)
        if coding is not None:
            return self._start_coded(how, coding, consensus_step, rule, array, out, name, code)
        if is_gathered:
            return self._start_gathered(group, how, rule, array, out, name, code,
                                        keeps_sum=not is_of_columns(dst_weights))  # fmt: skip
        assert not isinstance(rule, ClippingRule)
        return _start_folded(group, how, rule, array, out, name, code)

    def _start_gathered(
        self, group: Group, how: Mixing, rule: Rule | None, array: Array, out: Array,
        name: str | None, code: DType, *, keeps_sum: bool = True,
    ) -> OperationHandle:  # fmt: skip
        """Start to gather whole arrays; those of neighbours lost midway are left out."""
        edges, me = how.edges, group.rank
        senders = [*edges.sources, *edges.ignored]
        rows = np.empty((len(senders), array.size), array.dtype)
        handle = group.among_neighbors(
            ("neighbor_gather", array.nbytes, *edges),
            lambda: plans.neighbor_allgather(
                me, edges, array.nbytes, [array.nbytes] * len(senders), senders),
            array, rows, name=name, dtype=code, weights=how.scales, goes_on=self.goes_on,
        )  # fmt: skip
        members = sorted((me, *edges.sources))
        arrays = dict(zip(senders, rows, strict=True)) | {me: array.reshape(-1)}

        def finish(_: object) -> None:
            lost = handle.missed
            left = [one for one in members if one not in lost]
            weights = remaining(
                how.shares, [one in left for one in members], members.index(me),
                keeps_sum=keeps_sum, is_trusted=rule is None,
            )  # fmt: skip
            self._check_enough(rule, len(left))
            combine(rule, [arrays[one] for one in left], left.index(me), weights, out, code,
                    is_mean=edges.is_mean and (keeps_sum or not lost))  # fmt: skip

        return handle.then(finish)

    def _start_coded(
        self, how: Mixing, coding: Coding, step: float | None, rule: Rule | None, array: Array,
        out: Array, name: str | None, code: DType,
    ) -> OperationHandle:  # fmt: skip
        """Start to send encoded blocks; the thread that waits decodes and combines them."""
        from fastps.graph import edge_codecs  # noqa: PLC0415  (few jobs need it)

        has_feedback = coding.has(Option.FEEDBACK)
        if rule is not None and has_feedback:
            raise ValueError(
                f"rule={rule!r} looks at arrays, and with error feedback neighbors send "
                "differences: give compression without ef"
            )
        group, me, edges = self._group, self._group.rank, how.edges
        step = edge_codecs.step_of(coding, array.size, step)
        codec = edge_codecs.codec_of(self._codecs, name, coding, code, array.size, me)
        x = edge_codecs.widened(array, code)
        senders = [*edges.sources, *edges.ignored]
        targets = [peer for peer, _ in edges.targets]
        blocks, places, known = codec.encode(x, targets, group.gone())
        rows = np.empty((len(senders), codec.stride), np.uint8)
        edges = edges._replace(targets=tuple(zip(targets, places, strict=True)))
        handle = group.among_neighbors(
            ("neighbor_coded", codec.wire_bytes, *edges),
            lambda: plans.neighbor_exchange(me, edges, codec.wire_bytes, codec.stride, senders),
            blocks, rows, name=name, dtype=DType.UINT8, goes_on=self.goes_on,
        )  # fmt: skip
        members = sorted((me, *edges.sources))

        def finish(_: object) -> None:
            decoded = codec.decode_all(rows, senders, handle.missed) | {me: x}
            left = [one for one in members if one in decoded]
            arrays, own = [decoded[one] for one in left], left.index(me)
            weights = remaining(
                how.shares, [one in decoded for one in members], members.index(me),
                is_trusted=rule is None,
            )  # fmt: skip
            if has_feedback:
                result = edge_codecs.moved(arrays, own, known, weights, step)
            else:
                result = np.empty(x.size, np.float32)
                self._check_enough(rule, len(left))
                combine(rule, arrays, own, weights, result, DType.FLOAT32, is_mean=edges.is_mean)
            edge_codecs.narrowed(result, out, code)

        return handle.then(finish)

    def _check_enough(self, rule: Rule | None, n: int) -> None:
        """Warn, once for each rule, where n arrays are too few for it, so that ours stays."""
        if isinstance(rule, TrimmedMean) and not rule.is_for(n) and rule not in self._warned:
            self._warned.add(rule)
            log.warning(
                "%r needs more than %d arrays, and lost workers leave %d, this worker's own "
                "counted: until more arrive, it keeps its own array", rule, 2 * rule.trim, n,
            )  # fmt: skip

    def pair_gossip(
        self,
        array: Array,
        out: Array,
        *,
        target: int,
        self_weight: float | None = None,
        pair_weight: float | None = None,
        name: str | None = None,
        dtype: DType | None = None,
    ) -> OperationHandle:
        """Start to mix our array with that of one other worker, which calls it too.

        Where the job goes on without lost workers and that one is lost, the result is our array.
        """
        check_peers("target_rank", [target], self._group.rank, self._group.size)
        if (self_weight is None) != (pair_weight is None):
            raise ValueError(
                f"self_weight={self_weight} and pair_weight={pair_weight}: give both or neither"
            )
        group, code = self._pair(target), _floats(array, dtype)
        own = 0.5 if self_weight is None else self_weight
        weights = {1 - group.rank: 0.5 if pair_weight is None else pair_weight}
        how = mixing(Graph(exponential_graph(2), False), group.rank, own, weights, [*weights],
                     is_checked=False)  # fmt: skip
        if self.goes_on:
            return self._start_gathered(group, how, None, array, out, name, code)
        return _start_folded(group, how, None, array, out, name, code)

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

        Workers that are lost when it starts are left out; one lost later makes it fail.
        """
        group = self._left = self._living() if self.goes_on else self._group
        machines = [tuple(group.ranks.index(one) for one in members if one in group.ranks)
                    for members in self.machines]  # fmt: skip
        gone = [index for index, members in enumerate(machines) if not members]
        self_weight, targets = redirected(self_weight, dst_machine_weights, gone)
        how = mixing(self.machine_graph, self.machine, self_weight, src_machine_weights, targets,
                     is_checked=is_checked)  # fmt: skip
        how = without(how, self.machine, gone, keeps_sum=not is_of_columns(dst_machine_weights))
        edges, code = how.edges, _floats(array, dtype)
        if group.size == 1:
            return _alone(group, how.weights, array, out, code)
        return group.among_neighbors(
            ("hierarchical_neighbor_allreduce", array.nbytes, *edges), lambda:
            plans.hierarchical_neighbor_allreduce(
                group.rank, machines, edges, array.nbytes, array.itemsize),
            array, out, name=name, dtype=code, divisor=len(machines[self.machine]),
            weights=(*how.shares, *how.scales),
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
        """Return the sources and targets that a call names, checked, or else the graph's."""
        me, topology = self._group.rank, self.graph.topology
        if src_ranks is None and dst_ranks is None:
            return topology.in_neighbors(me), topology.out_neighbors(me)
        if src_ranks is None or dst_ranks is None:
            raise ValueError(
                f"src_ranks={src_ranks} and dst_ranks={dst_ranks}: give both or neither"
            )
        for what, ranks in (("src_ranks", src_ranks), ("dst_ranks", dst_ranks)):
            check_peers(what, ranks, me, topology.size)
            if len(set(ranks)) != len(ranks):
                raise ValueError(f"{what}={list(ranks)} name a rank twice: name each once")
        return list(src_ranks), list(dst_ranks)


def _sized(graph: Any, size: int, is_weighted: bool) -> Graph:
    topology: Topology = as_topology(graph)
    if topology.size != size:
        raise ArgumentError(
            f"the graph has {topology.size} nodes; it needs {size}, one for each worker, or for "
            "each machine"
        )
    return Graph(topology, is_weighted)


def _floats(array: Array, dtype: DType | None) -> DType:
    code = dtype_of(array.dtype) if dtype is None else dtype
    ReduceOp.MIX.check(code)
    return code


def _start_folded(
    group: Group, how: Mixing, rule: OrderRule | None, array: Array, out: Array, name: str | None,
    code: DType,
) -> OperationHandle:  # fmt: skip
    """Start to fold arrays as they arrive.

    An order rule ignores the sizes of weights: they only choose sources and what is sent.
    """
    kind, edges, weights = "neighbor_allreduce", how.edges, how.weights
    divisor = len(edges.sources) + 1
    if rule is not None:
        kind, edges = "neighbor_trimmed_mean", edges._replace(is_mean=True)
        weights, divisor = weights if edges.n_copies else (), rule.trim_of(divisor)
    if group.size == 1:
        return _alone(group, weights, array, out, code)
    return group.among_neighbors(
        (kind, array.nbytes, *edges),
        lambda: plans.neighbor_allreduce(group.rank, edges, array.nbytes, array.itemsize),
        array, out, name=name, dtype=code, divisor=divisor, weights=weights,
    )  # fmt: skip


def _alone(
    group: Group, weights: Sequence[float], array: Array, out: Array, code: DType
) -> OperationHandle:
    """Do the operation in a group of one: this worker's array has a weight too."""
    handle = group.allreduce(array, out, dtype=code)  # copies
    if weights:
        mix([out], weights[:1], out, code)
    return handle
