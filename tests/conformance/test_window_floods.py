# SPDX-License-Identifier: Apache-2.0
"""A member that asks for a window more often than an honest one can is cut off and named."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
from transport_nets import TIMEOUT_S, Net, wait_until

from aids.mailbox import Mailbox
from aids.wire import FrameKind
from fastps.collectives._exchange import Exchange
from fastps.errors import FastPSError, Status
from fastps.graph._windows import Window, Windows, window_bytes
from fastps.reduce import reduce_kernel
from fastps.types import DType, ReduceOp
from fastps.worker._engine import WorkerEngine

ME, FLOODER = 1, 0
PUT, ADD, GET, LOCK, UNLOCK = 1, 2, 3, 6, 8
NUMBER = 77  # of the window
UNKNOWN = 78
MAX_CLAIMS, MAX_REPLIES, MAX_ANSWERS = 256, 8, 1 << 17
LARGE = 2 << 20  # elements: more than a socket takes


class Owner:
    """A member with a window, and a mailbox in the place of its neighbour."""

    def __init__(self, count: int) -> None:
        self.net = Net("unix")
        engine = WorkerEngine(me=ME, n_members=2)
        self.exchange = Exchange(me=ME, n_members=2, engine=engine)
        self.windows, self.box = Windows(self.exchange), Mailbox()
        self.net.connect(self.exchange, FLOODER, self.box, ME)
        array = np.zeros(count, np.float32)
        self.nbytes = array.nbytes
        room = np.zeros(window_bytes(array.nbytes, 1) + 64, np.uint8)
        start = -room.ctypes.data % 64
        self.window = Window(
            self.windows, "w", NUMBER, array.view(np.uint8), room[start:], [FLOODER],
            itemsize=4, dtype=int(DType.FLOAT32), sum=reduce_kernel(ReduceOp.SUM, DType.FLOAT32),
            mix=reduce_kernel(ReduceOp.MIX, DType.FLOAT32), zero_init=True,
        )  # fmt: skip
        self.window.connect([(FLOODER, 0)], [], {})

    def post(self, kind: int, number: int, *, key: int = NUMBER) -> None:
        """Let the neighbour send a request, or what it puts."""
        payload = bytes(self.nbytes) if kind in (PUT, ADD) else b""
        self.box.post(ME, payload, kind=int(FrameKind.WINDOW), flags=kind, key=key,
                      key_version=number, sender=FLOODER, dtype=int(DType.FLOAT32))  # fmt: skip

    def close(self) -> None:
        """End everything."""
        self.exchange.leave()
        self.net.close()
        self.exchange.dismiss()
        assert self.windows.stop(timeout_s=TIMEOUT_S)


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner(LARGE)
    yield made
    made.close()


def check_cut_off(owner: Owner) -> None:
    """See that the neighbour's link has ended for what it sent."""
    wait_until(lambda: owner.exchange.failure is not None, "the end of the link")
    assert owner.exchange.failure == (Status.PROTOCOL, FLOODER)
    assert "claimed the mutex of one window, or fetched" in owner.exchange.trouble_of(FLOODER)


def test_claims_on_a_mutex_are_bounded(owner):
    for turn in range(3):  # what is released counts no more
        for number in range(MAX_CLAIMS):
            owner.post(LOCK, number)
        for number in range(MAX_CLAIMS * (turn < 2)):
            owner.post(UNLOCK, number)
    for _ in range(MAX_CLAIMS):  # the first one is granted, and with it the others
        owner.box.receive(timeout_s=TIMEOUT_S)
    assert owner.exchange.failure is None
    owner.post(LOCK, MAX_CLAIMS)
    check_cut_off(owner)


def test_arrays_that_leave_for_one_member_are_bounded(owner):
    owner.box.hesitate(ME, 1 << 30)  # it reads nothing
    try:
        for number in range(4 * MAX_REPLIES):
            owner.post(GET, number)
    except FastPSError:
        pass  # the link has ended meanwhile
    check_cut_off(owner)


def test_one_that_reads_fetches_as_often_as_it_likes():
    owner = Owner(1000)
    for number in range(10 * MAX_REPLIES):
        owner.post(GET, number)
        owner.box.receive(timeout_s=TIMEOUT_S)
    assert owner.exchange.failure is None
    owner.close()


FLOODS = {
    "put": [(PUT, NUMBER)],
    "accumulate": [(ADD, NUMBER)],
    "a put to a window that is not there": [(PUT, UNKNOWN)],
    "a get from a window that is not there": [(GET, UNKNOWN)],
    "a claim that is released": [(LOCK, NUMBER), (UNLOCK, NUMBER)],
}


@pytest.mark.parametrize("what", FLOODS)
def test_answers_that_a_member_does_not_read_are_bounded(what):
    owner = Owner(2)
    owner.box.hesitate(ME, 1 << 30)  # it reads nothing
    with contextlib.suppress(FastPSError):  # the link has ended meanwhile
        for number in range(3 * MAX_ANSWERS):
            for kind, key in FLOODS[what]:
                owner.post(kind, number, key=key)
    wait_until(lambda: owner.exchange.failure is not None, "the end of the link")
    assert owner.exchange.failure == (Status.PROTOCOL, FLOODER)
    assert f"more than {MAX_ANSWERS} answers unread" in owner.exchange.trouble_of(FLOODER)
    owner.close()


def test_one_that_reads_puts_as_often_as_it_likes():
    owner = Owner(2)
    for turn in range(9):
        numbers = range(turn * (MAX_ANSWERS // 8), (turn + 1) * (MAX_ANSWERS // 8))
        for number in numbers:
            owner.post(PUT, number)
        for _ in numbers:
            owner.box.receive(timeout_s=TIMEOUT_S)
    assert owner.exchange.failure is None
    owner.close()
