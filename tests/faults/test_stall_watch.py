# SPDX-License-Identifier: Apache-2.0
"""A job that waits says for whom, with the stack of who is late; so does an interrupted one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from harness import clean_environ

LIMIT_S = 60.0
PROGRAM = """
import time, threading
import numpy as np
import fastps

fastps.init()
x = np.ones(1000, np.float32)

def dawdle(seconds):
    time.sleep(seconds)

def step():
    fastps.push_pull(x, "w")

step()
fastps.allreduce(x)
if fastps.rank() == 1:
    dawdle(2.2)
step()
if fastps.rank() == 1:
    dawdle(2.2)
fastps.allreduce(x)
print("both", flush=True)
if fastps.rank() == 1:
    dawdle(30.0)
try:
    fastps.synchronize(fastps.push_pull_async(x, "w"), timeout_s=2.5)
except fastps.StallError as error:
    print("error:", error, flush=True)
fastps.broadcast_object(None, 1)
"""


def test_stalls_are_told_with_stacks_and_an_interruption_too(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    command = [sys.executable, "-m", "fastps.launch.run", "-np", "3", sys.executable, str(path)]
    environ = clean_environ() | {"PYTHONPATH": os.getcwd(), "FASTPS_STALL_WATCH_S": "0.8"}
    with subprocess.Popen(
        command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        lines, end = [], time.monotonic() + LIMIT_S
        assert process.stdout is not None
        while sum("error:" in line for line in lines) < 2:
            assert time.monotonic() < end, lines
            lines.append(process.stdout.readline())
        time.sleep(1.2)
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=LIMIT_S)[0]
    said = [line for line in lines if "[scheduler]" in line]
    late = ["worker 1 (", "in dawdle <", "in it: worker 0, worker 2"]
    (sum_line, *again) = [line for line in said if "tensor 'w' (operation 2 on it) waits" in line]
    assert len(again) <= 1, said
    assert all(part in sum_line for part in [*late, "has begun 1 operations on it"]), sum_line
    group = [line for line in said if "allreduce (operation 2 without a name) waits" in line]
    assert all(part in group[0] for part in late), said
    for line in lines:
        if "error:" in line:
            assert all(part in line for part in [*late, "(operation 3 on it)", "2.5 s"]), line
    first = rest.index("SIGINT: ending the workers")
    told = rest.index("blob 'object' waits for", first)
    assert "in dawdle <" in rest[told:].splitlines()[0], rest
    assert told < rest.index("KeyboardInterrupt")
