# SPDX-License-Identifier: Apache-2.0
"""Factors of results: averages over those who take part, where some have run out of data.

They are made as n / k times that over all n, where k took part: see uneven.py, which knows who
did. All faces multiply by scale(), so that ranks have the same bits. Threads: any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fastps._floats import DefaultFloats
from fastps.errors import FastPSError
from fastps.types import DType
from fastps.worker.handle import Array, Handle

if TYPE_CHECKING:
    from fastps.uneven import Uneven
    from fastps.worker._tensor import Ticket


def make_even(uneven: Uneven, tickets: Sequence[Ticket], outputs: Sequence[Array]) -> None:
    """Multiply the results of a push_pull() that is over, whose tickets these are.

    They count as averages by all until then, since somebody may join while they are in flight.
    FastPSError for integers of which some are missing.
    """
    if not uneven.has_rounds:
        return
    for ticket, array in zip(tickets, outputs, strict=True):
        factor = uneven.correction_of(ticket)
        known = uneven.started(ticket.name) if factor != 1.0 else ()
        for _, layout in known:
            if not layout.rule.has_meaning():  # which leaves out whom it likes
                if layout.dtype > DType.BFLOAT16:
                    raise FastPSError(integers_text(ticket.name))
                scale(array, DType(layout.dtype), factor)


def even(uneven: Uneven, handle: Handle) -> Handle:
    """Make the averages of a push_pull() ones of those who take part."""

    tickets = handle.tickets  # the handle itself would be in a circle

    def after(result: Array | Sequence[Array]) -> None:
        make_even(uneven, tickets, [result] if isinstance(result, np.ndarray) else result)

    return handle.then(after)


def scale(array: Array, code: DType, factor: float) -> None:
    """Multiply an array in place: half types in float32, integers in float64 and cut.

    bfloat16 as uint16, or as ml_dtypes has it. On this thread, in the floating-point state of the
    kernels: frameworks have threads that flush subnormal numbers to zero, and not on all workers
    alike.
    """
    with DefaultFloats():
        if code is DType.BFLOAT16 and array.dtype == np.uint16:
            _scale_bfloat16(array, factor)
        elif code in (DType.FLOAT16, DType.BFLOAT16):
            array[...] = array.astype(np.float32) * np.float32(factor)
        elif array.dtype.kind in "fc":
            np.multiply(array, factor, out=array)
        else:
            array[...] = (array * np.float64(factor)).astype(array.dtype)


def _scale_bfloat16(array: Array, factor: float) -> None:
    wide = (array.astype(np.uint32) << np.uint32(16)).view(np.float32) * np.float32(factor)
    bits = wide.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)  # ties go to even
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    array[...] = np.where(np.isnan(wide), np.uint32(0x7FC0), rounded)


def integers_text(name: str | int) -> str:
    """Say that an average of integers cannot be one of those who took part."""
    return (
        f"{name!r}: an average of integers was divided by all workers, and some have called "
        "join(): use a sum (op=Sum, average=False)"
    )
