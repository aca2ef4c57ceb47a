# SPDX-License-Identifier: Apache-2.0
"""Start one machine's share of a job, for a launcher elsewhere that leads it.

fastps-run -H starts `python -m fastps.launch.follower` by ssh on each host. The follower reads
everything from its standard input, so that no secret appears in a command line or an environment:
a request with the token, then the scheduler's address, then orders. When that input ends, as with
a lost connection, the follower ends all that it has started (survival.py). Its own messages are
lines on standard output that begin with a mark from the request; other lines are output of the
processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import select
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from fastps.config import load, process_environment
from fastps.config.token import hold_token
from fastps.config.versions import version_of
from fastps.errors import ConfigError, FastPSError, TransportError
from fastps.launch import survival
from fastps.launch.cause import Cause
from fastps.launch.exit_report import EXIT_SETTINGS, show_end
from fastps.launch.job import SignalInbox
from fastps.launch.limits import hold_standard_streams
from fastps.launch.options import Options
from fastps.launch.output import Screen, outlets
from fastps.launch.plan import Identity, inherited_environment, make_plan
from fastps.launch.request import unpack
from fastps.launch.run import make_timeline, prepare, run_plan
from fastps.launch.secrets import Handout
from fastps.launch.torch_names import KeptPort
from fastps.transport.interfaces import own_address

REQUEST_S = 60.0  # for the leader to send its request
OF_A_STEP, OF_THE_JOB = ("SLURM_", "PMI"), ("SLURM_JOB_", "SLURM_LAUNCH")  # variables of srun
START_S = 3600.0  # for the other machines to be reached; the leader gives up much earlier


class Orders(SignalInbox):
    """Receive signals and, on the same descriptor, the lines of the leader."""

    is_users = False

    def __init__(self) -> None:
        """Take over standard input, so that no process of the job inherits it."""
        self._source = os.dup(0)
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 0)
        os.close(nowhere)
        self._pending = b""
        self._is_open = True
        self._both = select.epoll()
        try:
            self._both.register(self._source, select.EPOLLIN)
        except PermissionError:
            raise ConfigError(
                "fastps-run -H starts this program on each host and sends it requests; run "
                "fastps-run instead (fastps-run --help)"
            ) from None

    def read(self, timeout_s: float) -> Mapping[str, Any] | None:
        """Return the next line, None when the leader has gone; TransportError after timeout_s."""
        until = time.monotonic() + timeout_s
        while b"\n" not in self._pending and self._is_open:
            if not select.select([self._source], [], [], max(until - time.monotonic(), 0))[0]:
                raise TransportError(
                    f"the leader of this job has sent nothing for {timeout_s:g} s"
                )
            self._receive()
        return next(iter(self._lines(1)), None)

    def __enter__(self) -> Orders:
        """Start to receive signals too."""
        super().__enter__()
        self._both.register(super().fileno(), select.EPOLLIN)
        return self

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a signal or a line has come."""
        return self._both.fileno()

    def take(self) -> list[int]:
        """Return the signals that came, from the kernel or from the leader."""
        found = super().take()
        if self._is_open and select.select([self._source], [], [], 0)[0]:
            self._receive()
        for line in self._lines():
            number = int(line.get("signal", 0))
            found += [signal.SIGTERM] * 2 if number == signal.SIGKILL else [number]
        if not self._is_open and self._source >= 0:
            self._source = -1
            if not survival.outlives_leader():
                found.append(signal.SIGTERM)
        return self._sort([number for number in found if number])

    def _receive(self) -> None:
        data = os.read(self._source, 1 << 16)
        self._pending += data
        if not data:
            self._is_open = False
            self._both.unregister(self._source)
            os.close(self._source)

    def _lines(self, most: int = -1) -> list[Mapping[str, Any]]:
        *lines, self._pending = self._pending.split(b"\n", most)
        return [json.loads(line) for line in lines]


@dataclasses.dataclass
class LeaderChannel:
    """Send the follower's messages to the leader, on standard output."""

    screen: Screen
    mark: str

    def send(self, **news: Any) -> None:
        """Write one line."""
        self.screen.write_raw(f"{self.mark} {json.dumps(news)}".encode())

    def send_cause(self, cause: Cause) -> None:
        """Send why the job ends, as soon as it is known here."""
        part = cause.part
        who, how = ("", cause.text) if part is None else (part.describe(), cause.how)
        self.send(failed={
            "who": who, "how": how, "code": cause.exit_code, "accusation": cause.accusation,
            "words": cause.words,
        })  # fmt: skip


