# SPDX-License-Identifier: Apache-2.0
"""Copy one rank's parameters, optimizer state or plain values to all ranks.

Decides what travels as a tensor and what as a plain value. Tensors of one call travel together
in one submit. Nothing is pickled: plain values and tensors arrive with their types, and all ranks
raise TypeError for anything else. Blocks; called by all ranks in the same order.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

import fastps
from fastps.frameworks.gradient_round import check_name, wait_all
from fastps.frameworks.torch.gradients import unwrapped
from fastps.frameworks.torch.ops.collectives import broadcast_async_
from fastps.frameworks.torch.ops.pytrees import put_back, take_out
from fastps.frameworks.torch.ops.tensors import (
    check_memory,
    check_writable,
    is_sendable,
    mark_written,
    real_of,
    require_array,
    sendable,
    submit_broadcast,
    wire_dtype,
    write_over,
)
from fastps.frameworks.torch.optimizer.step_common import parameters_of
from fastps.session import current
from fastps.session.process_sets import ProcessSet, global_process_set

if TYPE_CHECKING:
    from fastps.session.session import Session


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor] | torch.Tensor],
    root_rank: int = 0,
    prefix: str | ProcessSet = "Parameter.",
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite tensors on all ranks with those of the root rank, in place.

    params: model.state_dict(), model.named_parameters() or any mapping or pairs of names and
    tensors, the same on all ranks (else MismatchError); tensors alone are named by their places.
    A second model with the same names needs another prefix. process_set may also be passed as
    prefix, as scripts for Horovod do. One submit for all tensors.
    """
    pairs = _pairs_of(params)
    if isinstance(prefix, ProcessSet):
        process_set, prefix = prefix, "Parameter."
    if process_set is not global_process_set:
        _broadcast_within(process_set, [one for _, one in pairs], root_rank)
        return
    names = [prefix + check_name(name, "broadcast_parameters") for name, _ in pairs]
    tensors = [_check(tensor, name) for name, (_, tensor) in zip(names, pairs, strict=True)]
    for name, tensor in zip(names, tensors, strict=True):
        check_writable(tensor, name)
    session = current.current()
    unwrapped.watch(session, tensors)
    _check_root(root_rank, session.size)
    _broadcast(tensors, names, session.root_of(root_rank))


def _broadcast_within(
    process_set: ProcessSet, tensors: Sequence[torch.Tensor], root_rank: int
) -> None:
    """Broadcast in place in a process set; in an elastic job all are overwritten, or none."""
    is_elastic = current.current().is_elastic
    places = [one.detach().clone() for one in tensors] if is_elastic else tensors
    for handle in [broadcast_async_(one, root_rank, None, process_set) for one in places]:
        handle.wait()
    if is_elastic:
        for tensor, place in zip(tensors, places, strict=True):
            write_over(tensor, place)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root rank's value on all ranks; the values of others are ignored.

    The value may contain None, bool, int, float, str, bytes, list, tuple, dict, set, NumPy arrays,
    tensors, dtypes, Path, argparse.Namespace, Enum and named tuples; else all ranks raise
    TypeError. Types are kept, but subclasses of dict and tuple arrive as dict and tuple, except
    OrderedDict, torch.Size and named tuples. A tensor on a device arrives on the current device of
    that type, as torch.cuda.set_device() chooses it. The root gets its own object back. In a
    process set of some workers tensors are not supported.
    """
    if process_set is not global_process_set:
        return fastps.broadcast_object(
            obj, root_rank, name=name or "object", process_set=process_set
        )
    label = "broadcast_object" if name is None else check_name(name, "broadcast_object")
    session = current.current()
    _check_root(root_rank, session.size)
    return _broadcast_tree(obj, session.root_of(root_rank), root_rank, label)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    prefix: str | torch.nn.Module = "Parameter.",
    *,
    model: torch.nn.Module | None = None,
) -> None:
    """Copy state and options of the root rank's optimizer to those of all ranks.

    model, also passed as prefix: accepted for scripts written for Horovod, and not needed.
    Works for any optimizer with state_dict() and load_state_dict(): state is created or dropped
    as the root has it, and options keep their types. If the root has not stepped yet, gradients
    that are None become zeros, as with Horovod. ValueError for LBFGS, whose state depends on the
    closure: broadcast the parameters and create it again.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "the state of LBFGS cannot be broadcast, as it depends on the closure of one process: "
            "broadcast the parameters and create LBFGS again on all ranks"
        )
    if isinstance(prefix, torch.nn.Module):
        prefix = "Parameter."
    session = current.current()
    _check_root(root_rank, session.size)
    root = session.root_of(root_rank)
    is_root = session.is_root(root)
    state = optimizer.state_dict() if is_root else None
    state = _broadcast_tree(state, root, root_rank, f"{prefix}optimizer_state")
    if not is_root:
        _check_groups(optimizer, state)
        optimizer.load_state_dict(state)
    if state.get("state") == {}:  # no step was taken yet
        _fill_gradients(optimizer)


