# SPDX-License-Identifier: Apache-2.0
"""What codecs on servers keep of error feedback, for checkpoints: read to rank 0, written from it.

Decides how it is reached: beside a tensor with such a codec, for as long as that takes, there is
another one under whose name lies what the codec keeps. All workers call this alike, when no
operation of theirs on those tensors is in flight.
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
    """Return, on rank 0, what servers keep of each tensor, float32; None of those without. Blocks.

    None on the others. Bytes on the wire: 4 for each element, to rank 0.
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
    """Have servers keep what read() gave on rank 0, in place of what they have. Blocks.

    arrays: of rank 0. ValueError where they are others than the servers keep.
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
        raise ValueError(f"{wrong[0]!r}: this is not what its codec keeps on servers")


def _declare(names: Sequence[str]) -> dict[str, tuple[int]]:
    """Declare what is kept beside tensors, and give their shapes."""
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
    """Let nothing be left of the other tensors; nobody goes on before all is read or written."""
    if kept:
        current().barrier("residuals")
        current().forget(kept)
