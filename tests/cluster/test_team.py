# SPDX-License-Identifier: Apache-2.0
"""fastps.run(), teams of workers that keep their state, and cells of executed notebooks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from harness import ROOT, clean_environ

import fastps
from fastps.launch.team_protocol import pack, receive, unpack_answer
from fastps.notebook import Team


def total(factor, *, plus=0):
    """Sum ranks."""
    found = fastps.allreduce(np.array([fastps.rank() * factor + plus]), op=fastps.Sum)
    print(f"worker {fastps.rank()} was here")
    return fastps.rank(), int(found[0])


def fails():
    """Fail on one worker, for whom the others wait."""
    if fastps.rank() == 1:
        raise LookupError("nothing there")
    fastps.allreduce(np.ones(3))


def test_run_gives_results_by_rank_shows_output_and_raises_what_a_worker_raised(capfd):
    assert fastps.run(total, (2,), {"plus": 1}, np=3) == [(0, 9), (1, 9), (2, 9)]
    shown = capfd.readouterr().out
    assert all(f"[worker {rank}] worker {rank} was here" in shown for rank in range(3))
    began = time.monotonic()
    with pytest.raises(LookupError, match="nothing there") as caught:
        fastps.run(fails, np=2)
    assert "worker 1" in caught.value.__notes__[0]
    assert "in fails" in caught.value.__notes__[0]
    assert time.monotonic() - began < 60


def test_a_team_keeps_its_state_over_failures_limits_and_interrupts(capfd):
    with Team(2) as team:
        team.execute("import fastps, numpy as np\nx = 10 * fastps.rank()")
        team.execute("x + 1")
        team.push(y=5)
        team.execute("z = x + y")
        assert team.pull("z") == [5, 15]
        assert "[worker 1] 11" in capfd.readouterr().out
        with pytest.raises(LookupError):
            team.run(fails)
        assert team.run(total, 1) == [(0, 1), (1, 1)]
        with pytest.raises(fastps.StallError, match="worker 0, worker 1 did not finish"):
            team.execute("import time\ntime.sleep(100)", timeout_s=0.5)
        assert team.pull("z") == [5, 15]
        with pytest.raises(NameError):
            team.pull("unknown")
        with pytest.raises(fastps.PeerLostError, match=r"worker 1 .* ended with exit code 3"):
            team.execute("import os\nif fastps.rank() == 1: os._exit(3)\nfastps.barrier()")
        with pytest.raises(fastps.ShutdownError, match="restart"):
            team.pull("z")
        team.restart()
        assert team.run(total, 1) == [(0, 1), (1, 1)]


class TwoWords(Exception):
    """An error that is pickled, and cannot be unpickled."""

    def __init__(self, name, value):
        super().__init__(f"bad {name} {value}")


class Locked(Exception):
    """An error that cannot be pickled."""

    def __init__(self):
        super().__init__("it has a lock")
        self.lock = threading.Lock()


class Mute(TwoWords):
    """An error like it, without a text."""

    def __str__(self):
        raise LookupError("no text")


class Odd(Exception):
    """An error that becomes something else on its way."""

    def __reduce__(self):
        return int, (3,)


def refuse(*_):
    raise ValueError("not here")


class Fragile:
    """A result that is pickled, and cannot be unpickled."""

    def __reduce__(self):
        return refuse, ()


def raises(error):
    """Raise an error on worker 1 alone, whom nobody waits for."""
    if fastps.rank() == 1:
        raise {
            "two words": lambda: TwoWords("lr", 3), "mute": lambda: Mute("lr", 3),
            "locked": Locked, "odd": Odd,
            "exit": lambda: SystemExit(0), "exit 3": lambda: SystemExit(3),
            "exit of words": lambda: SystemExit("bye"), "generator": GeneratorExit,
        }[error]()  # fmt: skip


def returns(what):
    """Return from worker 1 what does not arrive."""
    if fastps.rank() == 1:
        return {"fragile": Fragile, "locked": threading.Lock}[what]()
    return None


def inheritable_sockets():
    """List the sockets that a program started here would have."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode) and os.get_inheritable(int(name)):
                found.append(int(name))
    return found


def test_programs_that_a_worker_starts_cannot_write_to_its_driver():
    assert fastps.run(inheritable_sockets, np=2) == [[], []]


