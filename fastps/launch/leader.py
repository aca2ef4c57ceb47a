# SPDX-License-Identifier: Apache-2.0
"""Lead a job on several machines from one command: reach all, start all, end all.

Each machine gets a follower (follower.py), by ssh, by srun within an allocation of SLURM, or as a
plain process on this machine. The job starts when every follower has answered: machine 0 binds a
port for the scheduler, the leader sends its address to the others, and all start their processes.
The first failure ends the whole job. The token goes only through the followers' standard input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import secrets
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastps.config import load
from fastps.config.versions import version_of
from fastps.errors import ConfigError
from fastps.launch.cause import Cause, Part
from fastps.launch.discovery import HostScript, await_slots, slots_of
from fastps.launch.exit_report import (
    EXIT_SETTINGS,
    make_screen,
    run_again,
    show_end,
    wants_live,
)
from fastps.launch.growth import Growth
from fastps.launch.hosts import Host, place
from fastps.launch.job import Job, SignalInbox
from fastps.launch.limits import StartError, provide_descriptors
from fastps.launch.machine import Machine
from fastps.launch.options import Options
from fastps.launch.output import Screen
from fastps.launch.plan import (
    Identity,
    choose_secret,
    goes_on,
    inherited_environment,
    make_plan,
)
from fastps.launch.processes import become_subreaper
from fastps.launch.progress_line import MergedLine
from fastps.launch.request import pack
from fastps.transport import sockets
from fastps.transport.encryption import check_carried

START_S = 60.0  # for all machines to answer, without --start-timeout
_TOKEN_BYTES = 32
_MARK_BYTES = 16
_LOOPBACK = "127.0.0.1"
_LEAST_GRACE_S = 5.0  # on top of a follower's grace for its workers, their helpers and servers
FOLLOWER = ("-P", "-m", "fastps.launch.follower")
# ssh never prompts, forwards nothing, and notices within 30 s that the network is gone.
SSH = ("-T", "-x", "-a", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10",
       "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")  # fmt: skip
# A step on one node with all resources of the allocation there.
SRUN = ("srun", "--nodes=1", "--ntasks=1", "--overlap", "--cpu-bind=none", "--mem=0", "--quiet")
# Variables that are sent to the other machines, beside those of --env; they keep their others.
TRAVELS = ("FASTPS_", "BYTEPS_", "PYTHON", "OMP_", "MKL_", "NUMBA_")
STAYS = ("FASTPS_HOST",)  # an address of this machine, which is not sent


def lead(options: Options, *, environment: Mapping[str, str]) -> int:
    """Run a job on all its hosts and return the exit code; only in the main thread.

    Blocks until everything has ended on all machines, or the connections to them have.
    """
    screen = make_screen(options, environment)
    options = dataclasses.replace(
        options,
        job_id=options.job_id or f"job-{secrets.token_hex(4)}",
        has_no_live=not wants_live(options),
    )
    if options.is_dry_run:
        sys.stdout.write("\n".join(_describe(options, environment)) + "\n")
        return 0
    try:
        token = _token(options, environment)
    except ConfigError as error:
        screen.report(str(error), is_alarm=True)
        return EXIT_SETTINGS
    with SignalInbox() as inbox:

        def run() -> Cause | None:
            return _run(options, environment, token, screen, inbox)

        cause = run_again(run, run(), screen, inbox, options.restarts)
        return show_end(screen, inbox, cause, options)


def _run(
    options: Options,
    environment: Mapping[str, str],
    token: str,
    screen: Screen,
    inbox: SignalInbox,
) -> Cause | None:
    """Start a follower on every machine and wait for the end of all."""
    become_subreaper()
    inherited = inherited_environment(environment)
    script = None
    if options.host_script:
        script = HostScript(
            options.host_script, options.layout.workers[0], lambda text: screen.report(text)
        )
        patience_s = options.start_timeout_s or START_S
        found = await_slots(script, options.n_at_start, patience_s, inbox)
        if isinstance(found, Cause):
            return found
        options = on_hosts(options, found)
    start = functools.partial(
        _start_machine, inherited=inherited, token=token, screen=screen,
        mark=f"fastps-{secrets.token_hex(_MARK_BYTES)}",
    )  # fmt: skip
    fleet = Fleet(options, screen, inbox, goes_on=goes_on(options, inherited))
    without_scheduler = dataclasses.replace(options.layout, machine=1)  # it runs on machine 0
    try:
        provide_descriptors(without_scheduler, n_children=len(options.hosts))
        for number, host in enumerate(options.hosts):
            fleet.add_machine(start(options, host, number, number))
    except StartError as error:
        fleet.set_cause(Cause(str(error), error.exit_code))
    if script is None:
        return fleet.run()
    fleet.grow = Growth(options, script, start, screen)
    with contextlib.closing(script):
        return fleet.run()


def on_hosts(options: Options, hosts: Sequence[Host]) -> Options:
    """Return the options of a job that begins on hosts that a script has listed."""
    total = min(slots_of(hosts), options.elastic_max or 0)
    layout = place(hosts, None, None, None, total=total)
    hosts = hosts[: len(layout.workers)]
    layout = dataclasses.replace(layout, names=tuple(host.address for host in hosts))
    return dataclasses.replace(options, hosts=tuple(hosts), layout=layout)


def _start_machine(
    options: Options, host: Host, place: int, number: int, *, inherited: Mapping[str, str],
    token: str, screen: Screen, mark: str,
) -> Machine:  # fmt: skip
    """Start the follower of a host, and request its share; place: of the host in the layout."""
    way = way_to(host, options)
    machine = Machine(
        number, host.address, command(host, way, options, inherited),
        environment=_local(inherited, way), screen=screen, mark=mark, python=_python(options),
    )  # fmt: skip
    words = request(options, place, way, inherited)
    machine.order(words | {"mark": mark, "token": token})
    return machine


class Fleet(Job):
    """Watch the machines of one job; they start when all of them have answered."""

    def __init__(
        self, options: Options, screen: Screen, inbox: SignalInbox, *, goes_on: bool
    ) -> None:
        """Start without machines; goes_on: other machines may continue without a lost one."""
        super().__init__(
            screen, inbox, grace_s=3 * options.grace_s + _LEAST_GRACE_S,
            timeout_s=options.timeout_s, goes_on=goes_on,
        )  # fmt: skip
        self._options = options
        self._machines: list[Machine] = []
        self._addresses: dict[str, Any] = {}  # that a machine needs to begin, once they are known
        self.grow: Growth | None = None
        self._line = MergedLine()
        self._patience_s = options.start_timeout_s or START_S
        self._answer_by: float | None = time.monotonic() + self._patience_s
        if not options.has_no_live:
            self.show_live(self._line)

    def add_machine(self, machine: Machine) -> None:
        """Watch one more machine, and handle its messages."""
        machine.on_news = self._on_news
        self._machines.append(machine)
        self.add(machine)

    def _on_news(self, machine: Machine, news: Mapping[str, Any]) -> None:
        if self.cause is not None:
            return
        is_first = machine.rank < len(self._options.hosts)
        ready = [one for one in self._first if one.is_ready]
        if "paces" in news:
            self._line.update(machine.rank, news["paces"])
        elif "bound" in news and machine.rank == 0:
            self._addresses = self._addresses_at(news["bound"])
            for other in self._first[1:]:
                other.begin(self._addresses)
        elif "ready" in news and not is_first:
            machine.begin(self._addresses)
        elif "ready" in news and len(ready) == len(self._options.hosts):
            self._answer_by = None
            self._machines[0].begin(self._addresses_at(self._options.scheduler_port))

    @property
    def _first(self) -> list[Machine]:
        """List the machines of the start."""
        return self._machines[: len(self._options.hosts)]

    def _addresses_at(self, port: int) -> dict[str, Any]:
        """Return the address of the scheduler, and of rank 0's port for tools of PyTorch."""
        facts = [machine.facts for machine in self._first]
        host = self._options.scheduler_host or rendezvous_host(facts)
        first = next(place for place, count in enumerate(self._options.layout.workers) if count)
        rank_0 = host if first == 0 else rendezvous_host([facts[first], *facts])
        return {"host": host, "port": port, "master": (rank_0, facts[first].get("kept", 0))}

    def _notice_ends(self) -> None:
        super()._notice_ends()
        failed: list[Part] = [one for one in self._machines if one.notice_failure()]
        if failed and not self._is_stopping:
            self._take_failed(failed)

    def _can_spare(self, part: Part) -> bool:
        """Return whether others may go on: the scheduler is on machine 0, and knows."""
        is_late = part.rank >= len(self._options.hosts)  # and may not have begun
        return isinstance(part, Machine) and part.rank != 0 and (part.has_begun or is_late)

    def _take_failed(self, failed: Sequence[Part]) -> None:
        gone = [] if self.grow is None else [part for part in failed if self.grow.has_gone(part)]
        self._lost += gone  # as it was told to
        if left := [part for part in failed if part not in gone]:
            super()._take_failed(left)

    def _serve(self, timeout_s: float) -> None:
        super()._serve(timeout_s)
        if self.grow is not None and self._addresses and not (self.cause or self._is_stopping):
            for machine in self.grow.follow(self._machines, time.monotonic()):
                self.add_machine(machine)

    def _sleep_s(self, now: float, until: float | None) -> float:
        wait_s = super()._sleep_s(now, until)
        if self.grow is not None:
            wait_s = min(wait_s, self.grow.wait_s(now))
        return wait_s if self._answer_by is None else min(wait_s, max(self._answer_by - now, 0.0))

    def _check_timeout(self) -> None:
        super()._check_timeout()
        if self._answer_by is not None and time.monotonic() >= self._answer_by:
            self._answer_by = None
            missing = [machine.name for machine in self._machines if not machine.is_ready]
            self.set_cause(Cause(
                f"no answer from {', '.join(missing)} within {self._patience_s:g} s, so nothing "
                "was started; raise --start-timeout if they are only slow", 1,
            ))  # fmt: skip


