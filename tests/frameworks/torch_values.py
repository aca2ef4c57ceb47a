# SPDX-License-Identifier: Apache-2.0
"""Values for the cases of torch_cases.py, and what operations should make of them."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

Op = dist.ReduceOp
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
MOVED = (
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16, torch.bool,
    *FLOATS, *INTEGERS,
)  # fmt: skip
SHAPES = ((0,), (1,), (), (3, 5), (1000,), (0, 3))
FOLD = {
    Op.SUM: np.add, Op.AVG: np.add, Op.MIN: np.minimum, Op.MAX: np.maximum,
    Op.PRODUCT: np.multiply, Op.BAND: np.bitwise_and, Op.BOR: np.bitwise_or,
    Op.BXOR: np.bitwise_xor,
}  # fmt: skip


def values(rank: int, shape, dtype) -> torch.Tensor:
    """Make small numbers that differ by rank and place; sums of them are exact in every dtype."""
    count = int(np.prod(shape))
    numbers = (torch.arange(count) * 3 + rank * 2 + 1) % 4
    return numbers.reshape(shape).to(dtype)


def reduced(op, shape, dtype, size) -> torch.Tensor:
    """Compute what all ranks should have, with NumPy."""
    wide = np.float64 if dtype in FLOATS else np.int64
    each = [values(r, shape, dtype).double().numpy().astype(wide) for r in range(size)]
    total = each[0]
    for other in each[1:]:
        total = FOLD[op](total, other)
    if op == Op.AVG:
        wide = np.float64 if dtype == torch.float64 else np.float32
        total = wide(1 / size) * total.astype(wide) if dtype in FLOATS else total // size
    return torch.as_tensor(total).to(dtype)


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    """Compare two tensors bit by bit, with what says why they differ."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape), (got.dtype, got.shape)
    if got.dtype in (torch.float8_e4m3fn, torch.uint16):
        got, want = (t.reshape(-1).view(torch.int8) for t in (got, want))
    assert torch.equal(got, want), (got, want)


def tables(floats_only=False):
    """Give each operator with each dtype that it has a meaning for."""
    for dtype in FLOATS + INTEGERS:
        for op in FOLD:
            if op in (Op.BAND, Op.BOR, Op.BXOR) and dtype in FLOATS:
                continue
            yield op, dtype
