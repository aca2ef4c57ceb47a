# SPDX-License-Identifier: Apache-2.0
"""A scheduler without sockets: drives a Membership and records what it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastps.config import Config, load
from fastps.control.actions import Action, Close, Finish, Note, Send
from fastps.control.membership import Membership
from fastps.control.protocol import (
    AwaitStart,
    Barrier,
    Blob,
    Declare,
    Join,
    Joined,
    Layout,
    Leave,
    Started,
    TensorSpec,
    ToMember,
    ToScheduler,
)
from fastps.control.view_log import ViewRecord
from fastps.types import DType


def make_config(**settings: object) -> Config:
    """Make the scheduler's settings without looking at the environment."""
    defaults: dict[str, object] = {
        "size": 2,
        "num_servers": 2,
        "token": "9f3a61c07be2d584",
        "job_id": "job",
        "start_watch_s": 0.0,
        "lease_s": 10.0,
    }
    return load(defaults | settings, {})


def make_spec(name: str = "w", shape: tuple[int, ...] = (10, 20), **changes: Any) -> TensorSpec:
    """Make the declaration of a float32 tensor."""
    count = 1
    for extent in shape:
        count *= extent
    fields = {"dtype": int(DType.FLOAT32), "partition_bytes": 4096, "chunk_bytes": 4096} | changes
    if "nbytes" not in fields:
        fields["nbytes"] = count * DType(fields["dtype"]).itemsize
    return TensorSpec(name, Layout(shape=shape, **fields))


MAX_IDLE_TICKS = 1000  # at one time; each member and request may be due then


class Driver:
    """Feeds events to a Membership; `now` is the time, which only tests move."""

    def __init__(
        self,
        machines: dict[tuple[str, int], str] | None = None,
        /,
        *,
        views: Sequence[ViewRecord] = (),
        **settings: object,
    ) -> None:
        self.config = make_config(**settings)
        self.now = 1000.0
        self.states: dict[int, str] = {}  # of the threads that send heartbeats, by process
        self.machine = Membership(
            self.config, now=self.now, machines=machines, replay=views,
            state_of=lambda peer, join: self.states.get(join.pid, ""),
        )  # fmt: skip
        self.sent: dict[int, list[ToMember]] = {}
        self.closed: set[int] = set()
        self.finish: Finish | None = None
        self.records: list[ViewRecord] = []  # of views that have ended
        self.is_apart = False  # whether every process is on a machine of its own
        self._peers = 0
        self._requests = 0

    def do(self, actions: list[Action]) -> None:
        """Record actions."""
        for action in actions:
            if isinstance(action, Send):
                self.sent.setdefault(action.peer, []).append(action.message)
            elif isinstance(action, Close):
                self.closed.add(action.peer)
            elif isinstance(action, Note):
                self.records[action.record.view - 1 : action.record.view] = [action.record]
            else:
                assert self.finish is None
                self.finish = action

    def say(self, peer: int, message: ToScheduler) -> None:
        """Let a peer send a message."""
        self.do(self.machine.receive(peer, message, self.now))

    def request(self) -> int:
        """Give a new request number."""
        self._requests += 1
        return self._requests

    def join(self, role: str = "worker", **changes: object) -> int:
        """Let a new process join; give its peer number."""
        self._peers += 1
        peer = self._peers
        fields: dict[str, object] = {
            "request": self.request(),
            "role": role,
            "rank": None,
            "local_rank": None,
            "local_size": None,
            "size": self.config.size if role == "worker" else 0,
            "num_servers": 0,
            "host": "10.0.0.1",
            "port": 7000 + peer,
            "pid": 100 + peer,
            "hostname": "node",
            "host_id": "boot/1",
            "machine": f"machine {peer}" if self.is_apart else "boot/1",
            "unix": f"unix{peer}" if role == "server" else "",
            "elastic_min": self.config.elastic_min,
        }
        self.say(peer, Join(**(fields | changes)))  # type: ignore[arg-type]
        return peer

    def wait(self, peer: int, timeout_s: float = 60.0) -> int:
        """Let a peer wait for the start."""
        number = self.request()
        self.say(peer, AwaitStart(number, timeout_s))
        return number

    def enter(self, role: str = "worker", **changes: object) -> int:
        """Let a new process join and wait for the start."""
        peer = self.join(role, **changes)
        assert isinstance(self.last(peer), Joined), self.last(peer)
        self.wait(peer)
        return peer

    def start(self) -> tuple[list[int], list[int]]:
        """Let everybody join; give the peers of workers and servers by rank."""
        servers = [self.enter("server") for _ in range(self.config.num_servers)]
        workers = [self.enter("worker") for _ in range(self.config.size)]
        for peer in workers + servers:
            assert isinstance(self.last(peer), Started)
        return workers, servers

    def declare(self, peer: int, *specs: TensorSpec, timeout_s: float = 10.0) -> int:
        """Let a worker declare tensors."""
        number = self.request()
        self.say(peer, Declare.of(number, specs, timeout_s))
        return number

    def barrier(self, peer: int, name: str = "b", timeout_s: float = 10.0) -> int:
        """Let a worker enter a barrier."""
        number = self.request()
        self.say(peer, Barrier(number, name, timeout_s))
        return number

    def blob(self, peer: int, root: int, data: bytes | None, timeout_s: float = 10.0) -> int:
        """Let a worker enter a blob."""
        number = self.request()
        self.say(peer, Blob(number, "o", root, data, timeout_s))
        return number

    def leave(self, peer: int, timeout_s: float = 10.0) -> int:
        """Let a peer leave in order."""
        number = self.request()
        self.say(peer, Leave(number, timeout_s))
        return number

    def die(self, peer: int, cause: str = "it was killed") -> None:
        """End a peer's control connection."""
        self.do(self.machine.closed(peer, cause, self.now))

    def advance(self, seconds: float) -> None:
        """Let time pass, with ticks when they are due and nobody silent."""
        end, n_idle = self.now + seconds, 0
        while True:
            due = self.machine.next_deadline()
            if due is None or due > end:
                break
            n_idle = n_idle + 1 if due <= self.now else 0
            assert n_idle < MAX_IDLE_TICKS, "the next deadline stays in the past: a busy loop"
            self.now = max(self.now, due)
            self.do(self.machine.tick(self.now))
        self.now = end

    def keep_alive(self) -> None:
        """Renew all leases."""
        for peer, _, _ in self.machine.members():
            self.machine.pulse(peer, self.now)

    def last(self, peer: int) -> ToMember:
        """Give what a peer was told last."""
        return self.sent[peer][-1]

    def events(self, peer: int, kind: type) -> list[ToMember]:
        """List what a peer was told, of one kind."""
        return [message for message in self.sent.get(peer, []) if isinstance(message, kind)]
