# SPDX-License-Identifier: Apache-2.0
"""Find and ask the processes of this user and machine for their status; compute rates.

Finds the sockets of `status.py` in the kernel's table and asks each for /status.json. Pure except
for that. Any user's sockets stand in that table, with any bytes as their names. Threads: the
caller's; look() blocks up to LOOK_S for each process that is stopped.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastps.telemetry.status import PREFIX
from fastps.transport import sockets

TABLE = Path("/proc/net/unix")
LOOK_S = 0.5
_MAX_BYTES = 1 << 20
_REQUEST = b"GET /status.json HTTP/1.0\r\n\r\n"


@dataclass(frozen=True)
class Look:
    """The status of one process, and when it was read."""

    at: float
    about: Mapping[str, Any]
    numbers: Mapping[str, float]
    links: Sequence[Mapping[str, Any]] = ()

    @property
    def key(self) -> tuple[str, str, int]:
        """Return the identity of the process, ordered as in a table: workers first."""
        return self.about["job"], {"worker": ""}.get(self.about["role"], self.about["role"]), (
            int(self.about["rank"])
        )  # fmt: skip


@dataclass(frozen=True)
class Pace:
    """What one process did between two looks, per second."""

    about: Mapping[str, Any]
    steps: float
    operations: float
    bytes_started: float
    bytes_sent: float
    bytes_received: float
    waiting: float  # share of the time
    links: int
    flows: Sequence[Flow] = ()


@dataclass(frozen=True)
class Flow:
    """Traffic of the links to one peer by one transport, per second."""

    peer: str
    way: str
    bytes_sent: float
    bytes_received: float


def names(table: str, job: str = "") -> list[str]:
    """List the sockets of a job, or of all, in the kernel's table.

    A connection that is accepted there has the name as well.
    """
    start = f" @{PREFIX}/{job}/" if job else f" @{PREFIX}/"
    return sorted({start[2:] + line.partition(start)[2] for line in table.splitlines()
                   if start in line})  # fmt: skip


def look(job: str = "") -> list[Look]:
    """Return the status of all processes of this user, of a job or of all jobs."""
    found = []
    for name in names(TABLE.read_text("ascii", "replace"), job):
        with contextlib.suppress(OSError, ValueError, KeyError):
            about = json.loads(_ask(name))
            numbers, links = about.pop("numbers"), about.pop("links", ())
            found.append(Look(time.monotonic(), about, numbers, links))
    return sorted(found, key=lambda one: one.key)


def _ask(name: str) -> bytes:
    deadline = time.monotonic() + LOOK_S
    with sockets.connect_unix(name, deadline=deadline) as sock:
        if not sockets.is_own_user(sock):
            raise OSError(f"the socket {name} belongs to another user")
        sock.sendall(_REQUEST)
        data = b""
        while len(data) < _MAX_BYTES and (part := sock.recv(_MAX_BYTES)):
            data += part
    return data.partition(b"\r\n\r\n")[2]


def paces(before: Sequence[Look], after: Sequence[Look]) -> list[Pace]:
    """Return the rates of the processes in both looks, without schedulers."""
    earlier = {one.key: one for one in before if one.about["role"] != "scheduler"}
    return [_pace(earlier[one.key], one) for one in after if one.key in earlier]


def _pace(before: Look, after: Look) -> Pace:
    seconds = max(after.at - before.at, 1e-9)

    def rate(*names: str) -> float:
        rise = sum(after.numbers.get(n, 0.0) - before.numbers.get(n, 0.0) for n in names)
        return max(rise, 0.0) / seconds

    return Pace(
        after.about, rate("steps"), rate("operations"), rate("bytes_started"),
        rate("bytes_sent", "server_bytes_sent"), rate("bytes_received", "server_bytes_received"),
        min(rate("wait_seconds"), 1.0), int(after.numbers.get("links", 0)),
        list(_flows(before, after, seconds)),
    )  # fmt: skip


def _flows(before: Look, after: Look, seconds: float) -> Iterator[Flow]:
    """Yield what each link moved; one that is new began with nothing."""
    earlier = {(one["peer"], one["way"]): one for one in before.links}
    for one in after.links:
        former = earlier.get((one["peer"], one["way"]), {})
        rises = [max(one[n] - former.get(n, 0), 0) / seconds
                 for n in ("bytes_sent", "bytes_received")]  # fmt: skip
        yield Flow(one["peer"], one["way"], *rises)


def in_one_line(found: Sequence[Pace]) -> str:
    """Return a line about a job: the pace of its workers, and the slowest of them.

    The worker that waits least is the slowest: the others wait for it.
    """
    workers = [one for one in found if one.about["role"] == "worker"]
    if not workers:
        return ""
    pace = max(one.steps for one in workers)
    what = f"{in_short(pace)} steps/s" if pace else (
        f"{in_short(max(one.operations for one in workers))} ops/s")  # fmt: skip
    nbytes = sum(one.bytes_started for one in workers) / len(workers)
    waiting = sum(one.waiting for one in workers) / len(workers)
    slowest = min(workers, key=lambda one: one.waiting)
    is_clear = len(workers) > 1 and waiting - slowest.waiting > 0.05
    last = f", slowest worker {slowest.about['rank']}" if is_clear else ""
    return f"{what}, {in_bytes(nbytes)}/s reduced, {waiting:.0%} waiting{last}"


def in_short(number: float) -> str:
    """Return a number with three digits, or as a whole one."""
    return f"{number:.3g}" if number < 1000 else f"{number:.0f}"


def in_bytes(number: float) -> str:
    """Return bytes with a unit."""
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB"
