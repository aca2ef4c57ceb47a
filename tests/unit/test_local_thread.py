# SPDX-License-Identifier: Apache-2.0
"""What the threads of another process of this machine do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from fastps.control.local_thread import stat_of, state_of

NAMED = "open('/proc/self/comm', 'w').write('some (name) R'); print(flush=True); "


@pytest.mark.parametrize(
    ("work", "state"),
    [("import time; time.sleep(60)", "S"), ("\nwhile True: pass", "R"), ("input()", "T")],
)
def test_the_state_of_a_thread(work: str, state: str) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", NAMED + work], **pipes) as process:
        process.stdout.readline()
        if state == "T":
            process.send_signal(signal.SIGSTOP)
        until = time.monotonic() + 30
        while state_of(process.pid, "some (name)") != state:
            assert time.monotonic() < until
        process.kill()
    assert state_of(process.pid, "some (name)") == ""
    assert stat_of(os.getpid(), "some (name)") is None
