# SPDX-License-Identifier: Apache-2.0
"""What travels under one name: a bucket of gradients, or one gradient where it lies.

Decides where gradients lie in memory and moves them between there and what is sent; starts no
communication. Two kinds with the same face. A FlatBucket owns an array, in shared memory where
the session has some, with one slot per gradient. As a view, a slot *is* p.grad: autograd adds to
it in place, and one that autograd made anew (after p.grad was None) is copied into it once.
Otherwise gradients are copied in and out, and cast on the way if the slots have a half type. A
LooseGradient sends p.grad itself, or what a compression makes of it.

Whatever the framework or its user did to p.grad before load() is sent, and nobody may change it
between load() and store(): store() notices. Used by one thread at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from fastps.errors import FastPSError
from fastps.frameworks.torch.compression import Compressor
from fastps.frameworks.torch.tensors import (
    Array,
    check_tensor,
    is_sendable,
    make_room,
    mark_written,
    sendable,
    tensor_over,
    version_of,
    view_of,
    wire_dtype,
)
from fastps.session import Session
from fastps.types import DType

__all__ = ["Bucket", "FlatBucket", "LooseGradient", "Memory", "Spec", "bucket_name", "slots_of"]

ALIGNMENT = 64  # bytes, of each slot: what the processor loads at once

Memory: TypeAlias = dict[int, str]  # address of a gradient in flight -> whose it is
Spec: TypeAlias = tuple[str, tuple[int, ...], DType]


class Bucket(Protocol):
    """What travels under one name."""

    name: str
    code: DType
    array: Array

    def spec(self) -> Spec:
        """Give what the session declares: name, shape and dtype of `array`."""

    def load(self, session: Session, memory: Memory) -> None:
        """Make `array` hold what is to be sent: gradients, zeros where there are none."""

    def store(self) -> None:
        """Make p.grad hold what is in `array` now; FastPSError where someone else wrote to it."""


@dataclass(frozen=True, slots=True)
class _Copied:
    """A gradient that stays where it is: to be checked, and written to, by store()."""

    gradient: torch.Tensor
    version: int


class FlatBucket:
    """Gradients side by side in one array.

    dtype: of the slots. is_view: let slots be gradients where dtype and layout allow it.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        *,
        dtype: torch.dtype,
        is_view: bool,
    ) -> None:
        self.name = name
        self.code = wire_dtype(dtype, name)
        self.array: Array
        self._parameters = parameters
        self._names = names
        self._dtype = dtype
        self._slots: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._skipped: set[int] = set()  # frozen ones: zeros are sent, nothing is written
        self._copied: dict[int, _Copied] = {}
        self._can_be_view = [
            is_view and parameter.dtype is dtype and is_sendable(parameter)
            for parameter in parameters
        ]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array: that of the gradient, if it is alone."""
        if len(self._parameters) == 1:
            return tuple(self._parameters[0].shape)
        return (sum(_counts_of(self._parameters, self._dtype)),)

    def spec(self) -> Spec:
        """Give name, shape and dtype of the array."""
        return self.name, self.shape, self.code

    def make_room(self, session: Session) -> None:
        """Make the array and its slots; load() does it if nobody has."""
        if self._slots:
            return
        if len(self._parameters) == 1:
            count = self._parameters[0].numel()
            self.array = make_room(session, count, self.code).reshape(self.shape)
        else:
            self.array = make_room(session, self.shape[0], self.code)
        self._slots = slots_of(self.array.reshape(-1), self._parameters, self._dtype)

    def load(self, session: Session, memory: Memory) -> None:
        """Copy gradients that are not slots into theirs; make slots gradients where that goes."""
        self.make_room(session)
        self._copied.clear()
        self._skipped.clear()
        found: list[tuple[int, torch.Tensor]] = []
        for place, (parameter, slot) in enumerate(zip(self._parameters, self._slots, strict=True)):
            gradient = parameter.grad
            if gradient is slot:
                continue
            if gradient is not None and parameter.requires_grad:
                if gradient.layout is not torch.strided or not gradient.is_cpu:  # the quick test
                    check_tensor(gradient, self._names[place])
                found.append((place, gradient))
                continue
            slot.zero_()
            if parameter.requires_grad:
                self._adopt(place, None, memory)
            else:
                self._skipped.add(place)
        if found:
            self._take(found, memory)
        torch.autograd.graph.increment_version(self._slots)  # results land in them unseen
        self._versions = [slot._version for slot in self._slots]

    def _take(self, found: Sequence[tuple[int, torch.Tensor]], memory: Memory) -> None:
        """Copy gradients into their slots, all in one call."""
        with torch.no_grad():
            torch._foreach_copy_(
                [self._slots[place] for place, _ in found], [gradient for _, gradient in found]
            )
        for place, gradient in found:
            self._adopt(place, gradient, memory)

    def _adopt(self, place: int, gradient: torch.Tensor | None, memory: Memory) -> None:
        """Make the slot the gradient; one that autograd follows, or of another kind, stays."""
        parameter = self._parameters[place]
        if self._can_be_view[place] and (gradient is None or not gradient.requires_grad):
            parameter.grad = self._slots[place]
            return
        if gradient is None:
            gradient = parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        _check_alone(gradient, self._names[place], memory)
        self._copied[place] = _Copied(gradient, version_of(gradient))

    def store(self) -> None:
        """Check that gradients are as load() left them, and copy results to those not slots."""
        for place, (parameter, slot) in enumerate(zip(self._parameters, self._slots, strict=True)):
            gradient = parameter.grad
            if gradient is slot:
                is_same = slot._version == self._versions[place]
            elif place in self._copied:
                copied = self._copied[place]
                is_same = gradient is copied.gradient and version_of(gradient) == copied.version
            else:
                is_same = place in self._skipped
            if not is_same:
                raise _changed(self._names[place])
        if self._copied:
            with torch.no_grad():
                torch._foreach_copy_(
                    [copied.gradient for copied in self._copied.values()],
                    [self._slots[place] for place in self._copied],
                )


class LooseGradient:
    """One gradient, sent from where autograd has put it if it is contiguous."""

    def __init__(self, name: str, parameter: torch.Tensor, compression: Compressor) -> None:
        self.name = name
        self.code: DType
        self.array: Array
        self._parameter = parameter
        self._compression = compression
        self._loaded: tuple[_Copied, torch.Tensor, Any, bool]

    def spec(self) -> Spec:
        """Give name, shape and dtype of the gradient, which nothing compresses."""
        parameter = self._parameter
        return self.name, tuple(parameter.shape), wire_dtype(parameter.dtype, self.name)

    def load(self, session: Session, memory: Memory) -> None:
        """Make the tensor to send: the gradient itself where possible, zeros where is none."""
        parameter = self._parameter
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        gradient = parameter.grad
        check_tensor(gradient, self.name)
        _check_alone(gradient, self.name, memory)
        plain = gradient.detach()
        compressed, context = self._compression.compress(plain)
        wire = sendable(compressed)
        is_in_place = wire is plain
        if is_in_place:
            mark_written(gradient)
        copied = _Copied(gradient, version_of(gradient))
        self._loaded = copied, wire, context, is_in_place
        self.array, self.code = view_of(wire), wire_dtype(wire.dtype, self.name)

    def store(self) -> None:
        """Write the result into the gradient, if nobody has touched it meanwhile."""
        copied, wire, context, is_in_place = self._loaded
        gradient = self._parameter.grad
        if gradient is not copied.gradient or version_of(gradient) != copied.version:
            raise _changed(self.name)
        if not is_in_place:
            with torch.no_grad():
                gradient.copy_(self._compression.decompress(wire, context))
        del self._loaded, self.array  # what a compression made may go


def bucket_name(names: Sequence[str], shapes: Sequence[Sequence[int]]) -> str:
    """Name a bucket by its first gradient, and so that only the same gradients give the same."""
    if len(names) == 1:
        return names[0]
    text = repr([(name, tuple(shape)) for name, shape in zip(names, shapes, strict=True)])
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{names[0]} and {len(names) - 1} more ({digest})"


def slots_of(
    array: Array, tensors: Sequence[torch.Tensor], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Cut a flat array into one tensor of a dtype for each of the tensors, of its shape.

    Every slot has a version counter of its own.
    """
    slots, first = [], 0
    counts = _counts_of(tensors, dtype) if len(tensors) > 1 else [tensors[0].numel()]
    for tensor, count in zip(tensors, counts, strict=True):
        part = array[first : first + tensor.numel()]
        slots.append(tensor_over(part.reshape(tuple(tensor.shape)), dtype))
        first += count
    return slots


def _counts_of(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[int]:
    """Count the elements of each slot, with what aligns the next one."""
    unit = ALIGNMENT // dtype.itemsize
    return [-(-tensor.numel() // unit) * unit for tensor in tensors]


def _check_alone(gradient: torch.Tensor, name: str, memory: Memory) -> None:
    """Refuse a gradient whose memory is in flight already, as another parameter's."""
    other = memory.setdefault(gradient.data_ptr(), name)
    if other != name and gradient.numel():
        raise FastPSError(
            f"{other!r} and {name!r} are one piece of memory, as torch makes it when two "
            "parameters are reshaped and then added: add parameter.clone() instead of one of "
            "the two"
        )


def _changed(name: str) -> FastPSError:
    """Make the error for a gradient that was written to, or replaced, while in flight."""
    return FastPSError(
        f"{name!r} was changed while it was being communicated: call optimizer.synchronize() "
        "before clipping, unscaling, zeroing or replacing gradients (with "
        "DistributedDataParallel, do so when backward() has returned)"
    )
