# SPDX-License-Identifier: Apache-2.0
"""The operations of fastps/ops/neighbors.py on torch tensors, or on lists of them.

Tensors are of floats, contiguous or not; they are not changed, except by average_parameters().
Results are on the tensors' devices. Threads: as in ops/neighbors.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack, overload

import torch

from fastps.contract.compression import Choice
from fastps.frameworks.torch.ops.tensors import (
    check_tensor,
    sendable,
    tensor_over,
    view_of,
    wire_dtype,
    write_over,
)
from fastps.graph.neighbors import Neighbors
from fastps.graph.rules import Rule
from fastps.graph.weights import Targets
from fastps.ops import neighbors as ops
from fastps.ops.numpy_collectives import make_waiting
from fastps.session.current import current
from fastps.types import DType
from fastps.worker.handle import Array, Handle, MappedHandle, Waitable

if TYPE_CHECKING:
    from fastps.graph.survivor_rounds import Agreed

Tensors: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
StartMix: TypeAlias = Callable[..., Waitable]  # of fastps.graph.neighbors.Neighbors


@overload
def neighbor_allreduce_async(
    tensor: torch.Tensor, **options: Unpack[ops.MixOptions]
) -> Handle[torch.Tensor]: ...


@overload
def neighbor_allreduce_async(
    tensor: Sequence[torch.Tensor], **options: Unpack[ops.MixOptions]
) -> Handle[list[torch.Tensor]]: ...


def neighbor_allreduce_async(
    tensor: Tensors,
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
    """Start neighbor_allreduce() and return a handle for synchronize(); does not block."""
    return start_mix(
        tensor, name, ops.start_neighbor_allreduce, self_weight=self_weight,
        src_weights=src_weights, dst_weights=dst_weights, rule=rule, compression=compression,
        consensus_step=consensus_step, is_checked=enable_topo_check,
    )  # fmt: skip


neighbor_allreduce: ops.Mix[torch.Tensor] = make_waiting(  # type: ignore[assignment]
    neighbor_allreduce_async,
    """Return the weighted average of this worker's tensor and its neighbours'; blocks.

    Keywords and meaning as fastps.neighbor_allreduce().
    """,
)


@overload
def hierarchical_neighbor_allreduce_async(
    tensor: torch.Tensor, **options: Unpack[ops.MachineMixOptions]
) -> Handle[torch.Tensor]: ...


@overload
def hierarchical_neighbor_allreduce_async(
    tensor: Sequence[torch.Tensor], **options: Unpack[ops.MachineMixOptions]
) -> Handle[list[torch.Tensor]]: ...


def hierarchical_neighbor_allreduce_async(
    tensor: Tensors,
    *,
    self_weight: float | None = None,
    src_machine_weights: Mapping[int, float] | None = None,
    dst_machine_weights: Targets | None = None,
    enable_topo_check: bool = True,
    name: str | None = None,
) -> Handle[Any]:
    """Start hierarchical_neighbor_allreduce() and return a handle for synchronize()."""
    return start_mix(
        tensor, name, Neighbors.hierarchical_allreduce, self_weight=self_weight,
        src_machine_weights=src_machine_weights, dst_machine_weights=dst_machine_weights,
        is_checked=enable_topo_check,
    )  # fmt: skip


hierarchical_neighbor_allreduce: ops.MachineMix[torch.Tensor] = make_waiting(  # type: ignore[assignment]
    hierarchical_neighbor_allreduce_async,
    """Average inside each machine, and mix the averages of neighbouring machines; blocks.

    Keywords and meaning as fastps.hierarchical_neighbor_allreduce().
    """,
)


@overload
def pair_gossip_async(
    tensor: torch.Tensor, target_rank: int, **options: Unpack[ops.GossipOptions]
) -> Handle[torch.Tensor]: ...


@overload
def pair_gossip_async(
    tensor: Sequence[torch.Tensor], target_rank: int, **options: Unpack[ops.GossipOptions]
) -> Handle[list[torch.Tensor]]: ...


def pair_gossip_async(
    tensor: Tensors,
    target_rank: int,
    *,
    self_weight: float | None = None,
    pair_weight: float | None = None,
    name: str | None = None,
) -> Handle[Any]:
    """Start pair_gossip() and return a handle for synchronize()."""
    return start_mix(
        tensor, name, Neighbors.pair_gossip, target=target_rank, self_weight=self_weight,
        pair_weight=pair_weight,
    )  # fmt: skip


pair_gossip: ops.Gossip[torch.Tensor] = make_waiting(  # type: ignore[assignment]
    pair_gossip_async,
    "Return the average, or weighted sum, of this worker's tensor and one other's; blocks.",
)


def neighbor_allgather_async(
    tensor: torch.Tensor,
    *,
    src_ranks: Sequence[int] | None = None,
    dst_ranks: Sequence[int] | None = None,
    enable_topo_check: bool = True,
    name: str | None = None,
) -> Handle[torch.Tensor]:
    """Start neighbor_allgather(); blocks until the sources have sent their first dimensions."""
    source = sendable(check_tensor(tensor, name or "tensor"))
    handle, _ = ops.start_neighbor_allgather(
        view_of(source), src_ranks, dst_ranks, name, is_checked=enable_topo_check,
        dtype=wire_dtype(source.dtype, name or "tensor"),
    )  # fmt: skip
    return MappedHandle(
        [handle], lambda found: tensor_over(found[0], tensor.dtype).to(tensor.device)
    )


neighbor_allgather = make_waiting(
    neighbor_allgather_async,
    "Return the neighbours' tensors, concatenated, as fastps.neighbor_allgather(); blocks.",
)


def start_mix(
    tensor: Tensors,
    name: str | None,
    mix: StartMix,
    outs: Sequence[Array] | None = None,
    **how: Any,
) -> Handle[Any]:
    """Start an operation of Neighbors on a tensor or several; small ones travel together.

    outs: arrays for the results; None: new ones.
    """
    is_one = not isinstance(tensor, Sequence)
    given = [tensor] if isinstance(tensor, torch.Tensor) or is_one else list(tensor)
    some = [check_tensor(one, name or "tensor") for one in given]
    sources = [sendable(one) for one in some]
    codes = [wire_dtype(one.dtype, name or "tensor") for one in sources]
    handle = ops.start_fused([view_of(one) for one in sources], codes, name, mix, outs, **how)

    def finish(found: list[Any]) -> Any:
        tensors = [tensor_over(one, source.dtype).to(source.device)
                   for one, source in zip(found[0], some, strict=True)]  # fmt: skip
        return tensors[0] if is_one else tensors

    return MappedHandle([handle], finish)


def average_parameters(
    params: Mapping[str, torch.Tensor] | Sequence[tuple[str, torch.Tensor]],
) -> None:
    """Overwrite tensors on all workers with their average over all; skip integers.

    params: model.state_dict() or pairs of names and tensors, the same on all workers. Where the
    job goes on without lost workers, the average is over the survivors.
    """
    from fastps.frameworks.torch.ops.collectives import grouped_allreduce_  # noqa: PLC0415

    pairs = params.items() if isinstance(params, Mapping) else params
    tensors = [tensor.detach() for _, tensor in pairs if tensor.is_floating_point()]
    if current().config.goes_on:
        agreed = current().groups.agreed("average_parameters")
        found = start_mix(tensors, "average_parameters", partial(mean_of_those_left, agreed))
        agreed.finish()
        for tensor, mean in zip(tensors, found.wait(), strict=True):
            write_over(tensor, mean)
        return
    grouped_allreduce_(tensors)


def mean_of_those_left(
    agreed: Agreed, _neighbors: Neighbors, array: Array, out: Array, *, name: str | None,
    dtype: DType | None,
) -> Handle[Array]:  # fmt: skip
    """Start the mean over all survivors; it is complete when the round is finished."""
    agreed.start(lambda group: group.allreduce(array, out, name=name, dtype=dtype))
    return MappedHandle([], lambda _: out)
