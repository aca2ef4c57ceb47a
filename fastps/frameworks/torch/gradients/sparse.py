# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients, which have values for some rows only, as nn.Embedding(sparse=True) makes them.

All members gather row numbers and rows; values of one row are added in the order of members, so
all get the same bits; on the CPU, as a device would add them in any order. Bytes that a member
sends: its rows, and 8 for each row's number, times n - 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastps.frameworks.torch.ops.tensors import check_tensor, require_array, tensor_over, view_of
from fastps.ops import start as ops
from fastps.ops.start import Average
from fastps.session.process_sets import ProcessSet
from fastps.types import DType, Op
from fastps.worker.handle import MappedHandle


class SparseSum(MappedHandle[torch.Tensor]):
    """The handle of a sum of sparse tensors; callable, as Horovod's is."""

    def __call__(self) -> torch.Tensor:
        """Wait for the sum and return it."""
        return self.wait()


def start_rows(
    gradient: torch.Tensor, op: Op, name: str | None, process_set: ProcessSet
) -> SparseSum:
    """Start to add a sparse tensor over all members; the result is sparse and coalesced."""
    if require_array(gradient, name).layout is not torch.sparse_coo:
        what = f"tensor {name!r}" if name else "the tensor"
        raise TypeError(
            f"{what} has layout {gradient.layout}, and this operation needs torch.sparse_coo: use "
            "allreduce()"
        )
    own = _on_cpu(gradient.detach()).coalesce()
    values = own.values().contiguous()
    wire = torch.view_as_real(values) if values.is_complex() else values
    check_tensor(wire, name or "tensor")
    code = DType[str(wire.dtype).removeprefix("torch.").upper()]
    places = view_of(own.indices().t().contiguous())
    handle = ops.start_allgather_alike(
        [places, view_of(wire)], name, process_set, dtypes=[DType.INT64, code]
    )

    def finish(found: list[Any]) -> torch.Tensor:
        where, what = found[0]
        total = tensor_over(what, wire.dtype)
        total = torch.view_as_complex(total) if values.is_complex() else total
        divisor = process_set.size() if op is Average else 1
        places = torch.from_numpy(where).t()
        return _coalesced(places, total, gradient.shape, divisor, gradient.device)

    return SparseSum([handle], finish)


def rows_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient as rows: of a dense one the nonzero rows; no rows for None."""
    gradient = parameter.grad
    if gradient is None:
        nothing = torch.empty((1, 0), dtype=torch.long, device=parameter.device)
        return torch.sparse_coo_tensor(
            nothing, parameter.new_empty((0, *parameter.shape[1:])), parameter.shape
        )
    return gradient.detach() if gradient.is_sparse else gradient.detach().to_sparse(1)


class SparseExchange:
    """The exchange of one gradient's rows."""

    def __init__(
        self, parameter: torch.Tensor, op: Op, name: str, process_set: ProcessSet
    ) -> None:
        self._parameter = parameter
        self._handle = start_rows(rows_of(parameter), op, name, process_set)
        self.wait: Callable[..., object] = self._handle.wait

    def store(self) -> None:
        """Write the result to p.grad."""
        self._parameter.grad = self._handle.wait()


def _on_cpu(sparse: torch.Tensor) -> torch.Tensor:
    """Return a sparse tensor on the CPU, itself if it is there."""
    if sparse.is_cpu:
        return sparse
    return torch.sparse_coo_tensor(
        sparse._indices().cpu(), sparse._values().cpu(), sparse.shape,
        is_coalesced=sparse.is_coalesced(), check_invariants=False,
    )  # fmt: skip


def _coalesced(
    places: torch.Tensor,
    values: torch.Tensor,
    shape: torch.Size,
    divisor: int,
    device: torch.device,
) -> torch.Tensor:
    """Add the values of each row in order; torch's coalesce() guarantees no order."""
    unique, where = torch.unique(places, dim=1, return_inverse=True)
    total = values.new_zeros((unique.shape[1], *values.shape[1:])).index_add_(0, where, values)
    if divisor != 1:
        total = (total / divisor).to(values.dtype)
    return torch.sparse_coo_tensor(
        unique.to(device), total.to(device), shape, is_coalesced=True, check_invariants=False
    )
