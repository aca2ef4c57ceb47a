# SPDX-License-Identifier: Apache-2.0
"""push_pull on torch tensors: four forms, their handles, and the gradient of push_pull().

The order of arguments is that of BytePS: tensor, average, name, version, priority; a string in
the second place is the name, as in fastps.push_pull(). A name is required: workers match tensors
by it, and a generated one would differ between ranks or cost server memory at each call.
Out-of-place forms accept any dense tensor and copy one that is not contiguous; in-place forms
write into the tensor, which must be contiguous. A tensor on a device is copied to the host before
the operation starts, and the thread that first waits for the end copies the result to the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch

from fastps.contract.rule import Choice as Rule
from fastps.frameworks.gradient_round import check_name
from fastps.frameworks.torch.ops.compression import (
    Compressing,
    Compression,
    Compressor,
    WireCodec,
    compressor_of,
)
from fastps.frameworks.torch.ops.tensors import (
    check_leaf,
    check_tensor,
    check_writable,
    is_sendable,
    mark_written,
    sendable,
    tensor_over,
    view_of,
    wire_dtype,
    write_over,
)
from fastps.session import current
from fastps.worker.handle import Handle, MappedHandle

T = TypeVar("T")


class PushPullHandle(Handle[torch.Tensor]):
    """The handle of a push_pull: that of its operation, with a tensor for result."""

    def __init__(self, handle: Handle[Any], output: torch.Tensor) -> None:
        self.handle, self.output = handle, output

    def then(self, after: Callable[[torch.Tensor], object]) -> Self:
        """Have a function called with the result, as Handle.then()."""
        output = self.output
        self.handle.then(lambda _: after(output))
        return self

    def poll(self) -> bool:
        """Return whether wait() would return at once. Never blocks."""
        return self.handle.poll()

    @property
    def has_failed(self) -> bool:
        """Whether every wait() raises the same error from now on; a timeout does not count."""
        return self.handle.has_failed

    def wait(self, timeout_s: float | None = None) -> torch.Tensor:
        """Wait for the operation and return its tensor, as Handle.wait()."""
        self.handle.wait(timeout_s)
        return self.output


def declare(name: str, tensor: torch.Tensor) -> None:
    """Declare a tensor before its first use, so that the first use does not block for it.

    Only shape and dtype matter. Blocks until the servers are ready for it. MismatchError, here
    or at the first use, if another worker declares it differently.
    """
    check_name(name, "declare")
    check_tensor(tensor, name)
    current.current().declare([(name, tuple(tensor.shape), wire_dtype(tensor.dtype, name))])


def push_pull_async(
    tensor: torch.Tensor,
    average: bool | str = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
) -> Handle[torch.Tensor]:
    """Start to average or sum a tensor over all workers; synchronize() returns a new tensor.

    Larger priorities go first. `version` is accepted for scripts written for BytePS and not
    needed. Do not write to a contiguous tensor before the operation has ended. The result is on
    the tensor's device, and does not take part in autograd; that of push_pull() does. NaN and
    infinity pass through.
    """
    average, name = _named(average, name, "push_pull_async")
    _checked(tensor, name, average)
    if is_sendable(tensor):
        output = tensor_over(current.current().result_like(view_of(tensor)), tensor.dtype)
        return _start(tensor, output, name, average, priority)
    copy, device = sendable(tensor), tensor.device
    started = _start(copy, copy, name, average, priority)
    return started if tensor.is_cpu else MappedHandle([started], lambda one: one[0].to(device))


def push_pull_async_inplace(
    tensor: torch.Tensor,
    average: bool | str = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
) -> Handle[torch.Tensor]:
    """Start to average or sum a tensor over all workers in place; synchronize() returns it.

    As push_pull_async(), but the result is written into the tensor. ValueError for a tensor that
    is not contiguous, or is an intermediate result of autograd. On a parameter it acts on the
    data, as an operation under torch.no_grad() does.
    """
    average, name = _named(average, name, "push_pull_async_inplace")
    _check_in_place(_checked(tensor, name, average), name)
    if not tensor.is_cpu:
        return _start_on_device(tensor, name, average, priority)
    started = _start(tensor, tensor, name, average, priority)
    mark_written(tensor)
    return started.then(mark_written)


def push_pull(
    tensor: torch.Tensor,
    average: bool | str = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    compression: Compressing = Compression.none,
    rule: Rule = None,
) -> torch.Tensor:
    """Average or sum a tensor over all workers into a new tensor; blocks.

    compression and rule: as of fastps.push_pull(), or one of Compression; both also apply to the
    gradient. Autograd differentiates it: the gradient is the push_pull of the results' gradients
    with the same operation, under the name '<name>.gradient'. So all workers must run backward.
    """
    average, name = _named(average, name, "push_pull")
    _checked(tensor, name, average)
    return _apply(tensor, average, name, priority, compressor_of(compression), rule)


def push_pull_inplace(
    tensor: torch.Tensor,
    average: bool | str = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
) -> torch.Tensor:
    """Average or sum a tensor over all workers in place, and return it; blocks."""
    average, name = _named(average, name, "push_pull_inplace")
    return push_pull_async_inplace(tensor, average, name, version, priority).wait()


def poll(handle: Handle[Any]) -> bool:
    """Return whether an operation has ended, with or without an error; never blocks."""
    if not isinstance(handle, Handle):
        raise _not_a_handle(handle)
    return handle.poll()


def synchronize(handle: Handle[T], *, timeout_s: float | None = None) -> T:
    """Wait for an operation and return its result, or raise its error.

    Waits without the GIL, at most timeout_s (the session's op_timeout_s when None).
    """
    if not isinstance(handle, Handle):
        raise _not_a_handle(handle)
    return handle.wait(timeout_s)


class _PushPull(torch.autograd.Function):
    """push_pull() as a function that autograd can differentiate."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        average: bool,
        name: str,
        priority: int,
        compression: Compressor,
        rule: Rule,
    ) -> torch.Tensor:
        """Compress, add, decompress."""
        ctx.how = (average, f"{name}.gradient", priority, compression, rule)
        wire, context = compression.compress(tensor)
        choice = compression.choice if isinstance(compression, WireCodec) else None
        if choice is not None or rule is not None:
            spec = (name, tuple(wire.shape), wire_dtype(wire.dtype, name))
            current.current().declare([spec], compression=choice, rule=rule)
        output = synchronize(push_pull_async(wire, average, name, priority=priority))
        return compression.decompress(output, context)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the push_pull of the gradient; None for the other inputs of forward."""
        return _apply(gradient, *ctx.how), None, None, None, None, None


def _apply(tensor: torch.Tensor, *how: Any) -> torch.Tensor:
    output: torch.Tensor = _PushPull.apply(tensor, *how)  # type: ignore[no-untyped-call]
    return output


def _start(
    source: torch.Tensor, output: torch.Tensor, name: str, average: bool, priority: int
) -> PushPullHandle:
    array, code = view_of(source), wire_dtype(source.dtype, name)
    out = array if output is source else view_of(output)
    handle = current.current().push_pull_async(
        array, name, average=average, priority=priority, out=out, dtype=code
    )
    return PushPullHandle(handle, output)


def _start_on_device(
    tensor: torch.Tensor, name: str, average: bool, priority: int
) -> Handle[torch.Tensor]:
    """Start push_pull of a copy, from which the tensor is written in the end."""
    copy = sendable(tensor)
    started = _start(copy, copy, name, average, priority)
    mark_written(tensor)

    def finish(_found: list[Any]) -> torch.Tensor:
        write_over(tensor, copy)
        return tensor

    return MappedHandle([started], finish)


def _checked(tensor: torch.Tensor, name: str, average: bool) -> torch.Tensor:
    check_tensor(tensor, name)
    if average and tensor.dtype is torch.bool:
        raise ValueError(
            f"tensor {name!r} is bool, which has no average: pass average=False (logical or)"
        )
    return tensor


def _check_in_place(tensor: torch.Tensor, name: str) -> None:
    check_writable(tensor, name)
    if not (is_sendable(tensor) if tensor.is_cpu else tensor.is_contiguous()):
        raise ValueError(
            f"tensor {name!r} is not contiguous (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}): use push_pull(), or tensor.contiguous() as the tensor"
        )
    check_leaf(tensor, name)


def _named(average: bool | str, name: str | None, call: str) -> tuple[bool, str]:
    """Return average and name, passed in either order; ValueError without a name."""
    if isinstance(average, str) and name is None:
        return True, check_name(average, call)
    if isinstance(average, str):
        raise TypeError(
            f"{call}(tensor, average, name): average must be True or False, not {average!r}, as "
            f"the name is {name!r}"
        )
    if not isinstance(average, bool | int):
        what = type(average).__name__
        raise TypeError(f"{call}(tensor, name): average must be True or False, not of type {what}")
    return average, check_name(name, call)


def _not_a_handle(given: object) -> TypeError:
    return TypeError(
        "poll() and synchronize() need the handle of an operation, as push_pull_async() returns, "
        f"not {type(given).__name__} {given!r:.40}"
    )
