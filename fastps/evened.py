# SPDX-License-Identifier: Apache-2.0
"""Averages of push_pull() over those who take part, where some have run out of data.

They are made as n / k times that over all n, where k took part: see uneven.py, which knows who
did. Threads: any.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fastps.errors import FastPSError
from fastps.types import DType
from fastps.worker.handle import Array, Handle

if TYPE_CHECKING:
    from fastps.session import Session


class Evened:
    """What makes the averages of a push_pull() ones of those who took part, when they are there.

    Made when it has begun. It counts as one by all until then, since somebody may join while it
    is in flight.
    """

    def __init__(self, session: Session, name: str | Sequence[str]) -> None:
        """Note which operations on tensors the last ones are."""
        names = (name,) if isinstance(name, str) else name
        self._session = session
        self._begun = [(one, session.version_of(one)) for one in names]
        self._lock = threading.Lock()

    def make_even(self, outputs: Sequence[Array]) -> None:
        """Multiply the results, once; FastPSError for integers of which some are missing."""
        uneven = self._session.uneven
        if not uneven.has_rounds:
            return
        with self._lock:
            begun, self._begun = self._begun, []
            members = range(self._session.size)
            for (name, number), array in zip(begun, outputs):  # noqa: B905  (none the next time)
                factor = uneven.correction(name, number, members)
                known = self._session.started([name]) if factor != 1.0 else ()
                for _, spec in known:
                    if not spec.rule.has_meaning():  # which leaves out whom it likes
                        _multiply(name, array, DType(spec.dtype), factor)


def even(session: Session, handle: Handle, name: str | Sequence[str]) -> Handle:
    """Make the averages of a push_pull() that has just begun ones of those who take part."""
    return handle.then(Evened(session, name).make_even)


def _multiply(name: str, array: Array, code: DType, factor: float) -> None:
    """Multiply an average in place, half types in float32."""
    if code > DType.BFLOAT16:
        raise FastPSError(integers_text(name))
    if code is not DType.BFLOAT16 or array.dtype != np.uint16:
        array[...] = array.astype(np.result_type(array.dtype, np.float32)) * factor
        return
    wide = (array.astype(np.uint32) << 16).view(np.float32) * np.float32(factor)
    bits = wide.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    array[...] = np.where(np.isnan(wide), 0x7FC0, rounded)


def integers_text(name: str | int) -> str:
    """Say that an average of integers cannot be one of those who took part."""
    return (
        f"{name!r}: an average of integers was divided by all workers, and some have called "
        "join(): use a sum (op=Sum, average=False)"
    )
