# SPDX-License-Identifier: Apache-2.0
"""The command bpslaunch: start one role of a BytePS job, as DMLC_ variables describe it.

DMLC_ROLE=scheduler or server becomes fastps-server. On a machine of workers, bpslaunch starts its
command once for each local rank, and ends the others when one fails. A job on one machine needs no
scheduler or server, as with BytePS. A validator (DMLC_WORKER_TYPE of ZenoPS) is one process.
Threads: none; runs in the main thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from fastps.config import process_environment, role_given, versions
from fastps.config.closed_pipe import ends_quietly
from fastps.errors import ConfigError
from fastps.launch.job import PASSED_ON
from fastps.launch.plan import SERVER_MODULE
from fastps.launch.torch_names import place_variables

_USAGE = """\
usage: bpslaunch COMMAND ...

Start the role that DMLC_ROLE names: the scheduler, a server, or the worker processes of this
machine. DMLC_WORKER_TYPE=validator starts a validator, which needs DMLC_VALIDATOR_ID; every role
then needs DMLC_NUM_VALIDATOR.
Required: DMLC_NUM_WORKER (number of machines). With several machines also DMLC_ROLE,
DMLC_WORKER_ID, DMLC_NUM_SERVER, DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT, and FASTPS_TOKEN_FILE or
FASTPS_TOKEN.
BYTEPS_LOCAL_SIZE (else the length of NVIDIA_VISIBLE_DEVICES, else 1) is the number of worker
processes of each machine; if it is not 1, all roles need it. Tools of PyTorch, such as Hugging
Face's Trainer, also need MASTER_ADDR and MASTER_PORT of the machine with DMLC_WORKER_ID 0;
bpslaunch sets RANK and the like. `fastps-run` is simpler.
"""
_GRACE_S = 5.0


@ends_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status of the first process that failed, else 0."""
    command = list(sys.argv[1:] if arguments is None else arguments)
    environment = process_environment()
    if command[:1] in (["-h"], ["--help"]):
        sys.stdout.write(_USAGE)
        return 0
    if command[:1] == ["--version"]:
        sys.stdout.write(f"{versions.describe()}\n")
        return 0
    try:
        return _launch(command, environment)
    except ConfigError as error:
        sys.stderr.write(f"bpslaunch: {error}\n")
        return 2


def _launch(command: list[str], environment: dict[str, str]) -> int:
    role = role_given(environment) or "worker"
    is_spread = _is_spread(environment)
    serve = versions.command_of(SERVER_MODULE)
    if role not in ("worker", "validator"):
        return subprocess.call([*serve, "--role", role]) if is_spread else 0
    if not command:
        raise ConfigError("no command given; try: bpslaunch python train.py")
    if role == "validator":
        for name in ("DMLC_NUM_VALIDATOR", "DMLC_VALIDATOR_ID"):
            _count(environment, name)
        return _wait([subprocess.Popen([*serve, "--role", role, "--", *command])])
    size = local_size(environment)
    if not is_spread:
        run = [*versions.command_of("fastps.launch.run"), "-np", str(size), "--", *command]
        return subprocess.call(run)
    machine, machines = (
        _count(environment, f"DMLC_{name}") for name in ("WORKER_ID", "NUM_WORKER")
    )
    children = [
        subprocess.Popen(command, env={
            **environment,
            **place_variables(machine * size + rank, machines * size, local_rank=rank,
                              local_size=size, group=machine, groups=machines),
            "DMLC_ROLE": "worker",
            "BYTEPS_LOCAL_RANK": str(rank),
            "BYTEPS_LOCAL_SIZE": str(size),
        })
        for rank in range(size)
    ]  # fmt: skip
    return _wait(children)


def _is_spread(environment: Mapping[str, str]) -> bool:
    """Return whether the job has more than the workers of one machine."""
    machines, forced = _count(environment, "DMLC_NUM_WORKER"), "BYTEPS_FORCE_DISTRIBUTED"
    others = environment.get("DMLC_NUM_VALIDATOR", "0").strip() or "0"
    return machines > 1 or any(
        one.strip() not in ("", "0") for one in (environment.get(forced, "0"), others)
    )


def local_size(environment: Mapping[str, str]) -> int:
    """Return the number of worker processes of this machine, as BytePS's launcher counts them."""
    if environment.get("BYTEPS_LOCAL_SIZE", "").strip():
        return _count(environment, "BYTEPS_LOCAL_SIZE")
    devices = environment.get("NVIDIA_VISIBLE_DEVICES", "").strip()
    return len([one for one in devices.split(",") if one.strip()]) or 1


def _count(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "").strip()
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} must be a whole number; see bpslaunch --help")
    return int(text)


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all children; once one has failed, or on Ctrl-C, end the others."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in children:
            child.send_signal(number)

    handlers: dict[int, Callable[..., Any]] = {signal.SIGTERM: signal.default_int_handler}
    handlers |= dict.fromkeys(PASSED_ON, pass_on)
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        failed = _first_failure(children)
    except KeyboardInterrupt:
        failed = -signal.SIGINT
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    _end(children)
    return failed if failed >= 0 else 128 - failed


def _first_failure(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until a child fails and return its status, or 0 when all have succeeded."""
    pidfds = {os.pidfd_open(child.pid): child for child in children}
    poller = select.poll()
    for pidfd in pidfds:
        poller.register(pidfd, select.POLLIN)
    try:
        for _ in children:
            pidfd = poller.poll()[0][0]
            poller.unregister(pidfd)
            if status := pidfds[pidfd].wait():
                return status
        return 0
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the children that still run: with SIGTERM, and after a grace period with SIGKILL."""
    for child in children:
        if child.poll() is None:
            child.terminate()
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
        if child.poll() is None:
            child.kill()
            child.wait()


if __name__ == "__main__":
    sys.exit(main())
