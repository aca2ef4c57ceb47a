# SPDX-License-Identifier: Apache-2.0
"""A job that is made again from its log of views has the same contributors to every result."""

from __future__ import annotations

import pytest
from control_driver import Driver, make_config
from hypothesis import given, settings
from hypothesis import strategies as st

from fastps.control.commits import MAX_HELD_BYTES, entry_of, parts_of
from fastps.control.protocol import (
    BoardRead,
    Regroup,
    ResultsCommitted,
    ResultsLanded,
    Started,
    ViewLost,
)
from fastps.control.scheduler import Scheduler
from fastps.control.view_log import Replay, ViewRecord, read_records, write_records
from fastps.errors import ConfigError

SIZE, NAMES = 3, "ab"


class Training:
    """Workers whose results of two names land, each the next once the last is committed."""

    def __init__(self, views: list[ViewRecord]) -> None:
        self.driver = Driver(views=views, size=SIZE, num_servers=0, elastic_min=1, lease_s=5)
        self.peers = [self.driver.enter() for _ in range(SIZE)]
        self.contributors: dict[str, frozenset[int]] = {}
        self.survive()

    def living(self) -> list[int]:
        return [peer for peer, _, _ in self.driver.machine.members()]

    def survive(self) -> None:
        """Let all that have heard of a loss await the next view."""
        while self.driver.machine.is_changing:
            for peer in self.living():
                if isinstance(self.driver.last(peer), ViewLost):
                    self.driver.wait(peer)

    def view_of(self, peer: int) -> tuple[int, dict[str, int]]:
        """Return the generation that a worker is in, and its committed results by name."""
        generation, last = 0, dict.fromkeys(NAMES, 0)
        for message in self.driver.sent[peer]:
            if isinstance(message, Started):
                generation = message.job.generation
            elif isinstance(message, ResultsCommitted):
                last |= dict(map(parts_of, message.entries))
        return generation, last

    def land(self, place: int, name: str) -> None:
        peer = self.peers[place]
        if peer not in self.living():
            return
        generation, last = self.view_of(peer)
        before = {peer: len(self.driver.sent[peer]) for peer in self.living()}
        entry = entry_of(name, last[name] + 1)
        self.driver.say(peer, ResultsLanded(generation, (entry,)))
        took_part = frozenset(
            self.peers.index(peer)
            for peer, seen in before.items()
            for message in self.driver.sent[peer][seen:]
            if isinstance(message, ResultsCommitted)
        )
        if took_part:
            self.contributors[entry] = took_part
        self.survive()

    def die(self, place: int) -> None:
        if self.peers[place] in self.living() and len(self.living()) > 1:
            self.driver.die(self.peers[place])
            self.survive()


places, names = st.integers(0, SIZE - 1), st.sampled_from(NAMES)
landings = st.tuples(places, names)
deaths = st.tuples(places, st.none())
events = st.lists(st.one_of(landings, landings, landings, deaths), max_size=40)


@settings(max_examples=100, deadline=None)
@given(events, st.lists(landings, max_size=30))
def test_every_result_has_the_same_contributors_again(history, other_order):
    first = Training([])
    for place, name in history:
        if name is None:
            first.die(place)
        else:
            first.land(place, name)
    records = first.driver.records
    last = ViewRecord(len(records) + 1, first.driver.machine._in_view, {})
    again = Training([*records, last])
    for place, name in other_order:
        again.land(place, name)
    for _ in range(len(history)):
        for place in range(SIZE):
            for name in NAMES:
                again.land(place, name)
    assert first.contributors.items() <= again.contributors.items()
    assert [one.workers for one in again.driver.records] == [one.workers for one in records]


