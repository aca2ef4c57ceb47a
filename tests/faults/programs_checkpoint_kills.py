# SPDX-License-Identifier: Apache-2.0
"""Kill a process before, and within, each system call of a save: FOLDER.

Prints a line for each kill: the call, and the step that can be restored then.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from fastps import checkpoint

CALLS = ("open", "mkdir", "write", "fsync", "fdatasync", "rename", "unlink", "rmdir", "close")


def state_of(step: int) -> dict[str, Any]:
    """Make the state of a step."""
    return {"w": np.full(50, step), "b": [np.full(3, step, np.int8), step]}


def die_at(count: int) -> None:
    """Kill this process before a call of a save by its number; within it, if it writes."""
    left, lock = [count], threading.Lock()

    def watched(name: str) -> Any:
        kept = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            with lock:
                left[0] -= 1
                if left[0] == 0:
                    if name == "write":
                        kept(args[0], args[1][: len(args[1]) // 2])
                    sys.stdout.write(f"{name} ")
                    sys.stdout.flush()
                    os.kill(os.getpid(), signal.SIGKILL)
            return kept(*args, **options)

        return call

    for name in CALLS:
        setattr(os, name, watched(name))


def main() -> None:
    """Kill a save at each call, until it gets through."""
    folder = Path(sys.argv[1])
    for count in itertools.count(1):
        shutil.rmtree(folder, ignore_errors=True)
        checkpoint.save(state_of(1), folder, step=1)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            die_at(count)
            checkpoint.save(state_of(2), folder, step=2, keep=1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found = checkpoint.restore(folder)
        assert found is not None
        wanted = state_of(found.step)
        assert np.array_equal(found.state["w"], wanted["w"])
        assert np.array_equal(found.state["b"][0], wanted["b"][0])
        assert not checkpoint.verify(folder)
        checkpoint.save(state_of(3), folder, step=3, keep=1)
        assert os.listdir(folder) == ["step-3.3" if found.step == 2 else "step-3.2"]
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        print(found.step)


if __name__ == "__main__":
    main()
