# SPDX-License-Identifier: Apache-2.0
"""Copies of what servers hold: whoever dies, each push of a survivor counts exactly once."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fastps.algorithms import server_copies
from fastps.algorithms.server_copies import Block, ServerCopies, cut, donors_of
from fastps.errors import ConfigError, DuplicateNameError, Status

WORKERS = 4
ELEMENTS = 12  # of two blocks
ACTIONS = st.sampled_from(["push", "push", "wait", (0,), (1,), (0, 1), (0, 0, 1, 1)])


class Part:
    """What an operation does with one block: it takes effect at a server, then lands here."""

    def __init__(self, apply, land, landing):
        self.apply, self.land, self.landing = apply, land, landing
        self.answer, self.has_landed = None, False

    def advance(self):
        """Take the next step, if the others have made it possible."""
        if self.answer is None:
            self.answer = self.apply()
        elif not self.has_landed:
            self.land(self.answer)
            self.has_landed = True


class Operation:
    """An operation in flight, as an OperationHandle."""

    def __init__(self, parts):
        self.parts, self.has_failed = parts, False

    def wait_status(self, timeout_s):
        if all(part.has_landed for part in self.parts):
            return Status.OK
        return Status.PEER_LOST if self.has_failed else None

    def poll(self):
        return self.wait_status(0.0) is not None

    def fail(self):
        """End the links: what has not landed may be torn."""
        self.has_failed = True
        for part in self.parts:
            if not part.has_landed and part.landing is not None:
                part.landing[::2] = np.nan


class Servers:
    """What the servers of one view hold."""

    def __init__(self):
        self.values, self.rows = {}, {}


class Host:
    """The session of one worker."""

    config = SimpleNamespace(
        partition_bytes=1 << 20, chunk_bytes=8 * (8 + 2 * WORKERS), op_timeout_s=1.0,
        start_timeout_s=1.0,
    )  # fmt: skip

    def __init__(self, number, servers):
        self.first_place = number, WORKERS
        self.rank, self.size, self.view = number, WORKERS, 1
        self.servers, self.operations = servers, []

    def in_a_view(self, call):
        call()

    def keep_copies(self, copies):
        pass

    def begin_here(self, verb, arrays=(), names=(), *more, out=None, **options):
        if verb == "declare":
            return None
        if verb == "broadcast_async":
            root, (names,) = names, more
            parts = [
                self.seed(name, array, root == self.rank)
                for name, array in zip(names, arrays, strict=True)
            ]
        elif out is arrays:
            parts = [self.sum_rows(arrays)]
        else:
            parts = [
                self.push(name, source, landing)
                for name, source, landing in zip(names, arrays, out, strict=True)
            ]
        operation = Operation(parts)
        self.operations.append(operation)
        if verb == "broadcast_async":  # at once for the root, as soon as it comes for others
            for part in parts:
                part.advance()
                part.advance()
        return operation

    def seed(self, name, array, is_root):
        values = self.servers.values

        def apply():
            if is_root:
                values[name] = array.copy()
            found = values.get(name)
            return None if found is None else found.copy()

        def land(answer):
            if not is_root:
                array[...] = answer

        return Part(apply, land, None if is_root else array)

    def push(self, name, source, landing):
        values = self.servers.values

        def apply():
            values[name] = values[name] + source
            return values[name].copy()

        def land(answer):
            landing[...] = answer

        return Part(apply, land, landing)

    def sum_rows(self, ages):
        rows = self.servers.rows
        rows[self.rank] = ages[self.rank].copy()

        def apply():
            if len(rows) < self.size:
                return None
            return np.array([rows[rank] for rank in range(self.size)])

        def land(answer):
            ages[...] = answer

        return Part(apply, land, None)


class CopiesMachine(RuleBasedStateMachine):
    """Workers push and wait, answers are late, and members die, also while a view begins."""

    def __init__(self):
        super().__init__()
        servers = Servers()
        self.hosts, self.copies, self.arrays, self.flights = {}, {}, {}, {}
        self.begun = dict.fromkeys(range(WORKERS), 0)
        for number in range(WORKERS):
            host = self.hosts[number] = Host(number, servers)
            array = self.arrays[number] = np.full(ELEMENTS, float(-number))
            self.copies[number] = ServerCopies(host, ["w"], [array], "p ")
            assert (array == 0).all()

    def pick(self, number):
        """Return one of the living."""
        living = sorted(self.hosts)
        return living[number % len(living)]

    def push(self, me):
        """Begin a push, or fail to."""
        if me in self.flights:
            if not self.flights[me].poll():  # else it is over, and not waited for
                with pytest.raises(DuplicateNameError):
                    self.copies[me].push_async([None])
            return
        delta = np.zeros(ELEMENTS)
        delta[me] = delta[ELEMENTS - 1 - me] = 1.0  # of both blocks
        self.flights[me] = self.copies[me].push_async([delta])
        self.begun[me] += 1

    def advance(self, me, places=(0, 0, 1, 1)):
        """Let blocks take effect, or land."""
        host = self.hosts[me]
        if host.operations and not host.operations[-1].has_failed:
            parts = host.operations[-1].parts
            for place in places:
                parts[place % len(parts)].advance()

    def wait(self, me):
        """Take an answer that is there."""
        if me in self.flights and self.flights[me].poll():
            self.flights.pop(me).wait()
            assert self.arrays[me][me] == self.arrays[me][ELEMENTS - 1 - me] == self.begun[me]

    def act(self, me, what):
        """Let a worker, or a server for it, take a step."""
        if what == "push":
            self.push(me)
        elif what == "wait":
            self.wait(me)
        else:
            self.advance(me, what)

    @rule(steps=st.lists(st.tuples(st.integers(0, WORKERS - 1), ACTIONS), min_size=1, max_size=12))
    def go_on(self, steps):
        """Let workers push and wait, and servers answer."""
        for number, what in steps:
            self.act(self.pick(number), what)

    @rule(
        victims=st.sampled_from([(), (), (), (0,), (2,), (1, 3)]),
        steps=st.lists(st.tuples(st.integers(0, WORKERS - 1), ACTIONS), max_size=30),
        again=st.booleans(),
    )
    def lose(self, victims, steps, again):
        """Lose servers, and maybe workers; `again`: before the next view has begun for all."""
        renewals = self.begin_view(victims)
        for number, what in steps:
            me = self.pick(number)
            if me in renewals:
                self.renew(renewals, me)
            else:
                self.act(me, what)
        if again:
            renewals = self.begin_view(())
        while renewals:
            for me in list(renewals):
                self.renew(renewals, me)

    def begin_view(self, victims):
        """End the view for all, and return the renewals of the next one."""
        for victim in victims:
            if victim in self.hosts and len(self.hosts) > 1:
                del self.hosts[victim], self.copies[victim]
                self.flights.pop(victim, None)
        servers = Servers()
        for rank, host in enumerate(self.hosts[number] for number in sorted(self.hosts)):
            for operation in host.operations:
                operation.fail()
            host.operations = []
            host.rank, host.size, host.servers = rank, len(self.hosts), servers
            host.view += 1
        return {me: [copies.renewal(), None] for me, copies in self.copies.items()}

    def renew(self, renewals, me):
        """Let the renewal of one worker go on, if what it waits for is there."""
        steps, waits_for = renewals[me]
        if waits_for is not None:
            for part in waits_for.parts:
                part.advance()
                part.advance()
            if not waits_for.poll():
                return
        renewals[me][1] = next(steps, None)
        if renewals[me][1] is None:
            del renewals[me]

    @invariant()
    def every_state_has_the_pushes_that_it_counts(self):
        """Whatever is known anywhere is a sum of whole pushes, and has none twice."""
        for me, copies in self.copies.items():
            first, second = copies._all
            for number in range(WORKERS):
                assert first.known[number] == first.pushes()[number] <= self.begun[number]
                assert second.known[3 - number] == second.pushes()[number]
            acknowledged = self.begun[me] - (me in self.flights)
            assert first.pushes()[me] in (acknowledged, self.begun[me])

    def teardown(self):
        """Let all end, and compare what the servers hold."""
        for me in self.hosts:
            while me in self.flights:
                self.advance(me)
                self.wait(me)
        for host in self.hosts.values():
            found = host.servers.values["w [0]"] if host.servers.values else np.zeros(WORKERS)
            for me in self.hosts:
                assert found[me] == self.begun[me]


TestCopies = CopiesMachine.TestCase
TestCopies.settings = settings(max_examples=80, stateful_step_count=12)


def test_counters_carry(monkeypatch):
    monkeypatch.setattr(server_copies, "BASE", 4)
    block = Block("b", np.zeros(3, np.float32), 2)
    for push in range(1, 40):
        block.fill(np.ones(3, np.float32), 1)
        block.known += block.source
        block.sent += 1
        assert block.pushes() == [0, push]
    assert (block.known[:3] == 39).all()


def test_blocks_cover_an_array_and_share_its_memory():
    array = np.zeros((5, 7), np.float32)
    blocks = cut("w", array, 2, 4 * (4 + 8))
    assert [one.name for one in blocks] == [f"w [{begin}]" for begin in range(0, 35, 8)]
    for one in blocks:
        one.known += 1
        one.hand_out()
    assert (array == 1).all()
    assert [one.name for one in cut("e", array[:0], 2, 48)] == ["e [0]"]
    with pytest.raises(ConfigError, match="raise FASTPS_CHUNK_BYTES"):
        cut("w", array, 100, 48)


def test_the_newest_copy_is_given_by_the_lowest_rank():
    assert donors_of(np.array([[3, -1, 5], [4, -1, 5], [4, -1, 2]])) == [1, 0, 0]
