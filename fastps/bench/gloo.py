# SPDX-License-Identifier: Apache-2.0
"""Gloo, the alternative that comes with PyTorch, measured in the same rounds.

Its workers are those of a fastps job, which starts and directs them; only torch.distributed is
timed. Threads: gloo's own.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import tempfile
from typing import Any

import fastps

GLOO = "gloo"


def is_there() -> bool:
    """Return whether PyTorch is installed; does not import it."""
    return importlib.util.find_spec("torch") is not None


class Gloo:
    """The process group of the workers of this job."""

    def __init__(self) -> None:
        """Find the others by a file that only this user can read."""
        self._torch = importlib.import_module("torch")
        self._dist = importlib.import_module("torch.distributed")
        folder = tempfile.TemporaryDirectory(prefix="fastps-bench-")
        atexit.register(folder.cleanup)
        place = fastps.broadcast_object(folder.name, name="fastps.bench.gloo")
        store = self._dist.FileStore(f"{place}/store", fastps.size())
        self._dist.init_process_group(
            GLOO, store=store, rank=fastps.rank(), world_size=fastps.size()
        )
        atexit.register(self._dist.destroy_process_group)

    def tensors(self, arrays: list[Any]) -> list[Any]:
        """Return tensors of torch that share the memory of arrays."""
        return [self._torch.from_numpy(array) for array in arrays]

    def reduce(self, tensors: list[Any], *, is_average: bool) -> None:
        """Sum tensors over all workers in place, all of them in flight at once."""
        works = [self._dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work, tensor in zip(works, tensors, strict=True):
            work.wait()
            if is_average:
                tensor.div_(
                    fastps.size(), rounding_mode=None if tensor.is_floating_point() else "floor"
                )
