# SPDX-License-Identifier: Apache-2.0
"""From torch tensors to arrays for a session: checks, NumPy views without a copy, submits.

The only place that maps torch's dtypes to wire codes. A view shares the tensor's memory and,
because it is a NumPy array, keeps the storage alive and fixed in size while an operation is in
flight. Holds no state; called from the thread that runs the operation.

A tensor on a device, such as a GPU, is sent as one that is not contiguous is: as a copy, which
sendable() makes, here in the host's memory. The way back is .to(tensor.device) for a new tensor,
and write_over() for one that is there. These copies of torch block, and are ordered with the
current stream of the device: what it was given before is in the copy, and what it is given later
sees the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastps.frameworks.gradient_round import free_names
from fastps.session.session import Session
from fastps.types import DType, numpy_dtype
from fastps.worker.handle import Handle

WIRE_DTYPES = {getattr(torch, code.name.lower()): code for code in DType}

_synchronize = getattr(torch, "accelerator", torch.cuda).synchronize  # torch 2.5 has only cuda's

_PLAIN = (torch.Tensor, torch.nn.Parameter)

Array = NDArray[np.generic]


def wire_dtype(dtype: torch.dtype, name: str) -> DType:
    """Return the wire code of a torch dtype; TypeError lists the supported dtypes."""
    code = WIRE_DTYPES.get(dtype)
    if code is None:
        supported = ", ".join(str(known).removeprefix("torch.") for known in WIRE_DTYPES)
        raise TypeError(f"tensor {name!r} has dtype {dtype}; supported are {supported}")
    return code


def check_tensor(tensor: object, name: str) -> torch.Tensor:
    """Return the tensor if its elements can be sent: dense, of a supported dtype."""
    found = require_array(tensor, name)
    check_memory(found, name)
    wire_dtype(found.dtype, name)
    return found


def require_array(tensor: object, name: str | None = None) -> torch.Tensor:
    """Return the tensor; TypeError with a hint for anything else."""
    if isinstance(tensor, torch.Tensor):
        return tensor
    cure = "pass torch.as_tensor(...)"
    if isinstance(tensor, np.ndarray):
        cure = "pass torch.from_numpy(array), or use the operation of `import fastps`"
    what = "the tensor" if name is None else f"{name!r}"
    raise TypeError(f"{what} must be a torch.Tensor, not {type(tensor).__name__}: {cure}")


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether this is a plain tensor: dense, on the CPU, of no other subclass."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return type(tensor) in _PLAIN and tensor.is_cpu and is_dense


def check_memory(tensor: torch.Tensor, name: str) -> None:
    """Raise TypeError unless a tensor's elements are all here, on the CPU or a device."""
    if is_plain(tensor):
        return
    if tensor.is_nested:
        raise TypeError(
            f"tensor {name!r} is nested, and nested tensors are not supported: pass each tensor "
            "of tensor.unbind(), or torch.nested.to_padded_tensor(tensor, 0.0)"
        )
    if isinstance(tensor, torch.masked.MaskedTensor):
        raise TypeError(
            f"tensor {name!r} is masked, and masked tensors are not supported: pass "
            "tensor.to_tensor(0.0), or another value for the masked elements"
        )
    if type(tensor) not in _PLAIN and hasattr(tensor, "__tensor_flatten__"):
        raise TypeError(
            f"tensor {name!r} is a {type(tensor).__name__}, and only plain tensors are supported: "
            "every worker needs the whole model, so do not shard it, as by fully_shard()"
        )
    if tensor.layout != torch.strided:
        raise TypeError(
            f"tensor {name!r} is sparse ({tensor.layout}), which is supported for gradients that "
            "some worker had as sparse in the first step: use tensor.to_dense(), "
            "sparse_as_dense=True of DistributedOptimizer, or nn.Embedding(..., sparse=False)"
        )
    if tensor.is_meta:
        raise TypeError(
            f"tensor {name!r} is on meta and has no values: call "
            "module.to_empty(device='cpu') and initialise it first"
        )


def check_on_cpu(tensor: torch.Tensor, name: str, what: str) -> None:
    """Raise TypeError for a tensor on a device; what: does not support it."""
    if not (tensor.is_cpu or tensor.is_meta):
        raise TypeError(
            f"tensor {name!r} is on {tensor.device}, and {what} supports tensors on the CPU only: "
            "use tensor.cpu(), or a model on the CPU"
        )


def real_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as pairs of real numbers in the same memory; others as they are."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


def is_sendable(tensor: torch.Tensor) -> bool:
    """Return whether the host's memory holds the values contiguously, without lazy changes."""
    is_as_read = not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())
    return tensor.is_cpu and tensor.is_contiguous() and is_as_read


def sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without its graph, contiguous, on the CPU; a copy only where needed."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain._is_zerotensor():  # of autograd: zeros without memory
        return torch.zeros_like(plain, device="cpu")
    return plain if is_sendable(plain) else plain.resolve_conj().resolve_neg().contiguous().cpu()


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors into others, some of which are on a device.

    Gradients that hooks have seen may come from several streams of a device, and copies are
    ordered with one; so the device completes what it was given before.
    """
    for device in {source.device for source in sources if not source.is_cpu}:
        _synchronize(device)
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def check_writable(tensor: torch.Tensor, name: str) -> None:
    """Raise ValueError for zeros of autograd that have no memory to be written to."""
    if tensor._is_zerotensor():
        raise ValueError(
            f"tensor {name!r} is a zero tensor of autograd, without memory to write to: pass "
            "tensor.clone()"
        )


def check_leaf(tensor: torch.Tensor, name: str) -> None:
    """Raise ValueError for an intermediate result of autograd, which must not be written to."""
    if tensor.requires_grad and not tensor.is_leaf and torch.is_grad_enabled():
        raise ValueError(
            f"tensor {name!r} is an intermediate result of autograd, which would not see the "
            "in-place change: use the operation that returns a new tensor, or tensor.detach()"
        )


def write_over(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor into one with as many elements; write an element of expand() once."""
    once = tuple(slice(None) if stride else slice(1) for stride in target.stride())
    target.detach()[once].copy_(source.view(target.shape)[once])


def view_of(tensor: torch.Tensor) -> Array:
    """Return a contiguous tensor's memory as an array, bfloat16 as uint16."""
    plain = tensor.detach()
    if plain.dtype is torch.bfloat16:
        plain = plain.view(torch.uint16)
    array: Array = plain.numpy()
    return array


def mark_written(*tensors: torch.Tensor) -> None:
    """Increment the tensors' versions: their memory changes without autograd's knowledge.

    Operations that write call it at the start, for values that autograd saved before, and at the
    end, for values that were saved while they were in flight.
    """
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of writes torch has seen to the tensor's memory.

    Views of one storage share a counter, so for a part of a storage this returns 0: it is unknown
    which part was written.
    """
    if tensor.is_inference() or tensor.untyped_storage().nbytes() != tensor.nbytes:
        return 0
    return tensor._version


def make_room(session: Session, count: int, code: DType) -> Array:
    """Return a flat array of zeros, bfloat16 as uint16, in shared memory if there is any."""
    array: Array
    if count and getattr(session, "can_share", False):
        array = session.empty((count,), code)
    else:
        array = np.empty(count, numpy_dtype(code))
    array.fill(0)
    return array


def tensor_over(array: Array, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of the dtype over an array's memory, with a version counter of its own.

    The array has elements of the dtype's size, or is one of bytes.
    """
    if not array.size:  # torch makes its strides 0 and then cannot view it as another dtype
        return torch.empty(array.shape, dtype=dtype)
    plain = torch.from_numpy(array)
    return plain if plain.dtype is dtype else plain.view(dtype)


def free_name(session: Session, name: str, shape: tuple[int, ...], code: DType) -> str:
    """Return the name, with a number if it is in use for an array of another shape.

    Workers that use the same names get the same number; MismatchError comes if shapes differ.
    """
    if session.config.goes_on:  # where nothing is declared
        return name
    return free_names(session, [(name, shape, code)])[0]


def submit_push_pull(
    session: Session,
    arrays: Sequence[Array],
    codes: Sequence[DType],
    names: Sequence[str],
    *,
    average: bool,
    priorities: Sequence[int],
    landings: Sequence[Array] | None = None,
    **options: Any,
) -> list[tuple[Handle[Any], list[int]]]:
    """Start push_pull of arrays, in one submit per dtype.

    landings: where results land; None: in place. Returns the handles, with the positions of their
    arrays.
    """
    started: list[tuple[Handle[Any], list[int]]] = []
    for code, places in _by_dtype(codes):
        some = [arrays[place] for place in places]
        labels = [names[place] for place in places]
        urgencies = [priorities[place] for place in places]
        out = some if landings is None else [landings[place] for place in places]
        handle = session.push_pull_async(
            some, labels, average=average, priority=urgencies, out=out, dtype=code, **options
        )
        started.append((handle, places))
    return started


def submit_broadcast(
    session: Session, tensors: Sequence[torch.Tensor], names: Sequence[str], root_rank: Any
) -> list[Handle[Any]]:
    """Start broadcasts of contiguous tensors in place; one submit and handle per dtype.

    root_rank: or what Session.root_of() has returned.
    Where the job goes on without lost workers, this blocks until they are done.
    """
    handles: list[Handle[Any]] = []
    codes = [wire_dtype(tensor.dtype, name) for tensor, name in zip(tensors, names, strict=True)]
    if session.config.goes_on:
        arrays = [view_of(one) for one in tensors]
        session.groups.broadcast_to_those_left(arrays, codes, root_rank)
        return []
    root = session.root_of(root_rank)  # of all of them, though a loss may change ranks
    for code, places in _by_dtype(codes):
        arrays = [view_of(tensors[place]) for place in places]
        labels = [names[place] for place in places]
        handles.append(session.broadcast_async(arrays, root, labels, dtype=code))
    return handles


def _by_dtype(codes: Sequence[DType]) -> list[tuple[DType, list[int]]]:
    """Group positions by dtype: a submit has one dtype."""
    places: dict[DType, list[int]] = {}
    for place, code in enumerate(codes):
        places.setdefault(code, []).append(place)
    return list(places.items())
