# SPDX-License-Identifier: Apache-2.0
"""Jobs that cannot start: an error in time that says what was tried and what to set."""

from __future__ import annotations

import dataclasses
import signal
import socket
import subprocess
import sys
import time

import programs_faults
from harness import ROOT, clean_environ
from job import WAIT_S, Job, command_of

TIMEOUT_S = 3.0
START_S = 40.0  # of an interpreter and its imports, on a loaded machine
TOKEN = "a token of 32 bytes for the tests"
ALONE = {
    "FASTPS_TOKEN": TOKEN, "FASTPS_JOB_ID": "job", "FASTPS_SIZE": "2", "FASTPS_NUM_SERVERS": "1",
    "FASTPS_START_TIMEOUT_S": str(TIMEOUT_S), "FASTPS_SCHEDULER_HOST": "127.0.0.1",
}  # fmt: skip
SERVER = (sys.executable, "-m", "fastps.server.main")
SCHEDULER = (*SERVER, "--role", "scheduler")
WORKER = command_of(programs_faults.join_only, {})


def begin(command: tuple[str, ...], environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start one process of a job that will not come to be."""
    return subprocess.Popen(
        command,
        env=clean_environ() | {"PYTHONPATH": str(ROOT)} | ALONE | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_errors_of_the_start_say_what_to_set():
    """All at once, since each waits for its timeout: command, settings, what the error says."""
    with socket.create_server(("127.0.0.1", 0)) as used, socket.create_server(
        ("127.0.0.1", 0)
    ) as gone:  # fmt: skip
        used_port, free_port = str(used.getsockname()[1]), str(gone.getsockname()[1])
        gone.close()
        free = {"FASTPS_SCHEDULER_PORT": free_port}
        unknown = ("no-such-host.invalid", "FASTPS_SCHEDULER_HOST")
        nowhere = {"FASTPS_SCHEDULER_HOST": "no-such-host.invalid"} | free
        cases: dict[str, tuple[tuple[str, ...], dict[str, str], tuple[str, ...]]] = {
            "worker without scheduler": (
                WORKER, free,
                ("TransportTimeout", f"127.0.0.1:{free_port}", "FASTPS_SCHEDULER_PORT"),
            ),
            "server without scheduler": (
                SERVER, free, ("TransportTimeout", f"127.0.0.1:{free_port}", "FASTPS_SCHEDULER")
            ),
            "port of something else": (
                WORKER, {"FASTPS_SCHEDULER_PORT": used_port},
                ("TransportTimeout", f"127.0.0.1:{used_port}", "FASTPS_SCHEDULER_PORT"),
            ),
            "worker, unknown host": (WORKER, nowhere, unknown),
            "server, unknown host": (SERVER, nowhere, unknown),
            "scheduler, port in use": (
                SCHEDULER, {"FASTPS_SCHEDULER_PORT": used_port},
                ("ConfigError", f"127.0.0.1:{used_port}", "FASTPS_SCHEDULER_PORT"),
            ),
            "server, port in use": (
                SERVER, free | {"FASTPS_PORT": used_port},
                ("ConfigError", f"127.0.0.1:{used_port}", "FASTPS_PORT"),
            ),
            "server, wrong interface": (
                SERVER, free | {"FASTPS_INTERFACE": "nosuch0"},
                ("ConfigError", "nosuch0", "FASTPS_INTERFACE", "lo"),
            ),
            "server, address of another machine": (
                SERVER, free | {"FASTPS_HOST": "192.0.2.1"},
                ("ConfigError", "192.0.2.1", "FASTPS_HOST"),
            ),
            "scheduler that nobody joins": (
                SCHEDULER, free | {"FASTPS_SCHEDULER_PORT": "0"},
                ("nobody joined within 3 s", "FASTPS_SCHEDULER_PORT", "FASTPS_START_TIMEOUT_S"),
            ),
            "no token": (WORKER, free | {"FASTPS_TOKEN": ""}, ("FASTPS_TOKEN",)),
        }  # fmt: skip
        started = time.monotonic()
        processes = {label: begin(case[0], case[1]) for label, case in cases.items()}
        try:
            for label, process in processes.items():
                output, _ = process.communicate(timeout=TIMEOUT_S + START_S)
                for words in cases[label][2]:
                    assert words in output, (label, words, output)
                assert "Traceback" not in output, (label, output)
                is_worker = cases[label][0] is WORKER
                assert (process.returncode == 0) == is_worker, (label, output)
            assert time.monotonic() - started < TIMEOUT_S + START_S
        finally:
            for process in processes.values():
                process.kill()
                process.communicate()


def test_missing_worker_is_named_to_all():
    environment = {"FASTPS_START_TIMEOUT_S": str(TIMEOUT_S)}
    with Job(
        programs_faults.join_only, workers=3, servers=1, environment=environment,
        skip=[("worker", 1)],
    ) as job:  # fmt: skip
        for rank in (0, 2):
            result = job.processes["worker", rank].result()
            name, text = result["error"]
            assert name == "StallError"
            assert "worker 1" in text
            assert "FASTPS_START_TIMEOUT_S" in text
            assert result["seconds"] < TIMEOUT_S + 5
        for process in (*job.servers, job.scheduler):
            assert process.wait() != 0, process.report()


def test_roles_started_too_often_and_wrong_tokens_do_no_harm():
    with Job(programs_faults.join_and_wait, workers=2, servers=1) as job:
        for worker in job.workers:
            worker.wait_line("WAITING")
        late = WORKER
        spec = dataclasses.replace(job.workers[1].spec, argv=late)
        short = {"FASTPS_START_TIMEOUT_S": str(TIMEOUT_S)}
        cases = {
            "third worker": (spec, {"FASTPS_RANK": "2"}),
            "second worker 1": (spec, {}),
            "wrong token": (spec, {"FASTPS_TOKEN": "wrong, and long enough"}),
            "other job": (spec, {"FASTPS_JOB_ID": "another"}),
            "larger job": (spec, {"FASTPS_SIZE": "5"}),
        }
        started = {}
        for number, (label, (base, changes)) in enumerate(cases.items()):
            settings = {**base.environment, **short, **changes}
            own = dataclasses.replace(base, rank=10 + number, environment=settings)
            started[label] = job.start(own)
        server = dataclasses.replace(job.servers[0].spec, rank=11)
        second = job.start(
            dataclasses.replace(server, environment={**server.environment, **short})
        )
        expected = {
            "third worker": ("ConfigError", ("FASTPS_SIZE",)),
            "second worker 1": ("ConfigError", ("started too often", "FASTPS_SIZE")),
            "wrong token": ("AuthError", ("FASTPS_TOKEN",)),
            "other job": ("AuthError", ("FASTPS_JOB_ID",)),
            "larger job": ("ConfigError", ("FASTPS_SIZE",)),
        }
        for label, process in started.items():
            name, text = process.result(WAIT_S)["error"]
            kind, words = expected[label]
            assert name == kind, (label, name, text)
            assert all(word in text for word in words), (label, text)
        assert second.wait() == 2
        assert "started too often" in second.stderr()
        for rank in (0, 1):
            job.processes["worker", rank].send(signal.SIGUSR1)
        for rank in (0, 1):
            assert job.processes["worker", rank].result() == "over"
