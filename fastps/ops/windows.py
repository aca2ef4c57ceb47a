# SPDX-License-Identifier: Apache-2.0
"""One-sided windows on NumPy arrays: neighbours write each other's buffers without asking.

What there is and what it handles: docs/decentralized.md. fastps hands the names on. Each worker
has, by name, its own array and a buffer for each in-neighbour of the graph on which the window was
created. Threads: any; windows are created and freed by all workers, in one order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np

from fastps.session.array_checks import require_array
from fastps.session.current import current
from fastps.worker.handle import Array

if TYPE_CHECKING:  # importing fastps brings as little as it can
    from fastps.graph.weights import Targets
    from fastps.worker.handle import OperationHandle

# ---- creating and freeing; all workers ----


def win_create(tensor: Array, name: str, zero_init: bool = False) -> bool:
    """Make a window over an array; False: there is one of this name.

    tensor: C-contiguous, floats or integers, less than 4 GiB, of the same shape and dtype on all
    workers. It stays the window's own value: win_update() writes it, win_get() of others reads it.
    Buffers begin as copies of it, or as zeros; P as 1, that of buffers as 0. All workers call it;
    blocks until they have. Raises MismatchError where they differ, also in their graphs. Memory:
    one buffer for each in-neighbour, and over sockets one more where its puts land. An array of
    fastps.empty() is read by win_get() of its machine without its help.
    """
    return current().groups.windows.create(require_array(tensor, name), name, zero_init=zero_init)


def win_free(name: str | None = None) -> bool:
    """Free a window, or all, when what was started on it is done; False: there is none.

    All workers call it; blocks until they have.
    """
    return current().groups.windows.free(name)


def get_current_created_window_names() -> list[str]:
    """List the names of the windows that there are, in alphabetical order."""
    return current().groups.windows.names


# ---- putting and getting ----


def win_put_async(
    tensor: Array,
    name: str,
    self_weight: float | None = None,
    dst_weights: Targets | None = None,
    require_mutex: bool = False,
) -> OperationHandle:
    """Start win_put() and give a handle; tensor must not be changed until it is done."""
    return current().groups.windows.put(
        require_array(tensor, name), name, adds=False, self_weight=self_weight,
        dst_weights=dst_weights, is_locked=require_mutex, is_waited=False,
    )  # fmt: skip


def win_put(
    tensor: Array,
    name: str,
    self_weight: float | None = None,
    dst_weights: Targets | None = None,
    require_mutex: bool = False,
) -> bool:
    """Replace out-neighbours' buffers of us by tensor; True when all have it.

    dst_weights: ranks, or rank: factor, some of the out-neighbours; by default all, with 1. What
    is sent is rounded once. Afterwards tensor is multiplied by self_weight, in place. P goes with
    the values, in one step, where it is turned on. require_mutex: each under the neighbour's
    mutex. Blocks; no Python of the neighbours takes part. Raises ValueError, PeerLostError,
    StallError. Bytes on the wire: nbytes to each; in shared memory one copy.
    """
    current().groups.windows.put(
        require_array(tensor, name), name, adds=False, self_weight=self_weight,
        dst_weights=dst_weights, is_locked=require_mutex, is_waited=True,
    ).wait()  # fmt: skip
    return True


def win_accumulate_async(
    tensor: Array,
    name: str,
    self_weight: float | None = None,
    dst_weights: Targets | None = None,
    require_mutex: bool = False,
) -> OperationHandle:
    """Start win_accumulate() and give a handle."""
    return current().groups.windows.put(
        require_array(tensor, name), name, adds=True, self_weight=self_weight,
        dst_weights=dst_weights, is_locked=require_mutex, is_waited=False,
    )  # fmt: skip


def win_accumulate(
    tensor: Array,
    name: str,
    self_weight: float | None = None,
    dst_weights: Targets | None = None,
    require_mutex: bool = False,
) -> bool:
    """Add tensor to out-neighbours' buffers of us; otherwise as win_put().

    Nothing is lost where an update empties a buffer meanwhile. Does not count in
    get_win_version().
    """
    current().groups.windows.put(
        require_array(tensor, name), name, adds=True, self_weight=self_weight,
        dst_weights=dst_weights, is_locked=require_mutex, is_waited=True,
    ).wait()  # fmt: skip
    return True


def win_get_async(
    name: str, src_weights: Targets | None = None, require_mutex: bool = False
) -> OperationHandle:
    """Start win_get() and give a handle."""
    return current().groups.windows.get(
        name, src_weights, is_locked=require_mutex, is_waited=False
    )


def win_get(name: str, src_weights: Targets | None = None, require_mutex: bool = False) -> bool:
    """Replace our buffers of in-neighbours by their own arrays; True when all are there.

    src_weights: ranks, or rank: factor, some of the in-neighbours. P is not fetched. What a
    neighbour writes into its array by itself at the same time may be seen in part, unless both
    take its mutex; updates are seen whole. Blocks.
    """
    current().groups.windows.get(name, src_weights, is_locked=require_mutex, is_waited=True).wait()
    return True


def win_poll(handle: OperationHandle) -> bool:
    """Return whether win_wait() would return at once."""
    return handle.poll()


def win_wait(handle: OperationHandle) -> bool:
    """Wait for what a nonblocking form began; raises what made it fail."""
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
    """Make the window's own array of itself and of what in-neighbours have put; give it.

    Communicates nothing and waits for nobody's put. Weights: by default those of the graph, as
    neighbor_allreduce(); given ones, for some of the in-neighbours, are not normalised. Products
    are added in the order of ranks. reset: the buffers that were used are zero afterwards. clone:
    the result is a new array. Versions are 0 afterwards. Comes after what this worker started on
    the window before. require_mutex: under our own mutex. Blocks.
    """
    windows = current().groups.windows
    out = np.empty_like(windows.find(name).array) if clone else None
    found = windows.update(
        name, self_weight, neighbor_weights, out, resets=reset, is_locked=require_mutex
    ).wait()
    assert isinstance(found, np.ndarray)
    return found


def win_update_then_collect(name: str, require_mutex: bool = True) -> Array:
    """Add all buffers to the window's own array and empty them; give it. Blocks."""
    sources = current().groups.windows.find(name).window.sources
    return win_update(name, 1.0, dict.fromkeys(sources, 1.0), True, False, require_mutex)


# ---- mutexes, versions, P ----


def win_mutex(
    name: str, for_self: bool = False, ranks: Iterable[int] | None = None
) -> AbstractContextManager[None]:
    """Hold the window's mutex at ranks, by default the out-neighbours, or our own.

    It excludes workers from each other, in the order in which they asked; who holds it may take it
    again. for_self: our own; ranks then says whom to keep out, by default everybody. Who dies
    holds nothing any more. Taken in the order of ranks; StallError after op_timeout_s.
    """
    return current().groups.windows.mutex(name, for_self=for_self, ranks=ranks)


def get_win_version(name: str) -> dict[int, int]:
    """Count, for each in-neighbour, the puts and gets since the last update."""
    return current().groups.windows.find(name).window.versions()


def win_associated_p(name: str) -> float:
    """Return P of this worker: the window's own array / P is what push-sum is after."""
    return current().groups.windows.find(name).window.p


def turn_on_win_ops_with_associated_p() -> None:
    """Let P travel with values from now on: all that is done to values is done to P too."""
    current().groups.windows.has_p = True


def turn_off_win_ops_with_associated_p() -> None:
    """Let P stay where it is from now on."""
    current().groups.windows.has_p = False
