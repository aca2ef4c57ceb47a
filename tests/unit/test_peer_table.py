# SPDX-License-Identifier: Apache-2.0
"""Two members that dial each other in any order end with one link, whatever overtakes what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.security.handshake import NoPlaceError
from fastps.transport.peer_links import PeerState, PeerTable


class Pair:
    """Two members and what is under way between them: dials, and answers to dials."""

    def __init__(self) -> None:
        self.tables = {2: PeerTable(2), 5: PeerTable(5)}
        self.links: dict[int, set[int]] = {2: set(), 5: set()}  # by side: who dialled it
        self.moves: list[tuple[str, int]] = []
        self.waiting: set[int] = set()

    def use(self, me: int) -> None:
        """Let a member want its link."""
        if self.tables[me].begin(7 - me):
            self.moves.append(("dial", me))

    def move(self, index: int) -> None:
        """Let one thing that is under way arrive."""
        what, dialler = self.moves.pop(index % len(self.moves))
        other = 7 - dialler
        if what == "dial":
            try:
                self.tables[other].admit(dialler)
            except NoPlaceError:
                self.moves.append(("no", dialler))
            else:
                self.tables[other].opened(dialler)
                self.links[other].add(dialler)
                self.waiting.discard(other)
                self.moves.append(("yes", dialler))
        elif what == "yes":
            assert self.tables[dialler].dialled(other), "who was let in has the link"
            self.tables[dialler].opened(other)
            self.links[dialler].add(dialler)
        elif self.tables[dialler].refused(other):
            if self.tables[dialler].state(other) is not PeerState.OPEN:
                self.waiting.add(dialler)
        else:
            raise AssertionError("the lower one's connection was refused")


@given(st.lists(st.one_of(st.sampled_from([2, 5]), st.integers(10, 99)), max_size=12))
def test_both_sides_have_one_and_the_same_link(steps):
    pair = Pair()
    for step in steps:
        if step in (2, 5):
            pair.use(step)
        elif pair.moves:
            pair.move(step)
    while pair.moves:
        pair.move(0)
    assert not pair.waiting, "who was refused has got the other's connection"
    assert pair.links[2] == pair.links[5]
    assert len(pair.links[2]) == (1 if any(step in (2, 5) for step in steps) else 0)


def test_a_second_connection_is_refused():
    table = PeerTable(1)
    table.admit(3)
    with pytest.raises(NoPlaceError, match="connection of member 3: the link to it is chosen"):
        table.admit(3)
    table.opened(3)
    with pytest.raises(NoPlaceError, match="member 3: the link to it is open"):
        table.admit(3)
    assert not table.begin(3)


def test_a_dial_that_fails_may_be_tried_again():
    table = PeerTable(1)
    assert table.begin(3)
    assert not table.begin(3)
    assert not table.refused(3)
    table.give_up(3)
    assert table.state(3) is PeerState.NONE
    assert table.begin(3)
    assert table.refused(0)


def test_what_carries_nothing_makes_room_for_another():
    table = PeerTable(1)
    table.admit(3)
    table.failed(3)
    table.admit(3)
    table.opened(3)
    table.failed(3)
    assert table.begin(3)
    table.failed(3)
    assert table.state(3) is PeerState.DIALLING


def test_nobody_dials_itself():
    table = PeerTable(1)
    with pytest.raises(ValueError, match="is this process"):
        table.begin(1)
    with pytest.raises(NoPlaceError):
        table.admit(1)
