# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the servers' error feedback: read it to rank 0, and write it from there.

While it is read or written, a second tensor exists beside each tensor with error feedback; its
value is the codec's state. All workers call these functions, with no operation of theirs on those
tensors in flight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fastps.contract.codec import Option
from fastps.contract.contract import Policy
from fastps.session.current import current
from fastps.types import DType
from fastps.worker.handle import Array


def read(names: Sequence[str]) -> list[Array | None] | None:
    """Return the servers' codec state of each tensor on rank 0, as float32; blocks.

    A tensor without codec state has None. Returns None on other ranks. Bytes on the wire: 4 for
    each element, to rank 0.
    """
    beside = _declare(names)
    found = [np.zeros(beside[name], np.float32) if name in beside else None for name in names]
    kept = [f"{name} kept" for name in beside]
    if current().rank == 0 and kept:
        arrays = [one for one in found if one is not None]
        current().start_held("start_pull", kept, arrays).wait()
    _forget(kept)
    return None if current().rank else found


def write(names: Sequence[str], arrays: Sequence[Array | None] | None) -> None:
    """Replace the servers' codec state by that of read(); blocks.

    arrays: used on rank 0. ValueError if shapes differ from the servers'.
    """
    beside = _declare(names)
    given = dict(zip(names, arrays or (), strict=False))
    wrong = [
        name for name, shape in beside.items()
        if current().rank == 0 and np.shape(given.get(name)) != shape  # type: ignore[arg-type]
    ]  # fmt: skip
    if current().rank == 0 and not wrong:
        for name in beside:
            array = np.ascontiguousarray(given[name], np.float32)
            current().push_pull(array, f"{name} kept", average=False, out=array.copy())
    _forget([f"{name} kept" for name in beside])
    if wrong:
        raise ValueError(
            f"tensor {wrong[0]!r}: the state has not the shape of its codec's on the servers; "
            "create LocalSGD with the options of the one that was saved"
        )


def _declare(names: Sequence[str]) -> dict[str, tuple[int]]:
    """Declare the tensors of codec state, and return their shapes by the first tensors' names."""
    shapes: dict[str, tuple[int]] = {}
    for tensor, layout in current().started(names):
        if layout.coding.has(Option.FEEDBACK) and layout.policy is Policy.SUM:
            shapes[tensor.name] = (math.prod(layout.shape),)
            current().declare(
                [(f"{tensor.name} kept", shapes[tensor.name], DType.FLOAT32)],
                policy=Policy.CODEC_STATE, beside=tensor.name,
            )  # fmt: skip
    return shapes


def _forget(kept: Sequence[str]) -> None:
    """Forget the tensors of codec state, once all workers have read or written them."""
    if kept:
        current().barrier("residuals")
        current().forget(kept)
