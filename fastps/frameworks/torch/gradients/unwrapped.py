# SPDX-License-Identifier: Apache-2.0
"""Detect a plain optimizer that steps broadcast parameters, because wrapping it was forgotten.

The watch begins with broadcast_parameters() of all workers and ends with the second step of a
plain optimizer. If this worker has started no operation between the two steps, it reports a
fingerprint of the weights; session/drift.py compares them. Any exchange of gradients or models by
this package ends the watch, and the setting check_weights=0 prevents it. Nothing waits, and
training is never changed. Threads: the one that steps; one watch per session.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from fastps.errors import FastPSError
from fastps.frameworks.torch.gradients.no_compile import opaque
from fastps.frameworks.torch.ops.tensors import is_plain
from fastps.frameworks.torch.optimizer.weight_check import fingerprint
from fastps.session.current import is_initialized, known
from fastps.session.session import Session

MOST = 1 << 14  # elements of each parameter that are compared

_watches: weakref.WeakKeyDictionary[Session, _Watch | None] = weakref.WeakKeyDictionary()
_hooks: list[RemovableHandle] = []  # at most one; it must not be removed while it runs


def watch(current: Session, tensors: Iterable[torch.Tensor]) -> None:
    """Watch for steps of broadcast tensors, unless the watch of this session has ended."""
    config = current.config
    if current.size == 1 or not config.check_weights or config.num_validators or config.goes_on:
        return
    found = _watches.setdefault(current, _Watch(current))
    if found is None:
        return
    found.storages.update(_storage_of(one) for one in tensors)
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_after_step))


def stop(current: Session) -> None:
    """End the watch of a session for good: its program does exchange gradients or models."""
    _watches[current] = None
    while _hooks:
        _hooks.pop().remove()


@opaque
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Pass a step on to the watch of the process's session."""
    found = _watches.get(known()) if is_initialized() else None
    if found is None:
        return
    with contextlib.suppress(FastPSError):  # the next operation raises it
        if found.is_over(optimizer):
            _watches[known()] = None


def _storage_of(tensor: torch.Tensor) -> StorageWeakRef:
    """Return a weak reference that is equal for tensors over the same memory."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


class _Watch:
    """The broadcast parameters of a session, and the optimizers that step them; weak."""

    def __init__(self, current: Session) -> None:
        self.storages: set[StorageWeakRef] = set()
        self._session: Session = weakref.proxy(current)
        self._begun: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = (
            weakref.WeakKeyDictionary()
        )

    def is_over(self, optimizer: torch.optim.Optimizer) -> bool:
        """Note the first step of an optimizer of such parameters; compare after the second."""
        if any(kind.__module__.startswith("fastps.") for kind in type(optimizer).__mro__):
            return True
        weights = [
            one
            for group in optimizer.param_groups
            for one in group["params"]
            if is_plain(one) and _storage_of(one) in self.storages
        ]
        if not weights:
            return False
        self._session.check_usable()
        begun = self._session.drift.begun()
        if optimizer not in self._begun:
            self._begun[optimizer] = begun
            return False
        if begun is not None and begun == self._begun[optimizer]:
            what = f"two steps of {type(optimizer).__name__} over {len(weights)} parameters"
            parts = [one.detach().reshape(-1)[:MOST] for one in weights]
            self._session.drift.tell(what, fingerprint(parts))
        return True
