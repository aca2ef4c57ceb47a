# SPDX-License-Identifier: Apache-2.0
"""Senders that keep to the credit for what is not asked for are never cut off.

Two exchanges over pipes that are stepped by hand, in any order of sends, receives and frames.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from exchange_fleet import Fleet
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from test_unasked import CHANNEL, ME, allowed, message
from test_unasked import FLOODER as SENDER

from fastps.collectives._exchange import Operation
from fastps.collectives.schedule import Kind
from fastps.errors import Status


class Messages(RuleBasedStateMachine):
    """A sender far ahead of its receiver, or not: who keeps to the credit is never cut off."""

    @initialize(
        sizes=st.lists(st.sampled_from([0, 8, 5_000, 32 << 10, 40_000]), min_size=1, max_size=8),
        wrong=st.sets(st.integers(0, 40), max_size=3),
    )
    def begin(self, sizes: list[int], wrong: set[int]) -> None:
        self.fleet = Fleet(2)
        self.sizes, self.wrong = itertools.cycle(sizes), wrong
        self.sent: list[tuple[int, Operation]] = []
        self.received: list[tuple[np.ndarray[Any, Any], Operation]] = []

    @rule(count=st.sampled_from([1, 30, 400]))
    def send(self, count: int) -> None:
        for _ in range(count):
            nbytes, value = next(self.sizes), len(self.sent) % 256
            self.sent.append((nbytes, self.fleet.exchanges[SENDER].start(
                message(Kind.SEND, ME, nbytes), CHANNEL, name="send", is_numbered=True,
                input=np.full(nbytes, value, np.uint8),
            )))  # fmt: skip

    @rule(count=st.sampled_from([1, 30, 400]))
    def receive(self, count: int) -> None:
        for number in range(len(self.received), min(len(self.received) + count, len(self.sent))):
            out = np.zeros(self.sent[number][0] + (number in self.wrong), np.uint8)
            self.received.append((out, self.fleet.exchanges[ME].start(
                message(Kind.RECEIVE, SENDER, out.nbytes), CHANNEL, name="receive",
                is_numbered=True, output=out,
            )))  # fmt: skip

    @rule(member=st.integers(0, 1))
    def step(self, member: int) -> None:
        self.fleet.pipes[member].step()

    @rule()
    def settle(self) -> None:
        self.fleet.settle(range(2))

    def teardown(self) -> None:
        if not hasattr(self, "fleet"):
            return
        while len(self.received) < len(self.sent):
            self.receive(400)
        self.fleet.settle(range(2))
        assert [exchange.failure for exchange in self.fleet.exchanges] == [None, None]
        for number, (out, operation) in enumerate(self.received):
            status = operation.wait(timeout_s=0.0)
            assert status == (Status.MISMATCH if number in self.wrong else 0), number
            assert number in self.wrong or np.all(out == number % 256)
        self.fleet.close()


def test_who_keeps_to_the_credit_is_never_cut_off():
    run_state_machine_as_test(
        Messages, settings=settings(max_examples=40, stateful_step_count=30, deadline=None)
    )


def test_mistakes_take_no_credit_for_good():
    """Whoever sends on after many that were not wanted so still sends unasked."""
    fleet = Fleet(2)
    sender, receiver = fleet.exchanges
    data = np.zeros(32 << 10, np.uint8)
    for _ in range(4 * allowed(data.nbytes)):
        sent = sender.start(message(Kind.SEND, ME, data.nbytes), CHANNEL, name="send",
                            is_numbered=True, input=data)  # fmt: skip
        fleet.settle(range(2))
        assert sent.is_done, "it was sent unasked"
        receiver.start(message(Kind.RECEIVE, SENDER, 8), CHANNEL, name="receive",
                       is_numbered=True, output=np.zeros(8, np.uint8))  # fmt: skip
        fleet.settle(range(2))
    assert receiver.failure is None
    fleet.close()
