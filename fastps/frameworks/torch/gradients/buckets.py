# SPDX-License-Identifier: Apache-2.0
"""What travels under one name: a bucket of gradients side by side, or one gradient in place.

Decides where gradients lie in memory and copies them to and from the arrays that are sent; starts
no communication. There are two kinds with one interface. A FlatBucket owns an array, in shared
memory where the session has some, with one slot per gradient. As a view, a slot *is* p.grad:
autograd adds to it in place, and a new tensor of autograd (after p.grad was None) is copied into
it once. Otherwise gradients are copied in and out, and cast if the slots have a half type; so are
all on a device. A LooseGradient sends p.grad itself, or the compressed p.grad, or a copy on the
host.

load() takes p.grad as it is then; between load() and store() it must not change, and store()
checks that. A tensor may get other memory and stay the same object (p.grad.data = x,
module.bfloat16(), share_memory()), so addresses are compared as well. Used by one thread at a
time.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from fastps.errors import FastPSError
from fastps.frameworks.torch.ops.compression import Compressor
from fastps.frameworks.torch.ops.tensors import (
    Array,
    check_tensor,
    copy_each,
    is_sendable,
    make_room,
    mark_written,
    real_of,
    sendable,
    tensor_over,
    version_of,
    view_of,
    wire_dtype,
)
from fastps.session.session import Session
from fastps.types import DType

ALIGNMENT = 64  # bytes, of each slot: a cache line

Memory: TypeAlias = dict[int, str]  # address of a gradient in flight -> name of its parameter
Spec: TypeAlias = tuple[str, tuple[int, ...], DType]

# Once per gradient and step: map() takes half the time of a loop.
_gradient_of = attrgetter("grad")
_version_of = attrgetter("_version")
_address_of = torch.Tensor.data_ptr


class Bucket(Protocol):
    """What travels under one name; parameters: those whose gradients it holds."""

    name: str
    code: DType
    array: Array
    parameters: Sequence[torch.Tensor]

    def spec(self) -> Spec:
        """Return name, shape and dtype of `array`, for session.declare()."""

    def load(self, session: Session, memory: Memory) -> None:
        """Fill `array` with the gradients, and zeros where there are none."""

    def wrote(self, gradient: torch.Tensor) -> bool:
        """Return whether the last store() wrote to this very tensor."""

    def store(self) -> None:
        """Write `array` to p.grad; FastPSError if p.grad has changed since load()."""


class _Copied(NamedTuple):
    """A gradient that stays where it is: to be checked, and written to, by store()."""

    gradient: torch.Tensor
    version: int
    address: int


def _is_same(gradient: torch.Tensor | None, copied: _Copied) -> bool:
    """Return whether a gradient was neither replaced nor written to, nor got other memory."""
    return (
        gradient is copied.gradient
        and version_of(gradient) == copied.version
        and gradient.data_ptr() == copied.address
    )


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
        self.parameters = parameters
        self._names = names
        self._kind = parameters[0].dtype
        self._dtype = dtype
        self._slots: list[torch.Tensor] = []
        self._addresses: list[int] = []  # of the slots, while they lie over the array
        self._versions: list[int] = []
        self._skipped: set[int] = set()  # frozen ones: zeros are sent, nothing is written
        self._left_out: frozenset[int] = frozenset()  # sparse ones, which travel as rows
        self._copied: dict[int, _Copied] = {}
        self._copy_each: Callable[..., object] = torch._foreach_copy_
        self._can_be_view = [
            is_view and parameter.dtype is dtype and is_sendable(parameter)
            for parameter in parameters
        ]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array: that of the gradient, if it is alone."""
        if len(self.parameters) == 1:
            return tuple(self.parameters[0].shape)
        return (sum(_counts_of(self.parameters, self._dtype)),)

    def spec(self) -> Spec:
        """Return name, shape and dtype of the array."""
        return self.name, self.shape, self.code

    def leave_out(self, places: Iterable[int]) -> None:
        """Send zeros in the slots of gradients that travel as rows from now on."""
        self._left_out = frozenset(places)

    def make_room(self, session: Session) -> None:
        """Allocate the array and its slots, unless they exist; load() does so too."""
        if self._slots:
            return
        if len(self.parameters) == 1:
            count = self.parameters[0].numel()
            self.array = make_room(session, count, self.code).reshape(self.shape)
        else:
            self.array = make_room(session, self.shape[0], self.code)
        self._slots = slots_of(self.array.reshape(-1), self.parameters, self._dtype)
        self._addresses = list(map(_address_of, self._slots))

    def load(self, session: Session, memory: Memory) -> None:
        """Copy gradients into their slots, and make the slots p.grad where that is possible."""
        self.make_room(session)
        if list(map(_address_of, self._slots)) != self._addresses:
            self._renew_slots()
        self._copied.clear()
        self._skipped.clear()
        self._copy_each = torch._foreach_copy_
        found: list[tuple[int, torch.Tensor]] = []
        for place, (parameter, slot) in enumerate(zip(self.parameters, self._slots, strict=True)):
            gradient = parameter.grad
            if gradient is slot:
                continue
            if place in self._left_out:
                slot.zero_()
                self._skipped.add(place)
                continue
            if gradient is not None and parameter.requires_grad:
                if gradient.layout is not torch.strided or not gradient.is_cpu:  # the quick test
                    check_tensor(gradient, self._names[place])
                    self._copy_each = copy_each
                found.append((place, gradient))
                continue
            slot.zero_()
            if parameter.requires_grad:
                self._adopt(place, None, memory)
            else:
                self._skipped.add(place)
        if found:
            self._take(found, memory)
        torch.autograd.graph.increment_version(self._slots)  # see mark_written()
        self._versions = list(map(_version_of, self._slots))

    def _renew_slots(self) -> None:
        """Replace slots that a user gave other memory; those are the user's gradients now."""
        fresh = slots_of(self.array.reshape(-1), self.parameters, self._dtype)
        for place, (slot, address) in enumerate(zip(self._slots, self._addresses, strict=True)):
            if slot.data_ptr() != address:
                self._slots[place] = fresh[place]

    def _take(self, found: Sequence[tuple[int, torch.Tensor]], memory: Memory) -> None:
        """Copy gradients into their slots, in one call if all are on the CPU."""
        with torch.no_grad():
            self._copy_each(
                [self._slots[place] for place, _ in found], [gradient for _, gradient in found]
            )
        for place, gradient in found:
            self._adopt(place, gradient, memory)

    def _adopt(self, place: int, gradient: torch.Tensor | None, memory: Memory) -> None:
        """Make the slot p.grad, unless autograd tracks the gradient or its layout differs."""
        parameter = self.parameters[place]
        if self._can_be_view[place] and (gradient is None or not gradient.requires_grad):
            try:
                parameter.grad = self._slots[place]
                return
            except RuntimeError:
                _check_kind(self._names[place], self._kind, parameter)
                if parameter.is_cpu:  # else the module was moved to a device
                    raise
        _check_kind(self._names[place], self._kind, parameter)
        if gradient is None:
            gradient = parameter.grad = torch.zeros_like(parameter, requires_grad=False)
            if not gradient.is_cpu:
                self._copy_each = copy_each
        self._copied[place] = _note(gradient, self._names[place], memory)

    def store(self) -> None:
        """Check that gradients are as load() left them, and copy results to copied ones."""
        if not (
            all(map(is_, map(_gradient_of, self.parameters), self._slots))
            and list(map(_version_of, self._slots)) == self._versions
            and list(map(_address_of, self._slots)) == self._addresses
        ):
            self._check_each()
        torch.autograd.graph.increment_version(self._slots)
        if self._copied:
            with torch.no_grad():
                self._copy_each(
                    [copied.gradient for copied in self._copied.values()],
                    [self._slots[place] for place in self._copied],
                )

    def wrote(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient is a slot, or was copied to."""
        written = (*self._slots, *(copied.gradient for copied in self._copied.values()))
        return any(gradient is one for one in written)

    def _check_each(self) -> None:
        """Raise FastPSError that names the first gradient which is not as load() left it."""
        marks = zip(self._slots, self._versions, self._addresses, strict=True)
        for place, (slot, version, address) in enumerate(marks):
            gradient = self.parameters[place].grad
            if gradient is slot:
                is_same = slot._version == version and slot.data_ptr() == address
            elif place in self._copied:
                is_same = _is_same(gradient, self._copied[place])
            else:
                is_same = place in self._skipped
            if not is_same:
                raise _changed(self._names[place])


class LooseGradient:
    """One gradient, sent from autograd's own memory if it is contiguous."""

    def __init__(self, name: str, parameter: torch.Tensor, compression: Compressor) -> None:
        self.name = name
        self.code: DType
        self.array: Array
        self.parameters: Sequence[torch.Tensor] = [parameter]
        self._parameter = parameter
        self._kind = parameter.dtype
        self._compression = compression
        self._loaded: tuple[_Copied, torch.Tensor, Any, bool]
        self._written: Callable[[], torch.Tensor | None] = lambda: None  # by store()

    def spec(self) -> Spec:
        """Return name, shape and dtype of the tensor that is sent."""
        real = real_of(self._parameter)
        wire, _ = self._compression.compress(real.new_empty(0))
        return self.name, tuple(real.shape), wire_dtype(wire.dtype, self.name)

    def load(self, session: Session, memory: Memory) -> None:
        """Make the tensor to send: the gradient itself where possible, zeros for None."""
        parameter = self._parameter
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        if parameter.grad.is_conj():
            parameter.grad = parameter.grad.resolve_conj()
        gradient = parameter.grad
        check_tensor(real_of(gradient), self.name)
        _check_kind(self.name, self._kind, parameter)
        noted = _note(gradient, self.name, memory)
        plain = real_of(gradient).detach()
        compressed, context = self._compression.compress(plain)
        wire = sendable(compressed)
        is_in_place = wire is plain
        if is_in_place:
            mark_written(gradient)
        self._loaded = noted._replace(version=version_of(gradient)), wire, context, is_in_place
        self.array, self.code = view_of(wire), wire_dtype(wire.dtype, self.name)

    def store(self) -> None:
        """Write the result into the gradient; FastPSError if that has changed since load()."""
        copied, wire, context, is_in_place = self._loaded
        if not _is_same(self._parameter.grad, copied):
            raise _changed(self.name)
        if not is_in_place:
            if not copied.gradient.is_cpu:
                wire = wire.to(copied.gradient.device)
            with torch.no_grad():
                real_of(copied.gradient).copy_(self._compression.decompress(wire, context))
        else:
            mark_written(copied.gradient)
        self._written = weakref.ref(copied.gradient)
        del self._loaded, self.array  # frees what a compression made

    def wrote(self, gradient: torch.Tensor) -> bool:
        """Return whether the last store() wrote to this very tensor."""
        return self._written() is gradient


def bucket_name(names: Sequence[str], shapes: Sequence[Sequence[int]]) -> str:
    """Return a bucket's name: its first gradient, and a digest of all names and shapes."""
    if len(names) == 1:
        return names[0]
    text = repr([(name, tuple(shape)) for name, shape in zip(names, shapes, strict=True)])
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{names[0]} and {len(names) - 1} more ({digest})"


def slots_of(
    array: Array, tensors: Sequence[torch.Tensor], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Cut a flat array into tensors of a dtype, one of the shape of each tensor.

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
    """Return the number of elements of each slot, with its padding."""
    unit = ALIGNMENT // dtype.itemsize
    return [-(-tensor.numel() // unit) * unit for tensor in tensors]


def _note(gradient: torch.Tensor, name: str, memory: Memory) -> _Copied:
    """Record a gradient's state; FastPSError if another parameter's gradient has its memory."""
    address = gradient.data_ptr()
    other = memory.setdefault(address, name)
    if other != name and gradient.numel():
        raise FastPSError(
            f"the gradients of {other!r} and {name!r} share their memory, as torch makes them "
            "when two parameters are reshaped and then added: add parameter.clone() instead of "
            "one of the two"
        )
    return _Copied(gradient, version_of(gradient), address)


def _changed(name: str) -> FastPSError:
    """Return the error for a gradient that was written to, or replaced, while in flight."""
    return FastPSError(
        f"the gradient of {name!r} was changed while it was being communicated: call "
        "optimizer.synchronize() before clipping, unscaling, zeroing or replacing gradients (with "
        "DistributedDataParallel, do so after backward())"
    )


def _check_kind(name: str, kind: torch.dtype, parameter: torch.Tensor) -> None:
    """Raise TypeError for a parameter that was converted to another dtype after wrapping."""
    if parameter.dtype is not kind:
        raise TypeError(
            f"parameter {name!r} was {kind} when it was wrapped and is {parameter.dtype} now: "
            "convert the module back, or wrap it again, a DistributedOptimizer with another prefix"
        )
