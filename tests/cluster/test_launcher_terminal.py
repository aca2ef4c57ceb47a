# SPDX-License-Identifier: Apache-2.0
"""One worker alone has the launcher's standard input: a pipe, or the terminal with a debugger."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import time

RUN = [sys.executable, "-m", "fastps.launch.run"]
DEBUGGED = "x = 40\nbreakpoint()\nprint('x is', x, flush=True)\n"


def test_one_worker_reads_what_is_piped_in_and_several_read_nothing():
    program = [sys.executable, "-c", "import sys; print('read', repr(sys.stdin.read()))"]
    for words, seen in (([], "read 'hello'"), (["-np", "2"], "read ''")):
        done = subprocess.run(
            [*RUN, *words, *program], input="hello", text=True, timeout=60, capture_output=True
        )
        assert done.returncode == 0, done.stderr
        assert f"[worker 0] {seen}" in done.stdout


def read_until(descriptor: int, text: str, shown: str = "") -> str:
    """Read a terminal until it shows a text or has ended."""
    deadline = time.monotonic() + 60
    with contextlib.suppress(OSError):  # the terminal has no other end any more
        while text not in shown and time.monotonic() < deadline:
            shown += os.read(descriptor, 4096).decode(errors="replace")
    assert text in shown, shown
    return shown


def test_a_breakpoint_works_on_a_terminal(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(DEBUGGED)
    # a shell-like parent owns the terminal, and has it again when the launcher has ended
    parent = (
        "import os, subprocess, sys; code = subprocess.call(sys.argv[1:]);"
        "print('again ours', os.tcgetpgrp(0) == os.getpgrp(), 'code', code, flush=True)"
    )
    pid, terminal = pty.fork()
    if not pid:
        command = [sys.executable, "-c", parent, *RUN, "-np", "1", sys.executable, str(script)]
        try:
            os.execv(command[0], command)
        finally:
            os._exit(99)
    try:
        read_until(terminal, "(Pdb)")
        os.write(terminal, b"x += 2\n")
        time.sleep(0.2)
        os.write(terminal, b"continue\n")
        shown = read_until(terminal, "code 0")
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
    assert "x is 42" in shown
    assert "again ours True" in shown