def test_what_a_worker_raised_or_returned_is_told_whatever_it_is():
    with Team(2) as team:
        for error, words in {
            "two words": "TwoWords: bad lr 3",
            "locked": "Locked: it has a lock",
            "mute": "Mute: <exception str",
            "odd": "Odd$",
            "exit": r"the worker called sys.exit\(0\); return a value",
            "exit 3": r"the worker called sys.exit\(3\)",
            "exit of words": r"the worker called sys.exit\('bye'\)",
            "generator": "GeneratorExit",
        }.items():
            with pytest.raises(RuntimeError, match=words) as caught:
                team.run(raises, error)
            assert "worker 1:\nTraceback" in caught.value.__notes__[0], error
            assert "in raises" in caught.value.__notes__[0], error
        with pytest.raises(
            RuntimeError, match=r"of type .*Fragile, cannot be unpickled: Value"
        ) as caught:
            team.run(returns, "fragile")
        assert "worker 1" in caught.value.__notes__[0]
        with pytest.raises(TypeError, match=r"of type _thread\.lock, cannot be pickled"):
            team.run(returns, "locked")
        with pytest.raises(RuntimeError, match=r"the worker called sys.exit\(0\)"):
            team.execute("import sys; sys.exit(0)")
        assert team.run(total, 1) == [(0, 1), (1, 1)]
    with pytest.raises(RuntimeError, match="TwoWords: bad lr 3"):
        fastps.run(raises, ("two words",), np=2)


def test_a_worker_answers_every_order_whenever_ctrl_c_comes():
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "fastps.launch.team_member", str(theirs.fileno())]
    with ours, theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        ours.settimeout(60)
        ours.sendall(pack(("put", ({"x": 1},))))
        assert unpack_answer(receive(ours), 0) == (True, None)
        stop = threading.Event()

        def interrupts():
            while not stop.is_set():
                process.send_signal(signal.SIGINT)
                stop.wait(0.0003)

        thread = threading.Thread(target=interrupts)
        thread.start()
        try:
            for _ in range(1000):
                ours.sendall(pack(("get", ("x",))))
                is_well, value = unpack_answer(receive(ours), 0)
                assert value == 1 if is_well else isinstance(value, KeyboardInterrupt)
        finally:
            stop.set()
            thread.join()
        ours.sendall(pack(("end", ())))
        assert process.wait(60) == 0


def test_ctrl_c_ends_all(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import time
        import fastps

        def sleeps():
            print("asleep", flush=True)
            time.sleep(100)

        if __name__ == "__main__":
            fastps.run(sleeps, np=2)
    """)
    )
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=clean_environ() | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    with process:
        assert "asleep" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in stderr
    assert process.returncode == -signal.SIGINT


CELLS = [
    "%load_ext fastps.notebook\n%fastps start -np 2",
    "%%fastps\nstate = fastps.rank() + 1\ndef twice(x):\n    return 2 * x",
    "%%fastps\nfloat(fastps.allreduce(np.array([twice(state)], float), op=fastps.Sum)[0])",
    "import fastps\ndef here():\n    return fastps.rank()\n"
    "workers.run(here), workers.pull('state')",
    "try:\n    get_ipython().run_cell_magic('fastps', '--timeout 1', 'import time; time.sleep(9)')"
    "\nexcept Exception as error:\n    print(type(error).__name__)",
    "%%fastps\nstate",
    "%fastps restart",
    "%%fastps\n'state' in globals()",
    "%fastps stop",
]
RUN_CELLS = """
import json, sys, nbformat
from nbclient import NotebookClient
cells = [nbformat.v4.new_code_cell(one) for one in json.loads(sys.argv[1])]
notebook = nbformat.v4.new_notebook(cells=cells)
NotebookClient(notebook, timeout=150, kernel_name="python3").execute()
print(json.dumps(["".join(out.get("text", "") or out.get("data", {}).get("text/plain", "")
                          for out in cell["outputs"]) for cell in notebook.cells]))
"""


@pytest.mark.timeout(240)
def test_a_notebook_runs_cells_on_all_workers(tmp_path):
    environ = clean_environ() | {"PYTHONPATH": str(ROOT), "IPYTHONDIR": os.fspath(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN_CELLS, json.dumps(CELLS)],
        env=environ, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    shown = json.loads(found.stdout.splitlines()[-1])
    assert shown[0] == "2 workers\n"
    assert sorted(shown[2].splitlines()) == ["[worker 0] 6.0", "[worker 1] 6.0"]
    assert shown[3] == "([0, 1], [1, 2])"
    assert "StallError" in shown[4]
    assert sorted(shown[5].splitlines()) == ["[worker 0] 1", "[worker 1] 2"]
    assert sorted(shown[7].splitlines()) == ["[worker 0] False", "[worker 1] False"]
    assert shown[8] == "no workers\n"