def test_views_between_losses_of_servers_are_one():
    records = [
        ViewRecord(1, (0, 1), {"a": 3, "7#": 2}),
        ViewRecord(2, (0, 1), {"a": 5, "7#": 1}),
        ViewRecord(3, (0,), {}),
    ]
    replay = Replay(records)
    assert replay.allows("a", 5)
    assert not replay.allows("a", 6)
    assert replay.allows("7#", 3)
    assert not replay.allows("7#", 4)
    for name, number in (("a", 5), ("7#", 2)):
        assert replay.next_loss is None
        replay.commit(name, number)
        assert not replay.next_view([0])  # one of them is still to come
    replay.commit("7#", 3)
    assert replay.next_loss == 1
    assert replay.next_view([0])
    assert replay.allows("a", 1000)
    assert replay.next_loss is None


@pytest.mark.parametrize("place", range(SIZE))
@pytest.mark.parametrize("n_views", [1, 2])
def test_a_loss_that_the_log_lacks_ends_the_job(place, n_views):
    """Of another worker, or of the same one before all that it contributed to."""
    views = [ViewRecord(1, (0, 1, 2), {"a": 1}), ViewRecord(2, (0, 1), {})][:n_views]
    training = Training(views)
    training.die(place)
    lost = training.driver.machine.first_cause
    assert lost is not None
    assert lost.rank == place
    assert "FASTPS_REPLAY does not lose it here" in lost.cause
    assert not training.driver.machine.is_changing


def test_a_worker_that_leaves_where_the_log_lacks_it_ends_the_job():
    training = Training([ViewRecord(1, (0, 1, 2), {"a": 1})])
    driver = training.driver
    for peer in training.peers:
        leaves = peer == training.peers[1]
        driver.say(peer, Regroup(driver.request(), "boundary", 1, 60.0, leaves))
    lost = driver.machine.first_cause
    assert lost is not None
    assert lost.rank == 1
    assert "it leaves the job; the log of FASTPS_REPLAY does not lose it here" in lost.cause


def test_a_loss_after_the_last_record_is_as_any_other():
    training = Training([ViewRecord(1, (0, 1, 2), {"a": 1})])
    for place in range(SIZE):
        training.land(place, "a")
    training.die(1)
    assert training.driver.machine.first_cause is None
    assert len(training.living()) == SIZE - 1


def test_a_view_has_one_number_on_all_workers():
    """Also on one that heard of a second loss before it was in the view after the first."""
    driver = Driver(size=4, num_servers=0, elastic_min=1, lease_s=5)
    workers = [driver.enter() for _ in range(4)]
    driver.die(workers[3])
    driver.wait(workers[0])
    driver.die(workers[2])
    for peer in workers[:2]:
        driver.wait(peer)
    for peer in workers[:2]:
        jobs = [one.job for one in driver.sent[peer] if isinstance(one, Started)]
        assert [job.view for job in jobs] == [1, 3]


def test_views_count_from_1_for_workers_that_begin_again_instead_of_going_on():
    driver = Driver(size=2, num_servers=0, elastic_min=1, lease_s=5)
    workers = [driver.enter(), driver.enter()]
    driver.die(workers[1])
    driver.leave(workers[0])
    assert [one.job.view for one in driver.events(driver.enter(), Started)] == [1]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}\n",
        b'{"view":2,"workers":[0],"committed":{}}\n',
        None,
        b'{"view":1,"workers":[0],"committed":{},"x":' + b"[" * 100_000,
        b'{"\xff":1}\n',
    ],
    ids=["empty", "no fields", "not the first", "no file", "deep", "not UTF-8"],
)
def test_what_is_no_log_is_refused(tmp_path, data):
    path = tmp_path / "views"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError, match="FASTPS_VIEW_LOG"):
        read_records(str(path))


def test_a_log_is_read_as_written(tmp_path):
    records = [ViewRecord(1, (0, 1), {"a#b": 3}, "worker 1 is lost"), ViewRecord(2, (0,), {})]
    for count in (1, 2):
        write_records(str(tmp_path / "views"), records[:count])
    assert read_records(str(tmp_path / "views")) == records


