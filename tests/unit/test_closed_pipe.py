# SPDX-License-Identifier: Apache-2.0
"""Commands whose output is no longer read end quietly with 141, as programs that SIGPIPE ends."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest

from fastps.config.closed_pipe import EXIT_CLOSED_PIPE, ends_quietly

ROOT = Path(__file__).parents[2]
PRINTING = {
    "doctor": ["fastps", "doctor", "--no-trial"],
    "version": ["fastps", "--version"],
    "help": ["fastps", "--help"],
    "graph": ["fastps", "graph", "ring", "-n", "4"],
    "config": ["fastps.config", "--explain"],
    "reduce": ["fastps.reduce", "--help"],
    "run": ["fastps.launch.run", "-np", "2", "--dry-run", "true"],
    "hosts": ["fastps.launch.run", "-np", "1", "-H", "localhost", "--dry-run", "true"],
    "server": ["fastps.server.main", "--version"],
    "bench": ["fastps.bench", "--help"],
    "byteps": ["fastps.launch.byteps", "--help"],
    "simulate": ["tools.simulate", "tensor", "--bytes", "1M"],
    "kernels": ["tools/bench/kernels.py", "--help"],
    "first": ["tools/bench/first.py", "--help"],
    "mutate": ["tools/mutate.py", "--list", "--count", "2"],
    "netlab": ["tools/netlab.py", "--help"],
    "chaos": ["tools.chaos", "--list", "--layouts", "memory"],
    "churn": ["tools.churn", "--help"],
    "wheels": ["tools/wheels.py", "--help"],
    "peers": ["tools/bench/peers/install.py", "--help"],
}


def run_closed(words: list[str], *, is_buffered: bool, errors: int) -> tuple[int, str]:
    """Run a module or script whose standard output has no reader.

    Return the exit status, as a shell shows it, and standard error.
    """
    reader, writer = os.pipe()
    os.close(reader)
    env = {**os.environ, "PYTHONUNBUFFERED": "" if is_buffered else "1"}
    program = words if words[0].endswith(".py") else ["-m", *words]
    done = subprocess.run(
        [sys.executable, *program], stdout=writer, stderr=errors, env=env, cwd=ROOT,
        text=True, check=False,
    )  # fmt: skip
    os.close(writer)
    status = done.returncode if done.returncode >= 0 else 128 - done.returncode
    return status, done.stderr or ""


@pytest.mark.parametrize("is_buffered", [True, False], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("command", PRINTING)
def test_a_command_without_reader_ends_quietly(command, is_buffered):
    found = run_closed(PRINTING[command], is_buffered=is_buffered, errors=subprocess.PIPE)
    assert found == (EXIT_CLOSED_PIPE, "")


def argparse_status() -> int:
    """Return the status after a wrong option: some versions of argparse raise BrokenPipeError."""
    return 2 if "OSError" in inspect.getsource(ArgumentParser._print_message) else 141


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["fastps.launch.run", "-np", "2", "--log-level", "INFO", "sleep", "60"], 141),
        (["fastps.launch.run", "--no-such-option"], argparse_status()),
        (["fastps.server.main", "--role", "nobody"], argparse_status()),
        (["fastps", "config", "--explain"], 141),
    ],
)
def test_messages_without_reader(words, status):
    found = run_closed(words, is_buffered=True, errors=subprocess.STDOUT)
    assert found == (status, "")


def test_no_tool_is_forgotten():
    """Programs whose names begin with _ are run by others, which read what they write.

    tools/rdma-vm ends its machines first, and may say so.
    """
    paths = [*(ROOT / "tools").rglob("[!_]*.py"), *(ROOT / "tools").rglob("__main__.py")]
    texts = {path: path.read_text() for path in paths}
    writing = {path: text for path, text in texts.items()
               if "__name__ ==" in text and re.search(r"argparse|print|stdout", text)
               and path.parent.name != "rdma-vm"}  # fmt: skip
    assert len(writing) > 25
    quiet = ("@ends_quietly", "SIGPIPE, signal.SIG_DFL")
    assert not [path for path, text in writing.items() if not any(word in text for word in quiet)]


def test_another_broken_pipe_is_an_error():
    def lose_a_link() -> int:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        ends_quietly(lose_a_link)()


def test_results_pass_through():
    def refuse() -> int:
        raise SystemExit(2)

    assert ends_quietly(lambda: 3)() == 3
    assert ends_quietly(lambda: None)() == 0
    with pytest.raises(SystemExit, match="2"):
        ends_quietly(refuse)()