def main() -> int:
    """Carry out the leader's request; return the exit code of this machine's share."""
    hold_standard_streams()
    screen = Screen(*outlets(1, 2), has_colour=False)
    try:
        orders = Orders()
        request = orders.read(REQUEST_S)
    except FastPSError as error:
        screen.report(str(error), is_alarm=True)
        return EXIT_SETTINGS
    if request is None:
        return EXIT_SETTINGS
    leader = LeaderChannel(screen, str(request["mark"]))
    try:
        try:
            code = _follow(request, orders, leader)
        except FastPSError as error:
            leader.send_cause(Cause(str(error), EXIT_SETTINGS))
            code = EXIT_SETTINGS
        leader.send(ended=code)
        screen.finish(patience_s=1.0)
    except BrokenPipeError:
        return 128 + signal.SIGPIPE
    return code


def _follow(request: Mapping[str, Any], orders: Orders, leader: LeaderChannel) -> int:
    environment = _environment(request)
    check_version(str(request["version"]))
    go_to(str(request["folder"]))
    options = unpack(request["options"])
    facts: dict[str, object] = dict(_addresses(environment, str(request["way"])))
    with contextlib.ExitStack() as stack:
        if 0 in options.layout.worker_ranks:
            facts["kept"] = stack.enter_context(contextlib.closing(KeptPort())).number
        leader.send(ready=facts)
        return _work(options, environment, str(request["token"]), orders, leader)


def _work(
    options: Options,
    environment: Mapping[str, str],
    token: str,
    orders: Orders,
    leader: LeaderChannel,
) -> int:
    """Wait for the scheduler's address, start this machine's share, and watch it to its end."""
    job = orders.read(START_S)
    if job is None:
        return EXIT_SETTINGS
    inherited = inherited_environment(environment)
    identity = Identity(
        options.job_id,
        hold_token(token),
        (str(job["host"]), int(job["port"])) if options.layout.needs_scheduler else None,
        (str(job["master"][0]), int(job["master"][1])),
    )
    identity, meeting = prepare(options, identity, inherited, report=leader.screen.report)
    leader.send(bound=0 if identity.scheduler is None else identity.scheduler[1])
    secret = load(environ={**inherited, **dict([identity.secret or ("", "")])}).token_bytes()
    plan = make_plan(options, identity, cpus=len(os.sched_getaffinity(0)), inherited=inherited)
    with orders:
        cause = run_plan(
            options, Handout(secret).hand_out(plan), leader.screen, orders, inherited, meeting,
            on_cause=leader.send_cause, forward_paces=lambda paces: leader.send(paces=paces),
        )  # fmt: skip
        if options.timeline is not None:
            make_timeline(leader.screen, options.timeline, is_whole=not options.layout.is_spread)
        return show_end(leader.screen, orders, cause, options, has_report=False)


def _environment(request: Mapping[str, Any]) -> dict[str, str]:
    """Merge this machine's environment with the request's; drop the variables of a srun step."""
    own = {
        name: value
        for name, value in process_environment().items()
        if not name.startswith(OF_A_STEP) or name.startswith(OF_THE_JOB)
    }
    found = {**own, **request["environment"]}
    if request["is_python_first"]:  # as where an environment of Python is activated
        folder = str(pathlib.Path(sys.executable).parent)
        found["PATH"] = f"{folder}:{found.get('PATH', os.defpath)}"
    return found


def check_version(theirs: str) -> None:
    """Raise ConfigError if the leader has another version of fastps."""
    if (ours := version_of("fastps")) != theirs:
        raise ConfigError(
            f"this machine has fastps {ours}, but the job was started with {theirs}; install the "
            "same version on all machines"
        )


def go_to(folder: str) -> None:
    """Change to the folder in which the job was started; ConfigError if it is missing here."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise ConfigError(
            f"the folder of the job, {folder}, cannot be used on this machine ({error.strerror}); "
            "start the job in a folder that all machines share, or copy it to the same path"
        ) from error


def _addresses(environment: Mapping[str, str], way: str) -> dict[str, str]:
    """Return the address of this machine for the others, and the one it was reached from."""
    ssh = environment.get("SSH_CONNECTION", "").split()
    reached_by = ssh[0] if len(ssh) == 4 and way == "ssh" else ""
    if way == "srun":
        reached_by = environment.get("SLURM_LAUNCH_NODE_IPADDR", "")
    given = {
        name: value
        for name, value in environment.items()
        if name in ("FASTPS_HOST", "FASTPS_INTERFACE") and value
    }
    if given or (reached_by and way == "srun"):
        own = own_address(load({"scheduler_host": reached_by or "127.0.0.1"}, given))
    else:
        own = ssh[2] if reached_by else ""
    return {"own": own, "theirs": reached_by}


if __name__ == "__main__":
    sys.exit(main())
