# SPDX-License-Identifier: Apache-2.0
"""Small messages that come before they are asked for: a receiver bounds them itself.

A mailbox stands for a member that keeps to no bound, over every transport.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable

import numpy as np
import pytest
from exchange_fleet import Fleet
from transport_nets import NETS, TIMEOUT_S, Net, wait_until

from aids.mailbox import Mailbox
from aids.wire import FrameKind
from fastps.collectives._exchange import Exchange, Program
from fastps.collectives.schedule import Kind, Place, Step
from fastps.errors import FastPSError, ProtocolError, Status
from fastps.worker._engine import WorkerEngine

CHANNEL = 77
EAGER = 0x80
UNASKED_BYTES = 1 << 20
EACH = 128  # bytes that a message is charged beside its own
SIZES = [0, 8, 32 << 10]
ME, FLOODER = 1, 0


@pytest.fixture(params=NETS)
def net(request):
    """One transport with one I/O thread."""
    made = Net(request.param)
    yield made
    made.close()


def make_exchange() -> Exchange:
    return Exchange(me=ME, n_members=2, engine=WorkerEngine(me=ME, n_members=2))


def post_unasked(box: Mailbox, nbytes: int, number: int, peer: int = ME) -> None:
    """Send a message that nobody waits for."""
    box.post(
        peer, bytes(nbytes), kind=FrameKind.MESSAGE, key=CHANNEL, flags=EAGER,
        key_version=number, sender=FLOODER, status=nbytes,
    )  # fmt: skip


def allowed(nbytes: int) -> int:
    """How many messages of a size may come unasked."""
    return UNASKED_BYTES // (nbytes + EACH)


def message(kind: Kind, peer: int, nbytes: int) -> Program:
    """Make a program of one message."""
    place = Place.INPUT if kind is Kind.SEND else Place.OUTPUT
    return Program((Step(kind, peer, 0, place, 0, nbytes),), 0, range(2))


def check_named(exchange: Exchange) -> None:
    """See that an exchange has failed for what the flooder sent."""
    assert exchange.failure == (Status.PROTOCOL, FLOODER)
    assert "beyond the 1 MiB" in exchange.trouble_of(FLOODER)
    assert exchange.trouble_of(ME) == ""
    with pytest.raises(ProtocolError, match=f"member {FLOODER}"):
        exchange.start(message(Kind.RECEIVE, FLOODER, 0), CHANNEL, name="next")


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_sender_of_too_much_is_cut_off_and_named(net, nbytes):
    exchange, box = make_exchange(), Mailbox()
    net.connect(exchange, FLOODER, box, ME)
    for number in range(1, allowed(nbytes) + 1):
        post_unasked(box, nbytes, number)
    kept = lambda: exchange.statistics()["messages_kept"]  # noqa: E731
    wait_until(lambda: kept() == allowed(nbytes), "the arrival of what is allowed")
    assert exchange.failure is None
    for number in itertools.count(allowed(nbytes) + 1):
        try:
            post_unasked(box, nbytes, number)
        except FastPSError:
            break
    box.wait_ended(ME, timeout_s=TIMEOUT_S)
    wait_until(lambda: exchange.failure is not None, "the end of the link")
    check_named(exchange)
    assert kept() == allowed(nbytes)


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_sender_of_too_much_is_cut_off_in_shared_memory(nbytes):
    box = Mailbox(adopts=True)
    fleet = Fleet(2, strangers={FLOODER: box})
    exchange = fleet.exchanges[ME]
    for number in range(1, allowed(nbytes) + 1):
        post_unasked(box, nbytes, number)
    fleet.settle(range(2))
    assert exchange.failure is None
    post_unasked(box, nbytes, allowed(nbytes) + 1)
    fleet.settle(range(2))
    check_named(exchange)
    assert exchange.statistics()["messages_kept"] == allowed(nbytes)
    fleet.close()


def test_a_message_that_says_to_be_small_and_is_not(net):
    exchange, box = make_exchange(), Mailbox()
    net.connect(exchange, FLOODER, box, ME)
    out = np.zeros(64 << 10, np.uint8)
    operation = exchange.start(
        message(Kind.RECEIVE, FLOODER, out.nbytes), CHANNEL, name="large", output=out
    )
    post_unasked(box, out.nbytes, 1)
    box.wait_ended(ME, timeout_s=TIMEOUT_S)
    assert operation.wait(timeout_s=TIMEOUT_S) == Status.PROTOCOL
    assert exchange.failure == (Status.PROTOCOL, FLOODER)
    assert exchange.trouble_of(FLOODER) == ""


MANY_NOTES = 1 << 17
NOTES = {
    "ready": {"kind": FrameKind.READY, "status": 1 << 20},
    "offer": {"kind": FrameKind.OFFER, "status": 8},
    "refusal": {"kind": FrameKind.REFUSE, "status": int(Status.MISMATCH)},
}


def post_notes(box: Mailbox, fleet: Fleet, numbers: Iterable[int], **fields: int) -> None:
    """Speak of operations, and let what is said arrive now and then."""
    for number in numbers:
        box.post(ME, b"", key=CHANNEL, key_version=number, sender=FLOODER, **fields)
        if number % 64 == 0:
            fleet.settle(range(2))
    fleet.settle(range(2))


@pytest.mark.parametrize("what", NOTES)
def test_who_speaks_of_too_many_operations_is_cut_off_and_named(what):
    box = Mailbox(adopts=True)
    fleet = Fleet(2, strangers={FLOODER: box})
    exchange = fleet.exchanges[ME]
    post_notes(box, fleet, range(1, MANY_NOTES + 1), **NOTES[what])
    assert exchange.failure is None
    assert exchange.statistics()["messages_kept"] == MANY_NOTES
    post_notes(box, fleet, [MANY_NOTES + 1], **NOTES[what])
    assert exchange.failure == (Status.PROTOCOL, FLOODER)
    assert f"more than {MANY_NOTES} operations that have not begun" in exchange.trouble_of(FLOODER)
    fleet.close()


@pytest.mark.parametrize("what", NOTES)
def test_what_one_says_again_is_kept_once_and_what_begins_is_a_note_no_more(what):
    box = Mailbox(adopts=True)
    fleet = Fleet(2, strangers={FLOODER: box})
    exchange = fleet.exchanges[ME]
    kind = Kind.SEND if what == "ready" else Kind.RECEIVE
    nbytes = NOTES[what]["status"] if what != "refusal" else 8
    for number in range(1, 4):
        post_notes(box, fleet, [number] * 3, **NOTES[what])
        assert exchange.statistics()["messages_kept"] - (number > 1) <= number
        array = np.zeros(nbytes, np.uint8)
        place = {"input" if kind is Kind.SEND else "output": array}
        operation = exchange.start(
            message(kind, FLOODER, nbytes), CHANNEL, name=f"n{number}", **place
        )
        fleet.settle(range(2))
        if kind is Kind.RECEIVE and what == "offer":
            box.post(ME, bytes(8), kind=FrameKind.MESSAGE, key=CHANNEL, key_version=number,
                     sender=FLOODER, status=8)  # fmt: skip
            fleet.settle(range(2))
        status = Status.MISMATCH if what == "refusal" else 0
        assert operation.wait(timeout_s=TIMEOUT_S) == status
    fleet.close()


def test_who_reads_no_answers_is_cut_off():
    net = Net("unix")
    exchange, box = make_exchange(), Mailbox()
    net.connect(exchange, FLOODER, box, ME)
    array = np.zeros(8, np.uint8)
    sent = exchange.start(message(Kind.SEND, FLOODER, 8), CHANNEL, name="over", input=array)
    assert sent.wait(timeout_s=TIMEOUT_S) == Status.OK
    box.hesitate(ME, 1 << 30)
    with contextlib.suppress(FastPSError):  # the link has ended meanwhile
        for _ in range(3 * MANY_NOTES):
            box.post(ME, b"", kind=FrameKind.READY, key=CHANNEL, key_version=1, subject=7,
                     sender=FLOODER, status=8)  # fmt: skip
    wait_until(lambda: exchange.failure is not None, "the end of the link")
    assert exchange.failure == (Status.PROTOCOL, FLOODER)
    assert f"more than {MANY_NOTES} answers unread" in exchange.trouble_of(FLOODER)
    net.close()


@pytest.mark.parametrize("what", ["ready", "offer"])
def test_who_is_always_ahead_by_one_never_meets_the_bound(what):
    box = Mailbox(adopts=True)
    fleet = Fleet(2, strangers={FLOODER: box})
    exchange, array = fleet.exchanges[ME], np.zeros(8, np.uint8)
    program = message(Kind.SEND if what == "ready" else Kind.RECEIVE, FLOODER, 8)
    place = {"input" if what == "ready" else "output": array}
    for number in range(1, MANY_NOTES + 1000):
        post_notes(box, fleet, [number], kind=NOTES[what]["kind"], status=8)
        operation = exchange.start(program, CHANNEL, name="x", **place)
        fleet.settle(range(2))
        if what == "offer":
            box.post(ME, bytes(8), kind=FrameKind.MESSAGE, key=CHANNEL, key_version=number,
                     sender=FLOODER, status=8)  # fmt: skip
            fleet.settle(range(2))
        assert operation.wait(timeout_s=TIMEOUT_S) == Status.OK
        while number % 20_000 == 0 and box.has_letter():
            box.receive(timeout_s=TIMEOUT_S)
    assert exchange.failure is None
    assert exchange.statistics()["messages_kept"] == 1
    fleet.close()
