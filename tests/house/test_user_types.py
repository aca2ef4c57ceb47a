# SPDX-License-Identifier: Apache-2.0
"""Type checkers see what the public operations return: mypy and pyright read this file.

Each assert_type() is checked by both, and the same lines run here as a job of one worker.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt
import torch
from house_source import ROOT

import fastps
import fastps.torch as fps

Floats = npt.NDArray[np.float32]
Array = np.ndarray[Any, Any]


class Net(torch.nn.Module):
    """A module of a user, whose call has types."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, float]:
        """Return the layer's output and the scale."""
        return self.layer(x) * scale, scale


def is_array(found: object) -> bool:
    """Return whether it is an array of the right values."""
    return isinstance(found, np.ndarray) and found.dtype == np.float32 and (found == 1.0).all()


def test_arrays_give_arrays_and_lists_give_lists() -> None:
    fastps.init()
    try:
        one: Floats = np.ones(4, np.float32)
        assert is_array(assert_type(fastps.push_pull(one, "one"), Floats))
        many = assert_type(fastps.push_pull([one, one], ["a", "b"]), list[Floats])
        assert isinstance(many, list)
        handle = assert_type(
            fastps.push_pull_async((one, one), ("a", "b")), fastps.Handle[list[Floats]]
        )
        found = assert_type(fastps.synchronize(handle), list[Floats])
        assert is_array(found[1])
        assert is_array(assert_type(fastps.allreduce(one), Floats))
        assert is_array(assert_type(fastps.allgather(one), Floats))
        assert is_array(assert_type(fastps.reducescatter(one), Floats))
        assert is_array(assert_type(fastps.reduce_to(one), Floats | None))
        assert is_array(assert_type(fastps.grouped_allreduce([one, one]), list[Floats])[1])
        assert is_array(assert_type(fastps.broadcast(one), Floats))
        assert is_array(assert_type(fastps.broadcast([one, one]), list[Floats])[1])
        assert is_array(assert_type(fastps.alltoall(one), Floats))
        rows, counts = assert_type(fastps.alltoall(one, [4]), tuple[Floats, Array])
        assert is_array(rows)
        assert counts.tolist() == [4]
        assert is_array(assert_type(fastps.neighbor_allreduce(one), Array))
        assert is_array(
            assert_type(fastps.neighbor_allreduce([one, one], name="n"), list[Array])[1]
        )
        assert is_array(assert_type(fastps.register(one), Floats))
    finally:
        fastps.shutdown()


def test_wrapped_torch_objects_keep_their_types() -> None:
    fps.init()
    try:
        model = fps.DistributedDataParallel(Net())
        assert isinstance(assert_type(model.module, Net), Net)
        output, scale = assert_type(model(torch.ones(3, 2), scale=2.0), tuple[torch.Tensor, float])
        assert output.shape == (3, 1)
        assert scale == 2.0
        optimizer = torch.optim.Adam(Net().parameters())
        optimizer = assert_type(fps.DistributedOptimizer(optimizer), torch.optim.Adam)
        assert isinstance(optimizer, torch.optim.Adam)
        assert isinstance(optimizer, fps.SynchronizingOptimizer)
        optimizer.synchronize()
        tensor = torch.ones(2)
        assert_type(fps.synchronize(fps.push_pull_async(tensor, "t")), torch.Tensor)
        mixed = assert_type(fps.neighbor_allreduce([tensor, tensor]), list[torch.Tensor])
        assert torch.equal(mixed[1], tensor)
        _, received = assert_type(fps.alltoall(tensor, [2]), tuple[torch.Tensor, torch.Tensor])
        assert received.tolist() == [2]
    finally:
        fps.shutdown()


def refused(model: fps.DistributedDataParallel[Net], one: Floats) -> None:
    """Make mistakes that a type checker must find: mypy reports an ignored error that is none."""
    model("text")  # type: ignore[arg-type]
    fastps.push_pull([one], name=3)  # type: ignore[call-overload]
    fastps.neighbor_allreduce(one, self_wait=1.0)  # type: ignore[call-overload]
    fps.DistributedOptimizer(model)  # type: ignore[type-var]


def test_editable_installations_show_type_checkers_the_sources() -> None:
    """A checker follows a line with a path; setuptools writes one where all is in one folder."""
    code = (
        "from distutils.core import run_setup\n"
        "print(run_setup('setup.py', stop_after='init').package_dir)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", "import setuptools\n" + code],
        cwd=ROOT, env={**os.environ, "FASTPS_ONLY": "none"}, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "{'': '.'}"
    assert (ROOT / "fastps" / "py.typed").exists()
