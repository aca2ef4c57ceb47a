# SPDX-License-Identifier: Apache-2.0
"""What a worker decides before it has links, and what it closes where it cannot go on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fastps.config import load
from fastps.control.protocol import PeerLost, ViewLost
from fastps.errors import ConfigError, PeerLostError, TransportTimeout, ViewChangedError
from fastps.native.condition import Flag
from fastps.session import connections
from fastps.session.connections import Connections
from fastps.transport import shm


@pytest.mark.parametrize(
    ("settings", "why", "is_shared"),
    [
        ({"size": 2}, "", True),
        ({"size": 2}, "/dev/shm is full", False),
        ({"size": 2, "shared_memory": False}, "/dev/shm is full", False),
        ({"size": 1}, "/dev/shm is full", True),  # nobody to share it with
    ],
)
def test_who_cannot_share_memory_says_why(monkeypatch, caplog, settings, why, is_shared):
    monkeypatch.setattr(shm, "can_share", lambda nbytes: why)
    assert connections._shares(load(settings, {})) == is_shared
    is_told = bool(why) and settings == {"size": 2}
    assert [one.getMessage() for one in caplog.records] == (
        [f"{why}; this worker reduces over sockets instead"] if is_told else []
    )


def test_a_status_that_cannot_be_ends_the_connections():
    one: Any = object.__new__(Connections)
    one.closed = 0

    def close() -> None:
        one.closed += 1

    one.close = close
    one.job = SimpleNamespace(me=0, local_rank=0)
    one._config = load({"size": 2, "metrics_port": 1234, "metrics_host": "0.0.0.0"}, {})
    with pytest.raises(ConfigError, match="open to other machines"):
        one.begin_status(dict)
    assert one.closed == 1


@pytest.mark.parametrize(
    ("error", "is_asked"),
    [
        (TransportTimeout("worker 1 did not come"), True),
        (ViewChangedError("call again"), True),
        (PeerLostError("worker 2 is lost"), False),  # says it already
        (ConfigError("not allowed"), False),
    ],
)
@pytest.mark.parametrize("is_told", [False, True])
def test_a_start_that_fails_names_the_loss_behind_it(monkeypatch, error, is_asked, is_told):
    monkeypatch.setattr(connections, "_NEWS_S", 0.0)
    one: Any = object.__new__(Connections)
    one._told_loss, one._is_told = None, Flag()
    one._last_job, one._fail, one._on_event = None, list[int]().append, list[Any]().append
    lost = PeerLost("worker", 2, "node", 7, "died")
    if is_told:
        one._take(ViewLost(2, lost, survives=True))
    assert one._loss_behind(error) == (lost if is_asked and is_told else None)


def test_who_is_lost_is_lost_for_an_exchange_that_is_there_or_is_made_later():
    heard, gone, cut = list[Any](), list[int](), list[int]()
    one: Any = object.__new__(Connections)
    one._lost, one.peer_links, one._on_event = [], None, heard.append
    one._told_loss, one._is_told = None, Flag()
    one.client = SimpleNamespace(job=SimpleNamespace(me=0))
    early, late = (PeerLost("worker", rank, "node", 7, "died", goes_on=True) for rank in (2, 1))
    one._take(early)
    assert one._lost == [2]
    one.exchange = SimpleNamespace(lose=gone.append)
    one.peer_links = SimpleNamespace(lose=cut.append)
    one._take(late)
    assert one._lost == [2, 1]
    assert gone == cut == [1]
    assert heard == [early, late]
