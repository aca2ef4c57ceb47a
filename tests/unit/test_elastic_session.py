# SPDX-License-Identifier: Apache-2.0
"""Decisions of an elastic session that need no other process."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from fastps.errors import FastPSError, PeerLostError
from fastps.session import elastic
from fastps.session.commit_log import CommitLog, Round
from fastps.session.elastic import ElasticSession


@pytest.fixture
def session() -> Any:
    made: Any = ElasticSession.__new__(ElasticSession)
    made.commits, made.view, made._active = CommitLog(), 1, {}
    made._changed, made._failed_round, made._round_of = threading.Condition(), None, 0
    made._groups = SimpleNamespace(world=None)
    return made


@pytest.mark.parametrize("error", [KeyboardInterrupt(), PeerLostError("worker 1 is lost")])
def test_no_round_follows_one_that_failed_here(session, monkeypatch, error):
    """Others may have completed it, and would complete the next with what this worker says."""
    rounds = []

    def gather(*_: object) -> list[Any]:
        rounds.append(1)
        if len(rounds) == 2:
            raise error
        return [[], []]

    monkeypatch.setattr(elastic, "gather_objects", gather)
    session._complete_round()
    with pytest.raises(type(error)):
        session._complete_round()
    for _ in range(2):
        with pytest.raises(FastPSError, match=r"lost|KeyboardInterrupt ended a round"):
            session._complete_round()
    assert len(rounds) == 2
    assert session.commits.last == Round(1, ())
