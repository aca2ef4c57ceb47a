# SPDX-License-Identifier: Apache-2.0
"""One-sided windows on NumPy arrays: neighbours write each other's buffers without asking.

docs/decentralized.md describes windows and their guarantees; `fastps` re-exports the names. Each
worker has, by name, its own array and a buffer for each in-neighbour of the graph on which the
window was created. Threads: any; all workers create and free windows, in one order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np

from fastps.session.array_checks import require_array
from fastps.session.current import current
from fastps.worker.handle import Array

if TYPE_CHECKING:  # importing fastps loads as little as it can
    from fastps.graph.weights import Targets
    from fastps.worker.handle import OperationHandle

# ---- creating and freeing; all workers ----


def win_create(tensor: Array, name: str, zero_init: bool = False) -> bool:
    """Create a window over an array; return False where the name is taken.

    tensor: C-contiguous, floats or integers, less than 4 GiB, of the same shape and dtype on all
    workers. It stays the window's own value: win_update() writes it, win_get() of others reads it.
    Buffers begin as copies of it, or as zeros; P begins as 1, that of buffers as 0. All workers
    call it; blocks until they have. Raises MismatchError where arrays or graphs differ. Memory:
    one buffer for each in-neighbour, and over sockets a second one in which its puts land. Workers
    of its machine read an array of fastps.empty() directly.
    """
    return current().groups.windows.create(require_array(tensor, name), name, zero_init=zero_init)


def win_free(name: str | None = None) -> bool:
    """Free a window, or all, after all operations on it; return False where there is none.

    All workers call it; blocks until they have.
    """
    return current().groups.windows.free(name)


def get_current_created_window_names() -> list[str]:
    """List the names of the windows of this worker, in alphabetical order."""
    return current().groups.windows.names


# ---- putting and getting ----


def win_put_async(
    tensor: Array,
    name: str,
    self_weight: float | None = None,
    dst_weights: Targets | None = None,
    require_mutex: bool = False,
) -> OperationHandle:
    """Start win_put() and return a handle; tensor must not be changed until it is done."""
    return _put(tensor, name, self_weight, dst_weights, require_mutex, adds=False, is_waited=False)


def win_put(
    tensor: Array,
    name: str,
    self_weight: float | None = None,
    dst_weights: Targets | None = None,
    require_mutex: bool = False,
) -> bool:
    """Replace this worker's buffers at its out-neighbours by tensor; return True when done.

    dst_weights: ranks, or rank: factor, some of the out-neighbours; by default all, with 1. What
    is sent is rounded once. Afterwards tensor is multiplied by self_weight, in place. P goes with
    the values, in one step, where it is turned on. require_mutex: each under the neighbour's
    mutex. Blocks; the neighbours' Python takes no part. Raises ValueError, PeerLostError,
    StallError. Bytes on the wire: nbytes to each; in shared memory one copy.
    """
    _put(tensor, name, self_weight, dst_weights, require_mutex, adds=False, is_waited=True).wait()
    return True


def win_accumulate_async(
    tensor: Array,
    name: str,
    self_weight: float | None = None,
    dst_weights: Targets | None = None,
    require_mutex: bool = False,
) -> OperationHandle:
    """Start win_accumulate() and return a handle."""
    return _put(tensor, name, self_weight, dst_weights, require_mutex, adds=True, is_waited=False)


def win_accumulate(
    tensor: Array,
    name: str,
    self_weight: float | None = None,
    dst_weights: Targets | None = None,
    require_mutex: bool = False,
) -> bool:
    """Add tensor to this worker's buffers at its out-neighbours; otherwise as win_put().

    Nothing is lost where an update clears a buffer meanwhile. get_win_version() does not count it.
    """
    _put(tensor, name, self_weight, dst_weights, require_mutex, adds=True, is_waited=True).wait()
    return True


def _put(
    tensor: Array, name: str, self_weight: float | None, dst_weights: Targets | None,
    require_mutex: bool, *, adds: bool, is_waited: bool,
) -> OperationHandle:  # fmt: skip
    return current().groups.windows.put(
        require_array(tensor, name), name, adds=adds, self_weight=self_weight,
        dst_weights=dst_weights, is_locked=require_mutex, is_waited=is_waited,
    )  # fmt: skip


def win_get_async(
    name: str, src_weights: Targets | None = None, require_mutex: bool = False
) -> OperationHandle:
    """Start win_get() and return a handle."""
    return current().groups.windows.get(
        name, src_weights, is_locked=require_mutex, is_waited=False
    )


def win_get(name: str, src_weights: Targets | None = None, require_mutex: bool = False) -> bool:
    """Replace our buffers of in-neighbours by their own arrays; return True when done.

    src_weights: ranks, or rank: factor, some of the in-neighbours. P is not fetched. Where a
    neighbour's program writes its array at the same time, a part of that may be seen, unless both
    hold its mutex; updates are seen whole. Blocks.
    """
    current().groups.windows.get(name, src_weights, is_locked=require_mutex, is_waited=True).wait()
    return True


def win_poll(handle: OperationHandle) -> bool:
    """Return whether win_wait() would return at once."""
    return handle.poll()


def win_wait(handle: OperationHandle) -> bool:
    """Wait for an operation of a nonblocking form; raise the error that made it fail."""
    handle.wait()
    return True


def win_flush(name: str) -> bool:
    """Wait until everything that this worker started on a window has taken effect."""
    current().groups.windows.flush(name).wait()
    return True


# ---- updating ----


def win_update(
    name: str,
    self_weight: float | None = None,
    neighbor_weights: Mapping[int, float] | None = None,
    reset: bool = False,
    clone: bool = False,
    require_mutex: bool = False,
) -> Array:
    """Mix the window's own array with what in-neighbours have put, into itself; return it.

    Sends nothing and waits for no put of others. Weights: by default those of the graph, as
    neighbor_allreduce(); given ones, for some of the in-neighbours, are not normalised. Products
    are added in the order of ranks. reset: the buffers that were used are zero afterwards. clone:
    the result is a new array. Versions are 0 afterwards. Takes effect after all that this worker
    started on the window before. require_mutex: under our own mutex. Blocks.
    """
    windows = current().groups.windows
    out = np.empty_like(windows.find(name).array) if clone else None
    found = windows.update(
        name, self_weight, neighbor_weights, out, resets=reset, is_locked=require_mutex
    ).wait()
    assert isinstance(found, np.ndarray)
    return found


def win_update_then_collect(name: str, require_mutex: bool = True) -> Array:
    """Add all buffers to the window's own array and clear them; return the array. Blocks."""
    sources = current().groups.windows.find(name).window.sources
    return win_update(name, 1.0, dict.fromkeys(sources, 1.0), True, False, require_mutex)


# ---- mutexes, versions, P ----


def win_mutex(
    name: str, for_self: bool = False, ranks: Iterable[int] | None = None
) -> AbstractContextManager[None]:
    """Hold the window's mutex at ranks, by default the out-neighbours, or our own.

    Workers hold it one at a time, in the order in which they asked; its holder may take it again.
    for_self: our own; ranks are then the workers that it excludes, by default all. A worker that
    is lost releases it. Mutexes are taken in the order of ranks. Raises StallError after
    op_timeout_s.
    """
    return current().groups.windows.mutex(name, for_self=for_self, ranks=ranks)


def get_win_version(name: str) -> dict[int, int]:
    """Return, for each in-neighbour, the number of puts and gets since the last update."""
    return current().groups.windows.find(name).window.versions()


def win_associated_p(name: str) -> float:
    """Return P of this worker; push-sum's estimate is the window's own array divided by P."""
    return current().groups.windows.find(name).window.p


def turn_on_win_ops_with_associated_p() -> None:
    """Send P with values from now on: operations on values apply to P too."""
    current().groups.windows.has_p = True


def turn_off_win_ops_with_associated_p() -> None:
    """Stop sending P with values."""
    current().groups.windows.has_p = False
