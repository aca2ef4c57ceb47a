# SPDX-License-Identifier: Apache-2.0
"""What a job of one worker without servers does with tensors: everything, at once. Pure."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from fastps.byzantine import rules
from fastps.control.protocol import Layout, TensorSpec
from fastps.errors import DuplicateNameError, MismatchError
from fastps.session.tensor_spec import describe
from fastps.types import DType
from fastps.worker.handle import Array


class SingleTicket:
    """What a handle of one worker waits for: nothing; it remembers that somebody did."""

    __slots__ = ("__weakref__", "_is_over", "name", "version")

    def __init__(self, name: str) -> None:
        self.name, self.version = name, 0
        self._is_over = False

    @property
    def is_done(self) -> bool:
        """Return True, which ends the operation."""
        self._is_over = True
        return True

    def wait(self, *, timeout_s: float, spin_us: int) -> int:
        """Return the status of what is done."""
        self._is_over = True
        return 0

    @property
    def is_aloft(self) -> bool:
        """Return whether nobody has asked for the result yet."""
        return not self._is_over


class Tensors:
    """What a worker alone has declared, and what has a handle that nobody has waited for."""

    def __init__(self) -> None:
        self.layouts: dict[str, Layout] = {}
        self._tickets: weakref.WeakValueDictionary[str, SingleTicket] = (
            weakref.WeakValueDictionary()
        )

    def declare(self, wanted: Sequence[TensorSpec]) -> None:
        """Note what is declared. Raises MismatchError where it was declared differently."""
        for spec in wanted:
            before = self.layouts.setdefault(spec.name, spec.layout)
            if before != spec.layout:
                raise MismatchError(
                    f"tensor {spec.name!r} was declared as {_side(before)} and is now "
                    f"{_side(spec.layout)}; use another name"
                )

    def begin(self, names: Sequence[str]) -> list[SingleTicket]:
        """Start an operation on each; DuplicateNameError where one is in flight."""
        for name in names:
            before = self._tickets.get(name)
            if before is not None and before.is_aloft:
                raise DuplicateNameError(
                    f"tensor {name!r} is already in flight; wait for its handle first, or use "
                    "another name"
                )
        begun = [SingleTicket(name) for name in names]
        self._tickets.update(zip(names, begun, strict=True))
        return begun

    def finish(
        self, names: Sequence[str], arrays: Sequence[Array], outputs: Sequence[Array]
    ) -> None:
        """Write into each output what comes of the only worker's array."""
        for name, array, output in zip(names, arrays, outputs, strict=True):
            layout = self.layouts[name]
            if output is not array:
                np.copyto(output, array)
            rules.apply_alone(layout.rule, output, DType(layout.dtype))


def _side(layout: Layout) -> str:
    text = f"{describe(layout.dtype, layout.shape)} ({layout.rule})"
    inside = ", ".join(f"{name!r} {describe(code, shape)}" for name, code, shape in layout.parts)
    return f"{text} for {inside}" if inside else text
