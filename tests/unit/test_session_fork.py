# SPDX-License-Identifier: Apache-2.0
"""What a session is in a forked child: nobody's, and its links end there."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import fastps
from fastps.config import load
from fastps.errors import NotInitializedError
from fastps.session.session import Session


def made() -> Session:
    """Join a job of one worker."""
    return Session(load({"size": 1, "num_servers": 0}, {}))


def in_child(look: Any) -> int:
    """Run look() in a forked child; give what it returns, a number below 100."""
    child = os.fork()
    if not child:
        try:
            os._exit(look())
        finally:
            os._exit(100)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_cannot_use_it():
    session = made()

    def look() -> int:
        try:
            session.check_usable()
        except NotInitializedError:
            return 1
        return 0

    assert in_child(look) == 1
    session.check_usable()
    assert session.is_ours


def test_a_forked_child_knows_its_number():
    fastps.init(size=1, num_servers=0)
    try:
        assert in_child(lambda: 10 * fastps.rank() + fastps.size() + fastps.local_size()) == 2
        assert in_child(lambda: fastps.is_initialized()) == 0
    finally:
        fastps.shutdown()


def test_links_end_in_a_child_that_is_forked_while_close_ends_them():
    session = made()
    ended: list[int] = []
    abandon = SimpleNamespace(abandon=lambda: ended.append(1))
    session.connections = abandon  # type: ignore[assignment]
    assert session._client is None  # as in the middle of close()
    assert in_child(lambda: len(ended)) == 1
    assert not ended
