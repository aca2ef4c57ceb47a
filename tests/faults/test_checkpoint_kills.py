# SPDX-License-Identifier: Apache-2.0
"""Whenever a save is killed, and whatever the disk refuses, a good checkpoint is there."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fastps import checkpoint
from fastps.errors import CheckpointError

KILLER = Path(__file__).with_name("programs_checkpoint_kills.py")
STATE = {"w": np.zeros(1000)}


def test_a_save_that_is_killed_at_any_call_leaves_a_good_checkpoint(tmp_path):
    run = subprocess.run(
        [sys.executable, KILLER, tmp_path / "a"], capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr + run.stdout
    kills = [line.split() for line in run.stdout.splitlines()]
    steps = [int(step) for _, step in kills]
    assert steps == sorted(steps)  # the one before, up to a call; from then on the new one
    assert set(steps) == {1, 2}
    assert {call for call, _ in kills} >= {"open", "mkdir", "write", "fsync", "rename", "unlink"}
    assert kills[steps.index(2) - 1][0] == "rename"


def test_a_limit_of_file_sizes_is_told_and_survived(tmp_path):
    checkpoint.save(STATE, tmp_path, step=1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        handle = checkpoint.save_async(STATE, tmp_path, step=2)
        with pytest.raises(CheckpointError, match=r"00000-of-00001\.safetensors: File too large"):
            handle.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert os.listdir(tmp_path) == ["step-1.1"]
    checkpoint.save(STATE, tmp_path, step=2)
    assert checkpoint.steps(tmp_path) == [1, 2]


@contextlib.contextmanager
def mounted(path: Path, options: str) -> Iterator[None]:
    """Mount a file system in memory."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    try:
        if subprocess.run(command, capture_output=True, check=False, timeout=20).returncode:
            pytest.skip("mounting needs root")
    except FileNotFoundError:
        pytest.skip("mount is missing")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True, timeout=20)


def test_a_full_disk_is_told_and_survived(tmp_path):
    disk = tmp_path / "disk"
    with mounted(disk, "size=64k,mode=700"):
        checkpoint.save(STATE, disk / "a", step=1)
        with pytest.raises(CheckpointError, match="No space left on device"):
            checkpoint.save({"w": np.zeros(20_000)}, disk / "a", step=2)
        assert checkpoint.restore(disk / "a").step == 1
        checkpoint.save(STATE, disk / "a", step=3, keep=1)
        assert checkpoint.steps(disk / "a") == [3]


def test_a_read_only_folder_is_told_and_survived(tmp_path):
    disk = tmp_path / "disk"
    with mounted(disk, "size=64k,mode=700"):
        checkpoint.save(STATE, disk / "a", step=1)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=20)
        for step in (2, 3):
            with pytest.raises(CheckpointError, match="Read-only file system"):
                checkpoint.save(STATE, disk / "a", step=step)
        assert checkpoint.restore(disk / "a").step == 1
        assert checkpoint.verify(disk / "a") == []
