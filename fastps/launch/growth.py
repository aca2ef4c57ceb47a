# SPDX-License-Identifier: Apache-2.0
"""The machines of a job whose hosts come and go: which to start, and which to let go.

A host that the script lists, and that the job does not use, gets workers that join the job. One
that it lists no more is told to end: its workers leave. A host whose workers have failed is used
again after a pause, which doubles each time. The number of workers of a host is that of its first
use. Used from the launcher's main thread.
"""

from __future__ import annotations

import dataclasses
import signal
from collections import Counter
from collections.abc import Callable, Sequence

from fastps.launch.cause import Part
from fastps.launch.discovery import HostScript
from fastps.launch.hosts import Host
from fastps.launch.limits import StartError
from fastps.launch.machine import Machine
from fastps.launch.options import Options, joining_layout
from fastps.launch.output import Screen

PAUSE_S, MAX_PAUSE_S = 10.0, 600.0  # before a host is used again
ANSWER_S = 60.0  # for a new host to answer


class Growth:
    """Follows the script's list."""

    def __init__(
        self, options: Options, script: HostScript,
        start: Callable[[Options, Host, int, int], Machine], screen: Screen,
    ) -> None:  # fmt: skip
        """options: with the hosts of the start. start: starts a machine, by place and number."""
        self._options, self._script, self._start, self._screen = options, script, start, screen
        self._hosts = {number: host.name for number, host in enumerate(options.hosts)}
        self._gone: set[int] = set()  # numbers of machines that were told to end
        self._answer_by: dict[int, float] = {}
        self._n_failures: Counter[str] = Counter()
        self._again_at: dict[str, float] = {}
        self._seen: set[int] = set()  # numbers of machines whose end was seen

    def wait_s(self, now: float) -> float:
        """Return the seconds until follow() has something to do."""
        return self._script.wait_s(now)

    def has_gone(self, part: Part) -> bool:
        """Return whether a machine has been told to end."""
        return part.rank in self._gone

    def follow(self, machines: Sequence[Machine], now: float) -> list[Machine]:
        """Let go of machines whose hosts are listed no more; start those of new ones."""
        listed = self._script.poll(now)
        self._note_ends(machines, now)
        ends_well = any(one.exit_code == 0 and not self.has_gone(one) for one in machines)
        if listed is None or ends_well:  # the job comes to its end
            return []
        names = {host.name for host in listed}
        used = {self._hosts[one.rank]: one for one in machines if one.is_alive}
        for name, machine in used.items():
            if name not in names and not self.has_gone(machine):
                self._let_go(machine)
        new = [host for host in listed
               if host.name not in used and self._again_at.get(host.name, now) <= now]  # fmt: skip
        found: list[Machine] = []
        for host in new:
            number = len(machines) + len(found)
            begun = self._begin(host, number, now)
            found += [] if begun is None else [begun]
        return found

    def _note_ends(self, machines: Sequence[Machine], now: float) -> None:
        for machine in machines:
            late = not machine.is_ready and self._answer_by.get(machine.rank, now) < now
            if machine.is_alive and late and not self.has_gone(machine):
                self._screen.report(
                    f"no answer from {machine.name} within {ANSWER_S:g} s, so it is not used"
                )
                self._gone.add(machine.rank)
                self._put_off(self._hosts[machine.rank], now)
                machine.send(signal.SIGKILL)
            if not machine.is_alive and machine.rank not in self._seen:
                self._seen.add(machine.rank)
                if machine.exit_code and not self.has_gone(machine):
                    self._put_off(self._hosts[machine.rank], now)

    def _put_off(self, name: str, now: float) -> None:
        pause_s = min(PAUSE_S * 2.0 ** self._n_failures[name], MAX_PAUSE_S)
        self._n_failures[name] += 1
        self._again_at[name] = now + pause_s

    def _let_go(self, machine: Machine) -> None:
        self._gone.add(machine.rank)
        if machine.rank == 0:
            self._screen.report(
                f"{machine.name} is listed no more, but is used on: it has the job's scheduler",
                is_alarm=True,
            )
            return
        self._screen.report(f"{machine.name} is listed no more; its workers leave")
        machine.send(signal.SIGTERM)

    def _begin(self, host: Host, number: int, now: float) -> Machine | None:
        assert host.counts is not None
        layout = joining_layout(host.counts[0])
        options = dataclasses.replace(self._options, layout=layout, join=("", 0))
        try:
            machine = self._start(options, host, layout.machine, number)
        except StartError as error:
            self._screen.report(f"{host.name} is not used: {error}", is_alarm=True)
            self._put_off(host.name, now)
            return None
        self._screen.report(f"{host.name} is new; {host.counts[0]} workers there join")
        self._hosts[number], self._answer_by[number] = host.name, now + ANSWER_S
        return machine