def _fill_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Set gradients that are None to zeros."""
    for parameter in parameters_of(optimizer.param_groups):
        if parameter.requires_grad and parameter.grad is None:
            zeros = torch.zeros_like(parameter, requires_grad=False)
            is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
            parameter.grad = zeros.to_sparse(1) if is_sparse else zeros


def _pairs_of(params: Any) -> list[tuple[str, Any]]:
    if isinstance(params, Mapping):
        return list(params.items())
    if isinstance(params, Iterable) and not isinstance(params, torch.Tensor | str):
        pairs = [
            (str(place), one) if isinstance(one, torch.Tensor) else one
            for place, one in enumerate(params)
        ]
        if all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            return pairs
    raise ValueError(
        "params must be a mapping of names to tensors, or contain tensors or tuples (name, "
        "tensor), as model.state_dict(), model.parameters() and model.named_parameters() do"
    )


def _broadcast(tensors: list[torch.Tensor], names: list[str], root: Any) -> None:
    """Broadcast in place; tensors that are not contiguous by way of a copy.

    root: of Session.root_of().
    """
    session = current.current()
    buffers = [sendable(tensor) for tensor in tensors]
    wires = [real_of(buffer) for buffer in buffers]
    wait_all(submit_broadcast(session, wires, names, root) if tensors else [])
    with torch.no_grad():
        for tensor, buffer in zip(tensors, buffers, strict=True):
            if session.is_root(root):
                continue  # the root only reads
            if is_sendable(tensor):
                mark_written(tensor)
            else:
                write_over(tensor, buffer)


def _broadcast_tree(value: Any, root: Any, root_rank: int, name: str) -> Any:
    """Send the plain part of a value, with the tensors' shapes, then the tensors.

    root: of Session.root_of(), for a loss between the two may change ranks; root_rank: for errors.
    """
    session = current.current()
    if not session.is_root(root):
        return _receive_tree(session, root, root_rank, name)
    tensors: list[torch.Tensor] = []
    mark = uuid.uuid4().hex
    try:
        plain = take_out(value, mark, tensors)
        specs = [describe(tensor) for tensor in tensors]
    except Exception as error:  # any: the others wait for the outcome
        text = str(error) if isinstance(error, TypeError) else f"{type(error).__name__}: {error}"
        session.broadcast_object({"refused": text}, root, name)
        raise TypeError(f"rank {root_rank} could not send the value: {text}") from error
    kinds = [tensor.device.type for tensor in tensors]
    session.broadcast_object(
        {"value": plain, "mark": mark, "specs": specs, "kinds": kinds}, root, name
    )
    _broadcast([sendable(tensor) for tensor in tensors], _labels(name, tensors), root)
    return value


def _receive_tree(session: Session, root: Any, root_rank: int, name: str) -> Any:
    message = session.broadcast_object(None, root, name)
    if "refused" in message:
        raise TypeError(f"rank {root_rank} could not send the value: {message['refused']}")
    tensors = [make_room(code, shape) for code, shape in message["specs"]]
    _broadcast(tensors, _labels(name, tensors), root)
    tensors = [one.to(kind) for one, kind in zip(tensors, message["kinds"], strict=True)]
    return put_back(message["value"], message["mark"], tensors)


def _labels(name: str, tensors: list[torch.Tensor]) -> list[str]:
    """Name tensors by place, dtype and shape, so that a name never gets another shape."""
    return [
        f"{name}.{place}.{describe(tensor)[0].upper()}{list(tensor.shape)}"
        for place, tensor in enumerate(tensors)
    ]


def describe(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """Return a tensor's dtype and shape, for make_room()."""
    _check(tensor, "a tensor in the value")
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def make_room(code: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return an uninitialised tensor of a dtype and shape by describe()."""
    return torch.empty(shape, dtype=getattr(torch, code))


def _check(tensor: object, name: str) -> torch.Tensor:
    """Return the tensor if it can be sent, complex or not; else TypeError."""
    found = require_array(tensor, name)
    check_memory(found, name)
    wire_dtype(found.dtype.to_real(), name)
    return found


def _check_root(root_rank: int, size: int) -> None:
    if isinstance(root_rank, bool) or not isinstance(root_rank, int) or not 0 <= root_rank < size:
        raise ValueError(f"root_rank must be an integer from 0 to {size - 1}, not {root_rank!r}")


def _check_groups(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Raise ValueError for other parameter groups than the root's; torch's names no ranks."""
    theirs = [len(group["params"]) for group in state["param_groups"]]
    ours = [len(group["params"]) for group in optimizer.param_groups]
    if ours != theirs:
        raise ValueError(
            f"the root rank's optimizer has parameter groups of {theirs} parameters, and this "
            f"rank's of {ours}: build the same optimizer on all ranks"
        )