def rendezvous_host(facts: Sequence[Mapping[str, Any]]) -> str:
    """Choose the address of the scheduler from the facts of the machines, machine 0 first.

    The address at which machine 0 was reached, else the one from which others were reached: then
    machine 0 is this one.
    """
    candidates = [facts[0].get("own", ""), *(other.get("theirs", "") for other in facts[1:])]
    reached = [one for one in candidates if one and not sockets.is_loopback(one)]
    return str(reached[0]) if reached else _LOOPBACK


# ---- the followers' commands and requests


def way_to(host: Host, options: Options) -> str:
    """Return how a machine is reached: here, srun or ssh."""
    if options.has_srun:
        return "srun"
    own = socket.gethostname()
    names = ("localhost", own, own.partition(".")[0])
    is_here = host.name in names or sockets.is_own_address(host.name)
    return "here" if is_here else "ssh"


def command(
    host: Host, way: str, options: Options, inherited: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the command that starts the follower of a machine; it contains no secret."""
    if way == "here":
        return sys.executable, *FOLLOWER
    if way == "srun":
        return *SRUN, f"--nodelist={host.name}", _python(options), *FOLLOWER
    path = _python_path(inherited)
    there = ["exec", "env", f"PYTHONPATH={path}"] if path else ["exec"]
    return (
        "ssh", *shlex.split(options.ssh_args), *SSH,
        *(("-p", str(options.ssh_port)) if options.ssh_port else ()),
        *(("-i", str(options.ssh_identity)) if options.ssh_identity else ()),
        "--", host.name, shlex.join([*there, _python(options), *FOLLOWER]),
    )  # fmt: skip


def request(
    options: Options, number: int, way: str, inherited: Mapping[str, str]
) -> dict[str, Any]:
    """Return the request to a follower, without the secrets."""
    stays = () if way == "here" else STAYS
    return {
        "version": version_of("fastps"),
        "way": way,
        "folder": os.getcwd(),
        "options": pack(options, number),
        "environment": {
            name: value
            for name, value in inherited.items()
            if name.startswith(TRAVELS) and name not in stays
        },
        "is_python_first": _is_python_first(),
    }


def _python(options: Options) -> str:
    return options.remote_python or sys.executable


def _is_python_first() -> bool:
    """Return whether `python` here is this Python, so that it must be there too."""
    found = shutil.which("python") or ""
    return pathlib.Path(found).parent == pathlib.Path(sys.executable).parent


def _python_path(inherited: Mapping[str, str]) -> str:
    """Return PYTHONPATH with absolute folders."""
    words = [word for word in inherited.get("PYTHONPATH", "").split(os.pathsep) if word]
    return os.pathsep.join(map(os.path.abspath, words))


def _local(inherited: Mapping[str, str], way: str) -> dict[str, str]:
    """Return the environment of a follower's process on this machine; it has no token."""
    found = dict(inherited)
    if way != "ssh" and (path := _python_path(inherited)):
        found["PYTHONPATH"] = path
    return found


def _token(options: Options, environment: Mapping[str, str]) -> str:
    """Return the user's token, else a new one. Raises ConfigError."""
    given = {**inherited_environment(environment), **dict(options.environment)}
    mode = options.encrypt or given.get("FASTPS_ENCRYPT", "")
    if options.has_srun and mode:
        cure = "name the machines with -H: they are reached by ssh, which encrypts"
        check_carried(load(environ={"FASTPS_ENCRYPT": mode}), by="srun", cure=cure)
    secret = choose_secret(options, environment, new_token="")
    if secret is None or not secret[1]:
        return secrets.token_hex(_TOKEN_BYTES)
    return load(environ=dict([secret])).token_bytes().decode()


def _describe(options: Options, environment: Mapping[str, str]) -> list[str]:
    """Describe the start on every machine; values that are chosen later are shown as zero."""
    inherited = inherited_environment(environment)
    lines = ["# scheduler: a process of fastps-run on the first machine; token, address and port "
             "are chosen at the start"]  # fmt: skip
    where = options.scheduler_host
    identity = Identity(options.job_id, None, (where, options.scheduler_port), (where, 0))
    for number, host in enumerate(options.hosts):
        layout = dataclasses.replace(options.layout, machine=number)
        lines.append(f"# {host.name}, {layout.describe()}")
        lines.append(shlex.join(command(host, way_to(host, options), options, inherited)))
        share = dataclasses.replace(options, layout=layout)
        plan = make_plan(share, identity, cpus=len(os.sched_getaffinity(0)), inherited=inherited)
        for spec in plan:
            lines += [f"#   {spec.name}", f"#   {spec.render()}"]
    return lines