@pytest.mark.parametrize(
    ("wrong", "text"),
    [({"elastic_min": 0}, "fastps-run --min"), ({"view_log": "/proc/views"}, "/proc/views")],
)
def test_a_log_that_cannot_be_is_told_at_the_start(tmp_path, wrong, text):
    given = {"elastic_min": 1, "view_log": str(tmp_path / "views")}
    Scheduler(make_config(**given))
    with pytest.raises(ConfigError, match=f"FASTPS_VIEW_LOG.*{text}"):
        Scheduler(make_config(**given | wrong))


def test_another_number_of_workers_is_refused(tmp_path):
    write_records(str(tmp_path / "views"), [ViewRecord(1, (0, 1, 2), {})])
    with pytest.raises(ConfigError, match="3 workers; start as many"):
        Scheduler(make_config(size=2, elastic_min=1, replay=str(tmp_path / "views")))


def test_what_workers_joined_or_left_is_not_made_again(tmp_path):
    records = [ViewRecord(1, (0, 1), {"w": 3}, "worker 1 left", True), ViewRecord(2, (0,), {})]
    write_records(str(tmp_path / "views"), records)
    with pytest.raises(ConfigError, match="joined or left"):
        Scheduler(make_config(size=2, elastic_min=1, replay=str(tmp_path / "views")))


def committed_by_board(**lost: int) -> Training:
    """Let a worker be lost in a view with a board, of which the survivors read some commits."""
    training = Training([])
    driver = training.driver
    driver.die(training.peers[0])
    for peer in training.peers[1:]:
        driver.say(peer, BoardRead(1, tuple(entry_of(name, lost[name]) for name in lost)))
    training.survive()
    return training


def test_the_log_has_what_a_board_has_committed():
    training = committed_by_board(a=3, b=1)
    driver = training.driver
    assert [one.committed for one in driver.records] == [{"a": 3, "b": 1}]
    driver.say(training.peers[1], BoardRead(1, ("a#9",)))  # of a view that all have ended
    driver.say(training.peers[1], BoardRead(2, ("a#4",)))  # before it leaves
    driver.say(training.peers[1], BoardRead(2, ("a#7",)))  # once is all that it has to say
    driver.say(training.peers[2], BoardRead(2, ("a#5",)))
    for peer in training.peers[1:]:
        driver.leave(peer)
    assert [one.committed for one in driver.records] == [{"a": 3, "b": 1}, {"a": 5}]
    assert [one.workers for one in driver.records] == [(0, 1, 2), (1, 2)]


def test_a_board_of_too_many_names_is_a_lie():
    """The scheduler would keep them with the record of each view."""
    training = Training([])
    driver, liar = training.driver, training.peers[0]
    entries = tuple(f"{number:01000}#1" for number in range(MAX_HELD_BYTES // 1162 + 1))
    driver.say(liar, BoardRead(1, entries[:-1]))
    assert liar not in driver.closed
    driver.say(liar, BoardRead(1, entries))
    assert liar in driver.closed
    for peer in training.peers[1:]:
        assert "a board with results of more than 64 MiB" in driver.last(peer).lost.cause
    assert len(driver.records) == 1


def test_a_view_that_was_cut_short_keeps_the_record_of_the_one_before():
    training = Training([])
    driver = training.driver
    for peer in training.peers[:2]:
        driver.die(peer)
    driver.say(training.peers[2], BoardRead(1, ("a#3",)))
    training.survive()
    assert [(one.view, one.committed) for one in driver.records] == [(1, {"a": 3}), (2, {})]


@pytest.mark.parametrize("how", [{"force_distributed": True, "num_servers": 1}, {"replay": "x"}])
def test_the_scheduler_commits_where_workers_have_no_board(how):
    driver = Driver(**{"size": 2, "num_servers": 0, "elastic_min": 1, "lease_s": 5, **how})
    peers, _ = driver.start()
    started = driver.last(peers[0])
    assert isinstance(started, Started)
    assert not started.job.has_board
    driver.say(peers[0], BoardRead(1, ("a#3",)))
    driver.die(peers[0])
    assert [one.committed for one in driver.records] == [{}]
