# SPDX-License-Identifier: Apache-2.0
"""No member makes a table of the scheduler grow without a bound; the others go on."""

from __future__ import annotations

import msgspec
import pytest
from control_driver import Driver, make_spec

from fastps.collectives.objects import encode_object
from fastps.contract.partition import MAX_PIECES
from fastps.control import collectives, declarations, stall_inquiry
from fastps.control.collectives import MAX_HELD_BYTES, MAX_MEETINGS
from fastps.control.protocol import (
    LENGTH,
    MAX_BLOB_BYTES,
    Blob,
    BlobData,
    Declared,
    Dispute,
    Done,
    Dropped,
    Failed,
    Forget,
    Locate,
    Malformed,
    StallTold,
    Tell,
    TensorPoisoned,
    Waiting,
    pack,
    unpack_to_scheduler,
)
from fastps.control.stall_inquiry import MAX_ASKED
from fastps.errors import ProtocolError

LIAR = 1  # its rank


def started(size: int = 2) -> tuple[Driver, list[int]]:
    driver = Driver(size=size, num_servers=0)
    workers, _ = driver.start()
    return driver, workers


def failed(driver: Driver, peer: int) -> Failed:
    last = driver.last(peer)
    assert isinstance(last, Failed), last
    return last


class TestMeetings:
    def test_who_waits_in_too_many_is_refused_and_others_are_not(self):
        driver, workers = started()
        for number in range(MAX_MEETINGS):
            driver.barrier(workers[LIAR], f"b{number}", 100.0)
        assert not driver.events(workers[LIAR], Failed)
        driver.barrier(workers[LIAR], "one too many")
        assert (
            f"worker 1 is already waiting in {MAX_MEETINGS} others"
            in failed(driver, workers[LIAR]).message
        )
        number = driver.barrier(workers[0], "of an honest one")
        assert not driver.events(workers[0], Failed)
        driver.barrier(workers[0], "b7")
        assert driver.barrier(workers[LIAR], "of an honest one")
        assert Done(number) in driver.sent[workers[0]]

    def test_objects_of_one_worker_keep_none_of_another_away(self):
        driver, workers = started()
        data = bytes(MAX_BLOB_BYTES)
        for index in range(MAX_HELD_BYTES // MAX_BLOB_BYTES):
            driver.say(workers[LIAR], Blob(900 + index, f"o{index}", LIAR, data, 10.0))
        driver.say(workers[LIAR], Blob(999, "one too many", LIAR, b"x", 10.0))
        assert "bytes of worker 1 that other" in failed(driver, workers[LIAR]).message
        driver.say(workers[0], Blob(1, "o", 0, data, 10.0))
        driver.say(workers[LIAR], Blob(1000, "o", 0, None, 10.0))
        assert driver.last(workers[LIAR]) == BlobData(1000, data)

    def test_names_to_forget_count(self, monkeypatch):
        monkeypatch.setattr(collectives, "MAX_HELD_BYTES", 10_000)
        driver, workers = started()
        names = tuple((f"w{number}", 0) for number in range(60))
        for first in range(5):
            driver.say(workers[LIAR], Forget(900 + first, names[first:], 10.0))
        assert [one.request for one in driver.events(workers[LIAR], Failed)] == [902, 903, 904]

    def test_ended_disputes_are_kept_up_to_a_bound(self, monkeypatch):
        monkeypatch.setattr(collectives, "MAX_MEETINGS", 8)
        driver, workers = started()
        for version in range(1, 40):
            driver.say(workers[LIAR], Dispute(900 + version, "w", version, "a sum", 0.5))
            driver.keep_alive()
            driver.advance(0.6)
        assert len(driver.machine._collectives._disputes) == 8
        driver.say(workers[0], Dispute(1, "w", 39, "an average", 0.5))
        assert "worker 1 started a sum" in failed(driver, workers[0]).message


class TestQuestions:
    def ask(self, driver: Driver, peer: int, number: int, members=(0, 1)) -> None:
        driver.say(peer, Waiting(number, f"place {number}", 1, "an operation", members, 60.0))

    def test_one_worker_cannot_have_others_asked_without_a_bound(self):
        driver, workers = started()
        for number in range(1, 500):
            self.ask(driver, workers[LIAR], number)
        assert len(driver.events(workers[0], Locate)) == MAX_ASKED
        assert driver.last(workers[LIAR]) == StallTold(499, "")
        self.ask(driver, workers[0], 1000)
        assert len(driver.events(workers[LIAR], Locate)) == 1
        driver.keep_alive()
        driver.advance(2 * stall_inquiry.ANSWER_S)
        assert len(driver.events(workers[LIAR], StallTold)) == 499
        self.ask(driver, workers[LIAR], 500)
        assert len(driver.events(workers[0], Locate)) == MAX_ASKED + 1

    def test_who_joins_a_question_that_is_open_is_counted_too(self):
        driver, workers = started(3)
        for number in range(1, 500):
            message = Waiting(number, "place", 1, "an operation", (0, 1, 2), 60.0)
            driver.say(workers[LIAR], message)
        assert len(driver.events(workers[LIAR], StallTold)) == 499 - MAX_ASKED

    def test_a_member_is_asked_once_however_often_it_is_named(self):
        driver, workers = started()
        self.ask(driver, workers[LIAR], 1, members=(0,) * 1000)
        assert len(driver.events(workers[0], Locate)) == 1


class TestNames:
    @pytest.fixture(autouse=True)
    def few(self, monkeypatch):
        monkeypatch.setattr(declarations, "MAX_ALONE", 10)

    def declare(self, driver: Driver, peer: int, *names: str) -> bool:
        number = driver.declare(peer, *(make_spec(name) for name in names))
        last = driver.last(peer)
        assert isinstance(last, Declared | Failed)
        assert last.request == number
        return isinstance(last, Declared)

    def test_names_that_one_worker_alone_declares_are_bounded(self):
        driver, workers = started()
        assert self.declare(driver, workers[LIAR], *map(str, range(10)))
        assert not self.declare(driver, workers[LIAR], "one too many")
        text = failed(driver, workers[LIAR]).message
        assert "worker 1 declares 11 names" in text
        assert "declare the same names on all workers" in text
        assert self.declare(driver, workers[0], *(f"honest {number}" for number in range(10)))
        assert self.declare(driver, workers[0], *map(str, range(5)))
        assert self.declare(driver, workers[LIAR], *(f"again {number}" for number in range(5)))
        assert not self.declare(driver, workers[LIAR], "one too many")
        assert self.declare(driver, workers[LIAR], *map(str, range(10)))

    def test_their_bytes_are_bounded(self, monkeypatch):
        monkeypatch.setattr(declarations, "MAX_ALONE_BYTES", 4000)
        driver, workers = started()
        assert self.declare(driver, workers[LIAR], "a" * 1000, "b" * 1000)
        assert not self.declare(driver, workers[LIAR], "c" * 1000)
        assert self.declare(driver, workers[0], "c" * 1000)

    def test_what_all_declare_is_not_bounded_by_it(self):
        driver, workers = started()
        for first in range(0, 100, 10):
            for peer in workers:
                assert self.declare(driver, peer, *map(str, range(first, first + 10)))

    def test_a_job_of_one_worker_is_ahead_of_nobody(self):
        driver = Driver(size=1, num_servers=0)
        (worker,), _ = driver.start()
        assert self.declare(driver, worker, *map(str, range(100)))

    def test_what_is_forgotten_counts_no_more(self):
        driver, workers = started()
        for first in range(0, 40, 10):
            names = [str(number) for number in range(first, first + 10)]
            assert self.declare(driver, workers[LIAR], *names)
            for peer in workers:
                forget = Forget(driver.request(), tuple((name, 0) for name in names), 10.0)
                driver.say(peer, forget)
        assert not driver.machine._declarations._alone[LIAR]

    def test_a_worker_that_never_drops_what_is_forgotten_costs_ids_alone(self, monkeypatch):
        monkeypatch.setattr(declarations, "MAX_UNRELEASED", 8)
        driver, workers = started()
        for number in range(30):
            for peer in workers:
                assert self.declare(driver, peer, "w")
            for peer in workers:
                driver.say(peer, Forget(1000 + number, (("w", 1),), 10.0))
            driver.say(workers[0], Dropped(1000 + number))
        table = driver.machine._declarations
        assert len(table._unreleased) == 8
        assert not table._free_ids
        driver.say(workers[LIAR], Dropped(1029))
        assert len(table._free_ids) == 1

    def test_requests_that_wait_are_bounded(self):
        driver = Driver(size=2, num_servers=1)
        workers, _ = driver.start()  # whose server does not answer
        for number in range(declarations.MAX_WAITING):
            driver.declare(workers[LIAR], make_spec(str(number % 10)))
        assert not driver.events(workers[LIAR], Failed)
        driver.declare(workers[LIAR], make_spec("0"))
        assert "waits for 64 declarations already" in failed(driver, workers[LIAR]).message
        driver.declare(workers[0], make_spec("0"))
        assert not driver.events(workers[0], Failed)

    def test_who_contradicts_all_names_makes_no_flood_of_words(self, monkeypatch):
        monkeypatch.setattr(declarations, "MAX_ALONE", 1000)
        driver, workers = started()
        names = [str(number) for number in range(500)]
        assert self.declare(driver, workers[0], *names)
        shape = (1,) * 60
        driver.declare(workers[LIAR], *(make_spec(name, shape) for name in names))
        told = driver.events(workers[0], TensorPoisoned)
        assert len(told) == 500
        assert all("worker 1 declare" in one.message for one in told)
        assert max(len(one.message) for one in told[declarations.MAX_FULL_TEXTS :]) < 100


@pytest.mark.parametrize("kind", ["Declare", "Forget", "ResultsLanded"])
def test_no_message_has_more_names_than_a_job_may_have(kind):
    many = [["", 0]] * (MAX_PIECES + 1)
    fields = {"Declare": [7, [], many, 1.0], "Forget": [7, many, 1.0],
              "ResultsLanded": [7, ["#1"] * (MAX_PIECES + 1)]}  # fmt: skip
    body = msgspec.msgpack.encode([kind, *fields[kind]])
    if kind == "ResultsLanded":
        with pytest.raises(Exception, match="length <= 1048576"):
            unpack_to_scheduler(body)
        return
    found = unpack_to_scheduler(body)
    assert isinstance(found, Malformed)
    assert "length <= 1048576" in found.message


def test_what_others_have_to_decode_is_short():
    """It is many small values, and each takes up to 150 bytes."""
    body = bytes(pack(Tell((0,), bytes(MAX_BLOB_BYTES // 8))))[LENGTH.size :]
    assert isinstance(unpack_to_scheduler(body), Tell)
    body = bytes(pack(Tell((0,), bytes(MAX_BLOB_BYTES // 8 + 1))))[LENGTH.size :]
    with pytest.raises(ProtocolError, match="length <= 8388608"):
        unpack_to_scheduler(body)


def test_bounds_leave_room_for_the_largest_honest_jobs():
    """One worker is ahead of all others by 100 000 names, and as many again."""
    name, layout = "model.decoder.layers.99.self_attention.query.weight", make_spec().layout
    counts = {f"{name}{number}": {"": 1} for number in range(100_000)}
    assert len(encode_object((0, counts))) < MAX_BLOB_BYTES // 8  # to be told to others
    assert declarations.MAX_ALONE > 200_000
    assert 200_000 * declarations._charge(name, layout) < declarations.MAX_ALONE_BYTES
